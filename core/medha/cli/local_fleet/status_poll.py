"""Polls of routers' and controllers' ops ports, twice a second, each on a thread of its own.

A supervisor never waits for a network: it reads the latest status at any time. A process that does
not answer has no status; one that is silent for HUNG_S hangs, or still starts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

import httpx
import msgspec

from medha.errors import MedhaError
from medha.messages import ReplicaStatus

POLL_INTERVAL_S = 0.5
TIMEOUT_S = 2.0
HUNG_S = 10.0
"""Silence after which a process hangs: 4 polls if it is suspended, 20 if each fails at once."""
ROUTER = "router"


class Answers:
    """Answers of a process to polls.

    Silence is the time of polls in a row without an answer, as far as each may last, so that a
    pause of this process does not count.
    """

    def __init__(self) -> None:
        self._silent_s, self._last_s = 0.0, float("-inf")

    def note(self, answered: bool, began_s: float, now: float) -> None:
        """Note the end of a poll that began at `began_s`."""
        if answered:
            self._silent_s, self._last_s = 0.0, now
        else:
            self._silent_s += min(now - began_s, TIMEOUT_S) + POLL_INTERVAL_S

    @property
    def hangs_since_s(self) -> float | None:
        """Time of the last answer, −∞ without one; None unless the process is silent."""
        return self._last_s if self._silent_s >= HUNG_S else None


class FleetPoll:
    """Polls the router and all controllers of `medha up`.

    `controllers`: replica name -> base URL of its controller's ops port; `router`: the router's;
    `token`: of all these ports.
    """

    def __init__(self, router: str, controllers: Mapping[str, str], token: bytes) -> None:
        self._router, self._controllers = router, dict(controllers)
        self._may_drain = {"authorization": f"Bearer {token.decode()}"}
        self._statuses: dict[str, ReplicaStatus] = {}
        self._router_ready = False
        self._answers = {name: Answers() for name in (*controllers, ROUTER)}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet poll", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=2 * TIMEOUT_S)

    @property
    def statuses(self) -> dict[str, ReplicaStatus]:
        """Latest status of each replica whose controller answers."""
        return dict(self._statuses)

    @property
    def ready(self) -> bool:
        """The router accepts requests, and every replica is ready and registered with it."""
        statuses = self._statuses
        return self._router_ready and all(
            name in statuses and statuses[name].ready and statuses[name].routers
            for name in self._controllers
        )

    def hangs_since_s(self, name: str) -> float | None:
        """Return when a controller (by replica), or `ROUTER`, last answered; None unless it is
        silent."""
        return self._answers[name].hangs_since_s

    def drain(self) -> None:
        """Request that the router and all controllers drain; ignores processes that are gone."""
        with _client() as client:
            for url in (self._router, *self._controllers.values()):
                try:
                    client.post(f"{url}/drain", headers=self._may_drain)
                except httpx.HTTPError as error:
                    logging.getLogger("medha.up").debug("%s does not drain: %s", url, error)

    def _run(self) -> None:
        with _client() as client:
            while not self._closing.wait(POLL_INTERVAL_S):
                self._poll(client)

    def _poll(self, client: httpx.Client) -> None:
        for name, url in self._controllers.items():
            began_s = time.monotonic()
            status = read_status(client, url)
            self._answers[name].note(status is not None, began_s, time.monotonic())
            if status is None:
                self._statuses.pop(name, None)
            else:
                self._statuses[name] = status
        began_s = time.monotonic()
        try:
            self._router_ready = client.get(f"{self._router}/readyz").status_code == 200
            self._answers[ROUTER].note(True, began_s, time.monotonic())
        except httpx.HTTPError:
            self._router_ready = False
            self._answers[ROUTER].note(False, began_s, time.monotonic())


class ControllerPoll:
    """Polls the controller behind `url` for a pod, from `start` to `pause`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._polling, self._closing = threading.Event(), threading.Event()
        self._drain = self._drain_accepted = False
        self._status: ReplicaStatus | None = None
        self._answers = Answers()
        self._thread = threading.Thread(target=self._run, name="controller poll", daemon=True)
        self._thread.start()

    @property
    def status(self) -> ReplicaStatus | None:
        """Latest status, while polling and if the controller answers."""
        return self._status

    @property
    def hangs_since_s(self) -> float | None:
        """Time of the controller's last answer; None unless it is silent."""
        return self._answers.hangs_since_s

    @property
    def drain_accepted(self) -> bool:
        """The controller accepted the drain request, and `status` is newer than that."""
        return self._drain_accepted and self._status is not None

    def start(self) -> None:
        self._polling.set()

    def pause(self) -> None:
        self._polling.clear()
        self._status = None

    def drain(self) -> None:
        """Request that the controller drains; repeat until it accepts."""
        self._drain = True
        self.start()

    def close(self) -> None:
        self._closing.set()
        self._polling.set()
        self._thread.join(timeout=2 * TIMEOUT_S)

    def _run(self) -> None:
        with _client() as client:
            while not self._closing.is_set():
                self._polling.wait()
                if self._drain and not self._drain_accepted and self._post_drain(client):
                    self._status, self._drain_accepted = None, True
                began_s = time.monotonic()
                status = read_status(client, self._url)
                self._answers.note(status is not None, began_s, time.monotonic())
                self._status = status if self._polling.is_set() else None
                self._closing.wait(POLL_INTERVAL_S)

    def _post_drain(self, client: httpx.Client) -> bool:
        try:
            return client.post(f"{self._url}/drain").status_code == httpx.codes.ACCEPTED
        except httpx.HTTPError as error:
            logging.getLogger("medha.pod").debug("the controller does not drain: %s", error)
            return False


def read_status(client: httpx.Client, url: str) -> ReplicaStatus | None:
    """A controller's status; None if the controller does not answer with a status."""
    try:
        response = client.get(f"{url}/status")
        response.raise_for_status()
        return msgspec.json.decode(response.content, type=ReplicaStatus)
    except (httpx.HTTPError, msgspec.MsgspecError, MedhaError):
        return None


def _client() -> httpx.Client:
    return httpx.Client(timeout=TIMEOUT_S, trust_env=False)
