"""Limits of tenants, counted over all routers.

Requests and tokens are forgotten exponentially with a mean age of a minute: a steady rate of r per
minute counts as r. A cost c is within a limit L if

    count + c <= L    or    count <= L / 2

so that a request of any size has its turn. Until a request ends, its output counts with as many
tokens as it may have. Each router counts its own requests and reports the
counts of tenants that changed; controllers pass the reports on to the other routers.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable

import msgspec

from medha.errors import Refusal
from medha.messages import MAX_TENANT_COUNTS, TenantCount
from medha.tenants import FORGOTTEN_AT_ONCE

MEAN_AGE_S = 60.0
FORGOTTEN_S = 10.0 * MEAN_AGE_S
REPEAT_S = 10.0
"""Work in flight is reported again after this time."""
STALE_S = 3.0 * REPEAT_S
"""Work in flight of another router counts for so long after its last report."""
LONGEST_RETRY_S = 60.0


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Limits of a tenant over all routers.

    `concurrent_s`: predicted prefill seconds of its unfinished requests, on an idle replica.
    """

    requests_per_minute: float = math.inf
    tokens_per_minute: float = math.inf
    concurrent_s: float = math.inf


UNLIMITED = TenantLimits()


class RequestCost(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Cost of a request: tokens of prompts, most tokens of outputs, predicted prefill seconds."""

    prompt_tokens: int
    most_tokens: int
    work_s: float


class _Counts:
    """Counts of a tenant by one router. `requests` and `tokens` are as of `since_s`.

    `coming`: most tokens of outputs that have not ended.
    """

    __slots__ = ("coming", "concurrent_s", "live", "requests", "since_s", "tokens")

    def __init__(self, since_s: float) -> None:
        self.requests = self.tokens = self.coming = self.concurrent_s = 0.0
        self.live = 0
        self.since_s = since_s

    def fade(self, now: float) -> None:
        kept = self.kept(now)
        self.requests *= kept
        self.tokens *= kept
        self.since_s = now

    def kept(self, now: float) -> float:
        """Return the share of requests and tokens that is not forgotten yet."""
        return math.exp(min(0.0, self.since_s - now) / MEAN_AGE_S)


class UseMeter:
    """Counts of tenants; every operation takes constant time at any number of tenants.

    Call `arrive`, then `begin`, and `end` for each `begin`. Requests without limits are not
    counted.
    """

    def __init__(self) -> None:
        # Least recently changed first.
        self._own: collections.OrderedDict[str, _Counts] = collections.OrderedDict()
        # By tenant and router, likewise.
        self._others: collections.OrderedDict[str, dict[str, _Counts]] = collections.OrderedDict()
        self._changed: dict[str, None] = {}
        # tenant -> its last report, oldest first
        self._in_flight: collections.OrderedDict[str, float] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._own) + len(self._others)

    def arrive(self, tenant: str, limits: TenantLimits, now: float) -> None:
        """Count a request; raises Refusal if it is beyond the limit."""
        if limits == UNLIMITED:
            return
        counts = self._all(tenant)
        used = sum(count.requests * count.kept(now) for count in counts)
        _check(tenant, "requests per minute", used, 1.0, limits.requests_per_minute)
        self._change(tenant, now).requests += 1.0

    def begin(self, tenant: str, limits: TenantLimits, cost: RequestCost, now: float) -> None:
        """Count a request; raises Refusal if it is beyond a limit."""
        if limits == UNLIMITED:
            return
        counts = self._all(tenant)
        used = sum(count.tokens * count.kept(now) for count in counts)
        live = [count for count in counts if count.live or now - count.since_s < STALE_S]
        coming = sum(count.coming for count in live)
        tokens, work_s = cost.prompt_tokens + cost.most_tokens, cost.work_s
        _check(tenant, "tokens per minute", used, tokens, limits.tokens_per_minute, coming)
        in_flight_s = sum(count.concurrent_s for count in live)
        if in_flight_s > 0.0 and in_flight_s + work_s > limits.concurrent_s:
            over_s = in_flight_s + work_s - limits.concurrent_s
            raise Refusal(
                "rate_limit_exceeded",
                f"tenant {tenant} may have {limits.concurrent_s:g} s of prompts in flight and has "
                f"{in_flight_s:.2f} s; this one takes {work_s:.2f} s: retry when others are done",
                retry_after_s=min(over_s, LONGEST_RETRY_S),
            )
        own = self._change(tenant, now)
        own.tokens += cost.prompt_tokens
        own.coming += cost.most_tokens
        own.concurrent_s += work_s
        own.live += 1
        self._in_flight.setdefault(tenant, now)

    def end(
        self, tenant: str, limits: TenantLimits, cost: RequestCost, output_tokens: int, now: float
    ) -> None:
        """Count the output of a request that began with this cost, and its work no longer."""
        if limits == UNLIMITED:
            return
        own = self._change(tenant, now)
        own.tokens += output_tokens
        own.coming -= cost.most_tokens
        own.live -= 1
        own.concurrent_s = own.concurrent_s - cost.work_s if own.live else 0.0
        if not own.live:
            self._in_flight.pop(tenant, None)

    # --- other routers ----------------------------------------------------------------------------

    def report(self, now: float) -> tuple[TenantCount, ...]:
        """Return the counts of tenants that changed, at most MAX_TENANT_COUNTS at a time."""
        self._forget(now)
        while self._in_flight:
            tenant, reported_s = next(iter(self._in_flight.items()))
            if now - reported_s < REPEAT_S:
                break
            del self._in_flight[tenant]
            self._in_flight[tenant] = now
            self._changed[tenant] = None
        counts = []
        for tenant in list(itertools.islice(self._changed, MAX_TENANT_COUNTS)):
            del self._changed[tenant]
            own = self._own[tenant]
            own.fade(now)
            counts.append(
                TenantCount(tenant, own.requests, own.tokens, own.coming, own.concurrent_s)
            )
        return tuple(counts)

    def receive(self, router: str, counts: Iterable[TenantCount], now: float) -> None:
        """Replace what another router counts."""
        for count in counts:
            earlier = self._others.pop(count.tenant, {}).items()
            known = {name: own for name, own in earlier if now - own.since_s < FORGOTTEN_S}
            entry = known[router] = _Counts(now)
            entry.requests, entry.tokens = count.requests, count.tokens
            entry.coming, entry.concurrent_s = count.coming, count.concurrent_s
            self._others[count.tenant] = known
        self._forget(now)

    def _all(self, tenant: str) -> list[_Counts]:
        counts = list(self._others.get(tenant, {}).values())
        if (own := self._own.get(tenant)) is not None:
            counts.append(own)
        return counts

    def _change(self, tenant: str, now: float) -> _Counts:
        own = self._own.pop(tenant, None) or _Counts(now)
        own.fade(now)
        self._own[tenant] = own
        self._changed[tenant] = None
        return own

    def _forget(self, now: float) -> None:
        """Remove some tenants without a change for a long time."""
        for _ in range(min(FORGOTTEN_AT_ONCE, len(self._own))):
            tenant, own = next(iter(self._own.items()))
            if now - own.since_s < FORGOTTEN_S:
                break
            del self._own[tenant]
            if own.live:
                own.fade(now)
                self._own[tenant] = own
            else:
                self._changed.pop(tenant, None)
        for _ in range(min(FORGOTTEN_AT_ONCE, len(self._others))):
            tenant, entries = next(iter(self._others.items()))
            if now - max(entry.since_s for entry in entries.values()) < FORGOTTEN_S:
                break
            del self._others[tenant]


def _check(
    tenant: str, what: str, used: float, cost: float, limit: float, coming: float = 0.0
) -> None:
    """Raise Refusal, with the time until the cost is within the limit.

    What is `coming` may end at any time.
    """
    allowed = max(limit - cost, 0.5 * limit)
    if used + coming > allowed:
        wait_s = max(1.0 if coming else 0.0, MEAN_AGE_S * math.log(max(used / allowed, 1.0)))
        raise Refusal(
            "rate_limit_exceeded",
            f"tenant {tenant} may use {limit:g} {what} and has used {used:.0f}"
            f"{f', with up to {coming:.0f} to come' if coming else ''}: retry in "
            f"{math.ceil(wait_s)} s",
            retry_after_s=min(wait_s, LONGEST_RETRY_S),
        )
