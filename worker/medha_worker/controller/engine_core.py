"""From Submit to Finished: the scheduler, its requests, its batches and its moves.

    Submit ─> scheduler.submit ─> next_batch ─> BatchTracker.send ─> ranks
                                  complete  <─ take_finished  <─ StageDone, BatchTokens
    router <─ Accepted, Tokens … Finished | Failed

Decides nothing that the scheduler decides. Passes requests to the scheduler, fetches the next batch
whenever the first stage of a group is free, and reports results back. A router receives Accepted,
Tokens, and exactly one of Finished and Failed per request. The scheduler works with lengths only;
tokens, stop tokens and page names stay here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from medha.batch import BatchResult, Sampled
from medha.config import PROGRESS_TOKENS, WorkerConfig
from medha.errors import ProtocolError, Refusal
from medha.fleet.prefix_index import HASH_BYTES, next_hash
from medha.messages import (
    TOKEN_BYTES,
    Accepted,
    Failed,
    Fetched,
    Finished,
    Load,
    Offered,
    PromptLogprobs,
    ScoredPrompt,
    SequenceStart,
    StageDone,
    Submit,
    Tokens,
    Withdrawn,
)
from medha.metrics import LENGTH_LABELS, MetricsSink, length_label
from medha.predictor import Predictor
from medha.scheduling.interface import SchedulerInterface
from medha.topology import Coordinate
from medha_worker.controller.batches import BatchTracker, TrackedBatch
from medha_worker.controller.kv_moves import REASONS, KvMoves, MoveResult
from medha_worker.controller.outbox import Outbox

BEING_SAMPLED = (-1).to_bytes(TOKEN_BYTES, "little", signed=True)
MAX_LOSSES = 2
MAX_PAUSE_S = 60.0
NO_GROUP_S = 10.0  # a group that restarts is back sooner, on a machine of its own

# Export at zero: `rate()` misses a counter's first increment if the series did not exist before.
FROM_ZERO: tuple[tuple[str, ...], ...] = (
    ("medha_kv_transfer_bytes_total",),
    *(("medha_kv_transfer_failures_total", reason) for reason in REASONS),
    ("medha_preemptions_total", "group lost"),
    ("medha_prefix_cache_hits_total",),
    ("medha_prefix_cache_queries_total",),
    ("medha_rank_restarts_total",),
    *(("medha_scheduler_decided_total", length) for length in LENGTH_LABELS),
    *(("medha_scheduler_displaced_total", length) for length in LENGTH_LABELS),
)

log = logging.getLogger("medha.controller")


class RequestState:
    """Request as the controller holds it: tokens, sampling, page names and the end.

        tokens   | prompt ........ | emitted earlier | emitted here ... |
                 0          prompt_tokens         submitted           length

    (router, id) identifies it to routers, `seq` to the scheduler and the ranks. `finish_reason` is
    empty while the request runs, then `stop` or `length`. A request survives preemption and the
    loss of a group: its prompt and all emitted tokens are computed again.
    """

    def __init__(
        self, router: str, submit: Submit, page_tokens: int, max_context_tokens: int, now: float
    ) -> None:
        if len(submit.tokens) % TOKEN_BYTES or not submit.tokens:
            raise ProtocolError(
                f"tokens of request {submit.id} are {len(submit.tokens)} bytes: must be a multiple "
                "of 4, at least one token"
            )
        if len(submit.hashes) % HASH_BYTES:
            raise ProtocolError(
                f"hashes of request {submit.id} are {len(submit.hashes)} bytes: must be a multiple "
                f"of {HASH_BYTES}"
            )
        self.router = router
        self.id = submit.id
        self.seq = -1
        self.sampling = submit.sampling
        self.adapter = submit.adapter
        self.tokens = bytearray(submit.tokens)
        self.submitted_tokens = len(self.tokens) // TOKEN_BYTES
        self.emitted_before = submit.emitted_before
        self.prompt_tokens = self.submitted_tokens - self.emitted_before
        self.cached_tokens = 0
        self.losses = 0
        self._length_at_loss = self.submitted_tokens
        self.finish_reason = ""
        self._page_tokens, self._max_context_tokens = page_tokens, max_context_tokens
        hashes = [
            submit.hashes[i : i + HASH_BYTES] for i in range(0, len(submit.hashes), HASH_BYTES)
        ]
        self._named_pages = len(hashes)
        self._link = hashes[-1] if hashes else submit.salt
        # Only a chain of page names that the router started can be continued.
        self._named = bool(self._link) and self._named_pages == self.prompt_tokens // page_tokens
        while name := self.completed_page((self._named_pages + 1) * page_tokens):
            hashes.append(name)
        self.hashes = tuple(hashes)
        self.request = submit.request(now)
        self.max_output_tokens = self.request.max_output_tokens

    @property
    def length(self) -> int:
        """Tokens of the prompt and of everything emitted."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def output_tokens(self) -> int:
        """Tokens emitted so far, earlier attempts included."""
        return self.length - self.prompt_tokens

    def admitted(self, seq: int, cached_tokens: int) -> None:
        """Record the scheduler's answer to the request."""
        self.seq, self.cached_tokens = seq, cached_tokens

    def group_lost(self) -> bool:
        """Count the loss of a group; True if the request lost too many to be tried again.

        Losses before it emitted PROGRESS_TOKENS more are forgotten.
        """
        if self.length - self._length_at_loss >= PROGRESS_TOKENS:
            self.losses = 0
        self._length_at_loss = self.length
        self.losses += 1
        return self.losses > MAX_LOSSES

    def first_token_slack(self, floor_s: float, now: float) -> float | None:
        """Relative slack left when the first token emitted here arrives; None after later ones."""
        if self.output_tokens - self.emitted_before != 1:
            return None
        return (self.request.due_s - now) / max(self.request.work_s, floor_s)

    def rows(self, start: int, length: int) -> bytes:
        """Token ids [start, start + length) as int32 bytes; raises ProtocolError beyond the last.

        The token that is being sampled is -1: the rank that samples it fills it in.
        """
        if length == 1 and start == self.length:
            return BEING_SAMPLED
        if start + length > self.length:
            raise ProtocolError(
                f"chunk [{start}, {start + length}) of request {self.id}: only {self.length} tokens"
            )
        return bytes(self.tokens[TOKEN_BYTES * start : TOKEN_BYTES * (start + length)])

    def introduction(self, cached: tuple[tuple[int, int], ...]) -> SequenceStart:
        """Start message for a group that does not hold this sequence yet."""
        return SequenceStart(
            seq=self.seq,
            sampling=self.sampling,
            prompt_tokens=self.prompt_tokens,
            cached=cached,
            history=bytes(self.tokens) if self.sampling.needs_tokens else b"",
            rope_tokens=min(self.request.total_tokens, self._max_context_tokens),
            adapter=self.adapter,
        )

    def append(self, token: int) -> None:
        """Append the sampled token; sets `finish_reason` if it is the last one."""
        self.tokens += token.to_bytes(TOKEN_BYTES, "little", signed=True)
        emitted_here = self.length - self.submitted_tokens
        if self.sampling.stops_at(token, self.output_tokens):
            self.finish_reason = "stop"
        elif emitted_here >= self.max_output_tokens:
            self.finish_reason = "length"

    def completed_page(self, held_tokens: int) -> bytes | None:
        """Name the page that ends at `held_tokens`, if a generated token has just filled it.

        The router names the pages of the submitted tokens; later names continue that chain.
        """
        page, rest = divmod(held_tokens, self._page_tokens)
        is_next = page == self._named_pages + 1 and held_tokens <= self.length
        if rest or not self._named or not is_next:
            return None
        rows = self.rows((page - 1) * self._page_tokens, self._page_tokens)
        self._link = next_hash(self._link, np.frombuffer(rows, dtype="<i4"))
        self._named_pages = page
        return self._link


class ActiveRequests:
    """Every request that runs, by request id and by sequence."""

    def __init__(self) -> None:
        self._of_id: dict[str, RequestState] = {}
        self._of_seq: dict[int, RequestState] = {}

    def __len__(self) -> int:
        return len(self._of_id)

    def add(self, state: RequestState) -> None:
        self._of_id[state.id] = state
        self._of_seq[state.seq] = state

    def get(self, id: str) -> RequestState | None:
        return self._of_id.get(id)

    def by_seq(self, seq: int) -> RequestState | None:
        return self._of_seq.get(seq)

    def all(self) -> tuple[RequestState, ...]:
        return tuple(self._of_id.values())

    def by_router(self, router: str) -> tuple[RequestState, ...]:
        return tuple(state for state in self._of_id.values() if state.router == router)

    def remove(self, state: RequestState) -> None:
        self._of_id.pop(state.id, None)
        self._of_seq.pop(state.seq, None)


class EngineCore:
    """Requests of a replica and their batches. `clock` only times the scheduler for a metric."""

    def __init__(
        self,
        config: WorkerConfig,
        scheduler: SchedulerInterface,
        predictor: Predictor,
        *,
        batches: BatchTracker,
        outbox: Outbox,
        metrics: MetricsSink,
        clock: Callable[[], float],
    ) -> None:
        self.scheduler, self.predictor = scheduler, predictor
        self._config, self._settings = config, config.scheduling
        self._batches, self._outbox = batches, outbox
        self._metrics, self._clock = metrics, clock
        self.requests = ActiveRequests()
        self.moves = KvMoves(config.topology, outbox)
        self._no_group_since_s: float | None = None
        self._failed_moves, self._next_move_s = 0, float("-inf")  # moves pause after a failure
        self._displaced = scheduler.displaced()
        self._max_queued = int(self._settings.lead_s(config.topology.spp) > 0.0)
        self._max_batch_s = {
            "fixed": self._settings.fixed_s,
            "slack": self._settings.max_batch_s,
        }.get(self._settings.budget)
        for name, *labels in FROM_ZERO:
            metrics.add(name, 0.0, *labels)

    # --- requests -----------------------------------------------------------------------------

    def submit(self, router: str, message: Submit, now: float) -> None:
        """Accept a request, or send the router the reason why not."""
        known = self.requests.get(message.id)
        if known is not None and known.router == router:
            self.abort(router, message.id, now)  # the router restarts it
        elif known is not None:
            text = f"request {message.id} already runs here for another router"
            self._outbox.to_router(router, Failed(message.id, "duplicate_id", text))
            return
        config = self._config
        try:
            state = RequestState(
                router, message, config.page_tokens, config.max_context_tokens, now
            )
            self._check_tokens(state)
            self._check_adapter(state)
            admitted = self.scheduler.submit(state.request, now, state.hashes)
        except ProtocolError as error:
            failed = Failed(message.id, "invalid_request", str(error)[:4096])
            self._outbox.to_router(router, failed)
            return
        except Refusal as refusal:
            retriable = refusal.code != "context_length_exceeded"
            failed = Failed(message.id, refusal.code, str(refusal)[:4096], retriable)
            self._outbox.to_router(router, failed)
            return
        state.admitted(admitted.seq, admitted.cached_tokens)
        self.requests.add(state)
        length = length_label(state.prompt_tokens)
        self._metrics.add("medha_scheduler_decided_total", 1.0, length)
        self._metrics.add("medha_prefix_cache_queries_total", state.submitted_tokens)
        self._metrics.add("medha_prefix_cache_hits_total", admitted.cached_tokens)
        if not admitted.promised:
            self._metrics.add("medha_requests_relegated_total", 1.0, message.slo_class)
        accepted = Accepted(message.id, admitted.cached_tokens, admitted.predicted_ttft_s)
        self._outbox.to_router(router, accepted)

    def submit_early(self, router: str, message: Submit, now: float) -> None:
        """Accept a request that came with its head, unless it runs here already.

        Its router may have published the head again before it received Accepted.
        """
        if self.requests.get(message.id) is None:
            self.submit(router, message, now)

    def _check_tokens(self, state: RequestState) -> None:
        ids, vocab = np.frombuffer(state.tokens, dtype="<i4"), self.predictor.shape.vocab
        if int(ids.min()) < 0 or int(ids.max()) >= vocab:
            raise ProtocolError(
                f"request {state.id} holds token ids from {ids.min()} to {ids.max()}: the "
                f"model's vocabulary has {vocab}"
            )

    def _check_adapter(self, state: RequestState) -> None:
        names = [adapter.name for adapter in self._config.adapters]
        if state.adapter and state.adapter not in names:
            raise ProtocolError(
                f"request {state.id} names the adapter {state.adapter!r}: this replica has"
                f" {', '.join(sorted(names)) or 'none'}"
            )

    def abort(self, router: str, id: str, now: float) -> None:
        """Stop a request whose client left; ignores unknown requests and other routers' ones."""
        state = self.requests.get(id)
        if state is not None and state.router == router:
            self.requests.remove(state)
            self.scheduler.abort(id, now)

    def abort_router(self, router: str, now: float) -> int:
        """Stop all requests of a lost router; returns their number."""
        states = self.requests.by_router(router)
        for state in states:
            self.abort(router, state.id, now)
        return len(states)

    def fail(self, state: RequestState, code: str, text: str, retriable: bool, now: float) -> None:
        """End a request that cannot be finished here."""
        self.requests.remove(state)
        self.scheduler.abort(state.id, now)
        self._outbox.to_router(state.router, Failed(state.id, code, text[:4096], retriable))

    def fail_all(self, code: str, text: str, now: float) -> None:
        """Fail every request so that another replica can serve it."""
        for state in self.requests.all():
            self.fail(state, code, text, True, now)

    # --- batches ------------------------------------------------------------------------------

    def dispatch(self, groups: tuple[int, ...], columns_healthy: bool, now: float) -> None:
        """Send batches while stage 0 of a group is free, or holds one batch if scheduling overlaps.

        If the columns are broken, groups are offered separately so that no batch spans two.
        """
        while True:
            free = frozenset(
                group for group in groups if self._batches.queued(group) <= self._max_queued
            )
            offers = [free] if columns_healthy else [frozenset((g,)) for g in sorted(free)]
            if not any(self._dispatch_next(offer, now) for offer in offers):
                return

    def _dispatch_next(self, free: frozenset[int], now: float) -> bool:
        started_s = self._clock()
        batch = self.scheduler.next_batch(now, free)
        self._metrics.observe("medha_scheduler_seconds", self._clock() - started_s)
        if batch is None:
            return False
        switches = tuple(self.moves.switch(number) for number in batch.switches)
        self._batches.send(batch, self, self.scheduler.layout, switches, now)
        decodes = sum(chunk.decode for chunk in batch.chunks)
        self._metrics.observe("medha_batch_tokens", decodes, "decode")
        self._metrics.observe("medha_batch_tokens", batch.tokens - decodes, "prefill")
        if self._max_batch_s and batch.predicted_s > 0.0:
            ratio = batch.predicted_s / self._max_batch_s
            self._metrics.observe("medha_batch_budget_ratio", ratio)
        for chunk in batch.chunks:
            if not chunk.decode:
                self._metrics.observe("medha_chunk_tokens", chunk.length)
        return True

    def rows(self, seq: int, start: int, length: int) -> bytes:
        return self._running(seq).rows(start, length)

    def introduction(self, seq: int, cached: tuple[tuple[int, int], ...]) -> SequenceStart:
        return self._running(seq).introduction(cached)

    def _running(self, seq: int) -> RequestState:
        state = self.requests.by_seq(seq)
        if state is None:
            raise ProtocolError(f"a batch names sequence {seq}, which no request owns")
        return state

    def stage_done(self, at: Coordinate, message: StageDone, now: float) -> None:
        cleared = self._batches.stage_done(at, message.number, message.elapsed_s, now)
        if cleared is not None:
            self.scheduler.stage_done(cleared.number, cleared.stage, now)

    def complete_finished(self, now: float) -> None:
        """Complete the batches that are over."""
        for tracked in self._batches.take_finished():
            if not tracked.void:
                self._complete(tracked, now)

    def prompt_scored(self, message: ScoredPrompt) -> None:
        """Pass log probabilities of a prompt on; those of a sequence that has ended are dropped."""
        state = self.requests.by_seq(message.seq)
        if state is not None:
            scored = PromptLogprobs(state.id, message.first, message.logprobs)
            self._outbox.to_router(state.router, scored)

    def _complete(self, tracked: TrackedBatch, now: float) -> None:
        batch = tracked.batch
        sampled = tuple(
            self._accept_token(tracked, chunk.seq, chunk.end, now)
            for chunk in batch.chunks
            if chunk.yields
        )
        slowest_s = max(tracked.elapsed_s)
        result = BatchResult(sampled, slowest_s if slowest_s > 0.0 else None)
        for completed in self.scheduler.complete(batch.number, result, now):
            state = self.requests.by_seq(completed.seq)
            if state is not None:
                self._finish(state, completed.reason)
        if slowest_s > 0.0:
            self._metrics.observe("medha_batch_seconds", slowest_s)
            if batch.predicted_s > 0.0:
                ratio = slowest_s / batch.predicted_s
                self._metrics.observe("medha_prediction_error_ratio", ratio)

    def _accept_token(
        self, tracked: TrackedBatch, seq: int, held_tokens: int, now: float
    ) -> Sampled:
        """Pass a sampled token to its request; a sequence without a request ends here."""
        state, token = self.requests.by_seq(seq), tracked.tokens.get(seq)
        if state is None:
            return Sampled(seq, False)
        if token is None:
            text = f"batch {tracked.batch.number} returned no token for request {state.id}"
            self.fail(state, "replica_lost", text, True, now)
            return Sampled(seq, False)
        if token.error:
            text = f"the output cannot follow its grammar further: {token.error}; simplify it"
            self.fail(state, "grammar_failed", text, False, now)
            return Sampled(seq, False)
        name = state.completed_page(held_tokens)
        state.append(token.token)
        slack = state.first_token_slack(self._settings.work_floor_s, now)
        logprobs = () if token.logprob is None else (token.logprob,)
        tokens = Tokens(state.id, state.output_tokens - 1, (token.token,), logprobs, slack)
        self._outbox.to_router(state.router, tokens)
        return Sampled(seq, bool(state.finish_reason), name)

    def _finish(self, state: RequestState, reason: str) -> None:
        self.requests.remove(state)
        finished = Finished(
            id=state.id,
            reason=state.finish_reason or reason,
            prompt_tokens=state.prompt_tokens,
            output_tokens=state.output_tokens,
            cached_tokens=state.cached_tokens,
        )
        self._outbox.to_router(state.router, finished)

    def report_failed(self) -> None:
        """Report the requests that the scheduler gave up to their routers."""
        for failure in self.scheduler.take_failed():
            state = self.requests.by_seq(failure.seq)
            if state is not None:
                self.requests.remove(state)
                failed = Failed(state.id, failure.code, failure.message[:4096], True)
                self._outbox.to_router(state.router, failed)

    def count_displaced(self) -> None:
        """Count the requests that left the promise set since the last call."""
        counts, before = self.scheduler.displaced(), self._displaced
        self._displaced = counts
        for label, count, known in zip(LENGTH_LABELS, counts, before, strict=True):
            if count > known:
                self._metrics.add("medha_scheduler_displaced_total", float(count - known), label)

    def load(self, now: float) -> Load:
        return self.scheduler.load(now)

    # --- moves --------------------------------------------------------------------------------

    def start_moves(self, now: float) -> None:
        """Drop copies whose sequence is over, and start the moves that the scheduler plans."""
        for number, seq in self.moves.copied():
            if self.requests.by_seq(seq) is None:
                self.moves.drop(number)
        if now < self._next_move_s:
            return
        for move in self.scheduler.plan_moves(now):
            self.moves.start(move, now)

    def on_move(self, at: Coordinate, message: Offered | Fetched | Withdrawn, now: float) -> None:
        """Advance a move by a rank's report."""
        match message:
            case Offered():
                result = self.moves.offered(at, message, now)
            case Fetched():
                result = self.moves.fetched(at, message, now)
            case Withdrawn():
                result = self.moves.withdrawn(at, message, now)
        if result is not None:
            self._moved(result, now)

    def cancel_overdue_moves(self, now: float) -> set[int]:
        """Cancel moves whose lease is over; returns the groups to be given up."""
        results, unresponsive = self.moves.overdue(now)
        for result in results:
            self._moved(result, now)
        return unresponsive

    def _moved(self, result: MoveResult, now: float) -> None:
        move = result.move
        self.scheduler.moved(move.id, result.ok, now)
        self._metrics.add("medha_kv_transfer_bytes_total", result.moved_bytes)
        if result.ok:
            self._failed_moves = 0
            self._metrics.observe("medha_kv_transfer_seconds", result.elapsed_s)
        else:
            log.warning("move %d failed (%s): %s", move.id, result.reason, result.error)
            self._next_move_s = now + min(2.0**self._failed_moves, MAX_PAUSE_S)
            self._failed_moves += 1
            self._metrics.add("medha_kv_transfer_failures_total", 1.0, result.reason)

    # --- groups -------------------------------------------------------------------------------

    def group_lost(self, group: int, generation: int, reason: str, now: float) -> None:
        """Void the group's batches; its requests are computed again, at most MAX_LOSSES times."""
        self._batches.lose(group)
        for result in self.moves.lose(group, now):
            self._moved(result, now)
        for seq in self.scheduler.group_lost(group, generation, now):
            state = self.requests.by_seq(seq)
            if state is None:
                continue
            self._metrics.add("medha_preemptions_total", 1.0, "group lost")
            if state.group_lost():
                text = f"request {state.id} ran on {state.losses} groups that were lost: {reason}"
                self.fail(state, "poison_request", text, False, now)

    def expire(self, served: bool, now: float) -> None:
        """Fail all requests if no group has run (`served` False) for longer than a restart takes.

        Without a group all computed KV is gone, so another replica can start over just as well.
        """
        if served:
            self._no_group_since_s = None
        elif self._no_group_since_s is None:
            self._no_group_since_s = now
        elif now - self._no_group_since_s > min(NO_GROUP_S, self._settings.growth_timeout_s):
            waited_s = now - self._no_group_since_s
            self.fail_all("replica_lost", f"no KVP group has run here for {waited_s:.0f} s", now)
