"""The only writer: one action of a plan becomes one call, and what the answer says is learned.

Every write happens under the Lease and within the time that is left of it. Pods are made by POST,
so that a stale view cannot bring one back, and deleted by UID, so that it cannot take a new one
away; all else is applied by the server, as one field manager. Steps are taken in the order of the
plan, and the first that fails ends it: the next look at the cluster says what is left to do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from medha_operator import projections
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
from medha_operator.client import KINDS, NODES, PODS, REPLICAS, REQUEST_S, Client, ClusterError
from medha_operator.events import Events
from medha_operator.lease import Lease
from medha_operator.names import GANG_GATE
from medha_operator.observe import Resource, World
from medha_operator.projections import Key
from medha_operator.reports import Reports
from medha_operator.watches import Watches


class Writer:
    """Carries out what was planned for one MedhaReplica after another."""

    def __init__(
        self, client: Client, world: World, watches: Watches, lease: Lease, events: Events,
        reports: Reports,
    ) -> None:  # fmt: skip
        self._client, self._world, self._watches = client, world, watches
        self._lease, self._events, self._reports = lease, events, reports

    def left_s(self) -> float:
        """The time that a write may take now; raises NotLeading when there is none."""
        return min(REQUEST_S, self._lease.left_s())

    @contextlib.contextmanager
    def expecting(self, actions: Iterable[Action]) -> Iterator[None]:
        """Within, the pods that are to be made have their room, whoever else plans meanwhile."""
        pods = [
            projections.pod(msgspec.json.encode(step.manifest))
            for step in actions
            if isinstance(step, CreatePod)
        ]
        for pod in pods:
            self._world.expect(pod)
        try:
            yield
        finally:
            for pod in pods:
                self._world.unexpect(pod)

    async def carry_out(
        self, resource: Resource, actions: Iterable[Action], progress: Callable[[], None]
    ) -> None:
        """All steps in order, `progress` after each; ClusterError or NotLeading end it."""
        for step in actions:
            await self._step(resource, step)
            progress()

    async def write_status(self, resource: Resource, status: Mapping[str, Any]) -> None:
        """Replace the status, if the resource still is as it was seen."""
        meta = resource.meta
        body = {
            "apiVersion": REPLICAS.api_version,
            "kind": REPLICAS.kind,
            "metadata": {
                "name": meta.name,
                "namespace": meta.namespace,
                "uid": meta.uid,
                "resourceVersion": meta.resource_version,
            },
            "status": status,
        }
        answer = await self._client.replace(
            REPLICAS, meta.namespace, meta.name, msgspec.json.encode(body), part="status",
            timeout_s=self.left_s(),
        )  # fmt: skip
        self._world.replicas.learn(self._world.resource(answer))

    async def write_scale(self, resource: Resource, replicas: int) -> None:
        """Ask for so many replicas, if the resource still is as it was seen."""
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
            REPLICAS, meta.namespace, meta.name, msgspec.json.encode(body), part="scale",
            timeout_s=self.left_s(),
        )  # fmt: skip

    async def _step(self, resource: Resource, step: Action) -> None:
        namespace = resource.meta.namespace
        match step:
            case ApplyObject(manifest):
                await self._apply(namespace, manifest)
            case CreatePod(manifest):
                body = msgspec.json.encode(manifest)
                answer = await self._client.create(PODS, namespace, body, self.left_s())
                self._watches.pods(namespace).learn(projections.pod(answer))
            case LiftGate(pod, uid):
                await self._lift(namespace, pod, uid)
            case DeletePod(pod, uid, _, grace_s, if_lost):
                if if_lost:
                    await self._must_be_lost(if_lost)
                await self._delete_pod((namespace, pod), uid, grace_s)
            case DeleteObject(kind, name):
                await self._delete_object(kind, (namespace, name))
            case Drain(ordinal, address):
                self._lease.left_s()
                await self._reports.drain(resource.meta.key, ordinal, address)
            case Tell():
                await self._events.tell(resource.meta, step, self.left_s())
            case LookAgain():
                pass

    async def _apply(self, namespace: str, manifest: Mapping[str, Any]) -> None:
        kind, name = KINDS[manifest["kind"]], manifest["metadata"]["name"]
        body = msgspec.json.encode(manifest)
        answer = await self._client.apply(kind, namespace, name, body, self.left_s())
        store = self._watches.things(kind.kind, namespace)
        store.learn(projections.thing(kind.kind, answer))

    async def _lift(self, namespace: str, pod: str, uid: str) -> None:
        gate = {"name": GANG_GATE, "$patch": "delete"}
        change = {"metadata": {"uid": uid}, "spec": {"schedulingGates": [gate]}}
        body = msgspec.json.encode(change)
        answer = await self._client.merge(PODS, namespace, pod, body, self.left_s())
        self._watches.pods(namespace).learn(projections.pod(answer))

    async def _delete_pod(self, key: Key, uid: str, grace_s: int | None) -> None:
        store = self._watches.pods(key[0])
        try:
            answer = await self._client.delete(
                PODS, *key, uid=uid, grace_s=grace_s, timeout_s=self.left_s()
            )
        except ClusterError as error:
            if error.status != 404:
                raise  # 409: another one bears its name by now, which we shall be told
            store.forget_uid(key, uid)
            return
        if projections.bare(answer).deletion_timestamp is not None:
            store.learn(projections.pod(answer))
        else:
            store.forget_uid(key, uid)

    async def _must_be_lost(self, name: str) -> None:
        """What we know of a node may be old: a pod whose node answers after all stays."""
        try:
            body = await self._client.get(NODES, "", name)
        except ClusterError as error:
            if error.status != 404:
                raise
            return
        node = projections.node(body)
        if not node.value.silent:
            self._watches.nodes.learn(node)
            raise ClusterError(409, "NodeAnswers", f"node {name} answers: its pods stay")

    async def _delete_object(self, kind: str, key: Key) -> None:
        store = self._watches.things(kind, key[0])
        held = store.get(key)
        if held is None:
            return
        try:
            await self._client.delete(KINDS[kind], *key, uid=held.uid, timeout_s=self.left_s())
        except ClusterError as error:
            if error.status != 404:
                raise
        store.forget_uid(key, held.uid)
