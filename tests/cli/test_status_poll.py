"""A process hangs once its polls had no answer for long, however each of them fails."""

from __future__ import annotations

import pytest

from medha.cli.local_fleet.status_poll import HUNG_S, POLL_INTERVAL_S, TIMEOUT_S, Answers


@pytest.mark.parametrize("poll_s", [0.0, TIMEOUT_S])
def test_a_process_hangs_after_ten_seconds_however_its_polls_fail(poll_s: float) -> None:
    answers, now = Answers(), 100.0
    answers.note(True, now, now)
    for _ in range(round(HUNG_S / (poll_s + POLL_INTERVAL_S))):
        assert answers.hangs_since_s is None
        answers.note(False, now, now + poll_s)
        now += poll_s + POLL_INTERVAL_S
    assert now == 100.0 + HUNG_S and answers.hangs_since_s == 100.0
    answers.note(True, now, now)
    assert answers.hangs_since_s is None


def test_a_process_that_never_answered_is_silent_from_the_beginning_of_time() -> None:
    answers = Answers()
    for poll in range(100):
        answers.note(False, float(poll), poll + 0.5)
    assert answers.hangs_since_s == float("-inf")


def test_a_pause_of_the_poll_is_no_silence_of_the_process() -> None:
    answers = Answers()
    answers.note(True, 1.0, 1.0)
    answers.note(False, 2.0, 2.0 + 3600.0)
    assert answers.hangs_since_s is None
