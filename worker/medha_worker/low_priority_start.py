"""Start a rank without slowing the ranks that serve.

    python -m medha_worker.low_priority_start <arguments of a rank>

Importing torch takes seconds of a core. If a KVP group joins a machine whose cores are all busy
(the CPU backend), that time delays running batches beyond their predictions. So the import runs on
a low-priority thread and the rank then runs at normal priority. On Linux priority belongs to a
thread, and a process cannot raise its own again without privileges.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading

RANK = "medha_worker.rank"
PRIORITY = 3


def import_at_low_priority(module: str) -> None:
    """Import `module` on a low-priority thread; re-raise here any exception of the import."""
    failures: list[BaseException] = []

    def work() -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PRIORITY)
        try:
            importlib.import_module(module)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="import")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def main() -> None:
    import_at_low_priority(RANK)
    from medha_worker.rank import main as run

    run()


if __name__ == "__main__":
    main()
