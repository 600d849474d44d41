"""Running decodes: the next chunk of each, ready made, and how much credit they have left.

A sequence has one decode in flight. When a token comes back, the chunk of the next one is prepared
at once (its place is known), so that seating all decodes of a batch costs next to nothing; a rank
that knows the token before we do may have the next one behind it (see `ahead`). Token k is due at
first token + k × TPOT: a decode that ran ahead has credit and can wait.
"""

from __future__ import annotations

import numpy as np

from medha.batch import Chunk
from medha.scheduling.sequence import Sequence


class Cohort:
    """Prepared decodes of sequences that live in the same KVP groups, oldest first.

    `keys`: per group, KV tokens that their attention reads, their own included; `away`: how many
    are in flight; `mark`: what tells its slots from those of others.
    """

    __slots__ = ("away", "chunks", "keys", "mark")

    def __init__(self, groups: tuple[int, ...], mark: int) -> None:
        self.mark = mark
        self.chunks: dict[int, Chunk] = {}
        self.keys = dict.fromkeys(groups, 0)
        self.away = 0

    def quota(self, spp: int) -> int:
        """How many to seat, so that the cohort is spread evenly over the batches in flight."""
        ready = len(self.chunks)
        return ready if spp == 1 else min(ready, -(-(ready + self.away) // spp))


class Decodes:
    """Every sequence that has its first token and is not over."""

    def __init__(self) -> None:
        self.cohorts: dict[tuple[int, ...], Cohort] = {}
        self.hungry: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self._due_s = np.full(64, np.inf)
        self._tpot_s = np.full(64, np.inf)
        self._ready = np.zeros(64, dtype=np.int32)  # mark of the cohort where a decode is prepared
        self._slots = list(range(63, -1, -1))

    def __len__(self) -> int:
        return len(self.running)

    def begin(self, sequence: Sequence) -> None:
        """Its first token came."""
        if not self._slots:
            size = len(self._due_s)
            self._due_s = np.concatenate([self._due_s, np.full(size, np.inf)])
            self._tpot_s = np.concatenate([self._tpot_s, np.full(size, np.inf)])
            self._ready = np.concatenate([self._ready, np.zeros_like(self._ready)])
            self._slots = list(range(2 * size - 1, size - 1, -1))
        sequence.slot = self._slots.pop()
        self._tpot_s[sequence.slot] = sequence.request.tpot_s
        self.running[sequence.number] = sequence
        sequence.decoding = True

    def due(self, sequence: Sequence, due_s: float) -> None:
        """When its next token is due."""
        self._due_s[sequence.slot] = sequence.decode_due_s = due_s

    def waits(self, sequence: Sequence) -> bool:
        """Whether its next decode is prepared and not seated."""
        return bool(self._ready[sequence.slot])

    def lasts(self, sequence: Sequence) -> None:
        """The token in flight is its last: no time is set aside for another."""
        if sequence.decoding:
            self._due_s[sequence.slot] = self._tpot_s[sequence.slot] = np.inf

    def prepare(self, sequence: Sequence, chunk: Chunk) -> None:
        """Its next decode is ready to be seated."""
        cohort = self.cohorts.get(chunk.groups)
        if cohort is None:
            mark = len(self.cohorts) + 1
            cohort = self.cohorts[chunk.groups] = Cohort(chunk.groups, mark)
        cohort.chunks[sequence.number] = chunk
        self._ready[sequence.slot] = cohort.mark
        held, keys = sequence.held, cohort.keys
        for group in chunk.groups:
            keys[group] += held.get(group, 0)
        sequence.next_chunk = chunk

    def withdraw(self, sequence: Sequence) -> bool:
        """Take a prepared decode back; False when none was waiting."""
        self.hungry.pop(sequence.number, None)
        chunk, sequence.next_chunk = sequence.next_chunk, None
        if chunk is None:
            return False
        cohort = self.cohorts[chunk.groups]
        if cohort.chunks.pop(sequence.number, None) is None:
            return False
        self._ready[sequence.slot] = 0
        for group in chunk.groups:
            cohort.keys[group] -= sequence.held.get(group, 0)
        return True

    def end(self, sequence: Sequence) -> None:
        """It decodes no more."""
        self.withdraw(sequence)
        if self.running.pop(sequence.number, None) is not None:
            self._due_s[sequence.slot] = self._tpot_s[sequence.slot] = np.inf
            self._slots.append(sequence.slot)
            sequence.slot = -1
            sequence.decoding = False

    def seat(self, groups: tuple[int, ...], most: int) -> list[Chunk]:
        """Hand out at most `most` prepared decodes of the cohort, the longest ready first.

        No later batch delays the token of one in flight: what its credit is for is the next.
        """
        cohort = self.cohorts[groups]
        cohort.away += min(most, len(cohort.chunks))
        if len(cohort.chunks) <= most:
            slots = self._ready == cohort.mark
            np.add(self._due_s, self._tpot_s, out=self._due_s, where=slots)
            np.copyto(self._ready, 0, where=slots)
            chunks = [*cohort.chunks.values()]
            cohort.chunks = {}
            cohort.keys = dict.fromkeys(groups, 0)
            return chunks
        numbers = list(cohort.chunks)[:most]
        chunks = []
        for number in numbers:
            chunk = cohort.chunks.pop(number)
            slot = self.running[number].slot
            self._due_s[slot] += self._tpot_s[slot]
            self._ready[slot] = 0
            held = self.running[number].held
            for group in groups:
                cohort.keys[group] -= held.get(group, 0)
            chunks.append(chunk)
        return chunks

    def back(self, groups: tuple[int, ...]) -> None:
        """One of the cohort's decodes in flight came back, or never will."""
        self.cohorts[groups].away -= 1

    def keys_of(self, groups: tuple[int, ...], count: int) -> dict[int, int]:
        """KV tokens per group that the first `count` of the cohort read."""
        cohort = self.cohorts[groups]
        if count >= len(cohort.chunks):
            return cohort.keys
        keys = dict.fromkeys(groups, 0)
        for number in list(cohort.chunks)[:count]:
            held = self.running[number].held
            for group in groups:
                keys[group] += held.get(group, 0)
        return keys

    def in_groups(self, groups: tuple[int, ...]) -> bool:
        """Whether any decode of those groups is ready or in flight."""
        return any(
            (cohort.chunks or cohort.away) and not set(groups).isdisjoint(of)
            for of, cohort in self.cohorts.items()
        )

    def least_credit_s(self, now: float) -> float:
        """Smallest time until a running decode's next token is due; infinite with none."""
        return float(self._due_s[self._due_s.argmin()]) - now

    def least_tpot_s(self) -> float:
        """Tightest TPOT target of the running decodes; infinite with none."""
        return float(self._tpot_s[self._tpot_s.argmin()])
