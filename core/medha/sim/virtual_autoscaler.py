"""Autoscaling in virtual time, with the decisions of the operator.

Every LOOK_S, `medha.fleet.autoscaling` decides from the demand of the simulated fleet. An added
replica serves after a cold start. The replica with the least pending work is removed, after it has
finished that work. Looks are saved as the operator saves them, for `medha scaling`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from medha.fleet.autoscaling import (
    ClassShare,
    Journal,
    Policy,
    ScalingMemory,
    ScalingRecord,
    ScalingSignals,
    decide,
    quantile,
)
from medha.fleet.demand import WINDOW_S
from medha.metrics import RATIO
from medha.sim.loop import DONE, WATCH
from medha.sim.replica import SimReplica
from medha.sim.virtual_fleet import SimulatedFleet

LOOK_S = 2.0


class SimulatedAutoscaler:
    """Plays the operator for one fleet until `until_s`, or until no event is left.

    `make` creates the replica of a name when it begins to serve.
    """

    def __init__(
        self,
        fleet: SimulatedFleet,
        policy: Policy,
        make: Callable[[str], SimReplica],
        cold_start_s: float,
        until_s: float | None = None,
    ) -> None:
        self._policy, self._fleet, self._make = policy, fleet, make
        self._cold_start_s, self._until_s = cold_start_s, until_s
        self._memory = ScalingMemory()
        self._starting: list[str] = []
        self._created = len(fleet.replicas)
        self._looks: list[ScalingRecord] = []
        self.replica_s = 0.0
        """Seconds served, summed over replicas."""
        fleet.loop.at(fleet.loop.now + LOOK_S, WATCH, self._look)

    @property
    def journal(self) -> Journal:
        """All looks so far."""
        return Journal(looks=tuple(self._looks))

    def _look(self) -> None:
        loop = self._fleet.loop
        self.replica_s += LOOK_S * len(self._fleet.serving)
        signals = self._signals()
        decision, self._memory = decide(self._policy, self._memory, signals)
        self._looks.append(ScalingRecord(policy=self._policy, signals=signals, decision=decision))
        for _ in range(decision.replicas - signals.current):
            self._start()
        self._stop(max(0, signals.current - decision.replicas))
        if not loop.idle if self._until_s is None else loop.now + LOOK_S <= self._until_s:
            loop.at(loop.now + LOOK_S, WATCH, self._look)

    def _signals(self) -> ScalingSignals:
        fleet = self._fleet
        demand, serving = fleet.demand(), fleet.serving
        return ScalingSignals(
            at_s=fleet.loop.now,
            current=len(serving) + len(self._starting),
            ready=len(serving),
            slack_p10=quantile(RATIO, demand.slack_counts, 0.1),
            arrived=sum(demand.slack_counts),
            alone_p10=quantile(RATIO, demand.alone_counts, 0.1),
            offered=demand.work_s / WINDOW_S,
            backlog_s=demand.backlog_s,
            held=demand.held,
            busy=demand.waiting + demand.running,
            kv_filled=sum(_used(fleet.replicas[name], fleet.loop.now) for name in serving),
            classes=tuple(
                ClassShare(ended.name, ended.met, ended.missed) for ended in demand.classes
            ),
            cold_start_s=self._cold_start_s,
        )

    def _start(self) -> None:
        name = f"replica-{self._created}"
        self._created += 1
        self._starting.append(name)
        loop = self._fleet.loop
        loop.at(loop.now + self._cold_start_s, DONE, functools.partial(self._started, name))

    def _started(self, name: str) -> None:
        if name in self._starting:
            self._starting.remove(name)
            self._fleet.join(self._make(name))

    def _stop(self, count: int) -> None:
        """Remove replicas: starting ones first, the newest first."""
        for _ in range(count):
            if self._starting:
                self._starting.pop()
            else:
                fleet = self._fleet
                fleet.leave(min(fleet.serving, key=lambda name: (fleet.pending_s(name), name)))


def _used(replica: SimReplica, now: float) -> float:
    """Share of the pages of the running groups that sequences hold."""
    load = replica.scheduler.load(now)
    running = [
        (free, total)
        for free, total in zip(load.free_pages, load.total_pages, strict=True)
        if free >= 0
    ]
    pages = sum(total for _, total in running)
    return 1.0 - sum(free for free, _ in running) / pages if pages else 0.0
