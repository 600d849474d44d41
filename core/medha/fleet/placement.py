"""Placement: the replica that keeps the promise, where a prompt delays the least and ends first.

Decides from the estimates of the replicas and prefix hits. Of each replica (docs/adr/0047):

    least_rank ──► outline ──► with_answer ──► complete     each step while its rank is the least

The replica itself chooses the KVP groups of a request; placement only checks that enough groups can
be had. `now` is an argument, and nothing is sent.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from medha.fleet.offers import (
    ALL_GROUPS,
    NO_ANSWER,
    AnswerTime,
    Cost,
    Outline,
    PendingRequest,
    PlacementOption,
    Rank,
)
from medha.fleet.replica_estimate import ReplicaEstimate
from medha.tenants import SHORT_MEMORY_S

ANSWER_TOKENS = 100
"""Tokens of an answer that count where replicas are compared."""
BUDGET_STEP = 1.1
"""Budgets that answers may bring are of steps like this."""
LEAST_REST = 0.05
"""Part of their time that decodes leave to prefills at least, as the delay of an answer counts."""
ANSWER_GUARD = 1.25
"""By which the delay of an answer counts for more: deeper prompts lose more by short batches."""
MOST_FOR_OTHERS = 0.25
"""Room that a long prompt leaves for short ones of other tenants while it runs, as a part of its
work: half of what it leaves anyway if it is due in 1.5 times that, as by default."""
ROUNDING_S = 1e-4
"""More than the sums of a Load are below 0, or differ by the order of adding."""


def place(
    request: PendingRequest,
    estimates: Iterable[ReplicaEstimate],
    cached: Mapping[str, int],
    now: float,
    inflation: float = 1.0,
) -> PlacementOption | None:
    """The best offer; None if no replica could ever hold the request."""
    return next(best_first(request, estimates, cached, now, inflation), None)


def best_first(
    request: PendingRequest,
    estimates: Iterable[ReplicaEstimate],
    cached: Mapping[str, int],
    now: float,
    inflation: float = 1.0,
) -> Iterator[PlacementOption]:
    """Yield the offers of all replicas that could ever hold the request, by rank.

    Of several replicas, a least rank is computed first, then an outline, its answer, then the
    offer, while no other can be better: mostly one offer only. No estimate may change meanwhile.
    """
    able = [
        estimate
        for estimate in estimates
        if estimate.known and not estimate.closed and estimate.can_ever(request)
    ]
    if len(able) == 1:
        yield assess(able[0], request, now, cached.get(able[0].name, 0), inflation)
        return
    heap: list[tuple[Rank, ReplicaEstimate, Outline | PlacementOption | None]] = [
        (least_rank(estimate, request, now, cached.get(estimate.name, 0)), estimate, None)
        for estimate in able
    ]
    heapq.heapify(heap)
    while heap:
        _, estimate, computed = heap[0]
        if isinstance(computed, PlacementOption):
            heapq.heappop(heap)
            yield computed
        elif computed is None:
            name = estimate.name
            outlined = outline(estimate, request, now, cached.get(name, 0), inflation)
            heapq.heapreplace(heap, (outlined.rank(name), estimate, outlined))
        elif computed.may_fit and computed.answer is None:
            outlined = with_answer(estimate, request, computed, now)
            heapq.heapreplace(heap, (outlined.rank(estimate.name), estimate, outlined))
        else:
            offer = complete(estimate, request, computed, now, inflation)
            heapq.heapreplace(heap, (offer.rank, estimate, offer))


def assess(
    estimate: ReplicaEstimate,
    request: PendingRequest,
    now: float,
    cached_tokens: int = 0,
    inflation: float = 1.0,
) -> PlacementOption:
    """Compute the offer of a replica.

    `inflation` ≥ 1 makes the work of the request count for more. Work is the time that it takes
    alongside the decodes that promises reckon with, and alongside relegated prefills.
    """
    outlined = outline(estimate, request, now, cached_tokens, inflation)
    return complete(estimate, request, outlined, now, inflation)


def least_rank(
    estimate: ReplicaEstimate, request: PendingRequest, now: float, cached_tokens: int = 0
) -> Rank:
    """Return a rank that the offer for a request cannot be below.

    It takes a third of the time of an outline.
    """
    if request.due_s <= now:  # then even `clear_s` is below 0
        return False, False, -math.inf, -math.inf, -math.inf, estimate.name
    estimate.recount()
    load, least_s, most_s = estimate.load, 0.0, math.inf
    if not cached_tokens:
        least_s, most_s = estimate.times().bounds_s(request.prompt_tokens)
    slack, drains = -1.0, estimate.predictor.topology.spp - 1
    if most_s < math.inf:
        most_s = most_s / load.share + drains * min(most_s, load.budget_s)
        slack = (request.due_s - now - most_s) / max(most_s, 1e-3)
    ahead_s = max(load.ahead_s, estimate.before_s(slack, request.beyond_share)) - ROUNDING_S
    answer_s = ahead_s + least_s / load.share + drains * min(least_s, load.budget_s)
    answer_s += _delay_s(estimate, request.max_output_tokens)
    return False, False, 0.0, answer_s, -math.inf, estimate.name


def outline(
    estimate: ReplicaEstimate,
    request: PendingRequest,
    now: float,
    cached_tokens: int = 0,
    inflation: float = 1.0,
) -> Outline:
    """Compute what ranks the offer of a replica; arguments as in `assess`."""
    estimate.recount()
    tokens = request.prompt_tokens + request.max_output_tokens
    cached, load = min(cached_tokens, request.prompt_tokens - 1), estimate.load
    groups = estimate.groups_needed(tokens)
    part = estimate.decode_part(request.due_s, spans=groups > 1)
    cost = _cost(estimate, request, cached, part, inflation, now)
    # Whether the promise holds is decided later; this only predicts what runs first.
    slack = (request.due_s - now - cost.work_s) / max(cost.work_s, 1e-3)
    ahead_s = max(load.ahead_s, estimate.before_s(slack, request.beyond_share))
    finish_s, clear_s = ahead_s + cost.work_s, 0.0
    if cost.is_long:
        queue_s = estimate.queue_s(request.beyond_share)
        clear_s = min(queue_s + cost.work_s, request.due_s - now)
    pages, free = estimate.pages_of(tokens, cached), estimate.free_pages(groups)
    may_fit = estimate.held_promises < load.free_places and not estimate.closed
    if not cached:  # else pages and work may be others
        in_time = request.due_s - now - cost.own_s >= cost.cost_s
        may_fit = may_fit and in_time and pages <= free
    return Outline(
        cached,
        tokens,
        groups,
        part,
        cost,
        None,
        None,
        may_fit,
        pages,
        free,
        finish_s,
        clear_s,
        finish_s + _delay_s(estimate, request.max_output_tokens),
    )


def with_answer(
    estimate: ReplicaEstimate, request: PendingRequest, outlined: Outline, now: float
) -> Outline:
    """Compute whether the promise may fit with its answer, in a quarter of the offer's time."""
    cost, may_fit, rooms = outlined.cost, outlined.may_fit, None
    own_s, answer = _answer(estimate, request, outlined.part, now + cost.work_s)
    if not outlined.cached_tokens:
        rooms = _rooms(estimate, request, cost, answer, now)
        _, decode_fits = _decode(estimate, own_s, cost.is_long)
        may_fit = may_fit and decode_fits and max(rooms) >= cost.cost_s
    return msgspec.structs.replace(outlined, answer=(own_s, answer), rooms=rooms, may_fit=may_fit)


def complete(
    estimate: ReplicaEstimate,
    request: PendingRequest,
    outlined: Outline,
    now: float,
    inflation: float = 1.0,
) -> PlacementOption:
    """Compute the rest of an offer: whether the promise holds, and from when on one would.

    Nothing may have changed since its outline.
    """
    cached, part, cost = outlined.cached_tokens, outlined.part, outlined.cost
    own_s, answer = outlined.answer or _answer(estimate, request, part, now + cost.work_s)
    decode_s, decode_fits = _decode(estimate, own_s, cost.is_long)
    rooms = outlined.rooms or _rooms(estimate, request, cost, answer, now)
    room_s = min(rooms)
    needed, group = cost, ALL_GROUPS
    pages, free = outlined.pages, outlined.free_pages
    # Pages that would be found may be cached ones, which count as free, too.
    taken = estimate.pages_of(outlined.tokens) if cached else pages
    alone, lists = outlined.groups == 1, len(rooms)
    if (cached and estimate.predictor.topology.kvp_max > 1) or (alone and lists > 1):
        held = estimate.free_by_group()
        # Routers do not know where cached pages are: in any groups, or they are computed again.
        reuses = cached and room_s >= cost.cost_s and estimate.most_in_group(taken) <= min(held)
        if cached and not reuses and (len(held) > 1 or not alone):
            needed = _cost(estimate, request, 0, part, inflation, now)
            rooms = _rooms(estimate, request, needed, answer, now)
            room_s = min(rooms)
        if alone and lists > 1 and not reuses:
            roomy = [index for index, left in enumerate(held) if left >= taken]
            group = max(roomy or range(lists), key=rooms.__getitem__)
            room_s, free = rooms[group], min(free, held[group])
    fits = room_s >= needed.cost_s and taken <= free and decode_fits and not estimate.closed
    fits = fits and estimate.held_promises < estimate.load.free_places
    elsewhere = _elsewhere(estimate, group, _tpot_in_force_s(estimate, request)) if own_s else 0.0
    fits = fits and _bear_elsewhere(estimate, group, elsewhere, now)
    margins = estimate.margins if group == ALL_GROUPS else [estimate.margins[group]]
    return PlacementOption(
        replica=estimate.name,
        cached_tokens=cached,
        work_s=cost.work_s,
        cost_s=needed.cost_s,
        needed_s=needed.cost_s + needed.own_s,
        finish_s=outlined.finish_s,
        earliest_s=max(
            group_margins.earliest_s(needed.cost_s, needed.own_s, now, alongside, needed.others)
            for group_margins in margins
            for alongside in _alongside(estimate, needed, answer, now)
        ),
        fits=fits,
        firm=outlined.groups <= estimate.running_groups,
        roomy=pages <= free,
        pages=pages,
        free_pages=free,
        decode_s=decode_s,
        group=group,
        clear_s=outlined.clear_s,
        answer_s=outlined.answer_s,
        answer=answer,
        elsewhere=elsewhere,
        taken_s=_taken_s(estimate, request, own_s),
    )


def _cost(
    estimate: ReplicaEstimate,
    request: PendingRequest,
    cached: int,
    part: float,
    inflation: float,
    now: float,
) -> Cost:
    """Return what the tokens of a prompt after those cached cost alongside decodes.

    The batch in flight is known from the Load. Of a later one, half is left in the mean.
    Behind stage 0, a promise needs at least what the replica reckons with, less half a batch:
    the replica withdraws a promise that it sees overrun by a whole one. A first answer costs its
    own promise the short batches that it brings.
    """
    load = estimate.load
    end = request.prompt_tokens
    busy_s = estimate.times().alongside_s(cached, end, part)
    drain_s = (estimate.predictor.topology.spp - 1) * min(busy_s, load.budget_s)
    reckoned_s = max(drain_s, estimate.drain_s - 0.5 * estimate.max_batch_s)
    is_long = busy_s > 8.0 * estimate.max_batch_s
    others = 0.0
    if is_long:
        room, others = _room_left(estimate, request.tenant)
        inflation *= 1.0 + room
    share_s = busy_s / load.share
    known = now <= estimate.updated_s + max(load.lead_s, default=0.0)
    rest_s = 0.0 if known else 0.5 * min(load.budget_s, estimate.max_batch_s)
    if request.max_output_tokens > 1 and not load.decode_capacity_s:  # nothing has decoded yet
        tpot_s = _tpot_in_force_s(estimate, request)
        busy_s = max(busy_s, estimate.first_s(cached, end, tpot_s))
    cost_s = busy_s / load.share * inflation + estimate.overhead_s
    return Cost(share_s + drain_s, cost_s, reckoned_s + rest_s, is_long, others)


def _room_left(estimate: ReplicaEstimate, tenant: str) -> tuple[float, float]:
    """Return the room that a long prompt leaves for short ones to come: parts of its own work, and
    of the work before it.

    The Load counts those of all tenants. As many of them are of its own tenant as that was
    promised: it leaves those all while it runs. Others can count on MOST_FOR_OTHERS, and on all
    while it waits.
    """
    own_s = estimate.promised_work_s(tenant, True)
    all_s = sum(work.short_s for work in estimate.load.promised_work)
    room = estimate.load.long_factor - 1.0
    if own_s >= all_s:
        return room, 0.0
    part = own_s / all_s * room / (1.0 + room)
    own = part / (1.0 - part)
    return own + min(room - own, MOST_FOR_OTHERS), room - own


def _rooms(
    estimate: ReplicaEstimate, request: PendingRequest, cost: Cost, answer: AnswerTime, now: float
) -> list[float]:
    """Return the seconds of work that fit with all promises, for each list of margins."""
    rooms: list[float] = []
    for margins in estimate.margins:
        room_s = math.inf
        for alongside in _alongside(estimate, cost, answer, now):
            left_s = margins.room_s(
                request.due_s, cost.own_s, now, cost.cost_s, alongside, cost.others
            )
            room_s = min(room_s, left_s)
        rooms.append(room_s)
    return rooms


def _alongside(
    estimate: ReplicaEstimate, cost: Cost, answer: AnswerTime, now: float
) -> tuple[AnswerTime, ...]:
    """Return the answers: promises due later must hold alongside each.

    A long prompt leaves them the time of answers to come, which short prompts may use. Where the
    Load sets time aside for relegated prompts, its margins leave that time already.
    """
    load = estimate.load
    is_left = load.share < 1.0 - ROUNDING_S or not load.decode_capacity_s
    if is_left or not cost.is_long or not load.decode_parts:
        return (answer,)
    rest_s = max(load.budget_s - load.decode_parts[0][1] * load.decode_capacity_s, 1e-6)
    return answer, AnswerTime(load.budget_s / rest_s - 1.0, now, math.inf)


def _decode(estimate: ReplicaEstimate, decode_s: float, is_long: bool) -> tuple[float, bool]:
    """The part of a batch that the decode takes, and whether the decode capacity holds it.

    Decodes that run now have ended long before the first token of a long prompt.
    """
    if not decode_s or not estimate.load.decode_capacity_s:
        return 0.0, True
    if is_long:
        return decode_s, decode_s <= estimate.load.decode_capacity_s
    return decode_s, decode_s + estimate.promised_decode_s <= estimate.load.decode_room_s


def _answer(
    estimate: ReplicaEstimate, request: PendingRequest, part: float, first_s: float
) -> tuple[float, AnswerTime]:
    """Return what the decode of an answer takes of a batch, and the answer from prefills.

    `part`: what other decodes take. The answer's TPOT may shorten the batches, and its decode takes
    time of each. A token passes all stages. From the first answer of a replica on, promises count
    on batches as short.
    """
    load, spp = estimate.load, estimate.predictor.topology.spp
    own_s = estimate.decode_s(request) if request.max_output_tokens > 1 else 0.0
    if not own_s:
        return 0.0, NO_ANSWER
    budget_s = _answer_budget_s(estimate, _tpot_in_force_s(estimate, request))
    rest_s = max(estimate.prefill_s(budget_s) - part * load.decode_capacity_s, 1e-6)
    left_s = max(rest_s - own_s, LEAST_REST * rest_s)
    longer = estimate.longer(budget_s)
    lasts_s = (request.max_output_tokens - 1) * spp * budget_s
    if not load.decode_capacity_s:  # nothing has decoded yet
        lasts_s = math.inf
    taken = longer * rest_s / left_s - 1.0
    return own_s, AnswerTime(ANSWER_GUARD * taken, first_s, lasts_s)


def _tpot_in_force_s(estimate: ReplicaEstimate, request: PendingRequest) -> float:
    """Return the TPOT in force alongside an answer, as far as it matters.

    From the first answer of a replica on, that of the classes is in force, too.
    """
    if estimate.load.decode_capacity_s:
        return request.tpot_s
    return min(request.tpot_s, request.class_tpot_s)


def _answer_budget_s(estimate: ReplicaEstimate, tpot_s: float) -> float:
    """Return the budget of batches while an answer of that TPOT runs, in steps from the present."""
    budget_s = estimate.load.budget_s
    planned_s = estimate.settings.planned_budget_s(tpot_s, estimate.predictor.topology.spp)
    if 0.0 < planned_s < budget_s:
        steps = math.ceil(math.log(budget_s / planned_s, BUDGET_STEP) - 0.01)
        budget_s /= BUDGET_STEP**steps
    return budget_s


def _elsewhere(estimate: ReplicaEstimate, group: int, tpot_s: float) -> float:
    """Return the part by which a TPOT in one group makes prefills of other groups take longer."""
    if group == ALL_GROUPS:
        return 0.0
    return ANSWER_GUARD * (estimate.longer(_answer_budget_s(estimate, tpot_s)) - 1.0)


def _bear_elsewhere(estimate: ReplicaEstimate, group: int, elsewhere: float, now: float) -> bool:
    """Return whether the promises of all other groups hold in shorter batches."""
    if not elsewhere:
        return True
    others = (margins for at, margins in enumerate(estimate.margins) if at != group)
    return all(margins.bears(elsewhere, now) for margins in others)


def _taken_s(estimate: ReplicaEstimate, request: PendingRequest, own_s: float) -> float:
    """Return what an answer takes from prefills in its first seconds, as the Load will count.

    `own_s`: what its decode takes of a batch.
    """
    load, spp = estimate.load, estimate.predictor.topology.spp
    if not own_s or not load.decode_capacity_s:
        return 0.0
    planned_s = estimate.settings.planned_budget_s(request.tpot_s, spp)
    shortening = 1.0 - 1.0 / estimate.longer(planned_s) if planned_s > 0.0 else 0.0
    part = min(1.0, own_s / load.decode_capacity_s) + shortening
    return part * min(SHORT_MEMORY_S, request.max_output_tokens * request.tpot_s)


def _delay_s(estimate: ReplicaEstimate, output_tokens: int) -> float:
    """Return by how much an answer ends later than without the decodes that run here.

    What an idle replica takes is left out, so that of two equal replicas the one whose profile
    was measured on a busy machine still gets its part.
    """
    spp = estimate.predictor.topology.spp
    running_s = max(0.0, estimate.load.predicted_tpot_s / spp - estimate.overhead_s)
    return min(output_tokens - 1, ANSWER_TOKENS) * (running_s + spp * estimate.held_decode_s)


def offered_tpot_s(
    estimate: ReplicaEstimate,
    request: PendingRequest,
    option: PlacementOption,
    class_tpot_s: float,
    now: float,
) -> float:
    """TPOT that the request would get here, its target if that can be kept.

    Never below what can be kept alongside prefills. A target shortens all batches until the answer
    ends, which is not known: it is kept if all promises of other groups hold in such batches, and
    below that of its class all promises, as the replica decides, too.
    """
    paced_s = estimate.predicted_tpot_s(request) if estimate.load.decoding else 0.0
    if request.max_output_tokens > 1:
        paced_s = max(paced_s, estimate.least_tpot_s(request.prompt_tokens))
        spp, settings = estimate.predictor.topology.spp, estimate.settings
        planned_s, group = settings.planned_budget_s(request.tpot_s, spp), option.group
        if 0.0 < planned_s < estimate.load.budget_s:
            kept_s = spp * estimate.load.budget_s / (1.0 - settings.plan_guard)  # now in force
            holds = _bear_elsewhere(estimate, group, option.elsewhere, now)
            if request.tpot_s < class_tpot_s:
                holds = holds and _holds_in(estimate, planned_s, request, option, now)
                of_class = _elsewhere(estimate, group, class_tpot_s)
                if not holds and _bear_elsewhere(estimate, group, of_class, now):
                    kept_s = min(kept_s, class_tpot_s)
            if not holds:
                paced_s = max(paced_s, kept_s)
    return max(request.tpot_s, paced_s)


def _holds_in(
    estimate: ReplicaEstimate,
    budget_s: float,
    request: PendingRequest,
    option: PlacementOption,
    now: float,
) -> bool:
    """Return whether all promises and the offer would hold in batches of a smaller budget."""
    longer = ANSWER_GUARD * (estimate.longer(budget_s) - 1.0)
    answer = AnswerTime(longer, now, math.inf)
    cost_s, own_s, group = option.cost_s, option.needed_s - option.cost_s, option.group
    for margins in estimate.margins if group == ALL_GROUPS else [estimate.margins[group]]:
        left_s = margins.room_s(request.due_s, own_s, now, cost_s, answer) - cost_s
        delay_s = answer.delay_s(request.due_s - own_s - left_s) if option.clear_s else 0.0
        if left_s < delay_s:
            return False
    return all(margins.bears(longer, now) for margins in estimate.margins)
