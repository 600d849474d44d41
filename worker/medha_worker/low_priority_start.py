"""Start a rank without slowing the ranks that serve, and without waiting for storage meanwhile.

    python -m medha_worker.low_priority_start [--standby] <arguments of a rank>

Importing torch takes seconds of a core. If a KVP group joins a machine whose cores are all busy
(the CPU backend), that time delays running batches beyond their predictions. So the import runs on
a low-priority thread and the rank then runs at normal priority. On Linux priority belongs to a
thread, and a process cannot raise its own again without privileges. The weights are read ahead at
the same time.

A standby imports too, reports so by a byte on its standard input, which is a socket, and waits for
a line there: the rank starts at once when the one that runs has failed. At the end of its input the
standby ends.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import sys
import threading
from collections.abc import Sequence

from medha.config import WorkerConfig, read
from medha.errors import UserError
from medha.topology import Coordinate
from medha_worker.read_ahead import read_ahead

RANK = "medha_worker.rank"
PRIORITY, STANDBY_PRIORITY = 3, 10
STANDBY = "medha-standby"
"""Name of a standby's process, for ps and top."""
_NAME = pathlib.Path("/proc/self/comm")


def import_at_low_priority(module: str, priority: int = PRIORITY) -> None:
    """Import `module` on a low-priority thread; re-raise here any exception of the import."""
    failures: list[BaseException] = []

    def work() -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), priority)
        try:
            importlib.import_module(module)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="import")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def read_weights_ahead(arguments: Sequence[str]) -> None:
    """Start to read the weights of the rank with these arguments; faults are left to the rank."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config", type=pathlib.Path)
    for name in ("group", "stage", "shard"):
        parser.add_argument(f"--{name}", type=int, default=0)
    try:
        given, _ = parser.parse_known_args(arguments)
        if given.config is not None:
            at = Coordinate(given.group, given.stage, given.shard)
            read_ahead(read(WorkerConfig, given.config), at)
    except (UserError, OSError, argparse.ArgumentError):
        return


def wait_in_standby() -> bool:
    """Import at low priority, report that, and wait for a line of input; False at its end."""
    named = _NAME.exists()
    before = _NAME.read_text() if named else ""
    if named:
        _NAME.write_text(STANDBY)
    import_at_low_priority(RANK, STANDBY_PRIORITY)
    os.write(sys.stdin.fileno(), b"\n")
    released = bool(sys.stdin.readline())
    if named:
        _NAME.write_text(before.strip())
    return released


def main() -> None:
    if "--standby" in sys.argv:
        sys.argv.remove("--standby")
        if not wait_in_standby():
            return
    read_weights_ahead(sys.argv[1:])
    import_at_low_priority(RANK)
    from medha_worker.rank import main as run

    run()


if __name__ == "__main__":
    main()
