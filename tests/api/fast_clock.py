"""`python -m tests.api.fast_clock 10`: the operator with clocks that run ten times as fast.

Waits in an event loop end as much sooner, so that minutes are tested in seconds; all else is
unchanged. The time in which the process should run but has no processor is left out, since the
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
        self._times, self._real, self._cpu = times, time.monotonic, time.process_time
        self._late_s = 0.0
        self._woke_s: tuple[float, float] | None = (self._real(), self._cpu())
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
        shorter = timeout / self._times if timeout else timeout
        if shorter == 0 or threading.current_thread() is not threading.main_thread():
            return select(shorter)
        self._late_s += self._starved_s()
        self._woke_s, began_s = None, self._real()
        ready = select(shorter)
        if shorter is not None and shorter > 0:
            self._late_s += max(0.0, self._real() - began_s - shorter)
        self._woke_s = self._real(), self._cpu()
        return ready

    def _starved_s(self) -> float:
        """Time without a processor since the main thread's loop woke; none while it waits."""
        woke_s = self._woke_s
        if woke_s is None:
            return 0.0
        return max(0.0, self._real() - woke_s[0] - (self._cpu() - woke_s[1]))

    def _faster(self, clock: Any) -> Any:
        began_s: float = clock()
        last_s = began_s

        def read() -> float:
            nonlocal last_s
            passed_s: float = clock() - began_s - self._late_s - self._starved_s()
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
