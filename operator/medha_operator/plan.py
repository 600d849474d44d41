"""From what is seen of one MedhaReplica to the next steps: each is possible now and harmless twice.

    objects    Services, budget, one ConfigMap per replica
    replicas   those to make, those to retire (see `rollout`)
    groups     failed ones are started anew (see `restarts`), wanted ones made, released ones
               removed (see `growth`); a gang's pods are made gated, and let go when all of them
               exist and their nodes can still hold them

Pure and level-triggered: nothing is remembered here. What must outlive the operator stands in the
status, which is derived from the same look (see `status`); a group that failed loses its pods only
once the status tells of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from medha.spec import MedhaReplica, seconds
from medha.topology import Coordinate
from medha_operator import growth, names, restarts
from medha_operator.acceptance import check
from medha_operator.actions import (
    Action,
    ApplyObject,
    CreatePod,
    DeleteObject,
    DeletePod,
    Drain,
    LiftGate,
    LookAgain,
    Tell,
)
from medha_operator.manifests import content_hash, key, objects
from medha_operator.memory import Memory, recall
from medha_operator.moments import unix_s
from medha_operator.observed import NodeView, Observed, PodView
from medha_operator.placement import Misfit, Nodes, Room, want_of
from medha_operator.pods import Start, pod, spec_hash
from medha_operator.replicas import Group, Replica, replicas_of
from medha_operator.restarts import Fault
from medha_operator.rollout import UPDATED, Rollout, roll
from medha_operator.settings import Settings


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The next steps, and what the status has to tell about them."""

    actions: tuple[Action, ...]
    replicas: dict[int, Replica]
    rollout: Rollout
    memory: Memory
    faults: tuple[Fault, ...] = ()
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
    return _Step(resource, observed, settings).decision()


class _Step:
    """One look at the world, and what follows from it."""

    def __init__(self, resource: MedhaReplica, observed: Observed, settings: Settings) -> None:
        self.resource, self.observed, self.settings = resource, observed, settings
        self.hash = spec_hash(resource, settings)
        self.now_s = observed.now_s
        self.memory = recall(observed.previous)
        self.nodes: dict[str, NodeView] = {node.name: node for node in observed.nodes}
        self.replicas = replicas_of(resource, observed, self.hash)
        self.actions: list[Action] = []
        self.faults: list[Fault] = []
        self.misfits: list[Misfit] = []
        self.stunted: list[Misfit] = []
        self.growing: list[int] = []
        self._again_s: list[float] = []
        self._room: Room | None = None

    @property
    def room(self) -> Room:
        """Made when first needed: most looks place nothing."""
        if self._room is None:
            self._room = self._space(self.observed.pods)
        return self._room

    def _space(self, own: Iterable[PodView]) -> Room:
        return Room(want_of(self.resource), self.observed.nodes, own)

    def decision(self) -> Decision:
        rollout = roll(self.resource.spec.replicas, self.replicas, self.memory, self.nodes)
        self._free_names()
        kept = [self.replicas[each] for each in sorted((*rollout.fresh, *rollout.stale))]
        for replica in kept:
            if not replica.outdated:
                self._keep_base(replica)
        rollout = self._create(rollout)
        for replica in kept:
            if not replica.outdated and replica.ordinal not in rollout.retiring:
                self._grow(replica)
        for ordinal in rollout.retiring:
            self._retire(self.replicas[ordinal], rollout.retiring[ordinal])
        self.actions[:0] = self._objects(rollout)
        if self._again_s:
            self.actions.append(LookAgain(min(self._again_s)))
        return Decision(
            actions=tuple(self.actions),
            replicas=self.replicas,
            rollout=rollout,
            memory=self.memory,
            faults=tuple(self.faults),
            misfits=tuple(self.misfits),
            stunted=tuple(self.stunted),
            growing=tuple(self.growing),
        )

    # --- objects --------------------------------------------------------------------------------

    def _objects(self, rollout: Rollout) -> list[Action]:
        """Write what is missing or other than wanted; remove former replicas' configs."""
        ordinals = {each for each, replica in self.replicas.items() if not replica.outdated}
        wanted = objects(
            self.resource, sorted({*ordinals, *rollout.create}), self.hash, self.settings
        )
        there = self.observed.objects
        found: list[Action] = [
            ApplyObject(each) for each in wanted if there.get(key(each)) != content_hash(each)
        ]
        kept = {key(each) for each in wanted}
        kept |= {
            ("ConfigMap", names.config_name(self.resource.name, pod.ordinal, pod.spec_hash))
            for pod in self.observed.pods
        }
        found += [
            DeleteObject(kind, name)
            for kind, name in sorted(there)
            if kind == "ConfigMap" and (kind, name) not in kept
        ]
        return found

    def _free_names(self) -> None:
        """A pod whose node is dead is never confirmed as gone: without force its name stays."""
        for each in self.observed.pods:
            if each.deleting and restarts.is_lost(each, self.nodes):
                self.actions.append(
                    DeletePod(each.name, each.uid, f"its node {each.node} is gone", grace_s=0)
                )

    # --- replicas -------------------------------------------------------------------------------

    def _create(self, rollout: Rollout) -> Rollout:
        """Make new replicas where they fit; else let an outdated one go first if that helps."""
        kvp = self.resource.spec.parallelism.kvp
        created: list[int] = []
        for ordinal in rollout.create:
            attempts = {each: self._attempt(ordinal, each) for each in range(kvp.min)}
            if not all(attempts.values()):
                continue
            placed = self.room.place_base(kvp.min, kvp.max, self._promised())
            if isinstance(placed, Misfit):
                self.misfits.append(placed)
                rollout = self._make_room(rollout)
                break
            created.append(ordinal)
            self._start(ordinal, dict(enumerate(placed)), attempts)
        return msgspec.structs.replace(
            rollout,
            create=tuple(created),
            pending=tuple(each for each in rollout.create if each not in created),
        )

    def _make_room(self, rollout: Rollout) -> Rollout:
        victim = rollout.victim(self.replicas)
        if victim is None or not self._fits_without(victim):
            return rollout
        return msgspec.structs.replace(
            rollout,
            retiring={**rollout.retiring, victim: UPDATED},
            stale=tuple(each for each in rollout.stale if each != victim),
        )

    def _fits_without(self, ordinal: int) -> bool:
        """Whether a replica's base would have a place if this replica were not there."""
        kvp = self.resource.spec.parallelism.kvp
        left = [each for each in self.observed.pods if each.ordinal != ordinal]
        return not isinstance(self._space(left).place_base(kvp.min, kvp.max), Misfit)

    def _promised(self) -> dict[str, int]:
        """By node of a replica's leader: groups that this replica may still grow by."""
        most = self.resource.spec.parallelism.kvp.max
        return {
            leader.node or leader.target: most - len(replica.groups)
            for replica in self.replicas.values()
            if (leader := replica.leader) is not None and len(replica.groups) < most
        }

    def _retire(self, replica: Replica, why: str) -> None:
        """Drain it; delete it when it is empty, cannot be drained, or its time is over."""
        if not replica.present:
            return
        name = names.replica_name(self.resource.name, replica.ordinal)
        line = self.memory.retirement(replica.ordinal)
        until_s = seconds(self.resource.spec.drain_timeout)
        until_s += unix_s(line.since) if line is not None else self.now_s
        leader = replica.leader
        hopeless = leader is None or (not leader.ready and replica.report is None)
        if replica.idle or hopeless or self.now_s >= until_s:
            told = "has no work left" if replica.idle else "serves nobody"
            if not (replica.idle or hopeless):
                told = f"still has {replica.load} requests after spec.drainTimeout"
            self.actions.append(Tell("Drained", f"{name} {told} and goes ({why})"))
            self._delete(replica.present, f"{name} is retired: {why}")
            return
        self._again_s.append(until_s)
        if leader is not None and not replica.draining and leader.ip:
            if line is None:
                self.actions.append(
                    Tell("Draining", f"{name} takes nothing new and finishes its work ({why})")
                )
            address = f"{leader.ip}:{names.CONTROLLER_OPS_PORT}"
            self.actions.append(Drain(replica.ordinal, address))

    # --- groups ---------------------------------------------------------------------------------

    def _keep_base(self, replica: Replica) -> None:
        """The groups that the replica needs in order to serve."""
        gone: dict[int, int] = {}
        for index in range(replica.least):
            group = replica.groups.get(index)
            if group is None:
                gone[index] = self._attempt(replica.ordinal, index)
            else:
                self._mend(replica, group)
        if gone and all(gone.values()):
            self._start_anew(replica, gone)
        gang = replica.base
        if len(gang) == replica.least and all(each.complete for each in gang):
            self._let_go([each for each in gang if each.gated])

    def _start_anew(self, replica: Replica, gone: dict[int, int]) -> None:
        """Groups that the replica lacks, beside those that it has."""
        places: dict[int, Nodes] = {}
        beside = [each.node or each.target for each in replica.present]
        for index in gone:
            placed = self.room.place_group(beside)
            if isinstance(placed, Misfit):
                if len(gone) == replica.least and self._fits_without(replica.ordinal):
                    self._delete(replica.present, "its replica moves: there is no room beside it")
                else:
                    self.misfits.append(placed)
                return
            places[index] = placed
            beside += placed
        self._start(replica.ordinal, places, gone)

    def _grow(self, replica: Replica) -> None:
        """Groups beyond the base: those that are wanted come, those that are done go."""
        cooldown_s = seconds(self.resource.spec.scheduling.release_cooldown)
        for index, group in replica.groups.items():
            if index < replica.least:
                continue
            done = growth.released(replica, group, cooldown_s, self.now_s)
            if done is True:
                self._release(replica, group)
                continue
            if done:
                self._again_s.append(done)
            self._mend(replica, group)
            if group.complete and group.gated:
                self._let_go([group])
        if not replica.ready:
            return
        wanted = growth.wanted_groups(self.resource, replica, self.memory)
        missing = growth.missing_groups(replica, wanted)
        if missing or any(not each.ready for each in replica.groups.values()):
            self.growing.append(replica.ordinal)
        for index in missing:
            if attempt := self._attempt(replica.ordinal, index):
                beside = [each.node or each.target for each in replica.present]
                placed = self.room.place_group(beside)
                if isinstance(placed, Misfit):
                    self.stunted.append(placed)
                    return
                self._start(replica.ordinal, {index: placed}, {index: attempt}, wanted)

    def _release(self, replica: Replica, group: Group) -> None:
        name = names.replica_name(self.resource.name, replica.ordinal)
        self._delete(group.present, f"KVP group {group.index} was released")
        self.actions.append(
            Tell("GroupReleased", f"{name} gives KVP group {group.index} back: it held nothing")
        )

    def _attempt(self, ordinal: int, index: int) -> int:
        """The attempt of a group that may be started now; 0 while it has to wait."""
        line = self.memory.restart(ordinal, index)
        due_s = restarts.not_before_s(line, self.now_s)
        if due_s > self.now_s:
            self._again_s.append(due_s)
            return 0
        return restarts.next_attempt(line)

    def _mend(self, replica: Replica, group: Group) -> None:
        """Fill up a gang that is being made; take down a group that has failed."""
        fault = restarts.fault_of(replica, group, self.nodes, self.now_s)
        if fault is not None:
            self._take_down(replica, group, fault)
        elif group.present and group.gated and group.missing:
            beside = [each.target for each in replica.present]
            placed = self.room.place_group(beside, len(group.missing))
            if isinstance(placed, Misfit):
                self._delete(group.present, "the rest of its group has no place")
                return
            for stage, node in zip(group.missing, placed, strict=True):
                self._create_pod(replica.ordinal, group.index, stage, node, group.attempt, True)
        else:
            waits = [each for each in group.present if not each.node and not each.gated]
            self._again_s += [each.created_s + restarts.BIND_S for each in waits]

    def _take_down(self, replica: Replica, group: Group, fault: Fault) -> None:
        if fault.elsewhere:
            beside = [
                each.node for each in replica.present if not restarts.is_lost(each, self.nodes)
            ]
            placed = self.room.place_group(beside)
            if isinstance(placed, Misfit) and not self._fits_without(replica.ordinal):
                return  # the node may come back; there is nothing better
        self.faults.append(fault)
        if not restarts.noted(fault, self.memory):
            self._again_s.append(self.now_s)
            return
        for each in group.present:
            grace = 0 if restarts.is_lost(each, self.nodes) else restarts.GRACE_S
            self.actions.append(DeletePod(each.name, each.uid, fault.why, grace))
        name = names.replica_name(self.resource.name, replica.ordinal)
        self.actions.append(
            Tell(
                "GroupFailed",
                f"{name} starts KVP group {group.index} anew: {fault.why}",
                warning=True,
            )
        )

    def _let_go(self, groups: Sequence[Group]) -> None:
        """Lift the gates of a whole gang, or give it up: gates cannot be put back."""
        pods = [each for group in groups for each in group.present]
        if not pods:
            return
        if self.room.holds(each.target for each in pods):
            self.actions += [LiftGate(each.name, each.uid) for each in pods if each.gated]
        else:
            self._delete(pods, "its place was taken before the whole gang stood")

    # --- pods -----------------------------------------------------------------------------------

    def _start(
        self,
        ordinal: int,
        places: dict[int, Nodes],
        attempts: Mapping[int, int] = {},
        wanted: int = 0,
    ) -> None:
        """The pods of these groups; alone, a pod needs no gate."""
        name = names.replica_name(self.resource.name, ordinal)
        what = ", ".join(f"group {index} on {', '.join(dict.fromkeys(nodes))}"
                         for index, nodes in places.items())  # fmt: skip
        told = f" ({wanted} groups are wanted)" if wanted else ""
        gated = sum(len(nodes) for nodes in places.values()) > 1
        for index, nodes in places.items():
            attempt = attempts.get(index, 1)
            for stage, node in enumerate(nodes):
                self._create_pod(ordinal, index, stage, node, attempt, gated)
        self.actions.append(Tell("GroupWanted" if wanted else "Placed", f"{name}: {what}{told}"))

    def _create_pod(
        self, ordinal: int, group: int, stage: int, node: str, attempt: int, gated: bool
    ) -> None:
        start = Start(
            ordinal=ordinal,
            at=Coordinate(group, stage, 0),
            node=node,
            spec_hash=self.hash,
            attempt=attempt,
            gated=gated,
        )
        self.actions.append(CreatePod(pod(self.resource, start, self.settings)))

    def _delete(self, pods: Iterable[PodView], why: str) -> None:
        for each in pods:
            grace = 0 if restarts.is_lost(each, self.nodes) else None
            self.actions.append(DeletePod(each.name, each.uid, why, grace))
