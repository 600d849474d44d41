"""The compiled arithmetic over waiting prefills and decodes (rows.c): its only entry.

The extension module is built with the project and lies next to this file. Its calls last
microseconds, so that they keep the interpreter's lock. Arrays belong to the objects of this module;
rows.c describes their layout.
"""

from __future__ import annotations

import functools
import importlib
from collections import abc
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from medha.errors import SetupError
from medha.prefill_times import LEVELS

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

MODULE = "medha.scheduling.rows"
# Columns and flags of a row, and where a slot holds the rest; see rows.c.
DUE, WORK, BARE_WORK, ALONGSIDE, NEED, NORM, COLUMNS = range(7)
KEPT, PROMISED, READY, BEYOND, FLAGS = range(5)
ARRIVAL, TOKENS, PASSED, TURN, NUMBER, LEVEL = range(6)
SLOT = LEVEL + LEVELS
# Numbers of scratch and mark columns.
SCRATCH, MARKS = 9, 3
# The mark column of the rank, and its values for kept and protected rows without a promise.
RANK, BARELY_KEPT, PROTECTED = 0, 1, 3
# Kinds of a decode that is added.
RUNS, COMES, FOLLOWS = range(3)
# Rows that `Rows.few` returns at most.
FEW = 8
# The turn of the relegated, as an argument of `Rows.order`.
NOTHING, FIRST_DUE, SHORT_ONES = range(3)
# How many sums of a report are by relative slack.
BANDS = 8

# (place, tier, is long)
Next = tuple[int, int, int]
# (kind, seconds of each batch, for how many seconds, in how many it begins, number, due): one that
# FOLLOWS the prompt of that number, due then, begins as its row says, and at once if it has none;
# the fourth is then the part of the time that the prompt has if it is relegated.
Added = tuple[int, float, float, float, int, float]
# Decodes that are tried at once, at most.
MOST_TRIED = 8


@functools.cache
def load(module: str = MODULE) -> Any:
    """Load the extension module; raise SetupError if it was not built for this machine."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SetupError(
            f"{module} is the compiled part of the scheduler and cannot be loaded ({error}); run"
            " `make setup`, or install medha with its worker where there is a C compiler"
        ) from None


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
        self.kernel: Any = load().Decodes()
        self.total_s = 0.0
        self._ends_s: dict[int, float] = {}
        self._excluded_s = 0.0

    def __len__(self) -> int:
        return len(self._ends_s)

    def add(self, number: int, cost_s: float, ends_s: float) -> None:
        """Add a decode that takes `cost_s` of each batch until `ends_s`."""
        self.kernel.add(number, cost_s, ends_s)
        self._ends_s[number] = ends_s
        self.total_s += cost_s

    def remove(self, number: int) -> None:
        """Remove a decode, if it is there."""
        ends_s = self._ends_s.pop(number, None)
        if ends_s is not None:
            cost_s: float = self.kernel.remove(number, ends_s)
            self.total_s = max(0.0, self.total_s - cost_s) if self._ends_s else 0.0

    def exclude(self, number: int) -> None:
        """Leave a decode out of what rows run alongside, until `include`."""
        self._excluded_s = self.kernel.remove(number, self._ends_s[number])

    def include(self, number: int) -> None:
        """Count the decode again that was excluded last."""
        self.kernel.add(number, self._excluded_s, self._ends_s[number])


class Rows:
    """The rows of one group: memory, and the passes over it.

    `columns`, `flags`, `slot`, `slots`: arrays of [COLUMNS, n], [FLAGS, n], [n] and
    [slot, LEVEL + LEVELS], with room for more rows than there are. For a decision
    call `margins` first, then `relegate`, `open` and `fitting`, `order`, and `few` repeatedly.
    """

    columns: Floats
    flags: Mask
    slots: Floats
    slot: npt.NDArray[np.int32]

    def __init__(self) -> None:
        self.kernel: Any = load().Rows()
        self.yields: Floats | None = None  # no row leaves a part of the budget to others
        self._capacity = 0
        self._allot(64)

    def __len__(self) -> int:
        count: int = self.kernel.count
        return count

    # --- rows -------------------------------------------------------------------------------------

    @property
    def kept_count(self) -> int:
        count: int = self.kernel.kept_count
        return count

    @property
    def promised_count(self) -> int:
        count: int = self.kernel.promised_count
        return count

    @property
    def ready_count(self) -> int:
        count: int = self.kernel.ready_count
        return count

    def first_due(self, due_s: float) -> int:
        """Return the first row that is due at that time or later."""
        place: int = self.kernel.first_due(due_s)
        return place

    def insert(
        self,
        place: int,
        flags: int,
        due_s: float,
        alongside: float,
        need: int,
        norm_s: float,
        arrival_s: float,
        tokens: int,
        turn: float,
        number: int,
        levels: list[float],
    ) -> None:
        """Insert a row; bit k of `flags` is flag k."""
        if len(self) == self._capacity:
            self._allot(2 * self._capacity)
        self.kernel.insert(
            place, flags, due_s, alongside, need, norm_s, arrival_s, tokens, turn, number, levels
        )

    def remove(self, place: int) -> None:
        self.kernel.remove(place)

    def update(self, place: int, ready: bool, tokens: int, levels: list[float]) -> None:
        """Set whether the row at `place` is ready, its tokens, and its work by level of decodes."""
        self.kernel.update(place, ready, tokens, levels)

    def set_flags(self, place: int, kept: bool, promised: bool, ready: bool) -> None:
        self.kernel.set_flags(place, kept, promised, ready)

    def start(self, place: int) -> None:
        """The row needs no pages any more."""
        self.kernel.start(place)

    def work_s(self, place: int) -> float:
        """Return the work of the row at `place`."""
        work_s: float = self.kernel.work(place)
        return work_s

    def bare_work_s(self, place: int) -> float:
        """Return the work of the row at `place` with no decodes alongside it."""
        bare_s: float = self.kernel.bare_work(place)
        return bare_s

    # --- work alongside decodes -------------------------------------------------------------------

    def set_alongside(
        self,
        decodes: list[Decodes],
        coming: list[list[Added]],
        place: int,
        now: float,
        budget_s: float,
        least_s: float,
        part: float,
    ) -> None:
        """Compute the decodes alongside each row until it is due, and its work alongside them.

        Of the row at `place`, or of all if that is -1. `decodes`: of its group, and of others if it
        waits for the slowest; `coming`: those of each that come later; `least_s`: what a late
        decode still takes; `part`: what a second of a batch is of the decode capacity.
        """
        kernels = [of_group.kernel for of_group in decodes]
        self.kernel.set_alongside(kernels, coming, place, now, budget_s, least_s, part)

    def alongside_until_s(
        self,
        decodes: list[Decodes],
        coming: list[list[Added]],
        due_s: list[float],
        now: float,
        budget_s: float,
        least_s: float,
    ) -> list[float]:
        """Return the decode seconds of a batch, on average, alongside prompts due then.

        These have no row; `due_s` ascends. The other arguments are as in `set_alongside`.
        """
        kernels = [of_group.kernel for of_group in decodes]
        means_s: list[float] = self.kernel.alongside_until(
            kernels, coming, due_s, now, budget_s, least_s
        )
        return means_s

    def try_decodes(
        self, least: float, decodes: list[Added], now: float, budget_s: float, part: float
    ) -> None:
        """Try the work of the promises.

        That is the work alongside the decodes that are counted, at least `least`, and `decodes`
        more, at most MOST_TRIED.
        """
        self.kernel.try_decodes(decodes, least, now, budget_s, part)

    # --- promises ---------------------------------------------------------------------------------

    def room_with_kept_s(self, place: int, start: float, overhead_s: float) -> float:
        """Return what the row at `place` leaves if it is kept, too; negative if it does not fit."""
        room_s: float = self.kernel.room(place, start, overhead_s)
        return room_s

    def least_margin_s(
        self, tried: bool, start: float, overhead_s: float, inflation: float
    ) -> float:
        """Return the least margin of a promise; infinite with none.

        `tried`: by the works tried last.
        """
        least_s: float = self.kernel.least_margin(tried, start, overhead_s, inflation)
        return least_s

    def promise_margins(
        self,
        most: int,
        start: float,
        overhead_s: float,
        inflation: float,
        after_s: float = 0.0,
    ) -> list[tuple[float, float]]:
        """Return (due in, margin) of all promises by deadline, by the works tried last.

        At most `most` of them: then each is of a run of promises, as if all its work were due with
        the first. Times until due count from `after_s` before `start`.
        """
        margins: list[tuple[float, float]] = self.kernel.promises(
            most, start, overhead_s, inflation, after_s
        )
        return margins

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
        tight: int = self.kernel.tight(place, now, drain_s, overhead_s, inflation, expected, coming)
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
        place: int = self.kernel.crowding(
            long_s, now, drain_s, overhead_s, inflation, expected, coming
        )
        return place

    def promise_needs_pages(self) -> bool:
        """Return whether a promised row needs pages."""
        needs: bool = self.kernel.promise_needs()
        return needs

    def has_relegated(self) -> bool:
        """Return whether a row is neither kept nor beyond its tenant's share."""
        relegated: bool = self.kernel.relegated()
        return relegated

    def work_before_s(self, place: int) -> float:
        """Return the work of the rows before a place."""
        work_s: float = self.kernel.work_before(place)
        return work_s

    def sums(
        self, now: float, short_below_s: float, edges: tuple[float, ...], all_kept: bool
    ) -> WorkSums:
        """Return sums of work. `short_below_s`: divisor of slack up to which a prompt is short.

        `edges`: upper edges of BANDS bands of relative slack. `all_kept`: at any rank.
        """
        sums: list[float] = self.kernel.report(now, short_below_s, all_kept, edges)
        bands = tuple(sums[:BANDS])
        relegated_s, kept_short_s, relegated_short_s, needy = sums[BANDS:]
        return WorkSums(sum(bands), bands, relegated_s, kept_short_s, relegated_short_s, int(needy))

    # --- one decision with `lars` -----------------------------------------------------------------

    @property
    def least_s(self) -> float:
        """Smallest margin of a kept row; infinite if none."""
        least: float = self.kernel.least
        return least

    @property
    def least_promised_s(self) -> float:
        """Smallest margin of a promise; infinite if none."""
        least: float = self.kernel.least_promised
        return least

    @property
    def least_bare_s(self) -> float:
        """The same at bare costs, if only promises were kept."""
        least: float = self.kernel.least_bare
        return least

    @property
    def last_s(self) -> float:
        """Time for which the row due last may run out of order; set by `order`."""
        last: float = self.kernel.last
        return last

    def margins(self, start: float, overhead_s: float, inflation: float) -> None:
        """Compute the margins of kept rows from `start` on, which includes the drain."""
        self.kernel.margins(start, overhead_s, inflation)

    def margin_s(self, place: int) -> float:
        """Return the margin of a kept row."""
        margin_s: float = self.kernel.margin(place)
        return margin_s

    def relegate(self, tolerance_s: float, most: int, protected: Mask | None = None) -> list[int]:
        """Return the rows without a promise and not protected that give way, in that order."""
        ranks = self._marks[RANK, : len(self)]
        if protected is not None:
            ranks[protected & (ranks == BARELY_KEPT)] = PROTECTED
        places: list[int] = self.kernel.relegate(tolerance_s, most)
        if protected is not None:
            ranks[ranks == PROTECTED] = BARELY_KEPT
        return places

    def open(self, start: float, overhead_s: float, inflation: float) -> None:
        """Prepare `fitting`; requires `margins` before, and does not change them."""
        self.kernel.open(start, overhead_s, inflation)

    def fitting(self, guard_s: float, after: int = -1) -> int:
        """Return the smallest row not kept that fits with `guard_s` to spare; -1 if none.

        Rows up to `after` in size are skipped.
        """
        place: int = self.kernel.fitting(guard_s, after)
        return place

    def keep(self, place: int) -> None:
        """Keep the row at `place`: others find less room."""
        self.kernel.keep(place)

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
        self.kernel.order(pages, start, long_above, by_tokens, guard_s, owed)

    def few(self, pages: float, only_short: bool) -> list[Next]:
        """Return the next rows in order; none are left if it is empty."""
        few: list[Next] = self.kernel.few(pages, only_short)
        return few

    # --- memory -----------------------------------------------------------------------------------

    def _allot(self, capacity: int) -> None:
        """Move all rows to larger arrays."""
        count = self._capacity
        columns, slots = np.zeros((COLUMNS, capacity)), np.zeros((capacity, SLOT))
        flags = np.zeros((FLAGS, capacity), np.bool_)
        slot = np.arange(capacity, dtype=np.int32)
        if count:
            columns[:, :count], flags[:, :count] = self.columns, self.flags
            slots[:count], slot[:count] = self.slots, self.slot
        self.columns, self.flags, self.slots, self.slot = columns, flags, slots, slot
        self._marks = np.zeros((MARKS, capacity), dtype=np.int8)
        held, able = np.zeros((2, capacity), dtype=np.int32)
        scratch = np.zeros((SCRATCH, capacity))
        self.kernel.allot(columns, flags, slots, slot, scratch, self._marks, held, able)
        self._capacity = capacity


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
        self._place = {group: place for place, group in enumerate(groups)}
        places = [
            (key[0], number, tuple(self._place[of] for of in held if of in self._place))
            for key, number, held in sorted(prompts)
        ]
        self._kernel: Any = load().Spans(tuple(rows.kernel for rows in groups.values()), places)

    def least_s(
        self, group: int, tried: bool, by_s: float, overhead_s: float, inflation: float
    ) -> float:
        """Return the least margin of promises in `group`; infinite with none.

        `tried`: by the works tried last there.
        """
        place = self._place[group]
        least_s: float = self._kernel.least(place, tried, by_s, overhead_s, inflation)
        return least_s

    def lower(self, group: int, by_s: float, overhead_s: float, inflation: float) -> None:
        """Limit the margins of `group`, just computed, to those across groups."""
        self._kernel.lower(self._place[group], False, by_s, overhead_s, inflation)
