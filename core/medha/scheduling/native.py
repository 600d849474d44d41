"""The compiled arithmetic of a decision with the policy `lars` (lars.c): its only entry.

It gets the arrays of one group's rows: those of `WaitingQueue`, and two of the same width for
results. The library is built with the project, lies next to this file and does not depend on
Python. It is opened only for schedulers with `lars`. Its calls last microseconds, so that they keep
the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib

import numpy as np

from medha.errors import SetupError
from medha.scheduling.waiting_queue import Mask, WaitingQueue

# Two dots, so that Python does not take it for a module.
LIBRARY = pathlib.Path(__file__).with_name("lars.kernel.so")
# Columns of lars.c: numbers of scratch and mark columns, and the one with margins.
SCRATCH, MARKS, LEFT = 5, 3, 1
# The mark column of the rank, and its values for kept and protected rows without a promise.
RANK, KEPT, PROTECTED = 0, 1, 3
# Rows returned at a time: most batches hold one prompt or two.
FEW = 8
# The turn of the relegated, as an argument of `medha_order`.
NOTHING, FIRST_DUE, SHORT_ONES = range(3)

# (place, tier, is long)
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
    """Load the library; raise SetupError if it was not built for this machine."""
    pointer, number, count = ctypes.c_void_p, ctypes.c_double, ctypes.c_int64
    try:
        kernel = ctypes.PyDLL(str(library))
        margins, relegate = kernel.medha_margins, kernel.medha_relegate
        order, few = kernel.medha_order, kernel.medha_few
        open_, fitting, keep = kernel.medha_open, kernel.medha_fitting, kernel.medha_keep
    except (OSError, AttributeError) as error:
        raise SetupError(
            f"{library} is the compiled part of the scheduler's policy lars and cannot be loaded"
            f" ({error}); run `make setup`, or install medha with its worker where there is a C"
            " compiler"
        ) from None
    margins.argtypes = [pointer, number, number, number]
    relegate.argtypes = [pointer, number, count, pointer]
    order.argtypes = [
        pointer,
        number,
        number,
        number,
        ctypes.c_int,
        number,
        ctypes.c_int,
    ]
    few.argtypes = [pointer, number, ctypes.c_int, count, pointer]
    open_.argtypes, fitting.argtypes = margins.argtypes, [pointer, number, count]
    keep.argtypes = [pointer, count]
    margins.restype = order.restype = open_.restype = keep.restype = None
    relegate.restype = few.restype = fitting.restype = count
    return kernel


class NativeRows:
    """The rows of one group in one decision, as they are at `margins`.

    Call `margins` first, then `relegate`, `open` and `fitting`, `order`, and `few` repeatedly.
    """

    yields = None  # no row leaves a part of the budget to others

    def __init__(self, waiting: WaitingQueue, kernel: ctypes.PyDLL) -> None:
        self._waiting, self._kernel = waiting, kernel
        self._few = (ctypes.c_int64 * (3 * FEW))()
        self._allot()

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
        self._follow()
        self._kernel.medha_margins(self._at, start, overhead_s, inflation)

    def margin_s(self, place: int) -> float:
        """Return the margin of a kept row."""
        return float(self._scratch[LEFT, place])

    def lower(self, place: int, most_s: float) -> None:
        """Limit the margin of the promise at `place`."""
        self._scratch[LEFT, place] = least_s = min(self.margin_s(place), most_s)
        self._rows.least = min(self._rows.least, least_s)
        self._rows.least_promised = min(self._rows.least_promised, least_s)

    def relegate(self, tolerance_s: float, most: int, protected: Mask | None = None) -> list[int]:
        """Return the rows without a promise and not protected that give way, in that order."""
        lost = (ctypes.c_int64 * most)()
        if protected is None:
            return lost[: self._kernel.medha_relegate(self._at, tolerance_s, most, lost)]
        ranks = self._marks[RANK, : len(protected)]
        ranks[protected & (ranks == KEPT)] = PROTECTED
        places = lost[: self._kernel.medha_relegate(self._at, tolerance_s, most, lost)]
        ranks[ranks == PROTECTED] = KEPT
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

    def _follow(self) -> None:
        """Use the current rows of the queue."""
        if self._fields is not self._waiting.fields:
            self._allot()
        self._rows.count = len(self._waiting.sequences)

    def _allot(self) -> None:
        """Point at the current arrays; the queue replaces them when it grows."""
        self._fields, self._flags = self._waiting.fields, self._waiting.flags
        capacity = self._fields.shape[1]
        self._scratch = np.zeros((SCRATCH, capacity))
        self._marks = np.zeros((MARKS, capacity), dtype=np.int8)
        self._lists = np.zeros((2, capacity + 1), dtype=np.int32)  # rows, with one spare
        arrays = self._fields, self._flags, self._scratch, self._marks, *self._lists
        self._rows = _Rows(*(array.ctypes.data for array in arrays), capacity)
        self._at = ctypes.addressof(self._rows)
