"""Which replicas stay, which retire and how many are made: scaling, updates, nodes that go away.

    fresh      made from the present spec, on nodes that stay; also one that is just being remade
    stale      made from a former spec, or with a pod on a cordoned node
    retiring   takes nothing new, finishes its work, goes; never comes back

Replicas are replaced one by one: a new one is made beside the stale ones where there is room (one
more than asked for, never two), and a stale one retires when enough others serve. One that serves
nobody goes at once. Where there is no room for a new one, a stale one retires first if the new one
then fits. Of equals, whoever has the least work to lose goes. What a scale-down sent away counts
for nothing: should more be wanted while it still drains, others are made in its stead.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import msgspec

from medha_operator.memory import Memory
from medha_operator.observed import NodeView
from medha_operator.replicas import Replica

SURGE = 1
SCALED_DOWN, UPDATED, CORDONED = "ScaledDown", "Updated", "NodeCordoned"
DRAINING = "Draining"


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """`retiring`: ordinal -> why; `create`: ordinals to make now, `pending` those that have to
    wait; `stale`: ordinals to replace."""

    retiring: Mapping[int, str]
    create: tuple[int, ...]
    fresh: tuple[int, ...]
    stale: tuple[int, ...]
    wanted: int
    pending: tuple[int, ...] = ()

    def victim(self, replicas: Mapping[int, Replica]) -> int | None:
        """The outdated replica that goes first where a new one has no room beside it."""
        outdated = [replicas[each] for each in self.stale if replicas[each].outdated]
        return None if self.retiring or not outdated else _least(outdated).ordinal


def roll(
    wanted: int, replicas: Mapping[int, Replica], memory: Memory, nodes: Mapping[str, NodeView]
) -> Rollout:
    """The next step towards `wanted` fresh replicas."""
    retiring = {
        ordinal: line.reason if (line := memory.retirement(ordinal)) else DRAINING
        for ordinal, each in replicas.items()
        if memory.retirement(ordinal) is not None or each.draining
    }
    live = [each for ordinal, each in replicas.items() if ordinal not in retiring]
    stale = [each for each in live if each.outdated or _cordoned(each, nodes)]
    fresh = [each for each in live if each not in stale]
    while len(fresh) > wanted:
        going = _least(fresh)
        fresh.remove(going)
        retiring[going.ordinal] = SCALED_DOWN
    serving = sum(each.ready for each in (*fresh, *stale))
    for each in sorted(stale, key=_worth):
        if each.ready and serving <= wanted:
            continue
        serving -= each.ready
        retiring[each.ordinal] = UPDATED if each.outdated else CORDONED
        stale.remove(each)
    leaving = sum(why == SCALED_DOWN for why in retiring.values())
    room = max(0, wanted + SURGE - len(replicas) + leaving)
    missing = min(max(0, wanted - len(fresh)), room)
    return Rollout(
        retiring=retiring,
        create=_free({*replicas, *(each.replica for each in memory.retiring)}, missing),
        fresh=tuple(each.ordinal for each in fresh),
        stale=tuple(each.ordinal for each in stale),
        wanted=wanted,
    )


def _least(replicas: Iterable[Replica]) -> Replica:
    return min(replicas, key=_worth)


def _worth(replica: Replica) -> tuple[bool, int, int]:
    """What is lost with it: least first; of equals the one that came last."""
    return replica.ready, replica.load, -replica.ordinal


def _cordoned(replica: Replica, nodes: Mapping[str, NodeView]) -> bool:
    """A pod of it runs where none may start: somebody is about to take that node away."""
    return any(
        pod.node in nodes and nodes[pod.node].ready and not nodes[pod.node].schedulable
        for pod in replica.present
    )


def _free(taken: Container[int], count: int) -> tuple[int, ...]:
    """The lowest ordinals that no pod has, and that nobody remembers as retiring."""
    found: list[int] = []
    ordinal = 0
    while len(found) < count:
        if ordinal not in taken:
            found.append(ordinal)
        ordinal += 1
    return tuple(found)
