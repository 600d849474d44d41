"""Sets of requests that can *all* meet their deadlines, and their margins: arithmetic on arrays.

Time is that of one server: work is in seconds, requests stand in order of deadline.

    margin[i] = due[i] − (work of kept requests due no later than i)      kept: every margin ≥ 0
"""

from __future__ import annotations

import heapq

import numpy as np

from medha.scheduling.native import Floats, Mask
from medha.scheduling.waiting_queue import Places


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
