"""A fleet that follows its load, in virtual time: the decisions are those of the operator.

Looks every LOOK_S, decides by `medha.scaling` from what the fleet's door tells of demand, and does
it: a replica more serves after a cold start, one less is the one with the least work left, which it
finishes. Every look is kept as the operator keeps it, so `medha scaling` decides it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from medha.demand import WINDOW_S
from medha.metrics import RATIO
from medha.scaling import (
    ClassShare,
    Journal,
    Memory,
    Policy,
    Record,
    Signals,
    decide,
    quantile,
)
from medha.sim.fleet import Fleet
from medha.sim.loop import DONE, WATCH
from medha.sim.replica import SimReplica

LOOK_S = 2.0


class Autoscaler:
    """Plays the operator for one fleet, from its first look on until `until_s` or, without that,
    until nothing more happens. `make` starts a replica of that name at the time when it serves."""

    def __init__(
        self, fleet: Fleet, policy: Policy, make: Callable[[str], SimReplica],
        cold_start_s: float, until_s: float | None = None,
    ) -> None:  # fmt: skip
        self._policy, self._fleet, self._make = policy, fleet, make
        self._cold_start_s, self._until_s = cold_start_s, until_s
        self._memory = Memory()
        self._starting: list[str] = []
        self._made = len(fleet.replicas)
        self._looks: list[Record] = []
        self.replica_s = 0.0
        """Seconds for which replicas have served, over all of them."""
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
        self._looks.append(Record(policy=self._policy, signals=signals, decision=decision))
        for _ in range(decision.replicas - signals.current):
            self._start()
        self._stop(max(0, signals.current - decision.replicas))
        if not loop.idle if self._until_s is None else loop.now + LOOK_S <= self._until_s:
            loop.at(loop.now + LOOK_S, WATCH, self._look)

    def _signals(self) -> Signals:
        fleet = self._fleet
        demand, serving = fleet.demand(), fleet.serving
        return Signals(
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
            classes=tuple(ClassShare(each.name, each.met, each.missed) for each in demand.classes),
            cold_start_s=self._cold_start_s,
        )

    def _start(self) -> None:
        name = f"replica-{self._made}"
        self._made += 1
        self._starting.append(name)
        loop = self._fleet.loop
        loop.at(loop.now + self._cold_start_s, DONE, functools.partial(self._started, name))

    def _started(self, name: str) -> None:
        if name in self._starting:
            self._starting.remove(name)
            self._fleet.join(self._make(name))

    def _stop(self, count: int) -> None:
        """First those that do not serve yet, the newest first."""
        for _ in range(count):
            if self._starting:
                self._starting.pop()
            else:
                standings = self._fleet.standings
                self._fleet.leave(
                    min(self._fleet.serving, key=lambda name: (standings[name].pending_s, name))
                )


def _used(replica: SimReplica, now: float) -> float:
    """Share of the pages of its running groups that sequences hold."""
    load = replica.scheduler.load(now)
    running = [
        (free, total)
        for free, total in zip(load.free_pages, load.total_pages, strict=True)
        if free >= 0
    ]
    pages = sum(total for _, total in running)
    return 1.0 - sum(free for free, _ in running) / pages if pages else 0.0
