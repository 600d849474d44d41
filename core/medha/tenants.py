"""Promised work by tenant, as a replica reports it to all routers.

A tenant is charged the predicted prefill seconds W of a request when the replica accepts its
promise, and half of the charge is forgotten each minute. Aborts pay nothing back.
"""

from __future__ import annotations

import itertools
import math

HALF_LIFE_S = 60.0
MEMORY_S = HALF_LIFE_S / math.log(2.0)
"""Mean age of a charge when it is forgotten: a steady rate r is remembered as r × MEMORY_S."""
ACTIVE_S = 2.0 * HALF_LIFE_S
"""A tenant counts as active for so long after its last request."""
LISTED = 64
"""Tenants of a report: those that were promised something last. A tenant that was left out is
listed again with its next promise, so that it gains one promise at most."""
REFRESH_S = 1.0


class PromisedWork:
    """Promised seconds of the tenants that were active in the last minutes."""

    def __init__(self) -> None:
        self._charges: dict[str, tuple[float, float]] = {}  # (seconds, as of), last charged last
        self._report: tuple[tuple[str, float], ...] = ()
        self._reported_s = math.inf

    def charge(self, tenant: str, work_s: float, now: float) -> None:
        """Count the work of a promise."""
        seconds, since = self._charges.pop(tenant, (0.0, now))
        self._charges[tenant] = (seconds * math.exp2((since - now) / HALF_LIFE_S) + work_s, now)
        self._reported_s = math.inf

    def report(self, now: float) -> tuple[tuple[str, float], ...]:
        """Return (tenant, seconds) of the tenants charged last; up to REFRESH_S old."""
        if not 0.0 <= now - self._reported_s < REFRESH_S:
            self._forget(now)
            latest = itertools.islice(reversed(self._charges.items()), LISTED)
            self._report = tuple(
                (tenant, seconds * math.exp2((since - now) / HALF_LIFE_S))
                for tenant, (seconds, since) in latest
            )
            self._reported_s = now
        return self._report

    def _forget(self, now: float) -> None:
        while self._charges:
            tenant, (_, since) = next(iter(self._charges.items()))
            if now - since < ACTIVE_S:
                return
            del self._charges[tenant]
