"""Running work: decodes with their prepared next chunks and credit, and batches in flight.

A sequence has one decode in flight. When a token arrives, the next chunk is prepared at once (its
position is known), so that adding all decodes to a batch costs next to nothing. With lookahead the
next decode may be prepared behind a batch that still runs (see scheduler.py). Token k is due at
first token + k × TPOT: a decode that is early has credit and can wait.
"""

from __future__ import annotations

import numpy as np

from medha.batch import Batch, Chunk
from medha.predictor import BatchLoad
from medha.scheduling.sequence import Sequence

# However short the batches: another one costs every stage its messages.
MOST_PER_STAGE = 2


class DecodeGroup:
    """Prepared decodes of sequences that live in the same KVP groups, oldest first.

    `keys`: KV tokens per group that their attention reads, their own included; `in_flight`: how
    many are in flight; `mark`: identifies the slots of this group set.
    """

    __slots__ = ("chunks", "in_flight", "keys", "mark")

    def __init__(self, groups: tuple[int, ...], mark: int) -> None:
        self.mark = mark
        self.chunks: dict[int, Chunk] = {}
        self.keys = dict.fromkeys(groups, 0)
        self.in_flight = 0

    def batch_share(self, spp: int) -> int:
        """Count the decodes to take, so that they are spread evenly over the batches in flight."""
        ready = len(self.chunks)
        return ready if spp == 1 else min(ready, -(-(ready + self.in_flight) // spp))


class RunningDecodes:
    """Every unfinished sequence that has its first token."""

    def __init__(self) -> None:
        self.by_groups: dict[tuple[int, ...], DecodeGroup] = {}
        self.blocked_on_pages: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self._due_s = np.full(64, np.inf)
        self._tpot_s = np.full(64, np.inf)
        self._ready = np.zeros(64, dtype=np.int32)  # mark of the group set, if prepared
        self._slots = list(range(63, -1, -1))

    def __len__(self) -> int:
        return len(self.running)

    def begin(self, sequence: Sequence) -> None:
        """Add a sequence: its first token has arrived, or will with a batch in flight."""
        if not self._slots:
            size = len(self._due_s)
            self._due_s = np.concatenate([self._due_s, np.full(size, np.inf)])
            self._tpot_s = np.concatenate([self._tpot_s, np.full(size, np.inf)])
            self._ready = np.concatenate([self._ready, np.zeros_like(self._ready)])
            self._slots = list(range(2 * size - 1, size - 1, -1))
        slot = self._slots.pop()
        self._tpot_s[slot] = sequence.request.tpot_s
        self.running[sequence.number] = sequence
        sequence.start_decode(slot)

    def due(self, sequence: Sequence, due_s: float) -> None:
        """Set when the next token is due."""
        self._due_s[sequence.slot] = due_s
        sequence.set_decode_due(due_s)

    def is_prepared(self, sequence: Sequence) -> bool:
        """Return whether the next decode is prepared and in no batch yet."""
        return bool(self._ready[sequence.slot])

    def expect_last(self, sequence: Sequence) -> None:
        """Reserve no time for another token: the one in flight is the last."""
        if sequence.decoding:
            self._due_s[sequence.slot] = self._tpot_s[sequence.slot] = np.inf

    def prepare(self, sequence: Sequence, chunk: Chunk) -> None:
        """Hold the sequence's next decode ready for a batch."""
        decodes = self.by_groups.get(chunk.groups)
        if decodes is None:
            mark = len(self.by_groups) + 1
            decodes = self.by_groups[chunk.groups] = DecodeGroup(chunk.groups, mark)
        decodes.chunks[sequence.number] = chunk
        self._ready[sequence.slot] = decodes.mark
        held, keys = sequence.tokens_by_group, decodes.keys
        for group in chunk.groups:
            keys[group] += held.get(group, 0)
        sequence.set_next_chunk(chunk)

    def withdraw(self, sequence: Sequence) -> bool:
        """Remove a prepared decode; False if there is none."""
        self.blocked_on_pages.pop(sequence.number, None)
        chunk = sequence.next_chunk
        sequence.set_next_chunk(None)
        if chunk is None:
            return False
        decodes = self.by_groups[chunk.groups]
        if decodes.chunks.pop(sequence.number, None) is None:
            return False
        self._ready[sequence.slot] = 0
        for group in chunk.groups:
            decodes.keys[group] -= sequence.tokens_by_group.get(group, 0)
        return True

    def end(self, sequence: Sequence) -> None:
        """Remove a sequence that decodes no more."""
        self.withdraw(sequence)
        if self.running.pop(sequence.number, None) is not None:
            self._due_s[sequence.slot] = self._tpot_s[sequence.slot] = np.inf
            self._slots.append(sequence.slot)
            sequence.stop_decode()

    def take(self, groups: tuple[int, ...], most: int) -> list[Chunk]:
        """Take at most `most` prepared decodes of a group set, the longest prepared first.

        No later batch delays a token in flight, so that credit counts for the next token.
        """
        decodes = self.by_groups[groups]
        decodes.in_flight += min(most, len(decodes.chunks))
        if len(decodes.chunks) <= most:
            slots = self._ready == decodes.mark
            np.add(self._due_s, self._tpot_s, out=self._due_s, where=slots)
            np.copyto(self._ready, 0, where=slots)
            chunks = [*decodes.chunks.values()]
            decodes.chunks = {}
            decodes.keys = dict.fromkeys(groups, 0)
            return chunks
        numbers = list(decodes.chunks)[:most]
        chunks = []
        for number in numbers:
            chunk = decodes.chunks.pop(number)
            slot = self.running[number].slot
            self._due_s[slot] += self._tpot_s[slot]
            self._ready[slot] = 0
            held = self.running[number].tokens_by_group
            for group in groups:
                decodes.keys[group] -= held.get(group, 0)
            chunks.append(chunk)
        return chunks

    def block_on_pages(self, sequence: Sequence) -> None:
        """Record that the next decode finds no page."""
        self.blocked_on_pages[sequence.number] = sequence

    def unblock(self, sequence: Sequence) -> None:
        del self.blocked_on_pages[sequence.number]

    def land(self, groups: tuple[int, ...]) -> None:
        """Count a decode in flight as complete or void."""
        self.by_groups[groups].in_flight -= 1

    def keys_of(self, groups: tuple[int, ...], count: int) -> dict[int, int]:
        """Return the KV tokens per group that the first `count` prepared decodes read."""
        decodes = self.by_groups[groups]
        if count >= len(decodes.chunks):
            return decodes.keys
        keys = dict.fromkeys(groups, 0)
        for number in list(decodes.chunks)[:count]:
            held = self.running[number].tokens_by_group
            for group in groups:
                keys[group] += held.get(group, 0)
        return keys

    def in_groups(self, groups: tuple[int, ...]) -> bool:
        """Return whether any decode of those groups is prepared or in flight."""
        return any(
            (decodes.chunks or decodes.in_flight) and not set(groups).isdisjoint(of)
            for of, decodes in self.by_groups.items()
        )

    def least_credit_s(self, now: float) -> float:
        """Return the shortest time until a running decode's token is due; infinite with none."""
        return float(self._due_s[self._due_s.argmin()]) - now

    def least_tpot_s(self) -> float:
        """Return the tightest TPOT target of the running decodes; infinite with none."""
        return float(self._tpot_s[self._tpot_s.argmin()])


class InFlightBatch:
    """A batch sent to the ranks.

    `heaviest`: the load of its fullest group; `due_out_s`: predicted time at which its stage 0 is
    free; `ends_s`: predicted end of each stage. `followed`: the next chunks of its sequences are
    prepared; another batch may then follow it early if `open`.
    """

    __slots__ = (
        "batch",
        "due_out_s",
        "ends_s",
        "followed",
        "groups",
        "heaviest",
        "left_stage0",
        "open",
        "predicted_s",
    )

    def __init__(
        self, batch: Batch, groups: tuple[int, ...], now: float, heaviest: BatchLoad
    ) -> None:
        self.batch, self.groups, self.heaviest = batch, groups, heaviest
        self.predicted_s = batch.predicted_s
        self.due_out_s = now + batch.predicted_s
        self.ends_s = [self.due_out_s]
        self.left_stage0 = self.followed = self.open = False

    def leave_stage0(self) -> None:
        self.left_stage0 = True

    def follow(self) -> None:
        """The next chunks of the batch's sequences are being prepared."""
        self.followed = True

    def open_for_next(self, is_open: bool) -> None:
        """Allow another batch behind this one, if every decode could be prepared."""
        self.open = is_open


class InFlightBatches:
    """All batches in flight: by number, and the numbers by group.

    Up to `spp` batches are in flight per KVP group, counted by their time: as many as take less
    than `spp` of the longest of them. (If a short prompt's batch counted in full, it would fill the
    pipeline and leave stage 0 idle behind it.) "Stage 0 is free" and "the batch is complete" are
    different events: the first admits the next batch, the second brings tokens. If a group is lost,
    its batches are void and never complete.
    """

    def __init__(self, spp: int) -> None:
        self.spp = spp
        self.by_number: dict[int, InFlightBatch] = {}
        self.numbers_by_group: dict[int, list[int]] = {}

    def join(self, group: int) -> None:
        self.numbers_by_group[group] = []

    def leave(self, group: int) -> None:
        del self.numbers_by_group[group]

    def add(self, sent: InFlightBatch) -> None:
        if self.spp > 1:
            self._predict_stages(sent)
        else:
            self._predict_end(sent)
        self.by_number[sent.batch.number] = sent
        for group in sent.groups:
            self.numbers_by_group[group].append(sent.batch.number)

    def _predict_stages(self, sent: InFlightBatch) -> None:
        """Predict stage ends: a stage waits for the stage before and for earlier batches."""
        ahead = [
            self.by_number[numbers[-1]].ends_s
            for numbers in map(self.numbers_by_group.__getitem__, sent.groups)
            if numbers
        ]
        for stage in range(1, self.spp):
            start = max(sent.ends_s[-1], *(ends[stage] for ends in ahead), 0.0)
            sent.ends_s.append(start + sent.predicted_s)

    def _predict_end(self, sent: InFlightBatch) -> None:
        """Predict the end: the batch starts when the one that runs there is complete."""
        for numbers in map(self.numbers_by_group.__getitem__, sent.groups):
            if numbers:
                begins_s = self.by_number[numbers[-1]].due_out_s
                sent.due_out_s = max(sent.due_out_s, begins_s + sent.predicted_s)

    def remove(self, number: int) -> InFlightBatch | None:
        """Remove and return a batch; None if it is unknown or void."""
        sent = self.by_number.pop(number, None)
        if sent is not None:
            for group in sent.groups:
                if group in self.numbers_by_group:
                    self.numbers_by_group[group].remove(number)
        return sent

    def has_room(self, group: int) -> bool:
        """Return whether the pipeline of `group` may take another batch."""
        return self._blocking(group) is None

    def _blocking(self, group: int) -> InFlightBatch | None:
        """Return the batch that must complete before `group` takes another, if any."""
        numbers, spp = self.numbers_by_group[group], self.spp
        if len(numbers) < spp:
            return None
        if spp == 1:
            return self.by_number[numbers[-1]]
        batches = [self.by_number[number] for number in numbers]
        lengths_s = [sent.predicted_s for sent in batches]
        out = max(0, len(batches) - MOST_PER_STAGE * spp + 1)
        while len(batches) - out >= spp and sum(lengths_s[out:]) >= spp * max(lengths_s[out:]):
            out += 1
        return batches[out - 1] if out else None

    def on_group(self, group: int) -> list[InFlightBatch]:
        """Return the batches in flight on `group`, oldest first."""
        return [self.by_number[number] for number in self.numbers_by_group.get(group, ())]

    def free_in_s(self, group: int, now: float) -> float:
        """Return the predicted seconds until stage 0 of `group` is free and its pipeline has room.

        0 if it is so already, or late.
        """
        latest = 0.0
        numbers = self.numbers_by_group.get(group, ())
        for number in numbers:
            sent = self.by_number[number]
            if not sent.left_stage0:
                latest = max(latest, sent.due_out_s - now)
        full = self._blocking(group) if self.spp > 1 else None
        return latest if full is None else max(latest, full.ends_s[-1] - now)

    def oldest(self, group: int) -> int | None:
        """Return the number of the oldest batch in flight on `group`."""
        numbers = self.numbers_by_group.get(group)
        return min(numbers) if numbers else None
