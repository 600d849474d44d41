"""Ops pages of all processes as those of one router.

    /metrics        series of all, with the label `process`
    /demand         demand of all: a model occurs once for each process
    /debug/queue    the pages by process
    /readyz         200 if a process accepts requests

A process that does not run has nothing to report and is left out. If one runs and does not answer,
its share may be anything: the reply is 503.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import socket
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from medha.adapters.prometheus import Reply, Route, join_expositions, json_reply
from medha.messages import RouterDemand

TIMEOUT_S = 2.0
LABEL = "process"


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class ProcessPages:
    """Reads pages of the processes behind `sockets`, their indices being the processes'."""

    def __init__(self, sockets: Sequence[str]) -> None:
        self._sockets = tuple(sockets)
        self._threads = concurrent.futures.ThreadPoolExecutor(
            4 * len(sockets), thread_name_prefix="pages"
        )

    def get(self, path: str) -> dict[int, bytes | None]:
        """Return the page of each running process; None: no answer, or another than 200."""
        pages = self._threads.map(lambda ops_socket: _get(ops_socket, path), self._sockets)
        return {index: page for index, page in enumerate(pages) if page != b""}

    @property
    def ready(self) -> bool:
        """A process accepts requests."""
        return any(self.get("/readyz").values())

    def text(self) -> bytes:
        """Return the metrics of the processes that answer."""
        pages = self.get("/metrics").items()
        return join_expositions({str(index): page for index, page in pages if page}, LABEL)

    def routes(self, drain: Callable[[], None] | None) -> dict[str, Route]:
        """Make the routes of the ops port; without `drain`, none that changes the router."""

        def demand() -> Reply:
            pages = self._answered("/demand")
            if pages is None:
                return _silent()
            reports = [msgspec.json.decode(page, type=RouterDemand) for page in pages.values()]
            models = tuple(model for report in reports for model in report.models)
            return json_reply(RouterDemand(window_s=reports[0].window_s, models=models))

        def queue() -> Reply:
            pages = self._answered("/debug/queue")
            if pages is None:
                return _silent()
            by_process: dict[str, Any] = {
                str(index): msgspec.Raw(page) for index, page in pages.items()
            }
            return json_reply(by_process)

        shown: dict[str, Route] = {"GET /demand": demand, "GET /debug/queue": queue}
        if drain is None:
            return shown

        def start_drain() -> Reply:
            drain()
            return json_reply({"draining": True}, 202)

        return {**shown, "POST /drain": start_drain}

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _answered(self, path: str) -> dict[int, bytes] | None:
        """Return the page of each running process; None if one is silent, or none runs."""
        pages = self.get(path)
        answered = {index: page for index, page in pages.items() if page is not None}
        return answered if answered and len(answered) == len(pages) else None


def _get(ops_socket: str, path: str) -> bytes | None:
    """Return a page; empty if no process listens, None if one does and does not answer with 200."""
    connection = _UnixConnection(ops_socket)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        return body if response.status == http.client.OK else None
    except (FileNotFoundError, ConnectionRefusedError):
        return b""
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _silent() -> Reply:
    return Reply(b"a process does not answer, or none runs yet\n", 503)
