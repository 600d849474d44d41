"""What `make demo-cluster` reads from a decision log: how evenly a growing prompt ran."""

from __future__ import annotations

import pytest
from examples.pauses import pace

from medha.batch import Batch, BatchResult, Chunk
from medha.scheduling.decisions import line


def log_of(times: list[float], tokens: int = 100) -> list[bytes]:
    """One prompt, a batch of so many tokens ending at each of the times, and another one beside."""
    lines = [b"{}\n", line("next_batch", (0.0, (0,)), None)]
    for number, now in enumerate(times, start=1):
        start = tokens * (number - 1)
        chunks = (
            Chunk(3, 9, 1, (0,), 0, decode=True),
            Chunk(7, start, tokens, (0,), 0),
        )
        lines.append(line("next_batch", (now, (0,)), Batch(number, 1, chunks)))
        lines.append(line("complete", (number, BatchResult(), now), ()))
    return lines


def test_gaps_are_told_apart_by_how_far_the_prompt_was() -> None:
    found = pace(log_of([0.0, 0.1, 0.25, 0.35, 0.85, 0.95]), tokens=350)
    assert found is not None and not found.even
    assert (found.before_p99_s, found.longest_s) == pytest.approx((0.15, 0.5))
    steady = pace(log_of([0.0, 0.1, 0.2, 0.3, 0.45]), tokens=350)
    assert steady is not None and steady.even


def test_a_log_without_a_prompt_that_far_tells_nothing() -> None:
    assert pace(log_of([0.0, 0.1]), tokens=350) is None
    assert pace([b"{}\n"], tokens=1) is None


def test_only_batches_that_were_decided_count() -> None:
    log = log_of([0.0, 0.1, 0.2, 0.3, 0.4])
    log.append(line("complete", (99, BatchResult(), 5.0), ()))
    found = pace(log, tokens=250)
    assert found is not None and found.longest_s == pytest.approx(0.1)
