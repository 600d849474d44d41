"""Addresses of the routers: their names are resolved once a second.

A headless Service has one name and as many addresses as routers run; the controller dials each, and
the further ports of a router that reports several processes. Literal addresses and `ipc://` paths
stay as they are. Resolving may block, so it has its own thread.
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
    """Resolves `routers` in the background; `take` returns each new list once.

    One thread calls `learn` and `take`.
    """

    def __init__(self, routers: tuple[str, ...], look_up: Lookup = lookup) -> None:
        self._routers, self._look_up = routers, look_up
        self._resolved: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._last: dict[str, list[str]] = {}
        self._addresses = tuple(router for router in routers if is_literal(router))
        self._ports_of: dict[str, tuple[str, ...]] = {}  # by address: all endpoints there
        self._taken = self._addresses

    def start(self) -> None:
        """Start to resolve if there is a name among the routers."""
        if not all(is_literal(router) for router in self._routers):
            threading.Thread(target=self._run, name="resolver", daemon=True).start()

    def learn(self, router: str, ports: tuple[int, ...]) -> None:
        """Note the ports of all processes of a router, which one of them has reported."""
        host = router.rpartition(":")[0]
        for address in self._addresses:
            if router == address or router in self._ports_of.get(address, ()):
                self._ports_of[address] = tuple(f"{host}:{port}" for port in ports)

    def take(self) -> tuple[str, ...] | None:
        """The endpoints of all routers, or None if they are those that were taken last."""
        while not self._resolved.empty():
            self._addresses = self._resolved.get()
        self._ports_of = {
            address: endpoints
            for address, endpoints in self._ports_of.items()
            if address in self._addresses
        }
        endpoints = [*self._addresses]
        for address in self._addresses:
            endpoints += self._ports_of.get(address, ())
        newest = tuple(dict.fromkeys(endpoints))
        if newest == self._taken:
            return None
        self._taken = newest
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

    def refresh(self) -> None:
        """Resolve once; `take` then returns what is new."""
        self._resolved.put(self.resolve())

    def _run(self) -> None:
        while not self._closing.is_set():
            self.refresh()
            self._closing.wait(RESOLVE_S)
