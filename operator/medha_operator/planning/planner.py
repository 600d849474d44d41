"""From the observed state of one MedhaReplica to the next actions.

    objects    Services; one ConfigMap, NetworkPolicy and budget per replica
    replicas   those to create, those to retire (see `rollout`)
    groups     failed ones restart (see `restarts`), wanted ones are created, released ones
               deleted; a gang's pods are created gated, and ungated once all of them exist

Pods are created whether or not there is room: the scheduler has the last word, and an autoscaler
makes nodes for the pods that wait. A gang that does not get all of its nodes is given back.

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
    ReleasePod,
    RemoveSchedulingGate,
    RequeueAt,
)
from medha_operator.resources.manifests import (
    Place,
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
    queue_of,
    replica_name,
    spec_hash,
)
from medha_operator.resources.objects import unix_s
from medha_operator.resources.views import (
    OVER,
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
QUOTA_S = 10.0
"""A quota's refusal is about the gangs that are being created within this time."""

Places = tuple[Place, ...]
"""The place of each stage of a group."""


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
            ordinal: {pod.place for pod in self.replicas[ordinal].present}
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

    def next_attempt(self, ordinal: int, group: int) -> int:
        return restarts.next_attempt(
            self.persisted.restart(ordinal, group), self.persisted.wait(ordinal, group)
        )

    def next_attempts(self, ordinal: int, groups: Iterable[int]) -> tuple[dict[int, int], Plan]:
        """By group, the attempt that may start now: 0 during its back-off, whose end requeues."""
        attempts, requeue_s = {}, []
        for index in groups:
            record, wait = (
                self.persisted.restart(ordinal, index),
                self.persisted.wait(ordinal, index),
            )
            due_s = restarts.not_before_s(record, wait, self.now_s)
            if due_s > self.now_s:
                requeue_s.append(due_s)
            attempts[index] = 0 if due_s > self.now_s else restarts.next_attempt(record, wait)
        return attempts, Plan(requeue_s=tuple(requeue_s)) if requeue_s else NOTHING

    def last_waits(self, ordinal: int, groups: Iterable[int]) -> tuple[Unschedulable, ...]:
        """Return why the first of these groups was given back; nothing if none was."""
        for index in groups:
            wait = self.persisted.wait(ordinal, index)
            if wait is not None and restarts.is_waiting(wait, self.now_s):
                return (Unschedulable(wait.reason, wait.message),)
        return ()

    def quota_refusal(self, ordinal: int, group: int) -> str:
        """Return the refusal of a quota that the group has not been given back for; "" if none."""
        quota, wait = self.observed.quota, self.persisted.wait(ordinal, group)
        if quota is None or self.now_s - quota.at_s > QUOTA_S:
            return ""
        # Times in the status are whole seconds; the shortest pause is one, too.
        counted = wait is not None and int(quota.at_s) <= unix_s(wait.at)
        return "" if counted else quota.message

    def place_base(self, ordinal: int) -> tuple[dict[int, Places], tuple[Unschedulable, ...]]:
        """Place a whole base; if it has no room, leave it open and return why."""
        kvp, stages = self.resource.spec.parallelism.kvp, self.resource.spec.parallelism.spp
        open_base = dict.fromkeys(range(kvp.min), (self.placer.open_place(),) * stages)
        if queue_of(self.resource):
            return open_base, ()  # a plan would be old by the time the queue admits the pods
        avoid = self.placer.node_sets_of_others(ordinal)
        reserve = _growth_reserve(self)
        waits = [wait for index in range(kvp.min) if (wait := self.persisted.wait(ordinal, index))]
        refused = {domain for wait in waits for domain in wait.domains}
        placed = self.placer.place_base(kvp.min, kvp.max, reserve, avoid, refused)
        if isinstance(placed, Unschedulable):
            if refused:
                placed = self.placer.place_base(kvp.min, kvp.max, reserve, avoid)
            if not isinstance(placed, Unschedulable):
                return open_base, ()
            if any(restarts.is_outside(wait) for wait in waits):
                open_base = dict.fromkeys(open_base, (self.placer.outside_place(),) * stages)
            return open_base, (placed,)
        if any(restarts.is_open(wait) for wait in waits):
            return open_base, ()
        by_group = {
            index: tuple(self.placer.place(node) for node in nodes)
            for index, nodes in enumerate(placed)
        }
        return by_group, ()

    def place_group(
        self, ordinal: int, group: int, near: Iterable[str], count: int
    ) -> tuple[Places, tuple[Unschedulable, ...]]:
        """Place pods of a group near these nodes; if there is no room, leave them open and return
        why."""
        if queue_of(self.resource):
            return (self.placer.open_place(near),) * count, ()
        avoid = self.placer.node_sets_of_others(ordinal)
        nodes = self.placer.place_group(near, count, avoid)
        if isinstance(nodes, Unschedulable):
            return (self.placer.open_place(near),) * count, (nodes,)
        wait = self.persisted.wait(ordinal, group)
        if wait is not None and wait.domains:
            return (self.placer.open_place(near),) * count, ()
        return tuple(self.placer.place(node) for node in nodes), ()

    def start_groups(
        self,
        ordinal: int,
        places_by_group: Mapping[int, Places],
        attempts: Mapping[int, int],
        unplaced: Sequence[Unschedulable] = (),
        wanted: int = 0,
    ) -> Plan:
        """Create the pods of these groups, gated unless there is but one pod."""
        gated = sum(len(places) for places in places_by_group.values()) > 1
        for places in places_by_group.values():
            self.placer.settle(ordinal, [place.node for place in places])
        pods = [
            self.create_pod(ordinal, index, stage, place, attempts[index], gated)
            for index, places in places_by_group.items()
            for stage, place in enumerate(places)
        ]
        if unplaced:
            return Plan(actions=(*pods, EmitEvent("NoRoom", unplaced[0].message, warning=True)))
        where = ", ".join(
            f"group {index} on {', '.join(dict.fromkeys(place.node for place in places)) or 'any'}"
            for index, places in places_by_group.items()
        )
        target = f" ({wanted} groups are wanted)" if wanted else ""
        reason = "GroupWanted" if wanted else "Placed"
        return Plan(actions=(*pods, EmitEvent(reason, f"{self.name(ordinal)}: {where}{target}")))

    def create_pod(
        self, ordinal: int, group: int, stage: int, place: Place, attempt: int, gated: bool
    ) -> CreatePod:
        sibling = self.configured.get(ordinal)
        assignment = PodAssignment(
            ordinal=ordinal,
            at=Coordinate(group, stage, 0),
            place=place,
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
    rollout, created = _create_replicas(ctx, plan)
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
    """Delete by force the pods that wait for a dead node to confirm their end, and release those
    that have ended and that a queue keeps: they hold a name."""
    actions: list[Action] = []
    for pod in ctx.observed.pods:
        if not pod.deleting:
            continue
        lost = restarts.is_lost(pod, ctx.nodes)
        if pod.kept and (lost or not pod.node or pod.phase in OVER):
            actions.append(ReleasePod(pod.name, pod.uid))
        if lost:
            actions += ctx.delete_pods([pod], f"node {pod.node} is gone")
    return Plan(actions=tuple(actions)) if actions else NOTHING


def _create_replicas(ctx: PlanContext, before: Plan) -> tuple[Rollout, Plan]:
    """Create new replicas, with or without room for them. If retiring an outdated one makes room,
    that comes first; also for new ones that the scheduler has refused."""
    rollout, plan, groups = ctx.rollout, NOTHING, range(ctx.resource.spec.parallelism.kvp.min)
    refused = [unplaced.reason != restarts.NO_NODE for unplaced in before.unplaced_replicas]
    if any(refused) or _is_refused(ctx) or _is_queued(ctx):
        rollout = _retire_victim(ctx, rollout)
    created: list[int] = []
    for ordinal in rollout.create:
        over = _refused_by_quota(ctx, ordinal, groups)
        attempts, waits = ctx.next_attempts(ordinal, groups)
        plan += over + waits
        if over.failures or not all(attempts.values()):
            plan += _waiting_replica(ctx.last_waits(ordinal, groups))
            continue
        places, unplaced = ctx.place_base(ordinal)
        plan += _waiting_replica(unplaced or ctx.last_waits(ordinal, groups))
        if unplaced:
            rollout = _retire_victim(ctx, rollout)
            if any(ctx.fits_without(leaving) for leaving in rollout.retiring):
                break  # its room comes free
        created.append(ordinal)
        plan += ctx.start_groups(ordinal, places, attempts, unplaced)
    pending = tuple(ordinal for ordinal in rollout.create if ordinal not in created)
    return msgspec.structs.replace(rollout, create=tuple(created), pending=pending), plan


def _is_refused(ctx: PlanContext) -> bool:
    """Return whether the base of a new replica was given back and has no nodes yet."""
    unbound = {ordinal for ordinal in ctx.rollout.fresh if not ctx.replicas[ordinal].bound}
    least = ctx.resource.spec.parallelism.kvp.min
    return any(
        wait.group < least and wait.replica in (*unbound, *ctx.rollout.create)
        for wait in ctx.persisted.waits
    )


def _is_queued(ctx: PlanContext) -> bool:
    """Return whether a queue has kept a new replica waiting for longer than a gang may take."""
    bases = (ctx.replicas[ordinal].base for ordinal in ctx.rollout.fresh)
    return any(
        all(
            pod.held and ctx.now_s - pod.seen_since_s >= restarts.HOLDING_S
            for group in base
            for pod in group.present
        )
        for base in bases
        if base
    )


def _refused_by_quota(ctx: PlanContext, ordinal: int, groups: Iterable[int]) -> Plan:
    """Give back groups that have no pod yet because a quota allows none."""
    failures = [
        GroupFailure(
            ordinal=ordinal,
            group=index,
            attempt=ctx.next_attempt(ordinal, index),
            why=message,
            reason=restarts.QUOTA,
        )
        for index in groups
        if (message := ctx.quota_refusal(ordinal, index))
    ]
    return Plan(failures=tuple(failures), requeue_s=(ctx.now_s,)) if failures else NOTHING


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
        leader.place: max_groups - len(replica.groups)
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
    plan, gang = NOTHING, replica.base
    missing = [index for index in range(replica.min_groups) if index not in replica.groups]
    unfinished = [*missing, *(group.index for group in gang if group.unfinished)]
    refusals = (ctx.quota_refusal(replica.ordinal, index) for index in unfinished)
    if refused := next(filter(None, refusals), ""):
        return _give_back_unfinished(ctx, replica, gang, missing, refused)
    # A base starts as one gang; of one that has run, a group that restarts is a gang of its own.
    started = ctx.persisted.groups_of(replica.ordinal).generation > 0
    for part in [[group] for group in gang] if started else [[*gang]]:
        plan += _reconcile_gang(ctx, replica, part)
    plan += _waiting_replica(_unplaced(ctx, replica, gang))
    if missing and (len(missing) == replica.min_groups or any(group.present for group in gang)):
        attempts, waits = ctx.next_attempts(replica.ordinal, missing)
        plan += waits
        if all(attempts.values()):
            plan += recreate(ctx, replica, attempts)
        else:
            plan += _waiting_replica(ctx.last_waits(replica.ordinal, missing))
    if not missing and all(group.complete for group in gang):
        plan += ungate(gang)
    return plan


def recreate(ctx: PlanContext, replica: ReplicaView, attempts: Mapping[int, int]) -> Plan:
    """Create the base groups that the replica lacks, near those that it has."""
    ordinal, near = replica.ordinal, [pod.place for pod in replica.present]
    if not near:
        base, unplaced = ctx.place_base(ordinal)
        plan = _waiting_replica(unplaced)
        return plan + ctx.start_groups(ordinal, base, attempts, unplaced)
    placed: dict[int, Places] = {}
    reasons: list[Unschedulable] = []
    for index in attempts:
        places, unplaced = ctx.place_group(ordinal, index, near, ctx.placer.required.stages)
        if unplaced and len(attempts) == replica.min_groups and ctx.fits_without(ordinal):
            why = "the replica moves: its base has no room near its other groups"
            return Plan(actions=tuple(ctx.delete_pods(replica.present, why)))
        placed[index] = places
        reasons += unplaced
        near += [place.node for place in places]
    plan = _waiting_replica(tuple(reasons))
    return plan + ctx.start_groups(ordinal, placed, attempts, reasons)


def _reconcile_gang(ctx: PlanContext, replica: ReplicaView, gang: Sequence[GroupView]) -> Plan:
    """Repair the groups of a gang, or give it back whole if it does not get its nodes."""
    times, outside, plan = 0, False, NOTHING
    for group in gang:
        wait = ctx.persisted.wait(replica.ordinal, group.index)
        if wait is None:
            continue
        times, outside = max(times, wait.times), outside or restarts.is_outside(wait)
        if group.present and wait.attempt >= group.attempt:
            return _give_back(ctx, replica, gang, wait.reason, wait.message)
    unbound = not any(pod.node for group in gang for pod in group.present)
    outdated = outside and unbound and ctx.fits_without(replica.ordinal)
    salt = f"{ctx.resource.uid} {replica.ordinal}"
    back_s = restarts.give_back_s(gang, times, salt, outside, outdated)
    if back_s is not None and back_s <= ctx.now_s:
        pod = next(pod for group in gang for pod in group.present if pod.refused)
        why = f"pod {pod.name} finds no node: {pod.message or pod.why}"
        nodes = sorted(pod.node or pod.target for group in gang for pod in group.present)
        domains = [ctx.placer.domain_name(node) for node in nodes if node]
        domain = domains[0] if domains else None
        return _give_back(ctx, replica, gang, restarts.NO_NODE, why, domain)
    for group in gang:
        plan += repair(ctx, replica, group)
    return plan if back_s is None else plan + Plan(requeue_s=(back_s,))


def _give_back(
    ctx: PlanContext,
    replica: ReplicaView,
    gang: Iterable[GroupView],
    reason: str,
    why: str,
    domain: str | None = None,
) -> Plan:
    plan = NOTHING
    for group in gang:
        if group.present:
            failure = restarts.ended(replica, group, why, reason=reason, domain=domain)
            plan += restart(ctx, replica, group, failure)
    return plan


def _give_back_unfinished(
    ctx: PlanContext,
    replica: ReplicaView,
    gang: Sequence[GroupView],
    missing: Sequence[int],
    why: str,
) -> Plan:
    """Give back a gang that a quota does not allow to exist as a whole."""
    unbound = [group for group in gang if not any(pod.node for pod in group.present)]
    plan = _refused_by_quota(ctx, replica.ordinal, missing)
    return plan + _give_back(ctx, replica, unbound, restarts.QUOTA, why)


def _waiting_replica(unplaced: tuple[Unschedulable, ...]) -> Plan:
    return Plan(unplaced_replicas=unplaced) if unplaced else NOTHING


def _waiting_group(unplaced: tuple[Unschedulable, ...]) -> Plan:
    return Plan(unplaced_groups=unplaced) if unplaced else NOTHING


def _unplaced(
    ctx: PlanContext, replica: ReplicaView, gang: Iterable[GroupView]
) -> tuple[Unschedulable, ...]:
    """Explain why the scheduler finds no nodes for pods of this gang. Before it has judged them,
    the reason is that of the last attempt; there is none if the gang waits for nothing else."""
    unbound = [pod for group in gang for pod in group.present if not pod.node]
    refused = [pod for pod in unbound if pod.refused]
    if not refused:
        waits = unbound and not any(pod.held for pod in unbound)
        return ctx.last_waits(replica.ordinal, [pod.group for pod in unbound]) if waits else ()
    kvp = ctx.resource.spec.parallelism.kvp
    near = [pod.node for pod in replica.present if pod.node]
    placed = (
        ctx.placer.place_group(near, len(refused))
        if near
        else ctx.placer.place_base(kvp.min, kvp.max)
    )
    if isinstance(placed, Unschedulable):
        return (placed,)
    pod = refused[0]
    return (Unschedulable(restarts.NO_NODE, f"pod {pod.name} finds no node: {pod.message}"),)


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
        refused = ctx.quota_refusal(replica.ordinal, index) if group.unfinished else ""
        if refused:
            plan += _give_back_unfinished(ctx, replica, [group], (), refused)
            continue
        if polled or group.complete or group.gated:
            plan += _reconcile_gang(ctx, replica, [group])
        if group.complete:
            plan += ungate([group])
        plan += _waiting_group(_unplaced(ctx, replica, [group]))
    return plan + _grow(ctx, replica, polled) if replica.ready else plan


def _grow(ctx: PlanContext, replica: ReplicaView, polled: bool) -> Plan:
    """Create the wanted groups that are missing."""
    plan = NOTHING
    wanted = restarts.wanted_groups(ctx.resource, replica, ctx.persisted)
    missing = restarts.missing_groups(replica, wanted)
    if missing or any(not group.ready for group in replica.groups.values()):
        plan += Plan(growing=(replica.ordinal,))
    for index in missing if polled else ():
        refused = _refused_by_quota(ctx, replica.ordinal, [index])
        attempts, waits = ctx.next_attempts(replica.ordinal, [index])
        plan += refused + waits
        if refused.failures or not attempts[index]:
            plan += _waiting_group(ctx.last_waits(replica.ordinal, [index]))
            continue
        near = [pod.place for pod in replica.present]
        stages = ctx.placer.required.stages
        places, unplaced = ctx.place_group(replica.ordinal, index, near, stages)
        plan += _waiting_group(unplaced)
        plan += ctx.start_groups(replica.ordinal, {index: places}, attempts, unplaced, wanted)
    return plan


def _delete_released(ctx: PlanContext, replica: ReplicaView, group: GroupView) -> Plan:
    deletes = ctx.delete_pods(group.present, f"KVP group {group.index} was released")
    name = ctx.name(replica.ordinal)
    message = f"{name} releases KVP group {group.index}, which held no sequences"
    return Plan(actions=(*deletes, EmitEvent("GroupReleased", message)))


def repair(ctx: PlanContext, replica: ReplicaView, group: GroupView) -> Plan:
    """Restart a group that has failed; complete a gang whose pods are being created."""
    failure = restarts.failure_of(replica, group, ctx.nodes, ctx.now_s)
    if failure is not None and (group.present or not restarts.is_recorded(failure, ctx.persisted)):
        return restart(ctx, replica, group, failure)
    if group.unfinished:
        near = [pod.place for pod in replica.present if pod.place]
        places: Places = (ctx.placer.open_place(),) * len(group.missing)
        if near:
            places, _ = ctx.place_group(replica.ordinal, group.index, near, len(group.missing))
        return Plan(
            actions=tuple(
                ctx.create_pod(replica.ordinal, group.index, stage, place, group.attempt, True)
                for stage, place in zip(group.missing, places, strict=True)
            )
        )
    hung_at_s = restarts.hung_at_s(replica, group)
    return NOTHING if hung_at_s is None else Plan(requeue_s=(hung_at_s,))


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
    name, ends = ctx.name(replica.ordinal), "gives back" if failure.reason else "restarts"
    message = f"{name} {ends} KVP group {group.index}: {failure.why}"
    event = EmitEvent(failure.reason or "GroupFailed", message, warning=True)
    return Plan(actions=(*deletes, event), failures=(failure,))


def ungate(gang: Sequence[GroupView]) -> Plan:
    """Remove the gates of a gang whose pods all exist."""
    gated = [pod for group in gang for pod in group.present if pod.gated]
    if not gated:
        return NOTHING
    return Plan(actions=tuple(RemoveSchedulingGate(pod.name, pod.uid) for pod in gated))
