"""Child process: killed with this process, in a process group of its own.

The kernel kills a child when this process dies. The child leads its own process group: Ctrl-C in
the terminal reaches only this process, and the child's own children end with it. Start and reap
children on the main thread: the kernel binds them to the thread that forks.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

PARENT_DEATH_SIGNAL = pathlib.Path(__file__).with_name("parent_death_signal.py")
LAST_LINES = 20
LINE_BYTES = 8192

OnLine = Callable[[str, str], None]


def killed_with_parent(*command: str) -> list[str]:
    """Wrap a command so that the kernel kills it when this process dies.

    Start the command on the main thread, or wait for it on the thread that starts it.
    """
    return [sys.executable, "-I", "-S", str(PARENT_DEATH_SIGNAL), str(os.getpid()), *command]


class LogLine(msgspec.Struct, frozen=True):
    """Fields of a JSON log line that are shown to a person."""

    level: str = "info"
    message: str = ""
    error: Any = ""


def read_line(line: str) -> LogLine:
    """Decode a line of output; a line that is not JSON becomes the message."""
    try:
        return msgspec.json.decode(line.encode(), type=LogLine)
    except (msgspec.MsgspecError, ValueError):
        return LogLine(message=line)


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Command line of a process; `env` is added to the environment of this process.

    `standby`: the same program, which prepares itself, writes a byte to its standard input (a
    socket), and waits for a line there; empty if there is none. `waits`: this is that program.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = {}
    standby: tuple[str, ...] = ()
    waits: bool = False

    def waiting(self) -> Launch:
        """Return the launch of the program that waits until it is released."""
        return msgspec.structs.replace(self, argv=self.standby, waits=True)


class ChildProcess:
    """A running program. A thread calls `lines(name, line)` for each line of its output.

    Without `lines` its output goes where the output of this process goes.
    """

    def __init__(self, launch: Launch, lines: OnLine | None = None) -> None:
        self.name = launch.name
        self._status: int | None = None
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._prepared = False
        self._entry: socket.socket | None = None
        entry: socket.socket | None = None
        if launch.waits:
            self._entry, entry = socket.socketpair()
            self._entry.setblocking(False)
        self._process = subprocess.Popen(
            killed_with_parent(*launch.argv),
            env={**os.environ, **launch.env},
            stdin=subprocess.DEVNULL if entry is None else entry.fileno(),
            stdout=subprocess.PIPE if lines else None,
            stderr=subprocess.STDOUT if lines else None,
            process_group=0,
        )
        if entry is not None:
            entry.close()
        self._reader: threading.Thread | None = None
        if lines is not None:
            self._reader = threading.Thread(
                target=self._read, args=(lines,), name=f"output of {launch.name}", daemon=True
            )
            self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_messages(self) -> tuple[str, ...]:
        """Messages of the last lines of output that this process reads."""
        return tuple(read_line(line).message for line in self._last)

    @property
    def prepared(self) -> bool:
        """The program is prepared and waits."""
        if self._entry is not None and not self._prepared:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                self._prepared = bool(self._entry.recv(1))
        return self._prepared

    def release(self) -> None:
        """Start the work of a program that waits; without effect if it has ended."""
        if self._entry is not None:
            with contextlib.suppress(BrokenPipeError), self._entry:
                self._entry.sendall(b"\n")
            self._entry = None

    def poll(self) -> int | None:
        """Exit status (negative: the signal), or None while the process runs.

        Reaps the process and kills the rest of its group.
        """
        if self._status is None and self._exited():
            self._signal(signal.SIGKILL)  # processes that the child left behind
            self._status = self._process.wait()
            if self._entry is not None:
                self._entry.close()
                self._entry = None
            if self._reader is not None:
                self._reader.join(timeout=1.0)
        return self._status

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the whole process group."""
        if self._status is None:
            self._signal(signal.SIGKILL)

    def _exited(self) -> bool:
        """Exited but not reaped: the PID and the group are still reserved."""
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
