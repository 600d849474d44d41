"""Margins of the promises of one KVP group, in order of deadline.

    margin[i] = due[i] − (rest of the batch in flight + work of all promises due no later than i)

and less what the last chunk of a promise still needs behind stage 0 (the drain), which delays no
other. A Load reports margins as of its time; held promises are those made since. Lists, because a
group has few promises and an array costs more than the arithmetic.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence


class Margins:
    """Deadlines on the caller's clock, and seconds of work that still fit before each.

    `drain_s`: drain that the margins of a Load include.
    """

    def __init__(self, drain_s: float = 0.0) -> None:
        self._due: list[float] = []
        self._margin: list[float] = []
        self._drain_s = drain_s
        self._free_s = 0.0  # when the batch in flight leaves stage 0

    def recount(
        self,
        reported: Sequence[tuple[float, float]],
        reported_s: float,
        held: Sequence[tuple[float, float]],
        lead_s: float = 0.0,
    ) -> None:
        """Set all margins from (due in s, margin) of a Load and (due, work) of held promises.

        Both come by deadline; the Load's deadlines count from `reported_s`, and so does `lead_s`,
        the rest of the batch in flight. A promise in the Load bears held work before it; a held
        promise bears both kinds.
        """
        self._free_s = reported_s + lead_s
        self._due = due = [reported_s + due_in for due_in, _ in reported]
        self._margin = [margin for _, margin in reported]
        if not held:
            return
        work = [0.0, *itertools.accumulate(seconds for _, seconds in held)]
        merged_due: list[float] = []
        merged_margin: list[float] = []
        at, done, since_s = 0, lead_s, reported_s + self._drain_s
        for place, (due_in, margin) in enumerate(reported):
            while at < len(held) and held[at][0] < due[place]:
                merged_due.append(held[at][0])
                merged_margin.append(held[at][0] - since_s - done - work[at + 1])
                at += 1
            merged_due.append(due[place])
            merged_margin.append(margin - work[at])
            done = max(due_in - margin - self._drain_s, lead_s)
        for due_s, before_s in zip((due for due, _ in held[at:]), work[at + 1 :], strict=True):
            merged_due.append(due_s)
            merged_margin.append(due_s - since_s - done - before_s)
        self._due, self._margin = merged_due, merged_margin

    def add(self, due_s: float, work_s: float, now: float) -> None:
        """Add a promise."""
        due, margin = self._due, self._margin
        place = bisect.bisect_right(due, due_s)
        own_s = due_s - now - self._drain_s - self._before_s(place, now) - work_s
        if place < len(margin):
            margin[place:] = [left - work_s for left in margin[place:]]
        due.insert(place, due_s)
        margin.insert(place, own_s)

    def room_s(self, due_s: float, spare_s: float, now: float) -> float:
        """Return the work due at `due_s` that fits with all promises.

        It must meet its own deadline, after all promises before it and with `spare_s` to spare, and
        fit the margins of later ones.
        """
        place = bisect.bisect_right(self._due, due_s)
        later_s = min(self._margin[place:], default=math.inf)
        return min(later_s, due_s - now - self._before_s(place, now) - spare_s)

    def earliest_s(self, work_s: float, spare_s: float, now: float) -> float:
        """Return the earliest deadline, in seconds from now, at which work fits with all promises.

        Behind a promise, every later margin must hold the work, and so must its own sum.
        """
        place = len(self._margin)
        while place and self._margin[place - 1] >= work_s:
            place -= 1
        earliest_s = self._before_s(place, now) + work_s + spare_s
        return max(earliest_s, self._due[place - 1] - now) if place else earliest_s

    def _before_s(self, place: int, now: float) -> float:
        """Return the seconds until the promises before a place are done."""
        free_s = max(0.0, self._free_s - now)
        while place and not math.isfinite(self._margin[place - 1]):
            place -= 1
        if not place:
            return free_s
        return max(free_s, self._due[place - 1] - now - self._margin[place - 1] - self._drain_s)
