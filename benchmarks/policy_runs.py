"""Run of the policy matrix: a cell under a policy, in the simulated fleet.

A run ends when the last deadline has passed. `lars-refuse` refuses what it cannot promise; the
other variants accept everything. A refused request *would have made it* if, at the moment of its
refusal, a fork of the whole simulation that accepts this request alone, without a promise, serves
it in time and breaks no promise given before. At most `replays` refusals of a run are replayed, the
first ones and then ever fewer. `lars-errors` runs on machines that are up to 20 % slower or faster
than predicted (`Misprediction`).
"""

from __future__ import annotations

import functools
import math
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
"""Virtual seconds after a refused request's deadline in which promises may break."""


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
        self.refused = self.tried = self.would_make = self._replays = 0

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

    def play(self, limit_s: float, replays: int) -> None:
        """Run until the last deadline; raises TimeoutError after `limit_s` of processor time."""
        for arrival in self.workload.arrivals:
            self.loop.at(arrival.arrival_s, ARRIVE, functools.partial(self._arrive, arrival))
        self._replays = replays
        self._run(self.until_s, time.process_time() + limit_s)

    def _run(self, until_s: float, stop_s: float) -> None:
        while self.loop.now < until_s:
            self.loop.run(min(until_s, self.loop.now + SLICE_S))
            if time.process_time() > stop_s:
                raise TimeoutError(f"stopped at {self.loop.now:.0f} of {until_s:.0f} s")

    def _arrive(self, arrival: Arrival) -> None:
        before = len(self.fleet.refused)
        self.fleet.arrive(arrival)
        if len(self.fleet.refused) > before and self.fleet.refused[-1].id == arrival.id:
            self.refused += 1
            self._replay(arrival)

    # --- refused requests -------------------------------------------------------------------------

    def _replay(self, arrival: Arrival) -> None:
        """Replay a refusal of the sample."""
        if self.tried >= self._replays or not _is_sampled(self.refused):
            return
        self.tried += 1
        child = os.fork()
        if not child:
            code, self._replays = 2, 0
            try:
                code = 0 if self._would_make_it(arrival) else 1
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        self.would_make += os.waitstatus_to_exitcode(status) == 0

    def _would_make_it(self, arrival: Arrival) -> bool:
        """Accept a refused request without a promise and go on, in a fork of the simulation."""
        now = self.loop.now
        own_due_s = now + self.workload.deadlines_s[arrival.id]
        pending = {
            record.id: record.arrival_s + record.ttft_deadline_s
            for record in self.fleet.records()
            if record.promised and record.first_token_s is None
        }
        name = self.slo_class.name
        refusing = self.fleet.classes[name]
        self.fleet.refused.pop()
        self.fleet.classes[name] = msgspec.structs.replace(refusing, when_infeasible="relegate")
        self.fleet.arrive(arrival)
        self.fleet.classes[name] = refusing
        self.loop.run(own_due_s)
        if not any(record.id == arrival.id and record.in_time for record in self.fleet.records()):
            return False
        self.loop.run(min(max(pending.values(), default=now), own_due_s + REPLAY_S))
        return not any(
            record.id in pending and not record.in_time
            for record in self.fleet.records()
            if pending.get(record.id, math.inf) <= self.loop.now
        )

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
            tried=self.tried,
            would_make=self.would_make,
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
        run.play(limit_s, replays)
        return run.outcome(time.process_time() - began_s)
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


def _is_sampled(count: int) -> bool:
    """Return whether refusal number `count` is tried: the first eight, then by powers of 1.3."""
    return count <= 8 or int(math.log(count, 1.3)) > int(math.log(count - 1, 1.3))


def _after(
    first: Callable[[], None], then: Callable[[SimReplica], None] | None
) -> Callable[[SimReplica], None]:
    def watch(replica: SimReplica) -> None:
        first()
        if then is not None:
            then(replica)

    return watch
