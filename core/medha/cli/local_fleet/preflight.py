"""Checks of this machine before a fleet starts: ports, GPUs, shared memory, installed packages.

Each check raises SetupError with one sentence. No heavy library is imported: GPUs are counted by
their device files, packages are located without importing them.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import pathlib
import random
import shutil
import socket

from medha.adapters.sockets import IPC_PATH_BYTES
from medha.errors import SetupError, SpecError
from medha.spec import MedhaReplica

PROGRAMS = {"medha_router": "medha[router]", "medha_worker": "medha[worker]"}
SHARED_MEMORY = pathlib.Path("/dev/shm")
SHARED_MEMORY_BYTES = 64 << 20
RUN_ATTEMPTS = 20
FREE_PORTS = range(15_000, 30_000)
"""No system gives these to outgoing connections, which could take a port before it is used."""


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


def check_port(host: str, port: int, flag: str) -> None:
    """Raises SetupError when the port cannot be listened on."""
    if port == 0:
        return
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
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


def check_socket_path(address: str) -> None:
    """Raises SetupError if the path of an ipc:// address exceeds the kernel's limit."""
    path = address.removeprefix("ipc://").encode()
    if address.startswith("ipc://") and len(path) > IPC_PATH_BYTES:
        raise SetupError(
            f"--run-dir makes a socket of {len(path)} bytes, {address}: at most {IPC_PATH_BYTES} "
            "are allowed; name a shorter folder"
        )


def free_ports(host: str, count: int) -> tuple[int, ...]:
    """Distinct ports of FREE_PORTS that are free now. Raises SetupError."""
    ports: list[int] = []
    with contextlib.ExitStack() as probes:
        for port in random.SystemRandom().sample(FREE_PORTS, len(FREE_PORTS)):
            if len(ports) == count:
                break
            probe = probes.enter_context(socket.socket())
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                ports.append(port)
    if len(ports) < count:
        raise SetupError(f"{len(ports)} of {count} ports of {host} are free: free some")
    return tuple(ports)


def free_port_run(host: str, count: int) -> int:
    """First of `count` ports that follow each other and are free now. Raises SetupError."""
    for first in (free_ports(host, 1)[0] for _ in range(RUN_ATTEMPTS)):
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError, OverflowError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind((host, port))
            return first
    raise SetupError(f"no {count} ports of {host} that follow each other are free: free some")


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
