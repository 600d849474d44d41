"""Identity of this pod: replica, KVP group, stage and addresses, read from the environment.

    MEDHA_REPLICA          if set, must name the replica of the config
    MEDHA_KVP_GROUP, MEDHA_SPP_STAGE, MEDHA_TP
    MEDHA_LEADER_ADDRESS   DNS name of the leader pod (group 0, stage 0), which runs the controller
    MEDHA_POD_IP           this pod's address; default: the address of the host name
    MEDHA_INTERFACE        network interface between ranks; default: the one with the address
    MEDHA_GRACE_S          seconds that running requests may take after SIGTERM
    MEDHA_DECISION_LOG     file for the decision log of the controller; default: none

All pods of the replica share one config file. `worker_config` fills in this pod's addresses, so
that every port binds to the pod's address only.
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


class PodIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Position of this pod in its replica, and its addresses."""

    group: int
    stage: int
    leader: str
    address: str
    interface: str
    grace_s: float = GRACE_S
    decision_log: str = ""

    @property
    def leads(self) -> bool:
        """True in the leader pod, which runs the controller."""
        return self.group == self.stage == 0

    @property
    def controller_url(self) -> str:
        """Base URL of the controller's ops port."""
        return f"http://{self.address if self.leads else self.leader}:{CONTROLLER_OPS_PORT}"

    def ranks(self, config: WorkerConfig) -> tuple[Coordinate, ...]:
        """The ranks of this pod: one per shard."""
        return tuple(
            Coordinate(self.group, self.stage, shard) for shard in range(config.topology.tp)
        )

    def worker_config(self, shared: WorkerConfig, run_dir: str) -> WorkerConfig:
        """The shared config with this pod's addresses and run directory filled in."""
        host = self.address if self.leads else self.leader
        return msgspec.structs.replace(
            shared,
            rank_bind=f"tcp://{host}:{RANK_PORT}",
            store_bind=f"{self.address}:{STORE_PORT}",
            interface=self.interface,
            network=msgspec.structs.replace(shared.network, shared_memory=False),
            ops_host=self.address,
            ops_port=CONTROLLER_OPS_PORT,
            run_dir=run_dir,
            decision_log=self.decision_log or shared.decision_log,
        )


def read_pod_identity(
    environ: Mapping[str, str],
    config: WorkerConfig,
    own_address: Callable[[], str] | None = None,
    interface_of: Callable[[str], str] | None = None,
) -> PodIdentity:
    """Raises SpecError for a variable that is missing, or that does not fit the config."""
    topology = config.topology
    name = environ.get("MEDHA_REPLICA", config.replica)
    if name != config.replica:
        raise SpecError(
            "MEDHA_REPLICA",
            name,
            f"must be {config.replica}, the replica of the config",
            "mount that replica's config",
        )
    group = _number(environ, "MEDHA_KVP_GROUP", 0, topology.kvp_max - 1)
    stage = _number(environ, "MEDHA_SPP_STAGE", 0, topology.spp - 1)
    _number(environ, "MEDHA_TP", topology.tp, topology.tp)
    leader = environ.get("MEDHA_LEADER_ADDRESS", "")
    if not leader and (group or stage):
        raise SpecError(
            "MEDHA_LEADER_ADDRESS",
            "",
            "must be the address of the replica's leader pod",
            "set it in the pod's environment",
        )
    address = environ.get("MEDHA_POD_IP") or (own_address or address_of_this_host)()
    _check_address(address)
    interface = environ.get("MEDHA_INTERFACE") or (interface_of or interface_with)(address)
    return PodIdentity(
        group=group,
        stage=stage,
        leader=leader,
        address=address,
        interface=interface,
        grace_s=_seconds(environ, "MEDHA_GRACE_S", GRACE_S),
        decision_log=environ.get("MEDHA_DECISION_LOG", ""),
    )


def address_of_this_host() -> str:
    """IPv4 address of the host name, as the kubelet writes it into /etc/hosts."""
    name = socket.gethostname()
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    except OSError as error:
        raise SpecError(
            "MEDHA_POD_IP",
            "",
            f"must be set where the host name {name} has no address ({error})",
            "set it from status.podIP",
        ) from None


def interface_with(address: str) -> str:
    """The network interface that holds an IPv4 address of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_NAME_BYTES])
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # no IPv4 address
            if socket.inet_ntoa(reply[20:24]) == address:
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
            "MEDHA_POD_IP",
            address,
            "must be an IPv4 address of this pod",
            "set it from status.podIP",
        ) from None


def _number(environ: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = environ.get(name, "")
    if not text.isdecimal() or not least <= int(text) <= most:
        expected = str(least) if least == most else f"an integer from {least} to {most}"
        raise SpecError(
            name,
            text,
            f"must be {expected}, as the config has it",
            "set it in the pod's environment",
        )
    return int(text)


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise SpecError(name, text, "must be seconds, 0 or more", "use a number such as 55")
    return value
