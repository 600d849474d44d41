"""The promise set: which requests can *all* still make their deadlines, and by what margin.

Time is one server's: work is counted in seconds of it, requests stand in order of deadline.

    margin[i] = due[i] − (work of kept requests due no later than i)      kept: every margin ≥ 0

A promise given is kept (`commit`): it is dropped only when predictions were wrong or machines fell
away. This module holds arithmetic over arrays; it knows neither requests nor clocks.
"""

from __future__ import annotations

import heapq

import numpy as np

from medha.scheduling.lars import Floats, Mask, Places


def largest_feasible(
    due_in_s: Floats, work_s: Floats, bucket: Places | None = None, left: list[float] | None = None
) -> Mask:
    """The largest set that can be done in time (Moore–Hodgson, O(n log n)).

    Arrays of [n] in ascending order of `due_in_s`; walks by deadline, adds up work, and where the
    sum overruns drops the largest so far (of equal ones the latest). Returns which are kept.

    With `bucket` of each and how many of each bucket are `left` to drop (counted down here), those
    of others are dropped instead, the largest first; what nobody is left for stays overrun.
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
                break  # no worse than before this one
    return kept


def margins_s(due_in_s: Floats, work_s: Floats, kept: Mask) -> Floats:
    """Margin of each kept request, infinite for the others; arrays of [n] by deadline."""
    left = due_in_s - np.cumsum(np.where(kept, work_s, 0.0))
    return np.where(kept, left, np.inf)


def room_s(margins: Floats, due_in_s: Floats, place: int, due_s: float) -> float:
    """Work due in `due_s` that fits at `place` in deadline order beside all kept ones.

    `margins` and `due_in_s` are of [n]; those at `place` and later are due no earlier. The work
    must fit its own deadline after what is kept before it, and the margins of all that are later.
    """
    later = float(margins[place:].min()) if place < len(margins) else np.inf
    before = margins[:place]
    known = np.flatnonzero(np.isfinite(before))
    if not len(known):
        return min(later, due_s)
    last = int(known[-1])
    return min(later, due_s - float(due_in_s[last] - before[last]))


def broken(
    margins: Floats, work_s: Floats, kept: Mask, tolerance_s: float, most: int | None = None,
    spared: Mask | None = None,
) -> list[int]:  # fmt: skip
    """Kept requests that must lose their promise, one Moore–Hodgson step per overrun.

    Where the earliest overrun beyond `tolerance_s` stands, the largest kept one due no later is
    dropped; again until no overrun is left, or `most` are dropped. Returns places, in the order in
    which they are dropped. Overruns with none but `spared` ones before them stay.
    """
    lost: list[int] = []
    left, held = margins, kept
    while True:
        over = np.flatnonzero(left < -tolerance_s)
        able = held if spared is None else held & ~spared
        if spared is not None:
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


def earliest_due_s(margins: Floats, due_in_s: Floats, work_s: float) -> float:
    """Earliest deadline (seconds from now) at which `work_s` would fit beside all kept ones.

    Behind place k it needs every later margin to bear it, and its own sum: O(n).
    """
    kept = np.flatnonzero(np.isfinite(margins))
    if not len(kept):
        return work_s
    left = margins[kept]
    done = due_in_s[kept] - left
    tight = np.flatnonzero(left < work_s)
    after = int(tight[-1]) if len(tight) else -1
    if after < 0:
        return work_s
    return max(float(done[after]) + work_s, float(due_in_s[kept[after]]))
