"""Which addresses the routers' names stand for now: names are resolved anew, once a second.

A headless Service has one name and as many addresses as routers run; each is dialled. Literal
addresses and `ipc://` paths stay as they are. Resolving may block, so it has a thread of its own.
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
    """Every IPv4 address of a name; raises OSError when there is none."""
    found = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
    return sorted({str(entry[4][0]) for entry in found})


def literal(router: str) -> bool:
    """Needs no resolving: an address, or not TCP at all."""
    if not router.startswith("tcp://"):
        return True
    try:
        ipaddress.ip_address(router.removeprefix("tcp://").rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return True


class Names:
    """Resolves `routers` in the background; `take` gives the newest list, once."""

    def __init__(self, routers: tuple[str, ...], look: Lookup = lookup) -> None:
        self._routers, self._look = routers, look
        self._found: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._last: dict[str, list[str]] = {}

    def start(self) -> None:
        """Begin to resolve, if there is a name among the routers."""
        if not all(literal(router) for router in self._routers):
            threading.Thread(target=self._run, name="names", daemon=True).start()

    def take(self) -> tuple[str, ...] | None:
        """All routers' endpoints as of now, or None when there is nothing new."""
        newest = None
        while not self._found.empty():
            newest = self._found.get()
        return newest

    def close(self) -> None:
        self._closing.set()

    def resolve(self) -> tuple[str, ...]:
        """Endpoints of every router; a name that does not resolve keeps what it had."""
        endpoints: list[str] = []
        for router in self._routers:
            if literal(router):
                endpoints.append(router)
                continue
            host, _, port = router.removeprefix("tcp://").rpartition(":")
            try:
                addresses = self._look(host, int(port))
                self._last[router] = [f"tcp://{address}:{port}" for address in addresses]
            except OSError as error:
                log.debug("router name %s does not resolve: %s", host, error)
            endpoints += self._last.get(router, [])
        return tuple(dict.fromkeys(endpoints))

    def _run(self) -> None:
        while not self._closing.is_set():
            self._found.put(self.resolve())
            self._closing.wait(RESOLVE_S)
