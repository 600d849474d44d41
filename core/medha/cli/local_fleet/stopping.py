"""End of supervised processes: signals are counted, processes stop within a grace period."""

from __future__ import annotations

import signal
import time
from types import FrameType

from medha.cli.local_fleet.supervisor import Supervisor

STEP_S = 0.05


class StopSignals:
    """Context that counts SIGINT, SIGTERM and SIGHUP instead of letting them end the process."""

    def __init__(self) -> None:
        self.count = 0
        self._old: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def stop_all(supervisor: Supervisor, signals: StopSignals) -> None:
    """Stop every process; kill all of them after the grace period or a second signal."""
    handled = signals.count
    supervisor.stop(time.monotonic())
    while not supervisor.stopped:
        if signals.count > max(handled, 1):
            handled = signals.count
            supervisor.stop(time.monotonic(), at_once=True)
        supervisor.step(time.monotonic())
        time.sleep(STEP_S)
