"""Which KVP groups run a batch together now, and how long it may take.

A chunk or decode of a sequence that spans groups needs stage 0 of all of them at once; a group that
waits for the others may run an independent batch meanwhile, if that batch ends in time:

    g0  |---- independent, fits the gap ----|== shared ==|
    g1  |------- busy ----------------------|== shared ==|

Who waited longest comes first, and only it holds groups back: busy groups always finish, hence no
circle of waiting. After `max_starved_rounds` independent batches a group waits idle; until then it
does not for a relegated prompt that had the groups together last time and was not taken; never
where that costs a promise (for a promised one: of those that live in this group alone), nor for any
that had its groups together just now. Two that give way in turn would hold a group idle for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from medha.scheduling.growth import Groups
from medha.scheduling.inflight import Flights
from medha.scheduling.ledger import Ledger
from medha.scheduling.sequence import Sequence


class Crews:
    """Chooses crews. `columns`: whether shared chunks can run at all at this moment."""

    def __init__(
        self, groups: Groups, flights: Flights, ledger: Ledger, min_batch_s: float,
        max_starved_rounds: int,
    ) -> None:  # fmt: skip
        self.groups, self.flights, self.ledger = groups, flights, ledger
        self.min_batch_s, self.max_starved_rounds = min_batch_s, max_starved_rounds
        self.columns = True
        self._blocked: list[tuple[Sequence, tuple[int, ...]]] = []
        self._able: list[tuple[Sequence, tuple[int, ...]]] = []
        self._gave_way: dict[int, float] = {}  # when it had its groups together and was not taken

    def candidates(
        self, eligible: frozenset[int], now: float
    ) -> Iterator[tuple[tuple[int, ...], float]]:
        """(crew, limit in s) to try in turn: shared ones first, then groups alone."""
        if not self.groups.shared:
            self._blocked, self._able = [], []
            self._gave_way.clear()
            for group in sorted(eligible):
                yield (group,), inf
            return
        held: set[int] = set()
        limits: dict[int, float] = {}
        shared: list[tuple[int, ...]] = []
        self._blocked, self._able = [], []
        for sequence, wants in self._wanting(now):
            if eligible.issuperset(wants) and held.isdisjoint(wants):
                shared.append(wants)
                self._able.append((sequence, wants))
                continue
            self._blocked.append((sequence, wants))
            if sequence.waiting_since_s is None:
                sequence.waiting_since_s = now
            away = [group for group in wants if group not in eligible]
            gap_s = max((self.flights.free_in_s(group, now) for group in away), default=0.0)
            for group in wants:
                starved = sequence.passed >= self.max_starved_rounds
                if gap_s >= self.min_batch_s and not starved:
                    limits[group] = min(limits.get(group, inf), gap_s)
                elif now - self._gave_way.get(sequence.number, -inf) < 0.1 * self.min_batch_s:
                    continue
                elif self._may_hold(sequence, group, gap_s, starved, now):
                    held.add(group)
        while shared:
            crew = set(shared.pop(0))
            joined = True
            while joined:
                near = [wants for wants in shared if not crew.isdisjoint(wants)]
                shared = [wants for wants in shared if crew.isdisjoint(wants)]
                joined = bool(near)
                crew.update(*near)
            yield tuple(sorted(crew)), inf
        for group in sorted(eligible - held):
            yield (group,), limits.get(group, inf)

    def _may_hold(
        self, sequence: Sequence, group: int, gap_s: float, starved: bool, now: float
    ) -> bool:
        """Whether the group may idle for it until the others are there."""
        if sequence.promised and self.ledger.promising:
            return self.ledger.lets_idle(group, gap_s, now)
        wants = sequence.kept or starved or not sequence.refused
        return wants and self.ledger.affords(group, gap_s, now)

    def tried(self, crew: tuple[int, ...], taken: set[int], now: float) -> None:
        """A crew was planned for: whoever could have run in it and was not taken gave way to what
        is more urgent, so that no group needs to be held back for it."""
        for sequence, wants in self._able:
            if set(crew).issuperset(wants) and sequence.number not in taken:
                sequence.passed, sequence.waiting_since_s, sequence.refused = 0, None, True
                self._gave_way[sequence.number] = now

    def ran(self, crew: tuple[int, ...]) -> None:
        """A batch of this crew was packed: those that it made wait count it."""
        for sequence, wants in self._blocked:
            if not set(crew).isdisjoint(wants):
                sequence.passed += 1

    def _wanting(self, now: float) -> list[tuple[Sequence, tuple[int, ...]]]:
        """Sequences that could run now but for the groups they share, longest waiting first."""
        if not self.groups.shared or not self.columns:
            return []
        wanting = []
        for sequence in self.groups.shared.values():
            wants = self.wants(sequence)
            if len(wants) > 1:
                wanting.append((sequence, wants))
        wanting.sort(
            key=lambda pair: (
                now if pair[0].waiting_since_s is None else pair[0].waiting_since_s,
                pair[0].number,
            )
        )
        return wanting

    def wants(self, sequence: Sequence) -> tuple[int, ...]:
        """Groups of its next decode or chunk; none when it cannot run now."""
        if sequence.over or sequence.taken_back:
            return ()
        if sequence.decoding:
            chunk = sequence.next_chunk
            return () if chunk is None else chunk.groups
        if not sequence.ready or not sequence.started:
            return ()
        tail, room = self.groups.next_tail(sequence)
        if not room:
            return ()
        parts = {*sequence.groups, tail}
        for move in sequence.switching:
            parts.update((move.source, move.target))
        return tuple(sorted(parts))
