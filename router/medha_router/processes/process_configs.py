"""Configs of a router's processes, made from the config of the whole router. Pure.

process i      listens on the router's port together with the others
controllers    dial fleet_bind's port + i
its parent     reads its ops pages from a Unix socket in `folder`
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from medha.config import RouterConfig, RouterProcess
from medha.errors import SpecError

LAST_PORT = 65535


def process_configs(
    config: RouterConfig, port: int, folder: str, salt_secret: str
) -> tuple[RouterConfig, ...]:
    """Make a config for each process; `port` is the public one. Raises SpecError."""
    host, _, first = config.fleet_bind.rpartition(":")
    if not host.startswith("tcp://") or not first.isdecimal() or int(first) == 0:
        raise SpecError(
            "fleet_bind",
            config.fleet_bind,
            f"must be tcp://HOST:PORT where there are {config.processes} processes",
            f"choose a port that is free with the next {config.processes - 1}",
        )
    ports = tuple(range(int(first), int(first) + config.processes))
    if ports[-1] > LAST_PORT:
        raise SpecError(
            "fleet_bind",
            config.fleet_bind,
            f"must leave room for {config.processes} ports up to {LAST_PORT}",
            f"use port {LAST_PORT - config.processes + 1} or less",
        )
    return tuple(
        msgspec.structs.replace(
            config,
            port=port,
            fleet_bind=f"{host}:{ports[index]}",
            ops_token="",
            processes=1,
            process=RouterProcess(
                index=index,
                fleet_ports=ports,
                ops_socket=f"{folder}/{index}.sock",
                salt_secret=salt_secret,
            ),
        )
        for index in range(config.processes)
    )


def ops_sockets(configs: Iterable[RouterConfig]) -> tuple[str, ...]:
    """Return the Unix socket of each process."""
    return tuple(config.process.ops_socket for config in configs if config.process is not None)
