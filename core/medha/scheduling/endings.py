"""How a sequence ends, or begins anew: pages come back once, when nothing in flight uses them.

    over         finished, aborted or failed: its pages return and it is forgotten
    taken back   preempted or hit by a lost group: its pages return and it waits again, with what it
                 emitted as part of its prompt; pages that are findable by hash are found again

Both wait until no batch and no copy of pages in flight names the sequence. Work that waits is taken
off at once, so pending work returns to exactly zero.
"""

from __future__ import annotations

import msgspec

from medha.scheduling.decodes import Decodes
from medha.scheduling.growth import Groups
from medha.scheduling.sequence import Sequence
from medha.scheduling.starts import Starts


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request that this replica could not finish; `code` is for the client."""

    seq: int
    request_id: str
    code: str
    message: str


class Endings:
    """`ended`: sequences whose pages came back, not yet told to the ranks."""

    def __init__(self, groups: Groups, decodes: Decodes, starts: Starts) -> None:
        self.groups, self.decodes, self.starts = groups, decodes, starts
        self.sequences: dict[int, Sequence] = {}
        self.by_id: dict[str, Sequence] = {}
        self.ended: list[int] = []
        self.failed: list[Failure] = []
        self.homeless: dict[int, Sequence] = {}

    def end(self, sequence: Sequence) -> None:
        """It is over; unknown to the outside from now on."""
        self._stop(sequence)
        sequence.over = True
        if self.by_id.get(sequence.id) is sequence:
            del self.by_id[sequence.id]
        self.homeless.pop(sequence.number, None)
        self.settle(sequence)

    def fail(self, sequence: Sequence, code: str, message: str) -> None:
        """It is over, and whoever sent it is to be told why."""
        self.failed.append(Failure(sequence.number, sequence.id, code, message))
        self.end(sequence)

    def take_back(self, sequence: Sequence, now: float) -> None:
        """Compute it anew. A decode's next token is due as soon as a first one would be."""
        if sequence.over or sequence.taken_back:
            return
        decoding = sequence.decoding
        self._stop(sequence)
        sequence.taken_back = True
        if decoding:
            request = sequence.request
            sequence.kept = sequence.promised = False
            sequence.key = (now + request.ttft_deadline_s, request.arrival_s, request.id)
        self.settle(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Return its pages once nothing in flight uses them."""
        if not (sequence.over or sequence.taken_back):
            return
        for move in sequence.switching:
            if move.target in self.groups:
                self.groups.pool[move.target].release(move.to_pages)
            sequence.moving -= 1
        sequence.switching.clear()
        if sequence.in_flight or sequence.moving or sequence.number not in self.sequences:
            return
        began = sequence.started
        self.groups.release(sequence)
        if began:
            self.starts.running -= 1
            self.ended.append(sequence.number)
        if sequence.over:
            del self.sequences[sequence.number]
            return
        sequence.reset()
        sequence.taken_back = False
        self.groups.enlist(sequence, self.house(sequence))

    def house(self, sequence: Sequence) -> int:
        """Choose its groups; returns how much of it they have cached. Without a group it waits."""
        if not self.groups.generation:
            self.homeless[sequence.number] = sequence
            return 0
        return self.groups.plan(sequence)

    def take_ended(self) -> tuple[int, ...]:
        ended, self.ended = tuple(self.ended), []
        return ended

    def _stop(self, sequence: Sequence) -> None:
        """Nothing new of it is packed."""
        self.groups.strike(sequence)
        if self.decodes.withdraw(sequence):
            sequence.in_flight -= 1
        self.decodes.end(sequence)
        self.starts.outlook.ended(sequence)
