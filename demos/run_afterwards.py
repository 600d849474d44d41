"""Run a clean-up command once a block or this process ends: normally, by Ctrl-C or by SIGKILL.

    with run_afterwards("cluster", "down"):
        ...

A helper process, which ignores SIGINT, SIGTERM and SIGHUP, reads a pipe. The pipe closes when the
block is left or this process dies; then the helper runs the command.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

PATIENCE_S = 180.0


class NotDone(Exception):
    """The command exited with an error; its output is on stderr."""


@contextlib.contextmanager
def run_afterwards(*command: str) -> Iterator[None]:
    """Run the command when the block is left or this process dies."""
    helper = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert helper.stdin is not None
    try:
        yield
    finally:
        helper.stdin.close()
        status = helper.wait(PATIENCE_S)
    if status:
        raise NotDone(f"{' '.join(command)}: exited with {status}")


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, the command does not inherit it
    sys.stdin.read()
    return subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main())
