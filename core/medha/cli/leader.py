"""What a pod hears of its replica's controller: its status, asked twice a second if that matters.

The controller's ops port is asked on a thread of its own: whoever supervises programs never waits
for a network. A controller that does not answer has no status.
"""

from __future__ import annotations

import logging
import threading

import httpx

from medha.cli.watch import read_status
from medha.messages import ReplicaStatus

EVERY_S = 0.5
TIMEOUT_S = 2.0


class Leader:
    """The controller behind `url`. `ask` and `rest` begin and end the asking."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._asking, self._over = threading.Event(), threading.Event()
        self._drain = self._told = False
        self._status: ReplicaStatus | None = None
        self._thread = threading.Thread(target=self._run, name="leader", daemon=True)
        self._thread.start()

    @property
    def status(self) -> ReplicaStatus | None:
        """What it told last, if it answers and is asked."""
        return self._status

    @property
    def told_to_drain(self) -> bool:
        """It has taken the word to drain; `status` is newer than that."""
        return self._told and self._status is not None

    def ask(self) -> None:
        self._asking.set()

    def rest(self) -> None:
        self._asking.clear()
        self._status = None

    def drain(self) -> None:
        """Ask it to take nothing new, until it has heard that."""
        self._drain = True
        self.ask()

    def close(self) -> None:
        self._over.set()
        self._asking.set()
        self._thread.join(timeout=2 * TIMEOUT_S)

    def _run(self) -> None:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
            while not self._over.is_set():
                self._asking.wait()
                if self._drain and not self._told and self._post(client):
                    self._status, self._told = None, True
                status = read_status(client, self._url)
                self._status = status if self._asking.is_set() else None
                self._over.wait(EVERY_S)

    def _post(self, client: httpx.Client) -> bool:
        try:
            return client.post(f"{self._url}/drain").status_code == httpx.codes.ACCEPTED
        except httpx.HTTPError as error:
            logging.getLogger("medha.pod").debug("the controller does not drain: %s", error)
            return False
