"""Gaps between the batches of a prompt, from a controller's decision log."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec

from medha.batch import Batch
from medha.scheduling.decision_log import LogEntry


def gaps(log: Iterable[bytes]) -> tuple[list[float], list[float]]:
    """Seconds between the ends of successive batches of the newest prompt, ascending.

    Returns those until a group joined and those after it; without a join the second list is empty.
    """
    batches: dict[int, Batch] = {}
    ends: dict[int, list[float]] = {}
    joined_s = float("inf")
    for row in itertools.islice(log, 1, None):
        line = msgspec.json.decode(row, type=LogEntry)
        if line.call == "next_batch":
            batch = msgspec.json.decode(line.outcome, type=Batch | None)
            if batch is not None:
                batches[batch.number] = batch
        elif line.call == "group_joined":
            _, _, joined_s = msgspec.json.decode(line.args, type=tuple[int, int, float])
        elif line.call == "complete":
            number, _, now = msgspec.json.decode(line.args, type=tuple[int, msgspec.Raw, float])
            for chunk in batches.pop(number).chunks if number in batches else ():
                if not chunk.decode:
                    ends.setdefault(chunk.seq, []).append(now)
    pairs = list(itertools.pairwise(ends[max(ends)])) if ends else []
    meanwhile = any(joined_s > before for before, _ in pairs)
    return (
        sorted(now - before for before, now in pairs if now <= joined_s or not meanwhile),
        sorted(now - before for before, now in pairs if now > joined_s and meanwhile),
    )
