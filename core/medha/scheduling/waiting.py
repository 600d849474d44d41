"""Prefills of one KVP group, as arrays in order of deadline.

A row is a sequence whose prompt has not left stage 0 yet and for which this group works or will
work; its work is 0 once all of it is handed out. Arrays change only where a sequence changes, so
that a decision is a handful of vector operations whatever waits. Rows stand in the total order
(due, arrival, id).
"""

from __future__ import annotations

import bisect

import numpy as np

from medha.scheduling.lars import Floats, Mask
from medha.scheduling.sequence import Sequence

DUE, ARRIVAL, WORK, NORM, TOKENS, NEED, PASSED, TURN, DEPTH = range(9)
FIELDS = 9
KEPT, PROMISED, READY = range(3)
FLAGS = 3


class Waiting:
    """Rows of one group.

    `work` is seconds that the group will be busy with it, alone; `need` pages that must be had here
    before it may start (0 once it has). `tokens` are left to hand out, `depth` is what it holds in
    the end. `freed`: work was struck off since somebody looked; `turn`: place in the order of
    (arrival, id), which breaks ties. `since_s`: since when it has been passed over for want of
    pages; `noted_s`: when to note that again. `keeps`, `promises` and `able` count the rows that
    are kept, promised and ready. All columns are parts of `fields` and
    `flags`, in the order above, which native.py hands on; those are wider than there are rows.
    """

    __slots__ = (
        "_born", "_keys", "_oldest_s", "able", "arrival_s", "depth", "due_s", "fields", "flags",
        "freed", "keeps", "kept", "need", "norm_s", "noted_s", "promised", "promises", "ready",
        "sequences", "since_s", "tokens", "turn", "work_s",
    )  # fmt: skip

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
        self._born: list[tuple[float, str]] = []
        self.sequences: list[Sequence] = []
        self.freed, self.noted_s = False, 0.0
        self.keeps = self.promises = self.able = 0
        self._oldest_s = np.inf  # nobody has been passed over for longer
        self._cut()

    def __len__(self) -> int:
        return len(self.sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        at = bisect.bisect_left(self._keys, sequence.key)
        return at < len(self._keys) and self.sequences[at] is sequence

    def place(self, key: tuple[float, float, str]) -> int:
        """Where a row with that key stands, or would stand."""
        return bisect.bisect_left(self._keys, key)

    def add(self, sequence: Sequence, work_s: float, need: int) -> None:
        at, n = self.place(sequence.key), len(self._keys)
        if n == self.fields.shape[1]:
            self.fields = np.concatenate([self.fields, np.zeros_like(self.fields)], axis=1)
            self.flags = np.concatenate([self.flags, np.zeros_like(self.flags)], axis=1)
        self.fields[:, at + 1 : n + 1] = self.fields[:, at:n]
        self.flags[:, at + 1 : n + 1] = self.flags[:, at:n]
        due_s, arrival_s, id_ = sequence.key
        turn = bisect.bisect_left(self._born, (arrival_s, id_))
        if turn < n:
            turns = self.fields[TURN, : n + 1]
            turns[turns >= turn] += 1.0
        self._born.insert(turn, (arrival_s, id_))
        self.fields[:, at] = (
            due_s, arrival_s, work_s, sequence.norm_s, sequence.remaining_tokens, need, np.inf,
            turn, sequence.goal,
        )  # fmt: skip
        self.flags[:, at] = False
        self._flag(at, sequence.kept, sequence.promised, sequence.ready)
        self._keys.insert(at, sequence.key)
        self.sequences.insert(at, sequence)
        self._cut()

    def remove(self, sequence: Sequence) -> None:
        at, n = self._row(sequence), len(self._keys)
        self.freed = self.freed or bool(self.fields[WORK, at] > 0.0)
        self._flag(at, kept=False, promised=False, ready=False)
        turn = int(self.fields[TURN, at])
        if turn < n - 1:
            turns = self.fields[TURN, :n]
            turns[turns > turn] -= 1.0
        del self._born[turn]
        self.fields[:, at : n - 1] = self.fields[:, at + 1 : n]
        self.flags[:, at : n - 1] = self.flags[:, at + 1 : n]
        del self._keys[at], self.sequences[at]
        self._cut()

    def update(self, sequence: Sequence, work_s: float) -> None:
        """The sequence's cursors moved."""
        fields, at = self.fields, self._row(sequence)
        fields[WORK, at] = work_s
        fields[TOKENS, at] = sequence.goal - sequence.packed
        ready = sequence.left == sequence.packed
        self.able += ready - bool(self.ready[at])
        self.ready[at] = ready

    def begun(self, sequence: Sequence) -> None:
        """The sequence has its pages now."""
        row = self._row(sequence)
        self.fields[NEED, row], self.fields[PASSED, row] = 0.0, np.inf

    def mark(self, sequence: Sequence) -> None:
        """The sequence's rank or readiness changed."""
        self._flag(self._row(sequence), sequence.kept, sequence.promised, sequence.ready)

    def pass_over(self, over: Mask, now: float) -> None:
        """Note that the rows of `over` are passed over, if they were not yet."""
        np.minimum(self.since_s, now, out=self.since_s, where=over)
        self._oldest_s = min(self._oldest_s, now)

    def aged(self, before_s: float) -> Sequence | None:
        """Who has been passed over longest, since before that moment, and has not started."""
        if self._oldest_s >= before_s or not self._keys:
            return None
        oldest = self.since_s.argmin()
        self._oldest_s = float(self.since_s[oldest])
        return self.sequences[oldest] if self._oldest_s < before_s else None

    def work_of(self, sequence: Sequence) -> float:
        return float(self.fields[WORK, self._row(sequence)])

    def _flag(self, at: int, kept: bool, promised: bool, ready: bool) -> None:
        flags = self.flags
        self.keeps += kept - bool(flags[KEPT, at])
        self.promises += promised - bool(flags[PROMISED, at])
        self.able += ready - bool(flags[READY, at])
        flags[KEPT, at], flags[PROMISED, at], flags[READY, at] = kept, promised, ready

    def _cut(self) -> None:
        """Slice the rows anew, as their number changed: whoever reads them does it more often."""
        n = len(self._keys)
        (
            self.due_s, self.arrival_s, self.work_s, self.norm_s, self.tokens, self.need,
            self.since_s, self.turn, self.depth,
        ) = self.fields[:, :n]  # fmt: skip
        self.kept, self.promised, self.ready = self.flags[:, :n]

    def _row(self, sequence: Sequence) -> int:
        at = sequence.row
        if at < len(self.sequences) and self.sequences[at] is sequence:
            return at
        at = sequence.row = bisect.bisect_left(self._keys, sequence.key)
        if at == len(self._keys) or self.sequences[at] is not sequence:
            raise KeyError(sequence.id)
        return at
