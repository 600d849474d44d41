"""Sets of requests that can *all* meet their deadlines, and their margins: arithmetic on arrays.

Time is that of one server: work is in seconds, requests stand in order of deadline.

    margin[i] = due[i] − (work of kept requests due no later than i)      kept: every margin ≥ 0

A group's own margins cover its own queue only. A prompt that spans groups works in ever more of
them, and each time waits for the busiest (`spares_s`):

    g0  |-- promised, due before --|      waits        |== phase 1 ==|-- due later --|
    g1  |==== phase 0, alone: tokens_per_group ========|== phase 1 ==|-- due later --|

Promises are laid out in order of deadline: a prompt of one group behind the work of its group, a
spanning prompt phase by phase behind all of its groups. Gaps stay open: a prompt that fills one
leaves earlier than predicted.
"""

from __future__ import annotations

import heapq
from collections import abc

import numpy as np

from medha.scheduling.kv_groups import KvGroups
from medha.scheduling.native import Floats, Mask
from medha.scheduling.sequence import Sequence
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


Costs = abc.Callable[[int], Floats]


def group_sets_fit(
    groups: KvGroups, costs: Costs, by_s: float, guard_s: float, newcomer: Sequence
) -> bool:
    """Return whether promises that span groups hold if the newcomer gets one too.

    A promise that is too late already, and no later with the newcomer, is no reason to refuse.
    """
    after = spares_s(groups, costs, by_s, newcomer)
    tight = {number: spare_s for number, spare_s in after.items() if spare_s < guard_s}
    if not tight:
        return True
    before = spares_s(groups, costs, by_s)
    return all(spare_s >= before.get(number, float("inf")) for number, spare_s in tight.items())


def spares_s(
    groups: KvGroups, costs: Costs, by_s: float, newcomer: Sequence | None = None
) -> dict[int, float]:
    """Return the margin of each promise that spans groups, by number, with the newcomer promised.

    A promise's margin is the smaller of its own and those of promises laid out behind it. `costs`:
    time that each row of a group takes up; `by_s`: now, plus the time lost behind stage 0.
    """
    spanning = [
        sequence
        for sequence in groups.shared.values()
        if (sequence.promised or sequence is newcomer)
        and sequence.remaining_tokens > 0
        and len(sequence.assigned_groups) > 1
    ]
    if not spanning:
        return {}
    spanning.sort(key=lambda sequence: sequence.key)
    taken: dict[int, Floats] = {}
    laid: dict[int, Mask] = {}
    for group, waiting in groups.running.items():
        taken[group], laid[group] = costs(group), waiting.promised
        if newcomer is not None and newcomer in waiting:
            laid[group] = laid[group].copy()
            laid[group][waiting.place(newcomer.key)] = True
    ends = _ends_s(groups, spanning, taken, laid)
    spares: dict[int, float] = {}
    least: dict[int, float] = {}  # of the later promises in each group
    for sequence in reversed(spanning):  # a delay of the earlier delays the later one too
        spare_s = sequence.key[0] - by_s - ends[sequence.number]
        for group in sequence.assigned_groups:
            spare_s = min(spare_s, least.get(group, spare_s))
        least.update(dict.fromkeys(sequence.assigned_groups, spare_s))
        spares[sequence.number] = spare_s
    return spares


def _ends_s(
    groups: KvGroups,
    spanning: list[Sequence],
    costs: abc.Mapping[int, Floats],
    laid: abc.Mapping[int, Mask],
) -> dict[int, float]:
    """Return when each of `spanning`, in order of deadline, leaves stage 0 in all of its groups.

    The k-th assigned group works from phase k on, so that phase k lasts the k-th group's work less
    that of the next. `laid`: promised rows, including those of `spanning`.
    """
    sums = {group: (costs[group] * mask).cumsum() for group, mask in laid.items()}
    free, laid_out = dict.fromkeys(sums, 0.0), dict.fromkeys(sums, 0.0)
    ends: dict[int, float] = {}
    for sequence in spanning:
        groups_of, own, before = [], [], []
        for group in sequence.assigned_groups:
            row = groups.running[group].find(sequence) if group in sums else -1
            if row >= 0:
                cost = costs[group].item(row)
                groups_of.append(group)
                own.append(cost)
                before.append(sums[group].item(row) - cost - laid_out[group])
        end = 0.0
        for turn, group in enumerate(groups_of):
            later = own[turn + 1] if turn + 1 < len(own) else 0.0
            end = max(end, free[group] + before[turn]) + max(0.0, own[turn] - later)
        for group, cost, single in zip(groups_of, own, before, strict=True):
            free[group] = end - single
            laid_out[group] += cost
        ends[sequence.number] = end
    return ends
