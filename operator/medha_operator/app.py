"""The operator's composition root: its parts, in one event loop; kopf runs in another thread.

    watches ──> state ──> queue ──> reconcilers ──> executor ──> API server
    kopf ───────^           ^── resync

Every operator reads the whole cluster, with or without the Lease, so that a new leader has it at
once; before its first write it lists everything once more.
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
from medha_operator.cluster.cluster_state import ALL, ClusterState
from medha_operator.cluster.peers import Peers, Seniority
from medha_operator.cluster.polling import ControllerPoller, MountErrorPoller, RouterPoller
from medha_operator.cluster.watches import Watches
from medha_operator.controllers.adopter import Adopter
from medha_operator.controllers.autoscaler import Autoscaler
from medha_operator.controllers.executor import EventRecorder, Executor
from medha_operator.controllers.keda import ScaledObjects
from medha_operator.controllers.liveness import Liveness
from medha_operator.controllers.model_publisher import ModelPublisher
from medha_operator.controllers.reconciler import Reconciler, WorkQueue
from medha_operator.kube.client import ClusterError, Kind, KubeClient
from medha_operator.kube.kopf_source import KopfSource
from medha_operator.kube.lease import Lease
from medha_operator.kube.login import login
from medha_operator.kube.secrets import KeySecrets
from medha_operator.resources.objects import Key
from medha_operator.settings import Settings

log = logging.getLogger("medha.operator")


class OperatorApp:
    """The operator process; construct it inside the event loop that runs it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._metrics = Metrics("operator")
        self._client = KubeClient(login, connections=settings.workers + 16, on_write=self._count)
        self._queue: WorkQueue[Key] = WorkQueue(time.monotonic, random.Random())
        self._gained = asyncio.Event()
        self._working = False
        self._seniority = Seniority(settings.namespace)
        self.state = ClusterState(
            self._wake, lambda namespace: self._seniority.serves(namespace, time.monotonic())
        )
        self._peers = Peers(
            self._client, self._seniority, settings.namespaces or (ALL,), self._served_changed
        )
        self._watches = Watches(self._client, self.state, settings.namespaces)
        self._lease = Lease(
            self._client,
            settings.namespace,
            settings.identity,
            settings.lease_s,
            self._start_to_lead,
            settings.namespaces,
        )
        self._controllers = ControllerPoller(
            self.state, settings.report_s, lambda key: self._wake(key, 0.0), self._leads
        )
        self._mount_errors = MountErrorPoller(
            self._client,
            self.state,
            settings.namespaces,
            lambda key: self._wake(key, 0.0),
            self._leads,
        )
        self._liveness = Liveness(settings.resync_s)
        self._executor = Executor(
            self._client,
            self.state,
            self._lease,
            EventRecorder(self._client, settings.identity),
            self._controllers,
        )
        self._keys = KeySecrets(
            self._client,
            settings.namespace,
            settings.resync_s / 2,
            _make_keys,
            lambda: (seen.key[0] for seen in self.state.served()),
        )
        deadline_s = self._executor.deadline_s
        adopter = Adopter(
            self._client,
            settings,
            deadline_s,
            lambda pod: self.state.pods_in(pod.key[0]).learn(pod),
        )
        self._routers = RouterPoller(settings.router_host, settings.router_ops_port)
        self._model_publisher = ModelPublisher(self._client, settings.namespace, deadline_s)
        self._autoscaler = Autoscaler(
            settings,
            self.state,
            self._executor,
            self._routers,
            ScaledObjects(self._client, settings.resync_s, deadline_s),
            self._model_publisher,
            self._metrics,
            lambda key: self._wake(key, 0.0),
            self._leads,
        )
        self._reconciler = Reconciler(
            settings,
            self.state,
            self._queue,
            self._executor,
            self._keys,
            adopter,
            self._metrics,
            self._liveness,
        )
        self._kopf = KopfSource(settings.namespaces, self._from_kopf)
        self._ops = OpsServer(
            settings.ops_host,
            settings.ops_port,
            self._metrics,
            alive=self._liveness.alive,
            ready=lambda: self._liveness.ready and not self._peers.idle,
            routes={"GET /scaling": lambda: json_reply(self._autoscaler.page())},
        )
        self._stopped = asyncio.Event()

    async def serve(self) -> None:
        """Work until SIGTERM or SIGINT, then release the Lease."""
        for name in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(name, self._stopped.set)
        log.info("started", extra={"fields": {"ops_port": self._ops.port}})
        parts = [
            self._liveness.run(self._check),
            self._peers.run(),
            *(informer.run() for informer in self._watches.informers),
            self._lead(),
            self._take_over(),
            self._resync(),
            self._controllers.run(),
            self._mount_errors.run(),
            self._autoscaler.run(),
            *(self._reconciler.run() for _ in range(self._settings.workers)),
        ]
        tasks = [asyncio.create_task(part) for part in parts]
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            done, _ = await asyncio.wait((*tasks, stopped), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a part ends only with an error
        finally:
            for task in (*tasks, stopped):
                task.cancel()
            await asyncio.gather(*tasks, stopped, return_exceptions=True)
            await self._close()

    async def _close(self) -> None:
        self._kopf.stop()
        with contextlib.suppress(ClusterError):
            await self._lease.release()
        await self._controllers.close()
        await self._routers.close()
        await self._client.close()
        self._ops.close()
        log.info("stopped")

    async def _lead(self) -> None:
        """Compete for the Lease once every kind is listed."""
        await self._watches.listed()
        self._liveness.ready = True
        self._kopf.start(self._client.replicas)
        await self._lease.run()

    async def _resync(self) -> None:
        """Every `resync_s`, list every kind and requeue every resource, spread over time."""
        await self._watches.listed_once.wait()
        while True:
            await asyncio.sleep(self._settings.resync_s * random.uniform(0.9, 1.0))
            await self._watches.list_again()
            if self._leads():
                await self._keys.prepare(self._lease.left_s)
                self._model_publisher.forget()
                for seen in self.state.served():
                    self._queue.add(seen.key, random.uniform(0.0, self._settings.resync_s / 4))

    def _start_to_lead(self) -> None:
        """Start to lead; no write yet, as the former leader's last writes may be unseen."""
        self._working = False
        self._seniority.start(time.monotonic())
        self._gained.set()

    async def _take_over(self) -> None:
        """List everything again before the first write, each time this operator starts to lead."""
        while True:
            await self._gained.wait()
            self._gained.clear()
            await self._peers.look()
            await self._watches.list_again()
            self._model_publisher.forget()
            self.state.polling_since_s = time.time()
            self._working = not self._gained.is_set()
            for seen in self.state.replicas:
                self._wake(seen.key, 0.0)
            if self._leads():
                await self._keys.prepare(self._lease.left_s)

    def _leads(self) -> bool:
        return self._working and self._lease.leading

    def _wake(self, key: Key, after_s: float) -> None:
        if self._leads() and self.state.serves(key[0]):
            self._queue.add(key, after_s)

    def _served_changed(self) -> None:
        """Reconcile what another release served until now, or forget what it serves now."""
        self._metrics.drop("medha_replica_condition")
        for seen in self.state.replicas:
            self._wake(seen.key, 0.0)

    def _from_kopf(self, kind: str | None, body: Mapping[str, Any]) -> None:
        """Receive an event; called on kopf's thread."""
        self._loop.call_soon_threadsafe(self._apply_event, kind, body)

    def _apply_event(self, kind: str | None, body: Mapping[str, Any]) -> None:
        seen = self.state.resource_from(body)
        if kind == "DELETED":
            self.state.replicas.forget(seen.key, seen.version)
        else:
            self.state.replicas.learn(seen)

    def _check(self) -> None:
        sources = (self._watches.oldest_event_s(), self._lease.answered_s)
        keys = [seen.key for seen in self.state.served()]
        self._liveness.check(sources, self._leads(), keys, self._queue.behind_s)
        leads = self._lease.leading and not self._peers.idle
        self._metrics.set("medha_operator_leading", float(leads))
        if not self._lease.leading:
            self._metrics.drop("medha_replica_condition")  # the leader exports it
        self._metrics.set("medha_operator_queue_depth", float(len(self._queue)))
        self._metrics.set("medha_operator_behind_seconds", self._queue.behind_s)

    def _count(self, verb: str, kind: Kind, status: int) -> None:
        self._metrics.add("medha_operator_writes_total", 1, kind.plural, verb, str(status))


def _make_keys() -> tuple[bytes, bytes]:
    """Make a CURVE pair. ZeroMQ is imported here, as few operators ever need one."""
    from medha.adapters.sockets import make_keys

    return make_keys()
