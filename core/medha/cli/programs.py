"""How each process of a fleet is started: its command line and what its environment adds."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterable

from medha.cli.children import Child, Launch
from medha.cli.plan import FleetPlan, RankPlan, ReplicaPlan
from medha.cli.run_dir import RunDir
from medha.cli.supervise import Patience, Replica, Supervisor, Unit
from medha.config import WorkerConfig


def supervisor_of(
    plan: FleetPlan, run_dir: RunDir, start: Callable[[Launch], Child], patience: Patience
) -> Supervisor:
    """The units of a planned fleet, nothing of it started yet."""
    router = Unit("router", lambda _: [router_launch(run_dir)])
    replicas = tuple(_replica(each, run_dir) for each in plan.replicas)
    return Supervisor((router,), replicas, start, patience)


def router_launch(run_dir: RunDir) -> Launch:
    argv = (sys.executable, "-m", "medha_router", "--config", str(run_dir.router_config))
    return Launch(name="router", argv=argv)


def controller_launch(replica: str, config: pathlib.Path) -> Launch:
    argv = (sys.executable, "-m", "medha_worker.controller", "--config", str(config))
    env = {"MEDHA_REPLICA": replica, "OMP_NUM_THREADS": "1"}
    return Launch(name=f"{replica}-controller", argv=argv, env=env)


def rank_launch(
    of: WorkerConfig,
    rank: RankPlan,
    config: pathlib.Path,
    generation: int,
    ready_file: pathlib.Path | None = None,
) -> Launch:
    """The rank makes `ready_file` when it is loaded and wired; `config` holds `of`."""
    at = rank.at
    ready = () if ready_file is None else ("--ready-file", str(ready_file))
    argv = (
        sys.executable, "-m", "medha_worker.gently", "--config", str(config), "--group",
        str(at.group), "--stage", str(at.stage), "--shard", str(at.shard), *ready,
    )  # fmt: skip
    env = {
        "MEDHA_REPLICA": of.replica,
        "MEDHA_KVP_GROUP": str(at.group),
        "MEDHA_SPP_STAGE": str(at.stage),
        "MEDHA_TP_SHARD": str(at.shard),
        "MEDHA_GENERATION": str(generation),
        "OMP_NUM_THREADS": str(of.threads_per_rank),
    }
    if rank.gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(rank.gpu)
    return Launch(name=f"{of.replica}-{at}", argv=argv, env=env)


def _replica(replica: ReplicaPlan, run_dir: RunDir) -> Replica:
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
            follows=controller,
        )
        for index, ranks in enumerate(replica.groups)
    )
    return Replica(name=replica.name, controller=controller, groups=groups)


def _ranks(
    replica: ReplicaPlan, ranks: tuple[RankPlan, ...], config: pathlib.Path
) -> Callable[[int], Iterable[Launch]]:
    def launches(generation: int) -> Iterable[Launch]:
        return [rank_launch(replica.config, rank, config, generation) for rank in ranks]

    return launches
