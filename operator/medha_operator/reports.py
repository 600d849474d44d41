"""What the replicas' controllers say of themselves: `GET /status` of every leader, now and then.

Also the one request that goes the other way, `POST /drain`. A controller that does not answer is
asked less and less often; its last report stays, with its time, for others to judge. A report that
asks for something wakes its resource; mere counts are there when somebody looks.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

import aiohttp
import msgspec

from medha.config import CONTROLLER_OPS_PORT
from medha.messages import ReplicaStatus
from medha_operator.asking import Asking
from medha_operator.client import ClusterError
from medha_operator.observe import World
from medha_operator.observed import PodView, ReportView
from medha_operator.projections import Key

log = logging.getLogger("medha.operator.reports")

ANSWER_S, CONNECT_S = 2.0, 1.0
AT_ONCE = 32
TICK_S = 0.25
MAX_BYTES = 1 << 20

_REPORT = msgspec.json.Decoder(ReplicaStatus)


class Reports:
    """Asks every running leader of the world each `every_s` seconds while `wanted` says so."""

    def __init__(
        self,
        world: World,
        every_s: float,
        wake: Callable[[Key], None],
        wanted: Callable[[], bool],
    ) -> None:
        self._world, self._wake, self._wanted = world, wake, wanted
        self._asking = Asking(every_s)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=AT_ONCE, keepalive_timeout=10.0),
            timeout=aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S),
        )
        self._room = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """Ask until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                if self._wanted():
                    for key, pod in self._due():
                        tasks.create_task(self._ask(key, pod))
                await asyncio.sleep(TICK_S)

    async def close(self) -> None:
        await self._session.close()

    async def drain(self, key: Key, ordinal: int, address: str) -> None:
        """Tell a controller to take nothing new; raises ClusterError when it does not hear."""
        try:
            async with self._session.post(f"http://{address}/drain") as answer:
                if answer.status >= 300:
                    said = f"replica {key[1]}-{ordinal} does not drain"
                    raise ClusterError(answer.status, str(answer.reason), said)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            said = f"replica {key[1]}-{ordinal} at {address} does not hear: {error!r}"
            raise ClusterError(0, "Unreachable", said) from None
        self._asking.soon((key, ordinal))

    def _due(self) -> list[tuple[Key, PodView]]:
        """Leaders that are to be asked now; those that are gone are forgotten."""
        pods = self._world.all_pods().items()
        views = ((key, pod.view) for key, family in pods for pod in family.values())
        due, gone = self._asking.due(views, time.monotonic())
        for key, ordinal in gone:
            self._world.reports.get(key, {}).pop(ordinal, None)
        return due

    async def _ask(self, key: Key, pod: PodView) -> None:
        status: ReplicaStatus | None = None
        try:
            async with (
                self._room,
                self._session.get(f"http://{pod.ip}:{CONTROLLER_OPS_PORT}/status") as answer,
            ):
                if answer.status == 200 and (answer.content_length or 0) <= MAX_BYTES:
                    status = _REPORT.decode(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            log.debug("%s: no report: %r", pod.name, error)
        place, now_s, spread = (key, pod.ordinal), time.monotonic(), random.uniform(0.9, 1.1)
        if not self._asking.answered(place, pod.uid, status is not None, now_s, spread):
            return
        if status is not None:
            self._heard(key, pod.ordinal, status)

    def _heard(self, key: Key, ordinal: int, status: ReplicaStatus) -> None:
        reports = self._world.reports.setdefault(key, {})
        before = reports.get(ordinal)
        reports[ordinal] = ReportView(status=status, at_s=time.time())
        if before is None or _asks(before.status) != _asks(status):
            self._wake(key)


def _asks(status: ReplicaStatus) -> tuple[object, ...]:
    """What of a report somebody must act on: all but the counts of requests and pages."""
    idle = status.waiting + status.running == 0
    groups = tuple((each.group, each.state, each.releasable, each.ranks) for each in status.groups)
    plain = (status.ready, status.draining, status.generation, status.wanted_groups)
    said = (status.message, status.refused)
    return *plain, status.restart_groups, said, groups, idle
