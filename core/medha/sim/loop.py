"""Virtual time: a heap of events, a clock that jumps from one to the next.

Events of one instant run by rank, and within a rank in the order of their creation, so a run is
deterministic. Ends are processed before arrivals, and both before decisions.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

DONE, ARRIVE, DECIDE, WATCH = range(4)  # ranks


class Loop:
    """Runs actions at times; `now` is seconds since the start of the run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._created = 0

    def at(self, time_s: float, rank: int, action: Callable[[], None]) -> None:
        """Run `action` at `time_s`, or at this instant when that has passed."""
        self._created += 1
        heapq.heappush(self._heap, (max(time_s, self.now), rank, self._created, action))

    def run(self, until_s: float = float("inf"), most_events: int | None = None) -> None:
        """Run events up to and including `until_s`; `most_events` guards against a livelock."""
        left = most_events if most_events is not None else -1
        while self._heap and self._heap[0][0] <= until_s and left:
            self.now, _, _, action = heapq.heappop(self._heap)
            action()
            self.events += 1
            left -= 1
        if self._heap and not left:
            raise RuntimeError(f"{most_events} events by {self.now:.3f} s: the run does not end")
        if until_s != float("inf"):
            self.now = max(self.now, until_s)

    @property
    def idle(self) -> bool:
        return not self._heap
