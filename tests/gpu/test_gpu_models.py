"""Whole models on a GPU in bfloat16: every family, through every path, against float32 on a CPU.

Kernels of head sizes 64 and 128 are compiled first (see conftest.py).
"""

from __future__ import annotations

import functools
import pathlib

import pytest
import torch
from tests.gpu.models import (
    CUTS,
    DRAWN,
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
    written,
)
from tests.support.solo_engine import SoloEngine

from medha_worker.attention.fp8_scales import FP8
from medha_worker.device import ComputeDevice, device_of
from medha_worker.graphs import CudaGraphRecorder

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.kernels(64, 128),
]


@pytest.fixture(scope="module")
def device() -> ComputeDevice:
    return device_of("cuda")


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return written(MODELS[family], tmp_path_factory.mktemp(family))


@functools.cache
def expected(folder: pathlib.Path, family: str) -> torch.Tensor:
    return exact(folder, prompt(MODELS[family]))


def on_the_gpu(folder: pathlib.Path, device: ComputeDevice, recorded: bool) -> SoloEngine:
    engine = SoloEngine(folder, pages=64, dtype=torch.bfloat16, device=device)
    if recorded:
        engine.record(CudaGraphRecorder(), GRAPHS, CUTS)
    return engine


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("steps", STEPS)
def test_logits_are_those_of_float32_on_every_path(
    steps: str, recorded: bool, family: str, folder: pathlib.Path, device: ComputeDevice
) -> None:
    engine = on_the_gpu(folder, device, recorded)
    actual = logits_of(engine, prompt(MODELS[family]), STEPS[steps])
    assert off(actual, expected(folder, family)) < OFF


@pytest.mark.parametrize("chunk", [1024, 64, 13])
def test_greedy_tokens_are_near_the_maximum_however_a_prompt_is_cut(
    chunk: int, family: str, folder: pathlib.Path, device: ComputeDevice
) -> None:
    engine, model = on_the_gpu(folder, device, True), MODELS[family]
    texts = [prompt(model, seed) for seed in (1, 2, 3)]
    actual = engine.generate(texts, DRAWN, chunk=chunk)
    assert len({token for drawn in actual for token in drawn}) > DRAWN
    for text, drawn in zip(texts, actual, strict=True):
        assert below(folder, text, drawn) < EPSILON


@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["bf16", "fp8"])
def test_needles_two_hundred_thousand_tokens_back_are_found(
    kv_dtype: torch.dtype | None, tmp_path: pathlib.Path, device: ComputeDevice
) -> None:
    tokens = 200_000
    folder = written(copying(tokens), tmp_path)
    engine = SoloEngine(
        folder, pages=tokens // 64 + 16, dtype=torch.bfloat16, kv_dtype=kv_dtype, device=device
    )
    with torch.inference_mode():
        actual = needles(engine, tokens, 4096)
    assert actual > (0.97 if kv_dtype is None else 0.85)
