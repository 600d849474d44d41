"""`medha decisions`: a log is run again, and the first difference is an error."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from medha.scheduling.decision_log import RecordingScheduler
from medha.testing import Driven, request, scheduler


def run(path: pathlib.Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "medha", "decisions", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def log(tmp_path: pathlib.Path) -> pathlib.Path:
    """Decision log of a replica that ran three prompts."""
    path = tmp_path / "decisions.jsonl"
    with path.open("wb") as file:
        plan = RecordingScheduler(scheduler(join=False), file.write)
        plan.group_joined(0, 1, 0.0)
        driver = Driven(plan)
        driver.submit([request(f"r{n}", 300 * n + 1, n / 10.0, output_tokens=3) for n in range(3)])
        driver.run()
    return path


def test_a_log_that_replays_identically_prints_its_number_of_decisions(log: pathlib.Path) -> None:
    done = run(log)
    assert done.returncode == 0, done.stderr
    count = len(log.read_bytes().splitlines()) - 1
    assert done.stdout.strip() == f"{count} decisions come out the same" and count > 10


def test_a_log_that_was_tampered_with_is_detected(log: pathlib.Path) -> None:
    rows = log.read_bytes().splitlines(keepends=True)
    place = next(n for n, row in enumerate(rows) if b'"next_batch"' in row and b"301" in row)
    rows[place] = rows[place].replace(b"301", b"300")
    log.write_bytes(b"".join(rows))
    done = run(log)
    assert done.returncode == 1 and f"line {place + 1} " in done.stderr


def test_a_missing_log_is_one_line_and_exit_status_two(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path / "none.jsonl")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "none.jsonl" in done.stderr


def test_another_file_is_one_line_and_exit_status_two() -> None:
    done = run(pathlib.Path(__file__))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "LOG is line 1: must be the heading of a decision log" in done.stderr
