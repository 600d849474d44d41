"""The scheduler of one replica: what runs next, on which KVP groups, with which pages.

Decides from requests, the clock's `now` (an argument) and what ranks acknowledge; the controller
and the simulator drive it alike. It reads no clock, sends nothing and holds no tensors. The rules:

* a batch names its groups and has one replica-wide number; each group runs its batches in order
* up to `spp` batches are in flight per group; chunk i+1 of a prompt follows once i left stage 0
* decodes are never skipped for prefills; one decode of a sequence is in flight at a time
* with `ahead_s` a lone group's next batch is decided while one runs (see `Lookahead`)
* pages return exactly once, when nothing in flight uses them
"""

from __future__ import annotations

from collections import abc
from math import inf

from medha.batch import Batch, BatchResult, Chunk, Move
from medha.config import Scheduling
from medha.errors import ProtocolError, Refusal
from medha.messages.fields import Load
from medha.model import ModelShape
from medha.predictor import BatchLoad, Predictor
from medha.request import Request, SloClass
from medha.scheduling.batch_builder import BatchBuilder, BatchDraft
from medha.scheduling.block_pool import BlockPool
from medha.scheduling.group_selection import GroupSelector
from medha.scheduling.interface import Admitted, Ahead, Completed, Failure
from medha.scheduling.lifecycle import Lifecycle, Outcomes
from medha.scheduling.load_report import ahead, report, work_sums
from medha.scheduling.membership import GroupMembership
from medha.scheduling.policies import normaliser_s
from medha.scheduling.prefill_admission import DecodeAccount, PrefillAdmission
from medha.scheduling.rebalance import Rebalance
from medha.scheduling.running import InFlightBatch
from medha.scheduling.sequence import Sequence, take_decodes
from medha.scheduling.state import SchedulerState
from medha.tenants import REFRESH_S, SHORT_MEMORY_S, PromisedWork, is_short
from medha.topology import Topology


class Scheduler:
    """Implements `SchedulerInterface`, which documents the methods."""

    def __init__(
        self,
        topology: Topology,
        shape: ModelShape,
        predictor: Predictor,
        settings: Scheduling,
        pages_per_group: int,
        page_tokens: int,
        max_context_tokens: int,
        classes: tuple[SloClass, ...] = (),
    ) -> None:
        self.topology, self.shape, self.settings, self.classes = topology, shape, settings, classes
        self.predictor, self.max_context_tokens = predictor, max_context_tokens
        self.pages_per_group, self.page_tokens = pages_per_group, page_tokens
        pool = BlockPool(pages_per_group, shape.kept_pages(page_tokens), topology.kvp_max)
        self._capacity_tokens = pool.most_tokens(max_context_tokens)
        relegates = not classes or any(of.when_infeasible == "relegate" for of in classes)
        self._state = state = SchedulerState(
            topology, predictor, settings, pool, relegates=relegates
        )
        self._groups, self._queues = state.groups, state.queues
        self._running, self._in_flight = state.running, state.in_flight
        self._promises, self._waiting = state.promises, state.queues.by_group
        self._account = DecodeAccount(state, classes)
        self._admission = PrefillAdmission(state, self._account)
        self._builder = BatchBuilder(state, self._admission)
        self._selector = GroupSelector(state)
        self._lifecycle = Lifecycle(state, self._admission, self._account, max_context_tokens)
        self._membership = GroupMembership(state, self._lifecycle)
        self._rebalance = Rebalance(state, self._lifecycle)
        self._lookahead = Lookahead(state, self._builder, self._lifecycle)
        self._promised_work = PromisedWork()
        self._charged_as_of_s = 0.0
        self._next_batch_number = 1

    # --- requests ---------------------------------------------------------------------------------

    def submit(self, request: Request, now: float, hashes: abc.Sequence[bytes] = ()) -> Admitted:
        state = self._state
        if request.id in state.by_id:
            raise ProtocolError(f"request {request.id} is already here; submit each id once")
        self._check_fits(request)
        used_hashes = hashes if self.settings.prefix_cache else ()
        sequence = Sequence(state.next_number(), request, used_hashes)
        state.add(sequence)
        self._account.grant(sequence, now)
        promised = self._promises.keeps_promises and bool(request.promised)
        cached = self._lifecycle.assign_groups(sequence, now if promised else None)
        work_s = request.work_s or self._idle_work_s(sequence, cached)
        norm_s = normaliser_s(
            self.settings.normaliser, work_s, request.ttft_deadline_s, self.settings.work_floor_s
        )
        sequence.set_work(work_s, norm_s)
        sequence.set_rank(promised, promised)
        work_by_group = self._queues.enqueue(sequence, cached)
        self._promises.loss_cap.count_decided(sequence, now)
        if self._promises.promising and sequence.assigned_groups:
            self._rank(sequence, work_by_group, now)
        if promised:
            self._promised_work.charge(request.tenant, work_s, now, short=is_short(work_s))
            if is_short(work_s):
                for _, part in self._account.taken((sequence,)):
                    taken_s = sequence.taken_soon_s(part, SHORT_MEMORY_S)
                    self._promised_work.add_coming(request.tenant, taken_s)
        return Admitted(sequence.number, cached, promised, self._expected_ttft_s(sequence, now))

    def abort(self, id: str, now: float) -> None:
        sequence = self._state.by_id.get(id)
        if sequence is not None:
            self._lifecycle.finish(sequence)

    def _idle_work_s(self, sequence: Sequence, cached: int) -> float:
        budget_s = self.settings.reference_budget_s(sequence.request.tpot_s, self.topology.spp)
        return self.predictor.at_budget(budget_s).prefill_s(sequence.target_tokens, cached)

    def _check_fits(self, request: Request) -> None:
        capacity = self._capacity_tokens
        most = min(self.max_context_tokens - 1, capacity)
        if request.prompt_tokens > most:
            raise Refusal(
                "context_length_exceeded",
                f"the prompt is {request.prompt_tokens} tokens: this model and replica hold at"
                f" most {most} (context {self.max_context_tokens}, KV {capacity}); shorten it",
            )

    def _rank(self, sequence: Sequence, work_s: dict[int, float], now: float) -> None:
        """Start a promised sequence at once, or keep another one if it fits with all kept ones.

        A promise reserves its pages and cached pages. `work_s`: the sequence's work by group.
        """
        promises = self._promises
        if not sequence.request.beyond_share:
            promises.count_arrival(work_s, now)
        self._account.follow_spans(now)
        self._account.count_alongside(sequence, now)
        if sequence.promised:
            self._admission.try_start(sequence, now)
        elif not sequence.request.beyond_share:
            batch_s = self._account.budget_s
            start = now + max(self._in_flight.lead_s(group, now, batch_s) for group in work_s)
            if promises.fits_with_kept(sequence, work_s, start):
                promises.set_rank(sequence, kept=True, promised=False)

    def _expected_ttft_s(self, sequence: Sequence, now: float) -> float:
        """Return the seconds until the first token, if nothing more urgent arrives."""
        if not sequence.assigned_groups:
            return sequence.total_work_s
        group = sequence.assigned_groups[0]
        waiting = self._waiting[group]
        row = waiting.find(sequence)
        before_s = waiting.rows.work_before_s(row if row >= 0 else waiting.place(sequence.key))
        return self._in_flight.free_in_s(group, now) + before_s + sequence.total_work_s

    # --- batches ----------------------------------------------------------------------------------

    def next_batch(self, now: float, free_groups: frozenset[int]) -> Batch | None:
        if self._running.blocked_on_pages:
            self._lifecycle.retry_blocked(now)
        if self._groups.shared:
            self._lifecycle.expire(now)
        eligible = frozenset(
            group
            for group in free_groups
            if group in self._waiting and self._in_flight.has_room(group)
        )
        for group in eligible:
            self._lifecycle.make_room(group, now)
        draft = self._draft_now(eligible, now) if eligible else None
        if draft is None and self._lookahead.lead_s:
            draft = self._lookahead.draft(free_groups, now)
        return None if draft is None else self._send(draft, now)

    def _draft_now(self, eligible: frozenset[int], now: float) -> BatchDraft | None:
        """Draft a batch for groups that are free."""
        started = self._admission.started_count
        draft = self._choose(eligible, now)
        if draft is None:
            again = self._admission.started_count != started  # its groups are known only now
            if self._account.closed and not self._in_flight.by_number:
                self._account.refresh(now)  # no batch will complete after which it is refreshed
                again = True
            draft = self._choose(eligible, now) if again else None
        return draft

    def _choose(self, eligible: frozenset[int], now: float) -> BatchDraft | None:
        """Draft a batch for the first group set that has something to run."""
        error = self.predictor.error
        if not self._groups.shared:
            if self._selector.active:
                self._selector.clear()
            for group in sorted(eligible):
                draft = self._draft_alone(group, inf, now, error)
                if draft is not None:
                    return draft
            return None
        for group_set, limit_s in self._selector.candidates(eligible, now):
            if len(group_set) == 1:
                draft = self._draft_alone(group_set[0], limit_s, now, error)
                if draft is not None:
                    return draft
                continue
            draft = self._builder.build(group_set, now, limit_s, error)
            chunks = draft.chunks if draft is not None else []
            chosen = {chunk.sequence.number for chunk in chunks}
            self._selector.decline_others(group_set, chosen, now)
            if draft is not None and draft.shared:
                return draft
        return None

    def _draft_alone(
        self, group: int, limit_s: float, now: float, error: float
    ) -> BatchDraft | None:
        if len(self._waiting) > 1:
            self._groups.steal_work(group)
        return self._builder.build((group,), now, limit_s, error)

    def _send(self, draft: BatchDraft, now: float) -> Batch:
        number, self._next_batch_number = self._next_batch_number, self._next_batch_number + 1
        predicted_s = draft.seconds
        heaviest = max(draft.loads.values(), key=_rows)
        ended = self._lifecycle.take_ended() if self._lifecycle.ended else ()
        decodes = [self._running.take(groups, count) for groups, count in draft.decodes]
        chunks: list[Chunk] = []
        for _, sequences in decodes:
            chunks += take_decodes(sequences)
        prefill_chunks = self._builder.commit(draft, predicted_s)
        prefilled = [chunk_draft.sequence for chunk_draft in draft.chunks]
        prefills = [*zip(prefilled, prefill_chunks, strict=True)]
        chunks += prefill_chunks
        self._queues.update_all(prefilled)
        for chunk_draft in draft.chunks:
            if len(chunk_draft.groups) > 1:
                chunk_draft.sequence.run_together(prefill=True)
        for decode_group, sequences in decodes:
            if len(decode_group.groups) > 1:
                for sequence in sequences:
                    sequence.run_together(prefill=False)
        switches = (
            self._rebalance.switch(chunks, self._state.sequences, number)
            if self._rebalance.ready
            else ()
        )
        generation = self._state.generation
        batch = Batch(number, generation, tuple(chunks), switches, ended, predicted_s)
        group_set = draft.group_set
        if len(group_set) > 1:
            used = {group for decode_group, _ in decodes for group in decode_group.groups}
            used.update(*(chunk_draft.groups for chunk_draft in draft.chunks))
            group_set = tuple(sorted(used))
        sent = InFlightBatch(batch, group_set, decodes, prefills, heaviest, now)
        self._in_flight.add(sent)
        if self._selector.active:
            self._selector.count_round(group_set)
        self._groups.mark_used(group_set, now)
        return batch

    def stage_done(self, number: int, stage: int, now: float) -> None:
        sent = self._in_flight.by_number.get(number)
        if sent is not None and stage == 0 and not sent.left_stage0:
            self._leave_stage0(sent, now)

    def _leave_stage0(self, sent: InFlightBatch, now: float) -> None:
        sent.leave_stage0()
        self._in_flight.begin_next(sent, now)
        if not sent.followed:
            self._lifecycle.leave_stage0(sent)

    def complete(self, number: int, result: BatchResult, now: float) -> tuple[Completed, ...]:
        sent = self._in_flight.remove(number)
        if sent is None:
            return ()
        if now >= self._charged_as_of_s + REFRESH_S:
            self._charge_answers(now)
        if not sent.left_stage0:
            self._leave_stage0(sent, now)
        if result.elapsed_s is not None:
            self.predictor.observe(sent.heaviest, sent.predicted_s, result.elapsed_s)
        completed = self._lifecycle.complete(sent, Outcomes(number, result.sampled), now)
        self._rebalance.on_complete()
        if self._account.is_outdated():
            self._account.refresh(now)
        return tuple(completed)

    # --- reports ----------------------------------------------------------------------------------

    def layout(self, seq: int) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        return self._state.sequences[seq].layout()

    def load(self, now: float) -> Load:
        if now >= self._charged_as_of_s + REFRESH_S:
            self._charge_answers(now)
        return report(
            self._state,
            self._account,
            self._admission,
            self._builder.decode_tpot_s(),
            self.wanted_groups(now),
            self._promised_work.report(now),
            now,
        )

    def _charge_answers(self, now: float) -> None:
        """Charge tenants with what answers hold and take, beyond the work of their prompts.

        After every second with batches: an answer that lasts less is charged for a second, or not.
        """
        passed_s = min(now - self._charged_as_of_s, 1.25 * REFRESH_S)
        self._charged_as_of_s = now
        place_s = passed_s / self.settings.max_running
        charged, coming = dict[tuple[str, bool], float](), dict[str, float]()
        sequences = self._state.sequences
        running = [sequences[number] for number in self._account.taking()]
        for sequence, part in self._account.taken(running):
            held_s = place_s if sequence.decoding else 0.0
            charge_s = sequence.hold(held_s, passed_s * part)
            tenant, short = sequence.request.tenant, is_short(sequence.total_work_s)
            if charge_s > 0.0:
                charged[tenant, short] = charged.get((tenant, short), 0.0) + charge_s
            if short:
                taken_s = sequence.taken_soon_s(part, SHORT_MEMORY_S)
                coming[tenant] = coming.get(tenant, 0.0) + taken_s
        for (tenant, short), charge_s in charged.items():
            self._promised_work.charge(tenant, charge_s, now, short=short)
        self._promised_work.replace_coming(coming)

    def ahead(self, now: float) -> Ahead:
        return ahead(self._state, work_sums(self._state, now), now)

    def cached_pages(self, group: int) -> int:
        return self._state.pool[group].cached

    def displaced(self) -> tuple[int, ...]:
        return tuple(self._promises.loss_cap.displaced)

    def take_kv_events(
        self,
    ) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
        return self._state.pool.take_events()

    def take_failed(self) -> tuple[Failure, ...]:
        return self._lifecycle.take_failed()

    # --- groups and moves -------------------------------------------------------------------------

    def group_joined(self, group: int, generation: int, now: float) -> None:
        self._membership.join(group, generation, now)

    def regenerated(self, generation: int, now: float) -> None:
        self._membership.regenerate(generation)

    def group_lost(self, group: int, generation: int, now: float) -> tuple[int, ...]:
        return self._membership.lose(group, generation, now)

    def group_released(self, group: int, generation: int, now: float) -> None:
        self._membership.release(group, generation, now)

    def wanted_groups(self, now: float) -> int:
        return self._membership.wanted(now)

    def releasable(self, now: float) -> tuple[int, ...]:
        return self._membership.releasable(now)

    def plan_moves(self, now: float) -> tuple[Move, ...]:
        return self._rebalance.plan() if self.settings.rebalance else ()

    def moved(self, move_id: int, ok: bool, now: float) -> None:
        self._rebalance.moved(move_id, ok)


class Lookahead:
    """Decides a lone group's next batch while one runs, so that no rank waits for the decision.

        rank          | batch n .............................. | batch n+1 ........
        scheduler       ^ n−1 completes       ^ n+1 is decided   ^ n completes
                                              `lead_s` before n is predicted to end

    A decode in batch n+1 may depend on the token that batch n is still computing: the rank that
    samples it reads it there (ADR 2), and the scheduler receives it later. If a sequence ends
    meanwhile, one row is superfluous and its token is dropped; its pages return with the last batch
    that names the sequence, as after an abort. An output that ends by its length is known in
    advance and has no such row.

    A batch is decided early only as it would be decided late: every decode of the running batch has
    its next one prepared, so that none is skipped. Nothing spans groups, since a token is known
    only where it is sampled. It is decided at most `lead_s` early (0: never), since later arrivals
    wait for both batches, and for the moment at which it can begin.
    """

    def __init__(self, state: SchedulerState, builder: BatchBuilder, lifecycle: Lifecycle) -> None:
        self.lead_s = state.settings.lead_s(state.topology.spp)
        self.groups, self.in_flight, self.predictor = state.groups, state.in_flight, state.predictor
        self.builder, self.lifecycle = builder, lifecycle

    def draft(self, free_groups: frozenset[int], now: float) -> BatchDraft | None:
        """Draft a batch to send behind the one that a group runs; None if there is none."""
        for group in sorted(free_groups):
            if group in self.groups and self._is_open(group, now):
                begins_s = now + self.in_flight.free_in_s(group, now)
                draft = self.builder.build((group,), begins_s, inf, self.predictor.error)
                if draft is not None:
                    return draft
        return None

    def _is_open(self, group: int, now: float) -> bool:
        """Return whether another batch may follow the group's batch as if that had completed.

        The group must run it alone, and it must be about to end.
        """
        batches = self.in_flight.on_group(group)
        if len(batches) != 1 or self.in_flight.free_in_s(group, now) > self.lead_s:
            return False
        spans = any(
            group in sequence.assigned_groups or group in sequence.tokens_by_group
            for sequence in self.groups.shared.values()
        )
        if spans or len(batches[0].groups) > 1:
            return False
        if not batches[0].followed:
            self._follow(batches[0])
        return batches[0].open

    def _follow(self, sent: InFlightBatch) -> None:
        """Let the batch's prompts continue, and prepare its decodes."""
        sent.follow()
        self.lifecycle.leave_stage0(sent)
        lifecycle, due_out_s, ready = self.lifecycle, sent.due_out_s, True
        for decodes, sequences in sent.decodes:
            for sequence in sequences:
                ready = lifecycle.prepare_ahead(sequence, due_out_s, decodes) and ready
        for sequence, chunk in sent.prefills:
            if chunk.yields:
                ready = lifecycle.prepare_ahead(sequence, due_out_s) and ready
        sent.open_for_next(ready)


def _rows(load: BatchLoad) -> int:
    return load.rows
