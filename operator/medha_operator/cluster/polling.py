"""Pollers: what the operator reads from outside the API server's watches, every few seconds.

    ControllerPoller   GET /status of every running leader; also sends POST /drain
    RouterPoller       GET /demand of every router behind one DNS name
    MountErrorPoller   Events about pods that wait for a volume

The first and the last store what they read in the ClusterState.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

from medha.config import CONTROLLER_OPS_PORT
from medha.messages import ReplicaStatus, RouterDemand
from medha_operator.cluster.cluster_state import ALL, ClusterState
from medha_operator.kube.client import EVENTS, ClusterError, KubeClient
from medha_operator.planning.poll_schedule import PollSchedule
from medha_operator.planning.scaling_signals import RouterTracker, TotalDemand
from medha_operator.resources.objects import Key
from medha_operator.resources.views import PodView, ReportView

log = logging.getLogger("medha.operator.polling")

ANSWER_S, CONNECT_S = 2.0, 1.0
CONCURRENT_POLLS = 32
TICK_S = 0.25
MAX_STATUS_BYTES = 1 << 20
RESOLVE_S = 5.0
MAX_DEMAND_BYTES = 4 << 20
MOUNT_WAIT_S = 10.0
"""A pod that starts normally has mounted its volumes by then."""
MOUNT_ERRORS_EVERY_S = 10.0
FAILED_MOUNT = "type=Warning,reason=FailedMount"

_STATUS = msgspec.json.Decoder(ReplicaStatus)
_DEMAND = msgspec.json.Decoder(RouterDemand)


class ControllerPoller:
    """Polls every running leader each `every_s` seconds while `leads` is true.

    A controller that does not answer is polled less and less often. Its last status stays, with
    its time, for the planner to judge. A status that calls for action wakes its resource; counts
    alone do not.
    """

    def __init__(
        self,
        state: ClusterState,
        every_s: float,
        wake: Callable[[Key], None],
        leads: Callable[[], bool],
    ) -> None:
        self._state, self._wake, self._leads = state, wake, leads
        self._schedule = PollSchedule(every_s)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONCURRENT_POLLS, keepalive_timeout=10.0),
            timeout=aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S),
        )
        self._slots = asyncio.Semaphore(CONCURRENT_POLLS)

    async def run(self) -> None:
        """Poll until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                if self._leads():
                    for key, pod in self._due():
                        tasks.create_task(self._poll(key, pod))
                await asyncio.sleep(TICK_S)

    async def close(self) -> None:
        await self._session.close()

    async def drain(self, key: Key, ordinal: int, address: str) -> None:
        """Make a controller refuse new requests; raises ClusterError if it cannot be reached."""
        try:
            async with self._session.post(f"http://{address}/drain") as answer:
                if answer.status >= 300:
                    message = f"replica {key[1]}-{ordinal} refused to drain"
                    raise ClusterError(answer.status, str(answer.reason), message)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            message = f"replica {key[1]}-{ordinal} at {address} cannot be reached: {error!r}"
            raise ClusterError(0, "Unreachable", message) from None
        self._schedule.soon((key, ordinal))

    def _due(self) -> list[tuple[Key, PodView]]:
        """Leaders to poll now; drops the status of leaders that are gone."""
        pods = self._state.all_pods().items()
        views = ((key, pod.view) for key, family in pods for pod in family.values())
        due, gone = self._schedule.due(views, time.monotonic())
        for key, ordinal in gone:
            self._state.controller_status.get(key, {}).pop(ordinal, None)
        return due

    async def _poll(self, key: Key, pod: PodView) -> None:
        status: ReplicaStatus | None = None
        try:
            async with (
                self._slots,
                self._session.get(f"http://{pod.ip}:{CONTROLLER_OPS_PORT}/status") as answer,
            ):
                if answer.status == 200 and (answer.content_length or 0) <= MAX_STATUS_BYTES:
                    status = _STATUS.decode(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            log.debug("%s: no status: %r", pod.name, error)
        place, now_s, spread = (key, pod.ordinal), time.monotonic(), random.uniform(0.9, 1.1)
        if not self._schedule.answered(place, pod.uid, status is not None, now_s, spread):
            return
        if status is not None:
            self._store(key, pod.ordinal, status)

    def _store(self, key: Key, ordinal: int, status: ReplicaStatus) -> None:
        reports = self._state.controller_status.setdefault(key, {})
        before = reports.get(ordinal)
        reports[ordinal] = ReportView(status=status, at_s=time.time())
        if before is None or _actionable(before.status) != _actionable(status):
            self._wake(key)


def _actionable(status: ReplicaStatus) -> tuple[object, ...]:
    """The part of a status that may call for action: all but the counts of requests and pages."""
    idle = status.waiting + status.running == 0
    groups = tuple(
        (group.group, group.state, group.releasable, group.ranks) for group in status.groups
    )
    plain = (status.ready, status.draining, status.generation, status.wanted_groups)
    texts = (status.message, status.refused)
    return *plain, status.restart_groups, texts, groups, idle


class RouterPoller:
    """Polls every router behind `host` for its demand; `port` is the routers' ops port.

    The name is resolved again every RESOLVE_S, so that new routers are polled and routers that
    left are not.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
        )
        self._routers = RouterTracker()
        self._resolved_s = float("-inf")

    async def close(self) -> None:
        await self._session.close()

    async def poll(self) -> None:
        """Poll every router once."""
        await self._resolve()
        await asyncio.gather(*(self._poll(address) for address in self._routers.addresses))

    def demand(self, model: str) -> TotalDemand:
        """The demand for a model, over all routers."""
        return self._routers.demand(model, time.monotonic())

    async def _resolve(self) -> None:
        """Update the routers' addresses; they stay as they are if the name does not resolve."""
        now_s = time.monotonic()
        if now_s - self._resolved_s < RESOLVE_S:
            return
        self._resolved_s = now_s
        try:
            async with asyncio.timeout(ANSWER_S):
                addresses = await asyncio.get_running_loop().getaddrinfo(
                    self._host, self._port, type=socket.SOCK_STREAM
                )
        except (OSError, TimeoutError) as error:
            log.debug("routers %s: %r", self._host, error)
            return
        self._routers.set_addresses((str(address[4][0]) for address in addresses), now_s)

    async def _poll(self, address: str) -> None:
        host = f"[{address}]" if ":" in address else address
        try:
            async with self._session.get(f"http://{host}:{self._port}/demand") as answer:
                if answer.status == 200 and (answer.content_length or 0) <= MAX_DEMAND_BYTES:
                    demand = _DEMAND.decode(await answer.read())
                    self._routers.record(address, demand, time.monotonic())
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            log.debug("router %s: no demand: %r", address, error)


class _Event(msgspec.Struct):
    class Regarding(msgspec.Struct):
        uid: str = ""

    regarding: Regarding
    note: str = ""


_EVENT = msgspec.json.Decoder(_Event)


class MountErrorPoller:
    """Lists the kubelets' FailedMount Events while `leads` is true and a pod of ours is stuck.

    A pod whose volume cannot be mounted stays in ContainerCreating, and its status does not give
    the reason: only Events do. As long as every pod starts in time, no Event is ever listed.
    """

    def __init__(
        self,
        client: KubeClient,
        state: ClusterState,
        namespaces: Sequence[str],
        wake: Callable[[Key], None],
        leads: Callable[[], bool],
    ) -> None:
        self._client, self._state = client, state
        self._scopes = tuple(namespaces) or (ALL,)
        self._wake, self._leads = wake, leads

    async def run(self) -> None:
        """Poll until cancelled; wake each resource whose pod has a new mount error."""
        while True:
            await asyncio.sleep(MOUNT_ERRORS_EVERY_S)
            stuck = self._stuck() if self._leads() else {}
            try:
                errors = await self._errors(set(stuck)) if stuck else {}
            except ClusterError as error:
                log.warning("Events about volumes cannot be listed: %s", error)
                continue
            before, self._state.mount_errors = self._state.mount_errors, errors
            for key in {stuck[uid] for uid, note in errors.items() if before.get(uid) != note}:
                self._wake(key)

    def _stuck(self) -> dict[str, Key]:
        """Map the UID of each pod that is bound but has not started for long to its resource."""
        since_s = time.time() - MOUNT_WAIT_S
        return {
            pod.view.uid: key
            for key, pods in self._state.all_pods().items()
            for pod in pods.values()
            if pod.view.node
            and pod.view.phase == "Pending"
            and not pod.view.why
            and not pod.view.deleting
            and pod.view.created_s < since_s
        }

    async def _errors(self, uids: set[str]) -> dict[str, str]:
        """The last mount error of each of these pods, by UID."""
        errors: dict[str, str] = {}
        for scope in self._scopes:
            async for page in self._client.pages(EVENTS, scope, fields=FAILED_MOUNT):
                for raw in page.items or ():
                    event = _EVENT.decode(raw)
                    if event.regarding.uid in uids and event.note:
                        errors[event.regarding.uid] = event.note
        return errors
