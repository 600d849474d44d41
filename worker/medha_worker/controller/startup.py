"""From the first generation to the first Hello: the profile of this machine.

    base groups run ──> Warmup: dummy batches through one group ──> fit ──> profile ──> Hello
                                                       a given profile ──────┘

The warm-up's batches take the first wire numbers, so those of the scheduler are shifted by as many.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from medha.batch import Batch, Chunk
from medha.calibration import Sample, fit
from medha.config import WorkerConfig
from medha.messages import GenerationDefaults, Hello, Sampling, SequenceStart, to_bytes
from medha.model import ModelShape
from medha.predictor import Predictor
from medha.profile import Profile, encode, guess_for
from medha.scheduling.interface import SchedulerInterface
from medha_worker.controller.batches import BatchTracker
from medha_worker.controller.groups import RankGroups

WARMUP_S = 3.0
# Of what ranks wait for each other.
LONGEST = 1 / 3
FIRST_SEQ = 1 << 40
CHUNKS = (32, 128, 512)
PREFIX_CHUNK = 256
PREFIXES = 4
DECODES = (1, 4, 16)
DECODE_CONTEXT = 32
ROUNDS = 3

MakeScheduler = Callable[[Profile, int], tuple[SchedulerInterface, Predictor]]
"""(profile, pages per group) -> a scheduler with all groups absent, and its predictor."""

log = logging.getLogger("medha.controller")


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about this replica that Hello reports besides the config.

    `files`: name -> bytes of tokenizer and generation files; `hashes`: name -> blake2b-128 hex.
    `checkpoint`: digest of the weights, see `medha.checkpoints.checkpoint_files`; `adapters`: name
    -> digest.
    `profile`: None to measure.
    """

    incarnation: str
    shape: ModelShape
    files: dict[str, bytes]
    hashes: dict[str, str]
    checkpoint: str = ""
    adapters: dict[str, str] = {}
    stop_tokens: tuple[int, ...] = ()
    defaults: GenerationDefaults = GenerationDefaults()
    profile: Profile | None = None


class Warmup:
    """Dummy batches that measure one group, so that the predictor fits this machine.

    Prefills of several lengths and prefixes and decodes of several batch sizes, small kinds first.
    First one batch at a time (the first of each kind also warms libraries up and is repeated), then
    `spp` at a time, as in serving. Ends after the last batch, or `budget_s` after the end of the
    very first batch, which pages code in and is not measured, or before a batch that would last
    longer than `longest_s`: a large model on a CPU takes minutes for 512 tokens. Uses the first of
    `pages` of a pool that holds nothing yet. Batches are numbered from 1.
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
        longest_s: float,
    ) -> None:
        self.group, self._spp, self._page_tokens = group, spp, page_tokens
        self._pages, self._context, self._vocab = pages, max_context_tokens, vocab
        self._budget_s, self._longest_s, self._ends_s = budget_s, longest_s, math.inf
        self._cold = True
        self._free_page = 0
        self._seqs = 0
        self._live: list[int] = []
        self._ended: list[int] = []
        self._remaining = self._all_batches()
        self._next: tuple[Chunk, ...] | None = next(self._remaining, None)
        self._one_at_a_time = True
        self._in_flight: dict[int, tuple[Chunk, ...]] = {}
        self._blocked: set[int] = set()
        self.number = 0
        self.samples: list[Sample] = []

    @property
    def finished(self) -> bool:
        return self._next is None and not self._in_flight

    @property
    def seqs(self) -> tuple[int, ...]:
        """Sequences that the group's ranks still hold."""
        return (*self._live, *self._ended)

    def next(self, now: float) -> Batch | None:
        """The next batch to run, or None if none may enter stage 0 now."""
        if not self._cold:
            self._ends_s = min(self._ends_s, now + self._budget_s)
        if (now >= self._ends_s and self.samples) or self._too_long():
            self._next = None
        max_in_flight = 1 if self._one_at_a_time else self._spp
        if self._next is None or len(self._in_flight) >= max_in_flight:
            return None
        if any(chunk.seq in self._blocked for chunk in self._next):
            return None  # a decode waits for the token before it
        chunks, ended = self._next, tuple(self._ended)
        self._ended = []
        self.number += 1
        self._in_flight[self.number] = chunks
        self._blocked |= {chunk.seq for chunk in chunks if chunk.yields}
        self._next = next(self._remaining, None)
        return Batch(self.number, 0, chunks, ended=ended)

    def _too_long(self) -> bool:
        """Return True if the next batch takes more than `longest_s` at the best pace measured."""
        if self._next is None or not self.samples:
            return False
        best_s = min(s.seconds / sum(length for length, _, _ in s.entries) for s in self.samples)
        return sum(chunk.length for chunk in self._next) * best_s > self._longest_s

    def done(self, number: int, elapsed_s: float) -> None:
        """Record that a batch left the last stage; `elapsed_s` of its slowest stage."""
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

    # --- the batches --------------------------------------------------------------------------

    def _all_batches(self) -> Iterator[tuple[Chunk, ...]]:
        """Chunks of each batch, in order; small kinds first, so that a short budget covers them."""
        for round_ in range(ROUNDS):
            self._one_at_a_time = round_ < ROUNDS - 1 or self._spp == 1
            for length, decodes in zip(CHUNKS, DECODES, strict=True):
                seq = self._begin()
                if self._fits(length):
                    yield (self._chunk(seq, 0, length, yields=True),)
                self._end_all()
                yield from self._decodes(decodes)
            yield from self._prefix()

    def _decodes(self, count: int) -> Iterator[tuple[Chunk, ...]]:
        if not self._fits(count * (DECODE_CONTEXT + self._page_tokens), DECODE_CONTEXT + 2):
            return
        seqs = [self._begin() for _ in range(count)]
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
        """End all sequences; the next kind reuses their pages, since ranks run batches in order."""
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


class Startup:
    """Obtains a profile once the base groups run; `profile` is None until then."""

    def __init__(
        self,
        config: WorkerConfig,
        identity: Identity,
        batches: BatchTracker,
        groups: RankGroups,
    ) -> None:
        self._config, self._identity = config, identity
        self._batches, self._groups = batches, groups
        self._warmup: Warmup | None = None
        self.profile = identity.profile

    @property
    def pages(self) -> int:
        """KV pages that every running group can hold."""
        most = min((self._groups.pages(g) for g in self._groups.running), default=0)
        return min(self._config.kv_pages or most, most)

    def start(self) -> None:
        """Start to measure, unless that is under way or done; the base groups run."""
        if self.profile is not None or self._warmup is not None:
            return
        config = self._config
        self._warmup = Warmup(
            group=self._groups.running[0],
            spp=config.topology.spp,
            pages=self.pages,
            page_tokens=config.page_tokens,
            max_context_tokens=config.max_context_tokens,
            vocab=self._identity.shape.vocab,
            budget_s=WARMUP_S,
            longest_s=LONGEST * config.collective_timeout_s,
        )

    def group_lost(self, group: int) -> None:
        """Void a lost group's batches; if it was being measured, that restarts once it is back."""
        self._batches.lose(group)
        if self._warmup is not None and self._warmup.group == group:
            self._warmup = None

    def advance(self, now: float) -> None:
        """Run the warm-up's batches; fit the profile after the last one."""
        warmup = self._warmup
        if warmup is None:
            return
        for tracked in self._batches.take_finished():
            if not tracked.void:
                warmup.done(tracked.batch.number, max(tracked.elapsed_s))
        while not self._batches.queued(warmup.group):
            batch = warmup.next(now)
            if batch is None:
                break
            self._batches.send(batch, warmup, lambda _: (), (), now)
        if warmup.finished:
            self._warmup = None
            self._batches.end_warmup(warmup.number, warmup.seqs)
            # The warm-up's sequences have no adapters.
            shape = msgspec.structs.replace(self._identity.shape, adapters=0)
            topology = self._config.topology
            name = f"warm-up-{self._config.device}"
            guess = guess_for(self._config.device)
            self.profile = fit(warmup.samples, shape, topology, guess, name)
            fields = {"batches": warmup.number, "error": round(self.profile.error, 4)}
            log.info("measured a profile", extra={"fields": fields})

    def hello(self, profile: Profile, draining: bool) -> Hello:
        """Introduction of this replica to routers."""
        config, identity, settings = self._config, self._identity, self._config.scheduling
        return Hello(
            replica=config.replica,
            incarnation=identity.incarnation,
            model=config.model,
            shape=identity.shape,
            topology=config.topology,
            page_tokens=config.page_tokens,
            max_context_tokens=config.max_context_tokens,
            classes=config.classes,
            profile=encode(profile),
            files=identity.hashes,
            checkpoint=identity.checkpoint,
            adapters=identity.adapters,
            stop_tokens=identity.stop_tokens,
            defaults=identity.defaults,
            max_batch_s=settings.max_batch_s,
            min_batch_s=settings.min_batch_s,
            max_running=settings.max_running,
            order=settings.queue_order,
            draining=draining,
        )
