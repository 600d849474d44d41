"""When the groups of a promised prompt that spans several can be together, and when it ends then.

A group's own margins know its own queue only. A prompt that grows works in ever more groups, and
each time it waits for the busiest of them:

    g0  |-- promised, due before --|      waits        |== phase 1 ==|-- due later --|
    g1  |==== phase 0, alone: tokens_per_group ========|== phase 1 ==|-- due later --|

So promises are laid out in order of deadline, a prompt of one group behind what its group holds, a
spanning one phase by phase behind all of its groups. Gaps are left open: whoever fills them leaves
earlier than was reckoned. Arithmetic over the rows of groups; it gives and takes no promises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from medha.scheduling.growth import Groups
from medha.scheduling.lars import Floats, Mask
from medha.scheduling.sequence import Sequence

Costs = Callable[[int], Floats]


def crews_meet(
    groups: Groups, costs: Costs, by_s: float, guard_s: float, newcomer: Sequence
) -> bool:
    """Whether promises that span groups are kept beside the newcomer, however groups wait for each
    other. One that is too late already, and no later for it, is no reason to refuse."""
    after = spares_s(groups, costs, by_s, newcomer)
    if not after:
        return True
    before = spares_s(groups, costs, by_s)
    return all(
        spare_s >= guard_s or spare_s >= before.get(number, float("inf"))
        for number, spare_s in after.items()
    )


def spares_s(
    groups: Groups, costs: Costs, by_s: float, newcomer: Sequence | None = None
) -> dict[int, float]:
    """Margin of each promise that spans groups, by number, were the newcomer promised too: its own,
    and that of those that are laid out behind it.

    `costs`: time that each row of a group takes up; `by_s`: now, and what is lost behind stage 0.
    """
    spanning = [
        one for one in groups.shared.values()
        if (one.promised or one is newcomer) and one.packed < one.goal and len(one.plan) > 1
    ]  # fmt: skip
    if not spanning:
        return {}
    spanning.sort(key=lambda one: one.key)
    taken: dict[int, Floats] = {}
    laid: dict[int, Mask] = {}
    for group, waiting in groups.waiting.items():
        taken[group], laid[group] = costs(group), waiting.promised
        if newcomer is not None and newcomer in waiting:
            laid[group] = laid[group].copy()
            laid[group][waiting.place(newcomer.key)] = True
    ends = _ends_s(groups, spanning, taken, laid)
    spares = {one.number: one.key[0] - by_s - ends[one.number] for one in spanning}
    for place, one in reversed([*enumerate(spanning)]):
        for before in spanning[:place]:  # whatever delays it delays who comes after it
            if not set(before.plan).isdisjoint(one.plan):
                spares[before.number] = min(spares[before.number], spares[one.number])
    return spares


def _ends_s(
    groups: Groups, spanning: list[Sequence], costs: Mapping[int, Floats], laid: Mapping[int, Mask]
) -> dict[int, float]:
    """When each of `spanning`, in order of deadline, will be past stage 0 in all of its groups.

    The k-th group of a plan works from phase k on, so that phase k lasts what the k-th has to do
    less what the one after has. `laid`: rows that are promised, those of `spanning` among them.
    """
    sums = {group: (costs[group] * mask).cumsum() for group, mask in laid.items()}
    free, struck = dict.fromkeys(sums, 0.0), dict.fromkeys(sums, 0.0)
    ends: dict[int, float] = {}
    for sequence in spanning:
        rows = [
            (group, groups.waiting[group].place(sequence.key))
            for group in sequence.plan if group in sums and sequence in groups.waiting[group]
        ]  # fmt: skip
        own = [float(costs[group][row]) for group, row in rows]
        before = [
            float(sums[group][row]) - cost - struck[group]
            for (group, row), cost in zip(rows, own, strict=True)
        ]
        end = 0.0
        for turn, (group, _) in enumerate(rows):
            later = own[turn + 1] if turn + 1 < len(rows) else 0.0
            end = max(end, free[group] + before[turn]) + max(0.0, own[turn] - later)
        for (group, _), cost, single in zip(rows, own, before, strict=True):
            free[group] = end - single
            struck[group] += cost
        ends[sequence.number] = end
    return ends
