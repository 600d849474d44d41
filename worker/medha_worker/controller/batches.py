"""Batches in flight: steps sent to each group's ranks, their acknowledgements and tokens.

A batch goes to every rank of its participant groups as one Step per group. The steps of a group
are numbered without gaps, kept until their batch is over, and sent again after a Gap. Stage s of a
batch is done when shard 0 of stage s has acknowledged it in all participants. The batch is over
when its last stage is done and every tail group with a yielding chunk has sent its tokens. If a
participant is lost, the batch is void: the survivors only have to leave it.

Tracks which groups hold which sequence, so that each sequence is introduced once and ended once.
Decides nothing about what runs.
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

RESEND_S = 1.0

Layout = Callable[[int], tuple[tuple[int, tuple[tuple[int, int], ...]], ...]]


class TokenSource(Protocol):
    """Tokens and start messages of the sequences in a batch."""

    def rows(self, seq: int, start: int, length: int) -> bytes:
        """Token ids as int32 bytes."""
        ...

    def introduction(self, seq: int, cached: tuple[tuple[int, int], ...]) -> SequenceStart: ...


class StageCleared(msgspec.Struct, frozen=True):
    """All participants finished stage `stage` of a batch."""

    number: int
    stage: int


class TrackedBatch:
    """Batch between next_batch and complete; `groups`: participants that still run."""

    def __init__(self, batch: Batch, spp: int) -> None:
        self.batch = batch
        self.groups = set(batch.groups)
        self.shared = any(chunk.shared for chunk in batch.chunks)
        self.acks: list[set[int]] = [set() for _ in range(spp)]
        self.elapsed_s = [0.0] * spp
        self.tails = {chunk.tail for chunk in batch.chunks if chunk.yields}
        self.tokens: dict[int, TokenOut] = {}
        self.void = False
        self.suspect = False  # its column broke: the output of shared chunks is worthless

    @property
    def over(self) -> bool:
        """True once no acknowledgement and no token is awaited."""
        if self.void:
            return all(self.groups <= acks for acks in self.acks)
        return self.groups <= self.acks[-1] and not self.tails and not self.suspect


class _GroupSteps:
    """Steps of one group: their count, those kept, and the ends for the next one to carry."""

    def __init__(self) -> None:
        self.last = 0
        self.kept: collections.deque[tuple[int, Step]] = collections.deque()
        self.ends: list[int] = []
        self.last_ack_s = 0.0  # last acknowledgement, or first step after an idle time
        self.resends = 0


class BatchTracker:
    """Every batch in flight, by its wire number: the number that ranks receive.

    Wire numbers are the scheduler's numbers plus `offset`, since the warm-up's batches, which ran
    before the scheduler existed, took the first ones.
    """

    def __init__(self, topology: Topology, outbox: Outbox) -> None:
        self._topology, self._outbox = topology, outbox
        self._batches: dict[int, TrackedBatch] = {}
        self._groups = {group: _GroupSteps() for group in range(topology.kvp_max)}
        self._ranks = {group: topology.group_ranks(group) for group in self._groups}
        self._holders: dict[int, set[int]] = {}  # sequence -> groups that were sent its start
        self._broken: dict[int, float] = {}  # generation -> time at which its column failed
        self.offset = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def generations(self) -> set[int]:
        """Generations whose columns a batch in flight uses."""
        return {batch.batch.generation for batch in self._batches.values() if batch.shared}

    def queued(self, group: int) -> int:
        """Count the batches that stage 0 of a group was sent and has not finished."""
        return sum(
            group in batch.groups and group not in batch.acks[0] for batch in self._batches.values()
        )

    def involves(self, group: int) -> bool:
        return any(group in batch.groups for batch in self._batches.values())

    # --- sending ------------------------------------------------------------------------------

    def send(
        self,
        batch: Batch,
        source: TokenSource,
        layout: Layout,
        switches: tuple[Move, ...],
        now: float,
    ) -> None:
        """Send `batch` to the ranks of its groups; `layout(seq)` is the layout before the batch."""
        wire_number = batch.number + self.offset
        self._end_sequences(batch.ended)
        wire_batch = msgspec.structs.replace(batch, number=wire_number)
        tracked = TrackedBatch(batch, self._topology.spp)
        tracked.suspect = tracked.shared and self.broken(batch.generation)
        self._batches[wire_number] = tracked
        for group in sorted(tracked.groups):
            steps = self._groups[group]
            chunks = batch.of_group(group)
            starts = tuple(
                source.introduction(chunk.seq, dict(layout(chunk.seq)).get(group, ()))
                for chunk in chunks
                if group not in self._holders.setdefault(chunk.seq, set())
            )
            steps.last += 1
            step = Step(
                step=steps.last,
                batch=wire_batch,
                tokens=b"".join(source.rows(c.seq, c.start, c.length) for c in chunks),
                starts=starts,
                ends=tuple(steps.ends),
                switches=tuple(move for move in switches if group in (move.source, move.target)),
            )
            steps.ends = []
            if not steps.kept:
                steps.last_ack_s, steps.resends = now, 0
            steps.kept.append((wire_number, step))
            for chunk in chunks:
                self._holders[chunk.seq].add(group)
            self._outbox.to_ranks(self._ranks[group], step)

    def end_warmup(self, last_number: int, seqs: Iterable[int]) -> None:
        """End the warm-up's sequences; shift later batches past its last number."""
        self._end_sequences(seqs)
        self.offset = last_number

    def _end_sequences(self, seqs: Iterable[int]) -> None:
        """End these sequences: the next step of every group that holds one carries its end."""
        for seq in seqs:
            for group in self._holders.pop(seq, ()):
                self._groups[group].ends.append(seq)

    def resend_from(self, at: Coordinate, expected: int) -> bool:
        """Send a rank its group's steps from `expected` on; False if some are no longer kept."""
        steps = self._groups[at.group]
        missed = [step for _, step in steps.kept if step.step >= expected]
        if expected <= steps.last and (not missed or missed[0].step != expected):
            return False
        self._outbox.to_ranks((at,), Resend(expected))
        for step in missed:
            self._outbox.to_ranks((at,), step)
        return True

    def resend(self, group: int, now: float) -> bool:
        """Send all kept steps to a group that has not acknowledged them for long; False if not due.

        The newest step may have been lost, which leaves no gap to report. Ranks drop steps that
        they have. The interval doubles until the group acknowledges something.
        """
        steps = self._groups[group]
        if not steps.kept or now - steps.last_ack_s < RESEND_S * (1 << steps.resends):
            return False
        steps.resends += 1
        ranks = self._ranks[group]
        self._outbox.to_ranks(ranks, Resend(steps.kept[0][1].step))
        for _, step in steps.kept:
            self._outbox.to_ranks(ranks, step)
        return True

    # --- receiving ----------------------------------------------------------------------------

    def stage_done(
        self, at: Coordinate, wire_number: int, elapsed_s: float, now: float
    ) -> StageCleared | None:
        """Record a rank's acknowledgement; returns the event if it was the stage's last one."""
        batch = self._batches.get(wire_number)
        if batch is None or at.shard or at.group not in batch.groups:
            return None
        steps = self._groups[at.group]
        steps.last_ack_s, steps.resends = now, 0
        batch.elapsed_s[at.stage] = max(batch.elapsed_s[at.stage], elapsed_s)
        acks = batch.acks[at.stage]
        if at.group in acks:
            return None
        acks.add(at.group)
        if batch.void or not batch.groups <= acks:
            return None
        return StageCleared(batch.batch.number, at.stage)

    def tokens(self, at: Coordinate, wire_number: int, tokens: Iterable[TokenOut]) -> None:
        """Record the tokens that the last stage of a tail group sampled."""
        batch = self._batches.get(wire_number)
        if batch is not None and at.group in batch.tails:
            batch.tails.discard(at.group)
            batch.tokens.update((token.seq, token) for token in tokens)

    def take_finished(self) -> list[TrackedBatch]:
        """Remove and return the batches that are over, in number order, and the steps kept for
        them."""
        numbers = sorted(number for number, batch in self._batches.items() if batch.over)
        finished = [self._batches.pop(number) for number in numbers]
        for batch in finished:
            for group in batch.groups:
                kept = self._groups[group].kept
                while kept and kept[0][0] not in self._batches:
                    kept.popleft()
        return finished

    # --- failures -----------------------------------------------------------------------------

    def break_generation(self, generation: int, now: float) -> None:
        """Record that a column of `generation` failed.

        Its shared batches stay suspect until a group of each is lost.
        """
        self._broken.setdefault(generation, now)
        for batch in self._batches.values():
            batch.suspect |= batch.shared and batch.batch.generation == generation

    def broken(self, generation: int) -> bool:
        return generation in self._broken

    def suspect_groups(self, patience_s: float, now: float) -> list[int]:
        """Groups to give up: a column broke longer than `patience_s` ago, and no group of the
        batch that used it was lost."""
        return [
            max(batch.groups)
            for batch in self._batches.values()
            if batch.suspect and not batch.void
            if now - self._broken[batch.batch.generation] > patience_s
        ]

    def stalled(self, group: int, patience_s: float, now: float) -> bool:
        """True if the group has work and acknowledged none of it for longer than `patience_s`."""
        waited_s = now - self._groups[group].last_ack_s
        return waited_s > patience_s and self.involves(group)

    def lose(self, group: int) -> None:
        """Void every batch in which the group takes part; its steps start at 1 again."""
        self._groups[group] = _GroupSteps()
        for groups in self._holders.values():
            groups.discard(group)
        for batch in self._batches.values():
            if group in batch.groups:
                batch.groups.discard(group)
                batch.void = True
