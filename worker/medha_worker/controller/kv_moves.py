"""Moves of KV pages between groups: copied in the background, switched by a numbered batch.

    start ── OfferPages to the source ──> all Offered ── FetchPages to the target ──> all Fetched
      ── Withdraw to the source ──> all Withdrawn intact ──> moved(ok) ──> a batch switches it

Each rank of the source group moves its own layers and heads to the rank at the same stage and
shard of the target. The grants are withdrawn before the copy counts: only then is it certain that
no page was reused while it was read. The sequence holds its source pages until the switch. On any
doubt (an error, pages not intact, no answer within the lease, a lost group) the move is cancelled:
every target rank must stop reading before `moved(False)` lets its pages be used again, and the
source keeps its pages. Decides nothing about which pages move.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from medha.batch import Move
from medha.messages import Fetched, FetchPages, Offered, OfferPages, Withdraw, Withdrawn
from medha.topology import Coordinate, Topology
from medha_worker.controller.outbox import Outbox

LEASE_S = 30.0
REASONS = ("offer", "fetch", "changed", "lease", "lost")
"""Why a move fails: not offered, not read, its pages reused meanwhile, too slow, a group gone."""


class _Phase(Enum):
    OFFERING = "offering"
    FETCHING = "fetching"
    WITHDRAWING = "withdrawing"
    COPIED = "copied"
    CANCELLING = "cancelling"


class MoveResult(msgspec.Struct, frozen=True):
    """End of a move: if `ok`, every target rank holds its copy, otherwise `error` explains.

    `reason` is the error's kind, one of REASONS.
    """

    move: Move
    ok: bool
    error: str = ""
    reason: str = ""
    moved_bytes: int = 0
    elapsed_s: float = 0.0


class _ActiveMove:
    """Move under way: source ranks whose answer is awaited, target ranks that still read."""

    def __init__(self, move: Move, sources: tuple[Coordinate, ...], now: float) -> None:
        self.move, self.started_s, self.ends_s = move, now, now + LEASE_S
        self.phase = _Phase.OFFERING
        self.awaited = set(sources)
        self.reading: set[Coordinate] = set()
        self.error = self.reason = ""
        self.moved_bytes = 0

    def result(self, now: float) -> MoveResult:
        return MoveResult(
            self.move,
            not self.error,
            self.error,
            self.reason,
            self.moved_bytes,
            now - self.started_s,
        )


class KvMoves:
    """Every move under way, by id."""

    def __init__(self, topology: Topology, outbox: Outbox) -> None:
        self._topology, self._outbox = topology, outbox
        self._moves: dict[int, _ActiveMove] = {}

    def __len__(self) -> int:
        return len(self._moves)

    def start(self, move: Move, now: float) -> None:
        sources = self._topology.group_ranks(move.source)
        self._moves[move.id] = _ActiveMove(move, sources, now)
        self._outbox.to_ranks(sources, OfferPages(move, LEASE_S))

    def offered(self, at: Coordinate, message: Offered, now: float) -> MoveResult | None:
        """Let the target rank read the pages that its source rank granted, or cancel the move."""
        active = self._moves.get(message.move)
        if active is None or active.phase is not _Phase.OFFERING or at not in active.awaited:
            return None
        if message.error or len(message.epochs) != len(active.move.logical):
            error = message.error or f"rank {at} granted {len(message.epochs)} pages"
            return self._cancel(active, "offer", error, now)
        active.awaited.discard(at)
        target = Coordinate(active.move.target, at.stage, at.shard)
        active.reading.add(target)
        left_s = max(active.ends_s - now, 0.0)
        order = FetchPages(active.move, message.epochs, message.digests, left_s)
        self._outbox.to_ranks((target,), order)
        if not active.awaited:
            active.phase = _Phase.FETCHING
            self._withdraw_if_read(active)
        return None

    def fetched(self, at: Coordinate, message: Fetched, now: float) -> MoveResult | None:
        """Record that a target rank holds its copy, or stopped reading without one."""
        active = self._moves.get(message.move)
        if active is None or at not in active.reading:
            return None
        active.reading.discard(at)
        active.moved_bytes += message.moved_bytes
        if active.phase is _Phase.CANCELLING:
            return self._take_cancelled(active, now)
        if not message.ok:
            return self._cancel(active, "fetch", message.error or f"rank {at} could not read", now)
        self._withdraw_if_read(active)
        return None

    def _withdraw_if_read(self, active: _ActiveMove) -> None:
        """Once all copies exist, end the grants."""
        if active.phase is _Phase.FETCHING and not active.reading:
            active.phase = _Phase.WITHDRAWING
            active.awaited = set(self._topology.group_ranks(active.move.source))
            self._outbox.to_ranks(sorted(active.awaited), Withdraw(active.move.id))

    def withdrawn(self, at: Coordinate, message: Withdrawn, now: float) -> MoveResult | None:
        """Record the end of a source rank's grant; once all ended intact, the copy counts."""
        active = self._moves.get(message.move)
        if active is None or active.phase is not _Phase.WITHDRAWING or at not in active.awaited:
            return None
        if not message.intact:
            error = f"pages at rank {at} were reused, or the lease was over, while they were read"
            return self._cancel(active, "changed", error, now)
        active.awaited.discard(at)
        if active.awaited:
            return None
        active.phase = _Phase.COPIED
        return active.result(now)

    def _cancel(
        self, active: _ActiveMove, reason: str, error: str, now: float
    ) -> MoveResult | None:
        """Cancel a move: sources end their grants, targets stop reading and drop their copies."""
        if active.phase is not _Phase.CANCELLING:
            active.phase, active.reason, active.error = _Phase.CANCELLING, reason, error
            both = (active.move.source, active.move.target)
            ranks = (at for group in both for at in self._topology.group_ranks(group))
            self._outbox.to_ranks(ranks, Withdraw(active.move.id))
        return self._take_cancelled(active, now)

    def _take_cancelled(self, active: _ActiveMove, now: float) -> MoveResult | None:
        """Remove a cancelled move and return its result, once no target rank reads any more."""
        if active.reading:
            return None
        del self._moves[active.move.id]
        return active.result(now)

    def switch(self, number: int) -> Move:
        """End a copied move with the batch that switches it, and return the move."""
        return self._moves.pop(number).move

    def copied(self) -> tuple[tuple[int, int], ...]:
        """List (id, sequence) of the moves that are copied and await their switch."""
        return tuple(
            (number, active.move.seq)
            for number, active in self._moves.items()
            if active.phase is _Phase.COPIED
        )

    def drop(self, number: int) -> None:
        """Drop a copied move whose sequence is over: its targets drop their copies."""
        active = self._moves.pop(number)
        self._outbox.to_ranks(self._topology.group_ranks(active.move.target), Withdraw(number))

    def overdue(self, now: float) -> tuple[list[MoveResult], set[int]]:
        """Cancel moves whose lease is over; returns the results, and groups to be given up.

        A target group that does not confirm a cancellation within another lease is given up.
        """
        results, unresponsive = [], set()
        for active in list(self._moves.values()):
            if now < active.ends_s or active.phase is _Phase.COPIED:
                continue
            if active.phase is _Phase.CANCELLING:
                unresponsive.add(active.move.target)
                continue
            active.ends_s = now + LEASE_S
            result = self._cancel(active, "lease", f"the lease of {LEASE_S:g} s is over", now)
            if result:
                results.append(result)
        return results, unresponsive

    def lose(self, group: int, now: float) -> list[MoveResult]:
        """Cancel the moves of a lost group; its ranks read no more, since they are gone."""
        results = []
        for number, active in list(self._moves.items()):
            if group not in (active.move.source, active.move.target):
                continue
            if group == active.move.target:
                active.reading = set()
            if active.phase is _Phase.COPIED:
                self.drop(number)
                continue
            result = self._cancel(active, "lost", f"group {group} is lost", now)
            if result:
                results.append(result)
        return results
