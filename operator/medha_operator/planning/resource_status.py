"""The status of a MedhaReplica: a tree of conditions, counts, and records that planning needs.

    Ready ── ModelAvailable   the checkpoint is there and loads
          ├─ Placed           every pod that serving needs has its node
          ├─ GroupsReady      the pods of the first kvp.min groups of every replica are ready
          └─ KvpReady         as many replicas serve as spec.replicas

    Updated, KvpGrowing, Draining, RestartBudgetExhausted, PlacementUnsatisfiable, NamesAccepted,
    ScalingActive (if the resource is autoscaled)   inform
    Reconciling, Stalled   summarise the others for kstatus; at most one is True

Pure. The same observed state gives an equal status, times included, so that nothing is written.
Messages hold no counts that change pod by pod.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from medha.fleet.autoscaling import ScalingDecision
from medha.spec import MedhaReplica
from medha.spec.values import AutoscalingSpec, CheckpointSource
from medha_operator.planning import restarts
from medha_operator.planning.planner import PlanDecision
from medha_operator.resources import labels
from medha_operator.resources.actions import EmitEvent
from medha_operator.resources.manifests import (
    ADAPTERS_FOLDER,
    MODELS_FOLDER,
    adapter_volume,
    needed_by_pods,
    replica_name,
)
from medha_operator.resources.objects import UNKNOWN_MANAGER, FieldManager, rfc3339, unix_s
from medha_operator.resources.views import (
    ConditionRecord,
    GroupsRecord,
    Observed,
    PersistedStatus,
    PodView,
    ReplicaView,
    RestartRecord,
    RetiringRecord,
    ScaleOwnerRecord,
    WaitRecord,
    load_status,
)

Status = dict[str, Any]


def status(
    resource: MedhaReplica,
    observed: Observed,
    decision: PlanDecision,
    *,
    generation: int,
    scaling: ScalingStatus | None = None,
) -> Status:
    """Build the whole status from a decision about `observed`.

    `scaling` is None while the autoscaler has decided nothing: the former status stands.
    """
    current = conditions(resource, observed, decision)
    scaled = scaling or _former_scaling(resource, observed, decision.persisted)
    if scaled.condition is not None:
        current = (*current, scaled.condition)
    groups = tuple(
        _groups_record(replica, decision.persisted) for replica in decision.replicas.values()
    )
    serving = [
        replica
        for ordinal, replica in decision.replicas.items()
        if replica.ready and ordinal not in decision.rollout.retiring
    ]
    now_s = observed.now_s
    body: Status = {
        "observedGeneration": generation,
        "replicas": len({*decision.replicas, *decision.rollout.create}),
        "readyReplicas": len(serving),
        "kvpGroups": sum(record.kvp_groups for record in groups),
        "selector": f"{labels.RESOURCE}={resource.name},{labels.ROLE}={labels.LEADER}",
        "groups": _plain(groups),
        "restarts": _plain(_restarts(decision, now_s)),
        "waits": _plain(_waits(decision, now_s)),
        "retiring": _plain(_retiring(decision, now_s)),
        "conditions": _plain(_with_times(current, decision.persisted, now_s, generation)),
    }
    if scaled.record is not None:
        body["scaling"] = _plain((scaled.record,))[0]
    if scaled.slo:
        body["slo"] = scaled.slo
    return body


def refused_status(observed: Observed, sentence: str, *, generation: int) -> Status:
    """Build the status for a refused spec: replicas and the rest of the status stay."""
    persisted = load_status(observed.previous_status)
    refused = Condition(type="Ready", status="False", reason="SpecRefused", message=sentence)
    current = _with_times((refused, *_progress(refused)), persisted, observed.now_s, generation)
    types = {record.type for record in current}
    others = tuple(record for record in persisted.conditions if record.type not in types)
    return {
        **observed.previous_status,
        "observedGeneration": generation,
        "conditions": _plain((*current, *others)),
    }


def _former_scaling(
    resource: MedhaReplica, observed: Observed, persisted: PersistedStatus
) -> ScalingStatus:
    """Return what the status holds about scaling, for as long as the spec asks for scaling."""
    condition = next(
        (
            Condition(
                type=record.type,
                status=record.status,
                reason=record.reason,
                message=record.message,
            )
            for record in persisted.conditions
            if record.type == "ScalingActive" and resource.spec.autoscaling is not None
        ),
        None,
    )
    slo: Any = observed.previous_status.get("slo") or {}
    return ScalingStatus(record=persisted.scaling, condition=condition, slo=slo)


def _with_times(
    current: tuple[Condition, ...], persisted: PersistedStatus, now_s: float, generation: int
) -> tuple[ConditionRecord, ...]:
    """Add the time of its last transition to each condition."""
    former = {record.type: record for record in persisted.conditions}
    records = []
    for condition in current:
        old = former.get(condition.type)
        same = old is not None and old.status == condition.status
        records.append(
            ConditionRecord(
                type=condition.type,
                status=condition.status,
                reason=condition.reason,
                message=condition.message[:1024],
                last_transition_time=old.last_transition_time
                if old is not None and same
                else rfc3339(now_s),
                observed_generation=generation,
            )
        )
    return tuple(records)


def _groups_record(replica: ReplicaView, persisted: PersistedStatus) -> GroupsRecord:
    """Take the controller's report, else the former record. Ready pods count running groups until
    the controller reports a membership."""
    report, former = replica.report, persisted.groups_of(replica.ordinal)
    running = sum(group.ready for group in replica.groups.values())
    if report is not None and report.generation:
        running = sum(group.state == "running" for group in report.groups)
    return GroupsRecord(
        replica=replica.ordinal,
        kvp_groups=running,
        wanted=report.wanted_groups if report is not None else former.wanted,
        generation=report.generation if report is not None else former.generation,
    )


def _restarts(decision: PlanDecision, now_s: float) -> tuple[RestartRecord, ...]:
    """Collect failures of replicas that stay, this decision's included."""
    ordinals = _lasting(decision)
    records = {
        (record.replica, record.group): record
        for record in decision.persisted.restarts
        if record.replica in ordinals
    }
    for failure in decision.failures:
        if not failure.reason:
            place = (failure.ordinal, failure.group)
            records[place] = restarts.add_failure(records.get(place), failure, now_s)
    return tuple(records[place] for place in sorted(records))


def _lasting(decision: PlanDecision) -> set[int]:
    """Return the ordinals of replicas that stay or come."""
    ordinals = {*decision.replicas, *decision.rollout.create, *decision.rollout.pending}
    return ordinals - set(decision.rollout.retiring)


def _waits(decision: PlanDecision, now_s: float) -> tuple[WaitRecord, ...]:
    """Collect groups that were given back and have not found their nodes since."""
    ordinals, records = _lasting(decision), {}
    for record in decision.persisted.waits:
        replica = decision.replicas.get(record.replica)
        group = replica.groups.get(record.group) if replica is not None else None
        bound = group is not None and group.bound
        if record.replica in ordinals and restarts.is_waiting(record, now_s) and not bound:
            records[record.replica, record.group] = record
    for failure in decision.failures:
        if failure.reason:
            place = (failure.ordinal, failure.group)
            records[place] = restarts.add_wait(records.get(place), failure, now_s)
    return tuple(records[place] for place in sorted(records))


def _retiring(decision: PlanDecision, now_s: float) -> tuple[RetiringRecord, ...]:
    return tuple(
        decision.persisted.retirement(ordinal)
        or RetiringRecord(replica=ordinal, since=rfc3339(now_s), reason=reason)
        for ordinal, reason in sorted(decision.rollout.retiring.items())
    )


def _plain(records: tuple[msgspec.Struct, ...]) -> list[Any]:
    """Convert records to the JSON values that the API returns."""
    values: list[Any] = msgspec.json.decode(msgspec.json.encode(records))
    return values


# --- conditions -----------------------------------------------------------------------------------
#
# Each has a sentence that says what to do.


_FETCH, _FETCH_ADAPTER = "fetch-model: ", "fetch-adapter-"
_SETUP = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_TRANSIENT = ("Placing", "Queued", "Loading", "Joining", "NotLoadedYet")
"""Reasons that go away by themselves."""
_STALLING = (
    "SpecRefused",
    "NameTaken",
    "ModelMissing",
    "ImagePull",
    "FailedMount",
    "RouterRefuses",
    "FailsAgainAndAgain",
    *_SETUP,
)
"""Reasons that a person has to remove. Room is none of them: an autoscaler may add nodes."""


class Condition(msgspec.Struct, frozen=True):
    type: str
    status: str
    reason: str
    message: str = ""


def conditions(
    resource: MedhaReplica, observed: Observed, decision: PlanDecision
) -> tuple[Condition, ...]:
    """Derive all conditions, `Ready` first."""
    recent = tuple(
        record
        for record in decision.persisted.restarts
        if restarts.is_recent(record, observed.now_s)
    )
    persisted = msgspec.structs.replace(decision.persisted, restarts=recent)
    decision = msgspec.structs.replace(decision, persisted=persisted)
    gating = (
        _model(resource, decision),
        _placed(resource, decision),
        _groups(resource, observed, decision),
        _kvp(resource, decision),
    )
    ready, updated = _ready(resource, gating), _updated(resource, decision)
    draining = _draining(resource, decision)
    exhausted = _exhausted(resource, observed, decision)
    return (
        ready,
        *gating,
        updated,
        _growing(resource, decision),
        draining,
        exhausted,
        _unsatisfiable(decision),
        _names(observed),
        *_progress(ready, updated, draining, exhausted),
    )


def _ready(resource: MedhaReplica, gating: tuple[Condition, ...]) -> Condition:
    """Join the gating conditions. A false one that a person may have to repair explains it rather
    than one that only takes time."""
    missing = [condition for condition in gating if condition.status != "True"]
    if missing:
        worst = min(
            missing,
            key=lambda condition: (
                condition.reason in _TRANSIENT,
                condition.status == "Unknown",
            ),
        )
        return Condition("Ready", "False", worst.reason, worst.message)
    if resource.spec.replicas == 0:
        message = "spec.replicas is 0: nothing serves; raise it to serve"
        return Condition("Ready", "True", "NoneAskedFor", message)
    return Condition("Ready", "True", "Serving")


# --- ModelAvailable -------------------------------------------------------------------------------


def _model(resource: MedhaReplica, decision: PlanDecision) -> Condition:
    trouble = _model_trouble(resource, decision)
    if trouble:
        return Condition("ModelAvailable", "False", "ModelMissing", trouble)
    loaded_before = any(
        record.type == "ModelAvailable" and record.status == "True"
        for record in decision.persisted.conditions
    )
    if (
        loaded_before
        or resource.spec.replicas == 0
        or any(pod.ready for replica in decision.replicas.values() for pod in replica.pods)
    ):
        return Condition("ModelAvailable", "True", "Loaded")
    message = "no pod has loaded the model yet"
    return Condition("ModelAvailable", "Unknown", "NotLoadedYet", message)


def _model_trouble(resource: MedhaReplica, decision: PlanDecision) -> str:
    """Explain what a pod, or its last failure, reports about the checkpoint or an adapter; "" for
    nothing."""
    sources = _sources(resource)
    for pod in _waiting(decision):
        if trouble := _volume_trouble(sources, pod):
            return trouble
    for record in decision.persisted.restarts:
        if _is_ready(decision, record.replica):
            continue
        if ADAPTERS_FOLDER in record.reason or _FETCH_ADAPTER in record.reason:
            return f"an adapter does not load: {record.reason}; correct its source in spec.adapters"
        origin, remedy = _origin(sources[0])
        if _FETCH in record.reason:
            return f"{origin} cannot be fetched: {record.reason}; {remedy}"
        if MODELS_FOLDER in record.reason:
            return (
                f"the model does not load: {record.reason}; {MODELS_FOLDER} is {origin} there: "
                f"{remedy}"
            )
    return ""


class _Source(NamedTuple):
    """A field of the spec with a source, its volume in the pods, and its contents."""

    field: str
    volume: str
    kind: str
    files: str
    source: CheckpointSource


def _sources(resource: MedhaReplica) -> list[_Source]:
    """Return the sources of the checkpoint and of the adapters."""
    model = resource.spec.model.source
    return [
        _Source("spec.model.source", "model", "model", "the whole checkpoint", model),
        *(
            _Source(
                f"spec.adapters[{number}].source",
                adapter_volume(number),
                "adapter",
                "the adapter's files",
                adapter.source,
            )
            for number, adapter in enumerate(resource.spec.adapters)
        ),
    ]


def _volume_trouble(sources: list[_Source], pod: PodView) -> str:
    """Explain what a waiting pod reports about the volumes of sources; "" for nothing."""
    report = f"{pod.why} {pod.message}"
    claims = [(of.field, of.source.pvc.claim_name) for of in sources if of.source.pvc is not None]
    if claims and "persistentvolumeclaim" in report.lower():
        # The scheduler names a claim that is missing, not one that is unbound.
        named = (claim for claim in claims if f'"{claim[1]}"' in report)
        field, claim_name = next(named, claims[0])
        return (
            f"volume claim {claim_name} of {field} cannot be used by pod "
            f"{pod.name} ({pod.message}); create it in this namespace or correct claimName"
        )
    for of in sources:
        if of.source.image is not None and of.source.image.reference in report:
            return (
                f"{of.kind} image {of.source.image.reference} cannot be pulled for pod {pod.name} "
                f"({_short(pod)}); correct {of.field}.image.reference or its pull secret"
            )
        if pod.why == "FailedMount" and f'volume "{of.volume}"' in pod.message:
            origin, remedy = _origin(of)
            return (
                f"{origin} cannot be mounted into pod {pod.name} on node {pod.node} "
                f"({pod.message[:300]}); {remedy}"
            )
    return ""


def _origin(of: _Source) -> tuple[str, str]:
    """Describe where the files come from, and the remedy if they are missing."""
    source = of.source
    if source.host_path is not None:
        return (
            f"the directory {source.host_path.path}",
            f"put {of.files} there on every node, or correct {of.field}.hostPath.path",
        )
    if source.pvc is not None:
        return (
            f"volume claim {source.pvc.claim_name}",
            f"put {of.files} into its volume, or correct {of.field}.pvc",
        )
    if source.image is not None:
        return f"image {source.image.reference}", f"correct {of.field}.image"
    return (
        str(source.uri),
        f"correct {of.field}.uri, or let workers reach it (the chart's networkPolicy.modelEgress)",
    )


# --- Placed, GroupsReady, KvpReady ----------------------------------------------------------------


def _placed(resource: MedhaReplica, decision: PlanDecision) -> Condition:
    placed = sum(replica.bound or replica.ready for replica in _needed(decision))
    if placed >= resource.spec.replicas:
        return Condition("Placed", "True", "Placed")
    if decision.unplaced_replicas:
        worst = decision.unplaced_replicas[0]
        return Condition("Placed", "False", worst.reason, worst.message)
    for replica in _needed(decision):
        for pod in replica.present:
            if pod.held:
                message = (
                    f"pods wait behind the scheduling gate {pod.held}, which its owner removes"
                )
                return Condition("Placed", "False", "Queued", message)
    message = "pods are not yet bound to their nodes"
    if resource.spec.template.scheduler_name is not None:
        message += f" by spec.template.schedulerName, {resource.spec.template.scheduler_name}"
    return Condition("Placed", "False", "Placing", message)


def _groups(resource: MedhaReplica, observed: Observed, decision: PlanDecision) -> Condition:
    ready = sum(replica.ready for replica in _needed(decision))
    if ready >= resource.spec.replicas:
        return Condition("GroupsReady", "True", "GroupsReady")
    for place, taken in sorted(observed.taken.items()):
        if needed_by_pods(resource, place):
            return Condition("GroupsReady", "False", "NameTaken", taken.message)
    loading = "Loading", "pods are starting and loading the model"
    return Condition("GroupsReady", "False", *(_trouble(resource, decision) or loading))


def _trouble(resource: MedhaReplica, decision: PlanDecision) -> tuple[str, str] | None:
    """Find what keeps pods of replicas that are not ready from running: reason and message."""
    for pod in _waiting(decision):
        if pod.lacks_image():
            image = resource.spec.template.image or "the worker's image"
            return "ImagePull", (
                f"{image} cannot be pulled for pod {pod.name} ({_short(pod)}); correct "
                "spec.template.image, or make the image available to the nodes"
            )
        if pod.why in _SETUP:
            return pod.why, f"pod {pod.name} cannot be started: {pod.message}"
        if pod.why == "FailedMount":
            return pod.why, (
                f"a volume of pod {pod.name} cannot be mounted on node {pod.node} "
                f"({pod.message[:300]}); make what it names, or correct spec.template.volumes"
            )
    if decision.groups_on_lost_nodes:
        return "NodeLost", (
            f"{decision.groups_on_lost_nodes[0].why} and there is no other place for its pods; "
            "bring it back or add nodes"
        )
    for replica in _needed(decision):
        if not replica.ready and replica.report is not None and replica.report.refused:
            name = replica_name(resource.name, replica.ordinal)
            return "RouterRefuses", f"no router accepts {name}: {replica.report.refused}"
    for record in decision.persisted.restarts:
        if not _is_ready(decision, record.replica):
            name = replica_name(resource.name, record.replica)
            return "GroupFailed", f"KVP group {record.group} of {name} restarts: {record.reason}"
    return None


def _kvp(resource: MedhaReplica, decision: PlanDecision) -> Condition:
    needed = _needed(decision)
    serving = sum(
        replica.ready
        and (replica.report is None or replica.report.ready or replica.report.draining)
        for replica in needed
    )
    if serving >= resource.spec.replicas:
        return Condition("KvpReady", "True", "Serving")
    messages = [
        replica.report.message for replica in needed if replica.report and replica.report.message
    ]
    waiting = "controllers wait for their first KVP groups and a router"
    return Condition("KvpReady", "False", "Joining", messages[0] if messages else waiting)


# --- conditions that inform -----------------------------------------------------------------------


def _updated(resource: MedhaReplica, decision: PlanDecision) -> Condition:
    outdated = [replica for replica in decision.replicas.values() if replica.outdated]
    if not outdated and len(decision.rollout.fresh) >= decision.rollout.wanted:
        return Condition("Updated", "True", "Updated")
    if decision.unplaced_replicas:
        worst = decision.unplaced_replicas[0]
        message = f"replicas of the current spec: {worst.message}"
        return Condition("Updated", "False", worst.reason, message)
    usual = (
        "RollingUpdate" if outdated else "Creating",
        "some replicas of the current spec do not exist yet",
    )
    return Condition("Updated", "False", *(_trouble(resource, decision) or usual))


def _growing(resource: MedhaReplica, decision: PlanDecision) -> Condition:
    if decision.unplaced_groups:
        worst = decision.unplaced_groups[0]
        message = f"a further KVP group is wanted: {worst.message}"
        return Condition("KvpGrowing", "False", worst.reason, message)
    if not decision.growing:
        return Condition("KvpGrowing", "False", "AsWanted")
    names = ", ".join(replica_name(resource.name, ordinal) for ordinal in decision.growing)
    for record in decision.persisted.restarts:
        extra = record.group >= resource.spec.parallelism.kvp.min
        if record.replica in decision.growing and extra:
            message = (
                f"{names} gets more KVP groups, but group {record.group} failed: {record.reason}"
            )
            return Condition("KvpGrowing", "True", "GroupFailed", message)
    message = f"{names} gets more KVP groups for long contexts"
    return Condition("KvpGrowing", "True", "GroupsWanted", message)


def _draining(resource: MedhaReplica, decision: PlanDecision) -> Condition:
    retiring = decision.rollout.retiring
    if not retiring:
        return Condition("Draining", "False", "None")
    names = ", ".join(
        f"{replica_name(resource.name, ordinal)} ({why})"
        for ordinal, why in sorted(retiring.items())
    )
    return Condition("Draining", "True", "Retiring", f"draining, then deleted: {names}")


def _exhausted(resource: MedhaReplica, observed: Observed, decision: PlanDecision) -> Condition:
    policy = restarts.POLICY
    for record in decision.persisted.restarts:
        if restarts.exhausted(record, observed.now_s) and not _is_ready(decision, record.replica):
            name = replica_name(resource.name, record.replica)
            message = (
                f"KVP group {record.group} of {name} failed more than {policy.budget} times within "
                f"{policy.window_s / 60:.0f} minutes and waits: {record.reason}; see its logs, or "
                "change the spec to try at once"
            )
            return Condition("RestartBudgetExhausted", "True", "FailsAgainAndAgain", message)
    return Condition("RestartBudgetExhausted", "False", "WithinBudget")


def _unsatisfiable(decision: PlanDecision) -> Condition:
    for unplaced in (*decision.unplaced_replicas, *decision.unplaced_groups):
        return Condition("PlacementUnsatisfiable", "True", unplaced.reason, unplaced.message)
    return Condition("PlacementUnsatisfiable", "False", "Satisfiable")


def _names(observed: Observed) -> Condition:
    for _, taken in sorted(observed.taken.items()):
        return Condition("NamesAccepted", "False", "NameTaken", taken.message)
    return Condition("NamesAccepted", "True", "NoConflicts")


_GOOD = {"Ready": "True", "Updated": "True", "Draining": "False", "RestartBudgetExhausted": "False"}


def _progress(*judged: Condition) -> tuple[Condition, Condition]:
    """Derive Reconciling and Stalled from the conditions that a spec has to reach.

    https://github.com/kubernetes-sigs/cli-utils/blob/master/pkg/kstatus/README.md
    """
    unmet = [condition for condition in judged if condition.status != _GOOD[condition.type]]
    stalling = [condition for condition in unmet if condition.reason in _STALLING]
    for condition in stalling:
        return (
            Condition("Reconciling", "False", condition.reason),
            Condition("Stalled", "True", condition.reason, condition.message),
        )
    for condition in unmet:
        return (
            Condition("Reconciling", "True", condition.reason, condition.message),
            Condition("Stalled", "False", "Progressing"),
        )
    return (
        Condition("Reconciling", "False", "UpToDate"),
        Condition("Stalled", "False", "UpToDate"),
    )


def _is_ready(decision: PlanDecision, ordinal: int) -> bool:
    return ordinal in decision.replicas and decision.replicas[ordinal].ready


def _needed(decision: PlanDecision) -> list[ReplicaView]:
    """List the replicas that count: all but the retiring ones."""
    ordinals = sorted((*decision.rollout.fresh, *decision.rollout.stale))
    return [decision.replicas[ordinal] for ordinal in ordinals]


def _waiting(decision: PlanDecision) -> list[PodView]:
    return [
        pod for replica in _needed(decision) for pod in replica.present if not pod.ready and pod.why
    ]


def _short(pod: PodView) -> str:
    return (f"{pod.why}: {pod.message}" if pod.message else pod.why)[:300]


# --- scale ownership ------------------------------------------------------------------------------
#
#     Builtin    the operator writes /scale, and no other writer should. If another one does, its
#                value stands for as long as a scale-down is stabilised; then the operator goes on
#     External   the operator exports a number and never writes; an HPA does, through KEDA where
#                KEDA runs. A ScaledObject is created after the status says that it may exist, and
#                the operator writes again only when it has seen the ScaledObject gone
#
# So there are never two writers.


class ScalingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The autoscaler's part of a status. `record` is None if the resource is not scaled."""

    record: ScaleOwnerRecord | None = None
    condition: Condition | None = None
    slo: dict[str, object] = {}


def update_owner(
    autoscaling: AutoscalingSpec,
    replicas: int,
    managers: Sequence[FieldManager],
    record: ScaleOwnerRecord | None,
    hold_s: float,
    now_s: float,
    written: int | None = None,
) -> ScaleOwnerRecord:
    """Update the record from `spec.replicas` and its field managers.

    `written` is what the operator last wrote: the API server forgets the manager of a zero that
    was written to /scale, and then that of the next value.
    """
    if record is None or record.mode != autoscaling.mode:
        kept = record.scaled_object if record is not None else "Absent"
        return ScaleOwnerRecord(mode=autoscaling.mode, replicas=replicas, scaled_object=kept)
    if replicas != record.replicas:
        record = msgspec.structs.replace(record, replicas=replicas, outside_by="", outside_since="")
        ours = any(manager.ours for manager in managers)
        ours = ours or (not managers and replicas == written)
        if autoscaling.mode == "Builtin" and not ours:
            by = managers[-1].name if managers else UNKNOWN_MANAGER
            return msgspec.structs.replace(record, outside_by=by, outside_since=rfc3339(now_s))
    if record.outside_by and now_s - unix_s(record.outside_since) >= hold_s:
        return msgspec.structs.replace(record, outside_by="", outside_since="")
    return record


def scaling_condition(
    autoscaling: AutoscalingSpec, record: ScaleOwnerRecord, decision: ScalingDecision, keda: str
) -> Condition:
    """Derive the condition ScalingActive. `keda`: why no ScaledObject can exist, "" if it can."""

    def active(status: str, reason: str, message: str) -> Condition:
        return Condition("ScalingActive", status, reason, message)

    if record.outside_by:
        return active(
            "False",
            "OutsideWriter",
            f"{record.outside_by} set spec.replicas to {record.replicas}, which stands for "
            "spec.autoscaling.scaleDownStabilization; remove spec.replicas from what it writes, or "
            "set spec.autoscaling.mode to External, or remove spec.autoscaling",
        )
    if keda:
        return active("False", "NoScaledObject", keda)
    if decision.why == "NoData":
        return active(
            "False",
            "NoData",
            "some routers or controllers have not reported recently, so the number of replicas "
            "stays; check that the operator reaches their ops ports",
        )
    if decision.why == "AtMaximum":
        return active(
            "True",
            "AtMaximum",
            "more replicas are wanted than spec.autoscaling.maxReplicas, "
            f"{autoscaling.max_replicas}",
        )
    if decision.why == "NoRoom":
        return active("True", "NoRoom", "more replicas are wanted than can be placed; see Placed")
    if autoscaling.mode == "External":
        follower = "a ScaledObject follows" if record.has_object else "any HPA may follow"
        return active("True", "Exported", f"{follower} medha_desired_replicas")
    return active("True", "Scaling", "")


# --- Events between two statuses ------------------------------------------------------------------


def events_between(
    resource: str, before: Mapping[str, object], after: Mapping[str, object]
) -> tuple[EmitEvent, ...]:
    """Events about what changed between two statuses; actions emit Events of their own."""
    old, new = load_status(before), load_status(after)
    return (*_group_events(resource, old, new), *_ready_events(old, new))


def _group_events(resource: str, old: PersistedStatus, new: PersistedStatus) -> list[EmitEvent]:
    events = []
    for record in new.groups:
        former = old.groups_of(record.replica)
        if former.generation and record.kvp_groups > former.kvp_groups:
            name = replica_name(resource, record.replica)
            message = f"{name} runs {record.kvp_groups} KVP groups, generation {record.generation}"
            events.append(EmitEvent("GroupJoined", message))
    return events


def _ready_events(old: PersistedStatus, new: PersistedStatus) -> list[EmitEvent]:
    before = next((record.status for record in old.conditions if record.type == "Ready"), "False")
    now = next((record for record in new.conditions if record.type == "Ready"), None)
    if now is None or now.status == before:
        return []
    if now.status == "True":
        return [EmitEvent("Serving", "all replicas of spec.replicas serve")]
    return [EmitEvent("NotServing", now.message or now.reason, warning=True)]
