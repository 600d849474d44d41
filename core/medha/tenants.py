"""Work of tenants in predicted prefill seconds. Half is forgotten each minute, or of short prompts
in SHORT_HALF_LIFE_S.

`PromisedWork` is what a replica reports to all routers: a tenant is charged W when the replica
accepts its promise, and then for the place that a long answer holds: one in `max_running` of the
replica's time, beyond W. `ServedWork` orders tenants that wait: it is charged with whatever is sent
to a replica, divided by the weight. Aborts pay nothing back.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

HALF_LIFE_S = 60.0
MEMORY_S = HALF_LIFE_S / math.log(2.0)
"""Mean age of a charge when it is forgotten: a steady rate r is remembered as r × MEMORY_S."""
SHORT_HALF_LIFE_S = 5.0
"""Of short prompts: a tenant that asks again may have no more of them promised at once than others
can wait for."""
SHORT_MEMORY_S = SHORT_HALF_LIFE_S / math.log(2.0)
ACTIVE_S = 5.0 * HALF_LIFE_S
"""A tenant counts as active for so long after its last request."""
LISTED = 64
"""Tenants of a report: those that were promised something last. A tenant that was left out is
listed again with its next promise, so that it gains one promise at most."""
REFRESH_S = 1.0
FORGOTTEN_AT_ONCE = 64
"""Tenants that one call forgets: a hundred thousand may become inactive at one time."""
SHORT_S = 1.0
"""A prompt of at most this work is short. Short prompts are counted apart, so that a document
does not use up what a tenant may have for its chats."""


class TenantWork(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Promised seconds of a tenant, and of these the seconds of short prompts."""

    tenant: str
    seconds: float
    short_s: float

    def of(self, short: bool) -> float:
        """Seconds that count for a prompt: short ones count short ones only."""
        return self.short_s if short else self.seconds


class ServedWork:
    """Seconds per unit of weight that each tenant was served in the last minutes."""

    def __init__(self) -> None:
        # (seconds, as of), latest last
        self._charges: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    def charge(self, tenant: str, seconds: float, now: float) -> None:
        self.replace(tenant, seconds + self.of(tenant, now), now)

    def replace(self, tenant: str, seconds: float, now: float) -> None:
        self._charges.pop(tenant, None)
        self._charges[tenant] = seconds, now
        for _ in range(FORGOTTEN_AT_ONCE):
            oldest = next(iter(self._charges))
            if now - self._charges[oldest][1] < ACTIVE_S:
                return
            del self._charges[oldest]

    def of(self, tenant: str, now: float) -> float:
        """Return what is not forgotten yet."""
        seconds, since = self._charges.get(tenant, (0.0, now))
        return seconds * math.exp2((since - now) / HALF_LIFE_S)

    def of_all(self, tenants: Sequence[str], now: float) -> npt.NDArray[np.float64]:
        """Return the same of several tenants."""
        charges, exp2, none = self._charges, math.exp2, (0.0, now)
        if not charges:
            return np.zeros(len(tenants))
        return np.array(
            [
                seconds * exp2((since - now) / HALF_LIFE_S)
                for seconds, since in [charges.get(tenant, none) for tenant in tenants]
            ]
        )


def is_short(work_s: float) -> bool:
    return work_s <= SHORT_S


class PromisedWork:
    """Promised seconds of the tenants that were active in the last minutes."""

    def __init__(self) -> None:
        # (seconds, of these of short prompts, as of), latest last
        self._charges: collections.OrderedDict[str, tuple[float, float, float]] = (
            collections.OrderedDict()
        )
        self._coming_s: dict[str, float] = {}
        self._report: tuple[TenantWork, ...] = ()
        self._reported_s = math.inf

    def charge(self, tenant: str, charge_s: float, now: float, *, short: bool) -> None:
        """Count seconds of a prompt, which is short or not."""
        seconds, short_s, since = self._charges.pop(tenant, (0.0, 0.0, now))
        seconds, short_s = _faded(seconds, short_s, now - since)
        self._charges[tenant] = seconds + charge_s, short_s + (charge_s if short else 0.0), now
        self._reported_s = math.inf

    def replace_coming(self, coming_s: dict[str, float]) -> None:
        """Replace what answers of short prompts take in the next seconds, by tenant.

        They count if they are more than what was charged in the last seconds: else a tenant could
        begin any number of answers before their first seconds are charged.
        """
        self._coming_s = coming_s

    def add_coming(self, tenant: str, seconds: float) -> None:
        """Add the answer of a prompt that has just been promised."""
        self._coming_s[tenant] = self._coming_s.get(tenant, 0.0) + seconds

    def report(self, now: float) -> tuple[TenantWork, ...]:
        """Return the work of the tenants charged last; up to REFRESH_S old."""
        if not 0.0 <= now - self._reported_s < REFRESH_S:
            self._forget(now)
            latest = itertools.islice(reversed(self._charges.items()), LISTED)
            self._report = tuple(
                self._work(tenant, *_faded(seconds, short_s, now - since))
                for tenant, (seconds, short_s, since) in latest
            )
            self._reported_s = now
        return self._report

    def _work(self, tenant: str, seconds: float, short_s: float) -> TenantWork:
        return TenantWork(tenant, seconds, max(short_s, self._coming_s.get(tenant, 0.0)))

    def _forget(self, now: float) -> None:
        for _ in range(min(FORGOTTEN_AT_ONCE, len(self._charges))):
            tenant, (_, _, since) = next(iter(self._charges.items()))
            if now - since < ACTIVE_S:
                return
            del self._charges[tenant]


def _faded(seconds: float, short_s: float, age_s: float) -> tuple[float, float]:
    return (
        seconds * math.exp2(-age_s / HALF_LIFE_S),
        short_s * math.exp2(-age_s / SHORT_HALF_LIFE_S),
    )
