"""`python -m tests.api.hurried 10`: the operator's process, for which ten seconds pass in one.

Its clocks run so many times as fast, and what it waits for in an event loop comes so much sooner;
all else is as ever. What takes minutes by the clock is tried in seconds this way. By how much the
machine wakes the event loop too late is left out: a tenth of a second of that would be a whole one.
SIGUSR1 makes it log `MOMENT`, with its own time as every line has.
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


class Hurry:
    """Takes effect for the whole process: make it before anything reads a clock."""

    def __init__(self, times: float) -> None:
        self._times, self._real = times, time.monotonic
        self._late_s = 0.0
        for name in ("monotonic", "time"):
            setattr(time, name, self._faster(getattr(time, name)))
        hurry = self

        class Impatient(selectors.DefaultSelector):
            """What every new event loop waits with."""

            def select(self, timeout: float | None = None) -> Any:
                return hurry.wait(super().select, timeout)

        setattr(selectors, "DefaultSelector", Impatient)  # noqa: B010

    def wait(self, select: Any, timeout: float | None) -> Any:
        """As `select` does, sooner. Only one loop says what was too late: more have the same
        reason, or each other."""
        if not timeout or timeout < 0:
            return select(timeout)
        began_s = self._real()
        found = select(timeout / self._times)
        if threading.current_thread() is threading.main_thread():
            self._late_s += max(0.0, self._real() - began_s - timeout / self._times)
        return found

    def _faster(self, clock: Any) -> Any:
        began_s: float = clock()
        last_s = began_s

        def read() -> float:
            nonlocal last_s
            passed_s: float = clock() - began_s - self._late_s
            last_s = max(last_s, began_s + self._times * passed_s)
            return last_s

        return read


def tell(*_: object) -> None:
    logging.getLogger("medha.operator").info(MOMENT)


if __name__ == "__main__":
    Hurry(float(sys.argv[1]))
    signal.signal(signal.SIGUSR1, tell)
    from medha_operator.__main__ import main

    sys.exit(main())
