"""Liveness of this process, for its liveness probe.

The operator is alive if every kind was seen in the last 90 s (quiet kinds send no events, but the
resync lists them and their watches have bookmarks). A leader must also have reconciled every
MedhaReplica within three resyncs. A queue that is long but moves is no fault: the time by which it
is behind is allowed, unless no key at all was finished for a resync. The check runs in the event
loop, so a loop that hangs is not alive either.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from medha_operator.resources.objects import Key

log = logging.getLogger("medha.operator.liveness")

STALLED_S = 20.0
CHECK_EVERY_S = 1.0
SILENCE_S = 90.0 - CHECK_EVERY_S
"""Shorter by the check's interval, so that silence is reported within 90 s."""


class Liveness:
    """The last check's result; any thread may read it."""

    def __init__(self, resync_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._resync_s = resync_s
        self._finished_s = clock()
        self._started_s = self._checked_s = clock()
        self._reconciled_s: dict[Key, float] = {}
        self.fault = ""
        self.ready = False

    def alive(self) -> bool:
        """Return true if the last check was recent and found no fault."""
        return not self.fault and self._clock() - self._checked_s < STALLED_S

    def reconciled(self, key: Key) -> None:
        """Record that `key` was reconciled, with or without success."""
        self._reconciled_s[key] = self._finished_s = self._clock()

    def check(
        self, seen_s: Iterable[float], leading: bool, keys: Iterable[Key], behind_s: float
    ) -> None:
        """Look for a fault. `seen_s`: when each source last sent anything; `behind_s`: for how
        long the queue's first key has been due.
        """
        now_s = self._clock()
        present = set(keys) if leading else set()
        self._reconciled_s = {key: self._reconciled_s.get(key, now_s) for key in present}
        oldest_s = min(seen_s, default=now_s)
        silent_s = now_s - max(oldest_s, self._started_s)
        waiting_s = now_s - min(self._reconciled_s.values(), default=now_s)
        fault = ""
        if silent_s > SILENCE_S:
            fault = f"the API server has sent nothing for {silent_s:.0f} s"
        elif leading and min(behind_s, now_s - self._finished_s) > self._resync_s:
            fault = f"keys have been due for {behind_s:.0f} s and none is finished"
        elif waiting_s > 3 * self._resync_s + behind_s:
            key = min(self._reconciled_s, key=self._reconciled_s.__getitem__)
            fault = f"{key[0]}/{key[1]} was not reconciled for {waiting_s:.0f} s"
        if fault and not self.fault:
            log.error("not alive: %s", fault)
        self.fault, self._checked_s = fault, now_s

    async def run(self, check: Callable[[], None]) -> None:
        """Call `check` until cancelled."""
        while True:
            check()
            await asyncio.sleep(CHECK_EVERY_S)
