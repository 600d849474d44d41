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

from medha.predictor import Predictor
from medha.scheduling.block_pool import BlockPool
from medha.scheduling.sequence import Sequence

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.intp]

DUE, ARRIVAL, WORK, NORM, TOKENS, NEED, PASSED, TURN, DEPTH = range(9)
FIELDS = 9
KEPT, PROMISED, READY = range(3)
FLAGS = 3


class WaitingQueue:
    """Rows of one group.

    Columns: `work_s` seconds for which the group alone will be busy with the row; `need` pages
    required here before it may start, 0 afterwards; `tokens` not yet scheduled; `depth` tokens in
    the end; `since_s` when the row was first passed over for lack of pages; `turn` its place in the
    order of (arrival, id), which breaks ties. All are slices of `fields` and `flags`, in the order
    of the constants above; native.py passes both on, and they are wider than the number of rows.

    `freed`: work was removed since the last review of the promise set. `noted_s`: when to update
    `since_s` next. `kept_count`, `promised_count`, `ready_count`: rows with that flag.
    """

    __slots__ = (
        "_arrivals",
        "_keys",
        "_oldest_s",
        "arrival_s",
        "depth",
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
    depth: Floats
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

    def add(self, sequence: Sequence, work_s: float, need: int) -> None:
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
            work_s,
            sequence.norm_s,
            sequence.remaining_tokens,
            need,
            np.inf,
            turn,
            sequence.target_tokens,
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

    def update_work(self, sequence: Sequence, work_s: float) -> None:
        """Update a row after the sequence's cursors moved."""
        fields, at = self.fields, self._row(sequence)
        fields[WORK, at] = work_s
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

    def work_of(self, sequence: Sequence) -> float:
        return float(self.fields[WORK, self._row(sequence)])

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
            self.depth,
        ) = self.fields[:, :n]
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

    def __init__(
        self, pool: BlockPool, predictor: Predictor, spp: int, output_reserve: float
    ) -> None:
        self.pool, self.predictor, self.spp = pool, predictor, spp
        self.output_reserve = output_reserve
        self.tokens_per_group = predictor.tokens_per_group
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

    def work_by_group(self, sequence: Sequence, cached: int = 0) -> dict[int, float]:
        """Seconds for which each running assigned group will be busy with unscheduled tokens.

        `cached`: tokens that the sequence will find when it starts. The k-th assigned group works
        from k × tokens_per_group on. The pipeline's drain, T(n) = Σ t + (spp − 1) · max t, is
        excluded: it delays this request only.
        """
        queues = self.by_group
        work_s: dict[int, float] = {}
        if sequence.scheduled_tokens >= sequence.target_tokens:
            return {group: 0.0 for group in sequence.assigned_groups if group in queues}
        for turn, group in enumerate(sequence.assigned_groups):
            if group in queues:
                start = max(sequence.scheduled_tokens, cached, turn * self.tokens_per_group)
                target = sequence.target_tokens
                work_s[group] = self.busy_s(target, min(start, target))
        return work_s

    def busy_s(self, target: int, cached: int) -> float:
        """Seconds for which a group alone is busy with tokens `cached` .. `target`.

        In a pipeline a batch waits for a longer one ahead. Chunks are whole steps, so that batches
        differ by up to one step, and half a step is lost with each.
        """
        busy_s = self.predictor.busy_s(target, cached)
        budget_s = self.predictor.budget_s
        if self.spp == 1 or busy_s <= budget_s:
            return busy_s
        return busy_s * (1.0 + 0.5 * min(1.0, self.predictor.step_s(target) / budget_s))

    def enqueue(self, sequence: Sequence, cached: int = 0) -> None:
        """Add the sequence to the queue of every assigned group."""
        alone = len(sequence.assigned_groups) == 1
        need = self.pages_needed(sequence) if alone and not sequence.started else 0
        for group, work_s in self.work_by_group(sequence, cached).items():
            if sequence not in self.by_group[group]:
                self.by_group[group].add(sequence, work_s, need)

    def dequeue(self, sequence: Sequence) -> None:
        """Remove the sequence from every queue."""
        for group in sequence.assigned_groups:
            if group in self.by_group and sequence in self.by_group[group]:
                self.by_group[group].remove(sequence)

    def transfer(self, sequence: Sequence, source: int, target: int) -> None:
        """Move a waiting sequence of one group to another."""
        work_s = self.by_group[source].work_of(sequence)
        self.dequeue(sequence)
        sequence.assign((target,))
        self.by_group[target].add(sequence, work_s, self.pages_needed(sequence))

    def update_all(self, sequences: list[Sequence]) -> None:
        """Update the rows of sequences that a batch has just scheduled."""
        for sequence in sequences:
            self.update_work(sequence)

    def update_work(self, sequence: Sequence) -> None:
        """Update the rows of a sequence after its cursors moved."""
        if len(sequence.assigned_groups) == 1:
            busy_s = 0.0
            if sequence.scheduled_tokens < sequence.target_tokens:
                busy_s = self.busy_s(sequence.target_tokens, sequence.scheduled_tokens)
            self.by_group[sequence.assigned_groups[0]].update_work(sequence, busy_s)
            return
        for group, work_s in self.work_by_group(sequence).items():
            self.by_group[group].update_work(sequence, work_s)

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
