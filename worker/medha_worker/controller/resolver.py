"""Addresses of the routers: their names are resolved once a second.

A headless Service has one name and as many addresses as routers run; the controller dials each.
Literal addresses and `ipc://` paths stay as they are. Resolving may block, so it has its own
thread.
"""

from __future__ import annotations

import ipaddress
import logging
import queue
import socket
import threading
from collections.abc import Callable

RESOLVE_S = 1.0

log = logging.getLogger("medha.controller")

Lookup = Callable[[str, int], list[str]]


def lookup(host: str, port: int) -> list[str]:
    """Every IPv4 address of a name; raises OSError if it has none."""
    entries = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
    return sorted({str(entry[4][0]) for entry in entries})


def is_literal(router: str) -> bool:
    """True if the endpoint needs no resolving: it has an address, or is not TCP."""
    if not router.startswith("tcp://"):
        return True
    try:
        ipaddress.ip_address(router.removeprefix("tcp://").rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return True


class RouterResolver:
    """Resolves `routers` in the background; `take` returns each new list once."""

    def __init__(self, routers: tuple[str, ...], look_up: Lookup = lookup) -> None:
        self._routers, self._look_up = routers, look_up
        self._resolved: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._last: dict[str, list[str]] = {}

    def start(self) -> None:
        """Start to resolve if there is a name among the routers."""
        if not all(is_literal(router) for router in self._routers):
            threading.Thread(target=self._run, name="resolver", daemon=True).start()

    def take(self) -> tuple[str, ...] | None:
        """The newest endpoints of all routers, or None if there is no new list."""
        newest = None
        while not self._resolved.empty():
            newest = self._resolved.get()
        return newest

    def close(self) -> None:
        self._closing.set()

    def resolve(self) -> tuple[str, ...]:
        """Endpoints of every router; a name that does not resolve keeps its last ones."""
        endpoints: list[str] = []
        for router in self._routers:
            if is_literal(router):
                endpoints.append(router)
                continue
            host, _, port = router.removeprefix("tcp://").rpartition(":")
            try:
                addresses = self._look_up(host, int(port))
                self._last[router] = [f"tcp://{address}:{port}" for address in addresses]
            except OSError as error:
                log.debug("router name %s does not resolve: %s", host, error)
            endpoints += self._last.get(router, [])
        return tuple(dict.fromkeys(endpoints))

    def _run(self) -> None:
        while not self._closing.is_set():
            self._resolved.put(self.resolve())
            self._closing.wait(RESOLVE_S)
