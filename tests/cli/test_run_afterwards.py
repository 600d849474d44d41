"""A command set to run after a process runs however the process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from demos.run_afterwards import NotDone, run_afterwards

HOUSE = Path(__file__).resolve().parents[2]
WAITS = """
import signal, sys, time
from demos.run_afterwards import run_afterwards
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell works by itself
with run_afterwards("touch", sys.argv[1]):
    print("entered", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def left(tmp_path: Path) -> Path:
    return tmp_path / "left"


@pytest.fixture
def entered(left: Path) -> Iterator[subprocess.Popen[str]]:
    """A process inside of `afterwards`, which leads a process group of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", WAITS, str(left)],
        cwd=HOUSE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HOUSE), *sys.path])},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "entered\n"
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_command_runs_when_the_whole_group_is_killed(
    entered: subprocess.Popen[str], left: Path, number: signal.Signals
) -> None:
    assert not left.exists()
    os.killpg(entered.pid, number)
    entered.wait(20)
    end = time.monotonic() + 20
    while not left.exists():
        assert time.monotonic() < end, "the command has not run"
        time.sleep(0.01)


def test_the_command_has_run_when_the_block_is_left(left: Path) -> None:
    with run_afterwards("touch", str(left)):
        assert not left.exists()
    assert left.exists()


def test_the_command_runs_after_an_error_which_propagates(left: Path) -> None:
    with pytest.raises(ZeroDivisionError), run_afterwards("touch", str(left)):
        raise ZeroDivisionError
    assert left.exists()


def test_a_command_that_fails_is_reported() -> None:
    with pytest.raises(NotDone, match="false: exited with 1"), run_afterwards("false"):
        pass
