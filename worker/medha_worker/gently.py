"""Start a rank without slowing those that serve: python -m medha_worker.gently <a rank's arguments>

Importing torch takes seconds of a core. Where a KVP group joins a machine whose cores are all at
work (the CPU backend), that time is taken from running batches and breaks their predictions. So the
import runs on a thread of low priority, and the rank then runs at its normal one: on Linux priority
belongs to the thread, and a process cannot raise its own again without privileges.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading

RANK = "medha_worker.rank"
PRIORITY = 3


def import_gently(module: str) -> None:
    """Import `module` on a thread of low priority; what the import raises is raised here."""
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
    import_gently(RANK)
    from medha_worker.rank import main as run

    run()


if __name__ == "__main__":
    main()
