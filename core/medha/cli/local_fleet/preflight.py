"""Checks of this machine before a fleet starts: ports, GPUs, shared memory, installed packages.

Each check raises SetupError with one sentence. No heavy library is imported: GPUs are counted by
their device files, packages are located without importing them.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import importlib.util
import ipaddress
import os
import pathlib
import random
import shutil
import socket
from collections.abc import Iterable

from medha.adapters.addresses import family_of
from medha.adapters.sockets import IPC_PATH_BYTES
from medha.errors import SetupError, SpecError
from medha.spec import MedhaReplica

PROGRAMS = {"medha_router": "medha[router]", "medha_worker": "medha[worker]"}
SHARED_MEMORY = pathlib.Path("/dev/shm")
SHARED_MEMORY_BYTES = 64 << 20
RUN_ATTEMPTS = 20
FREE_PORTS = range(15_000, 30_000)
"""No system gives these to outgoing connections, which could take a port before it is used."""
MOST_RESERVED = 512
"""More than any fleet has; processes of tests choose ports for as long as they run."""
_reserved: collections.deque[int] = collections.deque()
"""Descriptors of sockets that are bound and do not listen."""


def gpu_count(devices: pathlib.Path = pathlib.Path("/dev")) -> int:
    """Number of NVIDIA GPUs of this machine."""
    return len([path for path in devices.glob("nvidia[0-9]*") if path.name[6:].isdigit()])


def check_gpus(resource: MedhaReplica, gpus: int) -> None:
    if resource.spec.device.kind == "Cuda" and not gpus:
        raise SpecError(
            "spec.device.kind",
            "Cuda",
            "must be Cpu on a machine without a GPU",
            "use Cpu, or a machine with an NVIDIA driver",
        )


def check_host(host: str) -> None:
    """Raises SpecError if `host` is no IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise SpecError(
            "--host",
            host,
            "must be an IP address",
            "use 127.0.0.1, 0.0.0.0 for all IPv4 addresses, or :: for IPv6 too",
        ) from None


def check_port(host: str, port: int, flag: str) -> None:
    """Reserve a port. Raises SetupError when it cannot be listened on."""
    if port == 0:
        return
    try:
        with socket.socket(family_of(host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            _reserve([probe])
    except OSError as error:
        why = "in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise SetupError(
            f"port {port} of {host} is {why}: free it or choose one with {flag}"
        ) from None


def check_apart(port: int, ops_port: int) -> None:
    """Raises SetupError if API and probes would share a port."""
    if port and port == ops_port:
        raise SetupError(
            f"--ops-port is {ops_port}: must differ from --port; use {port % 65535 + 1}"
        )


def check_socket_path(address: str, folder: str = "--run-dir") -> None:
    """Raises SetupError if the path of an ipc:// address exceeds the kernel's limit.

    `folder`: what the user chose that it lies in.
    """
    path = address.removeprefix("ipc://").encode()
    if address.startswith("ipc://") and len(path) > IPC_PATH_BYTES:
        raise SetupError(
            f"{folder} makes a socket of {len(path)} bytes, {address}: at most {IPC_PATH_BYTES} "
            "are allowed; name a shorter folder"
        )


def free_ports(host: str, count: int) -> tuple[int, ...]:
    """Choose distinct free ports of FREE_PORTS and reserve them. Raises SetupError."""
    dice, tried = random.SystemRandom(), set[int]()
    with contextlib.ExitStack() as probes:
        chosen: dict[int, socket.socket] = {}
        while len(chosen) < count and len(tried) < len(FREE_PORTS):
            port = dice.choice(FREE_PORTS)
            if port in tried:
                continue
            tried.add(port)
            try:
                chosen[port] = _bound(host, port, probes)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        if len(chosen) < count:
            raise SetupError(f"{len(chosen)} of {count} ports of {host} are free: free some")
        _reserve(chosen.values())
    return tuple(chosen)


def free_port_run(host: str, count: int) -> int:
    """Choose `count` free ports that follow each other, reserve them and return the first. Raises
    SetupError."""
    for _ in range(RUN_ATTEMPTS):
        first = random.SystemRandom().choice(FREE_PORTS)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError, OverflowError):
            _reserve([_bound(host, port, probes) for port in range(first, first + count)])
            return first
    raise SetupError(f"no {count} ports of {host} that follow each other are free: free some")


def _bound(host: str, port: int, probes: contextlib.ExitStack) -> socket.socket:
    probe = probes.enter_context(socket.socket())
    probe.bind((host, port))
    return probe


def _reserve(probes: Iterable[socket.socket]) -> None:
    """Keep the last MOST_RESERVED ports from the probes of all programs until this one ends.

    A server that sets SO_REUSEADDR may listen there, as sockets may share a port while one of them
    does not listen. A second fleet with the same --port is refused once the first one listens.
    """
    for probe in probes:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _reserved.append(probe.detach())
    while len(_reserved) > MOST_RESERVED:
        os.close(_reserved.popleft())


def check_programs() -> None:
    """Raises SetupError unless router and worker are installed in this environment."""
    for package, extra in PROGRAMS.items():
        if importlib.util.find_spec(package) is None:
            raise SetupError(f"package {package} is not installed: install {extra}")


def check_shared_memory(folder: pathlib.Path = SHARED_MEMORY) -> None:
    """Raises SetupError if /dev/shm is too full: ranks on one machine move KV through it."""
    if not folder.is_dir():
        return
    free = shutil.disk_usage(folder).free
    if free < SHARED_MEMORY_BYTES:
        raise SetupError(
            f"{folder} has {free >> 20} MiB free: at least {SHARED_MEMORY_BYTES >> 20} MiB are "
            "needed; enlarge it (docker: --shm-size) or remove files left there"
        )
