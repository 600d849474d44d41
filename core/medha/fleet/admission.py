"""Admission: a promise, a place without one, or a refusal with the earliest feasible time.

Decides on one request from the estimates of the replicas and the recent use of tenants and classes.
Refusals are `medha.errors.Refusal`:

* `no_replica`              no replica serves this model
* `context_length_exceeded` the request can never fit; the message has both numbers
* `overloaded`              no free pages, or the decodes would miss their TPOT; with Retry-After
* `tpot_infeasible`         the TPOT target is below what can be had; with the least that can
* `deadline_infeasible`     the deadline would be missed or break a promise; with earliest TTFT

A class with `when_infeasible: relegate` is admitted without a promise instead of the last two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from medha.errors import Refusal
from medha.fleet.placement import PendingRequest, PlacementOption, ReplicaEstimate, options
from medha.request import SloClass

HALF_LIFE_S = 60.0
TPOT_HEADER = "x-medha-slo-tpot-ms"
TPOT_ROOM = 1.1
"""Least ratio of a class's TPOT target to that of an idle replica at the same depth."""


class AdmissionDecision(msgspec.Struct, frozen=True):
    """An admitted request: its placement, and whether its deadline is promised."""

    option: PlacementOption
    promised: bool


class TenantUsage:
    """Predicted seconds of work given to classes and tenants, with a half-life of a minute.

    Fairness counts work, not requests: a tenant with one million-token prompt has had its share.
    """

    def __init__(self, classes: Sequence[SloClass]) -> None:
        self._classes = {slo_class.name: slo_class for slo_class in classes}
        self._spent: dict[tuple[str, str], tuple[float, float]] = {}  # (seconds, as of)

    def set_classes(self, classes: Sequence[SloClass]) -> None:
        """Replace the classes; recorded work stays."""
        self._classes = {slo_class.name: slo_class for slo_class in classes}

    def add(self, slo_class: str, tenant: str, work_s: float, now: float) -> None:
        """Record the work of an admitted request."""
        self._spent[slo_class, tenant] = (self._of(slo_class, tenant, now) + work_s, now)
        if len(self._spent) > 4096:
            self._forget(now)

    def inflation(self, slo_class: str, tenant: str, now: float) -> float:
        """Factor by which the work of a request counts for more: 1 (fair share) to 2.

        A tenant is compared with the mean of the active tenants of its class, a class with its
        weight. A tenant or class that is the only active one gets 1.
        """
        tenant_excess = min(2.0, self._tenant_excess(slo_class, tenant, now))
        return math.sqrt(tenant_excess * min(2.0, self._class_excess(slo_class, now)))

    def kept_back(self, slo_class: str, now: float) -> float:
        """Share of capacity that is reserved for other classes and not used by them now."""
        total = sum(self._of_class(name, now) for name in self._classes)
        kept = 0.0
        for name, other in self._classes.items():
            if name != slo_class and other.reserved > 0.0:
                used = self._of_class(name, now) / total if total > 0.0 else 0.0
                kept += max(0.0, other.reserved - used)
        return min(kept, 0.9)

    def _of(self, slo_class: str, tenant: str, now: float) -> float:
        seconds, since = self._spent.get((slo_class, tenant), (0.0, now))
        return seconds * math.exp2((since - now) / HALF_LIFE_S)

    def _of_class(self, slo_class: str, now: float) -> float:
        return sum(self._of(key[0], key[1], now) for key in self._spent if key[0] == slo_class)

    def _tenant_excess(self, slo_class: str, tenant: str, now: float) -> float:
        active = [self._of(key[0], key[1], now) for key in self._spent if key[0] == slo_class]
        active = [seconds for seconds in active if seconds > 1e-3]
        if len(active) < 2:
            return 1.0
        return max(1.0, self._of(slo_class, tenant, now) * len(active) / sum(active))

    def _class_excess(self, slo_class: str, now: float) -> float:
        used = {name: self._of_class(name, now) for name in self._classes}
        active = [name for name, seconds in used.items() if seconds > 1e-3]
        if slo_class not in active or len(active) < 2:
            return 1.0
        weights = sum(self._classes[name].weight for name in active)
        fair = self._classes[slo_class].weight / weights if weights > 0.0 else 1.0
        return max(1.0, used[slo_class] / sum(used.values()) / max(fair, 1e-6))

    def _forget(self, now: float) -> None:
        for key in [key for key in self._spent if self._of(key[0], key[1], now) < 1e-3]:
            del self._spent[key]
        while len(self._spent) > 4096:
            del self._spent[min(self._spent, key=lambda key: self._of(key[0], key[1], now))]


def admit(
    request: PendingRequest,
    estimates: Sequence[ReplicaEstimate],
    cached: Mapping[str, int],
    slo_class: SloClass,
    usage: TenantUsage,
    now: float,
    age_s: float = 0.0,
) -> AdmissionDecision:
    """Promise, relegate, or raise Refusal.

    `cached`: prompt tokens in the prefix cache of each replica, by name. `age_s`: seconds since the
    request arrived; the earliest TTFT in a refusal counts from arrival.
    """
    estimates = [estimate for estimate in estimates if estimate.known and not estimate.draining]
    if not estimates:
        raise Refusal(
            "no_replica",
            "no replica of this model is connected: retry, or start one",
            retry_after_s=5.0,
        )
    inflation = usage.inflation(request.slo_class, request.tenant, now)
    inflation /= 1.0 - usage.kept_back(request.slo_class, now)
    offers = options(request, estimates, cached, now, inflation)
    if not offers:
        raise _never(request, estimates)
    by_name = {estimate.name: estimate for estimate in estimates}
    _check_tpot(request, [by_name[offer.replica] for offer in offers])
    steady = [
        offer
        for offer in offers
        if by_name[offer.replica].predicted_tpot_s(request) <= request.tpot_s
        or not by_name[offer.replica].load.decoding
    ]
    best = steady[0] if steady else offers[0]
    if best.fits and steady:
        return AdmissionDecision(best, True)
    if slo_class.when_infeasible == "relegate":
        return AdmissionDecision(best, False)
    if not steady:
        tpot_ms = 1e3 * by_name[best.replica].predicted_tpot_s(request)
        raise Refusal(
            "overloaded",
            f"time per output token would be {tpot_ms:.0f} ms, target {1e3 * request.tpot_s:.0f} "
            "ms: retry later, or choose a class with a longer one",
            retry_after_s=retry_after_s(estimates),
        )
    if not best.roomy:
        raise Refusal(
            "overloaded",
            f"the request needs {best.pages} pages of KV cache and {max(0, best.free_pages)} are "
            "free: retry later",
            retry_after_s=retry_after_s(estimates),
        )
    earliest_s = age_s + min(offer.earliest_s for offer in steady if offer.roomy)
    raise Refusal(
        "deadline_infeasible",
        f"first token due in {request.due_s - now + age_s:.2f} s, earliest that can be promised "
        f"is {earliest_s:.2f} s: ask for a later deadline or choose a class that relegates",
        earliest_ttft_s=earliest_s,
        idle_ttft_s=min(offer.needed_s for offer in steady),
    )


def attainable_tpot_s(class_tpot_s: float, idle_s: float) -> float:
    """The TPOT target of a request without one of its own.

    A class has one target for all prompt lengths. After a prompt so long that not even an idle
    replica meets it, the target is what such a replica gives, with a little room.
    """
    return max(class_tpot_s, TPOT_ROOM * idle_s)


def least_tpot_ms(least_s: float) -> float:
    """Milliseconds, rounded up, so that a target of that number is accepted."""
    return math.ceil(1e6 * least_s) / 1e3


def _check_tpot(request: PendingRequest, estimates: Sequence[ReplicaEstimate]) -> None:
    """Raise Refusal if no replica can accept the TPOT target of the request."""
    if request.max_output_tokens == 1:
        return
    least_s = min(estimate.least_tpot_s(request.prompt_tokens) for estimate in estimates)
    if request.tpot_s < least_s:
        raise Refusal(
            "tpot_infeasible",
            f"{TPOT_HEADER} is {1e3 * request.tpot_s:g}: after a prompt of "
            f"{request.prompt_tokens} tokens at least {least_tpot_ms(least_s):g} ms per output "
            "token can be had; ask for that or more, or leave the header out",
            least_tpot_s=least_s,
        )


def retry_after_s(estimates: Sequence[ReplicaEstimate]) -> float:
    """Whole seconds, 1 to 30, until the least loaded replica has drained what it holds."""
    waits = [
        estimate.pending_s / max(estimate.load.drain_s_per_s, 1e-3)
        for estimate in estimates
        if estimate.known and not estimate.draining
    ]
    return float(min(30, max(1, math.ceil(min(waits, default=30.0)))))


def _never(request: PendingRequest, estimates: Sequence[ReplicaEstimate]) -> Refusal:
    """Refusal of a request that no replica can ever hold, with both numbers."""
    tokens = request.prompt_tokens + request.max_output_tokens
    context = max(estimate.max_context_tokens for estimate in estimates)
    pages = max(estimate.capacity_pages * estimate.load.page_tokens for estimate in estimates)
    groups = max(
        estimate.predictor.topology.kvp_max * estimate.predictor.tokens_per_group
        for estimate in estimates
    )
    return Refusal(
        "context_length_exceeded",
        f"prompt and output need {tokens} tokens, at most {min(context, pages, groups)} can be "
        f"held: shorten the prompt ({request.prompt_tokens} tokens) or max_tokens "
        f"({request.max_output_tokens})",
    )
