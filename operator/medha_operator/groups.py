"""The KVP groups of a replica that stays: kept, mended, grown, let go.

    base       groups 0 .. kvp.min-1: a gang; without them the replica does not serve
    further    as many as the controller wants; each a gang of its own

A gang's pods are made gated, and let go when all of them exist and their nodes can still hold them.
A group that has failed is taken down as a whole, once the status tells of the failure.
"""

from __future__ import annotations

from collections.abc import Sequence

from medha.spec import seconds
from medha_operator import growth, restarts
from medha_operator.actions import LiftGate
from medha_operator.look import Look
from medha_operator.misfits import Misfit
from medha_operator.placement import Nodes
from medha_operator.replicas import Group, Replica
from medha_operator.restarts import Fault


def keep_base(look: Look, replica: Replica) -> None:
    """The groups that the replica needs in order to serve."""
    gone: dict[int, int] = {}
    for index in range(replica.least):
        group = replica.groups.get(index)
        if group is None:
            gone[index] = look.attempt(replica.ordinal, index)
        else:
            _mend(look, replica, group)
    if gone and all(gone.values()):
        _start_anew(look, replica, gone)
    gang = replica.base
    if len(gang) == replica.least and all(each.complete for each in gang):
        _let_go(look, [each for each in gang if each.held])


def _start_anew(look: Look, replica: Replica, gone: dict[int, int]) -> None:
    """Groups that the replica lacks, beside those that it has."""
    places: dict[int, Nodes] = {}
    beside = [each.node or each.target for each in replica.present]
    for index in gone:
        placed = look.room.place_group(beside, apart=look.apart(replica.ordinal))
        if isinstance(placed, Misfit):
            if len(gone) == replica.least and look.fits_without(replica.ordinal):
                look.delete(replica.present, "its replica moves: there is no room beside it")
            else:
                look.misfits.append(placed)
            return
        places[index] = placed
        beside += placed
    look.start(replica.ordinal, places, gone)


def grow(look: Look, replica: Replica) -> None:
    """Groups beyond the base: those that are wanted come, those that are done go."""
    cooldown_s = seconds(look.resource.spec.scheduling.release_cooldown)
    # A new operator asks the controller first: was a group given back that the status still wants,
    # or that a part is missing of?
    asked = replica.report is not None or replica.silent
    for index, group in replica.groups.items():
        if index < replica.least:
            continue
        done = growth.released(replica, group, cooldown_s, look.now_s)
        if done is True:
            _release(look, replica, group)
            continue
        if done:
            look.again_s.append(done)
        if asked or group.complete or group.gated:
            _mend(look, replica, group)
        if group.complete and group.held:
            _let_go(look, [group])
    if not replica.ready:
        return
    wanted = growth.wanted_groups(look.resource, replica, look.memory)
    missing = growth.missing_groups(replica, wanted)
    if missing or any(not each.ready for each in replica.groups.values()):
        look.growing.append(replica.ordinal)
    for index in missing if asked else ():
        if attempt := look.attempt(replica.ordinal, index):
            beside = [each.node or each.target for each in replica.present]
            placed = look.room.place_group(beside, apart=look.apart(replica.ordinal))
            if isinstance(placed, Misfit):
                look.stunted.append(placed)
                return
            look.start(replica.ordinal, {index: placed}, {index: attempt}, wanted)


def _release(look: Look, replica: Replica, group: Group) -> None:
    look.delete(group.present, f"KVP group {group.index} was released")
    look.tell(
        "GroupReleased", f"{look.name(replica)} gives KVP group {group.index} back: it held nothing"
    )


def _mend(look: Look, replica: Replica, group: Group) -> None:
    """Fill up a gang that is being made; take down a group that has failed."""
    fault = restarts.fault_of(replica, group, look.nodes, look.now_s)
    if fault is not None:
        _take_down(look, replica, group, fault)
    elif group.present and group.gated and group.missing:
        beside = [each.target for each in replica.present]
        apart = look.apart(replica.ordinal)
        placed = look.room.place_group(beside, len(group.missing), apart)
        if isinstance(placed, Misfit):
            look.delete(group.present, "the rest of its group has no place")
            return
        for stage, node in zip(group.missing, placed, strict=True):
            look.create_pod(replica.ordinal, group.index, stage, node, group.attempt, True)
    else:
        open_s = [each.open_since_s for each in group.present if each.open_since_s is not None]
        look.again_s += [each_s + restarts.BIND_S for each_s in open_s]
        due_s = restarts.hung_s(replica, group)
        if due_s is not None:
            look.again_s.append(due_s)


def _take_down(look: Look, replica: Replica, group: Group, fault: Fault) -> None:
    if fault.lost:
        beside = [each.node for each in replica.present if not restarts.is_lost(each, look.nodes)]
        placed = look.room.place_group(beside)
        if isinstance(placed, Misfit) and not look.fits_without(replica.ordinal):
            look.stranded.append(fault)  # the node may come back; there is nothing better
            return
    look.faults.append(fault)
    if not restarts.noted(fault, look.memory):
        look.again_s.append(look.now_s)
        return
    for each in group.present:
        look.delete([each], fault.why, restarts.GRACE_S, fault.lost)
    told = f"{look.name(replica)} starts KVP group {group.index} anew: {fault.why}"
    look.tell("GroupFailed", told, warning=True)


def _let_go(look: Look, groups: Sequence[Group]) -> None:
    """Lift the gates of a whole gang, or give it up: gates cannot be put back.

    What was begun (and cut short by a failure) is finished.
    """
    pods = [each for group in groups for each in group.present]
    if not pods:
        return
    begun = not all(each.gated for each in pods)
    if begun or look.room.holds(each.target for each in pods):
        look.actions += [LiftGate(each.name, each.uid) for each in pods if each.gated]
    else:
        look.delete(pods, "its place was taken before the whole gang stood")
