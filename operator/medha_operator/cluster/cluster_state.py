"""State of the cluster, joined by MedhaReplica: the input of `decide` and `status`.

The informers' Stores report every difference here. Each is assigned to the resource it concerns,
and `wake` queues that resource. Small delays let the events of one cause arrive together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from medha.errors import SpecError
from medha.spec import MedhaReplica, parse
from medha_operator.kube.informers import Store
from medha_operator.planning.resource_status import ScalingStatus
from medha_operator.resources.objects import (
    FieldManager,
    Key,
    Meta,
    OwnedObject,
    OwnedPod,
    Versioned,
    replicas_managers,
)
from medha_operator.resources.views import (
    OVER,
    NodeView,
    Observed,
    PodTimers,
    PodView,
    QuotaRefusal,
    ReportView,
    TakenName,
)

POD_DELAY_S, CAPACITY_DELAY_S = 0.15, 1.0
ALL = ""


class Resource(msgspec.Struct, frozen=True):
    """A MedhaReplica; `replica` is None, and `refused` says why, if its spec is invalid."""

    meta: Meta
    generation: int
    replica: MedhaReplica | None
    refused: str
    status: Mapping[str, Any]
    managers: tuple[FieldManager, ...] = ()
    """Field managers of `spec.replicas`, the latest last."""

    @property
    def deleting(self) -> bool:
        return self.meta.deletion_timestamp is not None


class ClusterState:
    """Everything that the operator has read of the cluster and of its fleet."""

    def __init__(
        self, wake: Callable[[Key, float], None], serves: Callable[[str], bool] = lambda _: True
    ) -> None:
        self._wake = wake
        self.serves = serves
        """True for a namespace in which no other release of the operator works."""
        self.replicas: Store[Resource] = Store(self._replica_changed)
        self.nodes: Store[NodeView] = Store(self._node_changed)
        self.usage = NodeUsage()
        self.waiting: set[Key] = set()
        """Resources that wait for capacity, for a replica or for further groups."""
        self.unplaced: set[Key] = set()
        """The waiting resources that have a whole replica unplaced."""
        self.controller_status: dict[Key, dict[int, ReportView]] = {}
        self.polling_since_s = 0.0
        self.mount_errors: dict[str, str] = {}
        """The volume that cannot be mounted and why, by the UID of a pod that does not start."""
        self.quotas: dict[Key, QuotaRefusal] = {}
        """The last refusal of a pod by a quota, by resource."""
        self.scaling: dict[Key, ScalingStatus] = {}
        """The autoscaler's part of each status; empty while another operator leads."""
        self._taken: dict[Key, dict[tuple[str, str], TakenName]] = {}
        self._timers = PodTimers()
        self._pod_stores: dict[str, Store[OwnedPod]] = {}
        self._object_stores: dict[tuple[str, str], Store[OwnedObject]] = {}
        self._pods: dict[Key, dict[str, OwnedPod]] = {}
        self._objects: dict[Key, dict[tuple[str, str], str]] = {}
        self._parsed: dict[str, tuple[object, MedhaReplica | None, str]] = {}
        """By UID: generation and labels, and what was parsed at them."""

    def add_pod_store(self, scope: str) -> Store[OwnedPod]:
        """Make the Store for the pods of one watched namespace (ALL: of the whole cluster)."""
        store = self._pod_stores[scope] = Store(self._pod_changed)
        return store

    def add_object_store(self, kind: str, scope: str) -> Store[OwnedObject]:
        """Make the Store for our objects of one kind in one watched namespace."""
        store = self._object_stores[kind, scope] = Store(self._object_changed)
        return store

    def served(self) -> Iterator[Versioned[Resource]]:
        """Iterate over the MedhaReplicas that no other release of the operator serves."""
        return (seen for seen in self.replicas if self.serves(seen.key[0]))

    def pods_in(self, namespace: str) -> Store[OwnedPod]:
        return self._pod_stores[ALL if ALL in self._pod_stores else namespace]

    def objects_in(self, kind: str, namespace: str) -> Store[OwnedObject]:
        return self._object_stores[kind, ALL if (kind, ALL) in self._object_stores else namespace]

    def resource(self, raw: bytes | msgspec.Raw) -> Versioned[Resource]:
        """Parse a MedhaReplica from the API's JSON."""
        return self.resource_from(msgspec.json.decode(raw))

    def resource_from(self, body: Mapping[str, Any]) -> Versioned[Resource]:
        """Parse a MedhaReplica from the API's document; each generation's spec once."""
        meta = msgspec.convert(body["metadata"], Meta)
        generation = int(body["metadata"].get("generation", 0))
        known, source = self._parsed.get(meta.uid), (generation, meta.labels)
        if known is None or known[0] != source:
            known = self._parsed[meta.uid] = (source, *_parsed(body))
        status, managers = body.get("status") or {}, replicas_managers(body["metadata"])
        value = Resource(meta, generation, known[1], known[2], status, managers)
        return Versioned(meta.key, int(meta.resource_version), meta.uid, value)

    def observed(self, resource: Resource, now_s: float) -> Observed:
        """Collect the input of one decision."""
        key = resource.meta.key
        pods = self._pods.get(key, {})
        nodes = self.usage.nodes(key, [(key[0], name) for name in pods])
        views = [self._with_mount_error(pods[name].view) for name in sorted(pods)]
        return Observed(
            now_s=now_s,
            pods=self._timers.with_times(views, now_s),
            objects=self._objects.get(key, {}),
            reports=self.controller_status.get(key, {}),
            polled_since_s=self.polling_since_s,
            nodes=nodes,
            previous_status=resource.status,
            quota=self.quotas.get(key),
            taken={
                place: taken
                for place, taken in self._taken.get(key, {}).items()
                if taken.until_s > now_s
            },
        )

    def name_taken(self, key: Key, kind: str, name: str, taken: TakenName) -> None:
        """Record that an object of another owner has a name that a resource needs."""
        self._taken.setdefault(key, {})[kind, name] = taken

    def _with_mount_error(self, pod: PodView) -> PodView:
        """Add the pod's mount error, as long as the pod has not started."""
        error = self.mount_errors.get(pod.uid)
        if error is None or pod.why or pod.phase != "Pending":
            return pod
        return msgspec.structs.replace(pod, why="FailedMount", message=error)

    def pods_of(self, key: Key) -> tuple[PodView, ...]:
        return tuple(pod.view for pod in self._pods.get(key, {}).values())

    def all_pods(self) -> Mapping[Key, Mapping[str, OwnedPod]]:
        return self._pods

    def assume(self, pod: Versioned[OwnedPod]) -> None:
        """Count a pod that is about to be created on the node that its plan prefers."""
        self._count(pod.key, pod.value)

    def forget(self, pod: Versioned[OwnedPod]) -> None:
        """Uncount an assumed pod, if it was not created."""
        if pod.key[1] not in self._pods.get(pod.value.resource, {}):
            self._count(pod.key, None)

    def capacity_changed(self) -> None:
        """Wake the resources that wait for capacity: some may have become free."""
        for key in self.waiting:
            self._wake(key, CAPACITY_DELAY_S)

    def set_waiting(self, key: Key, *, replicas: bool, groups: bool) -> None:
        """Record whether replicas of a resource, or their further groups, are unplaced."""
        for keys, member in ((self.waiting, replicas or groups), (self.unplaced, replicas)):
            if member:
                keys.add(key)
            else:
                keys.discard(key)

    def _replica_changed(self, key: Key, old: Resource | None, new: Resource | None) -> None:
        if new is None:
            self.set_waiting(key, replicas=False, groups=False)
            self.controller_status.pop(key, None)
            self.quotas.pop(key, None)
            self._taken.pop(key, None)
            if old is not None:
                self._parsed.pop(old.meta.uid, None)
        if old is None or new is None or _identity(old) != _identity(new):
            self._wake(key, 0.0)

    def _pod_changed(self, key: Key, old: OwnedPod | None, new: OwnedPod | None) -> None:
        either = new or old
        if either is None:
            return
        pods = self._pods.setdefault(either.resource, {})
        if old is not None and (new is None or new.view.uid != old.view.uid):
            self._timers.forget(old.view.uid)
        if new is None:
            pods.pop(key[1], None)
            if not pods:
                del self._pods[either.resource]
        else:
            pods[key[1]] = new
        self._count(key, new)
        if old is not None and (new is None or new.view.phase in OVER):
            self.capacity_changed()
        self._wake(either.resource, POD_DELAY_S)

    def _count(self, key: Key, pod: OwnedPod | None) -> None:
        view = None if pod is None else pod.view
        node = "" if view is None or view.phase in OVER else view.place
        usage = None if pod is None or not node else PodUsage(node, pod.resource, pod.requests)
        self.usage.set_pod(key, usage)

    def _object_changed(self, key: Key, old: OwnedObject | None, new: OwnedObject | None) -> None:
        either = new or old
        if either is None:
            return
        objects = self._objects.setdefault(either.resource, {})
        if new is None:
            objects.pop((either.kind, key[1]), None)
            if not objects:
                del self._objects[either.resource]
        else:
            objects[either.kind, key[1]] = new.content
        self._wake(either.resource, POD_DELAY_S)

    def _node_changed(self, key: Key, old: NodeView | None, new: NodeView | None) -> None:
        self.usage.set_node(key[1], new)
        for owner in self.usage.owners(key[1]):
            self._wake(owner, POD_DELAY_S)
        self.capacity_changed()


def _identity(resource: Resource) -> tuple[object, ...]:
    return resource.meta.uid, resource.generation, resource.meta.labels, resource.deleting


def _parsed(body: Mapping[str, Any]) -> tuple[MedhaReplica | None, str]:
    """Return the checked spec, or the reason why it is invalid."""
    try:
        return parse({name: body[name] for name in body if name != "status"}), ""
    except SpecError as error:
        return None, str(error)


# --- requests of pods by node ---------------------------------------------------------------------
#
# Kept current as pods come and go. A pod counts from the moment at which the operator is about to
# create it, so that two resources planned at the same time are not given the same devices.


Amounts = Mapping[str, int]


class PodUsage(msgspec.Struct, frozen=True):
    """A pod's share of a node, and the MedhaReplica that it belongs to."""

    node: str
    resource: Key
    requests: Amounts


class NodeUsage:
    """Nodes with the requests of all their pods."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeView] = {}
        self._foreign: dict[str, Amounts] = {}
        self._loads: dict[Key, PodUsage] = {}
        self._by_node: dict[str, dict[Key, PodUsage]] = {}
        self._views: dict[str, NodeView] = {}
        self._all: tuple[NodeView, ...] | None = None

    def set_node(self, name: str, view: NodeView | None) -> None:
        """Set a node; None removes it."""
        if view is None:
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = view
        self._stale(name)

    def set_foreign(self, taken: Mapping[str, Amounts]) -> bool:
        """Set what other pods take, by node; returns whether a node has more room than before."""
        freed = False
        for name in self._foreign.keys() | taken.keys():
            old, new = self._foreign.get(name, {}), taken.get(name, {})
            if old != new:
                self._stale(name)
                freed = freed or any(
                    new.get(resource, 0) < amount for resource, amount in old.items()
                )
        self._foreign = dict(taken)
        return freed

    def set_pod(self, pod: Key, load: PodUsage | None) -> None:
        """Set what an own pod takes; None: nothing, or no more."""
        old = self._loads.get(pod)
        if old == load:
            return
        if old is not None:
            del self._loads[pod], self._by_node[old.node][pod]
            self._stale(old.node)
        if load is not None:
            self._loads[pod] = load
            self._by_node.setdefault(load.node, {})[pod] = load
            self._stale(load.node)

    def owners(self, node: str) -> set[Key]:
        """Return the MedhaReplicas with pods on a node."""
        return {load.resource for load in self._by_node.get(node, {}).values()}

    def nodes(self, resource: Key, own: Iterable[Key]) -> tuple[NodeView, ...]:
        """Return all nodes for planning `resource`, whose pods are `own`: with what others take."""
        if self._all is None:
            self._all = tuple(self._view(name) for name in sorted(self._nodes))
        mine = {self._loads[pod].node for pod in own if pod in self._loads}
        if not mine:
            return self._all
        return tuple(self._sum(view, resource) if view.name in mine else view for view in self._all)

    def _view(self, name: str) -> NodeView:
        """Return a node with the requests of all pods."""
        if name not in self._views:
            self._views[name] = self._sum(self._nodes[name], None)
        return self._views[name]

    def _sum(self, view: NodeView, without: Key | None) -> NodeView:
        used = dict(self._foreign.get(view.name, {}))
        for load in self._by_node.get(view.name, {}).values():
            if load.resource != without:
                for name, amount in load.requests.items():
                    used[name] = used.get(name, 0) + amount
        return msgspec.structs.replace(view, used=used)

    def _stale(self, name: str) -> None:
        self._views.pop(name, None)
        self._all = None
