"""Gaps between the batches of a prompt, which `make demo-cluster` reads from a decision log."""

from __future__ import annotations

import pytest
from demos.batch_gaps import gaps

from medha.batch import Batch, BatchResult, Chunk
from medha.scheduling.decision_log import line

DECODE = Chunk(3, 9, 1, (0,), 0, decode=True)


def log_of(times: list[float], seq: int) -> list[bytes]:
    """Log of a prompt with one batch per end time, each with the decode of another sequence."""
    lines = [b"{}\n", line("next_batch", (0.0, (0,)), None)]
    for number, now in enumerate(times, start=100 * seq):
        batch = Batch(number, 1, (DECODE, Chunk(seq, 64 * number, 64, (0,), 0)))
        lines.append(line("next_batch", (now, (0,)), batch))
        lines.append(line("complete", (number, BatchResult(), now), ()))
    return lines


def test_gaps_are_those_of_the_newest_prompt() -> None:
    log = [b"{}\n", line("group_joined", (0, 1, -9.0), ()), *log_of([0.0, 5.0], seq=7)[1:]]
    log += log_of([7.0, 7.1, 7.6, 7.8], seq=8)[1:]
    until, after = gaps(log)
    assert until == pytest.approx([0.1, 0.2, 0.5]) and after == []


def test_gaps_before_and_after_a_group_joined_are_separate() -> None:
    log = log_of([0.0, 0.3, 0.4, 0.6], seq=7)
    log.append(line("group_joined", (1, 2, 0.35), ()))
    until, after = gaps(log)
    assert until == pytest.approx([0.3]) and after == pytest.approx([0.1, 0.2])


def test_the_end_of_an_unknown_batch_is_no_gap() -> None:
    log = [*log_of([0.0, 0.1], seq=7), line("complete", (9, BatchResult(), 5.0), ())]
    assert gaps(log)[0] == pytest.approx([0.1])


def test_a_log_without_a_prompt_has_none() -> None:
    assert gaps([b"{}\n"]) == ([], [])
