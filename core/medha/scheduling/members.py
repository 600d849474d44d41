"""KVP groups that come and go: who joins, what a loss takes with it, how many are wanted.

A group that joins serves at once; long sequences that claimed pages take them there. A group that
is lost takes its pages and its batches in flight along: whoever had a part in either is computed
anew, and finds again by hash what other groups hold of it. A group that has held nothing for a
while may go.
"""

from __future__ import annotations

from medha.config import Scheduling
from medha.scheduling.crews import Crews
from medha.scheduling.decodes import Decodes
from medha.scheduling.endings import Endings
from medha.scheduling.growth import Groups
from medha.scheduling.inflight import Flights
from medha.scheduling.ledger import Ledger
from medha.scheduling.sequence import Sequence
from medha.topology import Topology


class Members:
    """Membership of the replica; `generation` of the KVP columns that shared chunks use."""

    def __init__(
        self, groups: Groups, ledger: Ledger, flights: Flights, decodes: Decodes, endings: Endings,
        crews: Crews, topology: Topology, settings: Scheduling,
    ) -> None:  # fmt: skip
        self.groups, self.ledger, self.flights, self.decodes = groups, ledger, flights, decodes
        self.endings, self.crews = endings, crews
        self.topology, self.settings = topology, settings
        self.generation = 0

    def joined(self, group: int, generation: int, now: float) -> None:
        """A group runs, and the columns of `generation` include it."""
        self.groups.join(group, generation, now)
        self.flights.of_group[group] = []
        self.ledger.join(group)
        self.regenerated(generation)
        shared = self.groups.shared.values()
        live = (one for one in shared if not (one.over or one.taken_back))
        claiming = sorted(live, key=lambda one: one.number)
        for sequence in self.groups.claim_in(group, claiming):
            if not sequence.decoding and sequence.packed < sequence.goal:
                self.groups.enlist(sequence)
            self.endings.starts.outlook.moved(sequence)
        for sequence in list(self.endings.sequences.values()):
            idle = not (sequence.started or sequence.over or sequence.taken_back)
            if idle and 0 < len(sequence.plan) < self.groups.groups_needed(sequence):
                self.groups.strike(sequence)  # it was planned when fewer groups ran
                self.groups.enlist(sequence, self.endings.house(sequence))
        homeless, self.endings.homeless = self.endings.homeless, {}
        for sequence in homeless.values():
            self.groups.enlist(sequence, self.endings.house(sequence))

    def regenerated(self, generation: int) -> None:
        """Columns of a newer generation stand; shared chunks use them from now on."""
        if generation >= self.generation:
            self.generation = generation
            self.crews.columns = True

    def lost(self, group: int, generation: int, now: float) -> tuple[int, ...]:
        """A group is gone with its pages: its batches are void, and every sequence in them or with
        pages there is taken back. Shared chunks wait for columns newer than the current ones,
        unless `generation` is newer already. Returns the sequences taken back."""
        if group not in self.groups:
            return ()
        hit: dict[int, Sequence] = {}
        for flight in self.flights.naming(group):
            self.flights.remove(flight.batch.number)
            for chunk in flight.batch.chunks:
                sequence = self.endings.sequences[chunk.seq]
                sequence.in_flight -= 1
                if chunk.decode:
                    self.decodes.back(chunk.groups)
                hit[chunk.seq] = sequence
        for sequence in self.endings.sequences.values():
            if group in sequence.held or group in sequence.plan or group in sequence.reserved:
                hit[sequence.number] = sequence
        live = [one for one in hit.values() if not one.over and not one.taken_back]
        for sequence in live:
            self.groups.strike(sequence)
            if self.decodes.withdraw(sequence):
                sequence.in_flight -= 1
        self.groups.leave(group)
        self.ledger.leave(group)
        self.flights.of_group.pop(group)
        self.crews.columns = generation > self.generation or len(self.groups.generation) < 2
        self.generation = max(self.generation, generation)
        for sequence in hit.values():
            self.groups.forget_group(sequence, group)
        for sequence in live:
            self.endings.take_back(sequence, now)
        for sequence in hit.values():
            self.endings.settle(sequence)
        return tuple(sorted(one.number for one in live))

    def released(self, group: int, generation: int, now: float) -> None:
        """A releasable group has left in good order."""
        self.lost(group, max(generation, self.generation + 1), now)
        self.generation = max(generation, self.generation)

    def wanted(self, now: float) -> int:
        """How many groups should run, 0 .. wanted-1."""
        idle = len(self.releasable(now))
        highest = max(self.groups.generation, default=-1) + 1
        need = max(
            (self.groups.groups_needed(one) for one in self.endings.sequences.values()), default=0
        )
        pool = self.groups.pool
        claimed = -(-pool.claimed // pool.pages_per_group)
        wanted = max(highest - idle, need, highest + claimed if claimed else 0)
        return min(self.topology.kvp_max, max(self.topology.kvp_min, wanted))

    def releasable(self, now: float) -> tuple[int, ...]:
        """Groups, highest first, that have held nothing for `release_cooldown_s`."""
        return self.groups.releasable(self.topology.kvp_min, now - self.settings.release_cooldown_s)
