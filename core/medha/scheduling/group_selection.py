"""Choice of the KVP groups that run a batch together now, and of how long it may take.

A chunk or decode of a sequence that spans groups needs stage 0 of all of them at once. A group that
waits for the others may run an independent batch meanwhile, if that batch ends in time:

    g0  |---- independent, fits the gap ----|== shared ==|
    g1  |------- busy ----------------------|== shared ==|

The sequence that has waited longest comes first, and only it holds groups back. Busy groups always
finish, so that no circle of waiting forms. After `max_starved_rounds` independent batches a group
waits idle; before that, not for a relegated prompt that had the groups together and was declined. A
group never idles where that costs a promise (for a promised prompt: one of that group alone). For a
sequence declined just now nothing waits, and no batch is cut: two that give way in turn would hold
a group idle for ever.
"""

from __future__ import annotations

from collections import abc
from math import inf

from medha.scheduling.sequence import Sequence
from medha.scheduling.state import SchedulerState


class GroupSelector:
    """Chooses group sets. `active`: the last choice involved sequences that span groups."""

    def __init__(self, state: SchedulerState) -> None:
        self.state, self.groups = state, state.groups
        self.in_flight, self.promises = state.in_flight, state.promises
        self.min_batch_s = state.settings.min_batch_s
        self.max_starved_rounds = state.settings.max_starved_rounds
        self.active = False
        self._blocked: list[tuple[Sequence, tuple[int, ...]]] = []
        self._able: list[tuple[Sequence, tuple[int, ...]]] = []
        self._declined_s: dict[int, float] = {}  # when its groups were free and it did not run

    def clear(self) -> None:
        """Forget the last choice: no sequence spans groups any more."""
        self.active = False
        self._blocked, self._able = [], []
        self._declined_s.clear()

    def candidates(
        self, eligible: frozenset[int], now: float
    ) -> abc.Iterator[tuple[tuple[int, ...], float]]:
        """Yield (group set, limit in s) to try in turn: shared ones first, then single groups."""
        held: set[int] = set()
        limits: dict[int, float] = {}
        shared: list[tuple[int, ...]] = []
        self.active = True
        self._blocked, self._able = [], []
        for sequence, wants in self._wanting(now):
            if eligible.issuperset(wants) and held.isdisjoint(wants):
                shared.append(wants)
                self._able.append((sequence, wants))
                continue
            self._blocked.append((sequence, wants))
            sequence.block(now)
            declined_s = self._declined_s.get(sequence.number, -inf)
            if now - declined_s < 0.1 * self.min_batch_s:
                continue
            away = [group for group in wants if group not in eligible]
            gap_s = max((self.in_flight.free_in_s(group, now) for group in away), default=0.0)
            for group in wants:
                starved = sequence.rounds_skipped >= self.max_starved_rounds
                if not self._may_hold(sequence, group, gap_s, starved, now):
                    continue
                if gap_s >= self.min_batch_s and not starved:
                    limits[group] = min(limits.get(group, inf), gap_s)
                else:
                    held.add(group)
        while shared:
            group_set = set(shared.pop(0))
            joined = True
            while joined:
                near = [wants for wants in shared if not group_set.isdisjoint(wants)]
                shared = [wants for wants in shared if group_set.isdisjoint(wants)]
                joined = bool(near)
                group_set.update(*near)
            yield tuple(sorted(group_set)), inf
        for group in sorted(eligible - held):
            yield (group,), limits.get(group, inf)

    def _may_hold(
        self, sequence: Sequence, group: int, gap_s: float, starved: bool, now: float
    ) -> bool:
        """Return whether the group may idle for the sequence until the others are free."""
        if sequence.promised and self.promises.promising:
            return self.promises.can_idle_for_promise(group, gap_s, now)
        deserves = sequence.kept or starved or not sequence.declined_together
        return deserves and self.promises.can_idle(group, gap_s, now)

    def decline_others(self, group_set: tuple[int, ...], chosen: set[int], now: float) -> None:
        """Decline the sequences that could have run in a drafted batch and are not in it.

        They gave way to more urgent ones, so that no group needs to be held back for them.
        """
        for sequence, wants in self._able:
            if set(group_set).issuperset(wants) and sequence.number not in chosen:
                sequence.decline()
                self._declined_s[sequence.number] = now

    def count_round(self, group_set: tuple[int, ...]) -> None:
        """Count a batch for the sequences that it makes wait."""
        for sequence, wants in self._blocked:
            if not set(group_set).isdisjoint(wants):
                sequence.skip_round()

    def _wanting(self, now: float) -> list[tuple[Sequence, tuple[int, ...]]]:
        """Return the sequences that lack only free groups, longest waiting first."""
        if not self.groups.shared or not self.state.columns_ready:
            return []
        wanting = []
        for sequence in self.groups.shared.values():
            wants = self.wants(sequence)
            if len(wants) > 1:
                wanting.append((sequence, wants))
        wanting.sort(
            key=lambda pair: (
                now if pair[0].blocked_since_s is None else pair[0].blocked_since_s,
                pair[0].number,
            )
        )
        return wanting

    def wants(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the groups of the next decode or chunk; none if it cannot run now.

        A promised prompt is about to run if its chunk is on stage 0 and the next needs one more.
        """
        if sequence.stopped:
            return ()
        if sequence.decoding:
            return sequence.next_groups
        if not sequence.started or not (sequence.ready or sequence.promised):
            return ()
        if not sequence.remaining_tokens:
            return ()
        tail, room = self.groups.next_tail(sequence)
        if not room or not (sequence.ready or tail not in sequence.groups):
            return ()
        groups = {*sequence.groups, tail}
        for move in sequence.switching:
            groups.update((move.source, move.target))
        return tuple(sorted(groups))
