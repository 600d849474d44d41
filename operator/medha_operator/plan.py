"""From what is seen of one MedhaReplica to the next steps: each is possible now and harmless twice.

    objects    Services, budget, one ConfigMap and NetworkPolicy per replica
    replicas   those to make, those to retire (see `rollout`)
    groups     failed ones are started anew (see `restarts`), wanted ones made, released ones
               removed (see `growth`); a gang's pods are made gated, and let go when all of them
               exist and their nodes can still hold them

Pure and level-triggered: nothing is remembered here. What must outlive the operator stands in the
status, which is derived from the same look (see `status`); a group that failed loses its pods only
once the status tells of it.
"""

from __future__ import annotations

import msgspec

from medha.config import CONTROLLER_OPS_PORT
from medha.spec import MedhaReplica, seconds
from medha_operator import names, restarts
from medha_operator.acceptance import check
from medha_operator.actions import (
    Action,
    ApplyObject,
    DeleteObject,
    Drain,
    LookAgain,
)
from medha_operator.groups import grow, keep_base
from medha_operator.look import Look
from medha_operator.manifests import (
    content_hash,
    follows_readiness,
    key,
    network_policies,
    objects,
)
from medha_operator.memory import Memory
from medha_operator.misfits import Misfit
from medha_operator.moments import unix_s
from medha_operator.observed import Observed
from medha_operator.replicas import Replica
from medha_operator.restarts import Fault
from medha_operator.rollout import UPDATED, Rollout, roll
from medha_operator.settings import Settings

DRAINED_S = 1.0
"""So often a replica that drains is looked at: counts of requests wake nobody."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The next steps, and what the status has to tell about them."""

    actions: tuple[Action, ...]
    replicas: dict[int, Replica]
    rollout: Rollout
    memory: Memory
    faults: tuple[Fault, ...] = ()
    stranded: tuple[Fault, ...] = ()
    """Groups on dead nodes that have no other place."""
    misfits: tuple[Misfit, ...] = ()
    """What has no place: replicas and their first groups."""
    stunted: tuple[Misfit, ...] = ()
    """Further groups that have no place."""
    growing: tuple[int, ...] = ()
    """Replicas with fewer groups than wanted."""


def plan(resource: MedhaReplica, observed: Observed, settings: Settings) -> list[Action]:
    """The next steps; none for a world that is as the resource wants it.

    Raises SpecError for a spec that cannot work in a cluster.
    """
    return list(decide(resource, observed, settings).actions)


def decide(resource: MedhaReplica, observed: Observed, settings: Settings) -> Decision:
    """`plan`, with its reasons."""
    check(resource)
    look = Look(resource, observed, settings)
    rollout = roll(resource.spec.replicas, look.replicas, look.memory, look.nodes)
    look.stay(rollout.fresh)
    _free_names(look)
    kept = [look.replicas[each] for each in sorted((*rollout.fresh, *rollout.stale))]
    for replica in kept:
        if not replica.outdated:
            keep_base(look, replica)
    rollout = _create(look, rollout)
    for replica in kept:
        if not replica.outdated and replica.ordinal not in rollout.retiring:
            grow(look, replica)
    for ordinal in rollout.retiring:
        _retire(look, look.replicas[ordinal], rollout.retiring[ordinal])
    actions = [*_objects(look, rollout), *look.actions]
    if look.again_s:
        actions.append(LookAgain(min(look.again_s)))
    return Decision(
        actions=tuple(actions),
        replicas=look.replicas,
        rollout=rollout,
        memory=look.memory,
        faults=tuple(look.faults),
        stranded=tuple(look.stranded),
        misfits=tuple(look.misfits),
        stunted=tuple(look.stunted),
        growing=tuple(look.growing),
    )


def _objects(look: Look, rollout: Rollout) -> list[Action]:
    """Write what is missing or other than wanted; remove what former replicas had of their own. One
    that has to wait before it is made anew keeps it."""
    ordinals = {
        each
        for each, replica in look.replicas.items()
        if not replica.outdated and (replica.present or each not in rollout.retiring)
    }
    leaving = sorted({*look.replicas} - ordinals)
    wanted = (
        *objects(look.resource, sorted({*ordinals, *rollout.create}), look.hash, look.settings),
        *network_policies(look.resource, leaving, look.settings),
    )
    there = look.observed.objects
    serves = any(replica.ready for replica in look.replicas.values())
    found: list[Action] = [
        ApplyObject(each)
        for each in wanted
        if there.get(key(each)) != content_hash(each)
        and (serves or key(each) in there or not follows_readiness(look.resource, each))
    ]
    kept = {key(each) for each in wanted}
    kept |= {
        ("ConfigMap", names.config_name(look.resource.name, pod.ordinal, pod.spec_hash))
        for pod in look.observed.pods
    }
    name = look.resource.name
    for ordinal in rollout.pending:
        kept.add(("ConfigMap", names.config_name(name, ordinal, look.hash)))
        kept.add(("NetworkPolicy", names.policy_name(name, ordinal)))
    found += [
        DeleteObject(*each)
        for each in sorted(there)
        if each[0] in ("ConfigMap", "NetworkPolicy") and each not in kept
    ]
    return found


def _free_names(look: Look) -> None:
    """A pod whose node is dead is never confirmed as gone: without force its name stays."""
    for each in look.observed.pods:
        if each.deleting and restarts.is_lost(each, look.nodes):
            look.delete([each], f"its node {each.node} is gone")


def _create(look: Look, rollout: Rollout) -> Rollout:
    """Make new replicas where they fit; else let an outdated one go first if that helps."""
    kvp = look.resource.spec.parallelism.kvp
    created: list[int] = []
    for ordinal in rollout.create:
        attempts = {each: look.attempt(ordinal, each) for each in range(kvp.min)}
        if not all(attempts.values()):
            continue
        placed = look.room.place_base(kvp.min, kvp.max, _promised(look), look.apart(ordinal))
        if isinstance(placed, Misfit):
            look.misfits.append(placed)
            rollout = _make_room(look, rollout)
            break
        created.append(ordinal)
        look.start(ordinal, dict(enumerate(placed)), attempts)
    return msgspec.structs.replace(
        rollout,
        create=tuple(created),
        pending=tuple(each for each in rollout.create if each not in created),
    )


def _make_room(look: Look, rollout: Rollout) -> Rollout:
    victim = rollout.victim(look.replicas)
    if victim is None or not look.fits_without(victim):
        return rollout
    return msgspec.structs.replace(
        rollout,
        retiring={**rollout.retiring, victim: UPDATED},
        stale=tuple(each for each in rollout.stale if each != victim),
    )


def _promised(look: Look) -> dict[str, int]:
    """By node of a replica's leader: groups that this replica may still grow by."""
    most = look.resource.spec.parallelism.kvp.max
    return {
        leader.node or leader.target: most - len(replica.groups)
        for replica in look.replicas.values()
        if (leader := replica.leader) is not None and len(replica.groups) < most
    }


def _retire(look: Look, replica: Replica, why: str) -> None:
    """Drain it; delete it when it is empty, cannot be drained, or its time is over."""
    if not replica.present:
        return
    name = look.name(replica)
    line = look.memory.retirement(replica.ordinal)
    until_s = seconds(look.resource.spec.drain_timeout)
    until_s += unix_s(line.since) if line is not None else look.now_s
    leader = replica.leader
    hopeless = leader is None or (not leader.ready and (replica.silent or not leader.ip))
    if replica.idle or hopeless or look.now_s >= until_s:
        told = "has no work left" if replica.idle else "serves nobody"
        if not (replica.idle or hopeless):
            told = f"still has {replica.load} requests after spec.drainTimeout"
        look.tell("Drained", f"{name} {told} and goes ({why})")
        look.delete(replica.present, f"{name} is retired: {why}")
        return
    look.again_s.append(min(until_s, look.now_s + DRAINED_S))
    if leader is not None and not replica.draining and leader.ip:
        if line is None:
            look.tell("Draining", f"{name} takes nothing new and finishes its work ({why})")
        address = f"{leader.ip}:{CONTROLLER_OPS_PORT}"
        look.actions.append(Drain(replica.ordinal, address))
