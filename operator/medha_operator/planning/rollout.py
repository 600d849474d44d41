"""Replicas that stay, retire or are created: scaling, rolling updates and cordoned nodes.

    fresh      of the current spec, on nodes that stay; also while its pods are recreated
    stale      of a former spec, or with a pod on a cordoned node
    retiring   accepts no new requests, finishes the running ones, is deleted; never comes back

Replicas are replaced one by one: a new one is created next to the stale ones if there is room (one
above spec.replicas, never two), and a stale one retires when enough others serve. A stale replica
that does not serve retires at once. If there is no room for a new replica, a stale one retires
first, provided the new one then fits. Among equals, the replica with the least work retires. A
replica retired by a scale-down counts no more: a later scale-up creates others.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import msgspec

from medha_operator.resources.views import NodeView, PersistedStatus, ReplicaView

SURGE = 1
SCALED_DOWN, UPDATED, CORDONED = "ScaledDown", "Updated", "NodeCordoned"
DRAINING = "Draining"


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """Ordinals: `retiring` with the reason; `create` now; `pending` those to create that have to
    wait; `stale` those to replace."""

    retiring: Mapping[int, str]
    create: tuple[int, ...]
    fresh: tuple[int, ...]
    stale: tuple[int, ...]
    wanted: int
    pending: tuple[int, ...] = ()

    def victim(self, replicas: Mapping[int, ReplicaView]) -> int | None:
        """Return the outdated replica to retire first if a new one has no room."""
        outdated = [replicas[ordinal] for ordinal in self.stale if replicas[ordinal].outdated]
        return None if self.retiring or not outdated else _least(outdated).ordinal


def roll(
    wanted: int,
    replicas: Mapping[int, ReplicaView],
    persisted: PersistedStatus,
    nodes: Mapping[str, NodeView],
) -> Rollout:
    """Take the next step towards `wanted` fresh replicas."""
    retiring = {
        ordinal: record.reason if (record := persisted.retirement(ordinal)) else DRAINING
        for ordinal, replica in replicas.items()
        if persisted.retirement(ordinal) is not None or replica.draining
    }
    live = [replica for ordinal, replica in replicas.items() if ordinal not in retiring]
    stale = [replica for replica in live if replica.outdated or _cordoned(replica, nodes)]
    fresh = [replica for replica in live if replica not in stale]
    while len(fresh) > wanted:
        surplus = _least(fresh)
        fresh.remove(surplus)
        retiring[surplus.ordinal] = SCALED_DOWN
    serving = sum(replica.ready for replica in (*fresh, *stale))
    for replica in sorted(stale, key=_cost):
        if replica.ready and serving <= wanted:
            continue
        serving -= replica.ready
        retiring[replica.ordinal] = UPDATED if replica.outdated else CORDONED
        stale.remove(replica)
    leaving = sum(why == SCALED_DOWN for why in retiring.values())
    room = max(0, wanted + SURGE - len(replicas) + leaving)
    missing = min(max(0, wanted - len(fresh)), room)
    taken = {*replicas, *(record.replica for record in persisted.retiring)}
    return Rollout(
        retiring=retiring,
        create=_free_ordinals(taken, missing),
        fresh=tuple(replica.ordinal for replica in fresh),
        stale=tuple(replica.ordinal for replica in stale),
        wanted=wanted,
    )


def _least(replicas: Iterable[ReplicaView]) -> ReplicaView:
    return min(replicas, key=_cost)


def _cost(replica: ReplicaView) -> tuple[bool, int, int]:
    """Order replicas by what retiring them loses; among equals the newest comes first."""
    return replica.ready, replica.load, -replica.ordinal


def _cordoned(replica: ReplicaView, nodes: Mapping[str, NodeView]) -> bool:
    """Return whether a pod runs on a ready node that accepts no pods: it will be removed."""
    return any(
        pod.node in nodes and nodes[pod.node].ready and not nodes[pod.node].schedulable
        for pod in replica.present
    )


def _free_ordinals(taken: Container[int], count: int) -> tuple[int, ...]:
    """Return the lowest ordinals without a pod and without a record of retirement."""
    free: list[int] = []
    ordinal = 0
    while len(free) < count:
        if ordinal not in taken:
            free.append(ordinal)
        ordinal += 1
    return tuple(free)
