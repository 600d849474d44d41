"""What must happen when a process is over, however it ends: by itself, by Ctrl-C or by SIGKILL.

    with afterwards("cluster", "down"):
        ...

A process of its own, which no key and no polite signal ends, waits until the block is left or its
starter is gone (either closes the pipe that it reads), and then runs the command.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

PATIENCE_S = 180.0


class NotDone(Exception):
    """The command ended with an error; what it said stands on stderr."""


@contextlib.contextmanager
def afterwards(*command: str) -> Iterator[None]:
    """Runs the command when the block is left, or this process with it."""
    waiting = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *command], stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert waiting.stdin is not None
    try:
        yield
    finally:
        waiting.stdin.close()
        status = waiting.wait(PATIENCE_S)
    if status:
        raise NotDone(f"{' '.join(command)}: ended with {status}")


def main() -> int:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, lambda *_: None)  # unlike SIG_IGN, not handed on to the command
    sys.stdin.read()
    return subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main())
