"""Command line and environment of each process of a fleet."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterable

from medha.cli.local_fleet.child_process import ChildProcess, Launch
from medha.cli.local_fleet.fleet_plan import FleetPlan, RankPlan, ReplicaPlan
from medha.cli.local_fleet.run_dir import RunDir
from medha.cli.local_fleet.supervisor import ReplicaUnits, Supervisor, Unit
from medha.config import WorkerConfig


def fleet_supervisor(
    plan: FleetPlan, run_dir: RunDir, start: Callable[[Launch], ChildProcess]
) -> Supervisor:
    """The supervisor of a planned fleet; starts nothing yet."""
    router = Unit("router", lambda _: [router_launch(run_dir)])
    replicas = tuple(_replica(replica, run_dir) for replica in plan.replicas)
    return Supervisor((router,), replicas, start)


def router_launch(run_dir: RunDir) -> Launch:
    argv = (sys.executable, "-m", "medha_router", "--config", str(run_dir.router_config))
    return Launch(name="router", argv=argv)


def controller_launch(replica: str, config: pathlib.Path) -> Launch:
    argv = (sys.executable, "-m", "medha_worker.controller", "--config", str(config))
    env = {"MEDHA_REPLICA": replica, "OMP_NUM_THREADS": "1"}
    return Launch(name=f"{replica}-controller", argv=argv, env=env)


def rank_launch(
    config: WorkerConfig,
    rank: RankPlan,
    config_file: pathlib.Path,
    generation: int,
    ready_file: pathlib.Path | None = None,
) -> Launch:
    """Launch of a rank. `config_file` holds `config`.

    The rank creates `ready_file` once its weights are loaded and its links are open. Its standby
    has imported the rank's libraries.
    """
    at = rank.at
    ready = () if ready_file is None else ("--ready-file", str(ready_file))
    program = (sys.executable, "-m", "medha_worker.low_priority_start")
    arguments = (
        "--config",
        str(config_file),
        "--group",
        str(at.group),
        "--stage",
        str(at.stage),
        "--shard",
        str(at.shard),
        *ready,
    )
    env = {
        "MEDHA_REPLICA": config.replica,
        "MEDHA_KVP_GROUP": str(at.group),
        "MEDHA_SPP_STAGE": str(at.stage),
        "MEDHA_TP_SHARD": str(at.shard),
        "MEDHA_GENERATION": str(generation),
        "OMP_NUM_THREADS": str(config.threads_per_rank),
    }
    if rank.gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(rank.gpu)
    standby = (*program, "--standby", *arguments) if config.standby_ranks else ()
    return Launch(
        name=f"{config.replica}-{at}", argv=(*program, *arguments), env=env, standby=standby
    )


def _replica(replica: ReplicaPlan, run_dir: RunDir) -> ReplicaUnits:
    config = run_dir.worker_config(replica.name)
    controller = Unit(
        f"{replica.name}-controller", lambda _: [controller_launch(replica.name, config)]
    )
    least = replica.config.topology.kvp_min
    groups = tuple(
        Unit(
            f"{replica.name}-g{index}",
            _ranks(replica, ranks, config),
            vital=index < least,
            wanted=index < least,
        )
        for index, ranks in enumerate(replica.groups)
    )
    return ReplicaUnits(name=replica.name, controller=controller, groups=groups)


def _ranks(
    replica: ReplicaPlan, ranks: tuple[RankPlan, ...], config: pathlib.Path
) -> Callable[[int], Iterable[Launch]]:
    def launches(generation: int) -> Iterable[Launch]:
        return [rank_launch(replica.config, rank, config, generation) for rank in ranks]

    return launches
