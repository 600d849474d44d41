"""Keys and values kept in FP8: scales from the weights alone, and what they cost in accuracy."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.engine.test_engine_families import prefill
from tests.support.recalling_prompts import recalling
from tests.support.solo_engine import SoloEngine

from medha.checkpoints.decoder_config import read_config
from medha.config import WorkerConfig
from medha.topology import Coordinate, Topology
from medha_worker import weights
from medha_worker.attention.fp8_scales import FP8, FP8_MAX, Scales
from medha_worker.device import CPU
from medha_worker.engine import RankEngine
from medha_worker.kv.pages import KvPages
from medha_worker.model.checkpoint_writer import FAMILIES, TinyModel
from medha_worker.model.rope import Rotary

Tokens = npt.NDArray[np.int32]
Folder = Callable[[TinyModel], pathlib.Path]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
# Latents are never kept in FP8.
PLAIN = {name: model for name, model in FAMILIES.items() if "deepseek" not in name}
MODELS = PLAIN | {"yarn": TinyModel(rope=YARN, rope_theta=10_000.0)}


def scales_of(folder: pathlib.Path, shard: int = 0, tp: int = 1) -> tuple[Scales, ...]:
    config = read_config(folder)
    held = weights.load(
        weights.Checkpoint(folder), config, range(config.layers), shard, tp, torch.float32
    )
    stretch = Rotary(config.rope, config.head_dim).scale
    return weights.kv_scales(held, config.kv_heads // tp, config.head_dim, stretch)


@pytest.mark.parametrize("name", MODELS)
def test_no_key_or_value_passes_what_fp8_holds_and_few_fall_below(
    name: str, checkpoint: Folder
) -> None:
    folder = checkpoint(MODELS[name])
    engine = SoloEngine(folder, pages=10)
    prefill(engine, 1, recalling(600, 512, seed=1), 600)
    for layer, scales in enumerate(scales_of(folder)):
        kept = engine.kv.pool(layer)[:9].transpose(0, 1).transpose(1, 2).flatten(2)
        for scale, numbers in zip((scales.key, scales.value), kept.abs(), strict=True):
            numbers = numbers / scale.view(-1, 1)
            assert float(numbers.max()) <= FP8_MAX
            assert float(numbers.mean()) > 2.0**-6  # the least that keeps its three bits


def test_scales_are_powers_of_two_however_the_model_is_divided(checkpoint: Folder) -> None:
    folder = checkpoint(FAMILIES["qwen2"])
    whole = scales_of(folder)
    shards = [scales_of(folder, shard, 2) for shard in (0, 1)]
    for layer, scales in enumerate(whole):
        for name in ("query", "key", "value"):
            scale = getattr(scales, name)
            assert torch.equal(scale, scale.log2().round().exp2())
            parts = [getattr(shard[layer], name) for shard in shards]
            assert torch.equal(scale, torch.cat(parts))


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral, a narrow window"])
def test_logits_over_fp8_pages_are_close_and_do_not_depend_on_the_chunks(
    name: str, checkpoint: Folder
) -> None:
    """A chunk's own keys are attended to as they are kept. Where float32's last bit differs between
    chunks, a number may round to its neighbour in FP8, so nothing is equal to the bit."""
    folder = checkpoint(FAMILIES[name])
    tokens = recalling(900, 512, seed=3)
    exact = prefill(SoloEngine(folder, pages=15), 1, tokens, 300)
    actual = prefill(SoloEngine(folder, pages=15, kv_dtype=FP8), 1, tokens, 300)
    again = prefill(SoloEngine(folder, pages=15, kv_dtype=FP8), 1, tokens, 200, 1, 67, 1, 1, 333)
    off, apart = (float((x - actual).square().mean().sqrt() / exact.std()) for x in (exact, again))
    assert 1e-3 < off < 0.3 and apart < 0.1 * off
    assert float((actual.argmax(-1) == exact.argmax(-1)).float().mean()) > 0.85


def test_needles_far_back_are_still_found_over_fp8_pages(checkpoint: Folder) -> None:
    """Phrases that stand once, at all depths of a prompt, come again at its end: the copying heads
    must know from two words how each goes on. Their scores differ by little where they look one
    token back, so that rounding keys costs some; losing where keys stand costs all."""
    folder = checkpoint(
        TinyModel(layers=3, hidden=520, heads=2, kv_heads=2, head_dim=128, intermediate=128)
    )
    dice = np.random.default_rng(7)
    phrases = dice.permutation(np.arange(400, 512))[:96].astype(np.int32).reshape(12, 8)
    text = dice.integers(5, 400, (13, 230)).astype(np.int32)
    first = np.concatenate(
        [*(np.concatenate(both) for both in zip(text, phrases, strict=False)), text[-1]]
    )
    again = phrases[dice.permutation(12)]

    def hits(kv_dtype: torch.dtype | None) -> float:
        engine = SoloEngine(folder, pages=50, kv_dtype=kv_dtype)
        logits = prefill(engine, 1, np.concatenate([first, again.reshape(-1)]), 1000, 777)
        predicted = logits[len(first) :].argmax(-1).view(12, 8)[:, 1:-1]
        return float((predicted == torch.from_numpy(again[:, 2:])).float().mean())

    assert hits(None) > 0.97 and hits(FP8) > 0.85


def test_pages_keep_fp8_numbers_where_they_were_written() -> None:
    dice = torch.Generator().manual_seed(0)
    of = Scales(torch.ones(2), torch.tensor([0.25, 4.0]), torch.tensor([2.0, 0.5]))
    kv = KvPages(range(3, 4), 2, 2, 4, 8, FP8, scales=(of,), spare=1)
    rows = torch.randn(3, 4, 8, generator=dice) * 50
    rows[0, 0, 0], rows[1, 3, 2] = 1e6, -1e6  # beyond what there is: cut, and no NaN
    kept = kv.kept(3, rows)
    slots = (torch.tensor([1, 2]), torch.tensor([3, 0]))
    kv.write(3, kept, slots, torch.tensor([2, 0]))
    factor = torch.tensor([0.25, 4.0, 2.0, 0.5]).view(4, 1)
    most = FP8_MAX * factor
    for row, (page, offset) in zip((2, 0), ((1, 3), (2, 0)), strict=True):
        numbers = kv.page(3, page)[:, :, offset].float().reshape(4, 8) * factor
        assert torch.allclose(numbers, rows[row].clamp(-most, most), rtol=2.0**-4, atol=1e-3)
    assert len(kv.memory[0]) == 3 and kv.pages == 2 and kv.page_bytes == 2 * 2 * 4 * 8
    assert (kv.page(3, 0).view(torch.uint8) == 0).all()
    with pytest.raises(ValueError, match="0 scales for 1 layers"):
        KvPages(range(1), 2, 2, 4, 8, FP8)


def test_a_rank_keeps_its_pages_in_what_its_configuration_says(checkpoint: Folder) -> None:
    folder = checkpoint(TinyModel())
    config = WorkerConfig(
        replica="r",
        model="m",
        checkpoint=str(folder),
        max_context_tokens=2048,
        topology=Topology(),
        kv_dtype="fp8_e4m3",
        kv_pages=4,
        rank_bind="ipc:///nowhere",
    )
    engine = RankEngine(config, Coordinate(0, 0, 0), CPU, lambda done, total: None)
    assert engine.kv.memory.dtype == FP8 and engine.kv.page_bytes == 2 * 2 * 64 * 32
    expected = scales_of(folder)
    actual = [engine.kv.scales(layer) for layer in range(6)]
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine is not None and torch.equal(mine.key, theirs.key)
