"""Layers cut at their attention: the same bytes as uncut, for whatever a batch holds.

Recording is a GPU's; here each piece is called again, into the same buffers.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.recalling_prompts import recalling
from tests.support.solo_engine import SoloEngine

from medha_worker.graphs import Replay, Work
from medha_worker.model.checkpoint_writer import FAMILIES, TinyModel
from medha_worker.model.rope import Rotary
from medha_worker.piecewise_graphs import SIZES, PiecewiseGraphs, fitting


@given(st.integers(1, 400))
def test_a_batch_takes_the_smallest_size_that_holds_it(rows: int) -> None:
    larger = [size for size in SIZES if size >= rows]
    assert fitting(rows, SIZES) == (larger[0] if larger else None)
    assert fitting(rows, ()) is None


class Again:
    """Records by doing the work; does it once more to replay."""

    def __init__(self, bytes_each: int = 0) -> None:
        self.recorded = self.replays = 0
        self._each = bytes_each

    def __call__(self, work: Work) -> tuple[torch.Tensor, Replay]:
        self.recorded += 1

        def replay() -> None:
            self.replays += 1
            work()

        return work(), replay

    def used_bytes(self) -> int:
        return self.recorded * self._each


def cut(engine: SoloEngine, sizes: Sequence[int], **more: Any) -> Again:
    """Let the engine's batches run in pieces."""
    record: Again = more.pop("record", Again())
    rotary = Rotary(engine.config.rope, engine.config.head_dim)

    def turns(rows: int) -> torch.Tensor:
        return rotary.turns(torch.zeros(rows, dtype=torch.int64), [(rows, 0)])

    engine.model = PiecewiseGraphs(engine.model, engine.kv, turns, record, sizes=sizes, **more)  # type: ignore[assignment]
    return record


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral, a narrow window"]
)
def test_pieces_give_the_bytes_of_the_whole(
    checkpoint: Callable[[TinyModel], pathlib.Path], family: str
) -> None:
    model: TinyModel = FAMILIES[family]
    folder = checkpoint(model)
    plain, pieced = (SoloEngine(folder, pages=64, page_tokens=16) for _ in range(2))
    rows = (33, 40, 9, 2, 1)
    record = cut(pieced, rows)
    assert record.recorded == len(rows) * (model.layers + 1)
    for engine in (plain, pieced):
        for seq in range(1, 4):
            engine.start(seq, recalling(90, model.vocab, seed=seq), rope_tokens=90)
    # Chunks with single rows, chunks alone, single rows alone, and batches of each size again.
    for work in (
        [(1, 33)],
        [(1, 1), (2, 39)],
        [(1, 1), (2, 1), (3, 7)],
        [(1, 1), (2, 1)],
        [(3, 33)],
        [(1, 1)],
        [(2, 9)],
    ):
        expected, actual = plain.step(*work), pieced.step(*work)
        assert expected.numpy().tobytes() == actual.numpy().tobytes()
    assert record.replays == 7 * (model.layers + 1)
    pages = slice(plain.kv.pages)  # without the spare one, where padding rows write
    assert torch.equal(plain.kv.memory[:, pages], pieced.kv.memory[:, pages])


def test_rows_beyond_a_batch_mean_nothing_to_it(
    checkpoint: Callable[[TinyModel], pathlib.Path],
) -> None:
    model = TinyModel()
    folder = checkpoint(model)
    prompts = [recalling(length, model.vocab, length) for length in (40, 9, 70)]
    expected = SoloEngine(folder, pages=64, page_tokens=16).generate(prompts, 12, chunk=24)
    engine = SoloEngine(folder, pages=64, page_tokens=16)
    record = cut(engine, (8, 30))
    assert engine.generate(prompts, 12, chunk=24) == expected
    assert record.replays == (2 + 1 + 3 + 11) * (model.layers + 1)


def test_a_batch_beyond_the_largest_size_is_launched(
    checkpoint: Callable[[TinyModel], pathlib.Path],
) -> None:
    folder = checkpoint(TinyModel())
    engine = SoloEngine(folder, pages=64, page_tokens=16)
    record = cut(engine, (4,))
    engine.start(1, recalling(60, 512), rope_tokens=60)
    engine.step((1, 5))
    assert record.replays == 0
    engine.step((1, 3))
    assert record.replays == TinyModel().layers + 1


def test_recording_ends_where_its_memory_does(
    checkpoint: Callable[[TinyModel], pathlib.Path],
) -> None:
    model = TinyModel()
    engine = SoloEngine(checkpoint(model), pages=64, page_tokens=16)
    record = cut(engine, (16, 2, 4, 8), record=Again(bytes_each=10), most_bytes=10 * model.layers)
    assert record.recorded == model.layers + 1
    assert isinstance(engine.model, PiecewiseGraphs) and engine.model.largest == 2
