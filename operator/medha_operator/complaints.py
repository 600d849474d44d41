"""What kubelets say of pods that do not start for want of a volume: in Events, and nowhere else.

A pod whose volume cannot be mounted waits as "ContainerCreating" for ever, and its status does not
tell why. Events are read by list, and only while some pod of ours has waited for long, so that a
cluster in which all is well is never asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from medha_operator.client import EVENTS, Client, ClusterError
from medha_operator.observe import World
from medha_operator.projections import Key

log = logging.getLogger("medha.operator.complaints")

PATIENCE_S = 10.0
"""A pod that starts takes its volumes in less."""
EVERY_S = 10.0
FAILED_MOUNT = "type=Warning,reason=FailedMount"
ALL = ""


class _Event(msgspec.Struct):
    class Regarding(msgspec.Struct):
        uid: str = ""

    regarding: Regarding
    note: str = ""


_EVENT = msgspec.json.Decoder(_Event)


class Complaints:
    """Asks while `wanted` says so; `wake` is told which resource has news of a pod."""

    def __init__(
        self, client: Client, world: World, namespaces: Sequence[str],
        wake: Callable[[Key], None], wanted: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._client, self._world = client, world
        self._scopes = tuple(namespaces) or (ALL,)
        self._wake, self._wanted = wake, wanted

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            stuck = self._stuck() if self._wanted() else {}
            try:
                told = await self._told(set(stuck)) if stuck else {}
            except ClusterError as error:
                log.warning("what kubelets complain of cannot be read: %s", error)
                continue
            before, self._world.complaints = self._world.complaints, told
            for key in {stuck[uid] for uid, note in told.items() if before.get(uid) != note}:
                self._wake(key)

    def _stuck(self) -> dict[str, Key]:
        """UIDs of pods that have their node for long, and have not started; whose they are."""
        since_s = time.time() - PATIENCE_S
        return {
            pod.view.uid: key
            for key, pods in self._world.all_pods().items()
            for pod in pods.values()
            if pod.view.node and pod.view.phase == "Pending" and not pod.view.why
            and not pod.view.deleting and pod.view.created_s < since_s
        }  # fmt: skip

    async def _told(self, uids: set[str]) -> dict[str, str]:
        """A complaint about each of these pods; one pod's are of one kind, as a rule."""
        found: dict[str, str] = {}
        for scope in self._scopes:
            async for page in self._client.pages(EVENTS, scope, fields=FAILED_MOUNT):
                for raw in page.items or ():
                    event = _EVENT.decode(raw)
                    if event.regarding.uid in uids and event.note:
                        found[event.regarding.uid] = event.note
        return found
