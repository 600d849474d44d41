"""One started program: bound to our life, in a session of its own, its output read line by line.

A child is killed by the kernel when this process dies. It leads its own process group, so a key
pressed in the terminal reaches only us, and whatever it started ends with it. Children are started
and reaped on the main thread (the kernel binds them to the thread that forks).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

BOUND = pathlib.Path(__file__).with_name("bound.py")
LAST_LINES = 20
LINE_BYTES = 8192

OnLine = Callable[[str, str], None]


def bound(*command: str) -> list[str]:
    """The same command, killed by the kernel when this process dies. Start it on the main thread,
    or wait for it on the thread that starts it."""
    return [sys.executable, "-I", "-S", str(BOUND), str(os.getpid()), *command]


class LogLine(msgspec.Struct, frozen=True):
    """The fields of a process's JSON log line that a person reads."""

    level: str = "info"
    message: str = ""
    error: Any = ""


def read_line(line: str) -> LogLine:
    """A line of output as what it says; what is no JSON says itself."""
    try:
        return msgspec.json.decode(line.encode(), type=LogLine)
    except (msgspec.MsgspecError, ValueError):
        return LogLine(message=line)


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What to start: `env` is added to our own environment."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = {}


class Child:
    """A running program; `lines(name, line)` is called on a thread for each line of its output."""

    def __init__(self, launch: Launch, lines: OnLine) -> None:
        self.name = launch.name
        self._status: int | None = None
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._process = subprocess.Popen(
            bound(*launch.argv),
            env={**os.environ, **launch.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self._reader = threading.Thread(
            target=self._read, args=(lines,), name=f"output of {launch.name}", daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_words(self) -> tuple[str, ...]:
        """What its last lines of output said."""
        return tuple(read_line(line).message for line in self._last)

    def poll(self) -> int | None:
        """The exit status (negative: the signal), or None while it runs; reaps it, and its kin."""
        if self._status is None and self._exited():
            self._signal(signal.SIGKILL)  # what it started and left behind
            self._status = self._process.wait()
            self._reader.join(timeout=1.0)
        return self._status

    def terminate(self) -> None:
        """Ask it to end."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it and everything it started, at once."""
        if self._status is None:
            self._signal(signal.SIGKILL)

    def _exited(self) -> bool:
        """Over, but not yet reaped: its number and its group's still belong to it."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, flags) is not None

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _read(self, lines: OnLine) -> None:
        output = self._process.stdout
        assert output is not None
        with output:
            while line := output.readline(LINE_BYTES):
                text = line.decode(errors="replace").rstrip()
                if text:
                    self._last.append(text)
                    lines(self.name, text)
