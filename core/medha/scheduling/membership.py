"""KVP groups that join and leave, and what a lost group takes along.

A group that joins serves at once; long sequences that claimed pages take them there. A lost group
takes its pages and its batches in flight along: sequences with a part in either are recomputed, and
share what other groups still have cached of them. A group that was empty for a while may leave.
"""

from __future__ import annotations

from medha.scheduling.lifecycle import Lifecycle
from medha.scheduling.sequence import Sequence
from medha.scheduling.state import SchedulerState


class GroupMembership:
    """Adds and removes the replica's groups."""

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self.state, self.lifecycle = state, lifecycle
        self.groups, self.queues, self.running = state.groups, state.queues, state.running
        self.topology, self.settings = state.topology, state.settings

    def join(self, group: int, generation: int, now: float) -> None:
        """Add a running group, which the columns of `generation` include."""
        state, lifecycle = self.state, self.lifecycle
        self.groups.join(group, now)
        state.in_flight.join(group)
        state.promises.join(group)
        lifecycle.account.join(group)
        self.regenerate(generation)
        live = (sequence for sequence in self.groups.shared.values() if not sequence.stopped)
        claiming = sorted(live, key=lambda sequence: sequence.number)
        for sequence in self.groups.take_claims(group, claiming):
            if sequence in self.queues:  # perhaps with no tokens left: they are in stage 0
                self.queues.enqueue(sequence)
            lifecycle.account.update(sequence, now)
        for sequence in sorted(self.groups.large.values(), key=lambda sequence: sequence.number):
            idle = not (sequence.started or sequence.stopped)
            if idle and 0 < len(sequence.assigned_groups) < self.groups.groups_needed(sequence):
                self.queues.dequeue(sequence)  # it was assigned when fewer groups ran
                self.queues.enqueue(sequence, lifecycle.assign_groups(sequence))
        for sequence in state.take_unassigned():
            self.queues.enqueue(sequence, lifecycle.assign_groups(sequence))

    def regenerate(self, generation: int) -> None:
        """Use the columns of a newer generation for shared chunks from now on."""
        if generation >= self.state.generation:
            self.state.set_generation(generation, columns_ready=True)

    def lose(self, group: int, generation: int, now: float) -> tuple[int, ...]:
        """Remove a group that is gone with its pages; return the sequences preempted.

        Its batches are void. Shared chunks wait for columns newer than the current ones, unless
        `generation` is newer already.
        """
        state, lifecycle = self.state, self.lifecycle
        if group not in self.groups:
            return ()
        hit: dict[int, Sequence] = {}
        for sent in state.in_flight.on_group(group):
            state.in_flight.remove(sent.batch.number)
            for sequence in sent.void():
                sequence.land()
                hit[sequence.number] = sequence
        for sequence in state.sequences.values():
            pages = group in sequence.tokens_by_group or group in sequence.reserved
            if pages or group in sequence.assigned_groups:
                hit[sequence.number] = sequence
        live = [sequence for sequence in hit.values() if not sequence.stopped]
        for sequence in live:
            self.queues.dequeue(sequence)
            if self.running.withdraw(sequence):
                sequence.land()
        self.groups.leave(group)
        state.promises.leave(group)
        lifecycle.account.leave(group)
        state.in_flight.leave(group)
        columns_ready = generation > state.generation or len(self.groups.running) < 2
        state.set_generation(max(state.generation, generation), columns_ready=columns_ready)
        for sequence in hit.values():
            sequence.drop_group(group)
        for sequence in live:
            lifecycle.preempt(sequence, now)
        for sequence in hit.values():
            lifecycle.free(sequence)
        return tuple(sorted(sequence.number for sequence in live))

    def release(self, group: int, generation: int, now: float) -> None:
        """Remove a releasable group that left in good order."""
        state = self.state
        self.lose(group, max(generation, state.generation + 1), now)
        state.set_generation(max(generation, state.generation), columns_ready=state.columns_ready)

    def wanted(self, now: float) -> int:
        """Return how many groups should run: 0 .. wanted-1."""
        idle = len(self.releasable(now))
        highest = max(self.groups.running, default=-1) + 1
        need = self.groups.most_needed() if self.state.sequences else 0
        pool = self.groups.pool
        claimed = -(-pool.claimed // pool.pages_per_group)
        wanted = max(highest - idle, need, highest + claimed if claimed else 0)
        return min(self.topology.kvp_max, max(self.topology.kvp_min, wanted))

    def releasable(self, now: float) -> tuple[int, ...]:
        """Return the groups, highest first, that were empty for `release_cooldown_s`."""
        return self.groups.releasable(self.topology.kvp_min, now - self.settings.release_cooldown_s)
