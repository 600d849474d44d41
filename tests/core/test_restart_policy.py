"""Budget, window and back-off of restarts."""

from __future__ import annotations

import pytest

from medha.restart_policy import RestartPolicy

POLICY = RestartPolicy(first_backoff_s=1.0, longest_backoff_s=60.0)


def test_the_delay_doubles_with_each_failure_up_to_the_longest() -> None:
    delays = [POLICY.backoff_s(failures) for failures in range(1, 9)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_failures_that_left_the_window_no_longer_count() -> None:
    assert POLICY.recent([0.0, 0.1, 500.0], now_s=600.0) == [0.1, 500.0]
    assert POLICY.next_start_s([0.0], now_s=600.0) == 0.0


def test_the_budget_is_exhausted_by_one_failure_more_than_it_holds() -> None:
    assert not POLICY.exhausted([10.0] * 5, now_s=20.0)
    assert POLICY.exhausted([10.0] * 6, now_s=20.0)


@pytest.mark.parametrize(
    "failed_s, start_s",
    [
        ([], 0.0),
        ([100.0], 101.0),
        ([100.0, 110.0, 120.0], 124.0),
        ([0.0, 10.0, 20.0, 30.0, 40.0, 50.0], 600.0),
        ([0.0, 100.0, 200.0, 300.0, 400.0, 590.0], 622.0),
    ],
)
def test_the_next_start_waits_for_back_off_and_budget(
    failed_s: list[float], start_s: float
) -> None:
    assert POLICY.next_start_s(failed_s, now_s=595.0 if failed_s else 0.0) == start_s
