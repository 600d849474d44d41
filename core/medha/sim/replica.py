"""A replica in virtual time: the live scheduler on a PipelineClock.

Drives a Scheduler as the controller does, and records the outcome of each request. A controller
that calls in the same order makes identical batches at identical times:

1. all events of one instant first: `stage_done` of each stage (and, for the last one,
   `complete` right after it), then arrivals (`submit`); simultaneous ends in the order in which
   their batches started, stage by stage;
2. then one round: `next_batch(now, free_groups)` until it returns None. Each batch is started at
   once (`PipelineClock.run`); with `ahead_s` busy groups are offered too, and there is another
   round when a batch has half of that left;
3. then `plan_moves`, `wanted_groups` and `releasable`.

For a differential test: give the controller a fake runner that keeps a PipelineClock of its own,
answers each Step's last participant with StageDone at the times of `run`, and compare `log` here
with the steps there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from msgspec import structs

from medha.batch import Batch, BatchResult, Sampled
from medha.errors import Refusal
from medha.messages import KvEvents
from medha.request import Request
from medha.scheduling.scheduler import Scheduler
from medha.sim.loop import DECIDE, DONE, WATCH, Loop
from medha.sim.pipeline_clock import PipelineClock
from medha.sim.report import RequestRecord


class Live:
    """A request that is being served, with the values of its record."""

    __slots__ = (
        "cached",
        "emitted",
        "failed",
        "finished_s",
        "first_s",
        "gap_s",
        "last_s",
        "left_s",
        "promised",
        "request",
        "stops_after",
    )

    def __init__(self, request: Request, stops_after: int | None) -> None:
        self.request, self.stops_after = request, stops_after
        self.cached = self.emitted = 0
        self.first_s: float | None = None
        self.finished_s: float | None = None
        self.left_s: float | None = None
        self.last_s = self.gap_s = 0.0
        self.promised, self.failed = False, ""  # code of the failure

    def token(self, now: float) -> None:
        """Record one more output token."""
        if self.first_s is None:
            self.first_s = now
        else:
            self.gap_s = max(self.gap_s, now - self.last_s)
        self.last_s = now
        self.emitted += 1

    def record(self, replica: str) -> RequestRecord:
        """Return the record of the request so far. `replica`: the name of the one that has it."""
        request = self.request
        return RequestRecord(
            id=request.id,
            arrival_s=request.arrival_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens=self.emitted,
            cached_tokens=self.cached,
            ttft_deadline_s=request.ttft_deadline_s,
            tpot_s=request.tpot_s,
            work_s=request.work_s,
            first_token_s=self.first_s,
            finished_s=self.finished_s,
            left_s=self.left_s,
            worst_gap_s=self.gap_s,
            promised=self.promised,
            refused=self.failed,
            slo_class=request.slo_class,
            tenant=request.tenant,
            replica=replica,
        )


class SimReplica:
    """Runs one Scheduler on a Loop.

    `cold_start_s`: seconds until a wanted group joins. `watch` is called with this replica after
    each round. `log` holds (time, batch) if `keep_log` is set.
    """

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        clock: PipelineClock,
        loop: Loop,
        cold_start_s: float = 60.0,
        watch: Callable[[SimReplica], None] | None = None,
        keep_log: bool = False,
    ) -> None:
        self.name, self.scheduler, self.clock, self.loop = name, scheduler, clock, loop
        self.cold_start_s, self.watch, self.keep_log = cold_start_s, watch, keep_log
        self.log: list[tuple[float, Batch]] = []
        self.live: dict[int, Live] = {}
        self.over: list[Live] = []
        self.refused: dict[str, tuple[Request, str]] = {}
        self.batches = 0
        self._seqs: dict[str, int] = {}
        self._kv_events = 0
        self._in_flight: dict[int, Batch] = {}
        self._generation = 0
        self._joining: set[int] = set()
        self._round_due = False
        self._retry_due = False
        self._lead_s = scheduler.settings.lead_s(clock.spp)
        for group in range(clock.predictor.topology.kvp_min):
            self._join(group)

    def submit(
        self,
        request: Request,
        hashes: Sequence[bytes] = (),
        stops_after: int | None = None,
        resumed: Live | None = None,
    ) -> None:
        """Submit a request, or record its refusal. `stops_after`: tokens until it stops.

        `resumed`: the request as another replica withdrew it; its tokens are part of the prompt.
        """
        rest = request
        if resumed is not None:
            rest = structs.replace(
                request,
                prompt_tokens=request.prompt_tokens + resumed.emitted,
                max_output_tokens=request.max_output_tokens - resumed.emitted,
            )
        try:
            admitted = self.scheduler.submit(rest, self.loop.now, hashes)
        except Refusal as refusal:
            self.refused[request.id] = (request, refusal.code)
            return
        live = resumed
        if live is None:
            live = Live(request, stops_after)
            live.cached, live.promised = admitted.cached_tokens, admitted.promised
        self.live[admitted.seq] = live
        self._seqs[request.id] = admitted.seq
        self.kick()

    def serves(self, id: str) -> bool:
        """True if a request waits or runs here."""
        return id in self._seqs

    def abort(self, id: str) -> None:
        """Abort a request whose client left."""
        self.scheduler.abort(id, self.loop.now)
        seq = self._seqs.get(id)
        if seq is not None:
            self._end(seq).left_s = self.loop.now
        self.kick()

    @property
    def empty(self) -> bool:
        """True if no KVP group runs here."""
        return not self.clock.free_s

    def withdraw(self) -> list[Live]:
        """Abort all requests here and return them: another replica resumes them."""
        withdrawn = list(self.live.values())
        for live in withdrawn:
            self.scheduler.abort(live.request.id, self.loop.now)
        self.live.clear()
        self._seqs.clear()
        return withdrawn

    def kick(self) -> None:
        """Schedule a round after all other events of this instant."""
        if not self._round_due:
            self._round_due = True
            self.loop.at(self.loop.now, DECIDE, self._round)

    def lose(self, group: int) -> tuple[int, ...]:
        """Lose a group: batches that name it never end. Returns the preempted sequences.

        A lone group rejoins after the cold start, others when they are wanted.
        """
        if group not in self.clock.free_s:
            return ()
        self.clock.leave(group)
        lost = {n for n, batch in self._in_flight.items() if group in batch.groups}
        for number in lost:
            del self._in_flight[number]
        self._generation += 1
        preempted = self.scheduler.group_lost(group, self._generation, self.loop.now)
        if self.clock.predictor.topology.kvp_max == 1:
            self._start_group(group)
        self.kick()
        return preempted

    def take_kv_events(self) -> KvEvents | None:
        """Prefix-cache changes since the last call; None without any."""
        stored, removed = self.scheduler.take_kv_events()
        if not stored and not removed:
            return None
        self._kv_events += 1
        return KvEvents(
            self._kv_events,
            b"".join(block for _, block in stored),
            b"".join(block for _, block in removed),
            snapshot=self._kv_events == 1,
        )

    def records(self) -> list[RequestRecord]:
        """A record of every request so far."""
        records = [live.record(self.name) for live in [*self.over, *self.live.values()]]
        for request, code in self.refused.values():
            records.append(structs.replace(Live(request, None).record(self.name), refused=code))
        return records

    def _start_group(self, group: int) -> None:
        self._joining.add(group)
        ready_s = self.loop.now + self.cold_start_s
        self.loop.at(ready_s, DONE, functools.partial(self._join, group))

    def _join(self, group: int) -> None:
        self._generation += 1
        self._joining.discard(group)
        self.clock.join(group, self.loop.now)
        self.scheduler.group_joined(group, self._generation, self.loop.now)
        self.kick()

    def _round(self) -> None:
        self._round_due = False
        now = self.loop.now
        while True:
            free = frozenset(self.clock.free_s) if self._lead_s else self.clock.free_groups(now)
            batch = self.scheduler.next_batch(now, free)
            if batch is None:
                break
            self._start(batch, now)
        for failure in self.scheduler.take_failed():
            self._end(failure.seq).failed = failure.code
        if self.clock.predictor.topology.kvp_max > 1:
            self._rebalance(now)
            self._resize(now)
        if self.live and not self._in_flight and not self._retry_due:
            self._retry_due = True  # the scheduler waits for credit, pages or a group
            self.loop.at(now + 0.01, WATCH, self._retry)
        if self.watch is not None:
            self.watch(self)

    def _retry(self) -> None:
        self._retry_due = False
        self.kick()

    def _start(self, batch: Batch, now: float) -> None:
        self.batches += 1
        if self.keep_log:
            self.log.append((now, batch))
        self._in_flight[batch.number] = batch
        run = self.clock.run(batch, now)
        for stage, end_s in enumerate(run.ends_s):
            self.loop.at(end_s, DONE, self._stage_done(batch, stage, run.slowest_s))
        if self._lead_s:  # the next batch may be decided after this time
            self.loop.at(max(now, run.ends_s[0] - 0.5 * self._lead_s), WATCH, self.kick)

    def _stage_done(self, batch: Batch, stage: int, elapsed_s: float) -> Callable[[], None]:
        def done() -> None:
            if batch.number not in self._in_flight:
                return  # a group of the batch was lost
            now = self.loop.now
            self.scheduler.stage_done(batch.number, stage, now)
            if stage == self.clock.spp - 1:
                self._complete(batch, elapsed_s, now)
            self.kick()

        return done

    def _complete(self, batch: Batch, elapsed_s: float, now: float) -> None:
        del self._in_flight[batch.number]
        sampled = []
        for chunk in batch.chunks:
            if chunk.yields:
                live = self.live.get(chunk.seq)
                stops = False
                if live is not None:
                    live.token(now)
                    stops = live.emitted == live.stops_after
                sampled.append(Sampled(chunk.seq, stops))
        result = BatchResult(tuple(sampled), elapsed_s)
        for completed in self.scheduler.complete(batch.number, result, now):
            self._end(completed.seq).finished_s = now

    def _end(self, seq: int) -> Live:
        live = self.live.pop(seq)
        del self._seqs[live.request.id]
        self.over.append(live)
        return live

    def _rebalance(self, now: float) -> None:
        for move in self.scheduler.plan_moves(now):
            self.clock.copied(move)
            tokens = len(move.logical) * self.clock.page_tokens

            def moved(move_id: int = move.id) -> None:
                self.scheduler.moved(move_id, True, self.loop.now)
                self.kick()

            self.loop.at(now + self.clock.predictor.move_s(tokens), DONE, moved)

    def _resize(self, now: float) -> None:
        wanted = self.scheduler.wanted_groups(now)
        for group in range(min(wanted, self.clock.predictor.topology.kvp_max)):
            if group not in self.clock.free_s and group not in self._joining:
                self._start_group(group)
        for group in self.scheduler.releasable(now):
            if group >= wanted:
                self._generation += 1
                self.scheduler.group_released(group, self._generation, now)
                self.clock.leave(group)
