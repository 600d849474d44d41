"""Evening out the shards of a sequence: which full pages move, when ownership switches, what frees.

The time of a shared batch is that of its largest shard. Where copying older pages from the largest
to the smallest shard saves more time over the rest of the sequence than it costs, a move is
proposed; its target pages are taken at once. Copies run in the background; ownership of the pages
switches with a numbered batch that both ends run, and the source's pages come back once every batch
before that one has completed. Plans and applies; copies nothing itself.
"""

from __future__ import annotations

from medha.batch import Chunk, Move
from medha.predictor import Predictor
from medha.scheduling.blocks import GroupPages
from medha.scheduling.endings import Endings
from medha.scheduling.growth import Groups
from medha.scheduling.inflight import Flights
from medha.scheduling.sequence import Sequence

MOVES_AT_ONCE = 2
PAGES_PER_MOVE = 64
LEAST_PAGES = 2
TOKENS_PER_CHUNK = 1024


class Rebalance:
    """Moves that are being copied, and pages that wait for older batches.

    Every planned move is answered by `moved` exactly once, whatever happened to its ends.
    """

    def __init__(
        self, groups: Groups, flights: Flights, endings: Endings, predictor: Predictor
    ) -> None:
        self.groups, self.flights, self.endings = groups, flights, endings
        self.predictor = predictor
        self.ready: dict[int, Sequence] = {}
        self._copying: dict[int, tuple[Move, Sequence, GroupPages]] = {}
        self._leaving: list[tuple[int, int, GroupPages, tuple[int, ...]]] = []
        self._next_id = 1

    def plan(self) -> tuple[Move, ...]:
        """Moves to begin now, the largest gain first; at most a few are under way."""
        room = MOVES_AT_ONCE - len(self._copying)
        if room <= 0 or not self.groups.shared:
            return ()
        gains = []
        for sequence in self.groups.shared.values():
            if not (sequence.moving or sequence.over or sequence.taken_back):
                found = self._best(sequence)
                if found is not None:
                    gains.append((-found[0], sequence.number, found[1], sequence))
        gains.sort(key=lambda gain: gain[:2])
        return tuple(self._begin(move, sequence) for _, _, move, sequence in gains[:room])

    def _best(self, sequence: Sequence) -> tuple[float, Move] | None:
        """(seconds gained, move) from its largest shard to its smallest, if that pays."""
        size = self.groups.pool.page_tokens
        running = [one for one in {*sequence.held, *sequence.plan} if one in self.groups]
        if len(running) < 2:
            return None
        source = max(running, key=lambda one: (sequence.held.get(one, 0), one))
        target = min(running, key=lambda one: (sequence.held.get(one, 0), -one))
        most = sequence.held.get(source, 0)
        pages = (most - sequence.held.get(target, 0)) // 2 // size
        pages = min(pages, PAGES_PER_MOVE, self.groups.pool[target].available)
        if pages < LEAST_PAGES or (sequence.held.get(target, 0) == 0 and not sequence.decoding):
            return None
        pool = self.groups.pool[source]
        logical = [
            place
            for place in range(sequence.done // size)
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
        """Time saved over what the sequence has still to do, when its largest shard shrinks."""
        groups = max(2, len(sequence.groups))
        loads = self.predictor.load(), self.predictor.load()
        if sequence.decoding:
            rest = sequence.request.max_output_tokens - sequence.emitted
            steps = max(1.0, self.groups.output_reserve * rest)
            for load, keys in zip(loads, (before, after), strict=True):
                load.add_decode(keys, groups, False)
        else:
            steps = (sequence.goal - sequence.packed) / TOKENS_PER_CHUNK
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
        sequence.moving += 1
        return begun

    def moved(self, move_id: int, ok: bool) -> None:
        """A copy ended; unknown ids are ignored."""
        found = self._copying.pop(move_id, None)
        if found is None:
            return
        move, sequence, pool = found
        lost = self.groups.pool.groups.get(move.target) is not pool
        lost = lost or move.source not in sequence.held
        if ok and not lost and not (sequence.over or sequence.taken_back):
            sequence.switching.append(move)
            self.ready[move.id] = sequence
            return
        pool.release(move.to_pages)
        sequence.moving -= 1
        self.endings.settle(sequence)

    def switch(
        self, chunks: list[Chunk], sequences: dict[int, Sequence], number: int
    ) -> tuple[int, ...]:
        """Apply the copied moves whose sequence has a chunk here that names both ends."""
        waiting = {one.number for one in self.ready.values()}
        switched = []
        for chunk in chunks:
            if chunk.seq not in waiting:
                continue
            sequence = sequences[chunk.seq]
            for move in list(sequence.switching):
                if move.source in chunk.groups and move.target in chunk.groups:
                    self._apply(sequence, move, number)
                    switched.append(move.id)
        self.ready = {key: one for key, one in self.ready.items() if one.switching}
        return tuple(switched)

    def _apply(self, sequence: Sequence, move: Move, number: int) -> None:
        source, target = self.groups.pool[move.source], self.groups.pool[move.target]
        tokens = len(move.logical) * self.groups.pool.page_tokens
        for place, old, new in zip(move.logical, move.from_pages, move.to_pages, strict=True):
            sequence.page_of[place], sequence.group_of[place] = new, move.target
            hash_ = source.rename(old)
            if hash_ is not None:
                target.name(new, hash_)
        sequence.let_go(move.source, tokens)
        sequence.hold(move.target, tokens)
        sequence.switching.remove(move)
        sequence.moving -= 1
        self.groups.note(sequence)
        self._leaving.append((number, move.source, source, move.from_pages))

    def landed(self) -> None:
        """Batches completed: free the pages that no older batch reads any more."""
        if not self._leaving:
            return
        still = []
        for number, group, pool, pages in self._leaving:
            oldest = self.flights.oldest(group)
            if oldest is None or oldest >= number:
                pool.release(pages)
            else:
                still.append((number, group, pool, pages))
        self._leaving = still
