"""How evenly a prompt was prefilled, read from a controller's decision log."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec

from medha.batch import Batch
from medha.scheduling.decisions import Line


def gaps(log: Iterable[bytes]) -> list[float]:
    """Seconds between the ends of successive batches of the newest prompt, ascending; the log's
    first line is its heading."""
    batches: dict[int, Batch] = {}
    ends: dict[int, list[float]] = {}
    for row in itertools.islice(log, 1, None):
        line = msgspec.json.decode(row, type=Line)
        if line.call == "next_batch":
            batch = msgspec.json.decode(line.outcome, type=Batch | None)
            if batch is not None:
                batches[batch.number] = batch
        elif line.call == "complete":
            number, _, now = msgspec.json.decode(line.args, type=tuple[int, msgspec.Raw, float])
            for chunk in batches.pop(number).chunks if number in batches else ():
                if not chunk.decode:
                    ends.setdefault(chunk.seq, []).append(now)
    newest = ends[max(ends)] if ends else []
    return sorted(now - before for before, now in itertools.pairwise(newest))
