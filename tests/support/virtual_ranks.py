"""Ranks in virtual time that hold pages of token ids instead of tensors, and check what they obey.

A fake group keeps, like a real one, the pages and sequences that steps brought. What a chunk
"attends" to is read back page by page from all its groups, and the token that it yields is a
function of all that its last row sees (`next_token`): one page too few, stale or in the wrong place
gives another token, so the streams that clients see judge pages, moves, prefix hits and
recomputation.
Times come from a PipelineClock. A broken rule is an AssertionError.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from medha import messages as m
from medha.batch import Batch, Chunk, Move
from medha.topology import Coordinate, Topology


def next_token(tokens: Sequence[int], vocab: int, window: int = 0) -> int:
    """Return the token after `tokens`; only the last `window` count (0: all)."""
    return zlib.crc32(np.asarray(tokens[-window:], dtype="<i4").tobytes()) % vocab


def expected_tokens(prompt: Sequence[int], count: int, vocab: int, window: int = 0) -> list[int]:
    """Return the tokens that a correct replica emits after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab, window))
    return tokens[len(prompt) :]


class Client:
    """Outcome of a request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.first_s: float | None = None
        self.finished: m.Finished | None = None
        self.failed: m.Failed | None = None

    @property
    def over(self) -> bool:
        return self.finished is not None or self.failed is not None


class RunningBatch:
    """A batch on the fake ranks. `steps`: groups whose step arrived. `places`: what chunks see when
    the ranks compute it; a step after it, which may switch pages, is sent before that.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.steps: set[int] = set()
        self.places: list[tuple[Chunk, list[Place]]] = []
        self.broken = False


class FakeGroup:
    """Memory of a KVP group, as if it had a single rank. `drawn`: position and token that each
    sequence drew last here."""

    def __init__(self, group: int, pages: int, page_tokens: int) -> None:
        self.group, self.pages, self.page_tokens = group, pages, page_tokens
        self.content: dict[int, list[int]] = {}
        self.tables: dict[int, dict[int, int]] = {}
        self.drawn: dict[int, tuple[int, int]] = {}
        self.last_step = 0

    def apply(self, step: m.Step) -> dict[int, tuple[tuple[int, int], ...]]:
        """Apply a step; returns the pages that starting sequences already hold in this group."""
        assert step.step == self.last_step + 1, f"step {step.step} after {self.last_step}"
        self.last_step = step.step
        for seq in step.ends:
            del self.tables[seq]
            self.drawn.pop(seq, None)
        for move in step.switches:
            self._switch(move)
        for start in step.starts:
            assert start.seq not in self.tables, f"sequence {start.seq} starts twice"
            self.tables[start.seq] = dict(start.cached)
            self.drawn.pop(start.seq, None)
        rows = m.from_bytes(step.tokens).tolist()
        for chunk in step.batch.of_group(self.group):
            if chunk.tail == self.group:
                self._write(chunk, rows[: chunk.length])
            rows = rows[chunk.length :]
        assert not rows, "more rows than the chunks have"
        return {start.seq: start.cached for start in step.starts}

    def _switch(self, move: Move) -> None:
        table = self.tables.get(move.seq)
        if table is not None and move.source == self.group:
            for logical, page in zip(move.logical, move.from_pages, strict=True):
                assert table.pop(logical) == page
        if table is not None and move.target == self.group:
            table.update(zip(move.logical, move.to_pages, strict=True))

    def _write(self, chunk: Chunk, rows: list[int]) -> None:
        table, first = self.tables[chunk.seq], -(-chunk.start // self.page_tokens)
        for place, page in enumerate(chunk.pages):
            assert 0 <= page < self.pages
            table[first + place] = page
            self.content[page] = []
        for place, token in enumerate(rows, chunk.start):
            if token < 0:
                at, token = self.drawn[chunk.seq]
                assert chunk.decode and at == place, "a token that was not sampled here"
            content = self.content[table[place // self.page_tokens]]
            del content[place % self.page_tokens :]
            content.append(token)
            assert len(content) == place % self.page_tokens + 1, "a row leaves a hole"


Place = tuple[FakeGroup, int]
"""A page of a group."""


def places(groups: Iterable[FakeGroup], chunk: Chunk, window: int = 0) -> list[Place]:
    """Return the pages of its groups that the chunk's rows see, in order."""
    tables = [(group, group.tables[chunk.seq]) for group in groups]
    size, seen = tables[0][0].page_tokens, list[Place]()
    for logical in range(_first(chunk, window) // size, -(-chunk.end // size)):
        held = [(group, table[logical]) for group, table in tables if logical in table]
        assert len(held) == 1, f"page {logical} of sequence {chunk.seq} is in {len(held)} groups"
        seen += held
    return seen


def read(seen: Sequence[Place], chunk: Chunk, window: int = 0) -> list[int]:
    """Read the tokens that the chunk's rows see, [0, end) without a window, from its `places`.

    Later chunks may have been written, too.
    """
    size, first = seen[0][0].page_tokens, _first(chunk, window)
    tokens = [token for group, page in seen for token in group.content[page]]
    hidden = first % size
    needed = chunk.end - first + hidden
    assert len(tokens) >= needed, f"{len(tokens)} tokens are held, not {needed}"
    return tokens[hidden:needed]


def _first(chunk: Chunk, window: int) -> int:
    """Return the first position that the chunk's rows see."""
    return max(0, chunk.start - window + 1) if window else 0


def sample(
    groups: dict[int, FakeGroup],
    seen: Iterable[tuple[Chunk, list[Place]]],
    vocab: int,
    window: int = 0,
) -> dict[int, list[m.TokenOut]]:
    """Return sampled tokens by tail group; reads what every chunk of a batch sees."""
    out: dict[int, list[m.TokenOut]] = {}
    for chunk, held in seen:
        tokens = read(held, chunk, window)
        if chunk.yields:
            token = next_token(tokens, vocab, window)
            groups[chunk.tail].drawn[chunk.seq] = chunk.end, token
            out.setdefault(chunk.tail, []).append(m.TokenOut(chunk.seq, token))
    return out


def hellos(
    topology: Topology, group: int, incarnation: str
) -> list[tuple[Coordinate, m.RankHello]]:
    """Return the Hellos of a group's ranks."""
    return [
        (
            at,
            m.RankHello(
                group=at.group, stage=at.stage, shard=at.shard, incarnation=incarnation, pid=1
            ),
        )
        for at in topology.group_ranks(group)
    ]


def ready(pages: int) -> m.RankReady:
    return m.RankReady(pages=pages, page_bytes=1, agent="fake", metadata=b"", bases=(0,))
