"""The giving end of a move: which pages may be read, until when, and whether they stayed whole.

    offer      the pages are this sequence's, full, computed, and written down with their epochs
    withdraw   says whether every epoch still stands: only then was nothing reused meanwhile

A grant moves nothing and locks nothing: the scheduler keeps the pages, the epochs prove it. Any
doubt (a stranger's page, a lease that ran out, a reused page) is an answer that makes the
controller call the move off. `now` is seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from medha.batch import Move
from medha.errors import EngineError
from medha.messages import Withdrawn
from medha_worker.kv.epochs import PageEpochs


class Grant(msgspec.Struct, frozen=True):
    """Pages of a move that the taker may read until `until` (seconds)."""

    move: Move
    epochs: tuple[int, ...]
    until: float


class Grants:
    """All grants of one rank. Belongs to the thread that runs steps, which orders it with them."""

    def __init__(self, group: int, epochs: PageEpochs) -> None:
        self._group, self._epochs = group, epochs
        self._grants: dict[int, Grant] = {}

    def __contains__(self, move: int) -> bool:
        return move in self._grants

    def offer(
        self, move: Move, held: Mapping[int, int], partial: int | None, lease_s: float, now: float
    ) -> Grant:
        """Grant a move's pages; raises EngineError for what is not there to give.

        `held`: logical page -> page id of the sequence in this group; `partial`: its logical page
        that is not full yet, None if all are.
        """
        check_move(move)
        if move.source != self._group:
            raise EngineError(
                f"move {move.id} has source {move.source}: this is group {self._group}"
            )
        if move.id in self._grants:
            raise EngineError(f"move {move.id} is granted already: a move id is used once")
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
        grant = Grant(move, self._epochs.of(move.from_pages), now + lease_s)
        self._grants[move.id] = grant
        return grant

    def withdraw(self, move: int, now: float) -> Withdrawn:
        """End a grant; `intact` only if it stood, in time, and no page was handed out anew."""
        grant = self._grants.pop(move, None)
        if grant is None or now > grant.until:
            return Withdrawn(move, False)
        return Withdrawn(move, self._epochs.of(grant.move.from_pages) == grant.epochs)


def check_move(move: Move) -> None:
    """Raises EngineError when a move's lists disagree, are empty, or name a page twice."""
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
