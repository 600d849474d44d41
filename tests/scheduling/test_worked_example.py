"""The paper's worked example (section 4.1), and what each policy makes of it.

r_L: 10 s of work, due at 16. r_S1, r_S2: 0.5 s of work each, arriving at 5, due at 6. Time goes in
slices of 50 ms; the short ones arrive ten microseconds early, so that the slice at 5 knows of them.
"""

from __future__ import annotations

import pytest

from medha.config import Scheduling
from medha.testing import TOKEN_S, Driven, request, scheduler

LONG = request("L", int(10.0 / TOKEN_S), 0.0, within_s=16.0)
EARLY_S = 1e-5
SHORT = [
    request(name, int(0.5 / TOKEN_S), 5.0 - EARLY_S, within_s=1.0 + 2 * EARLY_S)
    for name in ("S1", "S2")
]


def first_tokens(policy: str, relegated_share: float = 0.1) -> tuple[Driven, dict[str, float]]:
    """Run the example; return the time of each first token."""
    settings = Scheduling(
        policy=policy,
        budget="fixed",
        fixed_s=0.0501,
        chunk_step_tokens=500,
        relegated_share=relegated_share,
    )
    driven = Driven(scheduler(settings=settings))
    driven.submit([LONG, *SHORT])
    driven.run()
    return driven, driven.first_s


def test_fcfs_lets_the_short_ones_wait_for_the_long_one() -> None:
    _, first = first_tokens("fcfs")
    assert first["L"] == pytest.approx(10.0, abs=0.1)
    assert first["S1"] == pytest.approx(10.5, abs=0.1)
    assert first["S2"] == pytest.approx(11.0, abs=0.1)


def test_edf_meets_all_three_deadlines_of_the_example() -> None:
    driven, first = first_tokens("edf")
    assert [name for name in ("L", "S1", "S2") if not driven.in_time(name)] == []
    assert first["L"] == pytest.approx(11.0, abs=0.01)


def test_least_slack_first_meets_the_example_too_but_in_turns() -> None:
    driven, first = first_tokens("lrs")
    # Slack of the long one is 6 s, of the short ones 0.5 s: they go first, taking turns, so that
    # both end in their last slices.
    assert driven.in_time("L") and driven.in_time("S2")
    assert min(first["S1"], first["S2"]) > 5.85


@pytest.mark.parametrize("policy", ["lars-paper", "lars-paper-no-sharing"])
def test_relative_slack_as_written_misses_a_short_one(policy: str) -> None:
    driven, first = first_tokens(policy)
    # ρ_L is 0.6 while it runs; ρ_S falls from 1.0 and reaches 0.6 when 0.8 s are left for the 1.0 s
    # of work that both short ones need.
    assert driven.in_time("L")
    assert not (driven.in_time("S1") and driven.in_time("S2"))
    assert max(first["S1"], first["S2"]) > 6.1


@pytest.mark.parametrize("relegated_share", [0.0, 0.1])
def test_the_default_meets_all_three_deadlines(relegated_share: float) -> None:
    driven, first = first_tokens("lars", relegated_share)
    assert [name for name in ("L", "S1", "S2") if not driven.in_time(name)] == []
    assert driven.admitted["L"].promised and driven.admitted["S1"].promised
    assert first["L"] == pytest.approx(11.0, abs=0.01)
