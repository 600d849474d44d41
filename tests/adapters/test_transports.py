"""Ranks use the RDMA ports that they can, and say what they use and why not RDMA."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from medha.adapters.transports import RdmaPort, rdma_ports, transports
from medha.config import Network
from medha.errors import SetupError, SpecError

GOOD = RdmaPort("mlx5_0:1", "InfiniBand, 400 Gb/sec (4X NDR)")
DOWN = RdmaPort("mlx5_1:1", "Ethernet, 100 Gb/sec", "is DOWN: connect it")
NEEDED = 1 << 30

Machine = Callable[..., tuple[RdmaPort, ...]]


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> Machine:
    """Files of a machine with one InfiniBand port, and what is found in them."""

    def found(
        state: str = "4: ACTIVE", lock: str = "unlimited", capabilities: int = 0, file: bool = True
    ) -> tuple[RdmaPort, ...]:
        port = tmp_path / "class/infiniband/mlx5_0/ports/1"
        verbs = tmp_path / "class/infiniband_verbs/uverbs3"
        own, files = tmp_path / "proc/self", tmp_path / "dev/infiniband"
        for folder in (port, verbs, own, files):
            folder.mkdir(parents=True, exist_ok=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text("InfiniBand\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        (verbs / "ibdev").write_text("mlx5_0\n")
        (files / "uverbs3").touch() if file else (files / "uverbs3").unlink(missing_ok=True)
        limits = f"Max locked memory         {lock}            {lock}            bytes\n"
        (own / "limits").write_text("Limit     Soft Limit    Hard Limit    Units\n" + limits)
        (own / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\n")
        folders = tmp_path / "class", tmp_path / "dev", tmp_path / "proc"
        return rdma_ports(NEEDED, *folders)

    return found


def test_an_active_port_whose_file_may_be_opened_is_usable(machine: Machine) -> None:
    assert machine() == (GOOD,)


def test_a_port_that_is_not_connected_is_not_usable(machine: Machine) -> None:
    assert machine(state="1: DOWN")[0].fault == "is DOWN: connect it"


def test_a_device_of_the_node_that_the_pod_did_not_request_is_not_usable(machine: Machine) -> None:
    assert "spec.network.resources" in machine(file=False)[0].fault


@pytest.mark.parametrize(
    ("lock", "capabilities", "usable"),
    [
        (str(8 << 20), 0, False),
        (str(8 << 20), 1 << 14, True),
        (str(8 << 20), 1 << 13, False),
        (str(NEEDED), 0, True),
        (str(NEEDED - 1), 0, False),
    ],
)
def test_ranks_must_be_allowed_to_lock_what_they_register(
    machine: Machine, lock: str, capabilities: int, usable: bool
) -> None:
    (port,) = machine(lock=lock, capabilities=capabilities)
    assert (port.fault == "") == usable
    if not usable:
        assert "1024 MiB" in port.fault and "spec.network.ipcLock" in port.fault


def test_this_machine_has_the_ports_that_its_kernel_shows() -> None:
    folder = pathlib.Path("/sys/class/infiniband")
    assert {port.device for port in rdma_ports()} == {path.name for path in folder.glob("*")}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_read_memory_of_gpus_without_nvlink_directly_too(device: str) -> None:
    variables = transports(Network(), "lo", device, ()).environment()
    direct = variables.get("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "")
    assert direct == ("y" if device == "cuda" else "")


def test_pods_use_rdma_where_a_port_is_usable_and_tcp_with_the_others() -> None:
    chosen = transports(Network(shared_memory=False), "eth0", "cuda", (GOOD, DOWN))
    variables = chosen.environment()
    assert variables["UCX_TLS"] == "ib,tcp,self,cuda_copy,cuda_ipc"
    assert variables["UCX_NET_DEVICES"] == "mlx5_0:1,eth0"
    assert variables["NCCL_IB_HCA"] == "=mlx5_0:1" and "NCCL_IB_DISABLE" not in variables
    assert variables["NCCL_SOCKET_IFNAME"] == "eth0"
    assert "NCCL_NET_GDR_LEVEL" not in variables
    assert chosen.sentences() == (
        "ranks of a stage: NCCL over NVLink, PCIe or shared memory",
        "stages of a group: NCCL over RDMA on mlx5_0:1",
        "KVP groups: NIXL over the fastest of RDMA on mlx5_0:1; NVLink or PCIe; TCP on eth0",
    )


@pytest.mark.parametrize(
    ("network", "interface", "ports", "reason"),
    [
        (Network(), "eth0", (DOWN,), "mlx5_1:1 is DOWN"),
        (Network(), "eth0", (), "has no device"),
        (Network(), "lo", (GOOD,), "on this machine"),
        (Network(transport="tcp"), "eth0", (GOOD,), "Tcp"),
        (Network(devices=("mlx5_1",)), "eth0", (GOOD, DOWN), "mlx5_1:1 is DOWN"),
    ],
)
def test_without_a_usable_port_ranks_use_sockets_and_say_why(
    network: Network, interface: str, ports: tuple[RdmaPort, ...], reason: str
) -> None:
    chosen = transports(network, interface, "cpu", ports)
    variables = chosen.environment()
    assert variables["UCX_TLS"] == "tcp,sm,self"
    assert variables["UCX_NET_DEVICES"] == interface
    assert variables["NCCL_IB_DISABLE"] == "1" and "NCCL_IB_HCA" not in variables
    *_, pages, why = chosen.sentences()
    assert pages.endswith(f"shared memory; TCP on {interface}")
    assert why.startswith("no RDMA: ") and reason in why


def test_required_rdma_has_no_way_around_it_and_ends_ranks_that_cannot_use_it() -> None:
    required = Network(transport="rdma", shared_memory=False)
    variables = transports(required, "lo", "cpu", (GOOD,)).environment()
    assert variables["UCX_TLS"] == "ib,self" and variables["UCX_NET_DEVICES"] == "mlx5_0:1"
    for ports, reason in (((DOWN,), "mlx5_1:1 is DOWN: connect it"), ((), "has no device")):
        with pytest.raises(SetupError, match=reason):
            transports(required, "eth0", "cpu", ports)


def test_a_device_that_the_machine_lacks_is_named_with_those_that_it_has() -> None:
    network = Network(devices=("mlx5_0:1", "mlx5_7"))
    with pytest.raises(SpecError, match=r"devices\[1\] is mlx5_7: .*mlx5_0:1, mlx5_1:1"):
        transports(network, "eth0", "cpu", (GOOD, DOWN))


def test_gpus_may_be_kept_from_rdma_devices() -> None:
    chosen = transports(Network(gpu_direct=False), "eth0", "cuda", (GOOD,))
    variables = chosen.environment()
    assert variables["UCX_IB_GPU_DIRECT_RDMA"] == "no"
    assert variables["NCCL_NET_GDR_LEVEL"] == "LOC"
