"""Completed batches and reports: right sums, without a visit of every waiting request."""

from __future__ import annotations

import random
import sys
from collections import abc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.batch import Batch, BatchResult, Sampled
from medha.config import Scheduling
from medha.errors import ProtocolError
from medha.scheduling.scheduler import Scheduler
from medha.testing import Driven, SingleReplicaRouter, leftovers, request, scheduler, topology

GROUP = frozenset({0})


def calls(act: abc.Callable[[], object]) -> int:
    """Count the calls of Python functions within `act` (compiled ones are not seen)."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def crowd(waiting: int) -> Scheduler:
    plan = scheduler(topology(kvp=2, tokens_per_group=3000), pages=100)
    router = SingleReplicaRouter(plan)
    for number in range(waiting):
        plan.submit(router.decide(request(f"r{number}", 640, within_s=60.0), 0.0), 0.0)
    return plan


def decoding(sequences: int, page_tokens: int = 64) -> tuple[Scheduler, Batch]:
    """Return a scheduler and the first batch that holds a decode of every sequence."""
    plan = scheduler(settings=Scheduling(max_running=1024), page_tokens=page_tokens)
    for number in range(sequences):
        plan.submit(request(f"r{number}", 5, output_tokens=50, tpot_s=10.0), 0.0)
    batch = plan.next_batch(0.0, GROUP)
    while batch is not None and not all(chunk.decode for chunk in batch.chunks):
        plan.complete(batch.number, outcomes(batch), 0.0)
        batch = plan.next_batch(0.0, GROUP)
    assert batch is not None and len(batch.chunks) == sequences
    return plan, batch


def outcomes(batch: Batch) -> BatchResult:
    return BatchResult(tuple(Sampled(chunk.seq, False) for chunk in batch.chunks if chunk.yields))


def test_what_is_granted_by_is_what_a_report_says() -> None:
    plan = crowd(40)
    plan.submit(request("late", 640, within_s=1e-3), 0.0)
    plan.next_batch(0.0, frozenset({0}))
    load = plan.load(0.01)
    assert plan.ahead(0.01) == (load.ahead_s, load.relegated_ahead_s)
    assert load.ahead_s > load.relegated_ahead_s >= 0.0


def test_a_report_visits_no_waiting_request() -> None:
    few, many = crowd(40), crowd(400)
    few.load(0.0), many.load(0.0)
    assert calls(lambda: many.load(0.0)) <= calls(lambda: few.load(0.0)) + 8
    for plan, count in ((few, 40), (many, 400)):
        report = plan.load(0.0)
        assert report.waiting + report.prefilling == count > report.prefilling > 0


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_tokens_may_come_in_any_order(seed: int | None) -> None:
    plan, batch = decoding(20)
    sampled = [Sampled(chunk.seq, chunk.seq % 3 == 0) for chunk in batch.chunks]
    if seed is not None:
        random.Random(seed).shuffle(sampled)
    done = plan.complete(batch.number, BatchResult(tuple(sampled)), 0.0)
    expected = [chunk.seq for chunk in batch.chunks if chunk.seq % 3 == 0]
    assert [ended.seq for ended in done] == expected and len(expected) == 6


def test_a_batch_without_the_token_of_a_sequence_is_refused() -> None:
    plan, batch = decoding(3)
    missing = BatchResult(outcomes(batch).sampled[:-1])
    with pytest.raises(ProtocolError, match=f"brings no token of sequence {batch.chunks[-1].seq}"):
        plan.complete(batch.number, missing, 0.0)


@pytest.mark.parametrize("kvp", [1, 2, 3])
@pytest.mark.parametrize("spp", [1, 2])
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=6)
def test_tokens_and_keys_are_counted_where_they_lie(kvp: int, spp: int, seed: int) -> None:
    dice = random.Random(seed)
    plan = scheduler(topology(spp=spp, kvp=kvp, tokens_per_group=500), pages=60, page_tokens=16)
    driven = Driven(plan)
    names = [f"r{number}" for number in range(12)]
    driven.submit(
        request(
            name,
            dice.choice([dice.randint(1, 100), dice.randint(100, 900)]),
            dice.uniform(0.0, 1.0),
            within_s=2.0,
            output_tokens=dice.randint(1, 80),
        )
        for name in names
    )

    def check() -> None:
        for sequence in plan._state.sequences.values():
            held = sequence.tokens_by_group
            assert sum(held.values()) == sequence.scheduled_tokens
            assert sequence.groups == tuple(sorted(held))
            if sequence.group_of:
                assert sequence.tail == sequence.group_of[-1]
        for groups, decodes in plan._state.running.by_groups.items():
            assert decodes.keys == {
                group: sum(sequence.tokens_by_group[group] for sequence in decodes.prepared)
                for group in groups
            }

    for step in range(60):
        driven.at(0.05 * step, check)
    driven.at(0.7, lambda: plan.abort(dice.choice(names), driven.now))
    driven.run()
    assert leftovers(plan) == {}
