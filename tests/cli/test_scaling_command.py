"""`medha scaling`: looks are decided again, and the first difference is an error."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import msgspec
import pytest

from medha.fleet.autoscaling import (
    Journal,
    Policy,
    ScalingMemory,
    ScalingRecord,
    ScalingSignals,
    decide,
)


def run(path: pathlib.Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "medha.cli", "scaling", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def page(tmp_path: pathlib.Path) -> pathlib.Path:
    """A minute of refusals."""
    policy = Policy(least=1, most=4, target_slack=0.2, down_after_s=60.0)
    memory, journal = ScalingMemory(), Journal()
    for at_s in range(0, 60, 5):
        signals = ScalingSignals(
            at_s=at_s, current=1, ready=1, offered=0.9, slack_p10=-1.0, arrived=9
        )
        decision, memory = decide(policy, memory, signals)
        look = ScalingRecord(policy=policy, signals=signals, decision=decision)
        journal = journal.noted(look, 10)
    path = tmp_path / "scaling.json"
    path.write_bytes(msgspec.json.encode({"team/llama": journal}))
    return path


def test_looks_that_come_out_the_same_are_counted_and_each_change_is_shown(
    page: pathlib.Path,
) -> None:
    done = run(page)
    assert done.returncode == 0, done.stderr
    assert "team/llama: 10 looks come out the same" in done.stdout
    assert "from 1 to 2 replicas (LittleSlack)" in done.stdout


def test_a_record_that_was_tampered_with_is_detected(page: pathlib.Path) -> None:
    page.write_bytes(page.read_bytes().replace(b'"slack_p10":-1.0', b'"slack_p10":2.0'))
    done = run(page)
    assert done.returncode == 1 and "(Enough) were decided, now 1 (Enough)" in done.stderr


def test_another_kind_of_file_is_one_line_and_exit_status_two(tmp_path: pathlib.Path) -> None:
    assert run(tmp_path / "none.json").returncode == 2
    other = tmp_path / "other.json"
    other.write_text("[]")
    done = run(other)
    assert done.returncode == 2 and "must be what GET /scaling answers" in done.stderr
