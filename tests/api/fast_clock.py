"""`python -m tests.api.fast_clock 10`: the operator with clocks that run ten times as fast.

Waits in an event loop end as much sooner, so that minutes are tested in seconds; all else is
unchanged. The time by which the machine wakes the event loop too late is left out, since the
factor would multiply it. SIGUSR1 logs `MOMENT`, stamped with the operator's own time.
"""

from __future__ import annotations

import logging
import selectors
import signal
import sys
import threading
import time
from typing import Any

MOMENT = "this is the moment"


class FastClock:
    """Speeds up the whole process; construct it before anything reads a clock."""

    def __init__(self, times: float) -> None:
        self._times, self._real = times, time.monotonic
        self._late_s = 0.0
        for name in ("monotonic", "time"):
            setattr(time, name, self._faster(getattr(time, name)))
        fast_clock = self

        class ShortWaits(selectors.DefaultSelector):
            """The selector of every new event loop."""

            def select(self, timeout: float | None = None) -> Any:
                return fast_clock.wait(super().select, timeout)

        setattr(selectors, "DefaultSelector", ShortWaits)  # noqa: B010

    def wait(self, select: Any, timeout: float | None) -> Any:
        """Wait as `select` does, but shorter. Only the main thread's loop counts delays, as those
        of others have the same cause."""
        if not timeout or timeout < 0:
            return select(timeout)
        began_s = self._real()
        ready = select(timeout / self._times)
        if threading.current_thread() is threading.main_thread():
            self._late_s += max(0.0, self._real() - began_s - timeout / self._times)
        return ready

    def _faster(self, clock: Any) -> Any:
        began_s: float = clock()
        last_s = began_s

        def read() -> float:
            nonlocal last_s
            passed_s: float = clock() - began_s - self._late_s
            last_s = max(last_s, began_s + self._times * passed_s)
            return last_s

        return read


def log_moment(*_: object) -> None:
    logging.getLogger("medha.operator").info(MOMENT)


if __name__ == "__main__":
    FastClock(float(sys.argv[1]))
    signal.signal(signal.SIGUSR1, log_moment)
    from medha_operator.__main__ import main

    sys.exit(main())
