"""The life of a sequence after submit: tokens, prepared decodes, preemption, and freed pages.

    finished     completed, aborted or failed: its pages are freed and it is forgotten
    preempted    for lack of pages, or because a group was lost: its pages are freed and it waits
                 again with its output as part of the prompt; cached pages are shared again

Both wait until no batch in flight and no page copy names the sequence. Waiting work is removed at
once, so that pending work returns to exactly zero. The next chunk of a decode is prepared as soon
as its token arrives, pages included, so that building a batch does not visit every decode.
"""

from __future__ import annotations

import functools

import numpy as np

from medha.batch import Chunk, Sampled
from medha.errors import ProtocolError
from medha.scheduling.interface import Completed, Failure
from medha.scheduling.prefill_admission import DecodeAccount, PrefillAdmission
from medha.scheduling.running import DecodeGroup, InFlightBatch
from medha.scheduling.sequence import Sequence
from medha.scheduling.state import SchedulerState


class Outcomes:
    """Outcomes of one batch by sequence.

    Results stand in the order of the batch's chunks, so that the next one is usually meant.
    """

    def __init__(self, number: int, sampled: tuple[Sampled, ...]) -> None:
        self.number, self.sampled = number, sampled
        self._next = 0
        self._by_sequence: dict[int, Sampled] | None = None

    def take(self, number: int) -> Sampled:
        """Return the outcome of a sequence; raise ProtocolError if there is none."""
        sampled, at = self.sampled, self._next
        while at < len(sampled):
            outcome = sampled[at]
            at += 1
            if outcome.seq == number:
                self._next = at
                return outcome
        self._next = at
        if self._by_sequence is None:
            self._by_sequence = {outcome.seq: outcome for outcome in self.sampled}
        if number not in self._by_sequence:
            raise ProtocolError(f"batch {self.number} brings no token of sequence {number}")
        return self._by_sequence[number]


class Lifecycle:
    """Moves sequences on; see the module. `preempted_count`: preemptions for lack of pages.

    `ended`: sequences whose pages were freed, not yet reported to the ranks.
    """

    def __init__(
        self,
        state: SchedulerState,
        admission: PrefillAdmission,
        account: DecodeAccount,
        max_context_tokens: int,
    ) -> None:
        self.state, self.settings = state, state.settings
        self.groups, self.queues, self.running = state.groups, state.queues, state.running
        self.admission, self.account = admission, account
        self.max_context_tokens = max_context_tokens
        self._slides, self._caches = state.pool.slides, state.settings.prefix_cache
        self._page_tokens = state.pool.page_tokens
        self.preempted_count = 0
        self.ended: list[int] = []
        self._failed: list[Failure] = []

    # --- chunks and tokens ------------------------------------------------------------------------

    def leave_stage0(self, sent: InFlightBatch) -> None:
        """Allow the next chunks of the batch's prompts."""
        for sequence, chunk in reversed(sent.prefills):
            if not sequence.stopped:
                sequence.leave_stage0(chunk.end)
                if sequence.past_stage0_tokens < sequence.target_tokens:
                    self.queues.update_flags(sequence)
                else:
                    self.queues.dequeue(sequence)
                    self.account.invalidate()

    def complete(self, sent: InFlightBatch, sampled: Outcomes, now: float) -> list[Completed]:
        """Land a batch's chunks and count its tokens; return the sequences that ended."""
        completed: list[Completed] = []
        for decodes, sequences in sent.decodes:
            decodes.land(len(sequences))
            for sequence in sequences:
                if sequence.land():
                    self._land_stopped(sequence, True, sampled, now, completed)
                else:
                    outcome = sampled.take(sequence.number)
                    reason = self._on_token(sequence, outcome, now, decodes)
                    if reason is not None:
                        completed.append(_completed(sequence, reason))
        for sequence, chunk in sent.prefills:
            if sequence.land():
                self._land_stopped(sequence, chunk.yields, sampled, now, completed)
                continue
            self._on_chunk_done(sequence, chunk)
            if chunk.yields:
                outcome = sampled.take(sequence.number)
                reason = self._on_token(sequence, outcome, now)
                if reason is not None:
                    completed.append(_completed(sequence, reason))
        return completed

    def _land_stopped(
        self,
        sequence: Sequence,
        yields: bool,
        sampled: Outcomes,
        now: float,
        completed: list[Completed],
    ) -> None:
        """Count the token of a sequence preempted meanwhile, and free what it held.

        It recomputes the token as part of its prompt.
        """
        if yields and not sequence.finished:
            reason = self._count_token(sequence, sampled.take(sequence.number).finished, now)
            if reason is not None:
                completed.append(_completed(sequence, reason))
        self.free(sequence)

    def _on_chunk_done(self, sequence: Sequence, chunk: Chunk) -> None:
        """Cache the full pages of a prompt chunk that every stage has computed."""
        pool, end = self.groups.pool, chunk.end
        first = sequence.computed_tokens // pool.page_tokens
        last = min(end // pool.page_tokens, len(sequence.hashes))
        for logical in range(first, last):
            group = sequence.group_of[logical]
            pool[group].cache(sequence.page_of[logical], sequence.hashes[logical])
        sequence.complete(end)
        if self._slides:
            self.groups.slide(sequence, end)

    def _on_token(
        self,
        sequence: Sequence,
        outcome: Sampled,
        now: float,
        like: DecodeGroup | None = None,
    ) -> str | None:
        """Count a token and prepare the next decode; return why the sequence ended, if it did.

        `like`: the decodes that the token's was of.
        """
        computed = sequence.scheduled_tokens - sequence.in_flight  # decodes of one token each
        if self._caches and not computed % self._page_tokens:
            self._cache_last(sequence, outcome.block_hash, computed)
        reason = self._count_token(sequence, outcome.finished, now)
        if reason is not None:
            return reason
        if not sequence.decoding:
            self.running.begin(sequence)
            self.account.begin(sequence, now)
        tokens = sequence.output_tokens + sequence.in_flight - sequence.prepared
        sequence.set_decode_due(sequence.first_token_s + tokens * sequence.tpot_s)
        if not sequence.in_flight:
            if self._slides:
                self._slide(sequence)
            self._prepare(sequence, like)
        return None

    def _count_token(self, sequence: Sequence, finished: bool, now: float) -> str | None:
        """Count a token that the client receives; return `stop` or `length` if it is the last."""
        sequence.count_token(now)
        output = sequence.output_tokens
        full = sequence.prompt_tokens + output >= self.max_context_tokens
        if finished or full or output >= sequence.max_output_tokens:
            self.finish(sequence)
            return "stop" if finished else "length"
        return None

    def prepare_ahead(
        self, sequence: Sequence, due_out_s: float, like: DecodeGroup | None = None
    ) -> bool:
        """Prepare the decode behind a token that is still being computed.

        The rank that samples the token reads it there. Returns whether nothing is left to prepare
        when the token arrives.
        """
        after = sequence.scheduled_tokens + 1
        output = after - sequence.prompt_tokens
        if sequence.stopped:
            return True
        if output >= sequence.max_output_tokens or after >= self.max_context_tokens:
            sequence.end_credit()
            return True
        if not sequence.alone or sequence.switching:
            return False
        if not sequence.scheduled_tokens % self.groups.pool.page_tokens:
            if self._slides:
                self._slide(sequence)
            tail, room = self.groups.next_tail(sequence)
            if not room or tail != sequence.tail:
                return False
        if not sequence.decoding:
            self.running.begin(sequence)
            self.account.begin(sequence, due_out_s)
            first_s = sequence.first_token_s if sequence.output_tokens else due_out_s
            sequence.set_decode_due(first_s + output * sequence.tpot_s)
        return self._prepare(sequence, like)

    def _cache_last(self, sequence: Sequence, hash_: bytes | None, computed: int) -> None:
        """Cache the page that the computed tokens have just filled, if it has a hash."""
        logical = computed // self._page_tokens - 1
        if hash_ is not None and logical >= 0:
            self.groups.pool[sequence.group_of[logical]].cache(sequence.page_of[logical], hash_)

    def _slide(self, sequence: Sequence) -> None:
        """Drop what a decode no longer sees, before it takes another page."""
        if sequence.decoding and not sequence.scheduled_tokens % self.groups.pool.page_tokens:
            self.groups.slide(sequence, sequence.scheduled_tokens - sequence.in_flight)

    def _prepare(self, sequence: Sequence, like: DecodeGroup | None = None) -> bool:
        """Prepare the next decode; without a page for it the sequence is blocked on pages.

        `like`: the decodes that its last one was of.
        """
        if sequence.scheduled_tokens % self._page_tokens and not sequence.moving:
            sequence.schedule_decode()
            if like is not None and sequence.alone and like.alone == sequence.tail:
                like.add(sequence)
                return True
        else:
            tail, room = self.groups.next_tail(sequence)
            if not room:
                self.running.block_on_pages(sequence)
                return False
            self.groups.extend(sequence, 1, tail)
        groups = sequence.groups
        for move in sequence.switching:
            groups = tuple(sorted({*groups, move.source, move.target}))
        self.running.decodes_of(groups).add(sequence)
        return True

    # --- the end ----------------------------------------------------------------------------------

    def finish(self, sequence: Sequence) -> None:
        """Finish a sequence; its request id is unknown from now on."""
        state = self.state
        self._stop(sequence)
        sequence.finish()
        if state.by_id.get(sequence.id) is sequence:
            del state.by_id[sequence.id]
        state.unassigned.pop(sequence.number, None)
        self.free(sequence)

    def fail(self, sequence: Sequence, code: str, message: str) -> None:
        """Finish a sequence with an error for the client."""
        self._failed.append(Failure(sequence.number, sequence.id, code, message))
        self.finish(sequence)

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Stop a sequence; its tokens are recomputed later."""
        if sequence.stopped:
            return
        decoding = sequence.decoding
        self._stop(sequence)
        sequence.preempt(now + sequence.request.ttft_deadline_s if decoding else None)
        self.free(sequence)

    def free(self, sequence: Sequence) -> None:
        """Free the pages of a stopped sequence once nothing in flight uses them."""
        if not sequence.stopped:
            return
        for move in sequence.switching:
            if move.target in self.groups:
                self.groups.pool[move.target].release(move.to_pages)
        sequence.cancel_switches()
        sequences = self.state.sequences
        if sequence.in_flight or sequence.moving or sequence.number not in sequences:
            return
        self.groups.release(sequence)
        if sequence.started:
            self.admission.count_freed()
            self.ended.append(sequence.number)
        if sequence.finished:
            del sequences[sequence.number]
            return
        sequence.reset()
        self.queues.enqueue(sequence, self.assign_groups(sequence))

    def assign_groups(self, sequence: Sequence, now: float | None = None) -> int:
        """Assign groups; return how many of the tokens they have cached.

        If no group runs, the sequence waits for one. `now`: of a promise that is new, which goes
        where it fits.
        """
        self.groups.measure(sequence)
        if not self.groups.running:
            self.state.unassigned[sequence.number] = sequence
            return 0
        if now is None or len(self.groups.running) == 1:
            return self.groups.assign(sequence)
        return self.groups.assign(sequence, functools.partial(self._room_s, sequence, now))

    def _room_s(self, sequence: Sequence, now: float, group: int, cached: int) -> float:
        """Return what is left to promises in a group with the sequence among them."""
        account, promises = self.account, self.state.promises
        start = now + self.state.in_flight.lead_s(group, now, account.budget_s)
        part = account.part_until(group, sequence.request.due_s, now)
        work_s = self.queues.times.alongside_s(cached, sequence.target_tokens, part)
        account.try_nothing(group, now)
        return promises.room_s(group, sequence.request.due_s, start) - promises.full_cost_s(work_s)

    def take_ended(self) -> tuple[int, ...]:
        """Return the sequences whose pages were freed, for the ranks, since the last call."""
        ended, self.ended = tuple(self.ended), []
        return ended

    def take_failed(self) -> tuple[Failure, ...]:
        failed, self._failed = tuple(self._failed), []
        return failed

    def _stop(self, sequence: Sequence) -> None:
        """Remove a sequence from all queues."""
        self.queues.dequeue(sequence)
        if self.running.withdraw(sequence):
            sequence.land()
        self.running.end(sequence)
        self.account.remove(sequence)

    # --- lack of pages ----------------------------------------------------------------------------

    def retry_blocked(self, now: float) -> None:
        """Find pages for decodes without any, or preempt a sequence for them."""
        blocked = self.running.blocked_on_pages
        for sequence in list(blocked.values()):
            if sequence.number in blocked and not sequence.finished:
                self.running.unblock(sequence)
                if not self._prepare(sequence):
                    self.preempt_for_pages(sequence, now)

    def preempt_for_pages(self, blocked: Sequence, now: float) -> None:
        """Make room for the next token of a decode, now or when batches in flight complete.

        Prefills reserve their pages, decodes only a part. The started prefill with the largest
        relative slack and pages in the groups concerned is preempted, unless it has a promise and
        makes progress; without such a prefill, the decode with the most credit. A sequence that
        finds no page though no other holds any fails, with both numbers.
        """
        wanted = set(blocked.groups)
        holders = [
            sequence
            for sequence in self.groups.holders.values()
            if not wanted.isdisjoint(sequence.tokens_by_group)
        ]
        if any(sequence.stopped for sequence in holders):
            return
        prefills = [
            sequence
            for sequence in holders
            if not sequence.decoding
            and sequence.remaining_tokens > 0
            and (not sequence.promised or self._is_stuck(sequence))
        ]
        victim = self._latest_prefill(prefills, now) or self._latest_decode(holders)
        if victim is None or (victim is blocked and len(holders) == 1):
            pool = self.groups.pool
            total = len(pool.groups) * pool.pages_per_group * pool.page_tokens
            self.fail(
                blocked,
                "kv_exhausted",
                f"sequence {blocked.id} holds {blocked.scheduled_tokens} tokens and finds no"
                f" page for the next: the running groups hold {total} tokens; lower max_tokens or"
                " add KVP groups",
            )
            return
        self.preempted_count += 1
        self.preempt(victim, now)

    def make_room(self, group: int, now: float) -> None:
        """Free the pages of a relegated prompt for a smaller one that finds none.

        The larger one must have scheduled fewer tokens than the smaller has: less is computed again
        than is gained, and of two prompts only one can ever take the other's pages.
        """
        pages, waiting = self.groups.pool[group], self.queues.by_group[group]
        available = pages.available
        if available >= pages.total // 16 or not waiting.ready_count:
            return
        lacking = np.where(waiting.need > available, waiting.need, np.inf)
        row = int(lacking.argmin())
        if lacking[row] == np.inf:
            return
        tokens = waiting.sequences[row].target_tokens
        holders = [
            sequence
            for sequence in waiting.sequences
            if sequence.started
            and not sequence.kept
            and sequence.scheduled_tokens < tokens < sequence.target_tokens
        ]
        if not holders or self._frees_pages(group):
            return
        victim = min(holders, key=lambda holder: (holder.scheduled_tokens, holder.number))
        self.preempted_count += 1
        self.preempt(victim, now)

    def _frees_pages(self, group: int) -> bool:
        """Return whether a stopped sequence still holds pages of the group."""
        return any(
            sequence.stopped and group in sequence.assigned_groups
            for sequence in self.groups.holders.values()
        )

    def expire(self, now: float) -> None:
        """Fail prefills that wait too long for another group."""
        for sequence in list(self.groups.shared.values()):
            stuck = (
                sequence.started
                and not sequence.decoding
                and sequence.remaining_tokens > 0
                and self._is_stuck(sequence)
            )
            if not stuck:
                sequence.resume()
                continue
            waited_s = 0.0 if sequence.paused_since_s is None else now - sequence.paused_since_s
            sequence.pause(now)
            if waited_s > self.settings.growth_timeout_s:
                self.fail(
                    sequence,
                    "kv_growth_timeout",
                    f"request {sequence.id} waited {self.settings.growth_timeout_s:g} s for another"
                    f" KVP group after {sequence.scheduled_tokens} of {sequence.target_tokens}"
                    f" prompt tokens: {len(self.groups.running)} of"
                    f" {self.groups.pool.groups_max} groups run; see why the replica does not grow,"
                    " or shorten the prompt",
                )

    def _is_stuck(self, sequence: Sequence) -> bool:
        """Return whether a prefill waits for another group, so that its pages are idle."""
        return sequence.ready and not self.groups.next_tail(sequence)[1]

    def _latest_prefill(self, prefills: list[Sequence], now: float) -> Sequence | None:
        return max(
            prefills,
            key=lambda sequence: (self._relative_slack(sequence, now), sequence.number),
            default=None,
        )

    def _latest_decode(self, holders: list[Sequence]) -> Sequence | None:
        decodes = [sequence for sequence in holders if sequence.decoding]
        return max(
            decodes, key=lambda sequence: (sequence.decode_due_s, sequence.number), default=None
        )

    def _relative_slack(self, sequence: Sequence, now: float) -> float:
        work_s = sum(self.queues.work_by_group(sequence).values())
        return (sequence.key[0] - now - work_s) / sequence.norm_s


def _completed(sequence: Sequence, reason: str) -> Completed:
    return Completed(
        sequence.number, sequence.id, reason, sequence.prompt_tokens, sequence.output_tokens
    )
