"""Estimates of replicas: the last Load of each, and the requests placed there since.

`ReplicaEstimate.update` takes a Load over. Between two Loads, `hold` counts a placed request in the
margins, pages and pending work. `now` is an argument.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections import Counter
from collections.abc import Iterator

from medha.config import Scheduling
from medha.fleet.margins import Margins
from medha.fleet.offers import (
    ALL_GROUPS,
    NO_ANSWER,
    Held,
    PendingRequest,
    PlacementOption,
)
from medha.messages import Load
from medha.predictor import Predictor
from medha.prefill_times import PrefillTimes, decode_capacity_s, slowed
from medha.tenants import TenantWork, is_short

FIRST_STEP = 1 << 11
MAX_FACTORS = 256
"""Pairs of budgets for which the slowing of prefills is remembered."""
MAX_TIMES = 8
"""Budgets for which a replica's times of prefills are remembered."""


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
    """Estimated state of one replica. Not thread-safe; `now` is the caller's clock.

    `margins`: as many as lists in the Load. `held_promises`: promises that no Load counts yet;
    `promised_decode_s`, `held_decode_s`: what decodes of these, and of all that no Load counts,
    take of a batch. `recount` brings them up to date. `overhead_s`: of one more batch; `drain_s`:
    what the margins of a Load include.
    """

    def __init__(
        self,
        name: str,
        predictor: Predictor,
        max_context_tokens: int,
        min_batch_s: float = 0.01,
        max_batch_s: float = 0.1,
        max_running: int = 256,
    ) -> None:
        self.name, self.predictor = name, predictor
        self.max_context_tokens = max_context_tokens
        self.min_batch_s, self.max_batch_s = min_batch_s, max_batch_s
        self.max_running = max_running
        self.settings = Scheduling(min_batch_s=min_batch_s, max_batch_s=max_batch_s)
        self.overhead_s = predictor.batch_s([(1, 0, False)])
        self.closed = False
        self._most_tokens: int | None = None  # computed from the Load when it is needed
        self._current_times: PrefillTimes | None = None  # of the Load, once they are needed
        self._current_first: tuple[float, PrefillTimes | None] | None = None  # likewise, of a TPOT
        self._take(Load(), 0.0)
        self._held: dict[str, Held] = {}
        self._accepted: set[str] = set()
        self._promised_work: dict[str, TenantWork] = {}  # by tenant, as reported
        self._reported_s: tuple[float, float] | None = None  # of all tenants, once asked for
        self._held_work: dict[tuple[str, bool], float] = {}  # by tenant and whether short
        self.drain_s = (predictor.topology.spp - 1) * max_batch_s
        self.margins = [Margins(self.drain_s)]
        self._reference_budgets_s: dict[float, float] = {}  # by TPOT of a class
        self._reference_tokens: dict[float, int] = {}  # up to which `extend` was called
        self._capacities_s: dict[float, float] = {}  # by budget
        self._factors: dict[tuple[float, float], float] = {}  # of two budgets
        self._pages = 0
        self._pages_by_group: Counter[int] = Counter()  # of them, for a group or all
        self._pending_s = 0.0
        self._beyond_s = 0.0  # of these, beyond the share of their tenants
        self.held_decode_s = 0.0
        self.held_promises = 0
        self.promised_decode_s = 0.0
        self._stale = False
        # By budget and decode capacity of a Load, the latest last.
        self._prefill_times: dict[tuple[float, float], PrefillTimes] = {}

    def times(self) -> PrefillTimes:
        """Times of prefills alongside decodes, in batches of the budget of the last Load."""
        if self._current_times is None:
            load = self.load
            self._current_times = self._times_of(load.budget_s, load.decode_capacity_s)
        return self._current_times

    def first_s(self, start: int, end: int, tpot_s: float) -> float:
        """Return the time of a prompt that brings a replica its first answer; 0 without budgets."""
        times = self._first_times(tpot_s)
        return times.alongside_s(start, end, self.settings.decode_room) if times else 0.0

    def _first_times(self, tpot_s: float) -> PrefillTimes | None:
        """Return the tables of a prompt that brings a replica its first answer.

        From its acceptance on, the replica counts on batches as short as that TPOT makes them. None
        if batches have no budget.
        """
        if self._current_first is None or self._current_first[0] != tpot_s:
            self._current_first = tpot_s, self._find_first_times(tpot_s)
        return self._current_first[1]

    def _find_first_times(self, tpot_s: float) -> PrefillTimes | None:
        settings, predictor = self.settings, self.predictor
        budget_s = settings.planned_budget_s(tpot_s, predictor.topology.spp)
        if budget_s <= 0.0:
            return None
        return self._times_of(budget_s, self._capacity_s(budget_s))

    def prefill_s(self, budget_s: float) -> float:
        """Return the seconds of a batch that prefills could use if nothing decoded.

        The rest is what a batch takes for its first token: it reads all weights. Decodes of the
        whole capacity leave prefills `prefill_share` of it.
        """
        load = self.load
        capacity_s = load.decode_capacity_s if budget_s == load.budget_s else 0.0
        capacity_s = capacity_s or self._capacity_s(budget_s)
        return capacity_s / (1.0 - self.settings.prefill_share)

    def _capacity_s(self, budget_s: float) -> float:
        """Return the decode capacity of batches of that budget."""
        capacity_s = self._capacities_s.get(budget_s)
        if capacity_s is None:
            if len(self._capacities_s) >= MAX_TIMES:
                self._capacities_s.clear()
            share = self.settings.prefill_share
            capacity_s = decode_capacity_s(self.predictor, budget_s, share)
            self._capacities_s[budget_s] = capacity_s
        return capacity_s

    def _times_of(self, budget_s: float, capacity_s: float) -> PrefillTimes:
        """Return the tables of a budget. It may come back: a TPOT is in force for a while."""
        key = budget_s, capacity_s
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
            budget_s = self.settings.reference_budget_s(tpot_s, self.predictor.topology.spp)
            self._reference_budgets_s[tpot_s] = budget_s
        return self.predictor.at_budget(budget_s).prefill_s(prompt_tokens, cached_tokens)

    def extend(self, tokens: int, class_tpot_s: float | None, tpot_s: float) -> None:
        """Extend the tables of prefill times to a length, which later forecasts look up.

        Time grows with the tokens beyond the longest prompt so far. Without the TPOT of a class,
        reference work is left out. `tpot_s`: in force if this brings the replica's first answer.
        """
        if class_tpot_s is not None:
            self.reference_work_s(tokens, 0, class_tpot_s)
            longest = self._reference_tokens.get(class_tpot_s, 0)
            self._reference_tokens[class_tpot_s] = max(tokens, longest)
        for times in self._needed_times(tpot_s):
            times.extend(tokens)

    def is_extended(self, tokens: int, class_tpot_s: float | None, tpot_s: float) -> bool:
        """Return whether forecasts for that length only look up tables. Arguments as `extend`."""
        if class_tpot_s is not None and self._reference_tokens.get(class_tpot_s, 0) < tokens:
            return False
        return all(times.extended_tokens >= tokens for times in self._needed_times(tpot_s))

    def _needed_times(self, tpot_s: float) -> tuple[PrefillTimes, ...]:
        """Return the tables that a forecast may look up."""
        first = None if self.load.decode_capacity_s else self._first_times(tpot_s)
        return (first, self.times()) if first is not None else (self.times(),)

    def _take(self, load: Load, now: float) -> None:
        """Take over a Load, and what its pages mean.

        `kept`: the rule by which a context keeps pages. `capacity_pages`: pages of all groups,
        running or claimable; `_group_pages`: of one. `_most_pages`: those that a request can hold,
        of one group if the window slides.
        """
        self.load, self.updated_s, self._most_tokens = load, now, None
        self._current_times = self._current_first = None
        self.kept = self.predictor.shape.kept_pages(load.page_tokens)
        self.capacity_pages = sum(max(0, pages) for pages in load.total_pages)
        self.capacity_pages += load.claimable_pages
        self._group_pages = own = max(load.total_pages, default=0)
        self._most_pages = own if self.kept.window_tokens else self.capacity_pages
        self._running_pages = [pages for pages in load.free_pages if pages >= 0]

    def update(self, load: Load, now: float) -> None:
        """Take a Load over. It counts the requests that were accepted before, so release them."""
        self._take(load, now)
        self._promised_work = {work.tenant: work for work in load.promised_work}
        self._reported_s = None
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
            option.elsewhere if promised else 0.0,
        )
        self._charge(held, charge_s)
        self.recount()
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

    def reported_s(self) -> tuple[float, float]:
        """Return the prefill seconds that were promised to all tenants in the last minutes, and
        those of short prompts in the last seconds."""
        if self._reported_s is None:
            works = self._promised_work.values()
            self._reported_s = (
                sum([work.seconds for work in works]),
                sum([work.short_s for work in works]),
            )
        return self._reported_s

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
        self.recount()
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

    def groups_needed(self, tokens: int) -> int:
        """KVP groups that a sequence spans, by tokens and by pages."""
        if self.predictor.topology.kvp_max == 1:
            return 1
        by_pages = -(-self.pages_of(tokens) // max(1, self._group_pages))
        return max(groups_needed(tokens, self.predictor), by_pages)

    def most_in_group(self, pages: int) -> int:
        """Return how many of the pages of a request lie in one group, at most."""
        size = self.load.page_tokens
        return min(pages, self._group_pages, -(-self.predictor.tokens_per_group // size))

    def can_ever(self, request: PendingRequest) -> bool:
        """True if context limit, pages and groups of an empty replica could hold the request."""
        tokens = request.prompt_tokens + request.max_output_tokens
        return (
            tokens <= min(self.max_context_tokens, self.most_tokens())
            and groups_needed(tokens, self.predictor) <= self.predictor.topology.kvp_max
        )

    def most_together(self, request: PendingRequest) -> int:
        """Return how many such requests run at the same time if the replica has no others."""
        tokens = request.prompt_tokens + request.max_output_tokens
        groups, pages = self.groups_needed(tokens), self.pages_of(tokens)
        held = self.capacity_pages // max(1, pages)
        if groups <= 1:
            held = sum(max(0, own) // max(1, pages) for own in self.load.total_pages)
        return min(held, self.max_running)

    def decode_part(self, due_s: float, *, spans: bool) -> float:
        """Return the part of the decode capacity that runs alongside a prompt until it is due."""
        parts = (spans and self.load.spanning_parts) or self.load.decode_parts
        due_in_s, last = due_s - self.updated_s, len(parts) - 1
        at = bisect.bisect_left(parts, due_in_s, key=operator.itemgetter(0))
        part = parts[min(at, last)][1] if parts else 0.0
        if self.promised_decode_s and self.load.decode_capacity_s:
            part += self.promised_decode_s / self.load.decode_capacity_s
        return min(part, 1.0)

    def longer(self, budget_s: float) -> float:
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

    def decode_s(self, request: PendingRequest) -> float:
        """Return the seconds that the decode of a request takes of a batch."""
        groups = max(1, self.groups_needed(request.prompt_tokens))
        keys = -(-request.prompt_tokens // groups)
        return self.predictor.decode_s(keys, groups) / self.predictor.topology.spp

    def predicted_tpot_s(self, request: PendingRequest) -> float:
        """TPOT of the running decodes with the request among them.

        The Load's counts those that wait for a batch. What all of them take is the rest of the
        decode capacity: nothing waits while all are in flight.
        """
        spp, load = self.predictor.topology.spp, self.load
        taken_s = load.decode_capacity_s - load.decode_room_s + self.held_decode_s
        with_request = self.predictor.batch_s([(1, request.prompt_tokens, True)])
        empty = self.predictor.batch_s([(1, 0, True)])
        running_s = max(load.predicted_tpot_s, empty, spp * (self.overhead_s + taken_s))
        return running_s + with_request - empty

    @property
    def floor_tpot_s(self) -> float:
        """TPOT of the shortest batches, alongside prefills."""
        return self.predictor.topology.spp * self.min_batch_s

    def least_tpot_s(self, prompt_tokens: int, *, idle: bool = False) -> float:
        """Smallest TPOT target that the replica can promise after a prompt of that length.

        `idle`: that it can give without prefills.
        """
        shortest_s = 0.0 if idle else self.min_batch_s
        return least_tpot_s(prompt_tokens, self.predictor, shortest_s)

    def recount(self) -> None:
        """Recompute the margins from the Load and the held requests.

        Updates are more frequent than queries, so this runs at the next query.
        """
        if not self._stale:
            return
        self._stale = False
        reported = self.load.margins or ((),)
        lead_s = self.load.lead_s or (0.0,) * len(reported)
        self.margins = [Margins(self.drain_s) for _ in reported]
        promises = [held for held in self._held.values() if held.promised]
        for group, margins in enumerate(self.margins):
            here = [held for held in promises if self._is_in(held, group)]
            work = sorted((held.due_s, held.work_s) for held in here)
            margins.recount(reported[group], self.updated_s, work, lead_s[group])
            for held in here:
                margins.delay(held.due_s, held.answer)
            others = (held.elsewhere for held in promises if not self._is_in(held, group))
            margins.shorten(max(others, default=0.0), self.updated_s)
        self._pages = sum(held.pages for held in self._held.values())
        self._pages_by_group.clear()
        for held in self._held.values():
            self._pages_by_group[held.group] += held.pages
        self._pending_s = sum(held.work_s for held in self._held.values())
        self._beyond_s = sum(held.work_s for held in self._held.values() if held.beyond_share)
        self.held_decode_s = sum(held.decode_s for held in self._held.values())
        self.held_promises = len(promises)
        self.promised_decode_s = sum(held.decode_s for held in promises)

    def _is_in(self, held: Held, group: int) -> bool:
        """Return whether a promise is counted in the margins of a group: its own, or all."""
        return held.group == group or not 0 <= held.group < len(self.margins)

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
        self._pages_by_group[held.group] += held.pages
        self._pending_s += held.work_s
        self._beyond_s += held.work_s if held.beyond_share else 0.0
        self.held_decode_s += held.decode_s
        if not held.promised:
            return
        self.held_promises += 1
        self.promised_decode_s += held.decode_s
        for group, margins in enumerate(self.margins):
            if self._is_in(held, group):
                margins.add(held.due_s, held.work_s, now, held.answer)
            else:
                margins.shorten(held.elsewhere, now)

    def before_s(self, slack: float, beyond_share: bool) -> float:
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

    def queue_s(self, beyond_share: bool) -> float:
        """Pending seconds of a group that can still be in time, as if all had the same."""
        groups = max(1, self.running_groups)
        if beyond_share:
            return max(0.0, self.pending_s) / groups
        late_s = sum(seconds for upto, seconds in self.load.pending_bands if upto <= 0.0)
        return max(0.0, self.pending_s - self._beyond_s - late_s) / groups

    @property
    def running_groups(self) -> int:
        """KVP groups that run."""
        return len(self._running_pages)

    def free_by_group(self) -> list[int]:
        """Free pages of each running group, which placed requests may all take."""
        held, running = self._pages_by_group, self._running_pages
        return [
            (running[group] if group < len(running) else 0) - held[group] - held[ALL_GROUPS]
            for group in range(max(len(running), len(self.margins)))
        ]

    def free_pages(self, groups: int) -> int:
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
