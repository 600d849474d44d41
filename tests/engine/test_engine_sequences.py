"""Sequence state of a rank, and how steps become inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medha.batch import Batch, Chunk, Move
from medha.checkpoints.rope_settings import Rope
from medha.errors import EngineError, ProtocolError
from medha.messages.fields import Sampling
from medha.messages.ranks import SequenceStart, Step
from medha_worker.attention.kernel_interface import Partial, Span
from medha_worker.inputs import InputBuilder, StepInputs
from medha_worker.kv.pages import KvPages
from medha_worker.model.rope import Rotary
from medha_worker.parallel.collectives import SharedRows
from medha_worker.penalties import PenaltyTable
from medha_worker.sequences import PageTable, Sequences

T = 4


class Recording:
    """An attention that keeps the spans it was given."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def plan(self, spans: Any) -> Recording:
        self.spans = list(spans)
        return self

    def run(self, *_: Any, **__: Any) -> Partial:
        raise AssertionError("only planned here")


class Rank:
    """The first stage of one group."""

    def __init__(self, group: int = 0) -> None:
        self.penalties = PenaltyTable(100)
        self.sequences = Sequences(group, penalties=self.penalties)
        self.attention = Recording()
        kv = KvPages(range(1), 32, 1, T, 4)
        rotary = Rotary(Rope(), 4)
        self.builder = InputBuilder(self.sequences, self.attention, rotary, kv, 100, embeds=True)
        self.steps = 0

    def step(self, *chunks: Chunk, tokens: list[int] | None = None, **more: Any) -> StepInputs:
        self.steps += 1
        mine = [c for c in chunks if self.sequences.group in c.groups]
        ids = [1] * sum(c.length for c in mine) if tokens is None else tokens
        step = Step(
            step=self.steps,
            batch=Batch(self.steps, 0, chunks),
            tokens=np.array(ids, dtype=np.int32).tobytes(),
            **more,
        )
        return self.builder.build(step)

    def draws(self, inputs: StepInputs, token: int) -> None:
        """Record that the only yielding row drew `token`, on device and host."""
        self.builder.drew(inputs, torch.tensor([token]), [0])
        _, state, position = inputs.yielding[0]
        state.sampled(position, token)

    def span(self, row: int = 0) -> tuple[int, int, list[int], bool]:
        span = self.attention.spans[row]
        return span.length, span.held, span.pages.tolist(), span.tail


def start(seq: int, cached: tuple[tuple[int, int], ...] = (), **more: Any) -> SequenceStart:
    return SequenceStart(
        seq=seq,
        sampling=more.pop("sampling", Sampling()),
        prompt_tokens=more.pop("prompt", 8),
        cached=cached,
        **more,
    )


def placed(inputs: StepInputs) -> list[tuple[int, int]]:
    """(page, offset) of each row that is kept."""
    pages, offsets = inputs.slot_mapping
    return list(zip(pages.tolist(), offsets.tolist(), strict=True))


def test_chunks_fill_the_partial_page_and_then_the_new_ones() -> None:
    rank = Rank()
    first = rank.step(Chunk(7, 0, 6, (0,), 0, (20, 5)), starts=(start(7),))
    assert rank.span() == (6, 0, [20, 5], True)
    assert first.written is None
    assert placed(first) == [(20, 0), (20, 1), (20, 2), (20, 3), (5, 0), (5, 1)]
    second = rank.step(Chunk(7, 6, 3, (0,), 0, (9,)))
    assert rank.span() == (3, 6, [20, 5, 9], True)
    assert placed(second) == [(5, 2), (5, 3), (9, 0)]
    rank.step(Chunk(7, 9, 1, (0,), 0))
    assert rank.span() == (1, 9, [20, 5, 9], True)


def test_an_older_shard_attends_to_its_full_pages_and_writes_nothing() -> None:
    rank = Rank(group=1)
    inputs = rank.step(
        Chunk(7, 18, 3, (1, 2), 2, (4,)),
        Chunk(8, 0, 2, (1,), 1, (6,), yields=True),
        starts=(start(7, cached=((1, 30), (2, 31))), start(8)),
    )
    assert rank.span(0) == (3, 8, [30, 31], False)
    assert rank.span(1) == (2, 0, [6], True)
    assert inputs.written is not None
    assert inputs.written.tolist() == [3, 4]
    assert placed(inputs) == [(6, 0), (6, 1)]
    assert inputs.shared == (SharedRows(0, 3, (1, 2)),)
    assert [(row, state.seq, at) for row, state, at in inputs.yielding] == [(4, 8, 2)]


def test_the_tail_group_may_hold_any_older_pages() -> None:
    rank = Rank(group=2)
    rank.step(Chunk(7, 18, 3, (1, 2), 2, (4,)), starts=(start(7, cached=((0, 3), (4, 8))),))
    # logical 0 and the half-filled 4 before the chunk; 5 is new
    assert rank.span() == (3, 6, [3, 8, 4], True)


def test_a_switch_moves_pages_from_source_to_target() -> None:
    move = Move(
        id=1, seq=7, source=0, target=1, logical=(0, 2), from_pages=(10, 12), to_pages=(3, 4)
    )
    source, target = Rank(0), Rank(1)
    cached = ((0, 10), (1, 11), (2, 12))
    chunk = Chunk(7, 12, 1, (0, 1), 1, (9,))
    source.step(chunk, starts=(start(7, cached=cached),))
    target.step(chunk, starts=(start(7),))
    after = Chunk(7, 13, 1, (0, 1), 1)
    source.step(after, switches=(move,))
    target.step(after, switches=(move,))
    assert source.span() == (1, 4, [11], False)
    assert target.span() == (1, 9, [3, 4, 9], True)


def test_a_sequence_that_starts_with_a_switch_knows_its_pages_already() -> None:
    rank = Rank(1)
    move = Move(id=1, seq=7, source=0, target=1, logical=(0,), from_pages=(10,), to_pages=(3,))
    rank.step(
        Chunk(7, 8, 1, (0, 1), 1, (9,)), starts=(start(7, cached=((0, 3),)),), switches=(move,)
    )
    assert rank.span() == (1, 4, [3, 9], True)


def test_a_decode_of_minus_one_takes_the_token_sampled_last() -> None:
    rank = Rank()
    first = rank.step(Chunk(7, 0, 2, (0,), 0, (1,), yields=True), starts=(start(7),))
    rank.draws(first, 55)
    inputs = rank.step(Chunk(7, 2, 1, (0,), 0, decode=True), tokens=[-1])
    assert inputs.tokens.tolist() == [55]


def test_a_token_that_is_unknown_or_out_of_range_is_refused() -> None:
    rank = Rank()
    with pytest.raises(EngineError, match=r"row 0 .sequence 7. has token -1"):
        rank.step(Chunk(7, 2, 1, (0,), 0), tokens=[-1], starts=(start(7, cached=((0, 1),)),))
    with pytest.raises(EngineError, match=r"row 1 .sequence 7. has token 100"):
        rank.step(Chunk(7, 3, 2, (0,), 0, (2,)), tokens=[0, 100])


def test_contradictions_are_refused() -> None:
    rank = Rank()
    with pytest.raises(EngineError, match="sequence 9 is unknown to group 0"):
        rank.step(Chunk(9, 0, 1, (0,), 0, (1,)))
    with pytest.raises(ProtocolError, match="brings 2 tokens for 3 rows"):
        rank.step(Chunk(7, 0, 3, (0,), 0, (1,)), tokens=[1, 1], starts=(start(7),))
    with pytest.raises(ProtocolError, match="need logical pages"):
        rank.step(Chunk(7, 0, 5, (0,), 0, (1,)), starts=(start(7),))
    with pytest.raises(ProtocolError, match="must follow"):
        rank.step(Chunk(7, 0, 1, (0,), 0, (1,)))


def test_ended_sequences_are_forgotten_before_their_number_starts_again() -> None:
    rank = Rank()
    rank.step(Chunk(7, 0, 2, (0,), 0, (1,)), starts=(start(7),))
    rank.step(Chunk(7, 0, 2, (0,), 0, (6,)), ends=(7, 99), starts=(start(7),))
    assert rank.span() == (2, 0, [6], True)
    assert len(rank.sequences) == 1


def test_penalties_count_each_token_that_passes_once() -> None:
    rank = Rank()
    penalised = Sampling(frequency_penalty=1.0, repetition_penalty=2.0)
    history = np.array([3, 4], dtype=np.int32).tobytes()
    begin = start(7, sampling=penalised, prompt=2, history=history)
    chunk = Chunk(7, 0, 2, (0,), 0, (1,), yields=True)
    first = rank.step(chunk, tokens=[3, 4], starts=(begin,))
    rank.draws(first, 9)
    rank.step(Chunk(7, 2, 1, (0,), 0), tokens=[-1])
    rank.step(Chunk(7, 2, 2, (0,), 0), tokens=[9, 8])  # preempted, and computed again
    counts = rank.sequences[7].counts
    assert counts is not None and counts.known == 4
    scores = torch.full((1, 100), 4.0)
    rank.penalties.apply(scores, [0], [counts])
    changed = {at: score for at, score in enumerate(scores[0].tolist()) if score != 4.0}
    assert changed == {3: 2.0, 4: 2.0, 8: 1.0, 9: 1.0}
    draw = rank.sequences[7].draw(4)
    assert (draw.position, draw.emitted) == (4, 2)
    rank.step(Chunk(7, 0, 2, (0,), 0, (6,)), ends=(7,), starts=(start(7),))
    assert rank.sequences[7].counts is None


@pytest.mark.parametrize("needed", [{"grammar": "{}"}, {"bad_words": ((1, 2),)}])
def test_a_sequence_needs_its_output_as_long_as_it_has_a_grammar_or_bad_words(
    needed: dict[str, Any],
) -> None:
    sequences = Sequences(0, penalties=PenaltyTable(100))
    begin = start(7, sampling=Sampling(**needed)), start(8)
    nothing = Batch(1, 0, ())
    sequences.apply(Step(step=1, batch=nothing, tokens=b"", starts=begin))
    assert sequences.need_output([8, 7]) and not sequences.need_output([8, 9])
    sequences.apply(Step(step=2, batch=nothing, tokens=b"", starts=(start(7),)))
    assert not sequences.need_output([8, 7])


@given(st.lists(st.sampled_from(["append", "insert", "remove"]), max_size=12), st.data())
def test_a_page_table_is_an_ordered_map(steps: list[str], data: st.DataObject) -> None:
    table, model, fresh = PageTable(), dict[int, int](), iter(range(1000))
    for step in steps:
        if step == "append":
            first = table.last_logical + data.draw(st.integers(1, 3))
            ids = [next(fresh) for _ in range(data.draw(st.integers(0, 4)))]
            table.append(first, ids)
            model.update(zip(range(first, first + len(ids)), ids, strict=True))
        elif step == "insert":
            logical = data.draw(st.sets(st.integers(0, 20), max_size=4))
            added = [(n, next(fresh)) for n in logical]
            table.insert(added)
            model = dict(added) | model
        else:
            gone = data.draw(st.sets(st.integers(0, 20), max_size=6))
            table.remove(gone)
            model = {n: page for n, page in model.items() if n not in gone}
        assert table.ids.tolist() == [model[n] for n in sorted(model)]
        assert table.last_logical == max(model, default=-1)
        assert all((n in table) == (n in model) for n in range(22))
        assert table.before(10) == sum(n < 10 for n in model)
        for first in range(22):
            own = {n for n in model if n >= first}
            for last in range(first, 22):
                assert table.ends_with(first, last) == (own == set(range(first, last + 1)))
