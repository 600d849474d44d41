"""Plan of a local fleet: the processes that run on this machine, and the config of each.

Pure: opens no file and reads no machine state. Input: the resources, and `HostSettings` with the
ports, folders and keys of this machine. Output: the configs that the processes decode.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from medha.config import AdapterFolder, Curve, RouterConfig, RouterModel, WorkerConfig
from medha.errors import SetupError, SpecError
from medha.rendering import Site, worker_config
from medha.spec import MedhaReplica
from medha.topology import Coordinate, Topology


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Ports, folders, keys and GPUs of this machine that the fleet uses.

    `public_address` is that of the API, `address` that of all else; `fleet_address` is the router's
    address for controllers; `controller_ports` are free ports for
    the controllers' ops servers, one per replica; `checkpoints` maps a resource's name to its
    folder; `router_settings` are further fields of the RouterConfig.
    """

    run_dir: str
    address: str
    public_address: str
    port: int
    ops_port: int
    fleet_address: str
    router_processes: int = 1
    controller_ports: tuple[int, ...]
    checkpoints: Mapping[str, str]
    router_curve: Curve | None = None
    controller_curve: Curve | None = None
    ops_token: str = ""
    gpus: int = 0
    log_level: str = "info"
    decision_log: bool = False
    dummy_weights: bool = False
    profile: str = ""
    router_settings: Mapping[str, Any] = {}


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Coordinate of a rank, and its GPU; None: the rank computes on the CPU."""

    at: Coordinate
    gpu: int | None = None


class ReplicaPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Config of a replica's processes, and its ranks by KVP group."""

    config: WorkerConfig
    groups: tuple[tuple[RankPlan, ...], ...]

    @property
    def name(self) -> str:
        return self.config.replica


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    router: RouterConfig
    replicas: tuple[ReplicaPlan, ...]


def plan_fleet(resources: Sequence[MedhaReplica], host: HostSettings) -> FleetPlan:
    """Raises SpecError when resources contradict each other, SetupError when GPUs are too few."""
    copies = [
        (resource, f"{resource.name}-{index}")
        for resource in resources
        for index in range(resource.spec.replicas)
    ]
    gpus = iter(range(host.gpus))
    replicas = [
        _replica(resource, name, port, host, gpus)
        for (resource, name), port in zip(copies, host.controller_ports, strict=True)
    ]
    return FleetPlan(router=_router(resources, host), replicas=tuple(replicas))


def replica_count(resources: Sequence[MedhaReplica]) -> int:
    """Total replicas of all resources. Raises SpecError if it is 0."""
    count = sum(resource.spec.replicas for resource in resources)
    if not count:
        raise SpecError("spec.replicas", 0, "must be at least 1 to start a fleet", "use 1")
    return count


def router_models(resources: Sequence[MedhaReplica]) -> tuple[RouterModel, ...]:
    """Return the router's models. Raises SpecError when resources of one contradict each other."""
    models: dict[str, RouterModel] = {}
    for resource in resources:
        model = resource.spec.model
        described = RouterModel(
            name=model.name,
            max_context_tokens=model.max_context_tokens,
            classes=resource.spec.classes,
            adapters=tuple(adapter.name for adapter in resource.spec.adapters),
        )
        known = models.setdefault(model.name, described)
        if known != described:
            raise SpecError(
                f"spec of {resource.name}",
                f"another {model.name}",
                "must have the same maxContextTokens, adapters and slo as other resources of that"
                " model",
                "make them equal or serve it under another name",
            )
    return tuple(models.values())


def _router(resources: Sequence[MedhaReplica], host: HostSettings) -> RouterConfig:
    config = RouterConfig(
        host=host.public_address,
        ops_host=host.address,
        port=host.port,
        ops_port=host.ops_port,
        ops_token=host.ops_token,
        fleet_bind=host.fleet_address,
        processes=host.router_processes,
        models=router_models(resources),
        curve=host.router_curve,
        run_dir=host.run_dir,
        log_level=host.log_level,
    )
    return msgspec.structs.replace(config, **host.router_settings)


def _replica(
    resource: MedhaReplica, name: str, ops_port: int, host: HostSettings, gpus: Iterator[int]
) -> ReplicaPlan:
    site = Site(
        checkpoint=host.checkpoints[resource.name],
        adapters=tuple(
            AdapterFolder(name=adapter.name, folder=adapter.source.host_path.path)
            for adapter in resource.spec.adapters
            if adapter.source.host_path is not None  # checked
        ),
        routers=(host.fleet_address,),
        curve=host.controller_curve,
        rank_bind=f"ipc://{host.run_dir}/{name}.sock",
        ops_port=ops_port,
        ops_token=host.ops_token,
        run_dir=host.run_dir,
        decision_log=f"{host.run_dir}/{name}.decisions.jsonl" if host.decision_log else "",
        dummy_weights=host.dummy_weights,
        profile=host.profile,
        log_level=host.log_level,
    )
    cuda = resource.spec.device.kind == "Cuda"
    return ReplicaPlan(
        config=worker_config(resource, name, site),
        groups=_ranks(name, resource.spec.topology, cuda, host, gpus),
    )


def _ranks(
    name: str, topology: Topology, cuda: bool, host: HostSettings, gpus: Iterator[int]
) -> tuple[tuple[RankPlan, ...], ...]:
    """Ranks of every group that the machine has GPUs for; at least `kvp_min` groups."""
    free: Iterator[int | None] = gpus if cuda else itertools.repeat(None)
    groups = []
    for group in range(topology.kvp_max):
        taken = list(itertools.islice(free, topology.ranks_per_group))
        if len(taken) < topology.ranks_per_group:
            break
        places = zip(topology.group_ranks(group), taken, strict=True)
        groups.append(tuple(RankPlan(at=at, gpu=gpu) for at, gpu in places))
    if len(groups) < topology.kvp_min:
        needed = topology.kvp_min * topology.ranks_per_group
        raise SetupError(
            f"replica {name} needs {needed} GPUs and this machine has {host.gpus} in all: lower "
            "spec.replicas, tp, spp or kvp.min"
        )
    return tuple(groups)
