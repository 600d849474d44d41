"""All informers of the process: which kinds are watched, in which namespaces, by which label."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Sequence
from typing import Any

from medha_operator import projections
from medha_operator.client import (
    BUDGETS,
    CONFIG_MAPS,
    NODES,
    PODS,
    POLICIES,
    REPLICAS,
    SERVICES,
    Client,
    ClusterError,
)
from medha_operator.informers import Informer, Store
from medha_operator.names import OWNED_BY, RESOURCE
from medha_operator.observe import World
from medha_operator.projections import Pod, Thing

log = logging.getLogger("medha.operator.watches")

OURS = ",".join((*(f"{name}={value}" for name, value in OWNED_BY.items()), RESOURCE))
FOREIGN = f"!{RESOURCE}"
RUNNING = "status.phase!=Succeeded,status.phase!=Failed"
ALL = ""
_FOREIGN_SHARE = 0.03


class Watches:
    """Lists and watches for `world`. `namespaces` empty: the whole cluster."""

    def __init__(self, client: Client, world: World, namespaces: Sequence[str]) -> None:
        self._client, self._world = client, world
        self._scopes = tuple(namespaces) or (ALL,)
        self._informers: list[Informer[Any]] = []
        self._pods: dict[str, Store[Pod]] = {}
        self._things: dict[tuple[str, str], Store[Thing]] = {}
        self._replicas_listed_s = 0.0
        self._foreign_due_s = 0.0
        self.listed_once = asyncio.Event()
        for scope in self._scopes:
            self._pods[scope] = world.pod_store()
            self._watch(PODS, scope, self._pods[scope], projections.pod, OURS)
            for kind in (SERVICES, CONFIG_MAPS, BUDGETS, POLICIES):
                store = self._things[kind.kind, scope] = world.thing_store()
                project = functools.partial(projections.thing, kind.kind)
                self._watch(kind, scope, store, project, OURS, partial=True)
        self.nodes = world.node_store()
        self._watch(NODES, ALL, self.nodes, projections.node)

    def pods(self, namespace: str) -> Store[Pod]:
        return self._pods[ALL if ALL in self._pods else namespace]

    def things(self, kind: str, namespace: str) -> Store[Thing]:
        return self._things[kind, ALL if (kind, ALL) in self._things else namespace]

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for informer in self._informers:
                tasks.create_task(informer.run(), name=f"watch {informer.name}")

    async def listed(self) -> None:
        """Everything was seen once, the MedhaReplicas and foreign pods too."""
        for informer in self._informers:
            await informer.listed.wait()
        pause_s = 0.2
        while True:
            try:
                await self._list_replicas()
                await self._list_foreign()
                self.listed_once.set()
                return
            except ClusterError as error:
                log.warning("first list: %s", error)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(10.0, 2 * pause_s)

    async def list_again(self) -> None:
        """List every kind anew, so that what a watch did not tell is seen; one after another."""
        steps = [self._list_replicas, *(each.list for each in self._informers)]
        if time.monotonic() >= self._foreign_due_s:
            steps.append(self._list_foreign)
        for step in steps:
            try:
                await step()
            except ClusterError as error:
                log.warning("resync: %s", error)

    def oldest_news_s(self) -> float:
        """When the kind that was silent for longest was last heard of (monotonic clock)."""
        return min(self._replicas_listed_s, *(each.heard_s for each in self._informers))

    async def _list_replicas(self) -> None:
        version, found = 0, []
        for scope in self._scopes:
            async for page in self._client.pages(REPLICAS, scope):
                version = max(version, int(page.metadata.resource_version))
                found += [self._world.resource(raw) for raw in page.items or ()]
        self._world.replicas.replace(found, version)
        self._replicas_listed_s = time.monotonic()

    async def _list_foreign(self) -> None:
        """What pods that are not ours take of each node; seldom, where there are very many."""
        began_s = time.monotonic()
        taken: dict[str, dict[str, int]] = {}
        for scope in self._scopes:
            async for page in self._client.pages(PODS, scope, labels=FOREIGN, fields=RUNNING):
                for raw in page.items or ():
                    node, requests = projections.load(raw)
                    if node:
                        on = taken.setdefault(node, {})
                        for name, amount in requests.items():
                            on[name] = on.get(name, 0) + amount
        if self._world.usage.put_foreign(taken):
            self._world.room_changed()
        now_s = time.monotonic()
        self._foreign_due_s = now_s + (now_s - began_s) / _FOREIGN_SHARE

    def _watch(
        self, kind: Any, scope: str, store: Store[Any], project: Any, labels: str = "",
        *, partial: bool = False,
    ) -> None:  # fmt: skip
        self._informers.append(
            Informer(self._client, kind, scope, store, project, labels=labels, partial=partial)
        )
