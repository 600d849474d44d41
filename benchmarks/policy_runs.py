"""Run of the policy matrix: a cell under a policy, in the simulated fleet.

A run ends when the last deadline has passed. `lars-refuse` refuses what it cannot promise; the
other variants accept everything. `lars-errors` runs on machines that are up to 20 % slower or
faster than predicted (`Misprediction`).

A refused request *would have made it* if the run could have served it in addition. The run is made
again, and forked at the refusal: the fork accepts this request without a promise, and of later ones
those that the first run accepted. It must serve the request in time, and every request in time in
the first run that was promised before or is due soon after; else the refusal was right. At most
`replays` refusals are replayed, spread evenly over all of a run.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence

import msgspec
from benchmarks.policy_cells import PAGE_TOKENS, Cell, CellWorkload

from medha.batch import Batch
from medha.config import Scheduling
from medha.request import Slo, SloClass
from medha.scheduling.scheduler import Scheduler
from medha.sim.loop import ARRIVE, Loop
from medha.sim.pipeline_clock import Misprediction, PipelineClock
from medha.sim.replica import SimReplica
from medha.sim.report import RequestRecord
from medha.sim.virtual_fleet import SimulatedFleet
from medha.sim.workload import Arrival

REFUSING, ERRING = "lars-refuse", "lars-errors"
VARIANTS = {
    "lars": Scheduling(),
    "lars-no-commit": Scheduling(commit=False),
    "srpf": Scheduling(policy="srpf"),
    "edf": Scheduling(policy="edf"),
    "lrs": Scheduling(policy="lrs"),
    "lars-paper": Scheduling(policy="lars-paper"),
    "fcfs": Scheduling(policy="fcfs"),
    # As vLLM: tokens per batch, and a limit of the tokens of a long prompt among them.
    "threshold": Scheduling(
        policy="fcfs", budget="tokens", batch_tokens=2048, long_prefill_threshold_tokens=512
    ),
    REFUSING: Scheduling(),
    ERRING: Scheduling(),
}
ERROR = 0.2
SLICE_S = 5.0  # virtual time between two looks at the processor time
REPLAY_S = 5.0
"""Virtual seconds after a refused request's deadline in which it may cost later ones theirs."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a run. Refused requests are misses.

    `work_s`: prefill seconds on an idle replica. `fill`: mean seconds of batches over the seconds
    that the TPOT allows, while prompts wait. `wait`: longest wait of a short request relative to
    its deadline; `late_s`: the longest beyond its deadline. `slow`: requests that missed their
    TPOT. `tried`: refusals that were replayed.
    `would_make`: of these, requests that would have made it. `failure`: why the run did not end.
    """

    short: int = 0
    long: int = 0
    short_in_time: int = 0
    long_in_time: int = 0
    work_s: float = 0.0
    work_in_time_s: float = 0.0
    promised: int = 0
    broken: int = 0
    slow: int = 0
    refused: int = 0
    tried: int = 0
    would_make: int = 0
    wait: float = 0.0
    late_s: float = 0.0
    batch_s: float = 0.0
    allowed_s: float = 0.0
    load: float = 0.0
    busy: float = 0.0
    spent_s: float = 0.0
    failure: str = ""

    @property
    def fill(self) -> float:
        return self.batch_s / self.allowed_s if self.allowed_s else 1.0

    @property
    def short_share(self) -> float:
        return self.short_in_time / self.short if self.short else 1.0

    @property
    def long_share(self) -> float:
        return self.long_in_time / self.long if self.long else 1.0

    @property
    def work_share(self) -> float:
        return self.work_in_time_s / self.work_s if self.work_s else 1.0


class Served(msgspec.Struct, frozen=True):
    """Result of a run, for its replays: the refused requests as they came, and those in time."""

    refused: tuple[str, ...]
    in_time: frozenset[str]


class BatchFill:
    """Seconds of a replica's batches, and those that the TPOT allows, while prompts wait."""

    def __init__(self, replica: SimReplica, cell: Cell, settings: Scheduling) -> None:
        self.replica, self.longest_s = replica, settings.max_batch_s
        self.allowed_beside_decodes_s = min(
            max(cell.tpot_s / cell.topology.spp, settings.min_batch_s), settings.max_batch_s
        )
        self.batch_s = self.allowed_s = 0.0
        self._scheduled: set[int] = set()  # sequences whose whole prompt is scheduled
        self._groups = cell.topology.kvp_max

    def take(self) -> None:
        """Count the batches of the replica's log and empty it."""
        for _, batch in self.replica.log:
            self._count(batch)
        self.replica.log.clear()

    def _count(self, batch: Batch) -> None:
        self._scheduled.difference_update(batch.ended)
        alone, has_prefill = not self._scheduled, False
        for chunk in reversed(batch.chunks):  # decodes come first
            if chunk.decode:
                break
            has_prefill = True
            if chunk.yields:
                self._scheduled.add(chunk.seq)
            else:
                self._scheduled.discard(chunk.seq)
        waiting = len(self.replica.live) > len(self._scheduled)
        # A group that has no prompts must not count for another where prompts wait.
        if waiting and (has_prefill or self._groups == 1):
            self.batch_s += batch.predicted_s
            self.allowed_s += self.longest_s if alone else self.allowed_beside_decodes_s


class Run:
    """A cell's fleet under a variant."""

    def __init__(self, cell: Cell, variant: str, load: CellWorkload, seed: int) -> None:
        self.cell, self.settings, self.workload = cell, VARIANTS[variant], load
        self.seed, self.erring = seed, variant == ERRING
        infeasible = "refuse" if variant == REFUSING else "relegate"
        self.slo_class = SloClass(slo=Slo(tpot_s=cell.tpot_s), when_infeasible=infeasible)
        self.loop = Loop()
        self.replicas = [self._replica(index) for index in range(cell.replicas)]
        self.fleet = SimulatedFleet(
            self.replicas,
            self.loop,
            (self.slo_class,),
            self.settings,
            PAGE_TOKENS,
            cell.shape.max_context_tokens,
            load.deadlines_s,
        )
        self.fills = [BatchFill(replica, cell, self.settings) for replica in self.replicas]
        for replica, fill in zip(self.replicas, self.fills, strict=True):
            replica.watch = _after(fill.take, replica.watch)
        self.last_s = load.arrivals[-1].arrival_s
        self.until_s = max(a.arrival_s + load.deadlines_s[a.id] for a in load.arrivals) + 1e-6
        self.tried = self.would_make = 0
        self._first: Served | None = None
        self._sample: frozenset[str] = frozenset()
        self._forked = False

    def _replica(self, index: int) -> SimReplica:
        cell = self.cell
        predictor = cell.predictor(self.settings)
        scheduler = Scheduler(
            cell.topology,
            cell.shape,
            predictor,
            self.settings,
            cell.pages,
            PAGE_TOKENS,
            cell.shape.max_context_tokens,
            (self.slo_class,),
        )
        slowness = Misprediction(ERROR, self.seed, index) if self.erring else None
        machine = cell.predictor(self.settings)
        clock = PipelineClock(machine, PAGE_TOKENS, scheduler.layout, slowness)
        return SimReplica(f"r{index}", scheduler, clock, self.loop, keep_log=True)

    def play(self, limit_s: float, first: Served | None = None, replays: int = 0) -> None:
        """Run until the last deadline; raises TimeoutError after `limit_s` of processor time.

        `first`: what the same run did before, to replay refusals.
        """
        for arrival in self.workload.arrivals:
            self.loop.at(arrival.arrival_s, ARRIVE, functools.partial(self._arrive, arrival))
        if first is not None:
            self._first, self._sample = first, frozenset(spread(first.refused, replays))
        self._run(self.until_s, time.process_time() + limit_s)

    def served(self) -> Served:
        """Return what the run did."""
        records = self.fleet.records()
        in_time = frozenset(record.id for record in records if record.in_time)
        return Served(tuple(record.id for record in self.fleet.refused), in_time)

    def _run(self, until_s: float, stop_s: float) -> None:
        while self.loop.now < until_s:
            self.loop.run(min(until_s, self.loop.now + SLICE_S))
            if time.process_time() > stop_s:
                raise TimeoutError(f"stopped at {self.loop.now:.0f} of {until_s:.0f} s")

    def _arrive(self, arrival: Arrival) -> None:
        if self._forked and self._first is not None and arrival.id in self._first.refused:
            return
        self.fleet.arrive(arrival)
        if arrival.id in self._sample and not self._forked:
            self._replay(arrival)

    # --- refused requests -------------------------------------------------------------------------

    def _replay(self, arrival: Arrival) -> None:
        """Replay a refusal of the sample, in a fork of the simulation."""
        self.tried += 1
        child = os.fork()
        if not child:
            code = 2
            try:
                code = 0 if self.would_make_it(arrival) else 1
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        self.would_make += os.waitstatus_to_exitcode(status) == 0

    def would_make_it(self, arrival: Arrival) -> bool:
        """Accept a request that was just refused and go on as in the first run.

        Afterwards this run is of no other use.
        """
        if self._first is None:
            raise ValueError("a replay needs what the first run did: pass `first` to `play`")
        now = self.loop.now
        due_s = {
            a.id: a.arrival_s + self.workload.deadlines_s[a.id] for a in self.workload.arrivals
        }
        pending = {
            record.id
            for record in self.fleet.records()
            if record.promised and record.first_token_s is None
        }
        soon_s = due_s[arrival.id] + REPLAY_S
        others = {
            other
            for other in self._first.in_time
            if other in pending or now < due_s[other] <= min(soon_s, self.until_s)
        }
        name = self.slo_class.name
        self._forked = True
        self.fleet.refused.pop()
        self.fleet.classes[name] = msgspec.structs.replace(
            self.fleet.classes[name], when_infeasible="relegate"
        )
        self.fleet.arrive(arrival)
        self.loop.run(due_s[arrival.id])
        if arrival.id not in self.served().in_time:
            return False
        self.loop.run(max([due_s[other] for other in others], default=now))
        return others <= self.served().in_time

    # --- results ----------------------------------------------------------------------------------

    def outcome(self, spent_s: float) -> Outcome:
        records = {record.id: record for record in self.fleet.records()}
        arrivals = self.workload.arrivals
        longs = {arrival.id for arrival in arrivals if self.workload.is_long(arrival)}
        in_time = {record.id for record in records.values() if record.in_time}
        waits = [
            (self._wait_s(record), record.ttft_deadline_s)
            for record in records.values()
            if record.id not in longs and not record.refused
        ]
        work_s = self.workload.work_s
        promised = [record for record in records.values() if record.promised]
        return Outcome(
            short=len(arrivals) - len(longs),
            long=len(longs),
            short_in_time=len(in_time - longs),
            long_in_time=len(in_time & longs),
            work_s=sum(work_s.values()),
            work_in_time_s=sum(work_s[name] for name in in_time),
            promised=len(promised),
            broken=sum(not record.in_time for record in promised),
            slow=sum(
                record.mean_tpot_s is not None and record.mean_tpot_s > 1.001 * record.tpot_s
                for record in records.values()
            ),
            refused=sum(bool(record.refused) for record in records.values()),
            wait=max((wait_s / deadline_s for wait_s, deadline_s in waits), default=0.0),
            late_s=max((wait_s - deadline_s for wait_s, deadline_s in waits), default=0.0),
            batch_s=sum(fill.batch_s for fill in self.fills),
            allowed_s=sum(fill.allowed_s for fill in self.fills),
            load=self.workload.load,
            busy=self._busy(),
            spent_s=spent_s,
        )

    def _wait_s(self, record: RequestRecord) -> float:
        return self.loop.now - record.arrival_s if record.ttft_s is None else record.ttft_s

    def _busy(self) -> float:
        """Share of the stages' time in batches; the last ones may end after the run."""
        stages = self.cell.topology.spp * self.cell.topology.kvp_max * len(self.replicas)
        busy_s = sum(replica.clock.busy_s for replica in self.replicas)
        return min(1.0, busy_s / stages / self.loop.now)


def play(
    cell: Cell, variant: str, load: CellWorkload, seed: int, limit_s: float, replays: int
) -> Outcome:
    """Run a cell under a variant; a run that does not end has a `failure`."""
    began_s = time.process_time()
    try:
        run = Run(cell, variant, load, seed)
        run.play(limit_s)
        outcome = run.outcome(time.process_time() - began_s)
        if not replays or not outcome.refused:
            return outcome
        again = Run(cell, variant, load, seed)
        again.play(limit_s, run.served(), replays)
        return msgspec.structs.replace(outcome, tried=again.tried, would_make=again.would_make)
    except (TimeoutError, RuntimeError, AssertionError, KeyError, ValueError) as error:
        spent_s = time.process_time() - began_s
        return Outcome(load=load.load, spent_s=spent_s, failure=f"{type(error).__name__}: {error}")


def total(outcomes: Sequence[Outcome]) -> Outcome:
    """Add up the runs of a cell's seeds; `wait` and `late_s` are the longest, loads the mean."""
    if len(outcomes) == 1:
        return outcomes[0]
    fields = [msgspec.structs.asdict(outcome) for outcome in outcomes]
    values = {name: sum(row[name] for row in fields) for name in fields[0] if name != "failure"}
    for name in ("wait", "late_s"):
        values[name] = max(row[name] for row in fields)
    for name in ("load", "busy"):
        values[name] /= len(fields)
    failures = "; ".join(outcome.failure for outcome in outcomes if outcome.failure)
    return Outcome(**values, failure=failures)


def spread(ids: Sequence[str], most: int) -> list[str]:
    """Return at most `most` of the ids, spread evenly."""
    count = min(most, len(ids))
    return [ids[(2 * index + 1) * len(ids) // (2 * count)] for index in range(count)]


def _after(
    first: Callable[[], None], then: Callable[[SimReplica], None] | None
) -> Callable[[SimReplica], None]:
    def watch(replica: SimReplica) -> None:
        first()
        if then is not None:
            then(replica)

    return watch
