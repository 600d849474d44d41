"""`python -m tests.api.operator_forks`: starts operators fast, by forks after all imports.

A line of JSON on standard input, `{"environment": {...}, "log": path}`, starts a process that does
what `python -m medha_operator` does in that environment; the answer is its id. Of what an operator
computes in a test, imports would be a third.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import kopf

from medha.cli.local_fleet.child_process import killed_with_parent
from medha.cli.local_fleet.parent_death_signal import PR_SET_PDEATHSIG
from medha_operator.__main__ import main

LOADED = kopf.__name__
"""Every operator needs kopf, so it is imported before the first fork."""


class ForkedOperator:
    """A forked operator, with the part of subprocess.Popen that tests use."""

    def __init__(self, pid: int, code: Path) -> None:
        self.pid, self._code = pid, code

    def poll(self) -> int | None:
        """Return None while it runs, then its exit code, which it leaves in a file."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return int(self._code.read_text()) if self._code.exists() else -signal.SIGKILL
        return None

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("an operator", timeout)
            time.sleep(0.005)
        return code


class ForkServer:
    """The process that forks, for any number of threads; it ends when its standard input closes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            killed_with_parent(sys.executable, "-m", "tests.api.operator_forks"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def start(self, environment: dict[str, str], log: Path) -> ForkedOperator:
        assert self._process.stdin is not None and self._process.stdout is not None
        line = json.dumps({"environment": environment, "log": str(log)})
        with self._lock:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            return ForkedOperator(int(self._process.stdout.readline()), code_of(log))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(20)


def code_of(log: str | Path) -> Path:
    """File in which the operator with this log leaves its exit code."""
    return Path(log).with_suffix(".code")


def serve() -> None:
    """Fork for every line; the kernel reaps the children."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while line := sys.stdin.readline():
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _live(order["environment"], order["log"])
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def _live(environment: dict[str, str], log: str) -> None:
    """Run an operator in the forked child; never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    code = 1
    try:
        code = main()
    finally:
        code_of(log).write_text(str(code))
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
