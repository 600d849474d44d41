"""The compiled arithmetic over waiting prefills and decodes (rows.c): its only entry.

The library is built with the project, lies next to this file and does not depend on Python. Its
calls last microseconds, so that they keep the interpreter's lock. Memory belongs to the objects of
this module; rows.c describes its layout.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
import struct
from collections import abc
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from medha.errors import SetupError
from medha.prefill_times import LEVELS

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# Two dots, so that Python does not take it for a module.
LIBRARY = pathlib.Path(__file__).with_name("rows.kernel.so")
# Columns and flags of a row, and where a slot holds the rest; see rows.c.
DUE, WORK, ALONGSIDE, NEED, NORM, COLUMNS = range(6)
KEPT, PROMISED, READY, BEYOND, FLAGS = range(5)
ARRIVAL, TOKENS, PASSED, TURN, NUMBER, LEVEL = range(6)
SLOT = LEVEL + LEVELS
# Numbers of scratch and mark columns, and the one with margins.
SCRATCH, MARKS, LEFT, TRIAL = 7, 3, 1, 6
# The mark column of the rank, and its values for kept and protected rows without a promise.
RANK, BARELY_KEPT, PROTECTED = 0, 1, 3
# Kinds of a decode that is added.
NO_DECODE, RUNS, AFTER_KEPT, AFTER_RELEGATED = range(4)
# Eight-byte numbers of a group in `struct spans`.
REACH = 8
# Rows returned at a time: most batches hold one prompt or two.
FEW = 8
# The turn of the relegated, as an argument of `medha_order`.
NOTHING, FIRST_DUE, SHORT_ONES = range(3)
# Sums of a report, and how many of them are by relative slack.
SUMS, BANDS = 12, 8
_DECODE = struct.Struct("@qqddd")
_SLOT, _LEVELS, _NUMBER_BYTES = struct.Struct(f"@{SLOT}d"), struct.Struct(f"@{LEVELS}d"), 8

# (place, tier, is long)
Next = tuple[int, int, int]


class _Rows(ctypes.Structure):
    """`struct rows` of rows.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("columns", "flags", "slots", "slot")),
        *((name, ctypes.c_void_p) for name in ("scratch", "marks", "held", "able")),
        *((name, ctypes.c_int64) for name in ("capacity", "count", "kept", "left")),
        *((name, ctypes.c_double) for name in ("least", "least_promised", "least_bare", "last")),
    )


class _Decodes(ctypes.Structure):
    """`struct decodes` of rows.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ends", "cost", "numbers")),
        ("count", ctypes.c_int64),
    )


class _Spans(ctypes.Structure):
    """`struct spans` of rows.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("groups", "numbers", "first", "parts", "due")),
        *((name, ctypes.c_void_p) for name in ("row", "spare", "before", "reach")),
        *((name, ctypes.c_int64) for name in ("count", "group_count")),
    )


_POINTER, _NUMBER, _COUNT = ctypes.c_void_p, ctypes.c_double, ctypes.c_int64
# Arguments of each function, and what it returns.
_SIGNATURES = {
    "insert": ([_POINTER, _COUNT, ctypes.c_int32, ctypes.c_int, *[_NUMBER] * 5], None),
    "remove": ([_POINTER, _COUNT], None),
    "begin": ([_POINTER, _COUNT, _NUMBER, _NUMBER], None),
    "end": ([_POINTER, _COUNT, _NUMBER], _NUMBER),
    "decodes_at": ([_POINTER, _NUMBER], _NUMBER),
    "mean": ([_POINTER, _POINTER, *[_NUMBER] * 3, ctypes.c_int], None),
    "coming": ([_POINTER, ctypes.c_char_p, _COUNT, _NUMBER, _NUMBER], None),
    "apply": ([_POINTER, _NUMBER], None),
    "try": ([_POINTER, _COUNT, _NUMBER, _NUMBER, ctypes.c_char_p, *[_NUMBER] * 3], None),
    "room": ([_POINTER, _COUNT, ctypes.c_int, *[_NUMBER] * 5], _NUMBER),
    "least": ([_POINTER, ctypes.c_int, *[_NUMBER] * 3], _NUMBER),
    "promises": ([_POINTER, _COUNT, *[_NUMBER] * 3, _COUNT, _POINTER], _COUNT),
    "tight": ([_POINTER, _COUNT, *[_NUMBER] * 6], _COUNT),
    "crowding": ([_POINTER, *[_NUMBER] * 7], _COUNT),
    "promise_needs": ([_POINTER], ctypes.c_int),
    "work_before": ([_POINTER, _COUNT], _NUMBER),
    "spans_fit": ([_POINTER, _COUNT, *[_NUMBER] * 5], ctypes.c_int),
    "spans_least": ([_POINTER, _COUNT, ctypes.c_int, *[_NUMBER] * 3], _NUMBER),
    "spans_lower": ([_POINTER, _COUNT, *[_NUMBER] * 3], None),
    "report": ([_POINTER, _NUMBER, _NUMBER, ctypes.c_char_p, ctypes.c_int, _POINTER], None),
    "margins": ([_POINTER, *[_NUMBER] * 3], None),
    "relegate": ([_POINTER, _NUMBER, _COUNT, _POINTER], _COUNT),
    "open": ([_POINTER, *[_NUMBER] * 3], None),
    "fitting": ([_POINTER, _NUMBER, _COUNT], _COUNT),
    "keep": ([_POINTER, _COUNT], None),
    "order": ([_POINTER, *[_NUMBER] * 3, ctypes.c_int, _NUMBER, ctypes.c_int], None),
    "few": ([_POINTER, _NUMBER, ctypes.c_int, _COUNT, _POINTER], _COUNT),
}


@functools.cache
def load(library: pathlib.Path = LIBRARY) -> ctypes.PyDLL:
    """Load the library; raise SetupError if it was not built for this machine."""
    try:
        kernel = ctypes.PyDLL(str(library))
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(kernel, f"medha_{name}")
            function.argtypes, function.restype = arguments, result
    except (OSError, AttributeError) as error:
        raise SetupError(
            f"{library} is the compiled part of the scheduler and cannot be loaded ({error}); run"
            " `make setup`, or install medha with its worker where there is a C compiler"
        ) from None
    return kernel


class WorkSums(NamedTuple):
    """Sums over a group's rows, in seconds of work.

    `bands`: by relative slack; `needy`: number of rows that need pages.
    """

    pending_s: float
    bands: tuple[float, ...]
    relegated_s: float
    kept_short_s: float
    relegated_short_s: float
    needy: int


class Decodes:
    """Decodes of one group, in the order of their ends.

    `total_s`: what they take of each batch.
    """

    def __init__(self) -> None:
        self._kernel = load()
        self.total_s = 0.0
        self._ends_s: dict[int, float] = {}
        self._numbers = np.zeros(0, dtype=np.int64)
        self._values = np.zeros((2, 0))
        self._struct = _Decodes()
        self.at = ctypes.addressof(self._struct)

    def __len__(self) -> int:
        return len(self._ends_s)

    def add(self, number: int, cost_s: float, ends_s: float) -> None:
        """Add a decode that takes `cost_s` of each batch until `ends_s`."""
        count = len(self._ends_s)
        if count == len(self._numbers):
            self._grow(count + max(64, count))
        self._kernel.medha_begin(self.at, number, cost_s, ends_s)
        self._ends_s[number] = ends_s
        self.total_s += cost_s

    def remove(self, number: int) -> None:
        """Remove a decode, if it is there."""
        ends_s = self._ends_s.pop(number, None)
        if ends_s is not None:
            cost_s: float = self._kernel.medha_end(self.at, number, ends_s)
            self.total_s = max(0.0, self.total_s - cost_s) if self._ends_s else 0.0

    def at_s(self, time_s: float) -> float:
        """Return the decode time of a batch at that time."""
        cost_s: float = self._kernel.medha_decodes_at(self.at, time_s)
        return cost_s

    def _grow(self, capacity: int) -> None:
        count = len(self._ends_s)
        values, numbers = np.zeros((2, capacity)), np.zeros(capacity, dtype=np.int64)
        values[:, :count], numbers[:count] = self._values[:, :count], self._numbers[:count]
        self._values, self._numbers = values, numbers
        row = self._struct
        row.ends, row.cost = values[0].ctypes.data, values[1].ctypes.data
        row.numbers = numbers.ctypes.data


def added_decode(kind: int, row: int, cost_s: float, length_s: float, share: float) -> bytes:
    """Return a decode as `struct decode` of rows.c."""
    return _DECODE.pack(kind, row, cost_s, length_s, share)


NONE_ADDED = added_decode(NO_DECODE, -1, 0.0, 0.0, 1.0)


class Rows:
    """The rows of one group: memory, and the passes over it.

    `columns`, `flags`, `slot`, `slots`: arrays of [COLUMNS, n], [FLAGS, n], [n] and
    [slot, LEVEL + LEVELS], with room for more rows than there are. For a decision
    call `margins` first, then `relegate`, `open` and `fitting`, `order`, and `few` repeatedly.
    `column_cells`, `flag_cells`, `slot_cells`: the same memory, faster to read one by one.
    """

    yields = None  # no row leaves a part of the budget to others
    columns: Floats
    flags: Mask
    slots: Floats
    slot: npt.NDArray[np.int32]
    column_cells: list[Any]  # memory views: the type checker expects integers in them
    flag_cells: list[Any]
    slot_cells: Any

    def __init__(self) -> None:
        self._kernel, self._few = load(), (ctypes.c_int64 * (3 * FEW))()
        self._sums = (ctypes.c_double * SUMS)()
        self._rows, self.count = _Rows(), 0
        self.at = self._at = ctypes.addressof(self._rows)
        self._free: list[int] = []
        self._allot(64)

    # --- rows -------------------------------------------------------------------------------------

    def insert(
        self,
        place: int,
        values: tuple[float, ...],
        flags: int,
        due_s: float,
        work_s: float,
        alongside: float,
        need: int,
        norm_s: float,
    ) -> None:
        """Insert a row; `values` are those of its slot. Bit k of `flags` is flag k."""
        if not self._free:
            self._allot(2 * self.columns.shape[1])
        slot = self._free.pop()
        _SLOT.pack_into(self._slot_bytes, slot * _SLOT.size, *values)
        self._kernel.medha_insert(
            self._at, place, slot, flags, due_s, work_s, alongside, need, norm_s
        )
        self.count += 1

    def remove(self, place: int) -> None:
        self._free.append(self._slot_of[place])
        self._kernel.medha_remove(self._at, place)
        self.count -= 1

    def value(self, place: int, value: int) -> float:
        """Return a value of the slot of the row at `place`."""
        cell: float = self.slot_cells[self._slot_of[place] * SLOT + value]
        return cell

    def set_value(self, place: int, value: int, number: float) -> None:
        self.slot_cells[self._slot_of[place] * SLOT + value] = number

    def levels(self, place: int) -> list[float]:
        """Return the seconds of the work of the row at `place`, by level of decodes."""
        first = self._slot_of[place] * SLOT + LEVEL
        levels: list[float] = self.slot_cells[first : first + LEVELS].tolist()
        return levels

    def set_levels(self, place: int, levels: list[float]) -> None:
        first = self._slot_of[place] * SLOT + LEVEL
        _LEVELS.pack_into(self._slot_bytes, first * _NUMBER_BYTES, *levels)

    # --- work alongside decodes -------------------------------------------------------------------

    def set_alongside(
        self,
        decodes: list[Decodes],
        coming: list[bytes],
        now: float,
        budget_s: float,
        least_s: float,
        part: float,
    ) -> None:
        """Compute the decodes alongside each row until it is due, and its work alongside them.

        `decodes`: of its group, and of others if it waits for the slowest; `coming`: those that
        come later, as from `added_decode`; `least_s`: what a late decode still takes; `part`: what
        a second of a batch is of the decode capacity.
        """
        kernel, at = self._kernel, self._at
        for turn, group in enumerate(decodes):
            kernel.medha_mean(at, group.at, now, budget_s, least_s, turn)
        if coming:
            kernel.medha_coming(at, b"".join(coming), len(coming), now, budget_s)
        kernel.medha_apply(at, part)

    def try_decode(
        self,
        place: int,
        plus: float,
        least: float,
        decode: bytes,
        now: float,
        budget_s: float,
        part: float,
    ) -> None:
        """Compute `trial_s` of the promises, and of the row at `place` if it is not -1.

        That is the work alongside the decodes that are counted and `plus`, at least `least`, and
        one `decode` more.
        """
        self._kernel.medha_try(self._at, place, plus, least, decode, now, budget_s, part)

    @property
    def trial_s(self) -> Floats:
        """Work of the rows tried last; of other rows without meaning."""
        trial_s: Floats = self._scratch[TRIAL, : self.count]
        return trial_s

    def tried_s(self, place: int) -> float:
        """Return the work of a row tried last."""
        return float(self._scratch[TRIAL, place])

    # --- promises ---------------------------------------------------------------------------------

    def room_for_promise_s(
        self,
        place: int,
        start: float,
        overhead_s: float,
        inflation: float,
        long_s: float,
        widened: float,
    ) -> float:
        """Return what a promise for the row at `place` leaves; negative if it does not fit.

        By `trial_s`. Works beyond `long_s` count `widened`.
        """
        room_s: float = self._kernel.medha_room(
            self._at, place, True, start, overhead_s, inflation, long_s, widened
        )
        return room_s

    def room_with_kept_s(self, place: int, start: float, overhead_s: float) -> float:
        """Return what the row at `place` leaves if it is kept, too; negative if it does not fit."""
        room_s: float = self._kernel.medha_room(
            self._at, place, False, start, overhead_s, 1.0, 0.0, 1.0
        )
        return room_s

    def least_margin_s(
        self, tried: bool, start: float, overhead_s: float, inflation: float
    ) -> float:
        """Return the least margin of a promise; infinite with none. By `trial_s` if `tried`."""
        least_s: float = self._kernel.medha_least(self._at, tried, start, overhead_s, inflation)
        return least_s

    def promise_margins(
        self,
        count: int,
        start: float,
        overhead_s: float,
        inflation: float,
        most: int,
        after_s: float = 0.0,
    ) -> tuple[list[float], list[float]]:
        """Return the times until due and the margins of all `count` promises, by `trial_s`.

        At most `most` of them: then each is of a run of promises, as if all its work were due with
        the first. Times until due count from `after_s` before `start`.
        """
        values = (ctypes.c_double * (2 * most))()
        runs = self._kernel.medha_promises(
            self._at, count, start, overhead_s, inflation, most, values
        )
        margins = np.frombuffer(memoryview(values))
        return (margins[:runs] + after_s).tolist(), margins[most : most + runs].tolist()

    def is_tight(
        self,
        place: int,
        now: float,
        drain_s: float,
        overhead_s: float,
        inflation: float,
        expected: float,
        coming: float,
    ) -> bool:
        """Return whether the row at `place`, if kept, leaves a later promise too little room.

        Short prompts to come take the part `coming` of the time until it is due. Works are those
        alongside at least `expected`, a part of the decode capacity.
        """
        tight: int = self._kernel.medha_tight(
            self._at, place, now, drain_s, overhead_s, inflation, expected, coming
        )
        return tight >= 0

    def crowding(
        self,
        long_s: float,
        now: float,
        drain_s: float,
        overhead_s: float,
        inflation: float,
        expected: float,
        coming: float,
    ) -> int:
        """Return the largest row beyond `long_s`, kept without a promise, before a tight promise.

        -1 if there is none; tight as in `is_tight`.
        """
        place: int = self._kernel.medha_crowding(
            self._at, long_s, now, drain_s, overhead_s, inflation, expected, coming
        )
        return place

    def promise_needs_pages(self) -> bool:
        """Return whether a promised row needs pages."""
        needs: int = self._kernel.medha_promise_needs(self._at)
        return needs > 0

    def work_before_s(self, place: int) -> float:
        """Return the work of the rows before a place."""
        work_s: float = self._kernel.medha_work_before(self._at, place)
        return work_s

    def sums(self, now: float, short_below_s: float, edges: bytes, *, all_kept: bool) -> WorkSums:
        """Return sums of work. `short_below_s`: divisor of slack up to which a prompt is short.

        `edges`: upper edges of BANDS bands of relative slack, packed. `all_kept`: at any rank.
        """
        self._kernel.medha_report(self._at, now, short_below_s, edges, all_kept, self._sums)
        sums = self._sums[:]
        bands = tuple(sums[:BANDS])
        relegated_s, kept_short_s, relegated_short_s, needy = sums[BANDS:]
        return WorkSums(sum(bands), bands, relegated_s, kept_short_s, relegated_short_s, int(needy))

    # --- one decision with `lars` -----------------------------------------------------------------

    @property
    def least_s(self) -> float:
        """Smallest margin of a kept row; infinite if none."""
        least: float = self._rows.least
        return least

    @property
    def least_promised_s(self) -> float:
        """Smallest margin of a promise; infinite if none."""
        least: float = self._rows.least_promised
        return least

    @property
    def least_bare_s(self) -> float:
        """The same at bare costs, if only promises were kept."""
        least: float = self._rows.least_bare
        return least

    @property
    def last_s(self) -> float:
        """Time for which the row due last may run out of order; set by `order`."""
        last: float = self._rows.last
        return last

    def margins(self, start: float, overhead_s: float, inflation: float) -> None:
        """Compute the margins of kept rows from `start` on, which includes the drain."""
        self._kernel.medha_margins(self._at, start, overhead_s, inflation)

    def margin_s(self, place: int) -> float:
        """Return the margin of a kept row."""
        return float(self._scratch[LEFT, place])

    def relegate(self, tolerance_s: float, most: int, protected: Mask | None = None) -> list[int]:
        """Return the rows without a promise and not protected that give way, in that order."""
        lost = (ctypes.c_int64 * most)()
        if protected is None:
            return lost[: self._kernel.medha_relegate(self._at, tolerance_s, most, lost)]
        ranks = self._marks[RANK, : len(protected)]
        ranks[protected & (ranks == BARELY_KEPT)] = PROTECTED
        places = lost[: self._kernel.medha_relegate(self._at, tolerance_s, most, lost)]
        ranks[ranks == PROTECTED] = BARELY_KEPT
        return places

    def open(self, start: float, overhead_s: float, inflation: float) -> None:
        """Prepare `fitting`; requires `margins` before, and does not change them."""
        self._kernel.medha_open(self._at, start, overhead_s, inflation)

    def fitting(self, guard_s: float, after: int = -1) -> int:
        """Return the smallest row not kept that fits with `guard_s` to spare; -1 if none.

        Rows up to `after` in size are skipped.
        """
        place: int = self._kernel.medha_fitting(self._at, guard_s, after)
        return place

    def keep(self, place: int) -> None:
        """Keep the row at `place`: others find less room."""
        self._kernel.medha_keep(self._at, place)

    def order(
        self,
        pages: float,
        start: float,
        long_above: float,
        by_tokens: bool,
        guard_s: float,
        owed: int,
    ) -> None:
        """Order the ready rows that need at most `pages`; `owed` is a turn of the relegated."""
        self._kernel.medha_order(self._at, pages, start, long_above, by_tokens, guard_s, owed)

    def few(self, pages: float, only_short: bool) -> list[Next]:
        """Return the next rows in order; none are left if it is empty."""
        count = self._kernel.medha_few(self._at, pages, only_short, FEW, self._few)
        few = self._few[:]
        return list(zip(few[:count], few[FEW : FEW + count], few[2 * FEW :], strict=False))

    # --- memory -----------------------------------------------------------------------------------

    def _allot(self, capacity: int) -> None:
        """Move all rows to larger arrays."""
        count = self.count
        columns, slots = np.zeros((COLUMNS, capacity)), np.zeros((capacity, LEVEL + LEVELS))
        flags, slot = np.zeros((FLAGS, capacity), np.bool_), np.zeros(capacity, np.int32)
        if count:
            columns[:, :count], flags[:, :count] = self.columns[:, :count], self.flags[:, :count]
            slots[: len(self.slots)], slot[:count] = self.slots, self.slot[:count]
        self._free += range(capacity - 1, count - 1, -1)
        self.columns, self.flags, self.slots, self.slot = columns, flags, slots, slot
        self.column_cells, self.flag_cells = (
            [row.data for row in columns],
            [row.data for row in flags],
        )
        self._slot_bytes, self._slot_of = slots.data.cast("B"), slot.data
        self.slot_cells = self._slot_bytes.cast("d")
        self._scratch = np.zeros((SCRATCH, capacity))
        self._marks = np.zeros((MARKS, capacity), dtype=np.int8)
        self._lists = np.zeros((2, capacity + 1), dtype=np.int32)  # rows, with one spare
        arrays = columns, flags, slots, slot, self._scratch, self._marks, *self._lists
        for name, array in zip(_NAMES, arrays, strict=True):
            setattr(self._rows, name, array.ctypes.data)
        self._rows.capacity = capacity


_NAMES = ("columns", "flags", "slots", "slot", "scratch", "marks", "held", "able")


class Spans:
    """Prompts that several groups work on, laid out over their groups to find promises' margins.

    A group's own margins cover its own queue only. A prompt that spans groups works in ever more of
    them, and each time waits for the busiest:

        g0  |-- promised, due before --|      waits        |== phase 1 ==|-- due later --|
        g1  |==== phase 0, alone: tokens_per_group ========|== phase 1 ==|-- due later --|

    Promises are laid out in order of deadline. Gaps stay open: a prompt that fills one leaves
    earlier than predicted. A promise's margin is the smaller of its own and those of promises laid
    out behind it. `groups`: rows of all groups; `prompts`: (due, arrival, id), number and groups of
    each prompt, which need not wait.
    """

    def __init__(
        self,
        groups: abc.Mapping[int, Rows],
        prompts: list[tuple[tuple[float, float, str], int, tuple[int, ...]]],
    ) -> None:
        self._kernel, self._rows = load(), [*groups.values()]
        self._place = {group: place for place, group in enumerate(groups)}
        first, parts = [0], []
        prompts = sorted(prompts)
        for _, _, held in prompts:
            parts += [self._place[group] for group in held if group in self._place]
            first.append(len(parts))
        count = len(prompts)
        self._arrays = {
            "groups": np.array([rows.at for rows in self._rows], dtype=np.uintp),
            "numbers": np.array([number for _, number, _ in prompts], dtype=np.int64),
            "first": np.array(first, dtype=np.int64),
            "parts": np.array(parts, dtype=np.int64),
            "due": np.array([key[0] for key, _, _ in prompts]),
            "row": np.zeros(count, dtype=np.int64),
            "spare": np.zeros(count),
            "before": np.zeros(count),
            "reach": np.zeros((len(self._rows), REACH)),
        }
        self._struct = _Spans(count=count, group_count=len(self._rows))
        for name, array in self._arrays.items():
            setattr(self._struct, name, array.ctypes.data)
        self._at = ctypes.addressof(self._struct)

    def fit(
        self,
        number: int,
        due_s: float,
        guard_s: float,
        by_s: float,
        overhead_s: float,
        inflation: float,
    ) -> bool:
        """Return whether promises hold, with `guard_s` to spare, if a newcomer gets one, too.

        By the works tried last in each group. `number` and `due_s` are of the newcomer; `by_s`:
        now, plus the time lost behind stage 0. A promise that is too late already, and no later
        with the newcomer, is no reason to refuse.
        """
        fit: int = self._kernel.medha_spans_fit(
            self._at, number, due_s, guard_s, by_s, overhead_s, inflation
        )
        return fit > 0

    def least_s(
        self, group: int, tried: bool, by_s: float, overhead_s: float, inflation: float
    ) -> float:
        """Return the least margin of promises in `group`; infinite with none.

        `tried`: by the works tried last there.
        """
        least_s: float = self._kernel.medha_spans_least(
            self._at, self._place[group], tried, by_s, overhead_s, inflation
        )
        return least_s

    def lower(self, group: int, by_s: float, overhead_s: float, inflation: float) -> None:
        """Limit the margins of `group`, just computed, to those across groups."""
        self._kernel.medha_spans_lower(self._at, self._place[group], by_s, overhead_s, inflation)
