"""`python -m tests.api.hurried 10`: the operator's process, for which ten seconds pass in one.

Its clocks run so many times as fast, and what it waits for in an event loop comes so much sooner;
all else is as ever. What takes minutes by the clock is tried in seconds this way.
"""

from __future__ import annotations

import selectors
import sys
import time
from typing import Any


def hurry(times: float) -> None:
    """From now on, for the whole process: call it before anything reads a clock."""
    for name in ("monotonic", "time"):
        setattr(time, name, _faster(getattr(time, name), times))

    class Impatient(selectors.DefaultSelector):
        """What every new event loop waits with."""

        def select(self, timeout: float | None = None) -> Any:
            return super().select(timeout / times if timeout and timeout > 0 else timeout)

    setattr(selectors, "DefaultSelector", Impatient)  # noqa: B010


def _faster(clock: Any, times: float) -> Any:
    began_s = clock()
    return lambda: began_s + times * (clock() - began_s)


if __name__ == "__main__":
    hurry(float(sys.argv[1]))
    from medha_operator.__main__ import main

    sys.exit(main())
