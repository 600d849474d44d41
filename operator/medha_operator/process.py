"""The operator process: its parts, put together in one event loop beside kopf's.

    watches ──> world ──> queue ──> reconcilers ──> writer ──> API server
    kopf ───────^           ^── resync

Everything is read by every operator, standing by or not, so that the one that takes over the
lease knows the cluster already; it lists once more before it writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import time
from collections.abc import Mapping
from typing import Any

from medha.adapters.prometheus import Metrics, OpsServer, json_reply
from medha_operator.apply import Writer
from medha_operator.autoscale import Autoscaler
from medha_operator.client import Client, ClusterError, Kind
from medha_operator.complaints import Complaints
from medha_operator.demands import Demands
from medha_operator.events import Events
from medha_operator.handlers import Handlers
from medha_operator.health import Health
from medha_operator.keys import Keys
from medha_operator.lease import Lease
from medha_operator.login import login
from medha_operator.observe import World
from medha_operator.projections import Key
from medha_operator.published import Published
from medha_operator.queue import WorkQueue
from medha_operator.reconcile import Reconciler
from medha_operator.reports import Reports
from medha_operator.scaled_objects import ScaledObjects
from medha_operator.settings import Settings
from medha_operator.watches import Watches

log = logging.getLogger("medha.operator")


class Process:
    """Made inside the event loop that runs it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._metrics = Metrics("operator")
        self._client = Client(login, connections=settings.workers + 16, on_write=self._count)
        self._queue: WorkQueue[Key] = WorkQueue(time.monotonic, random.Random())
        self._gains = asyncio.Event()
        self._working = False
        self.world = World(self._wake)
        self._watches = Watches(self._client, self.world, settings.namespaces)
        self._lease = Lease(
            self._client, settings.namespace, settings.identity, settings.lease_s, self._gained
        )
        self._reports = Reports(
            self.world, settings.report_s, lambda key: self._wake(key, 0.0), self._leads
        )
        self._complaints = Complaints(
            self._client, self.world, settings.namespaces, lambda key: self._wake(key, 0.0),
            self._leads,
        )  # fmt: skip
        self._health = Health(settings.resync_s)
        self._writer = Writer(
            self._client, self.world, self._watches, self._lease,
            Events(self._client, settings.identity), self._reports,
        )  # fmt: skip
        self._keys = Keys(self._client, settings.namespace, settings.resync_s, _make_keys)
        left_s = self._writer.left_s
        self._demands = Demands(settings.router_host, settings.router_ops_port)
        self._published = Published(self._client, settings.namespace, left_s)
        self._autoscaler = Autoscaler(
            settings, self.world, self._writer, self._demands,
            ScaledObjects(self._client, settings.resync_s, left_s), self._published,
            self._metrics, lambda key: self._wake(key, 0.0), self._leads,
        )  # fmt: skip
        self._reconciler = Reconciler(
            settings, self.world, self._queue, self._writer, self._keys, self._metrics,
            self._health, self._autoscaler.scaling,
        )  # fmt: skip
        self._handlers = Handlers(settings.namespaces, self._from_kopf)
        self._ops = OpsServer(
            settings.ops_host, settings.ops_port, self._metrics,
            alive=self._health.alive, ready=lambda: self._health.ready,
            routes={"GET /scaling": lambda: json_reply(self._autoscaler.page())},
        )  # fmt: skip
        self._stopped = asyncio.Event()

    async def serve(self) -> None:
        """Work until SIGTERM or SIGINT; then let go of the lease and end."""
        for name in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(name, self._stopped.set)
        log.info("started", extra={"fields": {"ops_port": self._ops.port}})
        parts = [
            self._health.run(self._judge), self._watches.run(), self._lead(), self._take_over(),
            self._resync(), self._reports.run(), self._complaints.run(), self._autoscaler.run(),
            *(self._reconciler.run() for _ in range(self._settings.workers)),
        ]  # fmt: skip
        tasks = [asyncio.create_task(part) for part in parts]
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            done, _ = await asyncio.wait((*tasks, stopped), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a part ends only by failing
        finally:
            for task in (*tasks, stopped):
                task.cancel()
            await asyncio.gather(*tasks, stopped, return_exceptions=True)
            await self._close()

    async def _close(self) -> None:
        self._handlers.stop()
        with contextlib.suppress(ClusterError):
            await self._lease.release()
        await self._reports.close()
        await self._demands.close()
        await self._client.close()
        self._ops.close()
        log.info("ended")

    async def _lead(self) -> None:
        """Compete for the lease once the cluster is known."""
        await self._watches.listed()
        self._health.ready = True
        self._handlers.start()
        await self._lease.run()

    async def _resync(self) -> None:
        """List every kind and look at every resource, every `resync_s`, a little spread."""
        await self._watches.listed_once.wait()
        while True:
            await asyncio.sleep(self._settings.resync_s * random.uniform(0.9, 1.0))
            await self._watches.list_again()
            if self._leads():
                await self._keys.prepare(self._lease.left_s)
                self._published.forget()
                for seen in self.world.replicas:
                    self._queue.add(seen.key, random.uniform(0.0, self._settings.resync_s / 4))

    def _gained(self) -> None:
        """We lead from now on: what the former leader did last may not have been told yet."""
        self._working = False
        self._gains.set()

    async def _take_over(self) -> None:
        """Know everything anew before anything is written, each time that we begin to lead."""
        while True:
            await self._gains.wait()
            self._gains.clear()
            await self._watches.list_again()
            self._published.forget()
            self.world.reports_since_s = time.time()
            self._working = not self._gains.is_set()
            for seen in self.world.replicas:
                self._wake(seen.key, 0.0)
            if self._leads():
                await self._keys.prepare(self._lease.left_s)

    def _leads(self) -> bool:
        return self._working and self._lease.leading

    def _wake(self, key: Key, after_s: float) -> None:
        if self._leads():
            self._queue.add(key, after_s)

    def _from_kopf(self, kind: str | None, body: Mapping[str, Any]) -> None:
        """On kopf's thread."""
        self._loop.call_soon_threadsafe(self._learn, kind, body)

    def _learn(self, kind: str | None, body: Mapping[str, Any]) -> None:
        seen = self.world.resource_from(body)
        if kind == "DELETED":
            self.world.replicas.forget(seen.key, seen.version)
        else:
            self.world.replicas.learn(seen)

    def _judge(self) -> None:
        sources = (self._watches.oldest_news_s(), self._lease.heard_s)
        keys = [seen.key for seen in self.world.replicas]
        self._health.judge(sources, self._leads(), keys, self._queue.behind_s)
        self._metrics.set("medha_operator_leading", float(self._lease.leading))
        if not self._lease.leading:
            self._metrics.drop("medha_replica_condition")  # whoever leads knows
        self._metrics.set("medha_operator_queue_depth", float(len(self._queue)))
        self._metrics.set("medha_operator_behind_seconds", self._queue.behind_s)

    def _count(self, verb: str, kind: Kind, status: int) -> None:
        self._metrics.add("medha_operator_writes_total", 1, kind.plural, verb, str(status))


def _make_keys() -> tuple[bytes, bytes]:
    """A CURVE pair; ZeroMQ is loaded for it only, since most operators never make one."""
    from medha.adapters.sockets import make_keys

    return make_keys()
