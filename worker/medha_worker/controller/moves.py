"""Moves of KV pages between groups: copied in the background, switched by a numbered batch.

    plan ── OfferPages to the source ──> all Offered ── FetchPages to the target ──> all Fetched
      ── Withdraw to the source ──> all Withdrawn intact ──> moved(ok) ──> a batch switches it

Each rank of the source group moves its own layers and heads to the rank at the same stage and
shard of the target. The grants are withdrawn before the copy counts, since only then is it known
that no page was reused while it was read; the sequence holds its source pages until the switch. Any
doubt (an error, pages not intact, a rank that does not answer within the lease, a lost group) calls
the move off: target ranks must be terminal before `moved(False)` lets their pages be used again,
and the source keeps what it has. Decides nothing about which pages move.
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


class Outcome(msgspec.Struct, frozen=True):
    """A move is decided: `ok` copies stand on every target rank, otherwise `error` says why not.

    `reason` is the error's kind, one of REASONS.
    """

    move: Move
    ok: bool
    error: str = ""
    reason: str = ""
    moved_bytes: int = 0
    elapsed_s: float = 0.0


class _Under:
    """One move under way: source ranks whose answer is awaited, target ranks that still read."""

    def __init__(self, move: Move, sources: tuple[Coordinate, ...], now: float) -> None:
        self.move, self.begun_s, self.ends_s = move, now, now + LEASE_S
        self.phase = _Phase.OFFERING
        self.awaited = set(sources)
        self.reading: set[Coordinate] = set()
        self.error = self.reason = ""
        self.moved_bytes = 0

    def outcome(self, now: float) -> Outcome:
        return Outcome(
            self.move,
            not self.error,
            self.error,
            self.reason,
            self.moved_bytes,
            now - self.begun_s,
        )


class Moves:
    """Every move under way, by id."""

    def __init__(self, topology: Topology, outbox: Outbox) -> None:
        self._topology, self._outbox = topology, outbox
        self._moves: dict[int, _Under] = {}

    def __len__(self) -> int:
        return len(self._moves)

    def begin(self, move: Move, now: float) -> None:
        sources = self._topology.group_ranks(move.source)
        self._moves[move.id] = _Under(move, sources, now)
        self._outbox.to_ranks(sources, OfferPages(move, LEASE_S))

    def offered(self, at: Coordinate, message: Offered, now: float) -> Outcome | None:
        """A source rank granted its pages, or not; its twin in the target group may read them."""
        under = self._moves.get(message.move)
        if under is None or under.phase is not _Phase.OFFERING or at not in under.awaited:
            return None
        if message.error or len(message.epochs) != len(under.move.logical):
            error = message.error or f"rank {at} granted {len(message.epochs)} pages"
            return self._cancel(under, "offer", error, now)
        under.awaited.discard(at)
        twin = Coordinate(under.move.target, at.stage, at.shard)
        under.reading.add(twin)
        left_s = max(under.ends_s - now, 0.0)
        order = FetchPages(under.move, message.epochs, message.digests, left_s)
        self._outbox.to_ranks((twin,), order)
        if not under.awaited:
            under.phase = _Phase.FETCHING
            self._advance(under)
        return None

    def fetched(self, at: Coordinate, message: Fetched, now: float) -> Outcome | None:
        """A target rank holds its copy, or is terminal without one."""
        under = self._moves.get(message.move)
        if under is None or at not in under.reading:
            return None
        under.reading.discard(at)
        under.moved_bytes += message.moved_bytes
        if under.phase is _Phase.CANCELLING:
            return self._called_off(under, now)
        if not message.ok:
            return self._cancel(under, "fetch", message.error or f"rank {at} could not read", now)
        self._advance(under)
        return None

    def _advance(self, under: _Under) -> None:
        """All copies are there: end the grants."""
        if under.phase is _Phase.FETCHING and not under.reading:
            under.phase = _Phase.WITHDRAWING
            under.awaited = set(self._topology.group_ranks(under.move.source))
            self._outbox.to_ranks(sorted(under.awaited), Withdraw(under.move.id))

    def withdrawn(self, at: Coordinate, message: Withdrawn, now: float) -> Outcome | None:
        """A source rank ended its grant; with the last one, all intact, the copy counts."""
        under = self._moves.get(message.move)
        if under is None or under.phase is not _Phase.WITHDRAWING or at not in under.awaited:
            return None
        if not message.intact:
            error = f"pages at rank {at} were reused, or the lease was over, while they were read"
            return self._cancel(under, "changed", error, now)
        under.awaited.discard(at)
        if under.awaited:
            return None
        under.phase = _Phase.COPIED
        return under.outcome(now)

    def _cancel(self, under: _Under, reason: str, error: str, now: float) -> Outcome | None:
        """Call it off: sources end their grants, targets stop reading and drop their copies."""
        if under.phase is not _Phase.CANCELLING:
            under.phase, under.reason, under.error = _Phase.CANCELLING, reason, error
            both = (under.move.source, under.move.target)
            ranks = (at for group in both for at in self._topology.group_ranks(group))
            self._outbox.to_ranks(ranks, Withdraw(under.move.id))
        return self._called_off(under, now)

    def _called_off(self, under: _Under, now: float) -> Outcome | None:
        if under.reading:
            return None
        del self._moves[under.move.id]
        return under.outcome(now)

    def switch(self, number: int) -> Move:
        """The move that a batch names now: ownership changes with that batch, the move is done."""
        return self._moves.pop(number).move

    def copied(self) -> tuple[tuple[int, int], ...]:
        """(id, sequence) of moves whose copy stands and whose switch has not been scheduled."""
        return tuple(
            (number, under.move.seq)
            for number, under in self._moves.items()
            if under.phase is _Phase.COPIED
        )

    def drop(self, number: int) -> None:
        """The sequence of a copied move is over: its targets drop their copies."""
        under = self._moves.pop(number)
        self._outbox.to_ranks(self._topology.group_ranks(under.move.target), Withdraw(number))

    def overdue(self, now: float) -> tuple[list[Outcome], set[int]]:
        """Leases that are over: outcomes of moves called off, and groups whose ranks do not answer.

        A target that was told to stop and says nothing for another lease is taken for lost.
        """
        outcomes, dumb = [], set()
        for under in list(self._moves.values()):
            if now < under.ends_s or under.phase is _Phase.COPIED:
                continue
            if under.phase is _Phase.CANCELLING:
                dumb.add(under.move.target)
                continue
            under.ends_s = now + LEASE_S
            outcome = self._cancel(under, "lease", f"the lease of {LEASE_S:g} s is over", now)
            if outcome:
                outcomes.append(outcome)
        return outcomes, dumb

    def lose(self, group: int, now: float) -> list[Outcome]:
        """A group is gone: its moves are called off; ranks of it are terminal by being gone."""
        outcomes = []
        for number, under in list(self._moves.items()):
            if group not in (under.move.source, under.move.target):
                continue
            if group == under.move.target:
                under.reading = set()
            if under.phase is _Phase.COPIED:
                self.drop(number)
                continue
            outcome = self._cancel(under, "lost", f"group {group} is lost", now)
            if outcome:
                outcomes.append(outcome)
        return outcomes
