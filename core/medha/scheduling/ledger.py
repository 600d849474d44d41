"""Who holds a promise, and who else can still make it: the promise set of each KVP group.

Each group is one server; a request that needs several groups must fit in each of them. Three ranks:

    promised    told so when accepted: it fitted beside all promises given, all at their full costs
    kept        no promise, but it fits beside everything that is kept; gives way to new promises
    relegated   the rest: they run after the kept ones, with a guaranteed share of the time

    bare cost = work / share + overhead          overhead: it may be cut once more than T(n) assumes
    full cost = bare cost / (1 − relegated share)

`share` is the part of time that prefills get beside decodes. A promise is taken back only when even
the bare costs of the promised overrun a deadline by more than the hysteresis: one batch, and twice
the predictor's error. Without `commit` there are no promises: the largest feasible set is kept.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from medha.config import Scheduling
from medha.scheduling import native
from medha.scheduling.growth import Groups
from medha.scheduling.lars import Floats, Mask, Places
from medha.scheduling.losses import Losses
from medha.scheduling.policies import View
from medha.scheduling.promises import broken, margins_s, room_s
from medha.scheduling.sequence import Sequence
from medha.scheduling.shares import Shares
from medha.scheduling.spans import crews_meet, spares_s
from medha.scheduling.waiting import Waiting

CHANGES_PER_ROUND = 4
ROUNDS_PER_LOOK = 8
MEMORY_S = 30.0


class Ledger:
    """Promises over the waiting prefills of every group.

    `drain_s`: what a chunk still needs behind stage 0, at most. `overhead_s`: cost of a batch that
    holds next to nothing. `owed_s`: time that the relegated have coming, per group. `broken`: how
    many promises were taken back; `losses`: who was dropped. `guard_s`: slack that does not count,
    a part of the longest batch; `long_s`: work beyond which a prompt is long.
    """

    def __init__(
        self, settings: Scheduling, groups: Groups, drain_s: float, overhead_s: float
    ) -> None:
        self.settings, self.groups = settings, groups
        self.drain_s, self.overhead_s = drain_s, overhead_s
        self.promising = settings.policy == "lars"
        self.gives = self.promising and settings.commit
        self.shares = Shares()
        self.share = self.shares.of
        self.owed_s: dict[int, float] = {}
        self._rounds: dict[int, int] = {}
        self._turns: dict[int, int] = {}
        self._arrivals: dict[int, tuple[float, float]] = {}
        self.broken, self.losses = 0, Losses(settings.max_bucket_loss)
        self.longest_s = settings.fixed_s if settings.budget == "fixed" else settings.max_batch_s
        self.guard_s = settings.margin_guard * self.longest_s
        self.long_s = 8.0 * self.longest_s
        self._inflation = 1.0 / (1.0 - settings.relegated_share)
        self._kernel = native.load() if self.promising else None
        self._rows: dict[int, native.Rows] = {}

    def join(self, group: int) -> None:
        self._arrivals[group] = 0.0, 0.0
        self.shares.join(group)
        self.owed_s[group], self._rounds[group], self._turns[group] = 0.0, 0, 0
        if self._kernel is not None:
            self._rows[group] = native.Rows(self.groups.waiting[group], self._kernel)

    def leave(self, group: int) -> None:
        self.shares.leave(group)
        for of in (self._arrivals, self.owed_s, self._rounds, self._turns):
            del of[group]
        self._rows.pop(group, None)

    def factor(self, group: int) -> float:
        """Seconds that pass per second of prefill work in `group`."""
        return 1.0 / self.share[group]

    def full_cost_s(self, work_s: float, share: float) -> float:
        """Time that a promise for that much work takes up."""
        return (work_s / share + self.overhead_s) * self._inflation

    def _costs(self, group: int, share: float) -> Floats:
        cost = self.groups.waiting[group].work_s / share
        return (cost + self.overhead_s) * self._inflation

    # --- one request ------------------------------------------------------------------------------

    def fits(
        self, sequence: Sequence, works: dict[int, float], starts: dict[int, float],
        shares: Mapping[int, float],
    ) -> bool:  # fmt: skip
        """Whether it may be promised: it fits beside all promises, in each of its groups, and the
        groups that a promise spans are together in time.

        `works`: seconds of its work by group; `starts`: when each group's stage 0 is free;
        `shares`: of time that prefills will get. A long one must leave room for the short ones that
        will come while it waits and runs.
        """
        for group, work_s in works.items():
            if group not in self.groups:
                return False
            start = starts[group]
            coming = self._coming(group, start) if work_s > self.long_s else 0.0
            due_in, margins = self._promised(group, start, shares[group], coming)
            place = self.groups.waiting[group].place(sequence.key)
            own = sequence.key[0] - start - self.drain_s
            cost_s = self.full_cost_s(work_s, shares[group]) * self._widened(coming)
            if room_s(margins, due_in, place, own) < cost_s:
                return False
        by_s = max(starts.values(), default=0.0) + self.drain_s

        def costs(group: int) -> Floats:
            return self._costs(group, shares[group])

        meet = crews_meet(self.groups, costs, by_s, self.guard_s, sequence)
        return meet and bool(works)

    def arrived(self, works: dict[int, float], now: float) -> None:
        """A request came: short ones make up the share of time that is kept free for more."""
        for group, work_s in works.items():
            if work_s <= self.long_s and group in self._arrivals:
                then, sum_s = self._arrivals[group]
                self._arrivals[group] = now, sum_s * math.exp((then - now) / MEMORY_S) + work_s

    def _coming(self, group: int, now: float) -> float:
        """Part of the time that short ones have been asking for, over the last `MEMORY_S`."""
        then, sum_s = self._arrivals[group]
        load = sum_s * math.exp(min(0.0, then - now) / MEMORY_S) / MEMORY_S
        return min(0.5, load / self.share[group])

    def _widened(self, coming: float) -> float:
        """Factor on a full cost that leaves room for short arrivals."""
        kept = 1.0 - self.settings.relegated_share
        return kept / (kept - coming)

    def give_way(self, group: int, start: float, error: float) -> None:
        """A promise was given: relegate who fits no more beside it."""
        rows = self._margins(group, start)
        if rows.least_s < 0.0:
            self._relegate(group, rows, start, error)

    def rank(self, sequence: Sequence, *, kept: bool, promised: bool) -> None:
        """Move it to another rank, in every group where it waits."""
        sequence.kept, sequence.promised = kept, promised
        self.groups.mark(sequence)

    def margins(self, group: int, start: float, share: float) -> tuple[Floats, Floats]:
        """(due in, margin) of the promises of a group from `start` on, by deadline; for Load."""
        due_in, margins = self._promised(group, start, share)
        promised = self.groups.waiting[group].promised
        return due_in[promised], margins[promised]

    def _promised(
        self, group: int, start: float, share: float, coming: float = 0.0
    ) -> tuple[Floats, Floats]:
        waiting = self.groups.waiting[group]
        due_in, cost = waiting.due_s - start - self.drain_s, self._costs(group, share)
        if coming:
            cost[waiting.work_s > self.long_s] *= self._widened(coming)
        return due_in, margins_s(due_in, cost, waiting.promised)

    # --- one round --------------------------------------------------------------------------------

    def settle(self, group: int, now: float, error: float) -> None:
        """Take back what cannot be kept and take in what fits; margins are of who is kept then."""
        if not self.promising:
            return
        waiting = self.groups.waiting[group]
        if not self.settings.commit:
            self._choose(group, waiting, now)
        looks = self._looks(group, waiting)
        rows = self._margins(group, now)
        count, lost, gone = waiting.keeps, 0, 0
        if (looks or waiting.promises < count) and rows.least_s < 0.0:
            lost, gone = self._relegate(group, rows, now, error)
        anew = gone > 0
        if looks and self.settings.commit and count - lost < len(waiting):
            anew = self._take_in(group, waiting, now) or anew
        if anew:
            self._margins(group, now)

    def affords(self, group: int, idle_s: float, now: float) -> bool:
        """Whether no promise breaks if the group idles so long, then does what it owes."""
        if not self.promising:
            return True
        least_s = self._margins(group, now).least_promised_s
        return least_s >= idle_s + max(0.0, self.owed_s[group])

    def lets_idle(self, group: int, idle_s: float, now: float) -> bool:
        """Whether no promise that lives in this group alone breaks if it idles so long."""
        rows, waiting = self._margins(group, now), self.groups.waiting[group]
        return all(
            rows.margin_s(place) >= idle_s for place in waiting.promised.nonzero()[0].tolist()
            if waiting.sequences[place].number not in self.groups.shared
        )  # fmt: skip

    def bears(self, group: int, now: float) -> bool:
        """Whether no promise of the group is short of time, if all others give way."""
        waiting = self.groups.waiting[group]
        least_s = self._rows[group].alone_s(
            now, self.drain_s, self.share[group], self.overhead_s, self._inflation
        )
        if least_s < 0.0:
            return False
        spares = self._spares_s(now + self.drain_s) if self.groups.shared else {}
        return all(
            spare_s >= 0.0 or self.groups.shared[number] not in waiting
            for number, spare_s in spares.items()
        )

    def view(self, group: int, reach: float, now: float) -> View:
        """Who of the group may be packed, having or needing at most so many pages, as policies see
        them."""
        one, waiting, share = self.settings, self.groups.waiting[group], self.share[group]
        rows: Places = (waiting.ready & (waiting.need <= reach)).nonzero()[0]
        work = waiting.work_s[rows] / share
        if one.long_tokens is None:
            long = work > self.long_s
        else:
            long = waiting.tokens[rows] > one.long_tokens
        return View(rows, waiting, waiting.due_s[rows] - now, work, long, one.max_yield)

    def order(self, group: int, reach: float, now: float) -> native.Rows:
        """The same by `lars`, in order; `settle` comes before."""
        rows, long_tokens = self._rows[group], self.settings.long_tokens
        owed = native.NOTHING
        if self.owed_s[group] >= self.longest_s and self._owes(group, rows):
            owed = native.FIRST_DUE if self._turns[group] % 2 else native.SHORT_ONES
        rows.order(
            reach, now + self.drain_s, self.share[group],
            self.long_s if long_tokens is None else long_tokens, long_tokens is not None,
            self.guard_s, owed,
        )  # fmt: skip
        return rows

    def is_roomy(self, group: int) -> bool:
        """Whether no promise in the group is so close that half a batch matters."""
        return not self.promising or self._rows[group].last_s >= 2.0 * self.guard_s

    def _margins(self, group: int, start: float) -> native.Rows:
        """The margins of who is kept in the group, from `start` on."""
        rows, waiting, shared = self._rows[group], self.groups.waiting[group], self.groups.shared
        start += self.drain_s
        rows.margins(start, self.share[group], self.overhead_s, self._inflation)
        if shared and waiting.promises:
            for number, spare_s in self._spares_s(start).items():
                if shared[number] in waiting:
                    rows.lower(waiting.place(shared[number].key), spare_s)
        return rows

    def _spares_s(self, start: float) -> dict[int, float]:
        return spares_s(self.groups, lambda group: self._costs(group, self.share[group]), start)

    def _terms(self, group: int, start: float, share: float) -> tuple[Floats, Floats]:
        """(due in, bare cost) of the group's rows, from `start` on."""
        waiting = self.groups.waiting[group]
        cost = waiting.work_s / share
        cost += self.overhead_s
        return waiting.due_s - (start + self.drain_s), cost

    def _owes(self, group: int, rows: native.Rows) -> bool:
        """Whether the relegated, who have a batch coming, get it now: when no promise is too close
        (margins count their share, so they widen as promised work is done), or it is overdue and
        the promises can spare a batch of the share that they count."""
        if rows.least_promised_s >= self.longest_s:
            return True
        overdue = self.owed_s[group] >= 3.0 * self.longest_s
        return overdue and rows.least_bare_s >= self.longest_s

    def _looks(self, group: int, waiting: Waiting) -> bool:
        """Whether it is time to see who fits and who cannot be kept: room grows when work is
        struck off, and slowly as batches take less time than their work was worth; only those
        without a promise must give way at once."""
        self._rounds[group] = (self._rounds[group] + 1) % ROUNDS_PER_LOOK
        look = waiting.freed or not self._rounds[group]
        waiting.freed = False
        return look

    def spend(self, group: int, batch_s: float, owed_s: float, relegated_waits: bool) -> None:
        """Account a batch: the relegated earn their share while they wait, and `owed_s` of the
        batch was on it (what they got in the gaps of others is free)."""
        owed = self.owed_s[group] - owed_s
        self._turns[group] += owed_s > 0.0
        if relegated_waits:
            owed += self.settings.relegated_share * batch_s
        self.owed_s[group] = min(max(owed, -self.longest_s), 3.0 * self.longest_s)

    def _relegate(
        self, group: int, rows: native.Rows, start: float, error: float
    ) -> tuple[int, int]:
        """Where a margin is overrun the largest unpromised one due no later gives way; a promise
        only when the promised alone overrun it by more than the hysteresis. Brings the margins up
        to date but for such a promise; how many gave way, and how many promises.
        """
        waiting = self.groups.waiting[group]

        def terms() -> tuple[Floats, Floats]:
            return self._terms(group, start, self.share[group])

        def lately() -> tuple[Floats, Floats]:  # what is foreseen may yet not come
            return self._terms(group, start, self.shares.measured[group])

        drop = functools.partial(
            self.losses.drop, waiting, terms, start, CHANGES_PER_ROUND, self._lower
        )
        lost = drop(functools.partial(self._overrunning, rows))
        if not waiting.promises or rows.least_s >= -self.longest_s:
            return lost, 0
        return lost, drop(functools.partial(self._broken, waiting.promised, lately, error))

    def _lower(self, sequence: Sequence) -> None:
        self.rank(sequence, kept=False, promised=False)

    def _overrunning(self, rows: native.Rows, most: int, spared: Mask | None) -> list[int]:
        """Places of those without a promise that must give way, at most so many; a spared one does
        to a promise, if nobody else can."""
        lost = rows.relegate(self.longest_s, most, spared)
        if spared is not None and self.gives and not lost and rows.least_promised_s < 0.0:
            lost = rows.relegate(math.inf, most)
        return lost

    def _broken(
        self, promised: Mask, terms: Callable[[], tuple[Floats, Floats]], error: float,
        most: int, spared: Mask | None,
    ) -> list[int]:  # fmt: skip
        """Places of promises that must be taken back, at most so many."""
        due_in, bare = terms()
        sure = (bare * promised).cumsum() * (1.0 - min(0.9, 2.0 * error))
        left = np.where(promised, due_in - sure, np.inf)
        if left.min() >= -self.longest_s:
            return []
        lost = broken(left, bare, promised, self.longest_s, most, spared)
        self.broken += len(lost)
        return lost

    def _take_in(self, group: int, waiting: Waiting, now: float) -> bool:
        """Keep relegated ones that fit now with a batch to spare, the smallest first; whether there
        was one."""
        rows, start = self._rows[group], now + self.drain_s
        rows.open(start, self.share[group], self.overhead_s, self._inflation)
        for count in range(CHANGES_PER_ROUND):
            place = rows.fitting(self.guard_s)
            while place >= 0 and not self._alone_or_fits(
                waiting.sequences[place], group, float(waiting.due_s[place]) - start
            ):
                place = rows.fitting(self.guard_s, place)
            if place < 0:
                return count > 0
            self.rank(waiting.sequences[place], kept=True, promised=False)
            rows.keep(place)
        return True

    def fits_beside(self, sequence: Sequence, groups: Iterable[int], start: float) -> bool:
        """Whether it fits beside what is kept in those of its groups, from `start` on."""
        for group in groups:
            if group not in self.groups:
                continue
            waiting = self.groups.waiting[group]
            bare = waiting.work_s / self.share[group] + self.overhead_s
            due_in = waiting.due_s - start - self.drain_s
            margins = margins_s(due_in, bare, waiting.kept)
            place = waiting.place(sequence.key)
            if room_s(margins, due_in, place, float(due_in[place])) < float(bare[place]):
                return False
        return True

    def _alone_or_fits(self, sequence: Sequence, group: int, due_in_s: float) -> bool:
        """It fits in `group`; whether it fits in its other groups too."""
        others = [one for one in sequence.plan if one != group]
        start = sequence.key[0] - due_in_s - self.drain_s
        return not others or self.fits_beside(sequence, others, start)

    def _choose(self, group: int, waiting: Waiting, now: float) -> None:
        """Without commitment: the largest feasible set, anew; those in it have the hysteresis. Who
        is spared bears what a promise bears, and stays like one."""
        before, losses = waiting.kept, self.losses
        due_in, bare = self._terms(group, now, self.share[group])
        spared = losses.spared(waiting, due_in, bare, now) if losses.capped else ~before & before
        hysteresis = np.where(before & ~spared, self.longest_s, 0.0)
        cost = np.where(spared, bare * self._inflation, bare)
        after = losses.largest(waiting, due_in + hysteresis, cost, now)
        firm = after & spared
        for place in np.flatnonzero((before != after) | (waiting.promised != firm)).tolist():
            sequence = waiting.sequences[place]
            keep = bool(after[place])
            if not keep or self._alone_or_fits(sequence, group, float(due_in[place])):
                self.rank(sequence, kept=keep, promised=bool(firm[place]))
