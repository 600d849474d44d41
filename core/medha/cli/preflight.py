"""What this machine must give before a fleet is started: free ports, GPUs, shared memory, packages.

Each check raises SetupError in one sentence, or returns what it found. Nothing heavy is imported:
GPUs are seen by their device files, packages by their presence.
"""

from __future__ import annotations

import errno
import importlib.util
import pathlib
import shutil
import socket
from collections.abc import Sequence

from medha.adapters.sockets import IPC_PATH_BYTES
from medha.errors import SetupError, SpecError
from medha.spec import MedhaReplica

PROGRAMS = {"medha_router": "medha[router]", "medha_worker": "medha[worker]"}
SHARED_MEMORY = pathlib.Path("/dev/shm")
SHARED_MEMORY_BYTES = 64 << 20


def gpu_count(devices: pathlib.Path = pathlib.Path("/dev")) -> int:
    """NVIDIA GPUs that this machine shows."""
    return len([path for path in devices.glob("nvidia[0-9]*") if path.name[6:].isdigit()])


def check_gpus(resources: Sequence[MedhaReplica], gpus: int) -> None:
    for each in resources:
        if each.spec.device.kind == "Cuda" and not gpus:
            raise SpecError("spec.device.kind", "Cuda", "must be Cpu on a machine without a GPU",
                            "use Cpu, or a machine with an NVIDIA driver")  # fmt: skip


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
    """The API and the probes cannot share a port."""
    if port and port == ops_port:
        raise SetupError(
            f"--ops-port is {ops_port}: must differ from --port; use {port % 65535 + 1}"
        )


def check_socket_path(address: str) -> None:
    """An ipc:// address must be as short as the kernel asks, wherever its folder lies."""
    path = address.removeprefix("ipc://").encode()
    if address.startswith("ipc://") and len(path) > IPC_PATH_BYTES:
        raise SetupError(
            f"--run-dir makes a socket of {len(path)} bytes, {address}: at most {IPC_PATH_BYTES} "
            "are allowed; name a shorter folder"
        )


def free_ports(host: str, count: int) -> tuple[int, ...]:
    """So many different ports that nobody listens on right now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((host, 0))
        return tuple(int(probe.getsockname()[1]) for probe in probes)
    finally:
        for probe in probes:
            probe.close()


def check_programs() -> None:
    """The services must be installed beside the command line."""
    for package, extra in PROGRAMS.items():
        if importlib.util.find_spec(package) is None:
            raise SetupError(f"package {package} is not installed: install {extra}")


def check_shared_memory(folder: pathlib.Path = SHARED_MEMORY) -> None:
    """Ranks on one machine move KV through shared memory."""
    if not folder.is_dir():
        return
    free = shutil.disk_usage(folder).free
    if free < SHARED_MEMORY_BYTES:
        raise SetupError(
            f"{folder} has {free >> 20} MiB free: at least {SHARED_MEMORY_BYTES >> 20} MiB are "
            "needed; enlarge it (docker: --shm-size) or remove what others left there"
        )
