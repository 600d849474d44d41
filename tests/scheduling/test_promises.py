"""The promise set against brute force, and the arithmetic of margins by hand."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.config import Scheduling
from medha.request import SloClass
from medha.scheduling.feasibility import (
    largest_feasible,
    select_victims,
)
from medha.scheduling.policies import relative_slack, yielded
from medha.testing import Driven, SingleReplicaRouter, request, scheduler, topology

JOBS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10)), min_size=0, max_size=9).map(
    sorted
)


def feasible(jobs: list[tuple[int, int]], chosen: tuple[int, ...]) -> bool:
    """Return whether the chosen (due, work) jobs can all be done in time, one after another."""
    done = 0
    for place in chosen:
        done += jobs[place][1]
        if done > jobs[place][0]:
            return False
    return True


def arrays(jobs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    due = np.array([due for due, _ in jobs], dtype=np.float64)
    return due, np.array([work for _, work in jobs], dtype=np.float64)


@given(JOBS)
def test_no_larger_set_is_feasible(jobs: list[tuple[int, int]]) -> None:
    kept = largest_feasible(*arrays(jobs))
    chosen = tuple(np.flatnonzero(kept).tolist())
    assert feasible(jobs, chosen)
    best = max(
        len(some)
        for size in range(len(jobs) + 1)
        for some in itertools.combinations(range(len(jobs)), size)
        if feasible(jobs, some)
    )
    assert len(chosen) == best


@given(JOBS)
def test_what_is_broken_leaves_a_feasible_set(jobs: list[tuple[int, int]]) -> None:
    due_in, works = arrays(jobs)
    kept = np.ones(len(jobs), dtype=np.bool_)
    lost = select_victims(due_in - works.cumsum(), works, kept, 0.0)
    rest = tuple(place for place in range(len(jobs)) if place not in lost)
    assert feasible(jobs, rest)
    assert len(rest) == int(largest_feasible(due_in, works).sum())


def test_an_overrun_within_the_tolerance_breaks_nothing() -> None:
    due, work = np.array([2.0, 3.0]), np.array([1.5, 2.0])
    kept = np.array([True, True])
    margins = due - work.cumsum()
    assert select_victims(margins, work, kept, 0.5) == []
    assert select_victims(margins, work, kept, 0.4) == [1]


def test_relative_slack_by_hand() -> None:
    # The paper's example: r_L at 0 has slack 6 for 10 s of work, r_S at 5 has 0.5 for 0.5 s.
    rho = relative_slack(np.array([16.0, 1.0]), np.array([10.0, 0.5]), np.array([10.0, 0.5]))
    assert rho.tolist() == [0.6, 1.0]
    assert yielded(np.array([-1.0, 0.2, 3.0]), 0.4).tolist() == [0.0, 0.2, 0.4]


@pytest.mark.parametrize("after_s", [15, 30, 300])
def test_the_time_for_short_prompts_to_come_is_known_soon_after_a_start(after_s: int) -> None:
    promises = scheduler()._state.promises
    for second in range(after_s):
        promises.count_arrival({0: 0.3}, 1000.0 + second)
    assert promises.coming(0, 1000.0 + after_s) == pytest.approx(0.3, rel=0.05)
    # A group that begins again knows nothing of before.
    promises.leave(0)
    promises.join(0)
    promises.count_arrival({0: 0.3}, 2000.0)
    assert promises.coming(0, 2000.0) < 0.03


@pytest.mark.parametrize("when_infeasible", ["refuse", "relegate"])
def test_time_is_set_aside_only_where_prompts_may_be_relegated(when_infeasible: str) -> None:
    plan = scheduler(classes=(SloClass(when_infeasible=when_infeasible),))
    tight = request("tight", 10_000, within_s=1.06)  # one second of work
    decided = SingleReplicaRouter(plan).decide(tight, 0.0)
    assert decided.promised is (when_infeasible == "refuse")


@pytest.mark.parametrize("beyond", [False, True])
def test_time_is_set_aside_while_a_relegated_prompt_waits(beyond: bool) -> None:
    """Not for one beyond its tenant's share: that has only what others leave."""
    plan = scheduler(classes=(SloClass(when_infeasible="refuse"),))
    driven = Driven(plan)
    lost = request("lost", 20_000, within_s=0.1, promised=False)
    tight = [request(f"t{n}", 10_000, n, within_s=1.06) for n in (1.0, 9.0)]
    driven.submit([msgspec.structs.replace(lost, beyond_share=beyond), *tight])
    driven.run()
    assert [driven.admitted[answer.id].promised for answer in tight] == [beyond, True]
    assert all(driven.in_time(answer.id) for answer in tight[not beyond :])


@pytest.mark.parametrize("beyond", [False, True])
def test_no_time_is_kept_for_short_prompts_to_come_beyond_a_share(beyond: bool) -> None:
    plan = scheduler(classes=(SloClass(when_infeasible="refuse"),))
    for index in range(30):
        chat = request(f"c{index}", 3000, within_s=0.9, promised=False)
        plan.submit(msgspec.structs.replace(chat, beyond_share=beyond), float(index))
    assert plan.load(30.0).long_factor == (1.0 if beyond else pytest.approx(1.43, rel=0.1))


def test_a_short_prompt_starts_though_a_long_one_ran_ahead_of_a_promise() -> None:
    # The long prompt has the least relative slack, and runs first. If it took the whole margin of
    # the promise, the short one would wait until the promise is kept, as its answer takes 2 % of
    # the time until then.
    plan = scheduler(settings=Scheduling(max_batch_s=0.05), pages=20_000, token_s=0.001)
    driven = Driven(plan)
    driven.submit([request("promised", 20_000, within_s=60.0)])
    driven.submit([request("long", 900_000, within_s=930.0, promised=False)])
    short = request("short", 100, 42.0, output_tokens=1000, tpot_s=0.05, promised=False)
    driven.submit([short])
    driven.run(60.0)
    assert driven.admitted["promised"].promised and not driven.admitted["long"].promised
    assert driven.in_time("promised") and driven.in_time("short")


@pytest.mark.parametrize("spp", [2, 4])
@pytest.mark.parametrize("part", [0.05, 0.3, 0.45])
def test_batches_ahead_of_a_tight_promise_are_shorter(spp: int, part: float) -> None:
    """A router leaves a promise half a batch less than batches of 0.1 s take in the stages.

    With batches of 0.1 s the second prompt is late by `part` of one.
    """
    driven = Driven(scheduler(topology(spp=spp)))
    due_s = 0.21 + 0.1 * (spp - 1 - part)
    for name, tokens in (("first", 1500 * spp), ("second", 600 * spp)):  # 0.21 s in each stage
        driven.submit([request(name, tokens, within_s=due_s, promised=True)])
    driven.run()
    assert driven.in_time("first") and driven.in_time("second")
    assert max(batch.predicted_s for _, batch in driven.batches) <= 0.1 - 0.1 * part / (spp - 1)


@pytest.mark.parametrize("spp", [2, 3])
def test_no_batch_of_a_tight_long_promise_is_shorter_before_its_end(spp: int) -> None:
    """The last batch is short, so that the promise holds with less than the drain behind stage 0.

    Shorter batches would take more time: each has an overhead.
    """
    alone, tight = (Driven(scheduler(topology(spp=spp), batch_s=0.02)) for _ in range(2))
    alone.submit([request("long", 48_500 * spp, within_s=100.0, promised=True)])
    alone.run()
    within_s = alone.first_s["long"] + 0.02
    tight.submit([request("long", 48_500 * spp, within_s=within_s, promised=True)])
    tight.run()
    assert tight.in_time("long")


def test_a_promise_that_is_lost_anyway_shortens_batches_no_further() -> None:
    driven = Driven(scheduler(topology(spp=2)))
    driven.submit([request("lost", 10_000, within_s=0.3, promised=True)])
    driven.run()
    assert max(batch.predicted_s for _, batch in driven.batches) >= 0.048
