"""Admission: a promise, a place without one, or a refusal that says when it would be yes.

Decides for one newcomer from the replicas' standings and from what tenants and classes used
lately; for the router and for the simulated fleet. Refusals are `medha.errors.Refusal`:

* `no_replica`              none is known that serves this model
* `context_length_exceeded` it can never fit; both numbers are in the message
* `overloaded`              no pages now, or the decodes would break their TPOT; with Retry-After
* `deadline_infeasible`     its deadline would be missed or break a promise; the earliest TTFT

A class whose `when_infeasible` is `relegate` is taken without a promise instead of the last two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from medha.errors import Refusal
from medha.request import SloClass
from medha.scheduling.placement import Newcomer, Option, Standing, options

HALF_LIFE_S = 60.0


class Verdict(msgspec.Struct, frozen=True):
    """The newcomer is taken: where, and whether its deadline is promised."""

    option: Option
    promised: bool


class Usage:
    """Predicted seconds of work given lately to classes and their tenants, halved every minute.

    Fairness counts work, not requests: a tenant with one million-token prompt has had its share.
    """

    def __init__(self, classes: Sequence[SloClass]) -> None:
        self._classes = {each.name: each for each in classes}
        self._spent: dict[tuple[str, str], tuple[float, float]] = {}  # (seconds, as of)

    def reclass(self, classes: Sequence[SloClass]) -> None:
        """These are the classes from now on; what was spent stays."""
        self._classes = {each.name: each for each in classes}

    def add(self, slo_class: str, tenant: str, work_s: float, now: float) -> None:
        """A request of `work_s` was taken."""
        self._spent[slo_class, tenant] = (self._of(slo_class, tenant, now) + work_s, now)
        if len(self._spent) > 4096:
            self._forget(now)

    def inflation(self, slo_class: str, tenant: str, now: float) -> float:
        """By how much a newcomer's work counts for more than it is: 1 (its fair share) to 2.

        A tenant is measured against its class's mean over tenants active lately, a class against
        its weight. With nobody else active it is 1: an idle fleet is nobody's.
        """
        tenant_excess = min(2.0, self._tenant_excess(slo_class, tenant, now))
        return math.sqrt(tenant_excess * min(2.0, self._class_excess(slo_class, now)))

    def kept_back(self, slo_class: str, now: float) -> float:
        """Part of capacity that is reserved for other classes and that they do not use now."""
        total = sum(self._of_class(name, now) for name in self._classes)
        kept = 0.0
        for name, each in self._classes.items():
            if name != slo_class and each.reserved > 0.0:
                used = self._of_class(name, now) / total if total > 0.0 else 0.0
                kept += max(0.0, each.reserved - used)
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
    newcomer: Newcomer, standings: Sequence[Standing], cached: Mapping[str, int],
    slo_class: SloClass, usage: Usage, now: float, age_s: float = 0.0,
) -> Verdict:  # fmt: skip
    """Promise, relegate, or raise Refusal.

    `cached`: prompt tokens in each replica's prefix cache, by name. `age_s`: how long ago the
    request arrived, so that the earliest TTFT in a refusal counts from arrival.
    """
    standings = [standing for standing in standings if standing.known and not standing.draining]
    if not standings:
        raise Refusal(
            "no_replica",
            "no replica of this model is connected: retry, or start one",
            retry_after_s=5.0,
        )
    inflation = usage.inflation(newcomer.slo_class, newcomer.tenant, now)
    inflation /= 1.0 - usage.kept_back(newcomer.slo_class, now)
    offers = options(newcomer, standings, cached, now, inflation)
    if not offers:
        raise _never(newcomer, standings)
    by_name = {standing.name: standing for standing in standings}
    steady = [
        offer for offer in offers
        if by_name[offer.replica].predicted_tpot_s(newcomer) <= newcomer.tpot_s
        or not by_name[offer.replica].load.decoding
    ]  # fmt: skip
    best = steady[0] if steady else offers[0]
    if best.fits and steady:
        return Verdict(best, True)
    if slo_class.when_infeasible == "relegate":
        return Verdict(best, False)
    if not steady:
        tpot_ms = 1e3 * by_name[best.replica].predicted_tpot_s(newcomer)
        raise Refusal(
            "overloaded",
            f"time per output token would be {tpot_ms:.0f} ms, target {1e3 * newcomer.tpot_s:.0f} "
            "ms: retry later, or choose a class with a longer one",
            retry_after_s=retry_after_s(standings),
        )
    if not best.roomy:
        raise Refusal(
            "overloaded",
            f"the request needs {best.pages} pages of KV cache and {max(0, best.free_pages)} are "
            "free: retry later",
            retry_after_s=retry_after_s(standings),
        )
    earliest_s = age_s + min(offer.earliest_s for offer in steady if offer.roomy)
    raise Refusal(
        "deadline_infeasible",
        f"first token due in {newcomer.due_s - now + age_s:.2f} s, earliest that can be promised "
        f"is {earliest_s:.2f} s: ask for a later deadline or choose a class that relegates",
        earliest_ttft_s=earliest_s,
        idle_ttft_s=min(offer.needed_s for offer in steady),
    )


def retry_after_s(standings: Sequence[Standing]) -> float:
    """Whole seconds, 1 to 30, until the least loaded replica has drained what it holds."""
    waits = [
        standing.pending_s / max(standing.load.drain_s_per_s, 1e-3)
        for standing in standings
        if standing.known and not standing.draining
    ]
    return float(min(30, max(1, math.ceil(min(waits, default=30.0)))))


def _never(newcomer: Newcomer, standings: Sequence[Standing]) -> Refusal:
    """Why no replica could ever hold it, with both numbers."""
    tokens = newcomer.prompt_tokens + newcomer.max_output_tokens
    context = max(standing.max_context_tokens for standing in standings)
    pages = max(standing.capacity_pages * standing.load.page_tokens for standing in standings)
    groups = max(
        standing.predictor.topology.kvp_max * standing.predictor.tokens_per_group
        for standing in standings
    )
    return Refusal(
        "context_length_exceeded",
        f"prompt and output need {tokens} tokens, at most {min(context, pages, groups)} can be "
        f"held: shorten the prompt ({newcomer.prompt_tokens} tokens) or max_tokens "
        f"({newcomer.max_output_tokens})",
    )
