"""Which pod of which replica this is: read from the environment and from the shared config.

    MEDHA_REPLICA          must name the replica that the config is of, if it is set
    MEDHA_KVP_GROUP, MEDHA_SPP_STAGE, MEDHA_TP
    MEDHA_LEADER_ADDRESS   DNS name of the pod of group 0, stage 0, which holds the controller
    MEDHA_POD_IP           this pod's own address; without it the one that its host name stands for
    MEDHA_INTERFACE        for data between ranks; without it the one that holds the address
    MEDHA_GRACE_S          how long what runs may go on after SIGTERM
    MEDHA_DECISION_LOG     a file for every decision of the controller; without it none is written

The config is one for all pods of the replica; `of_this_pod` puts this pod's own addresses into it,
so that every port is bound to the pod's address and nothing else.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable, Mapping

import msgspec

from medha.config import CONTROLLER_OPS_PORT, RANK_PORT, STORE_PORT, WorkerConfig
from medha.errors import SetupError, SpecError
from medha.topology import Coordinate

GRACE_S = 55.0
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """This pod's place in its replica, and its addresses."""

    group: int
    stage: int
    leader: str
    address: str
    interface: str
    grace_s: float = GRACE_S
    decision_log: str = ""

    @property
    def leads(self) -> bool:
        """The controller runs here."""
        return self.group == self.stage == 0

    @property
    def controller_url(self) -> str:
        """The controller's ops port."""
        return f"http://{self.address if self.leads else self.leader}:{CONTROLLER_OPS_PORT}"

    def ranks(self, config: WorkerConfig) -> tuple[Coordinate, ...]:
        """The ranks of this pod: one per shard."""
        return tuple(
            Coordinate(self.group, self.stage, shard) for shard in range(config.topology.tp)
        )

    def of_this_pod(self, config: WorkerConfig, run_dir: str) -> WorkerConfig:
        """The replica's config with this pod's addresses, and `run_dir` for what it writes."""
        host = self.address if self.leads else self.leader
        return msgspec.structs.replace(
            config,
            rank_bind=f"tcp://{host}:{RANK_PORT}",
            store_bind=f"{self.address}:{STORE_PORT}",
            interface=self.interface,
            ops_host=self.address,
            ops_port=CONTROLLER_OPS_PORT,
            run_dir=run_dir,
            decision_log=self.decision_log or config.decision_log,
        )


def read_place(
    environ: Mapping[str, str],
    config: WorkerConfig,
    own_address: Callable[[], str] | None = None,
    interface_of: Callable[[str], str] | None = None,
) -> Place:
    """Raises SpecError for a variable that is missing, or that does not fit the config."""
    topology = config.topology
    name = environ.get("MEDHA_REPLICA", config.replica)
    if name != config.replica:
        raise SpecError(
            "MEDHA_REPLICA", name, f"must be {config.replica}, which the config is of",
            "mount that replica's config",
        )  # fmt: skip
    group = _number(environ, "MEDHA_KVP_GROUP", 0, topology.kvp_max - 1)
    stage = _number(environ, "MEDHA_SPP_STAGE", 0, topology.spp - 1)
    _number(environ, "MEDHA_TP", topology.tp, topology.tp)
    leader = environ.get("MEDHA_LEADER_ADDRESS", "")
    if not leader and (group or stage):
        raise SpecError(
            "MEDHA_LEADER_ADDRESS", "", "must be the address of the replica's leader pod",
            "set it in the pod's environment",
        )  # fmt: skip
    address = environ.get("MEDHA_POD_IP") or (own_address or address_of_this_host)()
    _check_address(address)
    interface = environ.get("MEDHA_INTERFACE") or (interface_of or interface_with)(address)
    return Place(
        group=group, stage=stage, leader=leader, address=address, interface=interface,
        grace_s=_seconds(environ, "MEDHA_GRACE_S", GRACE_S),
        decision_log=environ.get("MEDHA_DECISION_LOG", ""),
    )  # fmt: skip


def address_of_this_host() -> str:
    """The IPv4 address that the host's own name stands for, as kubelet writes into /etc/hosts."""
    name = socket.gethostname()
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    except OSError as error:
        raise SpecError(
            "MEDHA_POD_IP", "", f"must be set where the host name {name} has no address ({error})",
            "set it from status.podIP",
        ) from None  # fmt: skip


def interface_with(address: str) -> str:
    """The network interface that holds an IPv4 address of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:_NAME_BYTES])
            try:
                told = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(told[20:24]) == address:
                return name
    raise SetupError(
        f"no interface of this machine holds {address} as its first address: set MEDHA_POD_IP to "
        "the pod's own address, or name the interface in MEDHA_INTERFACE"
    )


def _check_address(address: str) -> None:
    try:
        ipaddress.IPv4Address(address)
    except ValueError:
        raise SpecError(
            "MEDHA_POD_IP", address, "must be an IPv4 address of this pod",
            "set it from status.podIP",
        ) from None  # fmt: skip


def _number(environ: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = environ.get(name, "")
    if not text.isdecimal() or not least <= int(text) <= most:
        expected = str(least) if least == most else f"an integer from {least} to {most}"
        raise SpecError(
            name, text, f"must be {expected}, as the config has it",
            "set it in the pod's environment",
        )  # fmt: skip
    return int(text)


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    try:
        found = float(text) if text else default
    except ValueError:
        found = -1.0
    if not 0.0 <= found < float("inf"):
        raise SpecError(name, text, "must be seconds, 0 or more", "use a number such as 55")
    return found
