"""The cap on what each length bucket may lose when more comes than can be done in time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.config import Scheduling
from medha.metrics import LENGTH_EDGES, LENGTH_LABELS, length_bucket
from medha.scheduling.feasibility import FREE, BucketLossCap, largest_feasible, select_victims
from medha.scheduling.sequence import Sequence
from medha.testing import Driven, request, scheduler

SHORT, LONG = length_bucket(1_000), length_bucket(30_000)


def sequence(number: int, tokens: int) -> Sequence:
    return Sequence(number, request(f"r{number}", tokens))


def test_buckets_are_those_of_the_reports() -> None:
    edges = list(itertools.chain.from_iterable((edge, edge + 1) for edge in LENGTH_EDGES))
    assert [length_bucket(tokens) for tokens in edges] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    assert len(LENGTH_LABELS) == FREE == 7


def test_a_bucket_that_lost_its_part_is_spared_and_another_gives_way() -> None:
    #   due       4   5   6     The second bucket, of the first job, may lose none.
    #   work      3   2   2     All three need 7 s: without the cap the one of 3 s would go.
    due, work, bucket = np.array([4.0, 5.0, 6.0]), np.array([3.0, 2.0, 2.0]), np.array([1, 0, 0])
    assert largest_feasible(due, work).tolist() == [False, True, True]
    left = [9.0, 0.0]
    assert largest_feasible(due, work, bucket, left).tolist() == [True, True, False]
    assert left == [8.0, 0.0]
    assert largest_feasible(due, work, bucket, [0.0, 1.0]).tolist() == [False, True, True]
    assert largest_feasible(due, work, bucket, [0.0, 0.0]).tolist() == [True, True, True]


def test_a_promise_that_is_spared_is_not_taken_back_while_others_are_there() -> None:
    due, work = np.array([2.0, 3.0, 3.5]), np.array([1.0, 2.5, 1.0])
    kept, margins = np.ones(3, dtype=np.bool_), due - work.cumsum()
    assert select_victims(margins, work, kept, 0.0) == [1]
    assert select_victims(margins, work, kept, 0.0, 1, np.array([False, True, False])) == [0]
    assert select_victims(margins, work, kept, 0.0, 1, np.array([True, True, False])) == [2]
    assert select_victims(margins, work, kept, 0.0, 1, np.array([True, True, True])) == []


def test_a_part_of_a_bucket_may_go_and_old_losses_are_forgotten() -> None:
    losses = BucketLossCap(0.25)
    for number in range(8):
        losses.count_decided(sequence(number, 500), 0.0)
    assert losses.remaining(0.0)[SHORT] == 2.0 and losses.remaining(0.0)[LONG] == 0.0
    gone = sequence(9, 500)
    losses.count_displaced(gone, 0.0)
    losses.count_displaced(gone, 0.0)  # it can go only once
    assert losses.remaining(0.0)[SHORT] == 1.0 and losses.displaced[SHORT] == 1
    losses.count_displaced(sequence(10, 500), 0.0)
    assert losses.remaining(0.0)[SHORT] == 0.0
    for number in range(8):
        losses.count_decided(
            sequence(number, 500), 3600.0
        )  # an hour later the two count for nothing
    assert losses.remaining(3600.0)[SHORT] == 2.0 and losses.displaced[SHORT] == 2


def overload(part: float, commit: bool = False) -> Driven:
    """Short prompts of 0.1 s each 0.125 s, and long ones of 3 s each 8 s: 118 % load."""
    plan = scheduler(settings=Scheduling(max_batch_s=0.05, commit=commit, max_bucket_loss=part))
    driven = Driven(plan)
    driven.submit(request(f"s{n}", 1_000, 0.125 * n, within_s=1.0) for n in range(770))
    driven.submit(request(f"l{n}", 30_000, 8.0 * n + 0.01, within_s=9.0) for n in range(12))
    driven.run()
    return driven


@pytest.mark.parametrize("part, least, most", [(1.0, 0, 0), (0.8, 2, 4), (0.5, 5, 12)])
def test_the_cap_keeps_long_prompts_from_being_shut_out(part: float, least: int, most: int) -> None:
    driven = overload(part)
    long = [name for name in driven.requests if name.startswith("l")]
    assert least <= sum(driven.in_time(name) for name in long) <= most


@pytest.mark.parametrize("part", [1.0, 0.5, 0.1, 0.0])
def test_promises_stand_above_the_cap(part: float) -> None:
    driven = overload(part, commit=True)
    promised = [name for name, admitted in driven.admitted.items() if admitted.promised]
    assert len(promised) > 500
    assert [name for name in promised if not driven.in_time(name)] == []


ARRIVALS = st.lists(
    st.tuples(
        st.floats(0.0, 0.3),  # seconds since the one before
        st.sampled_from([100, 900, 2_000, 7_000, 20_000]),
        st.sampled_from([0.2, 1.0, 4.0]),  # deadline beyond 1.2 × work
    ),
    min_size=5,
    max_size=40,
)


@given(ARRIVALS, st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9]))
@settings(max_examples=60, deadline=None)
def test_no_bucket_loses_more_than_its_part(
    arrivals: list[tuple[float, int, float]], part: float
) -> None:
    plan = scheduler(settings=Scheduling(max_batch_s=0.05, commit=False, max_bucket_loss=part))
    driven, decided, at_s = Driven(plan), [0] * FREE, 0.0
    for number, (gap_s, tokens, extra_s) in enumerate(arrivals):
        at_s += gap_s
        decided[length_bucket(tokens)] += 1
        within_s = 1.2e-4 * tokens + extra_s
        driven.submit([request(f"r{number}", tokens, at_s, within_s=within_s)])
    driven.run()
    assert set(driven.finished) == set(driven.requests)
    assert all(lost <= part * of + 1e-6 for lost, of in zip(plan.displaced(), decided, strict=True))


@pytest.mark.parametrize("rules", [Scheduling(max_bucket_loss=0.5), Scheduling(commit=False)])
def test_what_gives_way_costs_the_others_no_more_work(rules: Scheduling) -> None:
    plan = scheduler(settings=rules, batch_s=0.01)
    for number in range(40):
        plan.submit(request(f"r{number}", 600, within_s=0.9), 0.0)
    before_s = plan._waiting[0].work_s.max()
    plan.next_batch(0.6, frozenset({0}))
    assert plan._waiting[0].kept_count < 20
    assert plan._waiting[0].work_s.max() == before_s
