"""Executor: the only writer. Each action becomes one call, whose answer updates the state.

Every write happens under the Lease and within the time that is left of it. Pods are made by POST,
so that a stale view cannot bring a pod back, and deleted by UID, so that it cannot delete a newer
pod of the same name. All other objects are applied by the server, with one field manager. The
actions run in the order of the plan, and the first failure ends it: the next reconciliation plans
what is left to do.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from medha_operator.cluster.cluster_state import ClusterState, Resource
from medha_operator.cluster.polling import ControllerPoller
from medha_operator.kube.client import (
    EVENTS,
    KINDS,
    NODES,
    PODS,
    REQUEST_S,
    ClusterError,
    Kind,
    KubeClient,
    NameTaken,
)
from medha_operator.kube.lease import Lease, NotLeading
from medha_operator.resources import objects
from medha_operator.resources.actions import (
    Action,
    ApplyObject,
    CreatePod,
    DeleteObject,
    DeletePod,
    Drain,
    EmitEvent,
    ReleasePod,
    RemoveSchedulingGate,
    RequeueAt,
)
from medha_operator.resources.labels import (
    FIELD_MANAGER,
    GANG_GATE,
    OWNED_BY,
    QUEUE_FINALIZER,
    RESOURCE,
)
from medha_operator.resources.objects import Key, Meta
from medha_operator.resources.views import TakenName

REPEAT_AFTER_S = 600.0
"""The same Event is written again only after this time."""
MAX_RECORDED = 4096
TAKEN_S = 20.0
"""A name that another owner's object has is tried again after this time."""
NEVER = 1
"""A resource version that no object ever has: an apply with it creates the object or fails."""


class PodOverQuota(ClusterError):
    """The namespace's quota has no room for a pod of a gang."""


class Executor:
    """Executes the actions planned for a MedhaReplica; writes its status and scale."""

    def __init__(
        self,
        client: KubeClient,
        state: ClusterState,
        lease: Lease,
        events: EventRecorder,
        controllers: ControllerPoller,
    ) -> None:
        self._client, self._state, self._lease = client, state, lease
        self._events, self._controllers = events, controllers

    def deadline_s(self) -> float:
        """Seconds that a write may take now; raises NotLeading if this operator does not lead."""
        return min(REQUEST_S, self._lease.left_s())

    @contextlib.contextmanager
    def assume(self, actions: Iterable[Action]) -> Iterator[None]:
        """Count the pods about to be made as running, so that no other plan takes their place."""
        pods = [
            objects.pod(msgspec.json.encode(action.manifest))
            for action in actions
            if isinstance(action, CreatePod)
        ]
        for pod in pods:
            self._state.assume(pod)
        try:
            yield
        finally:
            for pod in pods:
                self._state.forget(pod)

    async def execute(
        self, resource: Resource, actions: Iterable[Action], progress: Callable[[], None]
    ) -> None:
        """Execute in order, with `progress` after each, up to the first name that is taken.

        Raises ClusterError and NotLeading.
        """
        for action in actions:
            self._must_serve(resource)
            try:
                await self._execute(resource, action)
            except NameTaken as error:
                await self.record_taken(resource, error)
                return
            progress()

    async def record_taken(self, resource: Resource, error: NameTaken) -> None:
        """Keep it for the next plans, and emit an Event."""
        taken = TakenName(str(error), time.time() + TAKEN_S)
        self._state.name_taken(resource.meta.key, error.kind, error.name, taken)
        event = EmitEvent("NameTaken", str(error), warning=True)
        await self._events.emit(resource.meta, event, self.deadline_s())

    async def write_status(self, resource: Resource, status: Mapping[str, Any]) -> None:
        """Replace the status, if the resource is unchanged since it was seen."""
        self._must_serve(resource)
        meta = resource.meta
        body = {
            "apiVersion": self._client.replicas.api_version,
            "kind": self._client.replicas.kind,
            "metadata": {
                "name": meta.name,
                "namespace": meta.namespace,
                "uid": meta.uid,
                "resourceVersion": meta.resource_version,
            },
            "status": status,
        }
        answer = await self._client.replace(
            self._client.replicas,
            meta.namespace,
            meta.name,
            msgspec.json.encode(body),
            part="status",
            timeout_s=self.deadline_s(),
        )
        self._state.replicas.learn(self._state.resource(answer))

    async def write_scale(self, resource: Resource, replicas: int) -> None:
        """Set spec.replicas, if the resource is unchanged since it was seen."""
        self._must_serve(resource)
        meta = resource.meta
        body = {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {
                "name": meta.name,
                "namespace": meta.namespace,
                "uid": meta.uid,
                "resourceVersion": meta.resource_version,
            },
            "spec": {"replicas": replicas},
        }
        await self._client.replace(
            self._client.replicas,
            meta.namespace,
            meta.name,
            msgspec.json.encode(body),
            part="scale",
            timeout_s=self.deadline_s(),
        )

    def _must_serve(self, resource: Resource) -> None:
        if not self._state.serves(resource.meta.namespace):
            raise NotLeading("another release of the operator serves this namespace")

    async def _execute(self, resource: Resource, action: Action) -> None:
        namespace = resource.meta.namespace
        match action:
            case ApplyObject(manifest):
                await self._apply(namespace, manifest)
            case CreatePod(manifest):
                await self._create_pod(namespace, manifest)
            case RemoveSchedulingGate(pod, uid):
                await self._ungate(namespace, pod, uid)
            case ReleasePod(pod, uid):
                await self._release(namespace, pod, uid)
            case DeletePod(pod, uid, _, grace_s, if_lost):
                if if_lost:
                    await self._must_be_lost(if_lost)
                await self._delete_pod((namespace, pod), uid, grace_s)
            case DeleteObject(kind, name):
                await self._delete_object(kind, (namespace, name))
            case Drain(ordinal, address):
                self._lease.left_s()
                await self._controllers.drain(resource.meta.key, ordinal, address)
            case EmitEvent():
                await self._events.emit(resource.meta, action, self.deadline_s())
            case RequeueAt():
                pass

    async def _apply(self, namespace: str, manifest: Mapping[str, Any]) -> None:
        """Apply to the version that is known, or create: an object of another owner stays."""
        kind, name = KINDS[manifest["kind"]], manifest["metadata"]["name"]
        store = self._state.objects_in(kind.kind, namespace)
        held = store.get((namespace, name))
        try:
            answer = await self._apply_to(namespace, manifest, held.version if held else NEVER)
        except ClusterError as error:
            if error.status != 409:
                raise
            current = await self._read(kind, namespace, manifest, partial=True)
            version = NEVER if current is None else int(current[0].resource_version)
            answer = await self._apply_to(namespace, manifest, version)
        store.learn(objects.owned_object(kind.kind, answer))

    async def _apply_to(self, namespace: str, manifest: Mapping[str, Any], version: int) -> bytes:
        kind, metadata = KINDS[manifest["kind"]], manifest["metadata"]
        body = {**manifest, "metadata": {**metadata, "resourceVersion": str(version)}}
        return await self._client.apply(
            kind, namespace, metadata["name"], msgspec.json.encode(body), self.deadline_s()
        )

    async def _create_pod(self, namespace: str, manifest: Mapping[str, Any]) -> None:
        store = self._state.pods_in(namespace)
        body = msgspec.json.encode(manifest)
        try:
            answer = await self._client.create(PODS, namespace, body, self.deadline_s())
        except ClusterError as error:
            if error.exceeds_quota:
                raise PodOverQuota(error.status, error.reason, error.message) from None
            if error.status != 409:
                raise
            current = await self._read(PODS, namespace, manifest)
            if current is None:
                raise  # it has just gone
            meta, raw = current
            if not manifest["metadata"]["labels"].keys() <= (meta.labels or {}).keys():
                owner = f"{meta.owner_text}, without the operator's labels"
                raise NameTaken(PODS.kind, meta.name, owner) from None
            store.learn(objects.pod(raw))  # the watch is late
            raise
        store.learn(objects.pod(answer))

    async def _read(
        self, kind: Kind, namespace: str, manifest: Mapping[str, Any], *, partial: bool = False
    ) -> tuple[Meta, msgspec.Raw] | None:
        """Read the object with the manifest's name. Raises NameTaken if another owner has it."""
        fields = f"metadata.name={manifest['metadata']['name']}"
        async for page in self._client.pages(kind, namespace, fields=fields, partial=partial):
            for raw in page.items or ():
                meta = objects.metadata_of(raw)
                if meta.resource != manifest["metadata"]["labels"][RESOURCE]:
                    raise NameTaken(kind.kind, meta.name, meta.owner_text)
                return meta, raw
        return None

    async def _ungate(self, namespace: str, pod: str, uid: str) -> None:
        gate = {"name": GANG_GATE, "$patch": "delete"}
        patch = {"metadata": {"uid": uid}, "spec": {"schedulingGates": [gate]}}
        body = msgspec.json.encode(patch)
        answer = await self._client.merge(PODS, namespace, pod, body, self.deadline_s())
        self._state.pods_in(namespace).learn(objects.pod(answer))

    async def _release(self, namespace: str, pod: str, uid: str) -> None:
        finalizers = {"$deleteFromPrimitiveList/finalizers": [QUEUE_FINALIZER]}
        body = msgspec.json.encode({"metadata": {"uid": uid, **finalizers}})
        try:
            answer = await self._client.merge(PODS, namespace, pod, body, self.deadline_s())
        except ClusterError as error:
            if error.status != 404:
                raise
            self._state.pods_in(namespace).forget_uid((namespace, pod), uid)
            return
        self._state.pods_in(namespace).learn(objects.pod(answer))

    async def _delete_pod(self, key: Key, uid: str, grace_s: int | None) -> None:
        store = self._state.pods_in(key[0])
        try:
            answer = await self._client.delete(
                PODS, *key, uid=uid, grace_s=grace_s, timeout_s=self.deadline_s()
            )
        except ClusterError as error:
            if error.status != 404:
                raise  # 409: a newer pod has the name; the watch will deliver it
            store.forget_uid(key, uid)
            return
        if objects.metadata_of(answer).deletion_timestamp is not None:
            store.learn(objects.pod(answer))
        else:
            store.forget_uid(key, uid)

    async def _must_be_lost(self, name: str) -> None:
        """Read the node again; raises ClusterError if it answers, since its pods must stay."""
        try:
            body = await self._client.get(NODES, "", name)
        except ClusterError as error:
            if error.status != 404:
                raise
            return
        node = objects.node(body)
        if not node.value.silent:
            self._state.nodes.learn(node)
            raise ClusterError(
                409, "NodeAnswers", f"node {name} is reachable, so its pods are not deleted"
            )

    async def _delete_object(self, kind: str, key: Key) -> None:
        store = self._state.objects_in(kind, key[0])
        held = store.get(key)
        if held is None:
            return
        try:
            await self._client.delete(KINDS[kind], *key, uid=held.uid, timeout_s=self.deadline_s())
        except ClusterError as error:
            if error.status != 404:
                raise
        store.forget_uid(key, held.uid)


class EventRecorder:
    """Records Kubernetes Events about MedhaReplicas, each sentence once.

    The name of an Event is a hash of its object and its text. After a restart the operator thus
    records nothing twice: the API server has the name, and the repetition is counted.
    """

    def __init__(self, client: KubeClient, identity: str) -> None:
        self._client, self._identity = client, identity
        self._recorded_s: OrderedDict[str, float] = OrderedDict()

    async def emit(self, about: Meta, event: EmitEvent, timeout_s: float) -> None:
        """Write the Event, unless the same was written within REPEAT_AFTER_S."""
        text = f"{about.uid}|{event.reason}|{event.message}"
        name = f"{about.name[:40]}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        now_s = time.monotonic()
        before = self._recorded_s.get(name)
        self._recorded_s[name] = now_s
        self._recorded_s.move_to_end(name)
        if len(self._recorded_s) > MAX_RECORDED:
            self._recorded_s.popitem(last=False)
        if before is not None and now_s - before < REPEAT_AFTER_S:
            return
        try:
            await self._write(name, about, event, timeout_s)
        except ClusterError:
            del self._recorded_s[name]
            raise

    async def _write(self, name: str, about: Meta, event: EmitEvent, timeout_s: float) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
        now = now.replace("+00:00", "Z")
        manifest = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": name, "namespace": about.namespace, "labels": OWNED_BY},
            "eventTime": now,
            "reportingController": f"medha.dev/{FIELD_MANAGER}",
            "reportingInstance": self._identity,
            "action": "Reconcile",
            "type": "Warning" if event.warning else "Normal",
            "reason": event.reason,
            "note": event.message[:1000],
            "regarding": {
                "apiVersion": self._client.replicas.api_version,
                "kind": self._client.replicas.kind,
                "name": about.name,
                "namespace": about.namespace,
                "uid": about.uid,
            },
        }
        body = msgspec.json.encode(manifest)
        try:
            await self._client.create(EVENTS, about.namespace, body, timeout_s)
        except ClusterError as error:
            if error.status != 409:
                raise
            series = {"series": {"count": 2, "lastObservedTime": now}}
            body = msgspec.json.encode(series)
            await self._client.merge(EVENTS, about.namespace, name, body, timeout_s)
