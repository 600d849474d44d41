"""Waiting prefills of each KVP group, as arrays in order of deadline.

A row is a sequence whose prompt has not left stage 0 yet and for which the group works or will
work. Its work is 0 once all of it is scheduled. Arrays change only where a sequence changes, so
that a decision takes a few passes over them, however long the queue. Rows stand in the total order
(due, arrival, id).
"""

from __future__ import annotations

import bisect

import numpy as np
import numpy.typing as npt

from medha.prefill_times import PrefillTimes, between
from medha.scheduling.block_pool import BlockPool
from medha.scheduling.native import (
    ALONGSIDE,
    BEYOND,
    DUE,
    KEPT,
    NEED,
    NORM,
    PASSED,
    PROMISED,
    READY,
    TURN,
    WORK,
    Floats,
    Mask,
    Rows,
)
from medha.scheduling.sequence import Sequence

Places = npt.NDArray[np.intp]


class WaitingQueue:
    """Rows of one group.

    Columns: `work_s` seconds that the row takes of the group alone, alongside the decodes until it
    is due; `alongside` these decodes' mean part of the decode capacity; `need` pages required here
    before it may start, 0 afterwards; `norm_s` the divisor of slack. `values` returns what stays in
    a row's slot: `TOKENS` not yet scheduled; `PASSED`, when it was first passed over for lack of
    pages; `TURN`, which ascends with (arrival, id) and breaks ties.

    `rows`: the memory, and the compiled passes over it. `freed`: work was removed since the last
    review of the promise set. `noted_s`: when to update `PASSED` next. `typical`: decodes alongside
    a new row, as a part of the decode capacity; `expected`: those that a new promise reckons with.
    """

    __slots__ = (
        "_arrivals",
        "_oldest_s",
        "expected",
        "freed",
        "noted_s",
        "rows",
        "sequences",
        "typical",
    )

    def __init__(self) -> None:
        self.rows = Rows()
        self._arrivals: list[tuple[float, str, float]] = []
        self.sequences: list[Sequence] = []
        self.freed, self.noted_s = False, 0.0
        self.typical = self.expected = 0.0
        self._oldest_s = np.inf  # lower bound of `PASSED`

    def __len__(self) -> int:
        return len(self.sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return self.find(sequence) >= 0

    @property
    def kept_count(self) -> int:
        return self.rows.kept_count

    @property
    def promised_count(self) -> int:
        return self.rows.promised_count

    @property
    def relegated(self) -> bool:
        """A prompt waits that time is set aside for: not kept, nor beyond its tenant's share."""
        return self.rows.kept_count < len(self.sequences) and self.rows.has_relegated()

    @property
    def ready_count(self) -> int:
        return self.rows.ready_count

    # --- columns ----------------------------------------------------------------------------------

    @property
    def due_s(self) -> Floats:
        return self._column(DUE)

    @property
    def work_s(self) -> Floats:
        return self._column(WORK)

    @property
    def alongside(self) -> Floats:
        return self._column(ALONGSIDE)

    @property
    def need(self) -> Floats:
        return self._column(NEED)

    @property
    def norm_s(self) -> Floats:
        return self._column(NORM)

    @property
    def kept(self) -> Mask:
        return self._flag(KEPT)

    @property
    def promised(self) -> Mask:
        return self._flag(PROMISED)

    @property
    def ready(self) -> Mask:
        return self._flag(READY)

    def values(self, value: int, rows: Places | None = None) -> Floats:
        """Return that value of the rows, of all by default."""
        slots = self.rows.slot[: len(self.sequences)]
        values: Floats = self.rows.slots[slots if rows is None else slots[rows], value]
        return values

    def _column(self, column: int) -> Floats:
        values: Floats = self.rows.columns[column, : len(self.sequences)]
        return values

    def _flag(self, flag: int) -> Mask:
        mask: Mask = self.rows.flags[flag, : len(self.sequences)]
        return mask

    # --- rows -------------------------------------------------------------------------------------

    def place(self, key: tuple[float, float, str]) -> int:
        """Return the row of a key, or the row that it would get."""
        place, sequences = self.rows.first_due(key[0]), self.sequences
        if place < len(sequences) and sequences[place].key < key:  # thousands may be due then
            return bisect.bisect_left(sequences, key, place + 1, key=_key)
        return place

    def find(self, sequence: Sequence) -> int:
        """Return the row of a sequence, -1 if it does not wait here; near where it was last."""
        at, sequences = sequence.row, self.sequences
        if at < len(sequences) and sequences[at] is sequence:
            return at
        at = self.place(sequence.key)
        if at == len(sequences) or sequences[at] is not sequence:
            return -1
        sequence.set_row(at)
        return at

    def row_of(self, sequence: Sequence) -> int:
        """Return the row of a sequence; raise KeyError if it does not wait here."""
        row = self.find(sequence)
        if row < 0:
            raise KeyError(sequence.id)
        return row

    def add(self, sequence: Sequence, levels: list[float], need: int) -> None:
        """Add a row, unless the sequence waits here already."""
        at = self.place(sequence.key)
        if at < len(self.sequences) and self.sequences[at] is sequence:
            return
        due_s, arrival_s, id_ = sequence.key
        flags = sequence.kept << KEPT | sequence.promised << PROMISED | sequence.ready << READY
        if sequence.request.beyond_share:
            flags |= 1 << BEYOND
        self.rows.insert(
            at,
            flags,
            due_s,
            self.typical,
            need,
            sequence.norm_s,
            arrival_s,
            sequence.remaining_tokens,
            self._take_turn(arrival_s, id_),
            sequence.number,
            levels,
        )
        self.sequences.insert(at, sequence)
        sequence.set_row(at)

    def remove(self, sequence: Sequence) -> None:
        at = self.row_of(sequence)
        self.freed = self.freed or self.rows.work_s(at) > 0.0
        _, arrival_s, id_ = sequence.key
        del self._arrivals[bisect.bisect_left(self._arrivals, (arrival_s, id_))]
        self.rows.remove(at)
        del self.sequences[at]

    def update_work(self, sequence: Sequence, levels: list[float]) -> None:
        """Update a row after the sequence's cursors moved."""
        ready = sequence.past_stage0_tokens == sequence.scheduled_tokens
        self.rows.update(self.row_of(sequence), ready, sequence.remaining_tokens, levels)

    def update_flags(self, sequence: Sequence) -> None:
        """Update a row after the sequence's rank or readiness changed."""
        row = self.row_of(sequence)
        self.rows.set_flags(row, sequence.kept, sequence.promised, sequence.ready)

    def mark_started(self, sequence: Sequence) -> None:
        """Record that the sequence has its pages."""
        self.rows.start(self.row_of(sequence))

    def set_typical(self, alongside: float, expected: float) -> None:
        self.typical, self.expected = alongside, expected

    def clear_freed(self) -> None:
        self.freed = False

    def pass_over(self, limit: float, now: float, next_s: float) -> None:
        """Record that rows in need of more than `limit` pages are passed over.

        The next record follows at `next_s`.
        """
        slots = self.rows.slot[: len(self.sequences)][self.need > limit]
        self.rows.slots[slots, PASSED] = np.minimum(self.rows.slots[slots, PASSED], now)
        self._oldest_s = min(self._oldest_s, now)
        self.noted_s = next_s

    def longest_passed_over(self, before_s: float) -> Sequence | None:
        """Return the unstarted sequence passed over for longest, if since before `before_s`."""
        if self._oldest_s >= before_s or not self.sequences:
            return None
        since_s = self.values(PASSED)
        oldest = since_s.argmin()
        self._oldest_s = float(since_s[oldest])
        return self.sequences[oldest] if self._oldest_s < before_s else None

    def _take_turn(self, arrival_s: float, id_: str) -> float:
        """Return a number between those of the arrivals before and after."""
        arrivals, at = self._arrivals, len(self._arrivals)
        if at and arrivals[-1][:2] >= (arrival_s, id_):  # seldom: they come in this order
            at = bisect.bisect_left(arrivals, (arrival_s, id_))
        before = arrivals[at - 1][2] if at else (arrivals[0][2] - 2.0 if arrivals else 0.0)
        after = arrivals[at][2] if at < len(arrivals) else before + 2.0
        turn = 0.5 * (before + after)
        if not before < turn < after:
            self._spread_turns()
            return self._take_turn(arrival_s, id_)
        arrivals.insert(at, (arrival_s, id_, turn))
        return turn

    def _spread_turns(self) -> None:
        """Number all arrivals again: between two of them no number is left."""
        self._arrivals = [
            (arrival_s, id_, float(turn)) for turn, (arrival_s, id_, _) in enumerate(self._arrivals)
        ]
        turns = {arrival[:2]: arrival[2] for arrival in self._arrivals}
        for sequence, slot in zip(self.sequences, self.rows.slot.tolist(), strict=False):
            self.rows.slots[slot, TURN] = turns[sequence.key[1:]]


def _key(sequence: Sequence) -> tuple[float, float, str]:
    return sequence.key


class WaitingQueues:
    """The queues of all running groups, and the work that a sequence brings to each.

    A sequence waits in the queues of all its assigned groups that run, or in none.
    `output_reserve`: part of the maximum output for which pages are reserved in advance.
    """

    def __init__(self, pool: BlockPool, times: PrefillTimes, output_reserve: float) -> None:
        self.pool, self.times = pool, times
        self.output_reserve = output_reserve
        self.tokens_per_group = times.predictor.tokens_per_group
        self.by_group: dict[int, WaitingQueue] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        queues = (self.by_group.get(group) for group in sequence.assigned_groups)
        return any(queue is not None and sequence in queue for queue in queues)

    def join(self, group: int) -> None:
        self.by_group[group] = WaitingQueue()

    def leave(self, group: int) -> None:
        del self.by_group[group]

    def pages_needed(self, sequence: Sequence) -> int:
        """Pages of the whole prompt and of a part of its output, as far as they are kept."""
        return self.pool.pages_needed(self.tokens_planned(sequence))

    def tokens_planned(self, sequence: Sequence) -> int:
        """Tokens of the whole prompt and of a part of its output."""
        output = sequence.request.max_output_tokens - sequence.output_tokens
        return sequence.target_tokens + int(self.output_reserve * max(0, output))

    def pending_s(self, group: int) -> float:
        """Prefill seconds that wait in `group`; exactly 0 if the queue is empty."""
        return float(self.by_group[group].work_s.sum())

    def ahead_s(self, group: int, due_s: float) -> float:
        """Prefill seconds of kept rows that are due by then and wait in `group`."""
        queue = self.by_group[group]
        due = queue.due_s.searchsorted(due_s, side="right")
        return float(queue.work_s[:due][queue.kept[:due]].sum())

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

    def enqueue(self, sequence: Sequence, cached: int = 0) -> dict[int, float]:
        """Add the sequence to the queue of every assigned group; return `work_by_group`."""
        alone = len(sequence.assigned_groups) == 1
        need = self.pages_needed(sequence) if alone and not sequence.started else 0
        work_s: dict[int, float] = {}
        for group, levels in self.levels_by_group(sequence, cached).items():
            queue = self.by_group[group]
            queue.add(sequence, levels, need)
            work_s[group] = between(levels, queue.typical)
        return work_s

    def dequeue(self, sequence: Sequence) -> None:
        """Remove the sequence from every queue."""
        for group in sequence.assigned_groups:
            queue = self.by_group.get(group)
            if queue is not None and sequence in queue:
                queue.remove(sequence)

    def transfer(self, sequence: Sequence, target: int, cached: int) -> None:
        """Move a waiting sequence of one group to another, which has `cached` of its tokens."""
        self.dequeue(sequence)
        sequence.assign((target,))
        self.enqueue(sequence, cached)

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
