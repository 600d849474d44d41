"""What is seen of the cluster for one MedhaReplica: plain values that `plan` and `status` read.

The informers fill these in from projected API objects; tests write them by hand. Times are Unix
seconds. Nothing here knows a Kubernetes client.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from medha.messages import ReplicaStatus

UNREACHABLE = "node.kubernetes.io/unreachable"
"""Taint that the cluster puts on a node of which it has not heard for its grace."""


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
        """Nobody hears of it any more: dead, or cut off. One that says itself that it is not ready
        still tends to its pods."""
        return not self.ready and any(taint.key == UNREACHABLE for taint in self.taints)


class PodView(msgspec.Struct, frozen=True, kw_only=True):
    """A pod of ours. `node` is where it was bound ("" while it is not), `target` the node that the
    planner wrote into it; `requests` what it asks of a node, in NodeView's units (empty: as much as
    the present spec says); `why` and `message` are what keeps it from running (waiting reason,
    unschedulable, failed init step), as the API tells it. `created_s` and `ready_since_s` are the
    API server's stamps; since when it is known, may be bound and is not, or is not ready, is by
    this operator's clock (`since`)."""

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


class ReportView(msgspec.Struct, frozen=True, kw_only=True):
    """What a leader's controller last said on its ops port, and when."""

    status: ReplicaStatus
    at_s: float


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one MedhaReplica. `objects` maps (kind, name) of our Services, ConfigMaps,
    NetworkPolicies and PodDisruptionBudgets to the content hash in their annotation; `nodes` is the
    whole cluster, with the requests of other MedhaReplicas' pods counted in `NodeView.used`."""

    now_s: float
    pods: tuple[PodView, ...] = ()
    objects: Mapping[tuple[str, str], str] = {}
    reports: Mapping[int, ReportView] = {}
    nodes: tuple[NodeView, ...] = ()
    reports_since_s: float = 0.0
    """Since when controllers are asked: one of which nothing was heard by then may still answer."""
    previous: Mapping[str, object] = {}
    """The status subresource as it stands: conditions, groups with attempts and times."""
