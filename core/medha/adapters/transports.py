"""Transports between ranks: usable RDMA ports, and the settings of UCX, NCCL and NIXL.

RDMA ports are those of /sys/class/infiniband, InfiniBand and RoCE alike. A rank can use a port that
is active, whose device file it may open, if it may also lock the memory that it registers.
"""

from __future__ import annotations

import os
import pathlib
import resource
from collections.abc import Iterable, Iterator

import msgspec

from medha.config import Network
from medha.errors import SetupError, SpecError

SYS, DEV, PROC = pathlib.Path("/sys/class"), pathlib.Path("/dev"), pathlib.Path("/proc")
LOOPBACK = "lo"
STAGING_BYTES = 64 << 20
"""Memory of the host that UCX locks for itself, pages of a GPU apart."""
_IPC_LOCK = 14


class RdmaPort(msgspec.Struct, frozen=True):
    """A port of an RDMA device, such as `mlx5_0:1`. `fault`: why ranks cannot use it, if so."""

    name: str
    link: str
    fault: str = ""

    @property
    def device(self) -> str:
        return self.name.partition(":")[0]


class Transports(msgspec.Struct, frozen=True, kw_only=True):
    """Transports between ranks. `rdma`: names of the ports in use; `why_not`: the reason if none
    is."""

    interface: str
    device: str
    shared_memory: bool
    gpu_direct: bool
    tcp: bool = True
    rdma: tuple[str, ...] = ()
    why_not: str = ""

    def environment(self) -> dict[str, str]:
        """Return variables for UCX, NIXL and NCCL, which read them when they are loaded."""
        cuda = self.device == "cuda"
        names = {
            "ib": bool(self.rdma),
            "tcp": self.tcp,
            "sm": self.shared_memory,
            "self": True,
            "cuda_copy": cuda,
            "cuda_ipc": cuda,
        }
        devices = (*self.rdma, *((self.interface,) if self.tcp else ()))
        variables = {
            "UCX_TLS": ",".join(name for name, used in names.items() if used),
            "UCX_NET_DEVICES": ",".join(devices),
            # Reads from a machine that vanished end, before the controller gives up their reader
            # (60 s); shorter breaks of the network are waited for.
            "UCX_TCP_USER_TIMEOUT": "40s",
            "UCX_LOG_LEVEL": "error",
            "NIXL_LOG_LEVEL": "ERROR",
            "NCCL_SOCKET_IFNAME": self.interface,
            # The thread that waits for the device reports a silent peer; NCCL must not end the
            # process.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCH_NCCL_ENABLE_MONITORING": "0",
        }
        if cuda:
            # Without NVLink UCX would read another process's GPU memory through sockets.
            variables["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "y"
        if self.rdma:
            variables["NCCL_IB_HCA"] = "=" + ",".join(self.rdma)
        else:
            variables["NCCL_IB_DISABLE"] = "1"
        if self.rdma and not self.gpu_direct:
            variables |= {"UCX_IB_GPU_DIRECT_RDMA": "no", "NCCL_NET_GDR_LEVEL": "LOC"}
        return variables

    def sentences(self) -> tuple[str, ...]:
        """Describe what each pair of ranks uses, and why it is not RDMA."""
        sockets = f"TCP on {self.interface}"
        cuda = self.device == "cuda"
        near = "NVLink, PCIe or shared memory" if cuda else sockets
        fast = f"RDMA on {', '.join(self.rdma)}"
        apart = fast if self.rdma else sockets
        pages = [fast] if self.rdma else []
        pages += ["NVLink or PCIe"] if cuda else []
        pages += ["shared memory"] if self.shared_memory else []
        pages += [sockets] if self.tcp else []
        library = "NCCL" if cuda else "gloo"
        lines = (
            f"ranks of a stage: {library} over {near}",
            f"stages of a group: {library} over {apart if cuda else sockets}",
            f"KVP groups: NIXL over the fastest of {'; '.join(pages)}",
        )
        return lines if self.rdma else (*lines, f"no RDMA: {self.why_not}")


def transports(
    network: Network, interface: str, device: str, ports: Iterable[RdmaPort]
) -> Transports:
    """Choose the transports. `device`: `cpu` or `cuda`. Raises SpecError for a device that the
    machine lacks, SetupError if RDMA is required and unusable."""
    ports = tuple(ports)
    chosen = tuple(_chosen(network.devices, ports))
    usable = tuple(port.name for port in chosen if not port.fault)
    why_not = ""
    if network.transport == "tcp":
        why_not = "spec.network.transport is Tcp"
    elif network.transport == "auto" and interface == LOOPBACK:
        why_not = "all ranks are on this machine"
    elif not usable:
        faults = "; ".join(f"{port.name} {port.fault}" for port in chosen)
        why_not = faults or f"{SYS / 'infiniband'} has no device: request one of the cluster"
    if why_not and network.transport == "rdma":
        raise SetupError(f"spec.network.transport is Rdma, and no device can be used: {why_not}")
    return Transports(
        interface=interface,
        device=device,
        shared_memory=network.shared_memory,
        gpu_direct=network.gpu_direct,
        tcp=network.transport != "rdma",
        rdma=() if why_not else usable,
        why_not=why_not,
    )


def rdma_ports(
    lock_bytes: int = STAGING_BYTES,
    sys: pathlib.Path = SYS,
    dev: pathlib.Path = DEV,
    proc: pathlib.Path = PROC,
) -> tuple[RdmaPort, ...]:
    """Find the machine's RDMA ports. `lock_bytes`: memory that a rank registers."""
    locked = _lock_fault(lock_bytes, proc)
    files = {
        (folder / "ibdev").read_text().strip(): dev / "infiniband" / folder.name
        for folder in sorted((sys / "infiniband_verbs").glob("uverbs*"))
    }
    ports = []
    for folder in sorted((sys / "infiniband").glob("*/ports/*")):
        device = folder.parent.parent.name
        state = (folder / "state").read_text().split(":")[-1].strip()
        link = f"{_text(folder / 'link_layer')}, {_text(folder / 'rate')}"
        fault = "" if state == "ACTIVE" else f"is {state}: connect it"
        fault = fault or _file_fault(files.get(device)) or locked
        ports.append(RdmaPort(f"{device}:{folder.name}", link, fault))
    return tuple(ports)


def raise_lock_limit() -> None:
    """Let this process lock as much memory as it is allowed to."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))


def _chosen(names: tuple[str, ...], ports: tuple[RdmaPort, ...]) -> Iterator[RdmaPort]:
    """Yield the named ports, a device's name standing for all its ports; without names, all."""
    if not names:
        yield from ports
    for index, name in enumerate(names):
        named = [port for port in ports if name in (port.name, port.device)]
        if not named:
            raise SpecError(
                f"spec.network.devices[{index}]",
                name,
                f"must be one of {', '.join(port.name for port in ports) or 'no RDMA devices'}",
                "name a device that the pod has, or leave the list out",
            )
        yield from named


def _file_fault(path: pathlib.Path | None) -> str:
    if path is None or not path.exists():
        return "has no device file here: request its resource in spec.network.resources"
    if not os.access(path, os.R_OK | os.W_OK):
        return f"may not be opened ({path}): make its file readable and writable for this user"
    return ""


def _lock_fault(wanted: int, proc: pathlib.Path) -> str:
    limits = (proc / "self/limits").read_text().splitlines()
    _, hard = next(line for line in limits if "locked memory" in line).split()[3:5]
    status = (proc / "self/status").read_text().splitlines()
    capabilities = int(next(line for line in status if line.startswith("CapEff")).split()[1], 16)
    if hard == "unlimited" or int(hard) >= wanted or capabilities >> _IPC_LOCK & 1:
        return ""
    return (
        f"needs {wanted >> 20} MiB of locked memory and {int(hard) >> 10} KiB are allowed: raise "
        "LimitMEMLOCK of the container runtime, or set spec.network.ipcLock"
    )


def _text(path: pathlib.Path) -> str:
    return path.read_text().strip() if path.exists() else "unknown"
