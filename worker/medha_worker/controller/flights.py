"""Batches in flight: what each group's ranks were sent, what they acknowledged, what is awaited.

A batch goes to every rank of its participant groups as one Step per group; steps of a group are
numbered without gaps, kept until their batch is over, and sent again after a Gap. Stage s of a
batch is done when shard 0 of stage s in all participants said so; the batch is over when the last
stage is done and every tail group with a yielding chunk has sent its tokens. When a participant is
lost the batch is void: survivors only have to get out of it.

Knows which group knows which sequence, so that each is introduced once and forgotten once. Decides
nothing about what runs.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from medha.batch import Batch, Move
from medha.messages import Resend, SequenceStart, Step, TokenOut
from medha.topology import Coordinate, Topology
from medha_worker.controller.outbox import Outbox

NUDGE_S = 1.0

Layout = Callable[[int], tuple[tuple[int, tuple[tuple[int, int], ...]], ...]]


class Source(Protocol):
    """Where the tokens of sequences come from."""

    def rows(self, seq: int, start: int, length: int) -> bytes:
        """Token ids as int32 bytes."""
        ...

    def introduction(self, seq: int, cached: tuple[tuple[int, int], ...]) -> SequenceStart: ...


class StageCleared(msgspec.Struct, frozen=True):
    """All participants finished stage `stage` of a batch."""

    number: int
    stage: int


class Flight:
    """One batch between next_batch and complete; `groups`: participants still here."""

    def __init__(self, batch: Batch, spp: int, now: float) -> None:
        self.batch, self.sent_s = batch, now
        self.groups = set(batch.groups)
        self.shared = any(chunk.shared for chunk in batch.chunks)
        self.acks: list[set[int]] = [set() for _ in range(spp)]
        self.elapsed_s = [0.0] * spp
        self.tails = {chunk.tail for chunk in batch.chunks if chunk.yields}
        self.tokens: dict[int, TokenOut] = {}
        self.void = False
        self.doubtful = False  # its column broke: what came out of shared chunks is worthless

    @property
    def generation(self) -> int:
        return self.batch.generation

    @property
    def over(self) -> bool:
        """Nothing of it is awaited any more."""
        if self.void:
            return all(self.groups <= acks for acks in self.acks)
        return self.groups <= self.acks[-1] and not self.tails and not self.doubtful


class _GroupSteps:
    """The steps of one group: their count, those kept, ends that wait for the next one."""

    def __init__(self) -> None:
        self.last = 0
        self.kept: collections.deque[tuple[int, Step]] = collections.deque()
        self.ends: list[int] = []
        self.stirred_s = 0.0  # when it last acknowledged something, or got work while idle
        self.nudges = 0


class Flights:
    """Every batch in flight, by the number that ranks see.

    `offset` is added to the scheduler's numbers on the wire: batches that ran before it existed
    (warm-up) took the first ones.
    """

    def __init__(self, topology: Topology, outbox: Outbox) -> None:
        self.topology, self._outbox = topology, outbox
        self._flights: dict[int, Flight] = {}
        self._groups = {group: _GroupSteps() for group in range(topology.kvp_max)}
        self._knowing: dict[int, set[int]] = {}
        self._broken: dict[int, float] = {}  # generation -> when its column failed
        self.offset = 0

    def __len__(self) -> int:
        return len(self._flights)

    def of(self, wire: int) -> Flight | None:
        return self._flights.get(wire)

    def all(self) -> tuple[Flight, ...]:
        return tuple(self._flights.values())

    @property
    def generations(self) -> set[int]:
        """Generations whose columns a batch in flight uses."""
        return {flight.generation for flight in self._flights.values() if flight.shared}

    def queued(self, group: int) -> int:
        """Batches that stage 0 of this group was sent and has not finished."""
        return sum(
            group in flight.groups and group not in flight.acks[0]
            for flight in self._flights.values()
        )

    def forget(self, seqs: Iterable[int]) -> None:
        """These sequences are over: the groups that know them hear of it with their next step."""
        for seq in seqs:
            for group in self._knowing.pop(seq, ()):
                self._groups[group].ends.append(seq)

    def involves(self, group: int) -> bool:
        return any(group in flight.groups for flight in self._flights.values())

    # --- sending ------------------------------------------------------------------------------

    def launch(
        self,
        batch: Batch,
        source: Source,
        layout: Layout,
        switches: tuple[Move, ...],
        now: float,
    ) -> Flight:
        """Send `batch` to the ranks of its groups; `layout(seq)` is the state before it."""
        wire = batch.number + self.offset
        self.forget(batch.ended)
        sent = msgspec.structs.replace(batch, number=wire)
        flight = Flight(batch, self.topology.spp, now)
        flight.doubtful = flight.shared and self.broken(batch.generation)
        self._flights[wire] = flight
        for group in sorted(flight.groups):
            steps = self._groups[group]
            chunks = batch.of_group(group)
            starts = tuple(
                source.introduction(chunk.seq, dict(layout(chunk.seq)).get(group, ()))
                for chunk in chunks
                if group not in self._knowing.setdefault(chunk.seq, set())
            )
            steps.last += 1
            step = Step(
                step=steps.last,
                batch=sent,
                tokens=b"".join(source.rows(c.seq, c.start, c.length) for c in chunks),
                starts=starts,
                ends=tuple(steps.ends),
                switches=tuple(move for move in switches if group in (move.source, move.target)),
            )
            steps.ends = []
            if not steps.kept:
                steps.stirred_s, steps.nudges = now, 0
            steps.kept.append((wire, step))
            for chunk in chunks:
                self._knowing[chunk.seq].add(group)
            self._outbox.to_ranks(self.topology.group_ranks(group), step)
        return flight

    def resend(self, at: Coordinate, expected: int) -> bool:
        """Send the group's steps from `expected` on again to one rank; False when some are gone."""
        steps = self._groups[at.group]
        again = [step for _, step in steps.kept if step.step >= expected]
        if expected <= steps.last and (not again or again[0].step != expected):
            return False
        self._outbox.to_ranks((at,), Resend(expected))
        for step in again:
            self._outbox.to_ranks((at,), step)
        return True

    def nudge(self, group: int, now: float) -> bool:
        """Send all kept steps again to a group long silent on them: the newest may have got lost,
        which no gap shows. Ranks drop what they have. Ever more rarely, until it stirs."""
        steps = self._groups[group]
        if not steps.kept or now - steps.stirred_s < NUDGE_S * (1 << steps.nudges):
            return False
        steps.nudges += 1
        ranks = self.topology.group_ranks(group)
        self._outbox.to_ranks(ranks, Resend(steps.kept[0][1].step))
        for _, step in steps.kept:
            self._outbox.to_ranks(ranks, step)
        return True

    # --- hearing ------------------------------------------------------------------------------

    def stage_done(
        self, at: Coordinate, wire: int, elapsed_s: float, now: float
    ) -> StageCleared | None:
        """A rank finished its stage; the event when it was the last participant of it."""
        flight = self._flights.get(wire)
        if flight is None or at.shard or at.group not in flight.groups:
            return None
        steps = self._groups[at.group]
        steps.stirred_s, steps.nudges = now, 0
        flight.elapsed_s[at.stage] = max(flight.elapsed_s[at.stage], elapsed_s)
        acks = flight.acks[at.stage]
        if at.group in acks:
            return None
        acks.add(at.group)
        if flight.void or not flight.groups <= acks:
            return None
        return StageCleared(flight.batch.number, at.stage)

    def tokens(self, at: Coordinate, wire: int, tokens: Iterable[TokenOut]) -> None:
        """The last stage of a tail group sampled."""
        flight = self._flights.get(wire)
        if flight is not None and at.group in flight.tails:
            flight.tails.discard(at.group)
            flight.tokens.update((out.seq, out) for out in tokens)

    def break_generation(self, generation: int, now: float) -> None:
        """A column of it failed: its shared batches are in doubt until a group of each is lost."""
        self._broken.setdefault(generation, now)
        for flight in self._flights.values():
            flight.doubtful |= flight.shared and flight.generation == generation

    def broken(self, generation: int) -> bool:
        return generation in self._broken

    def doubtful(self, patience_s: float, now: float) -> list[int]:
        """Groups to give up: a column broke longer than `patience_s` ago, and no group of the
        batch that used it was lost."""
        return [
            max(flight.groups)
            for flight in self._flights.values()
            if flight.doubtful and not flight.void
            if now - self._broken[flight.generation] > patience_s
        ]

    def finished(self) -> list[Flight]:
        """Take out the batches that are over, in number order; drops the steps kept for them."""
        done = sorted(wire for wire, flight in self._flights.items() if flight.over)
        flights = [self._flights.pop(wire) for wire in done]
        for flight in flights:
            for group in flight.groups:
                kept = self._groups[group].kept
                while kept and kept[0][0] not in self._flights:
                    kept.popleft()
        return flights

    # --- losing -------------------------------------------------------------------------------

    def lose(self, group: int) -> tuple[Flight, ...]:
        """Void what the group took part in; returns those batches. Its steps start at 1 again."""
        self._groups[group] = _GroupSteps()
        for groups in self._knowing.values():
            groups.discard(group)
        voided = []
        for flight in self._flights.values():
            if group in flight.groups:
                flight.groups.discard(group)
                if not flight.void:
                    flight.void = True
                    voided.append(flight)
        return tuple(voided)

    def stalled(self, group: int, patience_s: float, now: float) -> bool:
        """The group has work and acknowledged nothing for longer than `patience_s`."""
        waited = now - self._groups[group].stirred_s
        return waited > patience_s and self.involves(group)
