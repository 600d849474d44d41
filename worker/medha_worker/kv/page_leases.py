"""The source side of a move: which pages may be read, until when, and whether they stayed intact.

    offer      checks that the pages are the sequence's, full and computed; records their epochs
    withdraw   reports whether all epochs are unchanged: only then was no page reused

A lease moves nothing and locks nothing: the scheduler keeps the pages, and the epochs prove it. Any
doubt (a foreign page, an expired lease, a reused page) makes the controller cancel the move. `now`
is seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from medha.batch import Move
from medha.errors import EngineError
from medha.messages import Withdrawn
from medha_worker.kv.pages import PageEpochs


class PageLease(msgspec.Struct, frozen=True):
    """Pages of a move that the target may read until `until` (seconds)."""

    move: Move
    epochs: tuple[int, ...]
    until: float


class PageLeases:
    """All leases of a rank. Belongs to the thread that runs steps, which orders leases with
    them."""

    def __init__(self, group: int, epochs: PageEpochs) -> None:
        self._group, self._epochs = group, epochs
        self._leases: dict[int, PageLease] = {}

    def __contains__(self, move: int) -> bool:
        return move in self._leases

    def offer(
        self, move: Move, held: Mapping[int, int], partial: int | None, lease_s: float, now: float
    ) -> PageLease:
        """Lease a move's pages. Raises EngineError if this rank does not hold them.

        `held`: logical page -> page id of the sequence in this group; `partial`: its logical page
        that is not full yet, None if all are.
        """
        check_move(move)
        if move.source != self._group:
            raise EngineError(
                f"move {move.id} has source {move.source}: this is group {self._group}"
            )
        if move.id in self._leases:
            raise EngineError(f"move {move.id} is leased already: a move id is used once")
        self._epochs.check(move.from_pages)
        for logical, page in zip(move.logical, move.from_pages, strict=True):
            if held.get(logical) != page:
                raise EngineError(
                    f"logical page {logical} of sequence {move.seq} is {held.get(logical)} here, "
                    f"not {page}: stale move {move.id}"
                )
            if logical == partial:
                raise EngineError(
                    f"logical page {logical} of sequence {move.seq} is not full yet: "
                    f"move {move.id} must wait"
                )
        lease = PageLease(move, self._epochs.of(move.from_pages), now + lease_s)
        self._leases[move.id] = lease
        return lease

    def withdraw(self, move: int, now: float) -> Withdrawn:
        """End a lease; `intact` only if it existed, had not expired, and none of its pages was
        reused."""
        lease = self._leases.pop(move, None)
        if lease is None or now > lease.until:
            return Withdrawn(move, False)
        return Withdrawn(move, self._epochs.of(lease.move.from_pages) == lease.epochs)


def check_move(move: Move) -> None:
    """Raise EngineError if a move's lists disagree, are empty, or repeat a page."""
    sizes = {len(move.logical), len(move.from_pages), len(move.to_pages)}
    if len(sizes) != 1 or 0 in sizes:
        raise EngineError(
            f"move {move.id} has {len(move.logical)} logical pages, {len(move.from_pages)} to read "
            f"and {len(move.to_pages)} to write: must be equal and at least 1"
        )
    for pages in (move.logical, move.from_pages, move.to_pages):
        if len(set(pages)) != len(pages) or min(pages) < 0:
            raise EngineError(f"move {move.id} names pages {pages}: must be distinct, from 0")
    if move.source == move.target:
        raise EngineError(f"move {move.id} goes from group {move.source} to itself")
