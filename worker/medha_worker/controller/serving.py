"""From Submit to Finished: the scheduler's driver, its requests, its batches, its moves.

Decides nothing that the scheduler decides. It hands over requests, asks for the next batch whenever
the first stage of a group is free, sends what comes out, and tells the scheduler what came back;
to routers go Accepted, Tokens, Finished or Failed, exactly one of the last two per request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from medha.batch import BatchResult, Sampled
from medha.config import Scheduling
from medha.errors import ProtocolError, Refusal
from medha.messages import (
    Accepted,
    Failed,
    Finished,
    Load,
    SequenceStart,
    StageDone,
    Submit,
    Tokens,
)
from medha.metrics import LENGTH_LABELS, length_label
from medha.predictor import Predictor
from medha.topology import Coordinate
from medha_worker.controller.decider import Decider
from medha_worker.controller.flights import Flight, Flights
from medha_worker.controller.meters import Meters
from medha_worker.controller.moves import REASONS, Moves, Outcome
from medha_worker.controller.outbox import Outbox
from medha_worker.controller.sessions import MAX_LOSSES, Session, Sessions

MAX_PAUSE_S = 60.0
GROUPLESS_S = 10.0  # a group that is started anew is back sooner, on a machine of its own

# Shown before they count anything: a counter that appears with its first event shows no rise, and
# no alert would see it.
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


class Serving:
    """One replica's requests. `clock` times the scheduler for a metric and nothing else."""

    def __init__(
        self,
        *,
        scheduler: Decider,
        predictor: Predictor,
        sessions: Sessions,
        flights: Flights,
        moves: Moves,
        outbox: Outbox,
        meters: Meters,
        page_tokens: int,
        max_context_tokens: int,
        vocab: int,
        settings: Scheduling,
        clock: Callable[[], float],
    ) -> None:
        self.scheduler, self.predictor = scheduler, predictor
        self._sessions, self._flights = sessions, flights
        self._moves, self._outbox, self._meters = moves, outbox, meters
        self._page_tokens, self._max_context_tokens = page_tokens, max_context_tokens
        self._groupless_s: float | None = None
        self._failures, self._plan_after_s = 0, float("-inf")  # of moves: pause after a failed one
        self._displaced = scheduler.displaced()
        self._vocab, self._settings, self._clock = vocab, settings, clock
        self._queue = int(settings.lead_s(flights.topology.spp) > 0.0)
        self._longest_s = {"fixed": settings.fixed_s, "slack": settings.max_batch_s}.get(
            settings.budget
        )
        for name, *labels in FROM_ZERO:
            meters.add(name, 0.0, *labels)

    # --- requests -----------------------------------------------------------------------------

    def submit(self, router: str, message: Submit, now: float) -> None:
        """Take a request in, or answer why not."""
        known = self._sessions.of(message.id)
        if known is not None and known.router == router:
            self.abort(router, message.id, now)  # the router begins it anew
        elif known is not None:
            text = f"request {message.id} runs here for another router already"
            self._outbox.to_router(router, Failed(message.id, "duplicate_id", text))
            return
        try:
            session = Session(router, message, self._page_tokens, self._max_context_tokens, now)
            self._check_tokens(session)
            admitted = self.scheduler.submit(session.request, now, session.hashes)
        except ProtocolError as error:
            failed = Failed(message.id, "invalid_request", str(error)[:4096])
            self._outbox.to_router(router, failed)
            return
        except Refusal as refusal:
            retriable = refusal.code != "context_length_exceeded"
            failed = Failed(message.id, refusal.code, str(refusal)[:4096], retriable)
            self._outbox.to_router(router, failed)
            return
        session.cached_tokens = admitted.cached_tokens
        self._sessions.add(session, admitted.seq)
        length = length_label(session.prompt_tokens)
        self._meters.add("medha_scheduler_decided_total", 1.0, length)
        self._meters.add("medha_prefix_cache_queries_total", session.submitted_tokens)
        self._meters.add("medha_prefix_cache_hits_total", admitted.cached_tokens)
        if not admitted.promised:
            self._meters.add("medha_requests_relegated_total", 1.0, message.slo_class)
        accepted = Accepted(message.id, admitted.cached_tokens, admitted.predicted_ttft_s)
        self._outbox.to_router(router, accepted)

    def _check_tokens(self, session: Session) -> None:
        ids = np.frombuffer(session.tokens, dtype="<i4")
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab:
            raise ProtocolError(
                f"request {session.id} holds token ids from {ids.min()} to {ids.max()}: the "
                f"model's vocabulary has {self._vocab}"
            )

    def abort(self, router: str, id: str, now: float) -> None:
        """The client left; unknown requests, and those of other routers, are ignored."""
        session = self._sessions.of(id)
        if session is not None and session.router == router:
            self._sessions.remove(session)
            self.scheduler.abort(id, now)

    def abort_router(self, router: str, now: float) -> int:
        """Nobody waits for this router's requests any more; returns how many there were."""
        sessions = self._sessions.of_router(router)
        for session in sessions:
            self.abort(router, session.id, now)
        return len(sessions)

    def fail(self, session: Session, code: str, text: str, retriable: bool, now: float) -> None:
        """End a request that cannot be finished here."""
        self._sessions.remove(session)
        self.scheduler.abort(session.id, now)
        self._outbox.to_router(session.router, Failed(session.id, code, text[:4096], retriable))

    # --- batches ------------------------------------------------------------------------------

    def dispatch(self, groups: tuple[int, ...], whole: bool, now: float) -> int:
        """Send batches while a group's stage 0 is free, or one more; returns how many.

        `whole` False: the columns are broken, so groups are offered one by one and no batch can
        span two of them.
        """
        sent = 0
        while True:
            free = frozenset(one for one in groups if self._flights.queued(one) <= self._queue)
            offers = [free] if whole else [frozenset((group,)) for group in sorted(free)]
            if not any(self._next(offer, now) for offer in offers):
                return sent
            sent += 1

    def _next(self, free: frozenset[int], now: float) -> bool:
        begun = self._clock()
        batch = self.scheduler.next_batch(now, free)
        self._meters.observe("medha_scheduler_seconds", self._clock() - begun)
        if batch is None:
            return False
        switches = tuple(self._moves.switch(number) for number in batch.switches)
        self._flights.launch(batch, self, self.scheduler.layout, switches, now)
        decodes = sum(chunk.decode for chunk in batch.chunks)
        self._meters.observe("medha_batch_tokens", decodes, "decode")
        self._meters.observe("medha_batch_tokens", batch.tokens - decodes, "prefill")
        if self._longest_s and batch.predicted_s > 0.0:
            ratio = batch.predicted_s / self._longest_s
            self._meters.observe("medha_batch_budget_ratio", ratio)
        for chunk in batch.chunks:
            if not chunk.decode:
                self._meters.observe("medha_chunk_tokens", chunk.length)
        return True

    def rows(self, seq: int, start: int, length: int) -> bytes:
        return self._running(seq).rows(start, length)

    def introduction(self, seq: int, cached: tuple[tuple[int, int], ...]) -> SequenceStart:
        return self._running(seq).introduction(cached)

    def _running(self, seq: int) -> Session:
        session = self._sessions.of_seq(seq)
        if session is None:
            raise ProtocolError(f"a batch names sequence {seq}, which no request owns")
        return session

    def stage_done(self, at: Coordinate, message: StageDone, now: float) -> None:
        cleared = self._flights.stage_done(at, message.number, message.elapsed_s, now)
        if cleared is not None:
            self.scheduler.stage_done(cleared.number, cleared.stage, now)

    def settle(self, now: float) -> None:
        """Complete the batches that are over."""
        for flight in self._flights.finished():
            if not flight.void:
                self._complete(flight, now)

    def _complete(self, flight: Flight, now: float) -> None:
        sampled = tuple(
            self._sampled(flight, chunk.seq, chunk.end, now)
            for chunk in flight.batch.chunks
            if chunk.yields
        )
        slowest_s = max(flight.elapsed_s)
        result = BatchResult(sampled, slowest_s if slowest_s > 0.0 else None)
        for done in self.scheduler.complete(flight.batch.number, result, now):
            session = self._sessions.of_seq(done.seq)
            if session is not None:
                self._finish(session, done.reason)
        if slowest_s > 0.0:
            self._meters.observe("medha_batch_seconds", slowest_s)
            if flight.batch.predicted_s > 0.0:
                ratio = slowest_s / flight.batch.predicted_s
                self._meters.observe("medha_prediction_error_ratio", ratio)

    def _sampled(self, flight: Flight, seq: int, held_tokens: int, now: float) -> Sampled:
        """Hand a sampled token to its request; a request that left ends here."""
        session, out = self._sessions.of_seq(seq), flight.tokens.get(seq)
        if session is None:
            return Sampled(seq, False)
        if out is None:
            text = f"batch {flight.batch.number} brought no token for request {session.id}"
            self.fail(session, "replica_lost", text, True, now)
            return Sampled(seq, False)
        name = session.completed_page(held_tokens)
        session.append(out.token)
        ratio = None
        if session.output_tokens - session.emitted_before == 1:
            ratio = session.slack_ratio(0.0, self._settings.work_floor_s, now)
        logprobs = () if out.logprob is None else (out.logprob,)
        tokens = Tokens(session.id, session.output_tokens - 1, (out.token,), logprobs, ratio)
        self._outbox.to_router(session.router, tokens)
        return Sampled(seq, session.ending is not None, name)

    def _finish(self, session: Session, reason: str) -> None:
        ending = session.ending
        self._sessions.remove(session)
        finished = Finished(
            id=session.id,
            reason=ending.reason if ending is not None else reason,
            prompt_tokens=session.prompt_tokens,
            output_tokens=session.output_tokens,
            cached_tokens=session.cached_tokens,
        )
        self._outbox.to_router(session.router, finished)

    def count_displaced(self) -> None:
        """Count whom the scheduler dropped from the promise set since the last time."""
        now, before = self.scheduler.displaced(), self._displaced
        self._displaced = now
        for label, count, known in zip(LENGTH_LABELS, now, before, strict=True):
            if count > known:
                self._meters.add("medha_scheduler_displaced_total", float(count - known), label)

    def take_failed(self) -> None:
        """Tell routers of requests that the scheduler gave up."""
        for failure in self.scheduler.take_failed():
            session = self._sessions.of_seq(failure.seq)
            if session is not None:
                self._sessions.remove(session)
                failed = Failed(session.id, failure.code, failure.message[:4096], True)
                self._outbox.to_router(session.router, failed)

    # --- moves --------------------------------------------------------------------------------

    def plan_moves(self, now: float) -> None:
        """Begin the moves that the scheduler proposes; let go of those whose sequence is gone."""
        for number, seq in self._moves.copied():
            if self._sessions.of_seq(seq) is None:
                self._moves.drop(number)
        if now < self._plan_after_s:
            return
        for move in self.scheduler.plan_moves(now):
            self._moves.begin(move, now)

    def moved(self, outcome: Outcome | None, now: float) -> None:
        """A move is decided."""
        if outcome is None:
            return
        self.scheduler.moved(outcome.move.id, outcome.ok, now)
        self._meters.add("medha_kv_transfer_bytes_total", outcome.moved_bytes)
        if outcome.ok:
            self._failures = 0
            self._meters.observe("medha_kv_transfer_seconds", outcome.elapsed_s)
        else:
            log.warning("move %d failed (%s): %s", outcome.move.id, outcome.reason, outcome.error)
            self._plan_after_s = now + min(2.0**self._failures, MAX_PAUSE_S)
            self._failures += 1
            self._meters.add("medha_kv_transfer_failures_total", 1.0, outcome.reason)

    # --- groups -------------------------------------------------------------------------------

    def group_lost(self, group: int, generation: int, why: str, now: float) -> tuple[Flight, ...]:
        """The group's work is void; what it held is computed again, at most MAX_LOSSES times."""
        voided = self._flights.lose(group)
        for outcome in self._moves.lose(group, now):
            self.moved(outcome, now)
        for seq in self.scheduler.group_lost(group, generation, now):
            session = self._sessions.of_seq(seq)
            if session is None:
                continue
            session.losses += 1
            self._meters.add("medha_preemptions_total", 1.0, "group lost")
            if session.losses > MAX_LOSSES:
                text = f"request {session.id} was on {session.losses} groups that were lost: {why}"
                self.fail(session, "poison_request", text, False, now)
        return voided

    @property
    def correction(self) -> float:
        """Factor by which measured prefills exceed the profile's prediction."""
        return self.predictor.correction

    def load(self, now: float) -> Load:
        return self.scheduler.load(now)

    def expire(self, served: bool, now: float) -> None:
        """Without a group (`served`: one runs) what was computed is gone: requests that wait for
        one longer than it takes to start may as well begin anew on another replica."""
        if served:
            self._groupless_s = None
        elif self._groupless_s is None:
            self._groupless_s = now
        elif now - self._groupless_s > min(GROUPLESS_S, self._settings.growth_timeout_s):
            waited_s = now - self._groupless_s
            self.give_up("replica_lost", f"no KVP group runs here since {waited_s:.0f} s", now)

    def give_up(self, code: str, text: str, now: float) -> int:
        """Fail every request: nothing here can serve them in time; another replica may."""
        sessions = self._sessions.all()
        for session in sessions:
            self.fail(session, code, text, True, now)
        return len(sessions)
