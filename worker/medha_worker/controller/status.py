"""What the controller shows of itself: /status for whoever starts groups, gauges for dashboards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medha.messages import ReplicaStatus
from medha.scheduling.report import BANDS
from medha_worker.controller.membership import ABSENT, JOINING, LOST, RUNNING, STARTING
from medha_worker.controller.meters import Meters

if TYPE_CHECKING:
    from medha_worker.controller.controller import Controller


def replica_status(controller: Controller, now: float) -> ReplicaStatus:
    """Groups as they are, how many are wanted, and which must be started anew."""
    config, membership, serving = controller.config, controller.membership, controller.serving
    wanted = wanted_groups(controller, now)
    releasable: tuple[int, ...] = ()
    free: tuple[int, ...] = ()
    total: tuple[int, ...] = ()
    waiting = running = 0
    if serving is not None:
        scheduler, load = serving.scheduler, serving.load(now)
        releasable = scheduler.releasable(now)
        free, total = load.free_pages, load.total_pages
        waiting, running = load.waiting, load.prefilling + load.decoding

    def pages(group: int) -> tuple[int, int]:
        return (free[group], total[group]) if group < len(free) else (0, 0)

    ready = serving is not None and bool(membership.running) and not controller.draining
    return ReplicaStatus(
        replica=config.replica,
        ready=ready,
        draining=controller.draining,
        generation=controller.generations.current,
        wanted_groups=wanted,
        groups=membership.status(pages, releasable),
        routers=len(controller.routers.welcome),
        waiting=waiting,
        running=running,
        restart_groups=membership.restart,
        refused=controller.routers.refused,
        message="; ".join(f"group {g}: {why}" for g, why in sorted(membership.why.items())),
    )


def wanted_groups(controller: Controller, now: float) -> int:
    """How many groups should run."""
    topology, serving = controller.config.topology, controller.serving
    wanted = serving.scheduler.wanted_groups(now) if serving is not None else 0
    return min(max(wanted, topology.kvp_min), topology.kvp_max)


def gauges(controller: Controller, meters: Meters, now: float) -> None:
    """Set what dashboards draw as levels."""
    membership, serving = controller.membership, controller.serving
    for state in (ABSENT, STARTING, JOINING, RUNNING, LOST):
        meters.set("medha_kvp_groups", len(membership.in_state(state)), state)
    meters.set("medha_kvp_wanted_groups", wanted_groups(controller, now))
    meters.set("medha_kvp_generation", controller.generations.current)
    if serving is None:
        return
    serving.count_displaced()
    load = serving.load(now)
    meters.set("medha_queue_requests", load.waiting)
    meters.set("medha_queue_work_seconds", load.pending_s)
    pending_s = dict(load.pending_bands)
    for upto in BANDS:
        meters.set("medha_pending_work_seconds", pending_s.get(upto, 0.0), _band(upto))
    meters.set("medha_running_requests", load.prefilling + load.decoding)
    meters.set("medha_prediction_correction_ratio", serving.correction)
    for group in range(controller.config.topology.kvp_max):
        runs = group in membership.running and group < len(load.free_pages)
        available, total = (load.free_pages[group], load.total_pages[group]) if runs else (0, 0)
        cached = min(serving.scheduler.cached_pages(group), available) if runs else 0
        meters.set("medha_kv_pages", available - cached, str(group), "free")
        meters.set("medha_kv_pages", cached, str(group), "cached")
        meters.set("medha_kv_pages", total - available, str(group), "used")


def _band(upto: float) -> str:
    """A band of relative slack by its upper edge, as histograms write theirs."""
    return "+Inf" if upto == BANDS[-1] else f"{upto:g}"
