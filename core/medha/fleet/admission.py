"""Admission: a promise, a place without one, or a refusal with the earliest feasible time.

Decides on one request from the estimates of the replicas and the recent use of tenants and classes.
Refusals are `medha.errors.Refusal`:

* `no_replica`              no replica serves this model
* `context_length_exceeded` the request can never fit; the message has both numbers
* `tpot_infeasible`         no replica keeps that TPOT alongside prefills; with the least kept
* `rate_limit_exceeded`     the tenant was promised its share already; with Retry-After
* `overloaded`              no free pages, or the TPOT target would be missed, with the least that
                            can be had now; with Retry-After
* `deadline_infeasible`     the deadline would be missed or break a promise; with earliest TTFT

A class with `when_infeasible: relegate` is admitted without a promise instead of the last three,
and with a TPOT that only an idle replica gives.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Mapping, Sequence

import msgspec

from medha.errors import Refusal
from medha.fleet.offers import PendingRequest, PlacementOption
from medha.fleet.placement import best_first, offered_tpot_s
from medha.fleet.replica_estimate import ReplicaEstimate
from medha.messages import Load
from medha.request import SloClass
from medha.tenants import (
    ACTIVE_S,
    FORGOTTEN_AT_ONCE,
    HALF_LIFE_S,
    MEMORY_S,
    SHORT_HALF_LIFE_S,
    SHORT_MEMORY_S,
    is_short,
)

LEAST_ROOM_S, LEAST_SHORT_ROOM_S = 1.0, 0.25
"""Promised seconds that every tenant may have, of all and of short prompts: with thousands of
tenants, a share of less would be exceeded by chance."""
LEAST_LEFT = 0.1
"""Least part of the time that is expected for what is beyond a share."""
TPOT_HEADER = "x-medha-slo-tpot-ms"
TPOT_ROOM = 1.1
"""Least ratio of a class's TPOT target to what a replica can keep at that depth."""


class AdmissionDecision(msgspec.Struct, frozen=True):
    """An admitted request: its placement, and whether its deadline is promised.

    `beyond_share`: not promised, because its tenant has its share and others are active.
    """

    option: PlacementOption
    promised: bool
    beyond_share: bool = False


class TenantUsage:
    """Shares of tenants and of classes in what is promised.

    A tenant may be promised its share of what all replicas compute, over all routers, with
    promises half forgotten each minute (`medha.tenants`). A prompt of W seconds is in the share if

        promised + W ≤ room    room = share × replicas × memory,   or  promised ≤ room / 2
        share = own weight / weights of all n active tenants × n / (n + 1)

    One more share than tenants: the next one finds room at once. A prompt of any length has its
    turn, and a short one counts short ones only, of the last seconds. A tenant that was promised
    less than its share in the last minutes, and has none that waits without a promise, has up to
    twice the room for them, so that chance alone takes no promise from it. A request beyond the
    share gets no promise: it runs behind all promises, where it takes nothing from others, and is
    refused if it would be late behind its tenant's others that wait so, in the time that promises
    leave: else all of them would be late. If several tenants wait so, each keeps as much waiting as
    idle replicas would serve in time: what is always there to be served follows weights.
    Deadlines, targets and the number of requests are not in the rule: to lie about them, or to
    split a prompt, gains nothing.

    A class that was given more than its weight must fit with more room than its work, and the
    unused part of what is reserved for other classes stays free.
    """

    def __init__(self, classes: Sequence[SloClass]) -> None:
        self._classes = {slo_class.name: slo_class for slo_class in classes}
        self._given: dict[str, tuple[float, float]] = {}  # by class: (seconds, as of)
        # (last request, weight), latest last
        self._active: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()
        self._weights = 0.0

    def set_classes(self, classes: Sequence[SloClass]) -> None:
        """Replace the classes; recorded work stays."""
        self._classes = {slo_class.name: slo_class for slo_class in classes}

    def add(self, slo_class: str, work_s: float, now: float) -> None:
        """Record the work of an admitted request for its class."""
        self._given[slo_class] = (self._of_class(slo_class, now) + work_s, now)

    # --- tenants ----------------------------------------------------------------------------------

    def ask(self, tenant: str, weight: float, now: float) -> None:
        """Count a tenant as active, with the weight of the class that it asks for."""
        self._remove(tenant)
        self._active[tenant] = (now, weight)
        self._weights += weight
        for _ in range(FORGOTTEN_AT_ONCE):
            oldest = next(iter(self._active))
            if now - self._active[oldest][0] < ACTIVE_S:
                return
            self._remove(oldest)

    def report(self, load: Load, now: float) -> None:
        """Count tenants as active that a replica made promises to, through any router."""
        for work in load.promised_work:
            if work.tenant not in self._active:
                self.ask(work.tenant, 1.0, now)

    def wait_s(
        self,
        tenant: str,
        work_s: float,
        estimates: Sequence[ReplicaEstimate],
        waiting_s: float = 0.0,
        taken_s: float = 0.0,
    ) -> float:
        """Return the seconds until work is in the share of an active tenant; 0 if it is now.

        `waiting_s`: work of the tenant that waits without a promise. `taken_s`: what the answer
        takes from prefills, of what counts at once.
        Without API keys all requests are of one tenant, without a name and without a limit.
        """
        if not tenant and len(self._active) == 1:
            return 0.0
        count = len(self._active)
        share = self._active[tenant][1] / max(self._weights, 1e-9) * count / (count + 1)
        replicas = sum(estimate.load.share for estimate in estimates)
        room_s = max(LEAST_ROOM_S, share * replicas * MEMORY_S)
        promised_s = sum(estimate.promised_work_s(tenant, False) for estimate in estimates)
        half_life_s = HALF_LIFE_S
        if is_short(work_s):
            unused = 0.0 if waiting_s else max(0.0, 1.0 - promised_s / room_s)
            room_s = max(LEAST_SHORT_ROOM_S, share * replicas * SHORT_MEMORY_S) * (1.0 + unused)
            promised_s = sum(estimate.promised_work_s(tenant, True) for estimate in estimates)
            half_life_s = SHORT_HALF_LIFE_S
        allowed_s = max(room_s - work_s - taken_s, 0.5 * room_s)
        return half_life_s * math.log2(max(1.0, promised_s / allowed_s))

    @property
    def several(self) -> bool:
        """True if more than one tenant is active."""
        return len(self._active) > 1

    def _remove(self, tenant: str) -> None:
        entry = self._active.pop(tenant, None)
        if entry is not None:
            self._weights = self._weights - entry[1] if self._active else 0.0

    # --- classes ----------------------------------------------------------------------------------

    def inflation(self, slo_class: str, now: float) -> float:
        """Factor by which the work of a class counts for more: 1 (within its weight) to 1.4."""
        if len(self._classes) < 2:
            return 1.0
        used = {name: self._of_class(name, now) for name in self._classes}
        active = [name for name, seconds in used.items() if seconds > 1e-3]
        if slo_class not in active or len(active) < 2:
            return 1.0
        weights = sum(self._classes[name].weight for name in active)
        fair = self._classes[slo_class].weight / weights if weights > 0.0 else 1.0
        excess = used[slo_class] / sum(used.values()) / max(fair, 1e-6)
        return math.sqrt(min(2.0, max(1.0, excess)))

    def kept_back(self, slo_class: str, now: float) -> float:
        """Share of capacity that is reserved for other classes and not used by them now."""
        kept, total = 0.0, -1.0
        for name, other in self._classes.items():
            if name != slo_class and other.reserved > 0.0:
                if total < 0.0:
                    total = sum([self._of_class(known, now) for known in self._classes])
                used = self._of_class(name, now) / total if total > 0.0 else 0.0
                kept += max(0.0, other.reserved - used)
        return min(kept, 0.9)

    def _of_class(self, slo_class: str, now: float) -> float:
        seconds, since = self._given.get(slo_class, (0.0, now))
        return seconds * math.exp2((since - now) / HALF_LIFE_S)


def admit(
    request: PendingRequest,
    estimates: Sequence[ReplicaEstimate],
    cached: Mapping[str, int],
    slo_class: SloClass,
    usage: TenantUsage,
    now: float,
    age_s: float = 0.0,
    waiting_s: float = 0.0,
    others_wait: bool = False,
) -> AdmissionDecision:
    """Promise, relegate, or raise Refusal.

    What would fit if more of a replica's groups ran is accepted without a promise in any class.
    `cached`: prompt tokens in the prefix cache of each replica, by name. `age_s`: seconds since the
    request arrived; the earliest TTFT in a refusal counts from arrival. `waiting_s`: work of the
    tenant that waits without a promise; `others_wait`: whether some of others does.
    """
    usage.ask(request.tenant, slo_class.weight, now)
    estimates = [estimate for estimate in estimates if estimate.known and not estimate.closed]
    if not estimates:
        raise Refusal(
            "no_replica",
            "no replica of this model is connected: retry, or start one",
            retry_after_s=5.0,
        )
    inflation = usage.inflation(request.slo_class, now)
    inflation /= 1.0 - usage.kept_back(request.slo_class, now)
    able = [estimate for estimate in estimates if estimate.can_ever(request)]
    if not able:
        raise _never(request, estimates)
    _check_tpot(request, able, slo_class.when_infeasible == "relegate")
    by_name = {estimate.name: estimate for estimate in able}
    tpot_s: list[float] = []  # that the request would get, of each offer so far

    def is_steady(offer: PlacementOption) -> bool:
        estimate = by_name[offer.replica]
        tpot_s.append(offered_tpot_s(estimate, request, offer, slo_class.slo.tpot_s, now))
        return tpot_s[-1] <= request.tpot_s

    offers = best_first(request, able, cached, now, inflation)
    first = next(offers)
    steady = filter(is_steady, itertools.chain([first], offers))  # more only if they are needed
    best = next(steady, None)
    paced, best = best is not None, best or first
    fits, load = best.fits and paced, by_name[best.replica].load
    work_s = best.work_s * load.share
    wait_s = usage.wait_s(request.tenant, work_s, estimates, waiting_s, best.taken_s)
    if fits and not wait_s:
        return AdmissionDecision(best, best.firm)
    if slo_class.when_infeasible == "relegate":
        return AdmissionDecision(best, False, beyond_share=bool(wait_s) and usage.several)
    if fits:
        left = 1.0 if others_wait else max(LEAST_LEFT, 1.0 - _promised_part(estimates))
        if waiting_s / left / len(estimates) + best.work_s <= request.due_s - now:
            return AdmissionDecision(best, False, beyond_share=usage.several)
        raise Refusal(
            "rate_limit_exceeded",
            f"tenant {request.tenant} was promised its share of the replicas already, and the "
            f"prompt takes {work_s:.2f} s: retry in {wait_s:.0f} s, or choose a class that "
            "relegates",
            retry_after_s=wait_s,
        )
    if not paced:
        raise Refusal(
            "overloaded",
            f"time per output token would be {least_tpot_ms(min(tpot_s)):g} ms, target "
            f"{1e3 * request.tpot_s:g} ms: retry later, or ask for that or more",
            retry_after_s=retry_after_s(estimates),
            least_tpot_s=min(tpot_s),
        )
    if not best.roomy:
        raise Refusal(
            "overloaded",
            f"the request needs {best.pages} pages of KV cache and {max(0, best.free_pages)} are "
            "free: retry later",
            retry_after_s=retry_after_s(estimates),
        )
    all_steady = [best, *steady]
    earliest_s = age_s + min(offer.earliest_s for offer in all_steady if offer.roomy)
    raise Refusal(
        "deadline_infeasible",
        f"first token due in {request.due_s - now + age_s:.2f} s, earliest that can be promised "
        f"is {earliest_s:.2f} s: ask for a later deadline or choose a class that relegates",
        earliest_ttft_s=earliest_s,
        idle_ttft_s=min(offer.needed_s for offer in all_steady),
    )


def _promised_part(estimates: Sequence[ReplicaEstimate]) -> float:
    """Return the part of the replicas' time that was promised in the last seconds or minutes.

    The larger one: of short prompts in the last seconds, or of all prompts in the last minutes.
    """
    reported = [estimate.reported_s() for estimate in estimates]
    replicas = max(1e-9, sum([estimate.load.share for estimate in estimates]))
    recent_s = sum([short_s for _, short_s in reported]) / SHORT_MEMORY_S
    return max(recent_s, sum([seconds for seconds, _ in reported]) / MEMORY_S) / replicas


def attainable_tpot_s(class_tpot_s: float, least_s: float) -> float:
    """The TPOT target of a request without one of its own.

    A class has one target for all prompt lengths and replicas. Where no replica can keep it, the
    target is the least that one can keep (`least_tpot_s`), with a little room.
    """
    return max(class_tpot_s, TPOT_ROOM * least_s)


def least_tpot_ms(least_s: float) -> float:
    """Milliseconds, rounded up, so that a target of that number is accepted."""
    return math.ceil(1e6 * least_s) / 1e3


def _check_tpot(
    request: PendingRequest, estimates: Sequence[ReplicaEstimate], relegates: bool
) -> None:
    """Raise Refusal if no replica can keep the TPOT target of the request.

    A class that relegates takes what an idle replica gives, without a promise.
    """
    tokens = request.prompt_tokens
    if request.max_output_tokens == 1 or any(
        request.tpot_s >= estimate.least_tpot_s(tokens, idle=relegates) for estimate in estimates
    ):
        return
    had_s = min(estimate.least_tpot_s(tokens) for estimate in estimates)
    raise Refusal(
        "tpot_infeasible",
        f"{TPOT_HEADER} is {1e3 * request.tpot_s:g}: after a prompt of "
        f"{tokens} tokens at least {least_tpot_ms(had_s):g} ms per output "
        "token can be had; ask for that or more, or leave the header out",
        least_tpot_s=had_s,
    )


def retry_after_s(estimates: Sequence[ReplicaEstimate]) -> float:
    """Whole seconds, 1 to 30, until the least loaded replica has drained what it holds."""
    waits = [
        estimate.pending_s / max(estimate.load.drain_s_per_s, 1e-3)
        for estimate in estimates
        if estimate.known and not estimate.closed
    ]
    return float(min(30, max(1, math.ceil(min(waits, default=30.0)))))


def _never(request: PendingRequest, estimates: Sequence[ReplicaEstimate]) -> Refusal:
    """Refusal of a request that no replica can ever hold, with both numbers."""
    tokens = request.prompt_tokens + request.max_output_tokens
    context = max(estimate.max_context_tokens for estimate in estimates)
    pages = max(estimate.most_tokens() for estimate in estimates)
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
