"""Sets of requests that can *all* meet their deadlines, and who is dropped: arithmetic on arrays.

Time is that of one server: work is in seconds, requests stand in order of deadline.

    margin[i] = due[i] − (work of kept requests due no later than i)      kept: every margin ≥ 0

`BucketLossCap` limits what the prompts of one length lose.
"""

from __future__ import annotations

import heapq
import math
from collections import abc
from typing import Final

import numpy as np

from medha.metrics import LENGTH_LABELS, length_bucket
from medha.scheduling.native import Floats, Mask
from medha.scheduling.sequence import Sequence
from medha.scheduling.waiting_queue import Places, WaitingQueue

LOSS_MEMORY_S = 600.0
FREE = len(LENGTH_LABELS)
"""The bucket of requests whose loss does not count."""
ROUNDING = 1e-9
EVERY: Final = slice(None)


def largest_feasible(
    due_in_s: Floats, work_s: Floats, bucket: Places | None = None, left: list[float] | None = None
) -> Mask:
    """Return the largest set that can meet its deadlines (Moore–Hodgson, O(n log n)).

    Arrays of [n] in ascending order of `due_in_s`. Walks by deadline, adds up work, and where the
    sum overruns drops the largest so far (of equal ones the latest).

    `bucket`: bucket of each request; `left`: how many of each bucket may still be dropped (counted
    down here). Requests of other buckets are dropped instead, the largest first. If none may be
    dropped, the overrun stays.
    """
    kept = np.ones(len(due_in_s), dtype=np.bool_)
    if not len(due_in_s) or bool((np.cumsum(work_s) <= due_in_s).all()):
        return kept
    heap: list[tuple[float, int]] = []
    total = 0.0
    for place, (due, work) in enumerate(zip(due_in_s.tolist(), work_s.tolist(), strict=True)):
        heapq.heappush(heap, (-work, -place))
        total += work
        while total > due and heap:
            dropped, at = heapq.heappop(heap)
            if bucket is not None and left is not None:
                if left[bucket[-at]] < 1.0:
                    continue
                left[bucket[-at]] -= 1.0
            kept[-at] = False
            total += dropped
            if -dropped >= work:
                break  # no worse than before this request
    return kept


def select_victims(
    margins: Floats,
    work_s: Floats,
    kept: Mask,
    tolerance_s: float,
    most: int | None = None,
    protected: Mask | None = None,
) -> list[int]:
    """Return kept requests that must lose their promise, in the order in which they are dropped.

    One Moore–Hodgson step per overrun: at the earliest overrun beyond `tolerance_s`, the largest
    kept request due no later is dropped; repeated until no overrun is left, or `most` are dropped.
    `protected` requests are never dropped; an overrun that only they could end stays.
    """
    lost: list[int] = []
    left, held = margins, kept
    while True:
        over = np.flatnonzero(left < -tolerance_s)
        able = held if protected is None else held & ~protected
        if protected is not None:
            over = over[able.cumsum()[over] > 0]
        if not len(over) or len(lost) == most:
            return lost
        if not lost:
            left, held = left.copy(), kept.copy()
        upto = int(over[0]) + 1
        victim = int(np.argmax(np.where(able[:upto], work_s[:upto], -1.0)))
        lost.append(victim)
        held[victim] = False
        left[victim] = np.inf
        left[victim + 1 :] += work_s[victim]


class BucketLossCap:
    """Limit on the part of each length bucket that may be dropped from the promise set.

    Dropping the largest request keeps the most deadlines, and always costs the longest prompts.
    A cap prevents this: a bucket of prompt tokens (as in reports and metrics) that has lost its
    part is protected.

        displaced + 1 ≤ most × decided        requests of the bucket, fading with `LOSS_MEMORY_S`

    Victims then come from other buckets, and no promise is given that would cost a protected one
    its place. Two rules stand above the cap: a promise is not broken for a request without one, and
    a request that cannot meet its deadline even alone is no loss. `most`: 1 allows every loss.
    `displaced`: total number per bucket; a request counts once.
    """

    def __init__(self, most: float) -> None:
        self.most, self.capped = most, most < 1.0
        self.displaced = [0] * FREE
        self._decided = [0.0] * FREE
        self._lost = [0.0] * FREE
        self._as_of_s = 0.0

    def count_decided(self, sequence: Sequence, now: float) -> None:
        """Count an accepted request, if there is a limit."""
        if self.capped:
            self._fade(now)
            self._decided[length_bucket(sequence.request.prompt_tokens)] += 1.0

    def count_displaced(self, sequence: Sequence, now: float) -> None:
        """Count a request whose place others took."""
        if sequence.displaced:
            return
        self._fade(now)
        sequence.displace()
        bucket = length_bucket(sequence.request.prompt_tokens)
        self._lost[bucket] += 1.0
        self.displaced[bucket] += 1

    def remaining(self, now: float) -> list[float]:
        """Return how many more requests each bucket may lose now; infinite for `FREE`."""
        self._fade(now)
        pairs = zip(self._decided, self._lost, strict=True)
        return [*(math.floor(self.most * n - lost + ROUNDING) for n, lost in pairs), math.inf]

    def buckets(self, waiting: WaitingQueue, due_in_s: Floats, cost_s: Floats) -> Places:
        """Return the bucket of each row; FREE if it was displaced before or is too late anyway."""
        buckets = np.fromiter(
            (
                FREE if row.displaced else length_bucket(row.request.prompt_tokens)
                for row in waiting.sequences
            ),
            dtype=np.intp,
            count=len(waiting),
        )
        buckets[cost_s > due_in_s] = FREE
        return buckets

    def protected(
        self, waiting: WaitingQueue, due_in_s: Floats, cost_s: Floats, now: float
    ) -> Mask:
        """Return the rows whose bucket has lost its part."""
        full: Mask = np.array(self.remaining(now)) < 1.0
        return full[self.buckets(waiting, due_in_s, cost_s)]

    def drop(
        self,
        waiting: WaitingQueue,
        terms: abc.Callable[[Places | slice], tuple[Floats, Floats]],
        now: float,
        most: int,
        lower: abc.Callable[[Sequence], None],
        victims: abc.Callable[[int, Mask | None], list[int]],
    ) -> int:
        """Call `lower` for at most `most` victims; return their number.

        `terms` returns (due in, cost) of rows; `victims(count, protected)` returns rows. With a
        cap there is one victim at a time, as each may protect the next.
        """
        count, step = 0, 1 if self.capped else most
        while count < most:
            protected = self.protected(waiting, *terms(EVERY), now) if self.capped else None
            places = victims(step, protected)
            if places:
                due_in_s, cost_s = terms(np.array(places))
                for place, in_time in zip(places, (cost_s <= due_in_s).tolist(), strict=True):
                    lower(waiting.sequences[place])
                    if in_time:
                        self.count_displaced(waiting.sequences[place], now)
            count += len(places)
            if len(places) < step:
                break
        return count

    def largest(self, waiting: WaitingQueue, due_in_s: Floats, cost_s: Floats, now: float) -> Mask:
        """Return the largest set that meets its deadlines within the cap; displace the others."""
        if self.capped:
            bucket = self.buckets(waiting, due_in_s, cost_s)
            kept = largest_feasible(due_in_s, cost_s, bucket, self.remaining(now))
        else:
            kept = largest_feasible(due_in_s, cost_s)
        for place in np.flatnonzero(~kept & (cost_s <= due_in_s)).tolist():
            self.count_displaced(waiting.sequences[place], now)
        return kept

    def _fade(self, now: float) -> None:
        if now > self._as_of_s:
            faded = math.exp((self._as_of_s - now) / LOSS_MEMORY_S)
            self._as_of_s = now
            self._decided = [faded * count for count in self._decided]
            self._lost = [faded * count for count in self._lost]
