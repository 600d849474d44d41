"""From the observed state of one MedhaReplica to the next actions.

    objects    Services; one ConfigMap, NetworkPolicy and budget per replica
    replicas   those to create, those to retire (see `rollout`)
    groups     failed ones restart (see `restarts`), wanted ones are created, released ones
               deleted; a gang's pods are created gated, and ungated once all of them exist and
               their nodes can still hold them

Pure and level-triggered: every action is possible now and harmless twice. What must outlive the
operator stands in the status, which is built from the same decision (see `resource_status`): a
group that failed loses its pods only after the status has recorded the failure.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from medha.config import CONTROLLER_OPS_PORT
from medha.spec import MedhaReplica, seconds
from medha.topology import Coordinate
from medha_operator.planning import restarts
from medha_operator.planning.node_placement import (
    Nodes,
    Placer,
    Unschedulable,
    pod_requirements,
)
from medha_operator.planning.restarts import GroupFailure
from medha_operator.planning.rollout import UPDATED, Rollout, roll
from medha_operator.resources.actions import (
    Action,
    ApplyObject,
    CreatePod,
    DeleteObject,
    DeletePod,
    Drain,
    EmitEvent,
    Manifest,
    RemoveSchedulingGate,
    RequeueAt,
)
from medha_operator.resources.manifests import (
    PodAssignment,
    check,
    config_name,
    content_hash,
    disruption_budget,
    follows_readiness,
    key,
    needed_by_pods,
    network_policies,
    objects,
    pod_manifest,
    policy_name,
    replica_name,
    spec_hash,
)
from medha_operator.resources.objects import unix_s
from medha_operator.resources.views import (
    GroupView,
    NodeView,
    Observed,
    PersistedStatus,
    PodView,
    ReplicaView,
    load_status,
    replica_views,
)
from medha_operator.settings import Settings

DRAINED_S = 1.0
"""Interval for a draining replica: a change of its request count wakes no reconciler."""


@dataclasses.dataclass(frozen=True)
class PlanContext:
    """Input of one decision. Nothing in it changes but the slots that the placer has given out."""

    resource: MedhaReplica
    observed: Observed
    settings: Settings
    spec_hash: str
    persisted: PersistedStatus
    nodes: Mapping[str, NodeView]
    replicas: Mapping[int, ReplicaView]
    rollout: Rollout

    @functools.cached_property
    def placer(self) -> Placer:
        """The nodes with what is left of them; built at first use, as most decisions place nothing.

        Replicas that stay keep others away from their nodes.
        """
        settled = {
            ordinal: {pod.node or pod.target for pod in self.replicas[ordinal].present}
            for ordinal in self.rollout.fresh
        }
        return self._placer(self.observed.pods, settled)

    def _placer(self, own: Iterable[PodView], settled: Mapping[int, Iterable[str]] = {}) -> Placer:
        return Placer(pod_requirements(self.resource), self.observed.nodes, own, settled)

    @functools.cached_property
    def configured(self) -> dict[int, PodView]:
        """By ordinal, a pod of a replica that keeps the settings with which it started: all of its
        pods get the same image and ConfigMap, whatever the operator's settings are now."""
        return {
            ordinal: pod
            for ordinal, replica in self.replicas.items()
            for pod in replica.present
            if ("ConfigMap", pod.config) in self.observed.objects
        }

    @property
    def now_s(self) -> float:
        return self.observed.now_s

    def name(self, ordinal: int) -> str:
        return replica_name(self.resource.name, ordinal)

    def fits_without(self, ordinal: int) -> bool:
        """Return whether a replica's base would fit if this replica's pods were gone."""
        kvp = self.resource.spec.parallelism.kvp
        others = [pod for pod in self.observed.pods if pod.ordinal != ordinal]
        return not isinstance(self._placer(others).place_base(kvp.min, kvp.max), Unschedulable)

    def next_attempts(self, ordinal: int, groups: Iterable[int]) -> tuple[dict[int, int], Plan]:
        """By group, the attempt that may start now: 0 during its back-off, whose end requeues."""
        attempts, requeue_s = {}, []
        for index in groups:
            record = self.persisted.restart(ordinal, index)
            due_s = restarts.not_before_s(record, self.now_s)
            if due_s > self.now_s:
                requeue_s.append(due_s)
            attempts[index] = 0 if due_s > self.now_s else restarts.next_attempt(record)
        return attempts, Plan(requeue_s=tuple(requeue_s)) if requeue_s else NOTHING

    def start_groups(
        self,
        ordinal: int,
        nodes_by_group: Mapping[int, Nodes],
        attempts: Mapping[int, int],
        wanted: int = 0,
    ) -> Plan:
        """Create the pods of these groups, gated unless there is but one pod."""
        gated = sum(len(nodes) for nodes in nodes_by_group.values()) > 1
        for nodes in nodes_by_group.values():
            self.placer.settle(ordinal, nodes)
        pods = [
            self.create_pod(ordinal, index, stage, node, attempts[index], gated)
            for index, nodes in nodes_by_group.items()
            for stage, node in enumerate(nodes)
        ]
        where = ", ".join(
            f"group {index} on {', '.join(dict.fromkeys(nodes))}"
            for index, nodes in nodes_by_group.items()
        )
        target = f" ({wanted} groups are wanted)" if wanted else ""
        reason = "GroupWanted" if wanted else "Placed"
        return Plan(actions=(*pods, EmitEvent(reason, f"{self.name(ordinal)}: {where}{target}")))

    def create_pod(
        self, ordinal: int, group: int, stage: int, node: str, attempt: int, gated: bool
    ) -> CreatePod:
        sibling = self.configured.get(ordinal)
        assignment = PodAssignment(
            ordinal=ordinal,
            at=Coordinate(group, stage, 0),
            node=node,
            spec_hash=self.spec_hash,
            attempt=attempt,
            gated=gated,
            image=sibling.image if sibling is not None else "",
            config=sibling.config if sibling is not None else "",
        )
        return CreatePod(pod_manifest(self.resource, assignment, self.settings))

    def delete_pods(
        self, pods: Iterable[PodView], why: str, grace_s: int | None = None, if_lost: str = ""
    ) -> list[Action]:
        """Delete pods, by force where no kubelet would confirm the end. `if_lost` names the node
        whose loss is the reason."""
        actions: list[Action] = []
        for pod in pods:
            forced = restarts.is_lost(pod, self.nodes)
            within_s, node = (0, pod.node) if forced else (grace_s, if_lost)
            actions.append(DeletePod(pod.name, pod.uid, why, within_s, node))
        return actions


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a decision: actions, in order, and what the status has to report."""

    actions: tuple[Action, ...] = ()
    failures: tuple[GroupFailure, ...] = ()
    groups_on_lost_nodes: tuple[GroupFailure, ...] = ()
    unplaced_replicas: tuple[Unschedulable, ...] = ()
    unplaced_groups: tuple[Unschedulable, ...] = ()
    growing: tuple[int, ...] = ()
    requeue_s: tuple[float, ...] = ()

    def __add__(self, other: Plan) -> Plan:
        if self is NOTHING or other is NOTHING:
            return other if self is NOTHING else self
        fields = self.__struct_fields__
        return Plan(**{name: getattr(self, name) + getattr(other, name) for name in fields})


NOTHING = Plan()


class PlanDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The next actions, and what the status has to report about them."""

    actions: tuple[Action, ...]
    replicas: Mapping[int, ReplicaView]
    rollout: Rollout
    persisted: PersistedStatus
    failures: tuple[GroupFailure, ...] = ()
    groups_on_lost_nodes: tuple[GroupFailure, ...] = ()
    """Groups on dead nodes for which there is no other node."""
    unplaced_replicas: tuple[Unschedulable, ...] = ()
    """Why replicas, or groups of their base, cannot be placed."""
    unplaced_groups: tuple[Unschedulable, ...] = ()
    """Why further groups cannot be placed."""
    growing: tuple[int, ...] = ()
    """Replicas with fewer groups than wanted."""


def decide(resource: MedhaReplica, observed: Observed, settings: Settings) -> PlanDecision:
    """Decide the next actions; none if the cluster is as the resource wants it.

    Raises SpecError for a spec that cannot work in a cluster.
    """
    check(resource)
    current_hash, persisted = spec_hash(resource), load_status(observed.previous_status)
    nodes = {node.name: node for node in observed.nodes}
    waiting = {pod.ordinal for pod in observed.pods if pod.lacks_image()}
    configs = {config_name(resource, ordinal, settings) for ordinal in waiting}
    replicas = replica_views(resource, observed, current_hash, configs)
    rollout = roll(resource.spec.replicas, replicas, persisted, nodes)
    ctx = PlanContext(
        resource, observed, settings, current_hash, persisted, nodes, replicas, rollout
    )
    kept = [
        replicas[ordinal]
        for ordinal in sorted((*rollout.fresh, *rollout.stale))
        if not replicas[ordinal].outdated
    ]
    plan = _free_names(ctx)
    for replica in kept:
        plan += reconcile_base(ctx, replica)
    rollout, created = _create_replicas(ctx)
    plan += created
    for replica in kept:
        if replica.ordinal not in rollout.retiring:
            plan += reconcile_extra(ctx, replica)
    for ordinal, why in rollout.retiring.items():
        plan += _retire(ctx, replicas[ordinal], why)
    requeue = (RequeueAt(min(plan.requeue_s)),) if plan.requeue_s else ()
    actions = (*_objects(ctx, rollout), *plan.actions, *requeue)
    return PlanDecision(
        actions=_without_taken(resource, observed, actions) if observed.taken else actions,
        replicas=replicas,
        rollout=rollout,
        persisted=persisted,
        failures=plan.failures,
        groups_on_lost_nodes=plan.groups_on_lost_nodes,
        unplaced_replicas=plan.unplaced_replicas,
        unplaced_groups=plan.unplaced_groups,
        growing=plan.growing,
    )


def _objects(ctx: PlanContext, rollout: Rollout) -> list[Action]:
    """Apply objects that are missing or differ; delete those of former replicas. An ordinal that
    waits for its replica to be recreated keeps its objects."""
    ordinals = {
        ordinal
        for ordinal, replica in ctx.replicas.items()
        if not replica.outdated and (replica.present or ordinal not in rollout.retiring)
    }
    leaving = sorted({*ctx.replicas} - ordinals)
    current = sorted({*ordinals, *rollout.create})
    existing = ctx.observed.objects
    wanted = (
        *objects(ctx.resource, current, ctx.settings, ctx.configured),
        *network_policies(ctx.resource, leaving, ctx.settings),
        *_budgets(ctx, rollout),
    )
    serves = any(replica.ready for replica in ctx.replicas.values())
    actions: list[Action] = [
        ApplyObject(manifest)
        for manifest in wanted
        if existing.get(key(manifest)) != content_hash(manifest)
        and (serves or key(manifest) in existing or not follows_readiness(ctx.resource, manifest))
    ]
    kept = {key(manifest) for manifest in wanted}
    kept |= {("ConfigMap", pod.config) for pod in ctx.observed.pods}
    for ordinal in rollout.pending:
        kept.add(("ConfigMap", config_name(ctx.resource, ordinal, ctx.settings)))
        kept.add(("NetworkPolicy", policy_name(ctx.resource.name, ordinal)))
    for ordinal in (*rollout.create, *rollout.pending):
        kept.add(("PodDisruptionBudget", ctx.name(ordinal)))
    actions += [
        DeleteObject(kind, object_name)
        for kind, object_name in sorted(existing)
        if kind != "Service" and (kind, object_name) not in kept
    ]
    return actions


def _budgets(ctx: PlanContext, rollout: Rollout) -> Iterator[Manifest]:
    """Build the budget of each replica, from its readiness to the end of its drain.

    A replica that retires keeps its budget but gets none: its pods may be on their way out. That of
    an outdated one counts the pods that it has: it does not grow.
    """
    spec = ctx.resource.spec.parallelism
    for ordinal, replica in ctx.replicas.items():
        held = ("PodDisruptionBudget", ctx.name(ordinal)) in ctx.observed.objects
        if ordinal in rollout.retiring:
            wanted = held and bool(replica.present) and not replica.idle
        else:
            wanted = held or replica.ready
        if not wanted:
            continue
        pods = spec.spp * max(spec.kvp.min, len(replica.groups))
        yield disruption_budget(
            ctx.resource, ordinal, len(replica.present) if replica.outdated else pods
        )


def _without_taken(
    resource: MedhaReplica, observed: Observed, actions: Iterable[Action]
) -> tuple[Action, ...]:
    """Leave out what needs a name that another owner's object has, until it is tried again. Without
    an object that pods need, no pod is created."""
    taken = observed.taken
    no_pods = any(needed_by_pods(resource, place) for place in taken)
    left_out = (CreatePod, EmitEvent) if no_pods else ()
    kept = [
        action
        for action in actions
        if not isinstance(action, left_out)
        and not (isinstance(action, ApplyObject) and key(action.manifest) in taken)
    ]
    return (*kept, RequeueAt(min(name.until_s for name in taken.values())))


# --- whole replicas -------------------------------------------------------------------------------


def _free_names(ctx: PlanContext) -> Plan:
    """Delete by force the pods that wait for a dead node to confirm their end: they hold a name."""
    actions: list[Action] = []
    for pod in ctx.observed.pods:
        if pod.deleting and restarts.is_lost(pod, ctx.nodes):
            actions += ctx.delete_pods([pod], f"node {pod.node} is gone")
    return Plan(actions=tuple(actions)) if actions else NOTHING


def _create_replicas(ctx: PlanContext) -> tuple[Rollout, Plan]:
    """Create new replicas where they fit; else retire an outdated one first if that helps."""
    kvp, rollout, plan = ctx.resource.spec.parallelism.kvp, ctx.rollout, NOTHING
    created: list[int] = []
    for ordinal in rollout.create:
        attempts, waits = ctx.next_attempts(ordinal, range(kvp.min))
        plan += waits
        if not all(attempts.values()):
            continue
        avoid = ctx.placer.node_sets_of_others(ordinal)
        placed = ctx.placer.place_base(kvp.min, kvp.max, _growth_reserve(ctx), avoid)
        if isinstance(placed, Unschedulable):
            plan += Plan(unplaced_replicas=(placed,))
            rollout = _retire_victim(ctx, rollout)
            break
        created.append(ordinal)
        plan += ctx.start_groups(ordinal, dict(enumerate(placed)), attempts)
    pending = tuple(ordinal for ordinal in rollout.create if ordinal not in created)
    return msgspec.structs.replace(rollout, create=tuple(created), pending=pending), plan


def _retire_victim(ctx: PlanContext, rollout: Rollout) -> Rollout:
    """Retire an outdated replica if its successor fits without it."""
    victim = rollout.victim(ctx.replicas)
    if victim is None or not ctx.fits_without(victim):
        return rollout
    return msgspec.structs.replace(
        rollout,
        retiring={**rollout.retiring, victim: UPDATED},
        stale=tuple(ordinal for ordinal in rollout.stale if ordinal != victim),
    )


def _growth_reserve(ctx: PlanContext) -> dict[str, int]:
    """By node of a replica's leader, the groups by which this replica may still grow."""
    max_groups = ctx.resource.spec.parallelism.kvp.max
    return {
        leader.node or leader.target: max_groups - len(replica.groups)
        for replica in ctx.replicas.values()
        if (leader := replica.leader) is not None and len(replica.groups) < max_groups
    }


def _retire(ctx: PlanContext, replica: ReplicaView, why: str) -> Plan:
    """Drain a replica; delete it when it is empty, cannot be drained, or its time is over."""
    if not replica.present:
        return NOTHING
    name = ctx.name(replica.ordinal)
    record = ctx.persisted.retirement(replica.ordinal)
    until_s = seconds(ctx.resource.spec.drain_timeout)
    until_s += unix_s(record.since) if record is not None else ctx.now_s
    leader = replica.leader
    undrainable = leader is None or (not leader.ready and (replica.silent or not leader.ip))
    if replica.idle or undrainable or ctx.now_s >= until_s:
        state = "has no requests left" if replica.idle else "does not serve"
        if not (replica.idle or undrainable):
            state = f"still has {replica.load} requests after spec.drainTimeout"
        event = EmitEvent("Drained", f"{name} {state}; its pods are deleted ({why})")
        deletes = ctx.delete_pods(replica.present, f"{name} is retired: {why}")
        return Plan(actions=(event, *deletes))
    actions: list[Action] = []
    if leader is not None and not replica.draining and leader.ip:
        if record is None:
            message = f"{name} accepts no new requests and finishes the running ones ({why})"
            actions.append(EmitEvent("Draining", message))
        actions.append(Drain(replica.ordinal, f"{leader.ip}:{CONTROLLER_OPS_PORT}"))
    return Plan(actions=tuple(actions), requeue_s=(min(until_s, ctx.now_s + DRAINED_S),))


# --- KVP groups of replicas that stay -------------------------------------------------------------
#
#     base       groups 0 .. kvp.min-1: one gang; the replica serves only with all of them
#     extra      as many more as the controller wants; each is a gang of its own


def reconcile_base(ctx: PlanContext, replica: ReplicaView) -> Plan:
    """Repair, recreate and ungate the groups that the replica needs in order to serve."""
    plan, missing = NOTHING, []
    for index in range(replica.min_groups):
        group = replica.groups.get(index)
        if group is None:
            missing.append(index)
        else:
            plan += repair(ctx, replica, group)
    if missing:
        attempts, waits = ctx.next_attempts(replica.ordinal, missing)
        plan += waits
        if all(attempts.values()):
            plan += recreate(ctx, replica, attempts)
    gang = replica.base
    if len(gang) == replica.min_groups and all(group.complete for group in gang):
        plan += ungate(ctx, [group for group in gang if group.has_gates])
    return plan


def recreate(ctx: PlanContext, replica: ReplicaView, attempts: Mapping[int, int]) -> Plan:
    """Create the base groups that the replica lacks, near those that it has."""
    placed: dict[int, Nodes] = {}
    near = [pod.node or pod.target for pod in replica.present]
    for index in attempts:
        avoid = ctx.placer.node_sets_of_others(replica.ordinal)
        nodes = ctx.placer.place_group(near, avoid=avoid)
        if isinstance(nodes, Unschedulable):
            if len(attempts) == replica.min_groups and ctx.fits_without(replica.ordinal):
                why = "the replica moves: its base has no room near its other groups"
                return Plan(actions=tuple(ctx.delete_pods(replica.present, why)))
            return Plan(unplaced_replicas=(nodes,))
        placed[index] = nodes
        near += nodes
    return ctx.start_groups(replica.ordinal, placed, attempts)


def reconcile_extra(ctx: PlanContext, replica: ReplicaView) -> Plan:
    """Create the groups beyond the base that are wanted; delete those that were released."""
    plan = NOTHING
    cooldown_s = seconds(ctx.resource.spec.scheduling.release_cooldown)
    # After a restart of the operator the controller's report comes first: the controller may have
    # released a group that the status still wants, or that lost a pod.
    polled = replica.report is not None or replica.silent
    for index, group in replica.groups.items():
        if index < replica.min_groups:
            continue
        released = restarts.released(replica, group, cooldown_s, ctx.now_s)
        if released is True:
            plan += _delete_released(ctx, replica, group)
            continue
        if released:
            plan += Plan(requeue_s=(released,))
        if polled or group.complete or group.gated:
            plan += repair(ctx, replica, group)
        if group.complete and group.has_gates:
            plan += ungate(ctx, [group])
    return plan + _grow(ctx, replica, polled) if replica.ready else plan


def _grow(ctx: PlanContext, replica: ReplicaView, polled: bool) -> Plan:
    """Create the wanted groups that are missing."""
    plan = NOTHING
    wanted = restarts.wanted_groups(ctx.resource, replica, ctx.persisted)
    missing = restarts.missing_groups(replica, wanted)
    if missing or any(not group.ready for group in replica.groups.values()):
        plan += Plan(growing=(replica.ordinal,))
    for index in missing if polled else ():
        attempts, waits = ctx.next_attempts(replica.ordinal, [index])
        plan += waits
        if not attempts[index]:
            continue
        near = [pod.node or pod.target for pod in replica.present]
        avoid = ctx.placer.node_sets_of_others(replica.ordinal)
        nodes = ctx.placer.place_group(near, avoid=avoid)
        if isinstance(nodes, Unschedulable):
            return plan + Plan(unplaced_groups=(nodes,))
        plan += ctx.start_groups(replica.ordinal, {index: nodes}, attempts, wanted)
    return plan


def _delete_released(ctx: PlanContext, replica: ReplicaView, group: GroupView) -> Plan:
    deletes = ctx.delete_pods(group.present, f"KVP group {group.index} was released")
    name = ctx.name(replica.ordinal)
    message = f"{name} releases KVP group {group.index}, which held no sequences"
    return Plan(actions=(*deletes, EmitEvent("GroupReleased", message)))


def repair(ctx: PlanContext, replica: ReplicaView, group: GroupView) -> Plan:
    """Restart a group that has failed; complete a gang whose pods are being created."""
    failure = restarts.failure_of(replica, group, ctx.nodes, ctx.now_s)
    if failure is not None:
        return restart(ctx, replica, group, failure)
    if group.present and group.gated and group.missing:
        near = [pod.target for pod in replica.present]
        avoid = ctx.placer.node_sets_of_others(replica.ordinal)
        nodes = ctx.placer.place_group(near, len(group.missing), avoid)
        if isinstance(nodes, Unschedulable):
            why = "the rest of the group cannot be placed"
            return Plan(actions=tuple(ctx.delete_pods(group.present, why)))
        return Plan(
            actions=tuple(
                ctx.create_pod(replica.ordinal, group.index, stage, node, group.attempt, True)
                for stage, node in zip(group.missing, nodes, strict=True)
            )
        )
    requeue_s = [
        pod.open_since_s + restarts.BIND_S for pod in group.present if pod.open_since_s is not None
    ]
    hung_at_s = restarts.hung_at_s(replica, group)
    if hung_at_s is not None:
        requeue_s.append(hung_at_s)
    return Plan(requeue_s=tuple(requeue_s)) if requeue_s else NOTHING


def restart(
    ctx: PlanContext, replica: ReplicaView, group: GroupView, failure: GroupFailure
) -> Plan:
    """Delete the pods of a failed group, once the status has recorded the failure. A group on a
    lost node stays if there is no other node: the lost one may come back."""
    if failure.lost:
        near = [pod.node for pod in replica.present if not restarts.is_lost(pod, ctx.nodes)]
        placed = ctx.placer.place_group(near)
        if isinstance(placed, Unschedulable) and not ctx.fits_without(replica.ordinal):
            return Plan(groups_on_lost_nodes=(failure,))
    if not restarts.is_recorded(failure, ctx.persisted):
        return Plan(failures=(failure,), requeue_s=(ctx.now_s,))
    deletes = ctx.delete_pods(group.present, failure.why, restarts.GRACE_S, failure.lost)
    message = f"{ctx.name(replica.ordinal)} restarts KVP group {group.index}: {failure.why}"
    event = EmitEvent("GroupFailed", message, warning=True)
    return Plan(actions=(*deletes, event), failures=(failure,))


def ungate(ctx: PlanContext, groups: Sequence[GroupView]) -> Plan:
    """Remove the gates of a whole gang, or delete its pods: a gate cannot be put back.

    A gang that a failure left half ungated is finished.
    """
    pods = [pod for group in groups for pod in group.present]
    if not pods:
        return NOTHING
    begun = not all(pod.gated for pod in pods)
    if begun or ctx.placer.holds(pod.target for pod in pods):
        return Plan(
            actions=tuple(RemoveSchedulingGate(pod.name, pod.uid) for pod in pods if pod.gated)
        )
    why = "other pods took its nodes before the whole gang existed"
    return Plan(actions=tuple(ctx.delete_pods(pods, why)))
