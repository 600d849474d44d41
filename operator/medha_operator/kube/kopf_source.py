"""kopf as a source of events and nothing else: each event of a MedhaReplica queues its key.

It runs in a thread and a loop of its own, so that it cannot delay the reconcilers. If it ends it is
started again, and the resync covers the gap. kopf is configured never to write (no patches,
finalizers, annotations, peering or Events), to retry for ever with jitter, and to treat a silent
connection as dead.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import kopf

from medha_operator.kube.client import REPLICAS, Kind
from medha_operator.kube.login import login

log = logging.getLogger("medha.operator.kopf")

MAX_PAUSE_S = 15.0
LOGIN_AGAIN = datetime.timedelta(minutes=5)
"""A watch ends after five minutes, too."""


class Pauses:
    """Endless pauses between retries: doubling, with jitter."""

    def __iter__(self) -> Iterator[float]:
        pause_s = 0.2
        while True:
            yield pause_s * random.uniform(0.5, 1.0)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)


class KopfSource:
    """Calls `sink(type, body)` in kopf's thread for every event of a MedhaReplica.

    Credentials older than `login_again` are read again for the next request.
    """

    def __init__(
        self,
        namespaces: Sequence[str],
        sink: Callable[[str | None, Mapping[str, Any]], None],
        login_again: datetime.timedelta = LOGIN_AGAIN,
    ) -> None:
        self._namespaces, self._sink, self._login_again = namespaces, sink, login_again
        self._replicas = REPLICAS
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kopf", daemon=True)

    def start(self, replicas: Kind) -> None:
        """Start once the CRD is known to exist, with its version: kopf looks for it only once."""
        self._replicas = replicas
        logging.getLogger("kopf").setLevel(logging.WARNING)  # otherwise it logs every event
        self._thread.start()

    def stop(self) -> None:
        """Stop kopf; if it does not stop in time, its daemon thread ends with the process."""
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
            # Without it kopf looks up the user's name, and an image has no such user.
            identity="medha-operator",  # type: ignore[arg-type]  # its type is private
            clusterwide=not self._namespaces,
            namespaces=list(self._namespaces),
            stop_flag=self._stop,
        )

    def _registry(self) -> kopf.OperatorRegistry:
        registry, kind = kopf.OperatorRegistry(), self._replicas

        @kopf.on.login(registry=registry)
        def connect(**_: Any) -> kopf.ConnectionInfo:
            expiration = datetime.datetime.now(datetime.UTC) + self._login_again
            return dataclasses.replace(login(), expiration=expiration)

        @kopf.on.event(kind.group, kind.version, kind.plural, registry=registry)
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
