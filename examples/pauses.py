"""How evenly one request was served, read from a controller's decision log."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec

from medha.batch import Batch
from medha.scheduling.decisions import Line


class Pace(msgspec.Struct, frozen=True):
    """Seconds between ends of successive batches of a request's prefill: the 99th percentile
    while fewer than some tokens were done, and the longest from then on."""

    before_p99_s: float
    longest_s: float

    @property
    def even(self) -> bool:
        """It never paused: no gap is more than twice what was usual before."""
        return self.longest_s <= 2 * self.before_p99_s


def pace(log: Iterable[bytes], tokens: float) -> Pace | None:
    """Of the newest prompt that grew beyond `tokens`; None where the log has no such prompt, or
    fewer than two of its batches on either side. The log's first line is its heading."""
    batches: dict[int, Batch] = {}
    ends: dict[int, list[tuple[float, int]]] = {}  # per sequence: when, and how far it was then
    for row in list(log)[1:]:
        line = msgspec.json.decode(row, type=Line)
        if line.call == "next_batch":
            batch = msgspec.json.decode(line.outcome, type=Batch | None)
            if batch is not None:
                batches[batch.number] = batch
        elif line.call == "complete":
            number, _, now = msgspec.json.decode(line.args, type=tuple[int, msgspec.Raw, float])
            for chunk in batches.pop(number).chunks if number in batches else ():
                if not chunk.decode:
                    ends.setdefault(chunk.seq, []).append((now, chunk.end))
    of = max((seq for seq, done in ends.items() if done[-1][1] > tokens), default=None)
    if of is None:
        return None
    steps = [(then, end, now) for (then, end), (now, _) in itertools.pairwise(ends[of])]
    before = sorted(now - then for then, end, now in steps if end < tokens)
    after = [now - then for then, end, now in steps if end >= tokens]
    if not before or not after:
        return None
    return Pace(before[int(0.99 * (len(before) - 1) + 0.5)], max(after))
