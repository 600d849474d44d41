"""The scheduler of one replica: what runs next, on which KVP groups, with which pages.

Decides from requests, the clock's `now` (an argument) and what ranks acknowledge; the controller
and the simulator drive it alike. It reads no clock, sends nothing and holds no tensors. The rules:

* a batch names its groups and carries one replica-wide number; each group runs its batches in order
* up to `spp` batches are in flight per group; chunk i+1 of a prompt follows once i left stage 0
* decodes are never skipped for prefills; one decode of a sequence is in flight at a time
* with `ahead_s` a lone group's next batch is decided while one runs (see `ahead`)
* pages come back exactly once, when nothing in flight uses them
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import msgspec

from medha.batch import Batch, BatchResult, Move
from medha.config import Scheduling
from medha.costs import BatchLoad
from medha.errors import ProtocolError, Refusal
from medha.messages.fields import Load
from medha.model import ModelShape
from medha.predictor import Predictor
from medha.request import Request, SloClass
from medha.scheduling.ahead import Ahead
from medha.scheduling.blocks import Pool
from medha.scheduling.crews import Crews
from medha.scheduling.decodes import Decodes
from medha.scheduling.endings import Endings, Failure
from medha.scheduling.growth import Groups
from medha.scheduling.inflight import Flight, Flights
from medha.scheduling.lars import normaliser_s
from medha.scheduling.ledger import Ledger
from medha.scheduling.members import Members
from medha.scheduling.outlook import Outlook
from medha.scheduling.packer import Packer
from medha.scheduling.plan import Plan
from medha.scheduling.progress import Progress
from medha.scheduling.rebalance import Rebalance
from medha.scheduling.report import report
from medha.scheduling.sequence import Sequence
from medha.scheduling.starts import Starts
from medha.topology import Topology


class Admitted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request was taken: its number, what the cache holds of it, and what to expect."""

    seq: int
    cached_tokens: int
    promised: bool
    predicted_ttft_s: float


class Completed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sequence ended; `reason` is `stop` or `length`."""

    seq: int
    request_id: str
    reason: str
    prompt_tokens: int
    output_tokens: int


class Scheduler:
    """See the module; times are seconds on the caller's clock."""

    def __init__(
        self, topology: Topology, shape: ModelShape, predictor: Predictor, settings: Scheduling,
        pages_per_group: int, page_tokens: int, max_context_tokens: int,
        classes: tuple[SloClass, ...] = (),
    ) -> None:  # fmt: skip
        self.topology, self.shape, self.settings, self.classes = topology, shape, settings, classes
        self.predictor, self.max_context_tokens = predictor, max_context_tokens
        self.pages_per_group, self.page_tokens = pages_per_group, page_tokens
        self._pool = Pool(pages_per_group, page_tokens, topology.kvp_max)
        self._groups = Groups(self._pool, predictor, topology.spp, settings.output_reserve)
        self._flights = Flights(topology.spp)
        self._decodes = Decodes()
        longest_s = settings.fixed_s if settings.budget == "fixed" else settings.max_batch_s
        drain_s = (topology.spp - 1) * longest_s
        self._ledger = Ledger(settings, self._groups, drain_s, _overhead_s(predictor))
        self._outlook = Outlook(settings, topology.spp, predictor, self._groups, self._ledger)
        self._starts = Starts(settings, self._groups, self._outlook)
        self._packer = Packer(
            settings, topology.spp, predictor, self._groups, self._decodes, self._ledger,
            self._starts,
        )  # fmt: skip
        self._endings = Endings(self._groups, self._decodes, self._starts)
        self._crews = Crews(
            self._groups, self._flights, self._ledger, settings.min_batch_s,
            settings.max_starved_rounds,
        )  # fmt: skip
        self._rebalance = Rebalance(self._groups, self._flights, self._endings, predictor)
        self._progress = Progress(
            self._groups, self._decodes, self._endings, settings, max_context_tokens
        )
        self._ahead = Ahead(
            settings, topology.spp, self._groups, self._flights, self._packer, self._progress
        )
        self._members = Members(
            self._groups, self._ledger, self._flights, self._decodes, self._endings, self._crews,
            topology, settings,
        )  # fmt: skip
        self._next_number, self._next_seq = 1, 1

    # --- requests ---------------------------------------------------------------------------------

    def submit(self, request: Request, now: float, hashes: Items[bytes] = ()) -> Admitted:
        """Take a request; `hashes` name its full pages. Raises Refusal when it can never fit, and
        ProtocolError when a request with that id is already here."""
        if request.id in self._endings.by_id:
            raise ProtocolError(f"request {request.id} is already here; submit each id once")
        self._check_fits(request)
        names = hashes if self.settings.prefix_cache else ()
        sequence = Sequence(self._next_seq, request, names)
        self._next_seq += 1
        self._endings.sequences[sequence.number] = sequence
        self._endings.by_id[request.id] = sequence
        cached = self._endings.house(sequence)
        work_s = request.work_s or self.predictor.prefill_s(sequence.goal, cached)
        sequence.total_work_s = work_s
        sequence.norm_s = normaliser_s(
            self.settings.normaliser, work_s, request.ttft_deadline_s, self.settings.work_floor_s
        )
        sequence.kept = sequence.promised = self._ledger.gives and bool(request.promised)
        self._groups.enlist(sequence, cached)
        self._ledger.losses.decide(sequence, now)
        promised = self._promise(sequence, now, cached)
        return Admitted(sequence.number, cached, promised, self._expect_s(sequence, now))

    def abort(self, id: str, now: float) -> None:
        """Stop a request; unknown ids are ignored. Its pages return once nothing uses them."""
        sequence = self._endings.by_id.get(id)
        if sequence is not None:
            self._endings.end(sequence)

    def _check_fits(self, request: Request) -> None:
        capacity = self._pool.groups_max * self._pool.pages_per_group * self._pool.page_tokens
        most = min(self.max_context_tokens - 1, capacity)
        if request.prompt_tokens > most:
            raise Refusal(
                "context_length_exceeded",
                f"the prompt is {request.prompt_tokens} tokens: this model and replica hold at"
                f" most {most} (context {self.max_context_tokens}, KV {capacity}); shorten it",
            )

    def _promise(self, sequence: Sequence, now: float, cached: int) -> bool:
        """Whether it holds a promise: the one that admission gave, else one that fits now, in time
        and in pages. A promise reserves its pages at once, and keeps what the cache has of it."""
        if not self._ledger.promising or not sequence.plan:
            return sequence.promised
        if sequence.promised:
            self._starts.start(sequence, now)
            return True
        works = self._groups.works(sequence, cached)
        self._ledger.arrived(works, now)
        starts = {group: now + self._flights.free_in_s(group, now) for group in works}
        asked = (
            sequence.request.promised is None
            and self._ledger.gives
            and all(self._starts.aged(self._groups.waiting[one], now) is None for one in works)
        )
        fits = asked and self._ledger.fits(sequence, works, starts, self._outlook.given(sequence))
        sequence.promised = fits
        sequence.promised = fits and self._starts.start(sequence, now)
        if sequence.promised:
            self._ledger.rank(sequence, kept=True, promised=True)
            for group in works:
                self._ledger.give_way(group, starts[group], self.predictor.error)
        elif self._ledger.fits_beside(sequence, works, max(starts.values())):
            self._ledger.rank(sequence, kept=True, promised=False)
        return sequence.promised

    def _expect_s(self, sequence: Sequence, now: float) -> float:
        """Seconds from now until its first token, if nothing more urgent comes."""
        if not sequence.plan:
            return sequence.total_work_s
        group = sequence.plan[0]
        waiting = self._groups.waiting[group]
        place = waiting.place(sequence.key)
        ahead_s = float(waiting.work_s[:place].sum()) * self._ledger.factor(group)
        return self._flights.free_in_s(group, now) + ahead_s + sequence.total_work_s

    # --- batches ----------------------------------------------------------------------------------

    def next_batch(self, now: float, free_groups: frozenset[int]) -> Batch | None:
        """The next batch for some of `free_groups` (whose stage 0 is free, or holds one batch where
        `ahead_s` is set); None when there is nothing to run there now. Call until None."""
        if self._decodes.hungry:
            self._progress.feed(now)
        if self._groups.shared:
            self._progress.expire(now)
        eligible = frozenset(
            group for group in free_groups if group in self._groups and self._flights.room(group)
        )
        plan = self._at_once(eligible, now) if eligible else None
        if plan is None and self._ahead.lead_s:
            plan = self._ahead.plan(free_groups, now)
        return None if plan is None else self._send(plan, now)

    def _at_once(self, eligible: frozenset[int], now: float) -> Plan | None:
        """What runs on groups that are free."""
        started = self._starts.running
        plan = self._choose(eligible, now)
        if plan is None:
            again = self._starts.running != started  # it is known now which groups that one needs
            if self._outlook.closed and not self._flights.by_number:
                self._outlook.look(now)  # else no batch would end after which somebody looks
                again = True
            plan = self._choose(eligible, now) if again else None
        return plan

    def _choose(self, eligible: frozenset[int], now: float) -> Plan | None:
        """The first crew that has something to run, and what."""
        error = self.predictor.error
        for crew, limit_s in self._crews.candidates(eligible, now):
            if len(crew) == 1:
                self._groups.steal(crew[0])
            plan = self._packer.plan(crew, now, limit_s, error)
            if len(crew) > 1:
                parts = plan.parts if plan is not None else []
                self._crews.tried(crew, {part.sequence.number for part in parts}, now)
            if plan is not None and (len(crew) == 1 or plan.shared):
                return plan
        return None

    def _send(self, plan: Plan, now: float) -> Batch:
        number, self._next_number = self._next_number, self._next_number + 1
        predicted_s = plan.seconds
        heaviest = max(plan.loads.values(), key=_rows)
        ended = self._endings.take_ended()
        chunks = self._packer.carry_out(plan, predicted_s)
        sequences = self._endings.sequences
        for part in plan.parts:
            part.sequence.in_flight += 1
            self._groups.refresh(part.sequence)
            if len(part.groups) > 1:
                part.sequence.passed, part.sequence.waiting_since_s = 0, None
                part.sequence.refused = False
        for groups, _ in plan.cohorts:
            if len(groups) > 1:
                for chunk in chunks:
                    if chunk.decode and chunk.shared:
                        sequence = sequences[chunk.seq]
                        sequence.passed, sequence.waiting_since_s = 0, None
                break
        switches = (
            self._rebalance.switch(chunks, sequences, number) if self._rebalance.ready else ()
        )
        batch = Batch(number, self._members.generation, tuple(chunks), switches, ended, predicted_s)
        crew = plan.crew if len(plan.crew) == 1 else batch.groups
        self._flights.add(Flight(batch, crew, now, heaviest))
        self._crews.ran(crew)
        for group in crew:
            self._groups.last_used_s[group] = now
        return batch

    def stage_done(self, number: int, stage: int, now: float) -> None:
        """Every participant's stage `stage` finished the batch; unknown numbers are ignored."""
        flight = self._flights.by_number.get(number)
        if flight is not None and stage == 0 and not flight.left:
            self._leave_stage_0(flight)

    def _leave_stage_0(self, flight: Flight) -> None:
        flight.left = True
        if not flight.followed:
            self._progress.left_stage_0(flight.batch)

    def complete(self, number: int, result: BatchResult, now: float) -> tuple[Completed, ...]:
        """The batch is done on every participant; returns the sequences that ended with it.

        Raises ProtocolError when `result` lacks a yielding chunk of a live sequence.
        """
        flight = self._flights.remove(number)
        if flight is None:
            return ()
        if not flight.left:
            self._leave_stage_0(flight)
        if result.elapsed_s is not None:
            self.predictor.observe(flight.heaviest, flight.predicted_s, result.elapsed_s)
        sampled = {one.seq: one for one in result.sampled}
        sequences, decodes = self._endings.sequences, self._decodes
        completed: list[Completed] = []
        for chunk in flight.batch.chunks:
            sequence = sequences[chunk.seq]
            sequence.in_flight -= 1
            if chunk.decode:
                decodes.back(chunk.groups)
            stopped = sequence.over or sequence.taken_back
            if not (stopped or chunk.decode):
                self._progress.chunk_done(sequence, chunk)
            reason = None
            if chunk.yields and not sequence.over:
                outcome = sampled.get(chunk.seq)
                if outcome is None:
                    raise ProtocolError(f"batch {number} brings no token of sequence {chunk.seq}")
                if stopped:
                    reason = self._progress.count(sequence, outcome, now)
                else:
                    reason = self._progress.token(sequence, chunk, outcome, now)
            if stopped:
                self._endings.settle(sequence)
            if reason is not None:
                completed.append(
                    Completed(
                        sequence.number, sequence.id, reason, sequence.request.prompt_tokens,
                        sequence.emitted,
                    )
                )  # fmt: skip
        self._rebalance.landed()
        if self._outlook.outdated():
            self._outlook.look(now)
        return tuple(completed)

    # --- what others ask --------------------------------------------------------------------------

    def layout(self, seq: int) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """(group, ((logical page, page id), …)) of a sequence, for a group that does not know it:
        after the newest batch's switches, without the pages which that batch itself takes."""
        return self._endings.sequences[seq].layout()

    def load(self, now: float) -> Load:
        """What the router places and admits by."""
        return report(
            self._groups, self._ledger, self._flights, self._decodes, self._packer,
            self._outlook, self.wanted_groups(now), now,
        )  # fmt: skip

    def cached_pages(self, group: int) -> int:
        """Those of its unused pages that the prefix cache names."""
        return self._pool[group].cached

    def displaced(self) -> tuple[int, ...]:
        """How many requests of each length bucket were ever dropped from the promise set."""
        return tuple(self._ledger.losses.displaced)

    def take_kv_events(
        self,
    ) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
        """(stored, removed) page names since the last call, each as (group, hash)."""
        return self._pool.take_events()

    def take_failed(self) -> tuple[Failure, ...]:
        """Requests that could not be finished, since the last call."""
        failed, self._endings.failed = tuple(self._endings.failed), []
        return failed

    # --- groups and moves -------------------------------------------------------------------------

    def group_joined(self, group: int, generation: int, now: float) -> None:
        """A group runs, and the columns of `generation` include it."""
        self._members.joined(group, generation, now)

    def regenerated(self, generation: int, now: float) -> None:
        """Columns of a newer generation stand; shared chunks use them from now on."""
        self._members.regenerated(generation)

    def group_lost(self, group: int, generation: int, now: float) -> tuple[int, ...]:
        """A group is gone with its pages: its batches are void, and every sequence in them or with
        pages there is taken back. Shared chunks wait for columns newer than the current ones,
        unless `generation` is newer already. Returns the sequences taken back."""
        return self._members.lost(group, generation, now)

    def group_released(self, group: int, generation: int, now: float) -> None:
        """A releasable group has left in good order; the columns of `generation` go on."""
        self._members.released(group, generation, now)

    def wanted_groups(self, now: float) -> int:
        """How many groups should run, 0 .. wanted-1."""
        return self._members.wanted(now)

    def releasable(self, now: float) -> tuple[int, ...]:
        """Groups, highest first, that have held nothing for `release_cooldown_s`."""
        return self._members.releasable(now)

    def plan_moves(self, now: float) -> tuple[Move, ...]:
        """Copies of pages that would even out shards; their target pages are taken already."""
        return self._rebalance.plan() if self.settings.rebalance else ()

    def moved(self, move_id: int, ok: bool, now: float) -> None:
        """A copy ended: it is switched by a later batch, or its target pages come back."""
        self._rebalance.moved(move_id, ok)


def _rows(load: BatchLoad) -> int:
    return load.rows


def _overhead_s(predictor: Predictor) -> float:
    """What a batch costs before its first token: the intercept through one and two tokens."""
    load = predictor.load()
    return max(0.0, 2.0 * load.seconds_with(1, 0) - load.seconds_with(2, 0))
