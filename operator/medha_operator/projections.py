"""What is kept of the API's objects: the few fields that decisions need, everything else dropped.

Pure. A watch of thousands of pods fits into little memory because each becomes a `Seen` as it
comes in. Version numbers are the API's resource versions, which order all writes of a cluster.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

import msgspec

from medha.errors import SpecError
from medha_operator import names
from medha_operator.moments import unix_s
from medha_operator.observed import NodeView, PodView, Taint
from medha_operator.quantities import integer

Key = tuple[str, str]
"""Namespace and name; of a MedhaReplica or of an object."""

T = TypeVar("T")


class Seen(msgspec.Struct, Generic[T], frozen=True):
    """An object as last seen: which, in what version, and what of it matters."""

    key: Key
    version: int
    uid: str
    value: T


class Pod(msgspec.Struct, frozen=True):
    """A pod of ours with whom it belongs to and what it takes of its node."""

    resource: Key
    view: PodView
    requests: Mapping[str, int]


class Thing(msgspec.Struct, frozen=True):
    """A Service, ConfigMap, NetworkPolicy or PodDisruptionBudget of ours: whose it is, and its
    content's hash."""

    resource: Key
    kind: str
    content: str


class Meta(msgspec.Struct, rename="camel"):
    """Metadata of any object; a bookmark has but a version."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = "0"
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None

    @property
    def key(self) -> Key:
        return self.namespace, self.name


class Bare(msgspec.Struct):
    """Only an object's metadata."""

    metadata: Meta


class _Condition(msgspec.Struct, rename="camel"):
    type: str
    status: str
    reason: str | None = None
    message: str | None = None
    last_transition_time: str | None = None


class _Why(msgspec.Struct):
    reason: str | None = None
    message: str | None = None


class _State(msgspec.Struct):
    waiting: _Why | None = None
    terminated: _Why | None = None


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

    resources: Resources = msgspec.field(default_factory=Resources)


class _PodSpec(msgspec.Struct, rename="camel"):
    containers: list[_Container]
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


_BARE = msgspec.json.Decoder(Bare)
_POD = msgspec.json.Decoder(_Pod)
_NODE = msgspec.json.Decoder(_Node)


def bare(raw: bytes | msgspec.Raw) -> Meta:
    """Only the metadata of any object."""
    return _BARE.decode(raw).metadata


def pod(raw: bytes | msgspec.Raw) -> Seen[Pod]:
    """A pod that carries our labels; ValueError when a label is not as we write it."""
    found = _POD.decode(raw)
    meta, spec, status = found.metadata, found.spec, found.status
    labels = meta.labels or {}
    ready = _condition(status.conditions, "Ready")
    why, message = _trouble(status)
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
        phase=status.phase,
        ready=ready is not None and ready.status == "True",
        gated=any(gate.name == names.GANG_GATE for gate in spec.scheduling_gates or ()),
        deleting=meta.deletion_timestamp is not None,
        restarts=sum(each.restart_count for each in status.container_statuses or ()),
        created_s=unix_s(meta.creation_timestamp or ""),
        ready_since_s=(
            unix_s(ready.last_transition_time or "") if ready and ready.status == "True" else None
        ),
        why=why,
        message=message,
    )
    resource = (meta.namespace, labels.get(names.RESOURCE, ""))
    value = Pod(resource, view, _requests(_asked(spec)))
    return Seen(meta.key, int(meta.resource_version), meta.uid, value)


def thing(kind: str, raw: bytes | msgspec.Raw) -> Seen[Thing]:
    """An object of ours, from its metadata alone."""
    meta = bare(raw)
    resource = (meta.namespace, (meta.labels or {}).get(names.RESOURCE, ""))
    value = Thing(resource, kind, (meta.annotations or {}).get(names.CONTENT_HASH, ""))
    return Seen(meta.key, int(meta.resource_version), meta.uid, value)


def node(raw: bytes | msgspec.Raw) -> Seen[NodeView]:
    """A node without what runs on it."""
    found = _NODE.decode(raw)
    meta = found.metadata
    ready = _condition(found.status.conditions, "Ready")
    view = NodeView(
        name=meta.name,
        labels=meta.labels or {},
        taints=tuple(found.spec.taints or ()),
        ready=ready is not None and ready.status == "True",
        schedulable=not found.spec.unschedulable,
        allocatable=_quantities(found.status.allocatable or {}),
    )
    return Seen(meta.key, int(meta.resource_version), meta.uid, view)


def load(raw: bytes | msgspec.Raw) -> tuple[str, Mapping[str, int]]:
    """Any pod's node ("" while unbound) and what it takes of it."""
    found = _POD.decode(raw)
    return found.spec.node_name, _requests(_asked(found.spec))


def _trouble(status: _PodStatus) -> tuple[str, str]:
    """What keeps the pod from running: of its containers, of the scheduler, of the pod itself."""
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


def _condition(conditions: Iterable[_Condition] | None, kind: str) -> _Condition | None:
    return next((each for each in conditions or () if each.type == kind), None)


def _asked(spec: _PodSpec) -> tuple[bytes, ...]:
    return tuple(bytes(each.resources.requests) for each in spec.containers)


@functools.lru_cache(maxsize=1024)
def _requests(containers: tuple[bytes, ...]) -> Mapping[str, int]:
    """Requests of all containers of a pod together, and the pod itself."""
    total = {"pods": 1}
    for raw in containers:
        asked = msgspec.json.decode(raw, type=dict[str, str | int])
        for name, amount in _quantities(asked).items():
            total[name] = total.get(name, 0) + amount
    return total


def _quantities(amounts: Mapping[str, str | int] | Mapping[str, str]) -> dict[str, int]:
    found = {}
    for name, amount in amounts.items():
        try:
            found[name] = integer(name, amount)
        except SpecError:  # nothing that the planner could count
            continue
    return found
