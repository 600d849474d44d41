"""kopf, as source of events and nothing else: a MedhaReplica changed, so its key is looked at.

It runs on a thread and a loop of its own, so that nothing it does holds up the reconciling, and is
started again when it ends: what it missed meanwhile the resync sees. It is told never to write
(no patches, no finalizers, no annotations, no peering, no Events), to try on for ever with jitter,
and to take a silent connection for a dead one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import kopf

from medha_operator.client import REPLICAS
from medha_operator.login import login

log = logging.getLogger("medha.operator.handlers")

LONGEST_PAUSE_S = 15.0


class Pauses:
    """Pauses before another try: doubling, jittered, without end."""

    def __iter__(self) -> Iterator[float]:
        pause_s = 0.2
        while True:
            yield pause_s * random.uniform(0.5, 1.0)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)


class Handlers:
    """Calls `sink(type, body)` on kopf's thread for every event of a MedhaReplica."""

    def __init__(
        self, namespaces: Sequence[str], sink: Callable[[str | None, Mapping[str, Any]], None]
    ) -> None:
        self._namespaces, self._sink = namespaces, sink
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kopf", daemon=True)

    def start(self) -> None:
        """Once the resource's definition is known to be there; kopf looks for it only once."""
        logging.getLogger("kopf").setLevel(logging.WARNING)  # it tells of every event otherwise
        self._thread.start()

    def stop(self) -> None:
        """End kopf, if it can be ended; the thread does not hold up the process."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=3.0)

    def _run(self) -> None:
        for pause_s in Pauses():
            try:
                asyncio.run(self._operator())
            except Exception:
                log.exception("kopf ended; starting it again")
            if self._stop.wait(pause_s):
                return

    async def _operator(self) -> None:
        await kopf.operator(
            registry=self._registry(),
            settings=self._settings(),
            standalone=True,
            # Without a name of ours kopf asks who runs it, and an image has no such user.
            identity="medha-operator",  # type: ignore[arg-type]  # its type is private
            clusterwide=not self._namespaces,
            namespaces=list(self._namespaces),
            stop_flag=self._stop,
        )

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        def connect(**_: Any) -> kopf.ConnectionInfo:
            return login()

        @kopf.on.event(REPLICAS.group, REPLICAS.version, REPLICAS.plural, registry=registry)
        def changed(type: str | None, body: kopf.Body, **_: Any) -> None:
            self._sink(type, dict(body))

        return registry

    @staticmethod
    def _settings() -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.networking.request_timeout = 30.0
        settings.networking.connect_timeout = 5.0
        settings.networking.error_backoffs = Pauses()
        settings.watching.server_timeout = 300
        settings.watching.connect_timeout = 5.0
        settings.watching.inactivity_timeout = 75.0
        settings.watching.chunk_size = 200
        return settings
