"""The observed state of one MedhaReplica: plain values that planning and status read.

The cluster state fills these in from projected API objects; tests write them by hand. Times are
Unix seconds.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from medha.messages import ReplicaStatus
from medha.spec import MedhaReplica

IMAGE_ERRORS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
LEAVING = ("karpenter.sh/disrupted", "karpenter.sh/disruption", "ToBeDeletedByClusterAutoscaler")
"""Taints of a node that an autoscaler removes, which mean the same as a cordon. The cluster
autoscaler's DeletionCandidate is none of them: it is a preference that may be withdrawn, and no
node with a budget that forbids evictions gets it."""
UNREACHABLE = "node.kubernetes.io/unreachable"
"""Taint of a node whose kubelet has not reported for the cluster's grace period."""


class Taint(msgspec.Struct, frozen=True):
    key: str
    value: str = ""
    effect: str = "NoSchedule"


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node. `allocatable` and `used` (by pods that are not the operator's) map resource names to
    integers: devices in pieces, `cpu` in millicores, `memory` in bytes, `pods` in pieces."""

    name: str
    labels: Mapping[str, str] = {}
    taints: tuple[Taint, ...] = ()
    ready: bool = True
    schedulable: bool = True
    allocatable: Mapping[str, int] = {}
    used: Mapping[str, int] = {}

    @property
    def silent(self) -> bool:
        """Dead, or cut off. A node that itself reports that it is not ready still runs its pods."""
        return not self.ready and any(taint.key == UNREACHABLE for taint in self.taints)


class PodView(msgspec.Struct, frozen=True, kw_only=True):
    """An own pod. `node` is where it is bound ("" while it is not), `target` the node that its plan
    prefers ("" if the plan left it open); `requests` are in NodeView's units (empty: those of the
    current spec); `why` and `message` are what keeps it from running (waiting reason,
    unschedulable, failed init step), as the API reports it; `gated` by the operator, `held` by
    the gate of this name, which another controller owns; `disrupted`: the message of a controller
    that takes the pod's place away; `kept`: a queue's finalizer keeps its name.
    `created_s` and `ready_since_s` are the API server's timestamps; the other times, since when it
    is known, ungated and unbound, or bound and unready, are of the operator's clock
    (`PodTimers`)."""

    name: str
    uid: str
    ordinal: int
    group: int
    stage: int
    attempt: int
    spec_hash: str
    target: str = ""
    node: str = ""
    ip: str = ""
    phase: str = "Pending"
    ready: bool = False
    gated: bool = False
    held: str = ""
    disrupted: str = ""
    kept: bool = False
    deleting: bool = False
    restarts: int = 0
    created_s: float = 0.0
    ready_since_s: float | None = None
    seen_since_s: float = 0.0
    open_since_s: float | None = None
    unready_since_s: float | None = None
    why: str = ""
    message: str = ""
    requests: Mapping[str, int] = {}
    image: str = ""
    config: str = ""
    """Name of the ConfigMap that it mounts."""

    def lacks_image(self) -> bool:
        """Return whether its image cannot be pulled."""
        return self.why in IMAGE_ERRORS

    @property
    def refused(self) -> bool:
        """The scheduler has found no node for the pod."""
        return not self.node and bool(self.why)

    @property
    def place(self) -> str:
        """The node that the pod takes, or is about to take; "" if it has none."""
        return self.node or ("" if self.why else self.target)


class ReportView(msgspec.Struct, frozen=True, kw_only=True):
    """The last report of a replica's controller, and its time."""

    status: ReplicaStatus
    at_s: float


class QuotaRefusal(msgspec.Struct, frozen=True):
    """The API server's last refusal of a resource's pod because of a quota, and its time."""

    message: str
    at_s: float


class TakenName(msgspec.Struct, frozen=True):
    """An object of another owner with a name that the operator needs: a sentence with the remedy,
    and the time at which to try again."""

    message: str
    until_s: float


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """The input of one decision. `objects` maps (kind, name) of own Services, ConfigMaps,
    NetworkPolicies and PodDisruptionBudgets to the content hash in their annotation; `nodes` is the
    whole cluster, with the requests of other MedhaReplicas' pods counted in `NodeView.used`."""

    now_s: float
    pods: tuple[PodView, ...] = ()
    objects: Mapping[tuple[str, str], str] = {}
    reports: Mapping[int, ReportView] = {}
    nodes: tuple[NodeView, ...] = ()
    polled_since_s: float = 0.0
    """Start of the polling of controllers: one without a report may still answer soon after."""
    previous_status: Mapping[str, object] = {}
    """The status subresource as it stands."""
    quota: QuotaRefusal | None = None
    taken: Mapping[tuple[str, str], TakenName] = {}
    """By kind and name, names that objects of another owner have."""


# --- replicas and KVP groups ----------------------------------------------------------------------


FRESH_S = 10.0
"""A controller's report is valid for this time; after it the replica's state is unknown."""
OVER = ("Succeeded", "Failed")


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """The pods of one KVP group, those that are being deleted included."""

    index: int
    stages: int
    pods: tuple[PodView, ...]

    @property
    def present(self) -> tuple[PodView, ...]:
        return tuple(pod for pod in self.pods if not pod.deleting)

    @property
    def attempt(self) -> int:
        return max(pod.attempt for pod in self.pods)

    @property
    def missing(self) -> tuple[int, ...]:
        """Stages without a pod; a pod that is being deleted counts."""
        there = {pod.stage for pod in self.pods}
        return tuple(stage for stage in range(self.stages) if stage not in there)

    @property
    def complete(self) -> bool:
        return len({pod.stage for pod in self.present}) == self.stages

    @property
    def gated(self) -> bool:
        """All pods still have their scheduling gate."""
        return all(pod.gated for pod in self.present)

    @property
    def unfinished(self) -> bool:
        """Being created: all pods are gated, and some do not exist yet."""
        return bool(self.present) and self.gated and bool(self.missing)

    @property
    def bound(self) -> bool:
        return self.complete and all(pod.node for pod in self.present)

    @property
    def ready(self) -> bool:
        return self.complete and all(pod.ready for pod in self.present)


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of the model.

    `outdated`: a pod of it was created from another spec, which may have had other groups and
    stages; then its leader's readiness counts. `report` is None if the controller's last report is
    too old; `silent`: the controller was polled long enough without an answer.
    """

    ordinal: int
    min_groups: int
    outdated: bool
    groups: Mapping[int, GroupView]
    report: ReplicaStatus | None
    silent: bool

    @property
    def pods(self) -> Iterator[PodView]:
        for group in self.groups.values():
            yield from group.pods

    @property
    def present(self) -> tuple[PodView, ...]:
        return tuple(pod for pod in self.pods if not pod.deleting)

    @property
    def leader(self) -> PodView | None:
        leaders = (pod for pod in self.present if pod.group == 0 and pod.stage == 0)
        return next(leaders, None)

    @property
    def base(self) -> tuple[GroupView, ...]:
        """The first `kvp.min` groups, as far as they exist."""
        return tuple(self.groups[index] for index in range(self.min_groups) if index in self.groups)

    @property
    def ready(self) -> bool:
        """Serves: a leader is ready once its controller has kvp.min groups and a router."""
        if self.outdated:
            return self.leader is not None and self.leader.ready
        return len(self.base) == self.min_groups and all(group.ready for group in self.base)

    @property
    def bound(self) -> bool:
        return len(self.base) == self.min_groups and all(group.bound for group in self.base)

    @property
    def draining(self) -> bool:
        return self.report is not None and self.report.draining

    @property
    def idle(self) -> bool:
        """Draining, with no requests left."""
        return (
            self.report is not None
            and self.report.draining
            and not self.report.running
            and not self.report.waiting
        )

    @property
    def load(self) -> int:
        """The number of its requests."""
        return self.report.running + self.report.waiting if self.report is not None else 0


def replica_views(
    resource: MedhaReplica, observed: Observed, spec_hash: str, configs: Container[str]
) -> dict[int, ReplicaView]:
    """Group a resource's pods into replicas by ordinal; `spec_hash` is that of the current spec,
    `configs` names the ConfigMaps of the current settings. Other settings make only pods outdated
    that cannot start because of them."""
    parallelism = resource.spec.parallelism
    pods_of: dict[int, dict[int, list[PodView]]] = {}
    for pod in observed.pods:
        pods_of.setdefault(pod.ordinal, {}).setdefault(pod.group, []).append(pod)
    return {
        ordinal: ReplicaView(
            ordinal=ordinal,
            min_groups=parallelism.kvp.min,
            outdated=any(
                pod.spec_hash != spec_hash or (pod.lacks_image() and pod.config not in configs)
                for pods in groups.values()
                for pod in pods
                if not pod.deleting
            ),
            groups={
                index: GroupView(
                    index=index,
                    stages=parallelism.spp,
                    pods=tuple(sorted(groups[index], key=lambda pod: pod.stage)),
                )
                for index in sorted(groups)
            },
            report=_fresh(observed, ordinal),
            silent=_is_silent(observed, ordinal),
        )
        for ordinal, groups in sorted(pods_of.items())
    }


def _fresh(observed: Observed, ordinal: int) -> ReplicaStatus | None:
    report = observed.reports.get(ordinal)
    if report is None or observed.now_s - report.at_s > FRESH_S:
        return None
    return report.status


def _is_silent(observed: Observed, ordinal: int) -> bool:
    report = observed.reports.get(ordinal)
    last_s = report.at_s if report is not None else observed.polled_since_s
    return observed.now_s - last_s > FRESH_S


# --- pod timers -----------------------------------------------------------------------------------
#
# The API server's timestamps are of another clock, and none records when a pod's gate was removed.
# By them a pod that waited behind its gate for a minute was late at once, and so was every pod
# where the clocks are a minute apart. So timers use the operator's own clock.


class PodTimers:
    """Times at which each pod was first seen, and first seen in its state. They start from zero in
    another operator."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, str, float]] = {}
        """By UID: the time when first seen, the last state, and its start."""

    def with_times(self, pods: Iterable[PodView], now_s: float) -> tuple[PodView, ...]:
        """Add to pods since when they are known, and ungated and unbound, or bound and unready."""
        return tuple(self._with_times(pod, now_s) for pod in pods)

    def forget(self, uid: str) -> None:
        """Forget a pod that is gone."""
        self._known.pop(uid, None)

    def _with_times(self, pod: PodView, now_s: float) -> PodView:
        state = _state(pod)
        seen_s, before, since_s = self._known.get(pod.uid, (now_s, "", now_s))
        if state != before:
            since_s = now_s
            self._known[pod.uid] = seen_s, state, since_s
        since = {"seen_since_s": seen_s}
        if state in ("open", "unready"):
            since[f"{state}_since_s"] = since_s
        return msgspec.structs.replace(pod, **since)


def _state(pod: PodView) -> str:
    if pod.node:
        return "ready" if pod.ready else "unready"
    return "gated" if pod.gated or pod.held else "open"


# --- status records -------------------------------------------------------------------------------
#
# The part of a resource's status that planning reads back, also after a restart of the operator.
#
# A group's failure is written before its pods are deleted, and a replica's retirement together with
# its first action; then every later decision knows it, whichever operator leads.


class _Record(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of the status; the API sees camel case."""


class ConditionRecord(_Record, frozen=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""
    observed_generation: int = 0


class GroupsRecord(_Record, frozen=True):
    """Groups of a replica: running, wanted by its controller, and its membership generation."""

    replica: int
    kvp_groups: int = 0
    wanted: int = 0
    generation: int = 0


class RestartRecord(_Record, frozen=True):
    """Failures of a KVP group: the last attempt that failed, and the times of recent failures."""

    replica: int
    group: int
    attempt: int
    failed_at: tuple[str, ...] = ()
    reason: str = ""


class WaitRecord(_Record, frozen=True):
    """A KVP group that was given back before it ran: the last attempt, how many in a row, what the
    group waits for, and the `packLevel` domains that had no nodes for it. Such attempts do not
    count against the restart budget."""

    replica: int
    group: int
    attempt: int
    times: int = 1
    at: str = ""
    reason: str = ""
    message: str = ""
    domains: tuple[str, ...] = ()


class RetiringRecord(_Record, frozen=True):
    """A replica that is deleted once it is drained, or its time to drain is over."""

    replica: int
    since: str = ""
    reason: str = ""


class ScaleOwnerRecord(_Record, frozen=True):
    """Scale ownership: the mode, the last known number, and an outside writer that overrode it."""

    mode: str
    replicas: int
    outside_by: str = ""
    outside_since: str = ""
    scaled_object: Literal["Absent", "Expected"] = "Absent"
    """Expected: an own ScaledObject exists, or may exist."""

    @property
    def has_object(self) -> bool:
        return self.scaled_object == "Expected"


class PersistedStatus(_Record, frozen=True):
    groups: tuple[GroupsRecord, ...] = ()
    restarts: tuple[RestartRecord, ...] = ()
    waits: tuple[WaitRecord, ...] = ()
    retiring: tuple[RetiringRecord, ...] = ()
    conditions: tuple[ConditionRecord, ...] = ()
    scaling: ScaleOwnerRecord | None = None

    def restart(self, replica: int, group: int) -> RestartRecord | None:
        return next(
            (
                record
                for record in self.restarts
                if (record.replica, record.group) == (replica, group)
            ),
            None,
        )

    def wait(self, replica: int, group: int) -> WaitRecord | None:
        return next(
            (record for record in self.waits if (record.replica, record.group) == (replica, group)),
            None,
        )

    def groups_of(self, replica: int) -> GroupsRecord:
        return next(
            (record for record in self.groups if record.replica == replica),
            GroupsRecord(replica=replica),
        )

    def retirement(self, replica: int) -> RetiringRecord | None:
        return next((record for record in self.retiring if record.replica == replica), None)


def load_status(previous: Mapping[str, object]) -> PersistedStatus:
    """Read the records of a status; none from an invalid one (edited by hand)."""
    try:
        return msgspec.convert(previous, PersistedStatus)
    except msgspec.ValidationError:
        return PersistedStatus()
