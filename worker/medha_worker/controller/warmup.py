"""Warm-up: dummy sequences through the real ranks, so that the predictor knows this machine.

Runs prefills of several lengths and prefixes and decodes of several batch sizes through one group,
first one batch at a time (the first of each kind also warms libraries up and is measured again),
then `spp` at a time, as serving does. Ends with its plan or its time budget, whichever is first;
that counts from the end of the very first batch, which pages code in and is not measured. What it
measured becomes a profile. It touches pages of a pool that holds nothing yet, and knows no
scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from medha.batch import Batch, Chunk
from medha.calibration import Sample
from medha.messages import Sampling, SequenceStart, to_bytes

FIRST_SEQ = 1 << 40
CHUNKS = (32, 128, 512)
PREFIX_CHUNK = 256
PREFIXES = 4
DECODES = (1, 4, 16)
DECODE_CONTEXT = 32
ROUNDS = 3


class Warmup:
    """The plan of dummy batches for one group; batches are numbered from 1.

    `spp`: batches in flight at most; `pages`: of the group's pool; `budget_s` from the end of the
    first batch on.
    """

    def __init__(
        self,
        *,
        group: int,
        spp: int,
        pages: int,
        page_tokens: int,
        max_context_tokens: int,
        vocab: int,
        budget_s: float,
    ) -> None:
        self.group, self._spp, self._page_tokens = group, spp, page_tokens
        self._pages, self._context, self._vocab = pages, max_context_tokens, vocab
        self._budget_s, self._ends_s = budget_s, math.inf
        self._cold = True
        self._free_page = 0
        self._seqs = 0
        self._live: list[int] = []
        self._ended: list[int] = []
        self._plan = self._batches()
        self._next: tuple[Chunk, ...] | None = next(self._plan, None)
        self._alone = True
        self._in_flight: dict[int, tuple[Chunk, ...]] = {}
        self._blocked: set[int] = set()
        self.number = 0
        self.samples: list[Sample] = []

    @property
    def finished(self) -> bool:
        return self._next is None and not self._in_flight

    @property
    def seqs(self) -> tuple[int, ...]:
        """Sequences that the group's ranks still know."""
        return (*self._live, *self._ended)

    def next(self, now: float) -> Batch | None:
        """The next batch to run, if one may enter stage 0 now."""
        if not self._cold:
            self._ends_s = min(self._ends_s, now + self._budget_s)
        if now >= self._ends_s and self.samples:
            self._next = None
        room = 1 if self._alone else self._spp
        if self._next is None or len(self._in_flight) >= room:
            return None
        if any(chunk.seq in self._blocked for chunk in self._next):
            return None  # a decode waits for the token before it
        chunks, ended = self._next, tuple(self._ended)
        self._ended = []
        self.number += 1
        self._in_flight[self.number] = chunks
        self._blocked |= {chunk.seq for chunk in chunks if chunk.yields}
        self._next = next(self._plan, None)
        return Batch(self.number, 0, chunks, ended=ended)

    def done(self, number: int, elapsed_s: float) -> None:
        """A batch went through all stages; `elapsed_s` of the slowest."""
        chunks = self._in_flight.pop(number)
        self._blocked -= {chunk.seq for chunk in chunks}
        entries = tuple((chunk.length, chunk.start, chunk.decode) for chunk in chunks)
        if not self._cold or self._next is None:
            self.samples.append(Sample(entries, elapsed_s))
        self._cold = False

    def rows(self, seq: int, start: int, length: int) -> bytes:
        positions = np.arange(start, start + length, dtype=np.int64)
        return to_bytes((positions * 7919 + seq % 97) % self._vocab)

    def introduction(self, seq: int, cached: tuple[tuple[int, int], ...]) -> SequenceStart:
        return SequenceStart(seq, Sampling(temperature=0.0), DECODE_CONTEXT, cached)

    # --- the plan -----------------------------------------------------------------------------

    def _batches(self) -> Iterator[tuple[Chunk, ...]]:
        """Chunks of each batch, in order; small kinds first, so that a short budget sees them."""
        for round_ in range(ROUNDS):
            self._alone = round_ < ROUNDS - 1 or self._spp == 1
            for length in CHUNKS:
                seq = self._begin()
                if self._fits(length):
                    yield (self._chunk(seq, 0, length, yields=True),)
                self._end_all()
            yield from self._decodes()
            yield from self._prefix()

    def _decodes(self) -> Iterator[tuple[Chunk, ...]]:
        for size in DECODES:
            if not self._fits(size * (DECODE_CONTEXT + self._page_tokens)):
                return
            seqs = [self._begin() for _ in range(size)]
            yield tuple(self._chunk(seq, 0, DECODE_CONTEXT, yields=True) for seq in seqs)
            for step in range(2):
                at = DECODE_CONTEXT + step
                yield tuple(self._chunk(s, at, 1, yields=True, decode=True) for s in seqs)
            self._end_all()

    def _prefix(self) -> Iterator[tuple[Chunk, ...]]:
        seq = self._begin()
        for index in range(PREFIXES):
            if not self._fits(PREFIX_CHUNK, (index + 1) * PREFIX_CHUNK):
                break
            yield (self._chunk(seq, index * PREFIX_CHUNK, PREFIX_CHUNK),)
        self._end_all()

    def _begin(self) -> int:
        self._seqs += 1
        self._live.append(FIRST_SEQ + self._seqs)
        return self._live[-1]

    def _fits(self, tokens: int, context: int = 0) -> bool:
        needed = -(-tokens // self._page_tokens)
        return self._free_page + needed <= self._pages and max(context, 1) <= self._context

    def _end_all(self) -> None:
        """What ran is over; its pages serve the next kind (ranks run batches in order)."""
        self._ended += self._live
        self._live = []
        self._free_page = 0

    def _chunk(
        self, seq: int, start: int, length: int, *, yields: bool = False, decode: bool = False
    ) -> Chunk:
        length = min(length, self._context - start)
        held = -(-start // self._page_tokens)
        needed = -(-(start + length) // self._page_tokens) - held
        pages = tuple(range(self._free_page, self._free_page + needed))
        self._free_page += needed
        group = self.group
        return Chunk(seq, start, length, (group,), group, pages, yields, decode)
