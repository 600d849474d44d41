"""Projections of the API's objects: the few fields that decisions need, everything else dropped.

Pure. Quantities and timestamps become numbers. A watch of thousands of pods fits into little memory
because each is projected on arrival. Version numbers are the API's resource versions, which order
all writes of a cluster.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from medha.errors import SpecError
from medha.spec import API_VERSION, KIND
from medha_operator.resources import labels as names
from medha_operator.resources.labels import FIELD_MANAGER
from medha_operator.resources.views import LEAVING, NodeView, PodView, Taint

GROUP = API_VERSION.partition("/")[0]
Key = tuple[str, str]
"""Namespace and name; of a MedhaReplica or of an object."""

T = TypeVar("T")


class Versioned(msgspec.Struct, Generic[T], frozen=True):
    """An object as last seen: its key, version and UID, and its projection."""

    key: Key
    version: int
    uid: str
    value: T


class OwnedPod(msgspec.Struct, frozen=True):
    """An own pod with its MedhaReplica and its requests."""

    resource: Key
    view: PodView
    requests: Mapping[str, int]


class OwnedObject(msgspec.Struct, frozen=True):
    """An own Service, ConfigMap, NetworkPolicy or PodDisruptionBudget: its MedhaReplica, and the
    hash of its content."""

    resource: Key
    kind: str
    content: str


class OwnerReference(msgspec.Struct, rename="camel"):
    """The object whose deletion deletes another; of its `controller` there is at most one."""

    api_version: str
    kind: str
    name: str
    uid: str = ""
    controller: bool | None = None

    @property
    def group(self) -> str:
        """The kind's group, which stays the same in later versions of its API."""
        return self.api_version.partition("/")[0]


class Meta(msgspec.Struct, rename="camel"):
    """Metadata of any object; a bookmark has a version only."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = "0"
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    owner_references: list[OwnerReference] | None = None
    finalizers: list[str] | None = None

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    @property
    def resource(self) -> str:
        """Name of the MedhaReplica that controls the object; "" if none does. A resource that was
        deleted and created again keeps what is left of its former objects."""
        references = self.owner_references or ()
        owners = [reference for reference in references if reference.controller]
        ours = [owner for owner in owners if (owner.group, owner.kind) == (GROUP, KIND)]
        return ours[0].name if ours else ""

    @property
    def owner_text(self) -> str:
        """The object's owner in words."""
        owners = [f"{owner.kind} {owner.name}" for owner in self.owner_references or ()]
        return owners[0] if owners else "nothing of Medha"


class _MetadataOnly(msgspec.Struct):
    """Only an object's metadata."""

    metadata: Meta


class _Condition(msgspec.Struct, rename="camel"):
    type: str
    status: str
    reason: str | None = None
    message: str | None = None
    last_transition_time: str | None = None


class _Reason(msgspec.Struct, rename="camel"):
    reason: str | None = None
    message: str | None = None
    exit_code: int = 0


class _State(msgspec.Struct):
    waiting: _Reason | None = None
    terminated: _Reason | None = None


class _ContainerStatus(msgspec.Struct, rename="camel"):
    name: str = ""
    restart_count: int = 0
    state: _State | None = None


class _PodStatus(msgspec.Struct, rename="camel"):
    phase: str = "Pending"
    reason: str | None = None
    message: str | None = None
    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: list[_Condition] | None = None
    init_container_statuses: list[_ContainerStatus] | None = None
    container_statuses: list[_ContainerStatus] | None = None


class _Gate(msgspec.Struct):
    name: str


class _Container(msgspec.Struct):
    class Resources(msgspec.Struct):
        requests: msgspec.Raw = msgspec.Raw(b"{}")

    name: str = ""
    image: str = ""
    resources: Resources = msgspec.field(default_factory=Resources)


class _ConfigVolume(msgspec.Struct):
    name: str = ""


class _Volume(msgspec.Struct, rename="camel"):
    name: str
    config_map: _ConfigVolume | None = None


class _PodSpec(msgspec.Struct, rename="camel"):
    containers: list[_Container]
    volumes: list[_Volume] | None = None
    node_name: str = ""
    scheduling_gates: list[_Gate] | None = None


class _Pod(msgspec.Struct):
    metadata: Meta
    spec: _PodSpec
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


class _NodeSpec(msgspec.Struct):
    taints: list[Taint] | None = None
    unschedulable: bool = False


class _NodeStatus(msgspec.Struct):
    allocatable: dict[str, str] | None = None
    conditions: list[_Condition] | None = None


class _Node(msgspec.Struct):
    metadata: Meta
    spec: _NodeSpec = msgspec.field(default_factory=_NodeSpec)
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)


_METADATA = msgspec.json.Decoder(_MetadataOnly)
_POD = msgspec.json.Decoder(_Pod)
_NODE = msgspec.json.Decoder(_Node)


def metadata_of(raw: bytes | msgspec.Raw) -> Meta:
    """Decode only the metadata of any object."""
    return _METADATA.decode(raw).metadata


def pod(raw: bytes | msgspec.Raw) -> Versioned[OwnedPod]:
    """Decode an own pod; raises ValueError for one that the operator would not write."""
    decoded = _POD.decode(raw)
    meta, spec, status = decoded.metadata, decoded.spec, decoded.status
    labels = _labels_of_owned(meta)
    ended = _ended(status)
    ready = _condition(status.conditions, "Ready")
    why, message = _trouble(status)
    gates = [gate.name for gate in spec.scheduling_gates or ()]
    view = PodView(
        name=meta.name,
        uid=meta.uid,
        ordinal=int(labels.get(names.ORDINAL, "0")),
        group=int(labels.get(names.GROUP, "0")),
        stage=int(labels.get(names.STAGE, "0")),
        attempt=int(labels.get(names.ATTEMPT, "1")),
        spec_hash=labels.get(names.SPEC_HASH, ""),
        target=(meta.annotations or {}).get(names.TARGET, ""),
        node=spec.node_name,
        ip=status.pod_ip,
        phase=ended or status.phase,
        ready=ready is not None and ready.status == "True",
        gated=names.GANG_GATE in gates,
        held=next((gate for gate in gates if gate != names.GANG_GATE), ""),
        disrupted=_disruption(status),
        kept=names.QUEUE_FINALIZER in (meta.finalizers or ()),
        deleting=meta.deletion_timestamp is not None,
        restarts=sum(container.restart_count for container in status.container_statuses or ()),
        created_s=unix_s(meta.creation_timestamp or ""),
        ready_since_s=(
            unix_s(ready.last_transition_time or "") if ready and ready.status == "True" else None
        ),
        why=why,
        message=message,
        image=next((c.image for c in spec.containers if c.name == names.WORKER_CONTAINER), ""),
        config=next(
            (
                v.config_map.name
                for v in spec.volumes or ()
                if v.name == names.CONFIG_VOLUME and v.config_map
            ),
            "",
        ),
    )
    resource = (meta.namespace, labels.get(names.RESOURCE, ""))
    value = OwnedPod(resource, view, _requests(_container_requests(spec)))
    return Versioned(meta.key, int(meta.resource_version), meta.uid, value)


def owned_object(kind: str, raw: bytes | msgspec.Raw) -> Versioned[OwnedObject]:
    """Decode an own object from its metadata; raises ValueError if no MedhaReplica owns it."""
    meta = metadata_of(raw)
    resource = (meta.namespace, _labels_of_owned(meta)[names.RESOURCE])
    value = OwnedObject(resource, kind, (meta.annotations or {}).get(names.CONTENT_HASH, ""))
    return Versioned(meta.key, int(meta.resource_version), meta.uid, value)


def node(raw: bytes | msgspec.Raw) -> Versioned[NodeView]:
    """Decode a node without its pods."""
    decoded = _NODE.decode(raw)
    meta = decoded.metadata
    ready = _condition(decoded.status.conditions, "Ready")
    taints = tuple(decoded.spec.taints or ())
    view = NodeView(
        name=meta.name,
        labels=meta.labels or {},
        taints=taints,
        ready=ready is not None and ready.status == "True",
        schedulable=not decoded.spec.unschedulable and not any(map(_leaves, taints)),
        allocatable=_quantities(decoded.status.allocatable or {}),
    )
    return Versioned(meta.key, int(meta.resource_version), meta.uid, view)


def _leaves(taint: Taint) -> bool:
    return taint.key in LEAVING and taint.effect != "PreferNoSchedule"


def node_and_requests(raw: bytes | msgspec.Raw) -> tuple[str, Mapping[str, int]]:
    """Decode any pod's node ("" while unbound) and requests."""
    spec = _POD.decode(raw).spec
    return spec.node_name, _requests(_container_requests(spec))


def _labels_of_owned(meta: Meta) -> dict[str, str]:
    """Return the labels; raises ValueError unless they name the owner, a MedhaReplica."""
    labels = meta.labels or {}
    if not meta.resource or meta.resource != labels.get(names.RESOURCE):
        raise ValueError(
            f"label {names.RESOURCE} is {labels.get(names.RESOURCE)!r}, but the owner is "
            f"{meta.resource or meta.owner_text}"
        )
    return labels


def _ended(status: _PodStatus) -> str:
    """Return the phase that the worker's end means, "" while it runs: with a live sidecar the pod
    stays Running."""
    for container in status.container_statuses or ():
        if container.name == names.WORKER_CONTAINER and container.state is not None:
            end = container.state.terminated
            if end is not None:
                return "Failed" if end.exit_code else "Succeeded"
    return ""


def _trouble(status: _PodStatus) -> tuple[str, str]:
    """Find what keeps a pod from running: its containers, the scheduler, or the pod itself."""
    first = status.init_container_statuses or ()
    for container in (*first, *(status.container_statuses or ())):
        state = container.state
        whose = f"{container.name}: " if container in first else ""
        for why in (state.waiting, state.terminated) if state else ():
            usual = ("PodInitializing", "ContainerCreating", "Completed")
            if why is not None and why.reason and why.reason not in usual:
                return why.reason, whose + (why.message or "")
    scheduled = _condition(status.conditions, "PodScheduled")
    if scheduled is not None and scheduled.status == "False":
        reason = scheduled.reason or ""
        return ("", "") if reason == "SchedulingGated" else (reason, scheduled.message or "")
    return status.reason or "", status.message or ""


def _disruption(status: _PodStatus) -> str:
    """Return why the scheduler or a queueing system took the pod's place; "" if neither did.

    Other disruptions, such as an eviction by a kubelet without memory, may be the pod's own fault.
    """
    target = _condition(status.conditions, "TerminationTarget")
    preempted = _condition(status.conditions, "DisruptionTarget")
    if preempted is not None and preempted.reason == "PreemptionByScheduler":
        target = preempted
    if target is None or target.status != "True":
        return ""
    return target.message or target.reason or "preempted"


def _condition(conditions: Iterable[_Condition] | None, kind: str) -> _Condition | None:
    return next((condition for condition in conditions or () if condition.type == kind), None)


def _container_requests(spec: _PodSpec) -> tuple[bytes, ...]:
    return tuple(bytes(container.resources.requests) for container in spec.containers)


@functools.lru_cache(maxsize=1024)
def _requests(containers: tuple[bytes, ...]) -> Mapping[str, int]:
    """Sum up the requests of all containers of a pod, and count the pod itself."""
    total = {"pods": 1}
    for raw in containers:
        requests = msgspec.json.decode(raw, type=dict[str, str | int])
        for name, amount in _quantities(requests).items():
            total[name] = total.get(name, 0) + amount
    return total


def _quantities(amounts: Mapping[str, str | int] | Mapping[str, str]) -> dict[str, int]:
    quantities = {}
    for name, amount in amounts.items():
        try:
            quantities[name] = integer(name, amount)
        except SpecError:  # the planner cannot count it
            continue
    return quantities


# --- field managers -------------------------------------------------------------------------------
#
# The API server keeps the name of the last writer of each value; a writer that changes a value
# takes it over. So an autoscaler that is not the only writer finds out, and by whom.


UNKNOWN_MANAGER = "an unknown writer"


class FieldManager(msgspec.Struct, frozen=True):
    """A writer of a field, by the name that it chose."""

    name: str

    @property
    def ours(self) -> bool:
        return self.name == FIELD_MANAGER


def replicas_managers(metadata: Mapping[str, Any]) -> tuple[FieldManager, ...]:
    """List the field managers of `spec.replicas`, the latest last."""
    managers: list[tuple[str, FieldManager]] = []
    for entry in metadata.get("managedFields") or ():
        fields = entry.get("fieldsV1") or {}
        if "f:replicas" in (fields.get("f:spec") or {}):
            managers.append(
                (entry.get("time") or "", FieldManager(entry.get("manager") or UNKNOWN_MANAGER))
            )
    return tuple(manager for _, manager in sorted(managers, key=lambda entry: entry[0]))


# --- quantities -----------------------------------------------------------------------------------
#
# Quantities are integers: cpu in millicores, everything else in its own unit.
#
# cpu 500m -> 500      cpu 2 -> 2000      memory 1Gi -> 1073741824      nvidia.com/gpu 8 -> 8


_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(m|k|[MGTPE]|[KMGTPE]i|[eE][0-9]+)?")
_POWERS = "KMGTPE"


def integer(resource: str, quantity: str | int | float) -> int:
    """Parse a quantity of `resource`, rounded up; raises SpecError if it is none."""
    text = str(quantity)
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise SpecError(resource, text, "must be a quantity", "use one such as 500m, 8 or 16Gi")
    whole, _, part = match.group(1).partition(".")
    digits = int((whole + part) or "0")
    times, over = _scale(match.group(2) or "")
    if resource.removeprefix("requests.").removeprefix("limits.") == "cpu":
        times *= 1000
    over *= int("1" + "0" * len(part))
    return -(-digits * times // over)


def _scale(suffix: str) -> tuple[int, int]:
    """Return the factor and the divisor of a suffix."""
    if suffix == "m":
        return 1, 1000
    if suffix.endswith("i"):
        return 1 << 10 * (_POWERS.index(suffix[0]) + 1), 1
    if suffix[1:].isdigit():
        return int("1" + "0" * min(int(suffix[1:]), 30)), 1
    return int("1" + "000" * (_POWERS.index(suffix.upper()) + 1 if suffix else 0)), 1


# --- timestamps -----------------------------------------------------------------------------------
#
# Arithmetic on the Gregorian calendar, so that decisions need no module that could read a clock.
# Years are counted from March: then the leap day is a year's last.


_DAY_S = 86_400
_DAYS_400_YEARS, _DAYS_BEFORE_1970 = 146_097, 719_468  # since 0000-03-01
_TEXT = re.compile(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.\d+)?Z")


def rfc3339(at_s: float) -> str:
    """Format Unix seconds as UTC, in whole seconds."""
    days, second = divmod(int(at_s), _DAY_S)
    era, day = divmod(days + _DAYS_BEFORE_1970, _DAYS_400_YEARS)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    march = (5 * day + 2) // 153
    month = march + 3 if march < 10 else march - 9
    date = day - (153 * march + 2) // 5 + 1
    hour, minute = divmod(second // 60, 60)
    shown = year + era * 400 + (month <= 2)
    return f"{shown:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{second % 60:02}Z"


def unix_s(text: str) -> float:
    """Parse a timestamp to Unix seconds; 0.0 for any other text."""
    match = _TEXT.fullmatch(text)
    if match is None:
        return 0.0
    year, month, date, hour, minute, second = map(int, match.groups())
    year -= month <= 2
    march = month - 3 if month > 2 else month + 9
    day = 365 * year + year // 4 - year // 100 + year // 400 + (153 * march + 2) // 5 + date - 1
    return float((day - _DAYS_BEFORE_1970) * _DAY_S + hour * 3600 + minute * 60 + second)
