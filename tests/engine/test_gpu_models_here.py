"""The judges of whole models on a GPU, over the kernels' oracle on a CPU: they pass what is right,
and find what is wrong."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch
from tests.engine.gpu_twin import attention_for
from tests.engine.test_engine_graphs import Again
from tests.gpu.models import (
    CUTS,
    EPSILON,
    GRAPHS,
    MODELS,
    OFF,
    STEPS,
    below,
    copying,
    exact,
    logits_of,
    needles,
    off,
    prompt,
)
from tests.support.solo_engine import SoloEngine

from medha.checkpoints.decoder_config import read_config
from medha_worker.attention.fp8_scales import FP8
from medha_worker.kv.pages import KvPages
from medha_worker.model.checkpoint_writer import TinyModel

Folder = Callable[[TinyModel], pathlib.Path]


def as_on_a_gpu(folder: pathlib.Path) -> tuple[SoloEngine, Again]:
    dtype = torch.bfloat16
    config, cpu = read_config(folder), torch.device("cpu")
    sizes = (config.heads, config.kv_heads, config.head_dim)
    attention = attention_for(*sizes, 64, dtype, dtype, cpu, latent=config.latent)
    engine = SoloEngine(folder, pages=16, dtype=torch.bfloat16, attention=attention)
    again = Again()
    engine.record(again, GRAPHS, CUTS)
    return engine, again


@pytest.mark.parametrize("family", MODELS)
def test_every_family_is_near_float32_in_graphs_and_in_pieces(
    family: str, checkpoint: Folder
) -> None:
    model = MODELS[family]
    folder = checkpoint(model)
    engine, again = as_on_a_gpu(folder)
    text = prompt(model)
    actual = exact(folder, text)
    in_pieces = model.layers + 1
    of_decode = in_pieces if model.family.startswith("deepseek") else 1
    for steps, replays in (("pieces", 4 * in_pieces), ("decodes", 20 * of_decode)):
        before = again.replays
        assert off(logits_of(engine, text, STEPS[steps]), actual) < OFF
        assert again.replays == before + replays


def test_drawn_tokens_lie_at_the_maximum_and_others_far_below(checkpoint: Folder) -> None:
    model = MODELS["llama"]
    folder = checkpoint(model)
    text = prompt(model, 2)
    (drawn,) = as_on_a_gpu(folder)[0].generate([text], 6, chunk=64)
    assert below(folder, text, drawn) < EPSILON
    assert below(folder, text, [*drawn[:3], (drawn[3] + 1) % model.vocab, *drawn[4:]]) > EPSILON


def test_keys_that_are_written_elsewhere_are_found_out(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS["llama"]
    folder = checkpoint(model)
    write = KvPages.write

    def shifted(
        kv: KvPages,
        layer: int,
        rows: torch.Tensor,
        slots: tuple[torch.Tensor, torch.Tensor],
        written: torch.Tensor | None = None,
    ) -> None:
        write(kv, layer, rows, (slots[0], (slots[1] + 1) % kv.page_tokens), written)

    actual = exact(folder, prompt(model))
    engine, _ = as_on_a_gpu(folder)
    monkeypatch.setattr(KvPages, "write", shifted)
    assert off(logits_of(engine, prompt(model), STEPS["chunks"]), actual) > 2 * OFF


@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["float32", "fp8"])
def test_needles_are_found_by_a_model_that_looks_far_back(
    kv_dtype: torch.dtype | None, checkpoint: Folder
) -> None:
    folder = checkpoint(copying(200_000))
    engine = SoloEngine(folder, pages=64, kv_dtype=kv_dtype)
    assert needles(engine, 3000, 1000) > 0.97


def test_needles_are_lost_where_what_was_before_is_lost(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SoloEngine(checkpoint(copying(200_000)), pages=64)
    step = engine.step

    def forgets(*work: tuple[int, int]) -> torch.Tensor:
        logits = step(*work)
        if work[0][1] == 1000:
            engine.kv.memory.zero_()
        return logits

    monkeypatch.setattr(engine, "step", forgets)
    assert needles(engine, 3000, 1000) < 0.5
