"""Page moves that even out the shards of a sequence: proposal, switch and return of pages.

The time of a shared batch is that of its largest shard. If copying older pages from the largest to
the smallest shard saves more time over the rest of the sequence than it costs, a move is proposed;
its target pages are taken at once. Copies run in the background. Ownership switches with a numbered
batch that both ends run; the source pages return once every earlier batch is complete.
"""

from __future__ import annotations

from medha.batch import Chunk, Move
from medha.scheduling.block_pool import GroupPages
from medha.scheduling.lifecycle import Lifecycle
from medha.scheduling.sequence import Sequence
from medha.scheduling.state import SchedulerState

MOVES_AT_ONCE = 2
PAGES_PER_MOVE = 64
LEAST_PAGES = 2
TOKENS_PER_CHUNK = 1024


class Rebalance:
    """Moves that are being copied, and pages that wait for older batches.

    `moved` is called exactly once for every proposed move, even if a group at an end was lost.
    """

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self.groups, self.in_flight, self.lifecycle = state.groups, state.in_flight, lifecycle
        self.predictor = state.predictor
        self.output_reserve = state.settings.output_reserve
        self.ready: dict[int, Sequence] = {}
        self._copying: dict[int, tuple[Move, Sequence, GroupPages]] = {}
        self._leaving: list[tuple[int, int, GroupPages, tuple[int, ...]]] = []
        self._next_id = 1

    def plan(self) -> tuple[Move, ...]:
        """Propose moves to begin now, the largest gain first; only a few run at once."""
        room = MOVES_AT_ONCE - len(self._copying)
        if room <= 0 or not self.groups.shared:
            return ()
        gains = []
        for sequence in self.groups.shared.values():
            if not (sequence.moving or sequence.stopped):
                best = self._best(sequence)
                if best is not None:
                    gains.append((-best[0], sequence.number, best[1], sequence))
        gains.sort(key=lambda gain: gain[:2])
        begun: list[Move] = []
        for _, _, move, sequence in gains:  # a move begun here may have taken another's pages
            if len(begun) < room and len(move.logical) <= self.groups.pool[move.target].available:
                begun.append(self._begin(move, sequence))
        return tuple(begun)

    def _best(self, sequence: Sequence) -> tuple[float, Move] | None:
        """Return (seconds gained, move) from the largest shard to the smallest, if that pays."""
        size = self.groups.pool.page_tokens
        held = sequence.tokens_by_group
        running = [group for group in {*held, *sequence.assigned_groups} if group in self.groups]
        if len(running) < 2:
            return None
        source = max(running, key=lambda group: (held.get(group, 0), group))
        target = min(running, key=lambda group: (held.get(group, 0), -group))
        most = held.get(source, 0)
        pages = (most - held.get(target, 0)) // 2 // size
        pages = min(pages, PAGES_PER_MOVE, self.groups.pool[target].available)
        if pages < LEAST_PAGES or (held.get(target, 0) == 0 and not sequence.decoding):
            return None
        pool = self.groups.pool[source]
        logical = [
            place
            for place in range(sequence.computed_tokens // size)
            if sequence.group_of[place] == source and pool.references(sequence.page_of[place]) == 1
        ][:pages]
        if len(logical) < LEAST_PAGES:
            return None
        tokens = len(logical) * size
        gain_s = self._gain_s(sequence, most, most - tokens) - self.predictor.move_s(tokens)
        if gain_s <= 0.0:
            return None
        taken = tuple(sequence.page_of[place] for place in logical)
        return gain_s, Move(0, sequence.number, source, target, tuple(logical), taken, ())

    def _gain_s(self, sequence: Sequence, before: int, after: int) -> float:
        """Return the time saved over the rest of the sequence when its largest shard shrinks."""
        groups = max(2, len(sequence.groups))
        loads = self.predictor.load(), self.predictor.load()
        if sequence.decoding:
            rest = sequence.request.max_output_tokens - sequence.output_tokens
            steps = max(1.0, self.output_reserve * rest)
            for load, keys in zip(loads, (before, after), strict=True):
                load.add_decode(keys, groups, False)
        else:
            steps = (sequence.target_tokens - sequence.scheduled_tokens) / TOKENS_PER_CHUNK
            for load, keys in zip(loads, (before, after), strict=True):
                load.add_chunk(TOKENS_PER_CHUNK, keys, groups, False)
        return steps * (loads[0].seconds() - loads[1].seconds())

    def _begin(self, move: Move, sequence: Sequence) -> Move:
        pool = self.groups.pool[move.target]
        pages = tuple(pool.take() for _ in move.logical)
        begun = Move(
            self._next_id, move.seq, move.source, move.target, move.logical, move.from_pages, pages
        )
        self._next_id += 1
        self._copying[begun.id] = (begun, sequence, pool)
        sequence.begin_move()
        return begun

    def moved(self, move_id: int, ok: bool) -> None:
        """End a copy; unknown ids are ignored."""
        copying = self._copying.pop(move_id, None)
        if copying is None:
            return
        move, sequence, pool = copying
        lost = self.groups.pool.groups.get(move.target) is not pool
        lost = lost or move.source not in sequence.tokens_by_group
        if ok and not lost and not sequence.stopped:
            sequence.await_switch(move)
            self.ready[move.id] = sequence
            return
        pool.release(move.to_pages)
        sequence.end_move()
        self.lifecycle.free(sequence)

    def switch(
        self, chunks: list[Chunk], sequences: dict[int, Sequence], number: int
    ) -> tuple[int, ...]:
        """Apply the copied moves of sequences that have a chunk on both ends in this batch."""
        waiting = {sequence.number for sequence in self.ready.values()}
        switched = []
        for chunk in chunks:
            if chunk.seq not in waiting:
                continue
            sequence = sequences[chunk.seq]
            for move in list(sequence.switching):
                if move.source in chunk.groups and move.target in chunk.groups:
                    self._apply(sequence, move, number)
                    switched.append(move.id)
        self.ready = {key: sequence for key, sequence in self.ready.items() if sequence.switching}
        return tuple(switched)

    def _apply(self, sequence: Sequence, move: Move, number: int) -> None:
        source, target = self.groups.pool[move.source], self.groups.pool[move.target]
        for old, new in zip(move.from_pages, move.to_pages, strict=True):
            hash_ = source.uncache(old)
            if hash_ is not None:
                target.cache(new, hash_)
        sequence.switch(move, self.groups.pool.page_tokens)
        self.groups.update_shared(sequence)
        self._leaving.append((number, move.source, source, move.from_pages))

    def on_complete(self) -> None:
        """Free the source pages that no older batch reads any more."""
        if not self._leaving:
            return
        leaving = []
        for number, group, pool, pages in self._leaving:
            oldest = self.in_flight.oldest(group)
            if oldest is None or oldest >= number:
                pool.release(pages)
            else:
                leaving.append((number, group, pool, pages))
        self._leaving = leaving
