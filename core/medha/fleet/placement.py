"""Placement: a replica that keeps the promise, where a prompt delays the least and ends first.

Decides from the last Load of each replica, the requests placed there since, and prefix hits.

    PendingRequest ──assess──► a PlacementOption for each ReplicaEstimate ──place──► the best one

`ReplicaEstimate.update` takes a Load over. Between two Loads, `hold` counts a placed request in the
margins, pages and pending work. The replica itself chooses the KVP groups of a request; placement
only checks that enough groups can be had. `now` is an argument, and nothing is sent.
"""

from __future__ import annotations

import bisect
import heapq
import math
import operator
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from medha.config import Scheduling
from medha.fleet.margins import NO_ANSWER, AnswerTime, Margins
from medha.messages import Load
from medha.predictor import Predictor
from medha.prefill_times import PrefillTimes, slowed
from medha.tenants import SHORT_MEMORY_S, TenantWork, is_short

FIRST_STEP = 1 << 14
ANSWER_TOKENS = 100
"""Tokens of an answer that count where replicas are compared."""
BUDGET_STEP, MAX_FACTORS = 1.1, 256
"""Budgets that answers may bring are of steps like this."""
LEAST_REST = 0.05
"""Part of their time that decodes leave to prefills at least, as the delay of an answer counts."""
ANSWER_GUARD = 1.25
"""By which the delay of an answer counts for more: deeper prompts lose more by short batches."""
ALL_GROUPS = -1
ROUNDING_S = 1e-4
"""More than the sums of a Load are below 0, or differ by the order of adding."""
MAX_TIMES = 8
"""Budgets for which a replica's times of prefills are remembered."""


Rank = tuple[bool, bool, float, float, float, str]


class PendingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to place. `due_s`: deadline of its first token on the caller's clock."""

    id: str
    prompt_tokens: int
    max_output_tokens: int = 1
    due_s: float
    tpot_s: float = 0.03
    slo_class: str = "default"
    tenant: str = ""
    beyond_share: bool = False


class Held(msgspec.Struct, frozen=True):
    """A placed request that no Load counts yet: work in seconds, pages of its whole length.

    `charge_s`: what the Load will count for its tenant; `decode_s`: what its decode takes of a
    batch. `answer`, `elsewhere`, `group`: as in PlacementOption.
    """

    due_s: float
    work_s: float
    pages: int
    promised: bool
    tenant: str = ""
    charge_s: float = 0.0
    decode_s: float = 0.0
    beyond_share: bool = False
    group: int = ALL_GROUPS
    answer: AnswerTime = NO_ANSWER
    elsewhere: AnswerTime = NO_ANSWER


class PlacementOption(msgspec.Struct, frozen=True, kw_only=True):
    """Offer of one replica for a request; times are seconds from now.

    `fits`: a promise for the deadline breaks no other promise. `earliest_s`: the earliest TTFT that
    could be promised, `needed_s` the same on an idle replica. `finish_s`: the expected time of the
    first token. `work_s`: prefill seconds after `cached_tokens`, `cost_s` as promises count them.
    `decode_s`: what the decode takes of a batch.
    `roomy`: the pages of the request are free now. `group`: which list of margins in the Load a
    promise is counted in, or ALL_GROUPS. `clear_s`: of a long prompt, when the replica would have
    done it and all else that it has, or its deadline if that is sooner; 0 of a short one.
    `answer_s`: `finish_s` and by how much the decodes of the replica delay the answer. `answer`:
    what it takes from prefills, `taken_s` of this what counts for its tenant at once; `elsewhere`:
    what it takes in other groups, whose batches its TPOT shortens, too.
    """

    replica: str
    cached_tokens: int
    work_s: float
    cost_s: float
    needed_s: float
    finish_s: float
    earliest_s: float
    fits: bool
    roomy: bool
    pages: int
    free_pages: int
    decode_s: float = 0.0
    group: int = ALL_GROUPS
    clear_s: float = 0.0
    answer_s: float = 0.0
    answer: AnswerTime = NO_ANSWER
    elsewhere: AnswerTime = NO_ANSWER
    taken_s: float = 0.0

    def first_s(self, promised: bool) -> float:
        """Expected time of the first token, for the slack of the request at arrival.

        Requests with less relative slack run first. A promised short prompt never waits for a long
        one, so the earliest possible promise counts if it is sooner. A request without a promise
        waits for all promised ones. It does not wait for the guard that a promise would need,
        because an idle replica has to keep that guard as well.
        """
        if promised:
            return min(self.finish_s, self.earliest_s)
        return max(self.finish_s, self.earliest_s - (self.needed_s - self.work_s))

    @property
    def rank(self) -> Rank:
        """Order among offers; the least is best.

        Offers that keep the promise, then those with free pages, then by `clear_s`, `answer_s`,
        free pages and name. The order is total. A long prompt may be first anywhere, but delays
        what waits there.
        """
        return (
            not self.fits,
            not self.roomy,
            self.clear_s,
            self.answer_s,
            -self.free_pages,
            self.replica,
        )


class _Cost(msgspec.Struct, frozen=True, gc=False):
    """Seconds of a prefill alongside decodes.

    `work_s`: in all; `cost_s`: of stage 0, as promises count it; `own_s`: what delays only the
    prompt itself, behind stage 0 and before a batch that the Load does not know ends.
    """

    work_s: float
    cost_s: float
    own_s: float
    is_long: bool


class Outline(msgspec.Struct, frozen=True):
    """The part of an offer that limits its rank; see PlacementOption.

    It takes a quarter of the time of the offer. `may_fit`: False if the promise certainly cannot be
    kept. `part` of the decode capacity runs alongside the prompt. `free_pages`: the offer may count
    fewer, of one group.
    """

    cached_tokens: int
    tokens: int
    groups: int
    part: float
    cost: _Cost
    may_fit: bool
    pages: int
    free_pages: int
    finish_s: float
    clear_s: float
    answer_s: float

    def rank(self, replica: str) -> Rank:
        """Least rank that the offer can have."""
        return (
            not self.may_fit,
            self.pages > self.free_pages,
            self.clear_s,
            self.answer_s,
            -self.free_pages,
            replica,
        )


def is_usable(load: Load) -> bool:
    """Return True if a reported load can be computed with."""
    seconds = (load.pending_s, load.ahead_s, load.predicted_tpot_s, *load.lead_s)
    pairs = (*load.pending_bands, *load.decode_parts, *load.spanning_parts)
    return (
        0.0 < load.share <= 2.0
        and load.page_tokens >= 1
        and 0.0 < load.budget_s < math.inf
        and 0.0 <= load.decode_capacity_s <= 2.0 * load.budget_s
        and 1.0 <= load.long_factor < math.inf
        and 0.0 < load.drain_s_per_s < math.inf
        and math.isfinite(load.decode_room_s)
        and len(load.lead_s) in (0, len(load.margins))
        and all(-1e-6 <= value < math.inf for value in seconds)
        and all(-1e-6 <= part < math.inf and not math.isnan(upto) for upto, part in pairs)
    )


class ReplicaEstimate:
    """Estimated state of one replica. Not thread-safe; `now` is the caller's clock."""

    def __init__(
        self,
        name: str,
        predictor: Predictor,
        max_context_tokens: int,
        min_batch_s: float = 0.01,
        max_batch_s: float = 0.1,
    ) -> None:
        self.name, self.predictor = name, predictor
        self.max_context_tokens = max_context_tokens
        self.min_batch_s, self.max_batch_s = min_batch_s, max_batch_s
        self._settings = Scheduling(min_batch_s=min_batch_s, max_batch_s=max_batch_s)
        self._overhead_s = predictor.batch_s([(1, 0, False)])  # of one more batch
        self.closed = False
        self._most_tokens: int | None = None  # computed from the Load when it is needed
        self._take(Load(), 0.0)
        self._held: dict[str, Held] = {}
        self._accepted: set[str] = set()
        self._promised_work: dict[str, TenantWork] = {}  # by tenant, as reported
        self._held_work: dict[tuple[str, bool], float] = {}  # by tenant and whether short
        self._drain_s = (predictor.topology.spp - 1) * max_batch_s
        self._margins = [Margins(self._drain_s)]  # as many as lists in the Load
        self._reference_budgets_s: dict[float, float] = {}  # by TPOT of a class
        self._factors: dict[tuple[float, float], float] = {}  # of two budgets
        self._pages = 0
        self._pending_s = 0.0
        self._beyond_s = 0.0  # of these, beyond the share of their tenants
        self._decode_s = 0.0
        self._promises = 0  # of the requests that no Load counts
        self._promised_decode_s = 0.0
        self._stale = False
        # By budget and decode capacity of a Load, the latest last.
        self._prefill_times: dict[tuple[float, float], PrefillTimes] = {}

    def _times(self) -> PrefillTimes:
        """Times of prefills alongside decodes, in batches of the budget of the last Load.

        Budgets come back: a TPOT target is in force while its request runs.
        """
        key = self.load.budget_s, self.load.decode_capacity_s
        times = self._prefill_times.pop(key, None)
        if times is None or times.outdated:
            times = PrefillTimes(self.predictor, *key)
            if len(self._prefill_times) >= MAX_TIMES:
                del self._prefill_times[next(iter(self._prefill_times))]
        self._prefill_times[key] = times
        return times

    def reference_work_s(self, prompt_tokens: int, cached_tokens: int, tpot_s: float) -> float:
        """W: prefill seconds on this replica if it were idle, as default deadlines count them.

        Its batches are as short as that TPOT, the class's own, makes them alongside decodes.
        """
        budget_s = self._reference_budgets_s.get(tpot_s)
        if budget_s is None:
            budget_s = self._settings.reference_budget_s(tpot_s, self.predictor.topology.spp)
            self._reference_budgets_s[tpot_s] = budget_s
        return self.predictor.at_budget(budget_s).prefill_s(prompt_tokens, cached_tokens)

    def extend(self, tokens: int, tpot_s: float) -> None:
        """Extend the tables of prefill times to a length, which later forecasts look up.

        Time grows with the tokens beyond the longest prompt so far.
        """
        self.reference_work_s(tokens, 0, tpot_s)
        self._times().alongside_s(0, tokens, 0.0)

    def _take(self, load: Load, now: float) -> None:
        """Take over a Load, and what its pages mean.

        `kept`: the rule by which a context keeps pages. `capacity_pages`: pages of all groups,
        running or claimable. `_most_pages`: those that a request can hold, of one group if the
        window slides.
        """
        self.load, self._updated_s, self._most_tokens = load, now, None
        self.kept = self.predictor.shape.kept_pages(load.page_tokens)
        self.capacity_pages = sum(max(0, pages) for pages in load.total_pages)
        self.capacity_pages += load.claimable_pages
        own = max(load.total_pages, default=0)
        self._most_pages = own if self.kept.window_tokens else self.capacity_pages
        self._running_pages = [pages for pages in load.free_pages if pages >= 0]

    def update(self, load: Load, now: float) -> None:
        """Take a Load over. It counts the requests that were accepted before, so release them."""
        self._take(load, now)
        self._promised_work = {work.tenant: work for work in load.promised_work}
        for name in self._accepted:
            if (held := self._held.pop(name, None)) is not None:
                self._charge(held, -held.charge_s)
        self._accepted.clear()
        self._stale = True

    def hold(
        self, request: PendingRequest, option: PlacementOption, now: float, promised: bool
    ) -> None:
        """Count a placed request until a Load does."""
        self.release(request.id, now)
        charge_s = option.work_s * self.load.share + option.taken_s if promised else 0.0
        held = Held(
            request.due_s,
            option.cost_s,
            option.pages,
            promised,
            request.tenant,
            charge_s,
            option.decode_s,
            request.beyond_share and not promised,
            option.group,
            option.answer if promised else NO_ANSWER,
            option.elsewhere if promised else NO_ANSWER,
        )
        self._charge(held, charge_s)
        self._recounted()
        self._held[request.id] = held
        self._count(held, now)

    def accepted(self, id: str) -> None:
        """The replica accepted a request: the next Load counts it."""
        if id in self._held:
            self._accepted.add(id)

    def release(self, id: str, now: float) -> None:
        """Stop counting a request (aborted, failed, placed elsewhere). Unknown ids are ignored."""
        held = self._held.pop(id, None)
        if held is not None:
            self._charge(held, -held.charge_s)
            self._accepted.discard(id)
            self._stale = True

    def promised_work_s(self, tenant: str, short: bool) -> float:
        """Prefill seconds promised to a tenant, by all routers in the last minutes and held.

        `short`: of short prompts only.
        """
        total = self._held_work.get((tenant, True), 0.0)
        if not short:
            total += self._held_work.get((tenant, False), 0.0)
        reported = self._promised_work.get(tenant)
        return total if reported is None else total + reported.of(short)

    @property
    def known(self) -> bool:
        """A Load has arrived; before the first one, nothing can be placed here."""
        return bool(self.load.total_pages)

    @property
    def held(self) -> tuple[str, ...]:
        """Ids of placed requests that no Load counts yet."""
        return tuple(self._held)

    @property
    def pending_s(self) -> float:
        """Prefill seconds that the replica has or has been given."""
        self._recounted()
        return self.load.pending_s + self._pending_s

    def most_tokens(self) -> int:
        """Tokens of the longest request that the context limit and the pages allow."""
        if self._most_tokens is None:
            kept, longest, pages = self.kept, self.max_context_tokens, self._most_pages
            fits = kept.least(longest) <= pages
            self._most_tokens = longest if fits else pages * kept.page_tokens
        return self._most_tokens

    def pages_of(self, tokens: int, cached: int = 0) -> int:
        """Return the pages that a request takes if `cached` of its tokens are found."""
        kept, size = self.kept, self.load.page_tokens
        return min(-(-tokens // size) - cached // size, kept.pages(tokens), self._most_pages)

    def can_ever(self, request: PendingRequest) -> bool:
        """True if context limit, pages and groups of an empty replica could hold the request."""
        tokens = request.prompt_tokens + request.max_output_tokens
        return (
            tokens <= min(self.max_context_tokens, self.most_tokens())
            and groups_needed(tokens, self.predictor) <= self.predictor.topology.kvp_max
        )

    def assess(
        self, request: PendingRequest, now: float, cached_tokens: int = 0, inflation: float = 1.0
    ) -> PlacementOption:
        """Compute the offer of this replica.

        `inflation` ≥ 1 makes the work of the request count for more. Work is the time that it takes
        alongside the decodes that promises reckon with, and alongside relegated prefills.
        """
        outline = self.outline(request, now, cached_tokens, inflation)
        return self.complete(request, outline, now, inflation)

    def least_rank(self, request: PendingRequest, now: float, cached_tokens: int = 0) -> Rank:
        """Return a rank that the offer for a request cannot be below.

        It takes a third of the time of an outline.
        """
        if request.due_s <= now:  # then even `clear_s` is below 0
            return False, False, -math.inf, -math.inf, -math.inf, self.name
        self._recounted()
        load, least_s, most_s = self.load, 0.0, math.inf
        if not cached_tokens:
            least_s, most_s = self._times().bounds_s(request.prompt_tokens)
        slack, drains = -1.0, self.predictor.topology.spp - 1
        if most_s < math.inf:
            most_s = most_s / load.share + drains * min(most_s, load.budget_s)
            slack = (request.due_s - now - most_s) / max(most_s, 1e-3)
        ahead_s = max(load.ahead_s, self._before_s(slack, request.beyond_share)) - ROUNDING_S
        answer_s = ahead_s + least_s / load.share + drains * min(least_s, load.budget_s)
        answer_s += self._delay_s(request.max_output_tokens)
        return False, False, 0.0, answer_s, -math.inf, self.name

    def outline(
        self, request: PendingRequest, now: float, cached_tokens: int = 0, inflation: float = 1.0
    ) -> Outline:
        """Compute what ranks the offer of this replica; arguments as in `assess`."""
        self._recounted()
        tokens = request.prompt_tokens + request.max_output_tokens
        cached, load = min(cached_tokens, request.prompt_tokens - 1), self.load
        groups = groups_needed(tokens, self.predictor)
        part = self._decode_part(request.due_s, spans=groups > 1)
        cost = self._cost(cached, request.prompt_tokens, part, inflation, now)
        # Whether the promise holds is decided later; this only predicts what runs first.
        slack = (request.due_s - now - cost.work_s) / max(cost.work_s, 1e-3)
        ahead_s = max(load.ahead_s, self._before_s(slack, request.beyond_share))
        finish_s, clear_s = ahead_s + cost.work_s, 0.0
        if cost.is_long:
            queue_s = self._queue_s(request.beyond_share)
            clear_s = min(queue_s + cost.work_s, request.due_s - now)
        pages, free = self.pages_of(tokens, cached), self._free_pages(groups)
        may_fit = self._promises < load.free_places and not self.closed
        if not cached:  # else pages and work may be others
            in_time = request.due_s - now - cost.own_s >= cost.cost_s
            may_fit = may_fit and in_time and pages <= free
            if may_fit:  # without the answer, which only takes room
                rooms = self._rooms(request, cost, NO_ANSWER, now)
                may_fit = max(rooms) >= cost.cost_s - ROUNDING_S
        return Outline(
            cached,
            tokens,
            groups,
            part,
            cost,
            may_fit,
            pages,
            free,
            finish_s,
            clear_s,
            finish_s + self._delay_s(request.max_output_tokens),
        )

    def complete(
        self, request: PendingRequest, outline: Outline, now: float, inflation: float = 1.0
    ) -> PlacementOption:
        """Compute the rest of an offer: whether the promise holds, and from when on one would.

        Nothing may have changed since its outline.
        """
        cached, part, cost = outline.cached_tokens, outline.part, outline.cost
        own_s = self._decode_s_of(request) if request.max_output_tokens > 1 else 0.0
        decode_s, decode_fits = self._decode(own_s, cost.is_long)
        answer, shorter = self._answer(request, own_s, part, now + cost.work_s)
        room_s = min(self._rooms(request, cost, answer, now))
        needed, group = cost, ALL_GROUPS
        pages, free = outline.pages, outline.free_pages
        if len(self._margins) > 1 and outline.groups == 1:
            # Routers do not know where cached pages are: in any group, or computed in the roomiest.
            alone = self._cost(0, request.prompt_tokens, part, inflation, now) if cached else cost
            if not cached or room_s < cost.cost_s:
                rooms = self._rooms(request, alone, answer, now)
                held = [self._free_in(index) for index in range(len(rooms))]
                roomy = [index for index, left in enumerate(held) if left >= pages]
                group = max(roomy or range(len(rooms)), key=rooms.__getitem__)
                room_s, needed, free = rooms[group], alone, min(free, held[group])
        # Pages that would be found may be cached ones, which count as free, too.
        taken = self.pages_of(outline.tokens) if cached else pages
        fits = room_s >= needed.cost_s and taken <= free and decode_fits and not self.closed
        fits = fits and self._promises < self.load.free_places
        elsewhere = NO_ANSWER if group == ALL_GROUPS else shorter
        fits = fits and self._bear_elsewhere(group, elsewhere)
        margins = self._margins if group == ALL_GROUPS else [self._margins[group]]
        return PlacementOption(
            replica=self.name,
            cached_tokens=cached,
            work_s=cost.work_s,
            cost_s=needed.cost_s,
            needed_s=needed.cost_s + needed.own_s,
            finish_s=outline.finish_s,
            earliest_s=max(
                group_margins.earliest_s(needed.cost_s, needed.own_s, now, answer)
                for group_margins in margins
            ),
            fits=fits,
            roomy=pages <= free,
            pages=pages,
            free_pages=free,
            decode_s=decode_s,
            group=group,
            clear_s=outline.clear_s,
            answer_s=outline.answer_s,
            answer=answer,
            elsewhere=elsewhere,
            taken_s=self._taken_s(request, own_s),
        )

    def _taken_s(self, request: PendingRequest, own_s: float) -> float:
        """Return what an answer takes from prefills in its first seconds, as the Load will count.

        `own_s`: what its decode takes of a batch.
        """
        load, spp = self.load, self.predictor.topology.spp
        if not own_s or not load.decode_capacity_s:
            return 0.0
        planned_s = self._settings.planned_budget_s(request.tpot_s, spp)
        shortening = 1.0 - 1.0 / self._longer(planned_s) if planned_s > 0.0 else 0.0
        part = min(1.0, own_s / load.decode_capacity_s) + shortening
        return part * min(SHORT_MEMORY_S, request.max_output_tokens * request.tpot_s)

    def _delay_s(self, output_tokens: int) -> float:
        """Return by how much an answer ends later than without the decodes that run here.

        What an idle replica takes is left out, so that of two equal replicas the one whose profile
        was measured on a busy machine still gets its part.
        """
        spp = self.predictor.topology.spp
        running_s = max(0.0, self.load.predicted_tpot_s / spp - self._overhead_s)
        return min(output_tokens - 1, ANSWER_TOKENS) * (running_s + spp * self._decode_s)

    def _decode_part(self, due_s: float, *, spans: bool) -> float:
        """Return the part of the decode capacity that runs alongside a prompt until it is due."""
        parts = (spans and self.load.spanning_parts) or self.load.decode_parts
        due_in_s, last = due_s - self._updated_s, len(parts) - 1
        at = bisect.bisect_left(parts, due_in_s, key=operator.itemgetter(0))
        part = parts[min(at, last)][1] if parts else 0.0
        if self._promised_decode_s and self.load.decode_capacity_s:
            part += self._promised_decode_s / self.load.decode_capacity_s
        return min(part, 1.0)

    def _answer(
        self, request: PendingRequest, own_s: float, part: float, first_s: float
    ) -> tuple[AnswerTime, AnswerTime]:
        """Return what an answer takes from prefills alongside decodes that take `part`.

        Its TPOT may shorten the batches, and of each its decode takes `own_s`; in other groups they
        only become shorter. A token passes all stages. From the first answer of a replica on,
        promises count on batches as short.
        """
        load, spp = self.load, self.predictor.topology.spp
        if not own_s:
            return NO_ANSWER, NO_ANSWER
        planned_s = self._settings.planned_budget_s(request.tpot_s, spp)
        budget_s = load.budget_s
        if 0.0 < planned_s < budget_s:
            steps = math.ceil(math.log(budget_s / planned_s, BUDGET_STEP) - 0.01)
            budget_s /= BUDGET_STEP**steps
        rest_s = budget_s * (1.0 - part * load.decode_capacity_s / load.budget_s)
        rest_s = max(rest_s, 1e-6)
        left_s = max(rest_s - own_s, LEAST_REST * rest_s)
        longer = self._longer(budget_s)
        lasts_s = (request.max_output_tokens - 1) * spp * budget_s
        if not load.decode_capacity_s:  # nothing has decoded yet
            lasts_s = math.inf
        taken, shorter = longer * rest_s / left_s - 1.0, longer - 1.0
        return (
            AnswerTime(ANSWER_GUARD * taken, first_s, lasts_s),
            AnswerTime(ANSWER_GUARD * shorter, first_s, lasts_s),
        )

    def _bear_elsewhere(self, group: int, elsewhere: AnswerTime) -> bool:
        """Return whether the promises of all other groups hold in shorter batches."""
        if not elsewhere.part:
            return True
        others = (margins for at, margins in enumerate(self._margins) if at != group)
        return all(margins.bears(elsewhere) for margins in others)

    def _longer(self, budget_s: float) -> float:
        """Return by which factor a long prefill takes longer in batches of that budget."""
        now_s = self.load.budget_s
        if budget_s >= now_s:
            return 1.0
        factor = self._factors.get((now_s, budget_s))
        if factor is None:
            if len(self._factors) >= MAX_FACTORS:
                self._factors.clear()
            factor = self._factors[now_s, budget_s] = slowed(self.predictor, now_s, budget_s)
        return factor

    def _decode_s_of(self, request: PendingRequest) -> float:
        """Return the seconds that the decode of a request takes of a batch."""
        groups = max(1, groups_needed(request.prompt_tokens, self.predictor))
        keys = -(-request.prompt_tokens // groups)
        return self.predictor.decode_s(keys, groups) / self.predictor.topology.spp

    def _cost(self, start: int, end: int, part: float, inflation: float, now: float) -> _Cost:
        """Return what tokens `start` .. `end` of a prompt cost alongside decodes.

        The batch in flight is known from the Load. Of a later one, half is left in the mean.
        Behind stage 0, a promise needs at least what the replica reckons with, less half a batch:
        the replica withdraws a promise that it sees overrun by a whole one.
        """
        load = self.load
        busy_s = self._times().alongside_s(start, end, part)
        drain_s = (self.predictor.topology.spp - 1) * min(busy_s, load.budget_s)
        reckoned_s = max(drain_s, self._drain_s - 0.5 * self.max_batch_s)
        is_long = busy_s > 8.0 * self.max_batch_s
        if is_long:
            inflation *= load.long_factor
        share_s = busy_s / load.share
        known = now <= self._updated_s + max(load.lead_s, default=0.0)
        rest_s = 0.0 if known else 0.5 * min(load.budget_s, self.max_batch_s)
        cost_s = share_s * inflation + self._overhead_s
        return _Cost(share_s + drain_s, cost_s, reckoned_s + rest_s, is_long)

    def _rooms(
        self, request: PendingRequest, cost: _Cost, answer: AnswerTime, now: float
    ) -> list[float]:
        """Return the seconds of work that fit with all promises, for each list of margins."""
        return [
            margins.room_s(request.due_s, cost.own_s, now, cost.cost_s, answer)
            for margins in self._margins
        ]

    def _decode(self, decode_s: float, is_long: bool) -> tuple[float, bool]:
        """The part of a batch that the decode takes, and whether the decode capacity holds it.

        Decodes that run now have ended long before the first token of a long prompt.
        """
        if not decode_s or not self.load.decode_capacity_s:
            return 0.0, True
        if is_long:
            return decode_s, decode_s <= self.load.decode_capacity_s
        return decode_s, decode_s + self._promised_decode_s <= self.load.decode_room_s

    def predicted_tpot_s(self, request: PendingRequest) -> float:
        """TPOT of the running decodes with the request among them."""
        with_request = self.predictor.batch_s([(1, request.prompt_tokens, True)])
        empty = self.predictor.batch_s([(1, 0, True)])
        return max(self.load.predicted_tpot_s, empty) + with_request - empty

    def tpot_s(
        self, request: PendingRequest, option: PlacementOption, class_tpot_s: float, now: float
    ) -> float:
        """TPOT that the request would get here, its target if that can be kept.

        Never below what can be kept alongside prefills. A target below that of its class shortens
        all batches until the answer ends, which is not known: it is kept if all promises hold in
        such batches, as the replica decides, too.
        """
        paced_s = self.predicted_tpot_s(request) if self.load.decoding else 0.0
        if request.max_output_tokens > 1:
            paced_s = max(paced_s, self.least_tpot_s(request.prompt_tokens))
        if request.tpot_s < class_tpot_s and request.max_output_tokens > 1:
            spp, settings = self.predictor.topology.spp, self._settings
            planned_s = settings.planned_budget_s(request.tpot_s, spp)
            tighter = 0.0 < planned_s < self.load.budget_s
            if tighter and not self._holds_in(planned_s, request, option, now):
                in_force_s = spp * self.load.budget_s / (1.0 - settings.plan_guard)
                paced_s = max(paced_s, min(class_tpot_s, in_force_s))
        return max(request.tpot_s, paced_s)

    def _holds_in(
        self, budget_s: float, request: PendingRequest, option: PlacementOption, now: float
    ) -> bool:
        """Return whether all promises and the offer would hold in batches of a smaller budget."""
        answer = AnswerTime(ANSWER_GUARD * (self._longer(budget_s) - 1.0), now, math.inf)
        cost_s, own_s, group = option.cost_s, option.needed_s - option.cost_s, option.group
        for margins in self._margins if group == ALL_GROUPS else [self._margins[group]]:
            left_s = margins.room_s(request.due_s, own_s, now, cost_s, answer) - cost_s
            delay_s = answer.delay_s(request.due_s - own_s - left_s) if option.clear_s else 0.0
            if left_s < delay_s:
                return False
        return all(margins.bears(answer) for margins in self._margins)

    def least_tpot_s(self, prompt_tokens: int, *, idle: bool = False) -> float:
        """Smallest TPOT target that the replica can promise after a prompt of that length.

        `idle`: that it can give without prefills.
        """
        shortest_s = 0.0 if idle else self.min_batch_s
        return least_tpot_s(prompt_tokens, self.predictor, shortest_s)

    def _recounted(self) -> None:
        """Recompute the margins from the Load and the held requests.

        Updates are more frequent than queries, so this runs at the next query.
        """
        if not self._stale:
            return
        self._stale = False
        reported = self.load.margins or ((),)
        lead_s = self.load.lead_s or (0.0,) * len(reported)
        self._margins = [Margins(self._drain_s) for _ in reported]
        promises = [held for held in self._held.values() if held.promised]
        for group, margins in enumerate(self._margins):
            here = [held for held in promises if self._is_in(held, group)]
            work = sorted((held.due_s, held.work_s) for held in here)
            margins.recount(reported[group], self._updated_s, work, lead_s[group])
            for held in here:
                margins.delay(held.due_s, held.answer)
            for held in promises if len(here) < len(promises) else ():
                if not self._is_in(held, group):
                    margins.delay(-math.inf, held.elsewhere)
        self._pages = sum(held.pages for held in self._held.values())
        self._pending_s = sum(held.work_s for held in self._held.values())
        self._beyond_s = sum(held.work_s for held in self._held.values() if held.beyond_share)
        self._decode_s = sum(held.decode_s for held in self._held.values())
        self._promises = len(promises)
        self._promised_decode_s = sum(held.decode_s for held in promises)

    def _is_in(self, held: Held, group: int) -> bool:
        """Return whether a promise is counted in the margins of a group: its own, or all."""
        return held.group == group or not 0 <= held.group < len(self._margins)

    def _charge(self, held: Held, seconds: float) -> None:
        """Add to the held promises of a tenant."""
        key = held.tenant, is_short(held.charge_s)
        total = self._held_work.get(key, 0.0) + seconds
        if total > 1e-9:
            self._held_work[key] = total
        else:
            self._held_work.pop(key, None)

    def _count(self, held: Held, now: float) -> None:
        self._pages += held.pages
        self._pending_s += held.work_s
        self._beyond_s += held.work_s if held.beyond_share else 0.0
        self._decode_s += held.decode_s
        if not held.promised:
            return
        self._promises += 1
        self._promised_decode_s += held.decode_s
        for group, margins in enumerate(self._margins):
            if self._is_in(held, group):
                margins.add(held.due_s, held.work_s, now, held.answer)
            else:
                margins.delay(-math.inf, held.elsewhere)

    def _before_s(self, slack: float, beyond_share: bool) -> float:
        """Pending seconds with less relative slack than `slack`, by the bands of the Load.

        What is beyond the share of its tenant runs after all else.
        """
        if beyond_share:
            return self.pending_s
        before = self._pending_s - self._beyond_s
        for upto, seconds in self.load.pending_bands:
            if upto > slack:
                break
            before += seconds
        return before

    def _queue_s(self, beyond_share: bool) -> float:
        """Pending seconds of a group that can still be in time, as if all had the same."""
        groups = max(1, len(self._running_pages))
        if beyond_share:
            return max(0.0, self.pending_s) / groups
        late_s = sum(seconds for upto, seconds in self.load.pending_bands if upto <= 0.0)
        return max(0.0, self.pending_s - self._beyond_s - late_s) / groups

    def _free_in(self, group: int) -> int:
        """Free pages of one running group, which placed requests may all take."""
        running = self._running_pages
        if group >= len(running):
            return 0
        held = sum(held.pages for held in self._held.values() if held.group in (group, ALL_GROUPS))
        return running[group] - held

    def _free_pages(self, groups: int) -> int:
        """Free pages of the roomiest group, or of all groups if the request spans several."""
        running = self._running_pages
        if groups > 1:
            return sum(running) + self.load.claimable_pages - self._pages
        most = max(running, default=0)
        spare = sum(running) - most
        return most - max(0, self._pages - spare)


def forecast_steps(tokens: int) -> Iterator[int]:
    """Yield the lengths to which `extend` takes about as long each, up to that of a prompt."""
    step = min(FIRST_STEP, tokens)
    yield step
    while step < tokens:
        step = min(step + step // 2, tokens)
        yield step


def groups_needed(tokens: int, predictor: Predictor) -> int:
    """KVP groups that a sequence of `tokens` spans: ceil(n / tokens_per_group)."""
    if predictor.topology.kvp_max == 1:
        return 1
    return -(-tokens // predictor.tokens_per_group)


def least_tpot_s(prompt_tokens: int, predictor: Predictor, min_batch_s: float) -> float:
    """Smallest TPOT of the first tokens of a sequence, alone but for prefills on a replica.

    A token passes every stage, in batches that prefills fill up to `min_batch_s`. The groups that
    the context may grow to share the work of its decode.
    """
    topology = predictor.topology
    groups = max(1, min(topology.kvp_max, groups_needed(prompt_tokens, predictor)))
    load = predictor.load()
    load.add_decode(-(-prompt_tokens // groups), groups)
    return topology.spp * max(load.seconds(), min_batch_s)


def best_first(
    request: PendingRequest,
    estimates: Iterable[ReplicaEstimate],
    cached: Mapping[str, int],
    now: float,
    inflation: float = 1.0,
) -> Iterator[PlacementOption]:
    """Yield the offers of all replicas that could ever hold the request, by rank.

    Of each replica a least rank is computed first, then an outline, then the offer, while no other
    can be better: often one offer only. No estimate may change meanwhile.
    """
    heap: list[tuple[Rank, ReplicaEstimate, Outline | PlacementOption | None]] = [
        (estimate.least_rank(request, now, cached.get(estimate.name, 0)), estimate, None)
        for estimate in estimates
        if estimate.known and not estimate.closed and estimate.can_ever(request)
    ]
    heapq.heapify(heap)
    while heap:
        _, estimate, computed = heap[0]
        if isinstance(computed, PlacementOption):
            heapq.heappop(heap)
            yield computed
        elif computed is None:
            name = estimate.name
            outline = estimate.outline(request, now, cached.get(name, 0), inflation)
            heapq.heapreplace(heap, (outline.rank(name), estimate, outline))
        else:
            offer = estimate.complete(request, computed, now, inflation)
            heapq.heapreplace(heap, (offer.rank, estimate, offer))


def place(
    request: PendingRequest,
    estimates: Iterable[ReplicaEstimate],
    cached: Mapping[str, int],
    now: float,
    inflation: float = 1.0,
) -> PlacementOption | None:
    """The best offer; None if no replica could ever hold the request."""
    return next(best_first(request, estimates, cached, now, inflation), None)
