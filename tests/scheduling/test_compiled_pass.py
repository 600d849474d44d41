"""The compiled passes over waiting prefills against their plain definitions, row by row.

Every number is a small multiple of an eighth, so that sums are exact in whatever order they are
taken, and ties are frequent.
"""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from medha.errors import SetupError
from medha.prefill_times import FRACTIONS, LEVELS
from medha.scheduling import native
from medha.scheduling.policies import ABSORBED, DEADLINE, GUARANTEED, RELEGATED, SLACK
from medha.scheduling.sequence import Sequence
from medha.scheduling.waiting_queue import WaitingQueue
from medha.testing import request

OVERHEAD_S, INFLATION = 0.25, 1.25
SPARED = 0.05
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
    """Draw `count` rows, about as many kept as can be in time; one in forty is never due."""
    dice = random.Random(seed)
    return [
        Row(
            dice.randint(0, 5 * count) / 8.0 if dice.random() < 0.975 else math.inf,
            float(dice.randint(0, 3)),
            dice.randint(0, 8) / 8.0,
            dice.choice([0.5, 1.0, 2.0]),
            dice.randint(0, 4),
            dice.randint(0, 2),
            dice.random() < 0.8,
        )
        for _ in range(count)
    ]


# Its margin is 1.25 s: due in 25 s, it costs 23.75.
PROMISE = Row(25.0, 0.0, 18.75, 1.0, 0, 2, False)
ROWS = st.builds(drawn, st.integers(0, 1 << 32), st.integers(0, 90))


def queued(rows: list[Row]) -> tuple[WaitingQueue, list[Row]]:
    """Return the rows as a group's queue, and again in the order of the queue."""
    waiting = WaitingQueue()
    for number, row in enumerate(rows):
        sequence = Sequence(number, request(f"r{number}", 8, row.arrival_s), ())
        sequence.key = (row.due_s, row.arrival_s, sequence.id)
        sequence.norm_s = row.norm_s
        sequence.kept, sequence.promised = row.rank > 0, row.rank == 2
        waiting.add(sequence, [row.work_s] * LEVELS, row.need)
        waiting.ready[waiting.place(sequence.key)] = row.ready
    return waiting, [
        rows[sequence.number]._replace(id=sequence.id) for sequence in waiting.sequences
    ]


def plain_margins(rows: list[Row], start: float) -> dict[int, float]:
    """Return each kept row's margin: its time less the cost of kept rows due no later."""
    margins = {}
    for place, row in enumerate(rows):
        if row.rank:
            before = [other for other in rows[: place + 1] if other.rank]
            costs = [
                (other.work_s + OVERHEAD_S) * (INFLATION if row.rank == other.rank == 2 else 1.0)
                for other in before
            ]
            margins[place] = row.due_s - start - sum(costs)
    return margins


def reserved_s(row: Row, start: float) -> float:
    """Return what a long prompt without a promise leaves of a kept row's margin."""
    return (row.due_s - start) * SPARED if row.rank == 2 and row.due_s < math.inf else 0.0


def plain_order(
    rows: list[Row],
    pages: int,
    start: float,
    long_s: float,
    guard_s: float,
    owed: int,
) -> list[tuple[int, int, int]]:
    """Return (place, tier, is long) of ready rows, by the tiers of policies.py."""
    margins = plain_margins(rows, start)
    able = [place for place, row in enumerate(rows) if row.ready and row.need <= pages]
    work = {place: rows[place].work_s for place in able}
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
        delayed = [kept for kept in margins if kept < place or not row.rank]
        room = min((margins[kept] for kept in delayed), default=math.inf) - guard_s
        if long[place] and row.rank == 1:  # it leaves a part of the time of promises
            spared = [margins[kept] - reserved_s(rows[kept], start) for kept in delayed]
            room = min(spared, default=math.inf) - guard_s
        if place in owing:
            tier, key = GUARANTEED, work[place]
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


@given(ROWS, st.integers(0, 1 << 32))
def test_flags_are_counted_as_rows_come_and_go(rows: list[Row], seed: int) -> None:
    waiting, _ = queued([])
    dice, there = random.Random(seed), []
    for number, row in enumerate(rows):
        of_tenant = request(f"r{number}", 8, row.arrival_s)
        beyond = msgspec.structs.replace(of_tenant, beyond_share=dice.random() < 0.8)
        sequence = Sequence(number, beyond, ())
        sequence.key = (row.due_s, row.arrival_s, sequence.id)
        sequence.kept, sequence.promised = row.rank > 0, row.rank == 2
        waiting.add(sequence, [row.work_s] * LEVELS, row.need)
        waiting.add(sequence, [row.work_s] * LEVELS, row.need)  # a second time changes nothing
        there.append(sequence)
        if dice.random() < 0.4:
            waiting.remove(there.pop(dice.randrange(len(there))))
        elif dice.random() < 0.4:
            changed = dice.choice(there)
            changed.kept = dice.random() < 0.5
            changed.promised = changed.kept and dice.random() < 0.5
            waiting.update_flags(changed)
        assert len(waiting) == len(there)
        counts = waiting.kept_count, waiting.promised_count, waiting.ready_count
        assert counts == (waiting.kept.sum(), waiting.promised.sum(), waiting.ready.sum())
        needs = (waiting.promised & (waiting.need > 0.0)).any()
        assert waiting.rows.promise_needs_pages() == needs
        assert waiting.relegated == any(
            not sequence.kept and not sequence.request.beyond_share for sequence in there
        )


@given(ROWS, EIGHTHS)
def test_margins_are_what_the_kept_leave_each_other(rows: list[Row], start: float) -> None:
    waiting, rows = queued(rows)
    kernel, plain = waiting.rows, plain_margins(rows, start)
    kernel.margins(start, OVERHEAD_S, INFLATION)
    assert {place: kernel.margin_s(place) for place in plain} == plain
    assert kernel.least_s == min(plain.values(), default=math.inf)
    promised = [margin for place, margin in plain.items() if rows[place].rank == 2]
    assert kernel.least_promised_s == min(promised, default=math.inf)
    alone, done_s = [], start
    for row in rows:
        if row.rank == 2:
            done_s += row.work_s + OVERHEAD_S
            alone.append(row.due_s - done_s)
    assert kernel.least_bare_s == min(alone, default=math.inf)


@given(ROWS, EIGHTHS, EIGHTHS, st.integers(0, 5), st.none() | st.integers(0, 1 << 32))
def test_the_largest_before_the_first_overrun_gives_way(
    rows: list[Row], start: float, tolerance_s: float, most: int, sparing: int | None
) -> None:
    waiting, rows = queued(rows)
    kernel = waiting.rows
    kernel.margins(start, OVERHEAD_S, INFLATION)
    dice = random.Random(sparing)
    spared = np.array([sparing is not None and dice.random() < 0.5 for _ in rows], dtype=np.bool_)
    lost = kernel.relegate(tolerance_s, most, None if sparing is None else spared)
    expected: list[int] = []
    while len(expected) < most:
        free = [place for place, row in enumerate(rows) if row.rank == 1 and not spared[place]]
        over = [
            place
            for place, margin in plain_margins(rows, start).items()
            if margin < (0.0 if rows[place].rank == 2 else -tolerance_s)
            and free
            and place >= free[0]
        ]
        if not over:
            break
        expected.append(
            max(
                (free_place for free_place in free if free_place <= over[0]),
                key=lambda i: rows[i].work_s,
            )
        )
        rows[expected[-1]] = rows[expected[-1]]._replace(rank=0)
    assert lost == expected
    left = plain_margins(rows, start)
    assert {place: kernel.margin_s(place) for place in left} == left
    assert kernel.least_s == min(left.values(), default=math.inf)


def plain_fitting(rows: list[Row], start: float, guard_s: float) -> list[int]:
    """Return the rows not kept that fit, smallest first, by definition.

    No kept row overruns for it, and it meets its deadline, both with the guard to spare.
    """
    margins = plain_margins(rows, start)
    places = []
    for place, row in enumerate(rows):
        if not row.rank:
            as_kept = [*rows[:place], row._replace(rank=1)]
            own = plain_margins(as_kept, start)[place]
            cost = row.work_s + OVERHEAD_S
            later = [margins[kept] for kept in margins if kept > place]
            if min([own + cost, *later]) - guard_s >= cost:
                places.append(place)
    return sorted(places, key=lambda place: (rows[place].work_s, place))


@given(ROWS, EIGHTHS, EIGHTHS, st.integers(0, 3))
def test_rows_that_fit_with_the_kept_come_by_size(
    rows: list[Row], start: float, guard_s: float, rounds: int
) -> None:
    waiting, rows = queued(rows)
    kernel = waiting.rows
    kernel.margins(start, OVERHEAD_S, INFLATION)
    kept, made_least_s = plain_margins(rows, start), kernel.least_s
    kernel.open(start, OVERHEAD_S, INFLATION)
    for _ in range(rounds + 1):
        places = [kernel.fitting(guard_s)]
        while places[-1] >= 0:
            places.append(kernel.fitting(guard_s, places[-1]))
        assert places[:-1] == plain_fitting(rows, start, guard_s)
        if places[0] < 0:
            break
        rows[places[0]] = rows[places[0]]._replace(rank=1)
        waiting.kept[places[0]] = True
        kernel.keep(places[0])
    # The calls of `fitting` have changed nothing.
    assert {place: kernel.margin_s(place) for place in kept} == kept
    assert kernel.least_s == made_least_s


@given(
    ROWS,
    st.integers(0, 4),
    EIGHTHS,
    EIGHTHS,
    EIGHTHS,
    st.sampled_from([native.NOTHING, native.FIRST_DUE, native.SHORT_ONES]),
    st.booleans(),
)
@example([PROMISE, Row(99.0, 0.0, 9.0, 1.0, 0, 1, True)], 0, 0.0, 1.0, 0.125, native.NOTHING, False)
def test_rows_come_by_tier_then_key_then_arrival(
    rows: list[Row],
    pages: int,
    start: float,
    long_s: float,
    guard_s: float,
    owed: int,
    tightens: bool,
) -> None:
    waiting, rows = queued(rows)
    kernel = waiting.rows
    kernel.margins(start, OVERHEAD_S, INFLATION)
    kernel.order(pages, start, long_s, False, guard_s, owed)
    expected = plain_order(rows, pages, start, long_s, guard_s, owed)
    while few := kernel.few(pages, tightens):
        fitting = [entry for entry in expected if rows[entry[0]].need <= pages]
        fitting = [entry for entry in fitting if not (tightens and entry[2])]
        assert few == fitting[: native.FEW]
        expected = fitting[native.FEW :]
        pages -= tightens
    assert not [
        entry for entry in expected if rows[entry[0]].need <= pages and not (tightens and entry[2])
    ]


@given(ROWS)
def test_the_row_due_last_may_take_what_all_before_it_can_spare(rows: list[Row]) -> None:
    waiting, rows = queued(rows)
    kernel = waiting.rows
    kernel.margins(0.0, OVERHEAD_S, INFLATION)
    kernel.order(4.0, 0.0, 1.0, False, 0.0, native.NOTHING)
    margins = plain_margins(rows, 0.0)
    if rows and rows[-1].rank:
        del margins[len(rows) - 1]
    assert kernel.last_s == min(margins.values(), default=math.inf)


@pytest.mark.parametrize(
    "long_s, guard_s, tier",
    [
        (9.0, 0.0, ABSORBED),
        (9.0, 0.125, DEADLINE),
        (0.5, 1.0, SLACK),
        (0.5, 1.125, DEADLINE),
    ],
)
def test_room_that_is_just_enough_is_enough(long_s: float, guard_s: float, tier: int) -> None:
    # The first is due in 2 s and costs 1: its margin is the room of the second, which works 1 s.
    waiting, _ = queued(
        [Row(2.0, 0.0, 0.75, 1.0, 0, 1, False), Row(9.0, 0.0, 1.0, 1.0, 0, 1, True)]
    )
    kernel = waiting.rows
    kernel.margins(0.0, OVERHEAD_S, INFLATION)
    kernel.order(0.0, 0.0, long_s, False, guard_s, native.NOTHING)
    assert kernel.few(0.0, False) == [(1, tier, int(long_s < 1.0))]


@pytest.mark.parametrize(
    "rank, guard_s, tier", [(1, 0.0, SLACK), (1, 0.125, DEADLINE), (2, 1.25, SLACK)]
)
def test_a_long_prompt_without_a_promise_leaves_a_twentieth_of_the_time_of_promises(
    rank: int, guard_s: float, tier: int
) -> None:
    waiting, _ = queued([PROMISE, Row(99.0, 0.0, 9.0, 1.0, 0, rank, True)])
    kernel = waiting.rows
    kernel.margins(0.0, OVERHEAD_S, INFLATION)
    kernel.order(0.0, 0.0, 1.0, False, guard_s, native.NOTHING)
    assert kernel.few(0.0, False) == [(1, tier, 1)]


def test_the_turn_of_short_ones_falls_to_a_long_one_where_there_are_none() -> None:
    waiting, _ = queued([Row(due_s, 0.0, 5.0, 1.0, 0, 0, True) for due_s in (2.0, 1.0)])
    kernel = waiting.rows
    kernel.margins(0.0, OVERHEAD_S, INFLATION)
    kernel.order(0.0, 0.0, 1.0, False, 0.0, native.SHORT_ONES)
    assert kernel.few(0.0, False) == [(0, GUARANTEED, 1), (1, RELEGATED, 1)]


def test_a_prompt_may_be_long_by_its_tokens() -> None:
    waiting, _ = queued([Row(1.0, 0.0, 9.0, 1.0, 0, 0, True)])
    kernel = waiting.rows
    kernel.margins(0.0, OVERHEAD_S, INFLATION)
    for above, long in ((7.0, 1), (8.0, 0)):  # it has eight
        kernel.order(0.0, 0.0, above, True, 0.0, native.NOTHING)
        assert kernel.few(0.0, False) == [(0, ABSORBED if not long else RELEGATED, long)]


def test_a_module_that_was_not_built_is_an_error_with_its_remedy() -> None:
    with pytest.raises(SetupError, match=r"rows2 is the compiled part .* run `make setup`"):
        native.load("medha.scheduling.rows2")


def test_what_is_outside_the_rows_is_refused() -> None:
    waiting, _ = levelled(0, 3)
    rows, kernel = waiting.rows, waiting.rows.kernel
    for row in (-1, 3, 1 << 40):
        for method in (kernel.remove, kernel.work, kernel.bare_work, kernel.start):
            with pytest.raises(IndexError, match=f"row {row} of 3"):
                method(row)
    assert rows.work_before_s(3) == pytest.approx(waiting.work_s.sum())
    with pytest.raises(IndexError):
        rows.work_before_s(4)
    with pytest.raises(TypeError, match="at most 8"):
        rows.try_decodes(0.0, [(native.RUNS, 1.0, 1.0, 0.0, -1, 0.0)] * 9, 0.0, 1.0, 1.0)
    with pytest.raises(TypeError):
        kernel.margins(0.0, "1.0", 1.0)
    with pytest.raises(TypeError, match="3 arguments, not 2"):
        kernel.margins(0.0, 1.0)
    with pytest.raises(ValueError, match="6 numbers, not 5"):
        rows.update(0, True, 1, [1.0] * 5)
    with pytest.raises(ValueError, match="array 0 has another capacity"):
        kernel.allot(*[np.zeros(64)] * 8)
    with pytest.raises(KeyError, match="decode 7"):
        native.Decodes().kernel.remove(7, 1.0)
    assert len(waiting) == len(rows) == 3


# --- decodes, and work alongside them -------------------------------------------------------------


class Decode(NamedTuple):
    cost_s: float
    length_s: float
    row: int = -1  # of its prompt


def plain_between(levels: list[float], part: float) -> float:
    """Return the time at a part of the capacity: the rate, 1 over it, is interpolated."""
    return 1.0 / float(np.interp(part, FRACTIONS, 1.0 / np.maximum(levels, 1e-300)))


def plain_mean_s(running: list[Decode], window_s: float, least_s: float) -> float:
    """Return the decode time of a mean batch within the window."""
    return sum(
        decode.cost_s * min(1.0, max(decode.length_s, least_s) / window_s) for decode in running
    )


def levelled(seed: int, count: int) -> tuple[WaitingQueue, list[list[float]]]:
    """Return a queue of rows due in ever more seconds, and their work by level of decodes."""
    dice = random.Random(seed)
    waiting, work_s = WaitingQueue(), []
    for number in range(count):
        sequence = Sequence(number, request(f"r{number}", 8, 0.0), ())
        sequence.key = (1.0 + number * dice.randint(1, 4), 0.0, f"{number:03}")
        sequence.promised = sequence.kept = dice.random() < 0.6
        levels = [float(level) for level in np.cumsum([dice.randint(1, 9) for _ in FRACTIONS])]
        waiting.add(sequence, levels, 0)
        work_s.append(levels)
    waiting_order = [sequence.number for sequence in waiting.sequences]
    return waiting, [work_s[number] for number in waiting_order]


def decoding(running: list[Decode]) -> native.Decodes:
    decodes = native.Decodes()
    for number, decode in enumerate(running):
        decodes.add(number, decode.cost_s, NOW_S + decode.length_s)
    return decodes


NOW_S, BUDGET_S, LEAST_S, PART = 0.5, 1.0, 0.75, 1.0 / 16.0
RUNNING = st.lists(st.builds(Decode, EIGHTHS, st.floats(0.0, 60.0)), max_size=90)


@given(st.integers(0, 1 << 32), st.integers(0, 70), RUNNING, RUNNING, st.floats(0.0, 60.0))
def test_work_is_that_alongside_the_slowest_groups_decodes_until_the_row_is_due(
    seed: int, count: int, running: list[Decode], others: list[Decode], length_s: float
) -> None:
    waiting, work_s = levelled(seed, count)
    groups, comes = [decoding(running), decoding(others)], Decode(0.25, length_s, -1)
    coming = [[], [added_after(waiting, comes)]]
    waiting.rows.set_alongside(groups, coming, -1, NOW_S, BUDGET_S, LEAST_S, PART)
    for row, due_s in enumerate(waiting.due_s.tolist()):
        window_s = max(due_s - NOW_S, BUDGET_S)
        elsewhere_s = plain_mean_s(others, window_s, LEAST_S)
        elsewhere_s += 0.25 * min(length_s, window_s) / max(window_s, work_s[row][0])
        mean_s = max(plain_mean_s(running, window_s, LEAST_S), elsewhere_s)
        assert waiting.alongside[row] == pytest.approx(PART * mean_s)
        part = min(1.0, PART * mean_s)
        if PART * mean_s < 1.0:
            assert waiting.work_s[row] == pytest.approx(plain_between(work_s[row], part))


def added_after(waiting: WaitingQueue, decode: Decode) -> native.Added:
    """Return the decode after the prompt of its row, as the account adds it."""
    row, cost_s, length_s = decode.row, decode.cost_s, decode.length_s
    if row < 0:
        return native.COMES, cost_s, length_s, 0.0, -1, 0.0
    number = int(waiting.rows.slots[waiting.rows.slot[row], native.NUMBER])
    return native.FOLLOWS, cost_s, length_s, 0.1, number, float(waiting.due_s[row])


@given(
    st.integers(0, 1 << 32),
    st.integers(1, 70),
    st.lists(st.builds(Decode, EIGHTHS, st.floats(0.0, 60.0), st.integers(-1, 69)), max_size=6),
)
def test_a_coming_decode_is_alongside_rows_that_run_after_its_prompt(
    seed: int, count: int, coming: list[Decode]
) -> None:
    waiting, work_s = levelled(seed, count)
    coming = [decode._replace(row=min(decode.row, count - 1)) for decode in coming]
    windows_s = [max(due_s - NOW_S, BUDGET_S) for due_s in waiting.due_s.tolist()]
    added = [added_after(waiting, decode) for decode in coming]
    waiting.rows.set_alongside([native.Decodes()], [added], -1, NOW_S, BUDGET_S, LEAST_S, PART)
    for row, window_s in enumerate(windows_s):
        mean_s = 0.0
        for decode in coming:
            begins_s, first = 0.0, 0
            if decode.row >= 0 and waiting.sequences[decode.row].kept:
                begins_s, first = min(work_s[decode.row][0], windows_s[decode.row]), decode.row + 1
            elif decode.row >= 0:
                begins_s = work_s[decode.row][0] / 0.1
            if row >= first and window_s > begins_s:
                filled_s = min(decode.length_s, window_s - begins_s)
                mean_s += decode.cost_s * filled_s / max(window_s - begins_s, work_s[row][0])
        assert waiting.alongside[row] == pytest.approx(PART * mean_s)


@given(
    st.integers(0, 1 << 32),
    st.integers(1, 70),
    RUNNING,
    st.lists(st.builds(Decode, EIGHTHS, st.floats(0.0, 60.0), st.integers(-1, 69)), max_size=6),
    st.integers(0, 69),
)
def test_a_prompt_without_a_row_has_alongside_it_what_a_row_due_then_would_have(
    seed: int, count: int, running: list[Decode], coming: list[Decode], place: int
) -> None:
    waiting, _ = levelled(seed, count)
    rows, place = waiting.rows, min(place, count - 1)
    coming = [decode._replace(row=min(decode.row, count - 1)) for decode in coming]
    added = [added_after(waiting, decode) for decode in coming]
    others = added[1:]
    # The row has no work of its own, as the prompt has none: a coming decode fills their window.
    rows.update(place, False, 0, [0.0] * LEVELS)
    before = waiting.alongside.tolist()
    groups = [decoding(running), native.Decodes()]
    rows.set_alongside(groups, [added, others], place, NOW_S, BUDGET_S, LEAST_S, PART)
    changed = [row for row, part in enumerate(waiting.alongside) if part != before[row]]
    assert changed in ([], [place])
    due_s = [float(waiting.due_s[place])]
    if waiting.due_s.tolist().count(due_s[0]) > 1 or any(decode.row == place for decode in coming):
        return  # another row may be due then, or it is behind itself
    (mean_s,) = rows.alongside_until_s(groups, [added, others], due_s, NOW_S, BUDGET_S, LEAST_S)
    assert PART * mean_s == pytest.approx(float(waiting.alongside[place]))


@given(
    st.integers(0, 1 << 32),
    st.integers(1, 70),
    RUNNING,
    st.lists(st.builds(Decode, EIGHTHS, st.floats(0.0, 60.0)), max_size=native.MOST_TRIED),
)
def test_promises_are_tried_alongside_more_decodes(
    seed: int, count: int, running: list[Decode], more: list[Decode]
) -> None:
    waiting, work_s = levelled(seed, count)
    rows = waiting.rows
    rows.set_alongside([decoding(running)], [[]], -1, NOW_S, BUDGET_S, LEAST_S, PART)
    added = [(native.RUNS, decode.cost_s, decode.length_s, 0.0, -1, 0.0) for decode in more]
    rows.try_decodes(0.25, added, NOW_S, BUDGET_S, PART)
    promised, margins, sum_s = np.flatnonzero(waiting.promised).tolist(), [], 0.0
    for row in promised:
        window_s = max(float(waiting.due_s[row]) - NOW_S, BUDGET_S)
        part = max(float(waiting.alongside[row]), 0.25)
        part += PART * plain_mean_s(more, window_s, 0.0)
        levels = work_s[row]
        steepest = (levels[-1] - levels[-2]) / (FRACTIONS[-1] - FRACTIONS[-2])
        tried_s = (
            plain_between(levels, part) if part <= 1.0 else levels[-1] + steepest * (part - 1.0)
        )
        sum_s += (tried_s + OVERHEAD_S) * INFLATION
        margins.append(float(waiting.due_s[row]) - sum_s)
    least_s = rows.least_margin_s(True, 0.0, OVERHEAD_S, INFLATION)
    assert least_s == pytest.approx(min(margins, default=math.inf))
    reported = rows.promise_margins(70, 0.0, OVERHEAD_S, INFLATION)
    assert [due_s for due_s, _ in reported] == [float(waiting.due_s[row]) for row in promised]
    assert [margin_s for _, margin_s in reported] == pytest.approx(margins)


@given(ROWS, st.integers(0, 89))
def test_a_row_fits_if_all_that_is_kept_is_in_time_with_it(rows: list[Row], place: int) -> None:
    waiting, rows = queued(rows)
    if place >= len(rows) or rows[place].rank or rows[place].due_s == math.inf:
        return
    kept = [row for row, other in enumerate(rows) if other.rank or row == place]
    margins = [
        rows[row].due_s
        - 0.5
        - sum(rows[other].work_s + OVERHEAD_S for other in kept if other <= row)
        for row in kept
        if row >= place
    ]
    assert waiting.rows.room_with_kept_s(place, 0.5, OVERHEAD_S) == min(margins)


@given(st.integers(0, 1 << 32), st.integers(1, 70), st.sampled_from([0.0, 0.3]), EIGHTHS)
def test_a_long_prompt_crowds_the_first_promise_without_room_for_short_ones(
    seed: int, count: int, coming: float, long_s: float
) -> None:
    waiting, levels = levelled(seed, count)
    rows, dice, expected, drain_s = waiting.rows, random.Random(seed), 0.25, 0.5
    long_s *= 16.0
    waiting.due_s[:] *= dice.choice([6.0, 12.0, 24.0])
    waiting.kept[:] |= [dice.random() < 0.3 for _ in range(count)]
    waiting.work_s[:] = [dice.randint(1, 30) for _ in range(count)]
    waiting.alongside[:] = [dice.choice([0.125, 0.5, 1.0]) for _ in range(count)]
    terms = NOW_S, drain_s, OVERHEAD_S, INFLATION, expected, coming

    def first_tight(place: int | None) -> int | None:
        sum_s = 0.0
        for row in range(count):
            if waiting.kept[row] or row == place:
                sum_s += plain_between(levels[row], max(expected, waiting.alongside[row]))
            if waiting.promised[row]:
                work_s = plain_between(levels[row], max(expected, waiting.alongside[row]))
                sum_s += (work_s + OVERHEAD_S) * INFLATION - work_s
                due_in_s = waiting.due_s[row] - NOW_S - drain_s
                if (place is None or row > place) and due_in_s * (1.0 - coming) < sum_s:
                    return row
        return None

    for place in np.flatnonzero(~waiting.kept).tolist():
        assert rows.is_tight(place, *terms) == (first_tight(place) is not None)
    tight = first_tight(None)
    crowding = [
        (-waiting.work_s[row], row)
        for row in range(tight or 0)
        if waiting.kept[row] and not waiting.promised[row] and waiting.work_s[row] > long_s
    ]
    assert rows.crowding(long_s, *terms) == min(crowding, default=(0.0, -1))[1]


@given(st.lists(st.tuples(EIGHTHS, EIGHTHS), max_size=200), st.integers(0, 1 << 32), EIGHTHS)
def test_decodes_are_counted_until_they_end_or_leave(
    decodes: list[tuple[float, float]], seed: int, due_s: float
) -> None:
    dice, counted = random.Random(seed), native.Decodes()
    there: dict[int, Decode] = {}
    for number, (cost_s, ends_s) in enumerate(decodes):
        counted.add(number, cost_s, ends_s)
        there[number] = Decode(cost_s, ends_s)
        if dice.random() < 0.4:
            gone = dice.choice([*there])
            del there[gone]
            counted.remove(gone)
            counted.remove(gone)
        assert counted.total_s == sum(decode.cost_s for decode in there.values())
    assert len(counted) == len(there)
    (mean_s,) = native.Rows().alongside_until_s([counted], [[]], [due_s], 0.0, 0.125, 0.0)
    assert mean_s == pytest.approx(plain_mean_s([*there.values()], max(due_s, 0.125), 0.0))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), unique=True), st.integers(0, 999))
def test_turns_follow_arrival_and_id_whatever_comes_and_goes(
    arrivals: list[tuple[int, int]], seed: int
) -> None:
    dice, waiting = random.Random(seed), WaitingQueue()
    for number, (arrival, name) in enumerate(arrivals * 3):
        there = [sequence for sequence in waiting.sequences if sequence.id == f"{arrival}.{name}"]
        if there:
            waiting.remove(there[0])
        sequence = Sequence(number, request(f"{arrival}.{name}", 8, float(arrival)), ())
        sequence.key = (float(dice.randint(0, 9)), float(arrival), sequence.id)
        waiting.add(sequence, [1.0] * LEVELS, 0)
    turns = waiting.values(native.TURN).tolist()
    by_turn = [
        sequence.key[1:]
        for _, sequence in sorted(
            zip(turns, waiting.sequences, strict=True), key=lambda pair: pair[0]
        )
    ]
    assert by_turn == sorted(by_turn) and len({*turns}) == len(turns)


def test_turns_are_spread_when_no_number_is_left_between_two() -> None:
    waiting = WaitingQueue()
    names = ["a", "c"] + [f"b{200 - number:03}" for number in range(200)]
    for number, name in enumerate(names):  # each comes right behind the first
        waiting.add(Sequence(number, request(name, 8), ()), [1.0] * LEVELS, 0)
    turns = waiting.values(native.TURN).tolist()
    assert turns == sorted(turns) and len({*turns}) == len(names)
    assert [sequence.id for sequence in waiting.sequences] == sorted(names)


class Counted(list[Sequence]):
    """Sequences, and how often one was read."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)


def test_a_row_among_a_thousand_due_at_once_takes_a_few_steps() -> None:
    waiting, _ = queued([Row(5.0, number % 7 / 8.0, 1.0, 1.0, 0, 0, True) for number in range(999)])
    assert waiting.sequences == sorted(waiting.sequences, key=lambda sequence: sequence.key)
    waiting.sequences = sequences = Counted(waiting.sequences)
    for place in (0, 1, 500, 998):
        sequences.reads = 0
        assert waiting.place(list.__getitem__(sequences, place).key) == place
        assert sequences.reads < 30
