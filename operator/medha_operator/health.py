"""Whether this process still does its work: what its liveness probe is told.

Alive means that every kind was heard of within 90 s (quiet kinds send no events, but the resync
lists them and the watch has bookmarks) and that, while it leads, every MedhaReplica was looked at
within three resyncs. A queue that is long but moves is no fault: by how much it is behind is
granted, unless nothing at all was finished for a resync. Judged in the event loop, so that a loop
that hangs is not alive either.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from medha_operator.projections import Key

log = logging.getLogger("medha.operator.health")

STALLED_S = 20.0
LOOK_S = 1.0
SILENCE_S = 90.0 - LOOK_S
"""Judged only now and then, and known after 90 s all the same."""


class Health:
    """Keeps a verdict; the getters may be asked from any thread."""

    def __init__(self, resync_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._resync_s = resync_s
        self._finished_s = clock()
        self._started_s = self._judged_s = clock()
        self._looked_s: dict[Key, float] = {}
        self.why = ""
        self.ready = False

    def alive(self) -> bool:
        """Nothing is wrong, and that was found lately."""
        return not self.why and self._clock() - self._judged_s < STALLED_S

    def looked(self, key: Key) -> None:
        """`key` was reconciled, or it was tried."""
        self._looked_s[key] = self._finished_s = self._clock()

    def judge(
        self, heard_s: Iterable[float], leading: bool, keys: Iterable[Key], behind_s: float
    ) -> None:
        """Find what is wrong: `heard_s` says when each source was last heard of, `behind_s` for
        how long the queue's first key has been due.
        """
        now_s = self._clock()
        present = set(keys) if leading else set()
        self._looked_s = {key: self._looked_s.get(key, now_s) for key in present}
        oldest_s = min(heard_s, default=now_s)
        silent_s = now_s - max(oldest_s, self._started_s)
        waiting_s = now_s - min(self._looked_s.values(), default=now_s)
        why = ""
        if silent_s > SILENCE_S:
            why = f"the API server was not heard of for {silent_s:.0f} s"
        elif leading and min(behind_s, now_s - self._finished_s) > self._resync_s:
            why = f"keys are due for {behind_s:.0f} s and none is finished"
        elif waiting_s > 3 * self._resync_s + behind_s:
            key = min(self._looked_s, key=self._looked_s.__getitem__)
            why = f"{key[0]}/{key[1]} was not looked at for {waiting_s:.0f} s"
        if why and not self.why:
            log.error("not alive: %s", why)
        self.why, self._judged_s = why, now_s

    async def run(self, judge: Callable[[], None]) -> None:
        """Call `judge` until cancelled."""
        while True:
            judge()
            await asyncio.sleep(LOOK_S)
