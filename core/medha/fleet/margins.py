"""Margins of the promises of one replica, in order of deadline.

    margin[i] = due[i] − (work of all promises due no later than i)

A Load reports them as of its time; held promises are those made since. Lists, because a replica has
few promises and an array costs more than the arithmetic.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence


class Margins:
    """Deadlines on the caller's clock, and seconds of work that still fit before each."""

    def __init__(self) -> None:
        self._due: list[float] = []
        self._margin: list[float] = []

    def recount(
        self,
        reported: Sequence[tuple[float, float]],
        reported_s: float,
        held: Sequence[tuple[float, float]],
    ) -> None:
        """Set all margins from (due in s, margin) of a Load and (due, work) of held promises.

        Both come by deadline; the Load's deadlines count from `reported_s`. A promise in the Load
        bears held work before it; a held promise bears both kinds.
        """
        self._due = due = [reported_s + due_in for due_in, _ in reported]
        self._margin = [margin for _, margin in reported]
        if not held:
            return
        work = [0.0, *itertools.accumulate(seconds for _, seconds in held)]
        merged_due: list[float] = []
        merged_margin: list[float] = []
        at, done = 0, 0.0
        for place, (due_in, margin) in enumerate(reported):
            while at < len(held) and held[at][0] < due[place]:
                merged_due.append(held[at][0])
                merged_margin.append(held[at][0] - reported_s - done - work[at + 1])
                at += 1
            merged_due.append(due[place])
            merged_margin.append(margin - work[at])
            done = max(due_in - margin, 0.0)
        for due_s, before_s in zip((due for due, _ in held[at:]), work[at + 1 :], strict=True):
            merged_due.append(due_s)
            merged_margin.append(due_s - reported_s - done - before_s)
        self._due, self._margin = merged_due, merged_margin

    def add(self, due_s: float, work_s: float, now: float) -> None:
        """Add a promise."""
        due, margin = self._due, self._margin
        place = bisect.bisect_right(due, due_s)
        done = due[place - 1] - now - margin[place - 1] if place else 0.0
        if place < len(margin):
            margin[place:] = [left - work_s for left in margin[place:]]
        due.insert(place, due_s)
        margin.insert(place, due_s - now - max(0.0, done) - work_s)

    def room_s(self, due_s: float, lead_s: float, now: float) -> float:
        """Return the work due at `due_s` that fits with all promises, after `lead_s` of others.

        The work must meet its own deadline after all promises before it, and fit the margins of
        later ones.
        """
        due, margin = self._due, self._margin
        place = bisect.bisect_right(due, due_s)
        own_s = due_s - now - lead_s
        later_s = min(margin[place:]) if place < len(margin) else math.inf
        while place and not math.isfinite(margin[place - 1]):
            place -= 1
        if not place:
            return min(later_s, own_s)
        return min(later_s, own_s - (due[place - 1] - now - margin[place - 1]))

    def earliest_s(self, work_s: float, now: float) -> float:
        """Return the earliest deadline, in seconds from now, at which work fits with all promises.

        Behind a promise, every later margin must hold the work, and so must its own sum.
        """
        due, margin = self._due, self._margin
        if not margin or min(margin) >= work_s:
            return work_s
        last = len(margin) - 1
        while margin[last] >= work_s:
            last -= 1
        due_in_s = due[last] - now
        return max(due_in_s - margin[last] + work_s, due_in_s)
