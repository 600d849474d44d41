"""Decode batches replayed whole: which are, and that they mean what single launches do.

Recording is a GPU's; here the same work is called again, into the same buffers.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.recalling_prompts import recalling
from tests.support.solo_engine import SoloEngine

from medha.batch import Chunk
from medha_worker.attention.flashinfer_plan import GRAPH_ROWS
from medha_worker.attention.kernel_interface import Attention, AttentionPlan, Partial, Span
from medha_worker.graphs import SIZES, FixedPlan, Graphs, Replay, Work, recorded, size_for
from medha_worker.inputs import InputBuilder
from medha_worker.kv.pages import KvPages
from medha_worker.model.checkpoint_writer import FAMILIES, TinyModel
from medha_worker.model.rope import Rotary
from medha_worker.sequences import DeviceSlots, Sequences


def decode(seq: int, groups: tuple[int, ...] = (0,), length: int = 1, yields: bool = True) -> Chunk:
    return Chunk(seq, 9, length, groups, groups[-1], (), yields, length == 1)


@given(st.integers(1, 300))
def test_a_batch_takes_the_smallest_size_that_holds_it(count: int) -> None:
    size = size_for([decode(seq) for seq in range(count)], 0, SIZES)
    assert SIZES[-1] == GRAPH_ROWS
    fitting = [size for size in SIZES if size >= count]
    assert size == (fitting[0] if fitting else None)


def test_chunks_and_shared_rows_run_launch_by_launch() -> None:
    assert size_for([decode(1), decode(2)], 0, (1, 2, 4)) == 2
    assert size_for([decode(1), decode(2, length=5)], 0, (1, 2, 4)) is None
    assert size_for([decode(1), decode(2, groups=(0, 1))], 0, (1, 2, 4)) is None
    assert size_for([decode(1), decode(2, yields=False)], 0, (1, 2, 4)) is None
    assert size_for([], 0, (1, 2, 4)) is None
    assert size_for([decode(1)], 0, ()) is None


class Padded:
    """A fixed plan on a CPU: idle rows read one token of the spare page."""

    def __init__(self, attention: Attention, rows: int, spare: int) -> None:
        self._attention, self._rows, self._spare = attention, rows, spare
        self._plan: AttentionPlan

    def fits(self, spans: Sequence[Span]) -> bool:
        return len(spans) <= self._rows

    def plan(self, spans: Sequence[Span]) -> None:
        idle = np.array([self._spare], dtype=np.int64)
        rest = [Span(row, 1, 0, idle, True) for row in range(len(spans), self._rows)]
        self._plan = self._attention.plan([*spans, *rest])

    def run(self, *tensors: Any, **more: Any) -> Partial:
        return self._plan.run(*tensors, **more)


class Again:
    """Records by doing the work once more, into the memory of the first result."""

    def __init__(self, bytes_each: int = 0) -> None:
        self.recorded, self.replays, self._each = 0, 0, bytes_each

    def __call__(self, work: Work) -> tuple[torch.Tensor, Replay]:
        self.recorded += 1
        out = work()

        def replay() -> None:
            self.replays += 1
            out.copy_(work())

        return out, replay

    def used_bytes(self) -> int:
        return self.recorded * self._each


def with_graphs(engine: SoloEngine, record: Again, pages: int, **more: Any) -> Graphs:
    """Give the engine a pool with a spare page, and graphs."""
    c = engine.config
    kv = KvPages(range(c.layers), pages, c.kv_heads, 16, c.head_dim, spare=1)
    rotary = Rotary(c.rope, c.head_dim)

    def fixed(rows: int, window: int) -> FixedPlan:
        return Padded(engine.attention, rows, kv.pages)

    def turns(rows: int) -> torch.Tensor:
        return rotary.turns(torch.zeros(rows, dtype=torch.int64), [(rows, 0)])

    with torch.inference_mode():
        graphs = recorded(
            0, engine.model, kv, turns, fixed, c.windows_in(range(c.layers)), record, **more
        )
    engine.kv = kv
    engine.inputs = InputBuilder(
        Sequences(0, DeviceSlots()),
        engine.attention,
        rotary,
        kv,
        c.vocab,
        embeds=True,
        windows=c.windows_in(range(c.layers)),
        choose=graphs.choose,
    )
    return graphs


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mistral, a narrow window"])
def test_replayed_decodes_draw_what_launched_ones_do(checkpoint: Any, family: str) -> None:
    model: TinyModel = FAMILIES[family]
    folder: pathlib.Path = checkpoint(model)
    prompts = [recalling(length, model.vocab, length) for length in (40, 9, 70)]
    plain = SoloEngine(folder, pages=64, page_tokens=16)
    expected = plain.generate(prompts, 12, chunk=32)
    engine, record = SoloEngine(folder, pages=64, page_tokens=16), Again()
    with_graphs(engine, record, 64, sizes=(1, 2, 4))
    assert engine.generate(prompts, 12, chunk=32) == expected
    assert record.recorded == 3 and record.replays == 11, "every decode batch, padded to four rows"
    spare = engine.kv.page(0, engine.kv.pages)
    assert spare.any() and not spare[:, :, 1:].any(), "idle rows wrote its first token alone"


def test_rows_that_shrink_leave_no_slot_behind(checkpoint: Any) -> None:
    folder: pathlib.Path = checkpoint(TinyModel())
    engine, record = SoloEngine(folder, pages=64, page_tokens=16), Again()
    with_graphs(engine, record, 64, sizes=(4,))
    for seq, length in ((1, 20), (2, 30), (3, 25)):
        engine.start(seq, recalling(length, 512, seq))
        engine.sample((seq, length))
    engine.sample((1, 1), (2, 1), (3, 1))
    before = engine.kv.memory.clone()
    engine.sample((2, 1))
    changed = (engine.kv.memory != before)[:, : engine.kv.pages].any(-1).any(3).any(2).sum()
    assert record.replays == 2
    assert int(changed) == engine.config.layers, "one token in each layer"


def test_recording_ends_where_its_memory_does(checkpoint: Any) -> None:
    engine = SoloEngine(checkpoint(TinyModel()), pages=64, page_tokens=16)
    record = Again(bytes_each=10)
    graphs = with_graphs(engine, record, 64, sizes=(1, 2, 4, 8), most_bytes=20)
    assert record.recorded == 2
    chunks = [decode(seq) for seq in range(3)]
    assert graphs.choose(chunks, {}) is None, "no graph holds three"
