"""The compiled arithmetic of a decision with the policy `lars` (lars.c), behind its one door.

What crosses are the arrays of one group's rows: those of `Waiting`, and two of the same width for
what is computed. The library is built with the project, stands beside this file and knows nothing
of Python. It is opened only where something is scheduled by `lars`. Its calls last microseconds, so
they keep the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib

import numpy as np

from medha.errors import SetupError
from medha.scheduling.lars import Mask
from medha.scheduling.waiting import Waiting

# Two dots, so that no one takes it for a module of Python's.
LIBRARY = pathlib.Path(__file__).with_name("lars.kernel.so")
# Columns of lars.c: how many of scratch and of marks, and which holds margins.
SCRATCH, MARKS, LEFT = 5, 3, 1
# Which of marks is the rank, and what it is for those without a promise that are kept.
RANK, KEPT, SPARED = 0, 1, 3
# Rows handed out at a time: most batches hold one prompt or two.
FEW = 8
# What the relegated have coming, as `medha_order` takes it.
NOTHING, FIRST_DUE, SHORT_ONES = range(3)

# (place, tier, whether long)
Next = tuple[int, int, int]


class _Rows(ctypes.Structure):
    """`struct rows` of lars.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("fields", "flags", "scratch", "marks")),
        *((name, ctypes.c_void_p) for name in ("held", "able")),
        *((name, ctypes.c_int64) for name in ("capacity", "count", "kept", "left")),
        *((name, ctypes.c_double) for name in ("least", "least_promised", "least_bare", "last")),
    )


@functools.cache
def load(library: pathlib.Path = LIBRARY) -> ctypes.PyDLL:
    """The library; raises SetupError when it was not built or not for this machine."""
    pointer, number, count = ctypes.c_void_p, ctypes.c_double, ctypes.c_int64
    try:
        kernel = ctypes.PyDLL(str(library))
        margins, relegate = kernel.medha_margins, kernel.medha_relegate
        order, few = kernel.medha_order, kernel.medha_few
        alone = kernel.medha_alone
        open_, fitting, keep = kernel.medha_open, kernel.medha_fitting, kernel.medha_keep
    except (OSError, AttributeError) as error:
        raise SetupError(
            f"{library} is the compiled part of the scheduler's policy lars and cannot be loaded"
            f" ({error}); run `make setup`, or install medha with its worker where there is a C"
            " compiler"
        ) from None
    margins.argtypes = [pointer, number, number, number, number]
    relegate.argtypes = [pointer, number, count, pointer]
    order.argtypes = [
        pointer, number, number, number, number, ctypes.c_int, number, ctypes.c_int,
    ]  # fmt: skip
    few.argtypes = [pointer, number, ctypes.c_int, count, pointer]
    open_.argtypes, fitting.argtypes = margins.argtypes, [pointer, number, count]
    keep.argtypes = [pointer, count]
    alone.argtypes, alone.restype = [pointer, *[number] * 5], number
    margins.restype = order.restype = open_.restype = keep.restype = None
    relegate.restype = few.restype = fitting.restype = count
    return kernel


class Rows:
    """One group's rows in one decision: `margins` first, then `relegate`, `open` and `fitting`,
    `order`, and `few` again and again. They are those that waited at `margins`."""

    yields = None  # nobody leaves a part of the budget to others

    def __init__(self, waiting: Waiting, kernel: ctypes.PyDLL) -> None:
        self._waiting, self._kernel = waiting, kernel
        self._few = (ctypes.c_int64 * (3 * FEW))()
        self._allot()

    @property
    def least_s(self) -> float:
        """Smallest margin of who is kept; infinite with nobody."""
        least: float = self._rows.least
        return least

    @property
    def least_promised_s(self) -> float:
        """Smallest margin of a promise; infinite with none."""
        least: float = self._rows.least_promised
        return least

    @property
    def least_bare_s(self) -> float:
        """The same if promises were all that is kept, at bare costs."""
        least: float = self._rows.least_bare
        return least

    @property
    def last_s(self) -> float:
        """What whoever is due last may do out of order, once the rows are in order."""
        last: float = self._rows.last
        return last

    def margins(self, start: float, share: float, overhead_s: float, inflation: float) -> None:
        """The margins of who is kept, from `start` on, which has the drain in it."""
        self._follow()
        self._kernel.medha_margins(self._at, start, share, overhead_s, inflation)

    def alone_s(
        self, by_s: float, drain_s: float, share: float, overhead_s: float, inflation: float
    ) -> float:
        """Smallest margin of a promise beside the others alone, at full costs; infinite with none.
        `margins` need not come before, and stays."""
        self._follow()
        least_s: float = self._kernel.medha_alone(
            self._at, by_s, drain_s, share, overhead_s, inflation
        )
        return least_s

    def margin_s(self, place: int) -> float:
        """Margin of a row that is kept."""
        return float(self._scratch[LEFT, place])

    def lower(self, place: int, most_s: float) -> None:
        """The promise at `place` has no more margin than that."""
        self._scratch[LEFT, place] = least_s = min(self.margin_s(place), most_s)
        self._rows.least = min(self._rows.least, least_s)
        self._rows.least_promised = min(self._rows.least_promised, least_s)

    def relegate(self, tolerance_s: float, most: int, spared: Mask | None = None) -> list[int]:
        """Places of those without a promise, and not spared, that give way, in that order."""
        lost = (ctypes.c_int64 * most)()
        if spared is None:
            return lost[: self._kernel.medha_relegate(self._at, tolerance_s, most, lost)]
        ranks = self._marks[RANK, : len(spared)]
        ranks[spared & (ranks == KEPT)] = SPARED
        places = lost[: self._kernel.medha_relegate(self._at, tolerance_s, most, lost)]
        ranks[ranks == SPARED] = KEPT
        return places

    def open(self, start: float, share: float, overhead_s: float, inflation: float) -> None:
        """Make ready to ask who would fit; `margins` comes before, and stays."""
        self._kernel.medha_open(self._at, start, share, overhead_s, inflation)

    def fitting(self, guard_s: float, after: int = -1) -> int:
        """Place of the smallest that is not kept and would fit with so much to spare, next to
        `after` in size; -1 when there is none."""
        place: int = self._kernel.medha_fitting(self._at, guard_s, after)
        return place

    def keep(self, place: int) -> None:
        """The one at `place` is kept from now on: others find less room."""
        self._kernel.medha_keep(self._at, place)

    def order(
        self, pages: float, start: float, share: float, long_above: float, by_tokens: bool,
        guard_s: float, owed: int,
    ) -> None:  # fmt: skip
        """Put who is ready and needs at most so many pages in order; `owed` is one of the above."""
        self._kernel.medha_order(
            self._at, pages, start, share, long_above, by_tokens, guard_s, owed
        )

    def few(self, pages: float, only_short: bool) -> list[Next]:
        """Those that come next; empty when nobody does."""
        count = self._kernel.medha_few(self._at, pages, only_short, FEW, self._few)
        few = self._few[:]
        return list(zip(few[:count], few[FEW : FEW + count], few[2 * FEW :], strict=False))

    def _follow(self) -> None:
        """Take note of the rows that there are now."""
        if self._fields is not self._waiting.fields:
            self._allot()
        self._rows.count = len(self._waiting)

    def _allot(self) -> None:
        """Point at the arrays as they are now; they are larger when more wait than ever."""
        self._fields, self._flags = self._waiting.fields, self._waiting.flags
        capacity = self._fields.shape[1]
        self._scratch = np.zeros((SCRATCH, capacity))
        self._marks = np.zeros((MARKS, capacity), dtype=np.int8)
        self._lists = np.zeros((2, capacity + 1), dtype=np.int32)  # they are noted, then counted
        arrays = self._fields, self._flags, self._scratch, self._marks, *self._lists
        self._rows = _Rows(*(array.ctypes.data for array in arrays), capacity)
        self._at = ctypes.addressof(self._rows)
