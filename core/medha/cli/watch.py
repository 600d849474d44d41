"""Asks the processes of a local fleet how they are, twice a second, on a thread of its own.

The latest answers are there to be read at any time; a process that does not answer has none.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

import httpx
import msgspec

from medha.errors import MedhaError
from medha.messages import ReplicaStatus

EVERY_S = 0.5
TIMEOUT_S = 2.0


class Watch:
    """`controllers`: replica's name -> base URL of its ops port; `router`: the router's."""

    def __init__(self, router: str, controllers: Mapping[str, str]) -> None:
        self._router, self._controllers = router, dict(controllers)
        self._statuses: dict[str, ReplicaStatus] = {}
        self._router_ready = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=2 * TIMEOUT_S)

    @property
    def statuses(self) -> dict[str, ReplicaStatus]:
        """What each replica last told, if it answers."""
        return dict(self._statuses)

    @property
    def ready(self) -> bool:
        """The router takes requests, and every replica serves and has been taken in by it."""
        told = self._statuses
        return self._router_ready and all(
            name in told and told[name].ready and told[name].routers for name in self._controllers
        )

    def drain(self) -> None:
        """Ask everything to take nothing new; a process that is gone need not hear it."""
        with _client() as client:
            for url in (self._router, *self._controllers.values()):
                try:
                    client.post(f"{url}/drain")
                except httpx.HTTPError as error:
                    logging.getLogger("medha.up").debug("%s does not drain: %s", url, error)

    def _run(self) -> None:
        with _client() as client:
            while not self._over.wait(EVERY_S):
                self._look(client)

    def _look(self, client: httpx.Client) -> None:
        for name, url in self._controllers.items():
            status = read_status(client, url)
            if status is None:
                self._statuses.pop(name, None)
            else:
                self._statuses[name] = status
        try:
            self._router_ready = client.get(f"{self._router}/readyz").status_code == 200
        except httpx.HTTPError:
            self._router_ready = False


def read_status(client: httpx.Client, url: str) -> ReplicaStatus | None:
    """A controller's status, or None when it does not answer with one."""
    try:
        answer = client.get(f"{url}/status")
        answer.raise_for_status()
        return msgspec.json.decode(answer.content, type=ReplicaStatus)
    except (httpx.HTTPError, msgspec.MsgspecError, MedhaError):
        return None


def _client() -> httpx.Client:
    return httpx.Client(timeout=TIMEOUT_S, trust_env=False)
