"""The compiled pass of the policy `lars` against its plain definitions, row by row.

Every number is a small multiple of an eighth, so that sums are exact in whatever order they are
taken, and ties are frequent.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.config import POLICIES, Scheduling
from medha.errors import SetupError
from medha.scheduling import native
from medha.scheduling.policies import ABSORBED, DEADLINE, OWED, RELEGATED, SLACK
from medha.scheduling.sequence import Sequence
from medha.scheduling.waiting import Waiting
from medha.testing import request, scheduler, topology

OVERHEAD_S, INFLATION = 0.25, 1.25
EIGHTHS = st.integers(0, 12).map(lambda count: count / 8.0)


class Row(NamedTuple):
    due_s: float
    arrival_s: float
    work_s: float
    norm_s: float
    need: int
    rank: int  # 0 relegated, 1 kept, 2 promised
    ready: bool
    id: str = ""


def drawn(seed: int, count: int) -> list[Row]:
    """So many rows, about as many kept as can be in time; one in forty is never due."""
    dice = random.Random(seed)
    return [
        Row(
            dice.randint(0, 5 * count) / 8.0 if dice.random() < 0.975 else math.inf,
            float(dice.randint(0, 3)), dice.randint(0, 8) / 8.0, dice.choice([0.5, 1.0, 2.0]),
            dice.randint(0, 4), dice.randint(0, 2), dice.random() < 0.8,
        )
        for _ in range(count)
    ]  # fmt: skip


ROWS = st.builds(drawn, st.integers(0, 1 << 32), st.integers(0, 90))


def housed(rows: list[Row]) -> tuple[Waiting, list[Row]]:
    """Those rows as a group's waiting prefills, and again as they stand there."""
    waiting = Waiting()
    for number, row in enumerate(rows):
        sequence = Sequence(number, request(f"r{number}", 8, row.arrival_s), ())
        sequence.key = (row.due_s, row.arrival_s, sequence.id)
        sequence.norm_s = row.norm_s
        sequence.kept, sequence.promised = row.rank > 0, row.rank == 2
        waiting.add(sequence, row.work_s, row.need)
        waiting.ready[waiting.place(sequence.key)] = row.ready
    return waiting, [rows[one.number]._replace(id=one.id) for one in waiting.sequences]


def plain_margins(rows: list[Row], start: float, share: float) -> dict[int, float]:
    """Margin of each place that is kept: its time less what the kept due no later cost."""
    found = {}
    for place, row in enumerate(rows):
        if row.rank:
            before = [one for one in rows[: place + 1] if one.rank]
            costs = [
                (one.work_s / share + OVERHEAD_S)
                * (INFLATION if row.rank == one.rank == 2 else 1.0)
                for one in before
            ]
            found[place] = row.due_s - start - sum(costs)
    return found


def plain_order(
    rows: list[Row],
    pages: int,
    start: float,
    share: float,
    long_s: float,
    guard_s: float,
    owed: int,
) -> list[tuple[int, int, int]]:  # fmt: skip
    """(place, tier, whether long) of who may be packed, by the tiers that policies.py describes."""
    margins = plain_margins(rows, start, share)
    able = [place for place, row in enumerate(rows) if row.ready and row.need <= pages]
    work = {place: rows[place].work_s / share for place in able}
    long = {place: work[place] > long_s for place in able}
    relegated = [place for place in able if not rows[place].rank]
    owing: list[int] = []
    if owed == native.SHORT_ONES:
        owing = [place for place in relegated if not long[place]]
    if owed != native.NOTHING and not owing:
        owing = relegated[:1]
    keys: list[tuple[int, float, float, str, int, int]] = []
    for place in able:
        row, due_in = rows[place], rows[place].due_s - start
        delayed = [one for one in margins if one < place or not row.rank]
        room = min((margins[one] for one in delayed), default=math.inf) - guard_s
        if place in owing:
            tier, key = OWED, work[place]
        elif not long[place] and work[place] <= room:
            tier, key = ABSORBED, work[place]
        elif not row.rank:
            tier, key = RELEGATED, work[place]
        elif long[place] and room >= 0.0:
            tier, key = SLACK, (due_in - work[place]) / row.norm_s
        else:
            tier, key = DEADLINE, due_in
        keys.append((tier, key, row.arrival_s, row.id, place, int(long[place])))
    return [(place, tier, is_long) for tier, _, _, _, place, is_long in sorted(keys)]


def compiled(waiting: Waiting) -> native.Rows:
    return native.Rows(waiting, native.load())


@given(ROWS, EIGHTHS, st.sampled_from([1.0, 0.5, 0.25]))
def test_margins_are_what_the_kept_leave_each_other(
    rows: list[Row], start: float, share: float
) -> None:
    waiting, rows = housed(rows)
    made, plain = compiled(waiting), plain_margins(rows, start, share)
    made.margins(start, share, OVERHEAD_S, INFLATION)
    assert {place: made.margin_s(place) for place in plain} == plain
    assert made.least_s == min(plain.values(), default=math.inf)
    promised = [margin for place, margin in plain.items() if rows[place].rank == 2]
    assert made.least_promised_s == min(promised, default=math.inf)
    alone, done_s = [], start
    for row in rows:
        if row.rank == 2:
            done_s += row.work_s / share + OVERHEAD_S
            alone.append(row.due_s - done_s)
    assert made.least_bare_s == min(alone, default=math.inf)
    full, done_s = [], 0.0
    for row in rows:
        if row.rank == 2:
            done_s += (row.work_s / share + OVERHEAD_S) * INFLATION
            full.append(row.due_s - start - 0.5 - done_s)
    fresh = compiled(waiting)  # it asks for nothing to have come before
    least_s = fresh.alone_s(start, 0.5, share, OVERHEAD_S, INFLATION)
    assert least_s == min(full, default=math.inf)


@given(ROWS, EIGHTHS, EIGHTHS, st.integers(0, 5), st.none() | st.integers(0, 1 << 32))
def test_the_largest_before_the_first_overrun_gives_way(
    rows: list[Row], start: float, tolerance_s: float, most: int, sparing: int | None
) -> None:
    waiting, rows = housed(rows)
    made = compiled(waiting)
    made.margins(start, 1.0, OVERHEAD_S, INFLATION)
    dice = random.Random(sparing)
    spared = np.array([sparing is not None and dice.random() < 0.5 for _ in rows], dtype=np.bool_)
    lost = made.relegate(tolerance_s, most, None if sparing is None else spared)
    expected: list[int] = []
    while len(expected) < most:
        free = [place for place, row in enumerate(rows) if row.rank == 1 and not spared[place]]
        over = [
            place for place, margin in plain_margins(rows, start, 1.0).items()
            if margin < (0.0 if rows[place].rank == 2 else -tolerance_s)
            and free and place >= free[0]
        ]  # fmt: skip
        if not over:
            break
        expected.append(max((one for one in free if one <= over[0]), key=lambda i: rows[i].work_s))
        rows[expected[-1]] = rows[expected[-1]]._replace(rank=0)
    assert lost == expected
    left = plain_margins(rows, start, 1.0)
    assert {place: made.margin_s(place) for place in left} == left
    assert made.least_s == min(left.values(), default=math.inf)


def plain_fitting(rows: list[Row], start: float, guard_s: float) -> list[int]:
    """Places of who is not kept and fits, by definition: none that is kept overruns for it, and it
    is in time itself, both with the guard to spare; the smallest first."""
    margins = plain_margins(rows, start, 1.0)
    found = []
    for place, row in enumerate(rows):
        if not row.rank:
            as_kept = [*rows[:place], row._replace(rank=1)]
            own = plain_margins(as_kept, start, 1.0)[place]
            cost = row.work_s + OVERHEAD_S
            later = [margins[one] for one in margins if one > place]
            if min([own + cost, *later]) - guard_s >= cost:
                found.append(place)
    return sorted(found, key=lambda place: (rows[place].work_s, place))


@given(ROWS, EIGHTHS, EIGHTHS, st.integers(0, 3))
def test_who_fits_beside_the_kept_comes_by_size(
    rows: list[Row], start: float, guard_s: float, rounds: int
) -> None:
    waiting, rows = housed(rows)
    made = compiled(waiting)
    made.margins(start, 1.0, OVERHEAD_S, INFLATION)
    kept, made_least_s = plain_margins(rows, start, 1.0), made.least_s
    made.open(start, 1.0, OVERHEAD_S, INFLATION)
    for _ in range(rounds + 1):
        found = [made.fitting(guard_s)]
        while found[-1] >= 0:
            found.append(made.fitting(guard_s, found[-1]))
        assert found[:-1] == plain_fitting(rows, start, guard_s)
        if found[0] < 0:
            break
        rows[found[0]] = rows[found[0]]._replace(rank=1)
        waiting.kept[found[0]] = True
        made.keep(found[0])
    # Whoever was asked about has changed nothing yet.
    assert {place: made.margin_s(place) for place in kept} == kept
    assert made.least_s == made_least_s


@given(
    ROWS, st.integers(0, 4), EIGHTHS, st.sampled_from([1.0, 0.5]), EIGHTHS, EIGHTHS,
    st.sampled_from([native.NOTHING, native.FIRST_DUE, native.SHORT_ONES]), st.booleans(),
)  # fmt: skip
def test_rows_come_by_tier_then_key_then_arrival(
    rows: list[Row], pages: int, start: float, share: float, long_s: float, guard_s: float,
    owed: int, tightens: bool,
) -> None:  # fmt: skip
    waiting, rows = housed(rows)
    made = compiled(waiting)
    made.margins(start, share, OVERHEAD_S, INFLATION)
    made.order(pages, start, share, long_s, False, guard_s, owed)
    expected = plain_order(rows, pages, start, share, long_s, guard_s, owed)
    while few := made.few(pages, tightens):
        fitting = [one for one in expected if rows[one[0]].need <= pages]
        fitting = [one for one in fitting if not (tightens and one[2])]
        assert few == fitting[: native.FEW]
        expected = fitting[native.FEW :]
        pages -= tightens
    assert not [one for one in expected if rows[one[0]].need <= pages and not (tightens and one[2])]


@given(ROWS)
def test_who_is_due_last_may_do_what_all_before_it_bear(rows: list[Row]) -> None:
    waiting, rows = housed(rows)
    made = compiled(waiting)
    made.margins(0.0, 1.0, OVERHEAD_S, INFLATION)
    made.order(4.0, 0.0, 1.0, 1.0, False, 0.0, native.NOTHING)
    margins = plain_margins(rows, 0.0, 1.0)
    if rows and rows[-1].rank:
        del margins[len(rows) - 1]
    assert made.last_s == min(margins.values(), default=math.inf)


@pytest.mark.parametrize(
    "long_s, guard_s, tier",
    [
        (9.0, 0.0, ABSORBED), (9.0, 0.125, DEADLINE),
        (0.5, 1.0, SLACK), (0.5, 1.125, DEADLINE),
    ],
)  # fmt: skip
def test_room_that_is_just_enough_is_enough(long_s: float, guard_s: float, tier: int) -> None:
    # The first is due in 2 s and costs 1: its margin is the room of the second, which works 1 s.
    waiting, _ = housed(
        [Row(2.0, 0.0, 0.75, 1.0, 0, 1, False), Row(9.0, 0.0, 1.0, 1.0, 0, 1, True)]
    )
    made = compiled(waiting)
    made.margins(0.0, 1.0, OVERHEAD_S, INFLATION)
    made.order(0.0, 0.0, 1.0, long_s, False, guard_s, native.NOTHING)
    assert made.few(0.0, False) == [(1, tier, int(long_s < 1.0))]


def test_the_turn_of_short_ones_falls_to_a_long_one_where_there_are_none() -> None:
    waiting, _ = housed([Row(due_s, 0.0, 5.0, 1.0, 0, 0, True) for due_s in (2.0, 1.0)])
    made = compiled(waiting)
    made.margins(0.0, 1.0, OVERHEAD_S, INFLATION)
    made.order(0.0, 0.0, 1.0, 1.0, False, 0.0, native.SHORT_ONES)
    assert made.few(0.0, False) == [(0, OWED, 1), (1, RELEGATED, 1)]


def test_a_prompt_may_be_long_by_its_tokens() -> None:
    waiting, _ = housed([Row(1.0, 0.0, 9.0, 1.0, 0, 0, True)])
    made = compiled(waiting)
    made.margins(0.0, 1.0, OVERHEAD_S, INFLATION)
    for above, long in ((7.0, 1), (8.0, 0)):  # it has eight
        made.order(0.0, 0.0, 1.0, above, True, 0.0, native.NOTHING)
        assert made.few(0.0, False) == [(0, ABSORBED if not long else RELEGATED, long)]


def test_a_promise_that_spans_groups_lowers_the_least_margins() -> None:
    waiting, _ = housed([Row(4.0, 0.0, 1.0, 1.0, 0, 2, True), Row(9.0, 0.0, 1.0, 1.0, 0, 1, True)])
    made = compiled(waiting)
    made.margins(0.0, 1.0, OVERHEAD_S, INFLATION)
    made.lower(0, 5.0)
    assert made.margin_s(0) == made.least_s == 4.0 - 1.25 * 1.25
    made.lower(0, -1.0)
    assert made.margin_s(0) == made.least_s == made.least_promised_s == -1.0


def test_a_library_that_was_not_built_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"none\.so is the compiled part .* run `make setup`"):
        native.load(tmp_path / "none.so")


@pytest.mark.parametrize("policy", POLICIES)
def test_only_lars_opens_the_library(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(native, "load", lambda: opened.append(policy))
    scheduler(topology(), Scheduling(policy=policy))
    assert opened == (["lars"] if policy == "lars" else [])
