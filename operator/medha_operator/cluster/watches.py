"""Every informer of the process: the watched kinds, their namespaces and label selectors."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Sequence
from typing import Any

from medha_operator.cluster.cluster_state import ALL, ClusterState
from medha_operator.kube.client import (
    BUDGETS,
    CONFIG_MAPS,
    NODES,
    PODS,
    POLICIES,
    SERVICES,
    ClusterError,
    KubeClient,
)
from medha_operator.kube.informers import Informer, Store
from medha_operator.resources import objects
from medha_operator.resources.labels import OWNED_BY, RESOURCE

log = logging.getLogger("medha.operator.watches")

OURS = ",".join((*(f"{name}={value}" for name, value in OWNED_BY.items()), RESOURCE))
FOREIGN = f"!{RESOURCE}"
RUNNING = "status.phase!=Succeeded,status.phase!=Failed"
_FOREIGN_SHARE = 0.03


class Watches:
    """Feeds `state` by lists and watches of `namespaces`; if empty, of the whole cluster."""

    def __init__(self, client: KubeClient, state: ClusterState, namespaces: Sequence[str]) -> None:
        self._client, self._state = client, state
        self._scopes = tuple(namespaces) or (ALL,)
        self.informers: list[Informer[Any]] = []
        self._replicas_listed_s = 0.0
        self._foreign_due_s = 0.0
        self.listed_once = asyncio.Event()
        for scope in self._scopes:
            self._watch(PODS, scope, state.add_pod_store(scope), objects.pod, OURS)
            for kind in (SERVICES, CONFIG_MAPS, BUDGETS, POLICIES):
                store = state.add_object_store(kind.kind, scope)
                project = functools.partial(objects.owned_object, kind.kind)
                self._watch(kind, scope, store, project, OURS, partial=True)
        self._watch(NODES, ALL, state.nodes, objects.node)

    async def listed(self) -> None:
        """Wait until every kind was listed once, MedhaReplicas and foreign pods included."""
        for informer in self.informers:
            await informer.listed.wait()
        pause_s = 0.2
        while True:
            try:
                await self._client.choose_version()
                await self._list_replicas()
                await self._list_foreign()
                self.listed_once.set()
                return
            except ClusterError as error:
                log.warning("first list failed: %s", error)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(10.0, 2 * pause_s)

    async def list_again(self) -> None:
        """List every kind once more, in turn, to repair what a watch has missed."""
        steps = [self._list_replicas, *(informer.list for informer in self.informers)]
        if time.monotonic() >= self._foreign_due_s:
            steps.append(self._list_foreign)
        for step in steps:
            try:
                await step()
            except ClusterError as error:
                log.warning("resync failed: %s", error)

    def oldest_event_s(self) -> float:
        """Time of the last message about the kind that is silent for longest (monotonic)."""
        return min(self._replicas_listed_s, *(informer.received_s for informer in self.informers))

    async def _list_replicas(self) -> None:
        version, replicas = 0, []
        for scope in self._scopes:
            async for page in self._client.pages(self._client.replicas, scope):
                version = max(version, int(page.metadata.resource_version))
                replicas += [self._state.resource(raw) for raw in page.items or ()]
        self._state.replicas.replace(replicas, version)
        self._replicas_listed_s = time.monotonic()

    async def _list_foreign(self) -> None:
        """Sum the requests of foreign pods by node; listing takes at most 3 % of the time."""
        began_s = time.monotonic()
        used: dict[str, dict[str, int]] = {}
        for scope in self._scopes:
            async for page in self._client.pages(PODS, scope, labels=FOREIGN, fields=RUNNING):
                for raw in page.items or ():
                    node, requests = objects.node_and_requests(raw)
                    if node:
                        total = used.setdefault(node, {})
                        for name, amount in requests.items():
                            total[name] = total.get(name, 0) + amount
        if self._state.usage.set_foreign(used):
            self._state.capacity_changed()
        now_s = time.monotonic()
        self._foreign_due_s = now_s + (now_s - began_s) / _FOREIGN_SHARE

    def _watch(
        self,
        kind: Any,
        scope: str,
        store: Store[Any],
        project: Any,
        labels: str = "",
        *,
        partial: bool = False,
    ) -> None:
        self.informers.append(
            Informer(self._client, kind, scope, store, project, labels=labels, partial=partial)
        )
