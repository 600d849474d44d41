"""How each process of a fleet is started: its command line and what its environment adds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from medha.cli.children import Child, Launch
from medha.cli.plan import FleetPlan, RankPlan, ReplicaPlan
from medha.cli.run_dir import RunDir
from medha.cli.supervise import Patience, Replica, Supervisor, Unit


def supervisor_of(
    plan: FleetPlan, run_dir: RunDir, start: Callable[[Launch], Child], patience: Patience
) -> Supervisor:
    """The units of a planned fleet, nothing of it started yet."""
    router = Unit("router", lambda _: [router_launch(run_dir)])
    replicas = tuple(_replica(each, run_dir) for each in plan.replicas)
    return Supervisor(router, replicas, start, patience)


def router_launch(run_dir: RunDir) -> Launch:
    argv = (sys.executable, "-m", "medha_router", "--config", str(run_dir.router_config))
    return Launch(name="router", argv=argv)


def controller_launch(replica: ReplicaPlan, run_dir: RunDir) -> Launch:
    config = str(run_dir.worker_config(replica.name))
    argv = (sys.executable, "-m", "medha_worker.controller", "--config", config)
    env = {"MEDHA_REPLICA": replica.name, "OMP_NUM_THREADS": "1"}
    return Launch(name=f"{replica.name}-controller", argv=argv, env=env)


def rank_launch(replica: ReplicaPlan, rank: RankPlan, run_dir: RunDir, generation: int) -> Launch:
    at = rank.at
    config = str(run_dir.worker_config(replica.name))
    argv = (
        sys.executable, "-m", "medha_worker.gently", "--config", config, "--group", str(at.group),
        "--stage", str(at.stage), "--shard", str(at.shard),
    )  # fmt: skip
    env = {
        "MEDHA_REPLICA": replica.name,
        "MEDHA_KVP_GROUP": str(at.group),
        "MEDHA_SPP_STAGE": str(at.stage),
        "MEDHA_TP_SHARD": str(at.shard),
        "MEDHA_GENERATION": str(generation),
        "OMP_NUM_THREADS": str(replica.config.threads_per_rank),
    }
    if rank.gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(rank.gpu)
    return Launch(name=f"{replica.name}-{at}", argv=argv, env=env)


def _replica(replica: ReplicaPlan, run_dir: RunDir) -> Replica:
    controller = Unit(f"{replica.name}-controller", lambda _: [controller_launch(replica, run_dir)])
    least = replica.config.topology.kvp_min
    groups = tuple(
        Unit(
            f"{replica.name}-g{index}",
            _ranks(replica, ranks, run_dir),
            vital=index < least,
            wanted=index < least,
            follows=controller,
        )
        for index, ranks in enumerate(replica.groups)
    )
    return Replica(name=replica.name, controller=controller, groups=groups)


def _ranks(
    replica: ReplicaPlan, ranks: tuple[RankPlan, ...], run_dir: RunDir
) -> Callable[[int], Iterable[Launch]]:
    def launches(generation: int) -> Iterable[Launch]:
        return [rank_launch(replica, rank, run_dir, generation) for rank in ranks]

    return launches
