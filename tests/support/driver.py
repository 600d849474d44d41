"""Sequences and pages for a `Rig`: builds batches from one-line descriptions.

    driver.start(1, prompt, groups=(0,))       driver.batch((1, 300))      the next 300 tokens of 1
    driver.grow(1, 2)                          group 2 becomes the tail at the next page border
    driver.move(1, logical, source, target)    pages copied in the background, switched by a batch

Keeps the scheduler's bookkeeping in the simplest way: pages are allocated in order of request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from tests.support.rank_rig import Rig

from medha.batch import Batch, Chunk, Move
from medha.messages import Sampling, SequenceStart, to_bytes

Tokens = npt.NDArray[np.int32]
GREEDY = Sampling(temperature=0.0)


@dataclasses.dataclass(slots=True)
class Running:
    """A sequence: its tokens, the count computed, its pages by group, and the groups that hold
    it."""

    tokens: Tokens
    prompt_tokens: int
    groups: list[int]
    tail: int
    sampling: Sampling
    adapter: str = ""
    done: int = 0
    pages: dict[int, dict[int, int]] = dataclasses.field(default_factory=dict)
    known: set[int] = dataclasses.field(default_factory=set)
    logits: list[npt.NDArray[np.float32]] = dataclasses.field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return [int(token) for token in self.tokens[self.prompt_tokens :]]


class Driver:
    """Driver of a rig; shared chunks use `generation`, and `moved` counts switches.

    `adapter_of` names the adapter of each sequence.
    """

    def __init__(
        self,
        rig: Rig,
        page_tokens: int,
        pages: int,
        generation: int = 0,
        adapter_of: Callable[[int], str] = lambda seq: "",
    ) -> None:
        self.rig, self.page_tokens, self.generation = rig, page_tokens, generation
        self.adapter_of = adapter_of
        self.running: dict[int, Running] = {}
        self.free = {g: list(range(pages))[::-1] for g in range(rig.topology.kvp_max)}
        self._users: dict[tuple[int, int], int] = {}
        self._ends: dict[int, list[int]] = {g: [] for g in range(rig.topology.kvp_max)}
        self._moves: dict[int, Move] = {}
        self._number = 0
        self._next_move = 0
        self.moved = 0

    def start(
        self, seq: int, prompt: Tokens, groups: Sequence[int], sampling: Sampling = GREEDY
    ) -> None:
        """Create a sequence; its first pages go to the first of `groups`, others start empty."""
        tokens = np.asarray(prompt, np.int32)
        self.running[seq] = Running(
            tokens, len(tokens), list(groups), groups[0], sampling, self.adapter_of(seq)
        )

    def share(self, seq: int, other: int, pages: int) -> None:
        """Start `seq` with the first full `pages` of `other`, in whichever groups: a prefix hit."""
        run, source = self.running[seq], self.running[other]
        for group, held in source.pages.items():
            hit = {n: page for n, page in held.items() if n < pages}
            if hit:
                run.pages[group] = hit
                for page in hit.values():
                    self._users[group, page] += 1
                if group not in run.groups:
                    run.groups.append(group)
        run.done = pages * self.page_tokens

    def grow(self, seq: int, group: int) -> None:
        """Make `group` the tail from here on; `done` must be at a page border."""
        run = self.running[seq]
        assert run.done % self.page_tokens == 0, "a tail changes at a page border"
        run.tail = group
        if group not in run.groups:
            run.groups.append(group)

    def end(self, seq: int) -> None:
        """End a sequence; its groups get the end with their next step."""
        run = self.running.pop(seq)
        for group in run.known:
            self._ends[group].append(seq)
        for group, held in run.pages.items():
            for page in held.values():
                self._release(group, page)

    def send(self, *work: tuple[int, int]) -> Batch:
        """Send the next `length` tokens of each (sequence, length); the last of all yields."""
        self._number += 1
        chunks, rows = [], {}
        for seq, length in work:
            run = self.running[seq]
            chunk = self._chunk(seq, run, length)
            rows[seq] = run.tokens[chunk.start : chunk.end]
            chunks.append(chunk)
        moves = self._switched([seq for seq, _ in work])
        batch = Batch(
            number=self._number,
            generation=self.generation,
            chunks=tuple(chunks),
            switches=tuple(move.id for move in moves),
        )
        for group in batch.groups:
            self._send(batch, group, rows, moves)
        for move in moves:
            self._switch(move)
        for chunk in chunks:
            self._advance(chunk)
        return batch

    def finish(self, batch: Batch) -> None:
        """Wait for a batch and append what it sampled."""
        self.rig.until(lambda: self.rig.done(batch), f"batch {batch.number}")
        for chunk in batch.chunks:
            out = self.rig.tokens[batch.number].get(chunk.seq)
            if out is not None and chunk.seq in self.running:
                run = self.running[chunk.seq]
                run.tokens = np.append(run.tokens, np.int32(out.token))
                run.logits.append(self.rig.logits[batch.number][chunk.seq])

    def batch(self, *work: tuple[int, int]) -> Batch:
        """Send a batch and finish it."""
        batch = self.send(*work)
        self.finish(batch)
        return batch

    def prefill(self, seq: int, sizes: Sequence[int]) -> None:
        """Send the rest of the prompt in chunks of these sizes, repeated, with one in flight per
        stage.

        Then finish them all.
        """
        run, at = self.running[seq], 0
        flying: list[Batch] = []
        while run.done < run.prompt_tokens:
            length = min(sizes[at % len(sizes)], run.prompt_tokens - run.done)
            flying.append(self.send((seq, length)))
            at += 1
            if len(flying) >= self.rig.topology.spp:
                self.finish(flying.pop(0))
        for batch in flying:
            self.finish(batch)

    def decode(self, seqs: Sequence[int], count: int) -> None:
        for _ in range(count):
            self.batch(*((seq, 1) for seq in seqs))

    def move(self, seq: int, logical: Sequence[int], source: int, target: int) -> int:
        """Start copying full pages; they switch with the first batch after the copy is complete."""
        self._next_move += 1
        run = self.running[seq]
        move = Move(
            id=self._next_move,
            seq=seq,
            source=source,
            target=target,
            logical=tuple(logical),
            from_pages=tuple(run.pages[source][n] for n in logical),
            to_pages=tuple(self._take(target) for _ in logical),
        )
        self._moves[move.id] = move
        self.rig.move(move)
        return move.id

    def moving(self, seq: int) -> bool:
        """Return True while a move of this sequence is not switched."""
        return any(move.seq == seq for move in self._moves.values())

    def forget_moves(self) -> None:
        """Cancel all moves; their target pages are free again."""
        for move in self._moves.values():
            for page in move.to_pages:
                self._release(move.target, page)
        self._moves.clear()

    def settle(self) -> None:
        """Wait until every move has landed; the next batches switch them."""
        self.rig.until(lambda: self._moves.keys() <= self.rig.copied.keys(), "copies")

    # --- inside ---------------------------------------------------------------------------------

    def _chunk(self, seq: int, run: Running, length: int) -> Chunk:
        end = run.done + length
        assert length > 0 and end <= len(run.tokens), f"sequence {seq} has no such tokens"
        first = -(-run.done // self.page_tokens)
        fresh = range(first, -(-end // self.page_tokens))
        held = run.pages.setdefault(run.tail, {})
        taken = tuple(self._take(run.tail) for _ in fresh)
        held.update(zip(fresh, taken, strict=True))
        incoming = {m.target for m in self._landed() if m.seq == seq}
        return Chunk(
            seq=seq,
            start=run.done,
            length=length,
            groups=tuple(sorted({*run.groups, *incoming})),
            tail=run.tail,
            pages=taken,
            yields=end == len(run.tokens),
            decode=run.done >= run.prompt_tokens,
        )

    def _send(
        self, batch: Batch, group: int, rows: dict[int, Tokens], moves: Sequence[Move]
    ) -> None:
        chunks = batch.of_group(group)
        starts = []
        for chunk in chunks:
            run = self.running[chunk.seq]
            if group not in run.known:
                run.known.add(group)
                starts.append(self._start(chunk, run, group, moves))
        self.rig.step(
            batch,
            group,
            b"".join(to_bytes(rows[chunk.seq]) for chunk in chunks),
            starts=tuple(starts),
            ends=tuple(self._ends[group]),
            switches=tuple(move for move in moves if group in (move.source, move.target)),
        )
        self._ends[group] = []

    def _start(
        self, chunk: Chunk, run: Running, group: int, moves: Sequence[Move]
    ) -> SequenceStart:
        """Return the group's pages at the chunk's begin, with those that switch in this step."""
        fresh = chunk.pages if group == chunk.tail else ()
        held = {n: page for n, page in run.pages.get(group, {}).items() if page not in fresh}
        for move in moves:
            if move.seq == chunk.seq and move.target == group:
                held.update(zip(move.logical, move.to_pages, strict=True))
        return SequenceStart(
            seq=chunk.seq,
            sampling=run.sampling,
            prompt_tokens=run.prompt_tokens,
            cached=tuple(sorted(held.items())),
            history=to_bytes(run.tokens) if run.sampling.needs_tokens else b"",
            rope_tokens=run.prompt_tokens,
            adapter=run.adapter,
        )

    def _landed(self) -> list[Move]:
        return [m for m in self._moves.values() if m.id in self.rig.copied]

    def _switched(self, seqs: Sequence[int]) -> list[Move]:
        moves = [move for move in self._landed() if move.seq in seqs]
        for move in moves:
            fetched = self.rig.copied[move.id]
            assert fetched.ok, f"move {move.id} failed: {fetched.error}"
        return moves

    def _switch(self, move: Move) -> None:
        run = self.running[move.seq]
        for logical, page in zip(move.logical, move.to_pages, strict=True):
            self._release(move.source, run.pages[move.source].pop(logical))
            run.pages.setdefault(move.target, {})[logical] = page
        if move.target not in run.groups:
            run.groups.append(move.target)
        del self._moves[move.id]
        self.moved += 1
        self.rig.withdraw(move.id)

    def _advance(self, chunk: Chunk) -> None:
        self.running[chunk.seq].done = chunk.end

    def _take(self, group: int) -> int:
        page = self.free[group].pop()
        self._users[group, page] = 1
        return page

    def _release(self, group: int, page: int) -> None:
        self._users[group, page] -= 1
        if not self._users[group, page]:
            self.free[group].insert(0, page)
