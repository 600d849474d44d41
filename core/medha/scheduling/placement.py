"""Which replica takes a request: the earliest predicted finish among those that can promise it.

Decides from each replica's last Load, from what was placed there since, and from prefix hits; for
the router and for the simulated fleet. It reads no clock (`now` is the caller's) and sends nothing.

    Newcomer ──assess──► Option per Standing ──place──► the best Option, or None when none can ever

A `Standing` is the router's belief about one replica. `told` takes a Load over; between two Loads,
`hold` counts a placed request in its margins, its pages and its pending work. Which KVP groups a
request gets is the replica's own decision; here only whether enough of them can be had.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from medha.messages import Load
from medha.predictor import Predictor
from medha.scheduling.promises import earliest_due_s, room_s


class Newcomer(msgspec.Struct, frozen=True, kw_only=True):
    """A request to place. `due_s`: when its first token is due, on the caller's clock."""

    id: str
    prompt_tokens: int
    max_output_tokens: int = 1
    due_s: float
    tpot_s: float = 0.03
    slo_class: str = "default"
    tenant: str = ""


class Held(msgspec.Struct, frozen=True):
    """A placed request that no Load counts yet: work in seconds, pages of its whole length."""

    due_s: float
    work_s: float
    pages: int
    promised: bool


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica could do for a newcomer; times are seconds from now.

    `fits`: a promise for its deadline breaks no other; `earliest_s`: the earliest TTFT from now
    that could be promised; `finish_s`: when its first token is expected; `work_s`: its own work
    after `cached_tokens`, in seconds of this replica, `cost_s` as it counts in promises, `needed_s`
    the earliest that could be promised if the replica were idle; `roomy`: its pages are free now.
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

    def first_s(self, promised: bool) -> float:
        """When its first token is expected, as its slack at arrival counts it.

        First all is done that is more urgent by relative slack. A promised short prompt waits for
        no long one, however little slack that has, so what could be promised counts where it is
        earlier. One without a promise waits for all that is promised, too; not for the guard that
        a promise to it would have needed, since an idle replica has that to keep as well.
        """
        if promised:
            return min(self.finish_s, self.earliest_s)
        return max(self.finish_s, self.earliest_s - (self.needed_s - self.work_s))


class Standing:
    """The router's belief about one replica. Not thread-safe; every method takes the clock's now.

    `max_batch_s` is kept as guard in every promise, as the replica's own ledger does.
    """

    def __init__(
        self, name: str, predictor: Predictor, max_context_tokens: int,
        min_batch_s: float = 0.01, max_batch_s: float = 0.1,
    ) -> None:  # fmt: skip
        self.name, self.predictor = name, predictor
        self.max_context_tokens = max_context_tokens
        self.min_batch_s, self.max_batch_s = min_batch_s, max_batch_s
        self._overhead_s = predictor.batch_s([(1, 0, False)])  # of one batch cut more
        self.load = Load()
        self.draining = False
        self._told_at = 0.0
        self._held: dict[str, Held] = {}
        self._accepted: set[str] = set()
        self._due = np.empty(0)
        self._margin = np.empty(0)
        self._pages = 0
        self._pending_s = 0.0
        self._stale = False

    def told(self, load: Load, now: float) -> None:
        """Take a Load over; requests accepted before it are counted in it, so they are let go."""
        self.load, self._told_at = load, now
        for name in self._accepted:
            self._held.pop(name, None)
        self._accepted.clear()
        self._stale = True

    def hold(self, newcomer: Newcomer, option: Option, now: float, promised: bool) -> None:
        """Count a request that was placed here, until a Load does."""
        self.release(newcomer.id, now)
        held = Held(newcomer.due_s, option.cost_s, option.pages, promised)
        self._recounted()
        self._held[newcomer.id] = held
        self._count(held, now)

    def accepted(self, id: str) -> None:
        """The replica took it: the next Load counts it."""
        if id in self._held:
            self._accepted.add(id)

    def release(self, id: str, now: float) -> None:
        """It is placed here no more (aborted, failed, placed elsewhere); unknown: nothing."""
        if self._held.pop(id, None) is not None:
            self._accepted.discard(id)
            self._stale = True

    @property
    def known(self) -> bool:
        """A Load has come; before it nothing can be placed here."""
        return bool(self.load.total_pages)

    @property
    def held(self) -> tuple[str, ...]:
        """Ids placed here that no Load counts yet."""
        return tuple(self._held)

    @property
    def pending_s(self) -> float:
        """Prefill work that the replica has, or has been given, in seconds."""
        self._recounted()
        return self.load.pending_s + self.load.relegated_s + self._pending_s

    @property
    def capacity_pages(self) -> int:
        """Pages of all groups, running or claimable."""
        return sum(max(0, pages) for pages in self.load.total_pages) + self.load.claimable_pages

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.load.page_tokens)

    def can_ever(self, newcomer: Newcomer) -> bool:
        """Whether context limit, pages and groups could hold it on an empty replica."""
        tokens = newcomer.prompt_tokens + newcomer.max_output_tokens
        return (
            tokens <= self.max_context_tokens
            and self.pages_of(tokens) <= self.capacity_pages
            and groups_needed(tokens, self.predictor) <= self.predictor.topology.kvp_max
        )

    def assess(
        self, newcomer: Newcomer, now: float, cached_tokens: int = 0, inflation: float = 1.0
    ) -> Option:
        """What this replica could do; `inflation` ≥ 1 makes the newcomer's work count for more.

        Work is divided by the share of time that promised prefills get.
        """
        self._recounted()
        tokens = newcomer.prompt_tokens + newcomer.max_output_tokens
        cached = min(cached_tokens, newcomer.prompt_tokens - 1)
        work_s = self.predictor.prefill_s(newcomer.prompt_tokens, cached) / self.load.share
        cost_s = work_s * inflation + self._overhead_s
        due_in = self._due - now
        due_s = newcomer.due_s - now
        lead_s = min(self.max_batch_s, self.load.ahead_s)  # of the batch in flight
        place = int(np.searchsorted(due_in, due_s, side="right"))
        room = room_s(self._margin, due_in, place, due_s - lead_s)
        needed_s = cost_s + self.max_batch_s  # the guard: a decision is taken once per batch
        free = self._free_pages(tokens)
        pages = self.pages_of(tokens) - cached // self.load.page_tokens
        # With the arithmetic done at the deadline, finish is what the replica expects to do first.
        slack = (due_s - work_s) / max(work_s, 1e-3)
        ahead_s = max(self.load.ahead_s, self._before_s(slack))
        return Option(
            replica=self.name,
            cached_tokens=cached,
            work_s=work_s,
            cost_s=cost_s,
            needed_s=needed_s,
            finish_s=ahead_s + work_s,
            earliest_s=earliest_due_s(self._margin, due_in, needed_s) + lead_s,
            fits=room >= needed_s and pages <= free and not self.draining,
            roomy=pages <= free,
            pages=pages,
            free_pages=free,
        )

    def predicted_tpot_s(self, newcomer: Newcomer) -> float:
        """TPOT of the running decodes with the newcomer among them."""
        one = self.predictor.batch_s([(1, newcomer.prompt_tokens, True)])
        none = self.predictor.batch_s([(1, 0, True)])
        return max(self.load.predicted_tpot_s, none) + one - none

    def idle_tpot_s(self, prompt_tokens: int) -> float:
        """TPOT of a sequence that has this replica to itself, at its first tokens: each passes
        every stage, and the groups that its prompt fills share the work."""
        topology = self.predictor.topology
        groups = max(1, min(topology.kvp_max, groups_needed(prompt_tokens, self.predictor)))
        load = self.predictor.load()
        load.add_decode(-(-prompt_tokens // groups), groups)
        return topology.spp * load.seconds()

    def _recounted(self) -> None:
        """Bring the margins up to date: what the Load says, and everything held beside it.

        Told and released many times between two questions, so it is done when one is asked.
        """
        if not self._stale:
            return
        self._stale = False
        margins = np.asarray(self.load.margins, dtype=np.float64).reshape(-1, 2)
        due, margin = margins[:, 0] + self._told_at, margins[:, 1]
        promised = sorted(
            (held for held in self._held.values() if held.promised), key=lambda held: held.due_s
        )
        own_due = np.array([held.due_s for held in promised])
        own_work = np.cumsum([held.work_s for held in promised])
        # Each told promise bears the work held before it; each held one bears both.
        place = np.searchsorted(due, own_due, side="right")
        done = np.concatenate([[0.0], np.maximum(due - self._told_at - margin, 0.0)])[place]
        before = np.concatenate([[0.0], own_work])[np.searchsorted(own_due, due, side="left")]
        self._due = np.insert(due, place, own_due)
        self._margin = np.insert(margin - before, place, own_due - self._told_at - done - own_work)
        self._pages = sum(held.pages for held in self._held.values())
        self._pending_s = sum(held.work_s for held in self._held.values())

    def _count(self, held: Held, now: float) -> None:
        self._pages += held.pages
        self._pending_s += held.work_s
        if not held.promised:
            return
        place = int(np.searchsorted(self._due, held.due_s, side="right"))
        done = float(self._due[place - 1] - now - self._margin[place - 1]) if place else 0.0
        own = held.due_s - now - max(0.0, done) - held.work_s
        self._margin[place:] -= held.work_s
        self._due = np.insert(self._due, place, held.due_s)
        self._margin = np.insert(self._margin, place, own)

    def _before_s(self, slack: float) -> float:
        """Pending work that is more urgent than relative slack `slack`, by the Load's bands."""
        before = self._pending_s
        for upto, seconds in self.load.pending_bands:
            if upto > slack:
                break
            before += seconds
        return before

    def _free_pages(self, tokens: int) -> int:
        """Pages for a request of `tokens`: of the roomiest group, or of all when it spans them."""
        running = [pages for pages in self.load.free_pages if pages >= 0]
        if groups_needed(tokens, self.predictor) > 1:
            return sum(running) + self.load.claimable_pages - self._pages
        most = max(running, default=0)
        spare = sum(running) - most
        return most - max(0, self._pages - spare)


def groups_needed(tokens: int, predictor: Predictor) -> int:
    """KVP groups that a sequence of `tokens` spans in the end: ceil(n / tokens_per_group)."""
    if predictor.topology.kvp_max == 1:
        return 1
    return -(-tokens // predictor.tokens_per_group)


def options(
    newcomer: Newcomer, standings: Iterable[Standing], cached: Mapping[str, int], now: float,
    inflation: float = 1.0,
) -> list[Option]:  # fmt: skip
    """What every replica that could ever hold the newcomer offers, best first.

    Those that keep the promise come first, then those with pages; by predicted finish, ties by
    free pages, then by name: a total order.
    """
    offers = [
        standing.assess(newcomer, now, cached.get(standing.name, 0), inflation)
        for standing in standings
        if standing.known and not standing.draining and standing.can_ever(newcomer)
    ]
    offers.sort(
        key=lambda offer: (
            not offer.fits, not offer.roomy, offer.finish_s, -offer.free_pages, offer.replica,
        )
    )  # fmt: skip
    return offers


def place(
    newcomer: Newcomer, standings: Iterable[Standing], cached: Mapping[str, int], now: float,
    inflation: float = 1.0,
) -> Option | None:  # fmt: skip
    """The best option, or None when no replica could ever hold the newcomer."""
    offers = options(newcomer, standings, cached, now, inflation)
    return offers[0] if offers else None
