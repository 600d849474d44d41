"""Margins of the promises of one KVP group, in order of deadline.

    margin[i] = due[i] − (rest of the batch in flight + work of all promises due no later than i)

and less what the last chunk of a promise still needs behind stage 0 (the drain), which delays no
other. The answer of a promise takes part of the batches of those due later, from its first token
until it ends or they are done; in other groups its TPOT only shortens the batches. A Load reports
margins as of its time; held promises are those made since. Lists, because a group has few promises
and an array costs more than the arithmetic.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

from medha.fleet.offers import NO_ANSWER, AnswerTime


class Margins:
    """Deadlines on the caller's clock, and seconds of work that still fit before each.

    `drain_s`: drain that the margins of a Load include.
    """

    def __init__(self, drain_s: float = 0.0) -> None:
        self._due: list[float] = []
        self._margin: list[float] = []
        self._drain_s = drain_s
        self._longer = 0.0  # part by which shorter batches delay prefills
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

    def delay(self, due_s: float, answer: AnswerTime) -> None:
        """Take the time of an answer from the margins of promises that are due later."""
        if answer.part:
            place = bisect.bisect_right(self._due, due_s)
            self._margin[place:] = self._after(place, 0.0, answer)

    def shorten(self, longer: float, now: float) -> None:
        """Take the time from all margins by which prefills take longer from now on.

        Because of shorter batches, which are as short as the tightest TPOT needs. So only what goes
        beyond the largest `longer` so far counts.
        """
        if longer > self._longer:
            self._margin = self._after(0, 0.0, self._beyond(longer, now))
            self._longer = longer

    def bears(self, longer: float, now: float) -> bool:
        """Return whether all promises hold after `shorten`."""
        if longer <= self._longer:
            return True
        return min(self._after(0, 0.0, self._beyond(longer, now)), default=0.0) >= 0.0

    def _beyond(self, longer: float, now: float) -> AnswerTime:
        return AnswerTime((1.0 + longer) / (1.0 + self._longer) - 1.0, now, math.inf)

    def _after(
        self, place: int, work_s: float, answer: AnswerTime, others: float = 0.0, now: float = 0.0
    ) -> list[float]:
        """Return the margins from a place on after work with an answer before them.

        If `others` take a part of the time before each, less that.
        """
        if not answer.part and not others:
            rest = self._margin[place:]
            return [left - work_s for left in rest] if work_s else rest
        # `AnswerTime.delay_s` of each, without a call
        part, first_s, longest_s = answer.part, answer.first_s, answer.longest_s
        due, margin = self._due, self._margin
        after: list[float] = []
        for at in range(place, len(margin)):  # faster than pairs, compiled
            due_s, left_s = due[at], margin[at]
            alongside_s = due_s - left_s + work_s - first_s
            left_s -= work_s
            if alongside_s > 0.0:
                left_s -= part * (alongside_s if alongside_s < longest_s else longest_s)
            if others:
                before_s = due_s - left_s - now
                left_s -= others * (before_s if before_s > 0.0 else 0.0)
            after.append(left_s)
        return after

    def add(self, due_s: float, work_s: float, now: float, answer: AnswerTime = NO_ANSWER) -> None:
        """Add a promise."""
        due, margin = self._due, self._margin
        place = bisect.bisect_right(due, due_s)
        own_s = due_s - now - self._drain_s - self._before_s(place, now) - work_s
        if place < len(margin):
            margin[place:] = self._after(place, work_s, answer)
        due.insert(place, due_s)
        margin.insert(place, own_s)

    def room_s(
        self,
        due_s: float,
        spare_s: float,
        now: float,
        work_s: float = 0.0,
        answer: AnswerTime = NO_ANSWER,
        others: float = 0.0,
    ) -> float:
        """Return the work due at `due_s` that fits with all promises.

        It must meet its own deadline, after all promises before it and with `spare_s` to spare, and
        with its `answer` fit the margins of later ones, which `work_s` delays too. While a promise
        waits behind work, `others` take a part as long as that.
        """
        place = bisect.bisect_right(self._due, due_s)
        later_s = math.inf
        for left_s in self._after(place, work_s, answer, others, now):
            later_s = min(later_s, left_s)
        later_s += work_s
        before_s = (1.0 + others) * self._before_s(place, now)
        return min(later_s, due_s - now - before_s - spare_s)

    def earliest_s(
        self,
        work_s: float,
        spare_s: float,
        now: float,
        answer: AnswerTime = NO_ANSWER,
        others: float = 0.0,
    ) -> float:
        """Return the earliest deadline, in seconds from now, at which work fits with all promises.

        Behind a promise, every later margin must hold the work, and so must its own sum.
        """
        place = len(self._margin)
        after = self._after(0, work_s, answer, others, now)
        while place and after[place - 1] >= 0.0:
            place -= 1
        earliest_s = (1.0 + others) * self._before_s(place, now) + work_s + spare_s
        return max(earliest_s, self._due[place - 1] - now) if place else earliest_s

    def _before_s(self, place: int, now: float) -> float:
        """Return the seconds until the promises before a place are done."""
        free_s = max(0.0, self._free_s - now)
        while place and not math.isfinite(self._margin[place - 1]):
            place -= 1
        if not place:
            return free_s
        return max(free_s, self._due[place - 1] - now - self._margin[place - 1] - self._drain_s)
