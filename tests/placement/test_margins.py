"""Margins of promises: what fits with all of them, against sums over the promises themselves."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.fleet.margins import Margins
from medha.fleet.offers import AnswerTime

JOBS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4)), max_size=8)


def feasible(jobs: list[tuple[int, int]]) -> bool:
    """Return True if all jobs meet their deadlines, one after the other."""
    by_due = sorted(jobs)
    return all(
        total <= due
        for (due, _), total in zip(
            by_due, itertools.accumulate(work for _, work in by_due), strict=True
        )
    )


def kept(jobs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return a part of the jobs that can be kept together."""
    together: list[tuple[int, int]] = []
    for job in jobs:
        if feasible([*together, job]):
            together.append(job)
    return together


def reported(jobs: list[tuple[int, int]]) -> list[tuple[float, float]]:
    """Return what a Load reports of jobs: (due, margin) by deadline."""
    by_due = sorted(jobs)
    totals = itertools.accumulate(work for _, work in by_due)
    return [
        (float(due), float(due - total)) for (due, _), total in zip(by_due, totals, strict=True)
    ]


@given(JOBS, st.integers(1, 14), st.integers(1, 6))
def test_what_fits_is_what_keeps_every_promise(
    jobs: list[tuple[int, int]], due: int, work: int
) -> None:
    margins, promises = Margins(), kept(jobs)
    margins.recount(reported(promises), 100.0, [])
    fits = margins.room_s(100.0 + due, 0.0, 100.0) >= work
    assert fits == feasible([*promises, (due, work)])


@given(JOBS, st.integers(1, 14), st.integers(1, 6), st.sampled_from([0.5, 1.0]))
def test_what_fits_leaves_others_a_part_of_the_time_that_promises_wait(
    jobs: list[tuple[int, int]], due: int, work: int, others: float
) -> None:
    margins, promises = Margins(), kept(jobs)
    margins.recount(reported(promises), 100.0, [])

    def work_by(due_in_s: int) -> int:
        return sum(seconds for at, seconds in promises if at <= due_in_s)

    later = [at for at, _ in promises if at > due]
    fits = margins.room_s(100.0 + due, 0.0, 100.0, work, others=others) >= work
    assert fits == (
        (1.0 + others) * work_by(due) + work <= due
        and all((1.0 + others) * (work_by(at) + work) <= at for at in later)
    )


@given(JOBS, st.integers(1, 6), st.sampled_from([0.0, 0.5]))
def test_the_earliest_deadline_that_fits_is_the_earliest(
    jobs: list[tuple[int, int]], work: int, others: float
) -> None:
    margins = Margins()
    margins.recount(reported(kept(jobs)), 100.0, [])

    def fits(due_in_s: float) -> bool:
        return margins.room_s(100.0 + due_in_s, 0.0, 100.0, float(work), others=others) >= work

    earliest_s = margins.earliest_s(float(work), 0.0, 100.0, others=others)
    assert fits(earliest_s)
    assert not any(fits(0.5 * half) for half in range(1, int(2 * earliest_s)))


@given(JOBS)
def test_held_promises_count_like_reported_ones(jobs: list[tuple[int, int]]) -> None:
    promises = kept(jobs)
    margins, split = Margins(), len(promises) // 2
    held = sorted((100.0 + due, float(work)) for due, work in promises[split:])
    margins.recount(reported(promises[:split]), 100.0, held)
    for due, work in itertools.product(range(1, 15), range(1, 7)):
        fits = margins.room_s(100.0 + due, 0.0, 100.0) >= work
        assert fits == feasible([*promises, (due, work)])


@given(JOBS, JOBS)
def test_a_promise_added_counts_like_one_recounted(
    jobs: list[tuple[int, int]], later: list[tuple[int, int]]
) -> None:
    promises = kept(jobs)
    added, recounted = Margins(), Margins()
    held: list[tuple[float, float]] = []
    added.recount(reported(promises), 100.0, [])
    for due, work in later:
        if not feasible([*promises, *[(int(d) - 100, int(w)) for d, w in held], (due, work)]):
            continue
        held = sorted([*held, (100.0 + due, float(work))])
        added.add(100.0 + due, float(work), 100.0)
        recounted.recount(reported(promises), 100.0, held)
        for half in range(1, 28):
            due_s = 100.0 + 0.5 * half
            assert added.room_s(due_s, 0.0, 100.0) == recounted.room_s(due_s, 0.0, 100.0)


@given(JOBS, st.integers(1, 14), st.integers(1, 6), st.integers(0, 2), st.integers(0, 2))
def test_the_batch_in_flight_and_the_drain_delay_each_request_once(
    jobs: list[tuple[int, int]], due: int, work: int, lead: int, drain: int
) -> None:
    """Work of stage 0 follows the batch in flight; each prompt is done a drain after its own."""
    promises = kept([(at - lead - drain, seconds) for at, seconds in jobs])
    shifted = [(at + lead + drain, margin) for at, margin in reported(promises)]
    margins = Margins(float(drain))
    margins.recount(shifted, 100.0, [], float(lead))
    fits = margins.room_s(100.0 + due, float(drain), 100.0) >= work
    assert fits == feasible([*promises, (due - lead - drain, work)])
    held = Margins(float(drain))
    held.recount(
        [], 100.0, sorted((100.0 + at + lead + drain, float(w)) for at, w in promises), float(lead)
    )
    assert held.room_s(100.0 + due, float(drain), 100.0) == margins.room_s(
        100.0 + due, float(drain), 100.0
    )
    for half in range(1, 30):
        before = margins.room_s(100.0 + 0.5 * half, float(drain), 100.0) >= work
        assert not before or 0.5 * half >= margins.earliest_s(float(work), float(drain), 100.0)


ANSWERS = st.builds(
    AnswerTime,
    part=st.sampled_from([0.0, 0.25, 1.0]),
    first_s=st.integers(100, 108).map(float),
    lasts_s=st.integers(1, 20).map(float),
)


@given(JOBS, st.integers(1, 14), st.integers(1, 6), ANSWERS)
def test_a_promise_with_an_answer_leaves_later_ones_what_they_need(
    jobs: list[tuple[int, int]], due: int, work: int, answer: AnswerTime
) -> None:
    """Later work runs one after the other, slower by the answer while that lasts."""
    promises = kept(jobs)
    margins = Margins()
    margins.recount(reported(promises), 100.0, [])
    room_s = margins.room_s(100.0 + due, 0.0, 100.0, float(work), answer)
    later = [(at, 100.0 + at - margin) for at, margin in reported(promises) if at > due]
    done = [done_s + work for _, done_s in later]
    late = [answer.delay_s(done_s) for done_s in done]
    fits = all(
        done_s + delay_s <= 100.0 + at + 1e-9
        for (at, _), done_s, delay_s in zip(later, done, late, strict=True)
    )
    before = margins.room_s(100.0 + due, 0.0, 100.0)
    assert (room_s >= work) == (fits and before >= work)
    if room_s >= work:
        margins.add(100.0 + due, float(work), 100.0, answer)
        assert min(margins._margin, default=0.0) >= -1e-9


@given(st.floats(0.0, 5.0), st.floats(0.0, 50.0), st.floats(0.0, 50.0))
def test_the_delay_of_an_answer_is_what_slower_work_takes_longer(
    part: float, lasts_s: float, rest_s: float
) -> None:
    slow_s = min(lasts_s, rest_s * (1.0 + part))
    expected_s = slow_s + (rest_s - slow_s / (1.0 + part)) - rest_s
    assert AnswerTime(part, 3.0, lasts_s).delay_s(3.0 + rest_s) == pytest.approx(expected_s)


def test_shorter_batches_delay_promises_once_by_the_tightest_tpot() -> None:
    """Promises done 5 s and 20 s from now take half as long again."""
    margins = Margins()
    margins.recount([(6.0, 1.0), (40.0, 20.0)], 10.0, [])
    for longer in (0.2, 0.5, 0.3, 0.5):
        margins.shorten(longer, 10.0)
    done_s = [due_s - margins.room_s(due_s - 1e-9, -1e9, 10.0) for due_s in (16.0, 50.0)]
    assert done_s == pytest.approx([10.0 + 1.5 * 5.0, 10.0 + 1.5 * 20.0])
    late = Margins()
    late.recount([(40.0, 20.0)], 10.0, [])
    late.shorten(0.9, 10.0)
    assert late.bears(0.4, 10.0) and late.bears(0.999, 10.0) and not late.bears(1.01, 10.0)
