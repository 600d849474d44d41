"""From resources to configs: which processes run on this machine, and what each is told.

Pure: it opens nothing and looks at nothing. `Place` holds what the machine gives (ports, folders,
keys), the resources say the rest; the result is the configs that the processes decode.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from medha.config import Curve, RouterConfig, RouterModel, WorkerConfig
from medha.errors import SetupError, SpecError
from medha.rendering import Site, worker_config
from medha.spec import MedhaReplica
from medha.topology import Coordinate, Topology


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine gives the fleet.

    `fleet_address` is where controllers dial the router; `controller_ports` are free ports for the
    controllers' ops servers, one per replica; `checkpoints` maps a resource's name to its folder.
    """

    run_dir: str
    host: str
    port: int
    ops_port: int
    fleet_address: str
    controller_ports: tuple[int, ...]
    checkpoints: Mapping[str, str]
    router_curve: Curve | None = None
    controller_curve: Curve | None = None
    gpus: int = 0
    log_level: str = "info"
    decision_log: bool = False
    dummy_weights: bool = False


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's place in its replica; `gpu` None: it computes on the CPU."""

    at: Coordinate
    gpu: int | None = None


class ReplicaPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: its processes' config, and its ranks by KVP group up to the largest."""

    config: WorkerConfig
    groups: tuple[tuple[RankPlan, ...], ...]

    @property
    def name(self) -> str:
        return self.config.replica


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    router: RouterConfig
    replicas: tuple[ReplicaPlan, ...]


def plan_fleet(resources: Sequence[MedhaReplica], place: Place) -> FleetPlan:
    """Raises SpecError when resources contradict each other, SetupError when GPUs are too few."""
    copies = [
        (each, f"{each.name}-{index}") for each in resources for index in range(each.spec.replicas)
    ]
    if not copies:
        raise SpecError("spec.replicas", 0, "must be at least 1 to start a fleet", "use 1")
    gpus = iter(range(place.gpus))
    replicas = [
        _replica(each, name, port, place, gpus)
        for (each, name), port in zip(copies, place.controller_ports, strict=True)
    ]
    return FleetPlan(router=_router(resources, place), replicas=tuple(replicas))


def replicas_of(resources: Sequence[MedhaReplica]) -> int:
    """How many replicas the resources ask for together."""
    return sum(each.spec.replicas for each in resources)


def _router(resources: Sequence[MedhaReplica], place: Place) -> RouterConfig:
    models: dict[str, RouterModel] = {}
    for each in resources:
        model = each.spec.model
        here = RouterModel(
            name=model.name, max_context_tokens=model.max_context_tokens, classes=each.spec.classes
        )
        known = models.setdefault(model.name, here)
        if known != here:
            raise SpecError(
                f"spec of {each.name}", f"another {model.name}",
                "must have the same maxContextTokens and slo as other resources of that model",
                "make them equal or serve it under another name",
            )  # fmt: skip
    return RouterConfig(
        host=place.host,
        port=place.port,
        ops_port=place.ops_port,
        fleet_bind=place.fleet_address,
        models=tuple(models.values()),
        curve=place.router_curve,
        run_dir=place.run_dir,
        log_level=place.log_level,
    )


def _replica(
    of: MedhaReplica, name: str, ops_port: int, place: Place, gpus: Iterator[int]
) -> ReplicaPlan:
    site = Site(
        checkpoint=place.checkpoints[of.name],
        routers=(place.fleet_address,),
        curve=place.controller_curve,
        rank_bind=f"ipc://{place.run_dir}/{name}.sock",
        ops_port=ops_port,
        run_dir=place.run_dir,
        decision_log=f"{place.run_dir}/{name}.decisions.jsonl" if place.decision_log else "",
        dummy_weights=place.dummy_weights,
        log_level=place.log_level,
    )
    cuda = of.spec.device.kind == "Cuda"
    return ReplicaPlan(
        config=worker_config(of, name, site),
        groups=_ranks(name, of.spec.topology, cuda, place, gpus),
    )


def _ranks(
    name: str, topology: Topology, cuda: bool, place: Place, gpus: Iterator[int]
) -> tuple[tuple[RankPlan, ...], ...]:
    """Ranks of every group that the machine has room for, at least of `kvp_min`."""
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
            f"replica {name} needs {needed} GPUs and this machine has {place.gpus} in all: lower "
            "spec.replicas, tp, spp or kvp.min"
        )
    return tuple(groups)
