"""Which key is looked at next: each at most once at a time, in the order in which they fall due.

    add      look at it, now or after a while; an earlier time wins over a later one
    retry    look at it again after a failure: the pause doubles each time, with jitter
    done     it was looked at; what was added meanwhile is kept

Keys are few, so plain dictionaries and a heap do. It reads no clock: `now` is an argument, and
`get` waits by the loop it is used in.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

FIRST_RETRY_S, LONGEST_RETRY_S = 0.25, 30.0


class WorkQueue(Generic[K]):
    """Keys with the time from which on each may be looked at."""

    def __init__(self, clock: Callable[[], float], dice: random.Random) -> None:
        self._clock, self._dice = clock, dice
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._busy: set[K] = set()
        self._failures: dict[K, int] = {}
        self._count = 0
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    @property
    def behind_s(self) -> float:
        """For how long the first key has been due."""
        now = self._clock()
        return max(0.0, now - min(self._due.values(), default=now))

    def add(self, key: K, after_s: float = 0.0) -> None:
        """Look at `key` once `after_s` has passed, or sooner if that was said already."""
        due = self._clock() + after_s
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        self._push(key)

    def retry(self, key: K, at_least_s: float = 0.0) -> float:
        """Look again after a failure; returns the pause."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(failures - 1, 20))
        pause_s = max(at_least_s, pause_s * self._dice.uniform(0.5, 1.0))
        self.add(key, pause_s)
        return pause_s

    def succeeded(self, key: K) -> None:
        """The next failure is a first one again."""
        self._failures.pop(key, None)

    def done(self, key: K) -> None:
        """Nobody looks at `key` any more."""
        self._busy.discard(key)
        if key in self._due:
            self._push(key)

    def take(self) -> K | None:
        """A key that is due and that nobody looks at; it is then looked at until `done`."""
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due and key not in self._busy:
                del self._due[key]
                self._busy.add(key)
                return key
        return None

    async def get(self) -> K:
        """`take`, waiting for it."""
        while (key := self.take()) is None:
            self._news.clear()
            wait_s = self._heap[0][0] - self._clock() if self._heap else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
            except TimeoutError:
                continue
        return key

    def _push(self, key: K) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self._due[key], self._count, key))
        self._news.set()
