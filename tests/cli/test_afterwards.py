"""A command that must run when a process is over runs, however the process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from examples.afterwards import NotDone, afterwards

HOUSE = Path(__file__).resolve().parents[2]
WAITS = """
import signal, sys, time
from examples.afterwards import afterwards
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell works by itself
with afterwards("touch", sys.argv[1]):
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
        [sys.executable, "-c", WAITS, str(left)], cwd=HOUSE, stdout=subprocess.PIPE, text=True,
        process_group=0, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HOUSE), *sys.path])},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "entered\n"
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_runs_when_the_whole_group_is_killed(
    entered: subprocess.Popen[str], left: Path, number: signal.Signals
) -> None:
    assert not left.exists()
    os.killpg(entered.pid, number)
    entered.wait(20)
    end = time.monotonic() + 20
    while not left.exists():
        assert time.monotonic() < end, "the command has not run"
        time.sleep(0.01)


def test_it_has_run_when_the_block_is_left(left: Path) -> None:
    with afterwards("touch", str(left)):
        assert not left.exists()
    assert left.exists()


def test_it_runs_after_an_error_which_goes_on(left: Path) -> None:
    with pytest.raises(ZeroDivisionError), afterwards("touch", str(left)):
        raise ZeroDivisionError
    assert left.exists()


def test_a_command_that_fails_is_told() -> None:
    with pytest.raises(NotDone, match="false: ended with 1"), afterwards("false"):
        pass
