"""`python -m tests.api.nursery`: operators born quickly, forked from a process that imported all.

A line of JSON on standard input, `{"environment": {...}, "log": path}`, brings a process with that
environment which does what `python -m medha_operator` does; its id is answered. Where an operator
is started hundreds of times, most of the time would go into imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import kopf

from medha.cli.bound import PR_SET_PDEATHSIG
from medha.cli.children import bound
from medha_operator.__main__ import main

LOADED = kopf.__name__
"""kopf is needed by every life; it is loaded before the first."""


class Born:
    """One of them, as far as tests treat it like a subprocess."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """None while it runs. How it ended only its parent knows."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return -1
        return None

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("an operator", timeout)
            time.sleep(0.005)
        return -1


class Nursery:
    """The process that forks; it ends with its standard input."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            bound(sys.executable, "-m", "tests.api.nursery"), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def bear(self, environment: dict[str, str], log: Path) -> Born:
        assert self._process.stdin is not None and self._process.stdout is not None
        line = json.dumps({"environment": environment, "log": str(log)})
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return Born(int(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(20)


def serve() -> None:
    """Fork for every line; children are nobody's to wait for."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while line := sys.stdin.readline():
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _live(asked["environment"], asked["log"])
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def _live(environment: dict[str, str], log: str) -> None:
    """Be an operator, and never come back."""
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
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
