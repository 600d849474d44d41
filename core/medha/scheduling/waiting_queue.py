"""Waiting prefills of each KVP group, as arrays in order of deadline.

A row is a sequence whose prompt has not left stage 0 yet and for which the group works or will
work. Its work is 0 once all of it is scheduled. Arrays change only where a sequence changes, so
that a decision takes a few vector operations, however long the queue. Rows stand in the total order
(due, arrival, id).
"""

from __future__ import annotations

import bisect

import numpy as np
import numpy.typing as npt

from medha.prefill_times import FRACTIONS, LEVELS, PrefillTimes, between
from medha.scheduling.block_pool import BlockPool
from medha.scheduling.sequence import Sequence

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.intp]

DUE, ARRIVAL, WORK, NORM, TOKENS, NEED, PASSED, TURN, ALONGSIDE, LEVEL = range(10)
FIELDS = LEVEL + LEVELS
KEPT, PROMISED, READY = range(3)
FLAGS = 3


_FRACTIONS: Floats = np.array(FRACTIONS)


class WaitingQueue:
    """Rows of one group.

    Columns: `work_s` seconds that the row takes of the group alone, alongside the decodes until it
    is due; `alongside` these decodes' mean part of the decode capacity; `need` pages required here
    before it may start, 0 afterwards; `tokens` not yet scheduled; `since_s` when the row was first
    passed over for lack of pages; `turn` its place in the order of (arrival, id), which breaks
    ties. All are slices of `fields` and `flags`, in the order of the constants above, and behind
    them the work for each level of decodes; native.py passes both on, and they are wider than the
    number of rows.

    `freed`: work was removed since the last review of the promise set. `noted_s`: when to update
    `since_s` next. `kept_count`, `promised_count`, `ready_count`: rows with that flag. `typical`:
    `alongside` of a new row.
    """

    __slots__ = (
        "_arrivals",
        "_keys",
        "_oldest_s",
        "alongside",
        "arrival_s",
        "due_s",
        "fields",
        "flags",
        "freed",
        "kept",
        "kept_count",
        "need",
        "norm_s",
        "noted_s",
        "promised",
        "promised_count",
        "ready",
        "ready_count",
        "sequences",
        "since_s",
        "tokens",
        "turn",
        "typical",
        "work_s",
    )

    due_s: Floats
    arrival_s: Floats
    work_s: Floats
    norm_s: Floats
    tokens: Floats
    need: Floats
    since_s: Floats
    turn: Floats
    alongside: Floats
    kept: Mask
    promised: Mask
    ready: Mask

    def __init__(self) -> None:
        self.fields = np.zeros((FIELDS, 64))
        self.flags = np.zeros((FLAGS, 64), dtype=np.bool_)
        self._keys: list[tuple[float, float, str]] = []
        self._arrivals: list[tuple[float, str]] = []
        self.sequences: list[Sequence] = []
        self.freed, self.noted_s = False, 0.0
        self.kept_count = self.promised_count = self.ready_count = 0
        self.typical = 0.0
        self._oldest_s = np.inf  # lower bound of `since_s`
        self._slice()

    def __len__(self) -> int:
        return len(self.sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        at = bisect.bisect_left(self._keys, sequence.key)
        return at < len(self._keys) and self.sequences[at] is sequence

    def place(self, key: tuple[float, float, str]) -> int:
        """Return the row of a key, or the row that it would get."""
        return bisect.bisect_left(self._keys, key)

    def add(self, sequence: Sequence, levels: list[float], need: int) -> None:
        at, n = self.place(sequence.key), len(self._keys)
        if n == self.fields.shape[1]:
            self.fields = np.concatenate([self.fields, np.zeros_like(self.fields)], axis=1)
            self.flags = np.concatenate([self.flags, np.zeros_like(self.flags)], axis=1)
        self.fields[:, at + 1 : n + 1] = self.fields[:, at:n]
        self.flags[:, at + 1 : n + 1] = self.flags[:, at:n]
        due_s, arrival_s, id_ = sequence.key
        turn = bisect.bisect_left(self._arrivals, (arrival_s, id_))
        if turn < n:
            turns = self.fields[TURN, : n + 1]
            turns[turns >= turn] += 1.0
        self._arrivals.insert(turn, (arrival_s, id_))
        self.fields[:, at] = (
            due_s,
            arrival_s,
            between(levels, self.typical),
            sequence.norm_s,
            sequence.remaining_tokens,
            need,
            np.inf,
            turn,
            self.typical,
            *levels,
        )
        self.flags[:, at] = False
        self._set_flags(at, sequence.kept, sequence.promised, sequence.ready)
        self._keys.insert(at, sequence.key)
        self.sequences.insert(at, sequence)
        self._slice()

    def remove(self, sequence: Sequence) -> None:
        at, n = self._row(sequence), len(self._keys)
        self.freed = self.freed or bool(self.fields[WORK, at] > 0.0)
        self._set_flags(at, kept=False, promised=False, ready=False)
        turn = int(self.fields[TURN, at])
        if turn < n - 1:
            turns = self.fields[TURN, :n]
            turns[turns > turn] -= 1.0
        del self._arrivals[turn]
        self.fields[:, at : n - 1] = self.fields[:, at + 1 : n]
        self.flags[:, at : n - 1] = self.flags[:, at + 1 : n]
        del self._keys[at], self.sequences[at]
        self._slice()

    def update_work(self, sequence: Sequence, levels: list[float]) -> None:
        """Update a row after the sequence's cursors moved."""
        fields, at = self.fields, self._row(sequence)
        fields[WORK, at] = between(levels, float(fields[ALONGSIDE, at]))
        fields[LEVEL:, at] = levels
        fields[TOKENS, at] = sequence.target_tokens - sequence.scheduled_tokens
        ready = sequence.past_stage0_tokens == sequence.scheduled_tokens
        self.ready_count += ready - bool(self.ready[at])
        self.ready[at] = ready

    def update_flags(self, sequence: Sequence) -> None:
        """Update a row after the sequence's rank or readiness changed."""
        self._set_flags(self._row(sequence), sequence.kept, sequence.promised, sequence.ready)

    def mark_started(self, sequence: Sequence) -> None:
        """Record that the sequence has its pages."""
        row = self._row(sequence)
        self.fields[NEED, row], self.fields[PASSED, row] = 0.0, np.inf

    def set_typical(self, alongside: float) -> None:
        self.typical = alongside

    def clear_freed(self) -> None:
        self.freed = False

    def pass_over(self, limit: float, now: float, next_s: float) -> None:
        """Record that rows in need of more than `limit` pages are passed over.

        The next record follows at `next_s`.
        """
        np.minimum(self.since_s, now, out=self.since_s, where=self.need > limit)
        self._oldest_s = min(self._oldest_s, now)
        self.noted_s = next_s

    def longest_passed_over(self, before_s: float) -> Sequence | None:
        """Return the unstarted sequence passed over for longest, if since before `before_s`."""
        if self._oldest_s >= before_s or not self._keys:
            return None
        oldest = self.since_s.argmin()
        self._oldest_s = float(self.since_s[oldest])
        return self.sequences[oldest] if self._oldest_s < before_s else None

    def levels_of(self, sequence: Sequence) -> list[float]:
        levels: list[float] = self.fields[LEVEL:, self._row(sequence)].tolist()
        return levels

    def least_work_s(self, sequence: Sequence) -> float:
        """Return the seconds that the sequence takes with no decodes alongside it."""
        return float(self.fields[LEVEL, self._row(sequence)])

    def set_alongside(self, alongside: Floats) -> None:
        """Set the decodes alongside each row, as parts of the decode capacity; array of [n]."""
        self.alongside[:] = alongside
        self.work_s[:] = self.work_alongside(alongside)

    def work_alongside(self, alongside: Floats) -> Floats:
        """Return the seconds that each row takes alongside those decodes; arrays of [n]."""
        levels = self.fields[LEVEL:, : len(self._keys)]
        upper = np.clip(np.searchsorted(_FRACTIONS, alongside, side="right"), 1, LEVELS - 1)
        rows = np.arange(len(alongside))
        low, high = levels[upper - 1, rows], levels[upper, rows]
        start = _FRACTIONS[upper - 1]
        return low + (high - low) * ((alongside - start) / (_FRACTIONS[upper] - start))

    def _set_flags(self, at: int, kept: bool, promised: bool, ready: bool) -> None:
        flags = self.flags
        self.kept_count += kept - bool(flags[KEPT, at])
        self.promised_count += promised - bool(flags[PROMISED, at])
        self.ready_count += ready - bool(flags[READY, at])
        flags[KEPT, at], flags[PROMISED, at], flags[READY, at] = kept, promised, ready

    def _slice(self) -> None:
        """Slice the columns again: the number of rows changed. Reads are more frequent."""
        n = len(self._keys)
        (
            self.due_s,
            self.arrival_s,
            self.work_s,
            self.norm_s,
            self.tokens,
            self.need,
            self.since_s,
            self.turn,
            self.alongside,
        ) = self.fields[:LEVEL, :n]
        self.kept, self.promised, self.ready = self.flags[:, :n]

    def _row(self, sequence: Sequence) -> int:
        at = sequence.row
        if at < len(self.sequences) and self.sequences[at] is sequence:
            return at
        at = bisect.bisect_left(self._keys, sequence.key)
        sequence.set_row(at)
        if at == len(self._keys) or self.sequences[at] is not sequence:
            raise KeyError(sequence.id)
        return at


class WaitingQueues:
    """The queues of all running groups, and the work that a sequence brings to each.

    `output_reserve`: part of the maximum output for which pages are reserved in advance.
    """

    def __init__(self, pool: BlockPool, times: PrefillTimes, output_reserve: float) -> None:
        self.pool, self.times = pool, times
        self.output_reserve = output_reserve
        self.tokens_per_group = times.predictor.tokens_per_group
        self.by_group: dict[int, WaitingQueue] = {}

    def join(self, group: int) -> None:
        self.by_group[group] = WaitingQueue()

    def leave(self, group: int) -> None:
        del self.by_group[group]

    def pages_needed(self, sequence: Sequence) -> int:
        """Pages of the whole prompt and of a part of its output, at most those that can exist."""
        pool, output = self.pool, sequence.request.max_output_tokens - sequence.output_tokens
        pages = pool.pages_for(sequence.target_tokens + int(self.output_reserve * max(0, output)))
        return min(pages, pool.groups_max * pool.pages_per_group)

    def pending_s(self, group: int) -> float:
        """Prefill seconds that wait in `group`; exactly 0 if the queue is empty."""
        return float(self.by_group[group].work_s.sum())

    def levels_by_group(self, sequence: Sequence, cached: int = 0) -> dict[int, list[float]]:
        """Seconds of unscheduled tokens in each running assigned group, by level of decodes.

        `cached`: tokens that the sequence will find when it starts. The k-th assigned group works
        from k × tokens_per_group on. The pipeline's drain, T(n) = Σ t + (spp − 1) · max t, is
        excluded: it delays this request only.
        """
        target, done = sequence.target_tokens, max(sequence.scheduled_tokens, cached)
        return {
            group: self.times.by_level(min(max(done, turn * self.tokens_per_group), target), target)
            for turn, group in enumerate(sequence.assigned_groups)
            if group in self.by_group
        }

    def work_by_group(self, sequence: Sequence, cached: int = 0) -> dict[int, float]:
        """The same alongside the decodes that are usual now."""
        return {
            group: between(levels, self.by_group[group].typical)
            for group, levels in self.levels_by_group(sequence, cached).items()
        }

    def set_times(self, times: PrefillTimes) -> None:
        """Compute all work again, for another time budget."""
        self.times = times
        for sequence in {
            sequence.number: sequence
            for queue in self.by_group.values()
            for sequence in queue.sequences
        }.values():
            self.update_work(sequence)

    def enqueue(self, sequence: Sequence, cached: int = 0) -> None:
        """Add the sequence to the queue of every assigned group."""
        alone = len(sequence.assigned_groups) == 1
        need = self.pages_needed(sequence) if alone and not sequence.started else 0
        for group, levels in self.levels_by_group(sequence, cached).items():
            if sequence not in self.by_group[group]:
                self.by_group[group].add(sequence, levels, need)

    def dequeue(self, sequence: Sequence) -> None:
        """Remove the sequence from every queue."""
        for group in sequence.assigned_groups:
            if group in self.by_group and sequence in self.by_group[group]:
                self.by_group[group].remove(sequence)

    def transfer(self, sequence: Sequence, source: int, target: int) -> None:
        """Move a waiting sequence of one group to another."""
        levels = self.by_group[source].levels_of(sequence)
        self.dequeue(sequence)
        sequence.assign((target,))
        self.by_group[target].add(sequence, levels, self.pages_needed(sequence))

    def update_all(self, sequences: list[Sequence]) -> None:
        """Update the rows of sequences that a batch has just scheduled."""
        for sequence in sequences:
            self.update_work(sequence)

    def update_work(self, sequence: Sequence) -> None:
        """Update the rows of a sequence after its cursors moved."""
        for group, levels in self.levels_by_group(sequence).items():
            self.by_group[group].update_work(sequence, levels)

    def update_flags(self, sequence: Sequence) -> None:
        """Update the rows of a sequence after its readiness or its rank changed."""
        for group in sequence.assigned_groups:
            queue = self.by_group.get(group)
            if queue is not None and sequence in queue:
                queue.update_flags(sequence)

    def mark_started(self, sequence: Sequence) -> None:
        """Record that the sequence has its pages; some of its tokens may be cached."""
        for group in sequence.assigned_groups:
            if group in self.by_group:
                self.by_group[group].mark_started(sequence)
        if sequence.scheduled_tokens:
            self.update_work(sequence)
