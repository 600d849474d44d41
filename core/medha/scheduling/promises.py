"""The promise set: which requests hold a promise, and which others can still meet their deadline.

Each group is one server; a request that needs several groups must fit in each of them. Three ranks:

    promised    a router found that it fits alongside all promises, each at its full cost
    kept        no promise, but it fits alongside everything that is kept; gives way to new promises
    relegated   all others: they run after the kept ones, with a guaranteed share of the time

    bare cost = work + overhead                  overhead: it may be cut once more than T(n) assumes
    full cost = bare cost / (1 − relegated share)

The share is set aside where a class relegates or while a relegated prompt waits: a replica whose
classes all refuse promises all its time.

`work` is the time that a prompt takes alongside the decodes until it is due (prefill_admission.py).
A promise is withdrawn only when even the bare costs of the promised overrun a deadline by more than
the hysteresis: one batch, and twice the predictor's error. Without `commit` there are no promises:
the largest feasible set is kept.
"""

from __future__ import annotations

import functools
import math
from collections import abc

import numpy as np

from medha.config import Scheduling
from medha.predictor import Predictor
from medha.scheduling import native
from medha.scheduling.feasibility import EVERY, BucketLossCap, select_victims
from medha.scheduling.kv_groups import KvGroups
from medha.scheduling.native import Floats, Mask
from medha.scheduling.policies import PrefillView
from medha.scheduling.sequence import Sequence
from medha.scheduling.waiting_queue import Places, WaitingQueue

CHANGES_PER_ROUND = 4
ROUNDS_PER_REVIEW = 8
MEMORY_S = 30.0
# A group that has just begun knows a rate over this time at least.
LEAST_MEMORY_S = 15.0


class PromiseSet:
    """Promises over the waiting prefills of every group.

    `drain_s`: upper bound of what a chunk still needs behind stage 0; `least_drain_s`: what routers
    leave for it at least, and batches keep to where it matters. `overhead_s`: cost of a batch that
    holds next to nothing. `decoding_s`: what decodes take of a batch, per group.
    `relegated_credit_s`: time owed to the relegated, per group; `payable_s`: how much of it the
    batch that was ordered last can bear; `lacking_s`: time owed if what they got in the gaps of
    others counts, too. `broken_count`: promises withdrawn. `guard_s`: slack that does not count, a
    part of the longest batch. `long_s`: work beyond which a prompt is long. `relegates`: a class
    does.
    """

    def __init__(
        self,
        settings: Scheduling,
        groups: KvGroups,
        predictor: Predictor,
        spp: int,
        *,
        relegates: bool,
    ) -> None:
        self.settings, self.groups, self.relegates = settings, groups, relegates
        self.waiting = groups.running
        self.longest_s = settings.fixed_s if settings.budget == "fixed" else settings.max_batch_s
        self.drain_s = (spp - 1) * self.longest_s
        self.least_drain_s = max(0.0, self.drain_s - 0.5 * self.longest_s)
        self.overhead_s = _overhead_s(predictor)
        self.promising = groups.ranked
        self.keeps_promises = self.promising and settings.commit
        self.relegated_credit_s: dict[int, float] = {}
        self.decoding_s: dict[int, float] = {}
        self.payable_s: dict[int, float] = {}
        self.lacking_s: dict[int, float] = {}
        self._rounds: dict[int, int] = {}
        self._turns: dict[int, int] = {}
        self._arrivals: dict[int, tuple[float, float, float]] = {}
        self.broken_count, self.loss_cap = 0, BucketLossCap(settings.max_bucket_loss)
        self.guard_s = settings.margin_guard * self.longest_s
        self.long_s = 8.0 * self.longest_s
        self.set_aside()

    def join(self, group: int) -> None:
        self._arrivals[group] = 0.0, 0.0, math.inf
        self.decoding_s[group] = 0.0
        self.relegated_credit_s[group] = self.payable_s[group] = self.lacking_s[group] = 0.0
        self._rounds[group], self._turns[group] = 0, 0

    def leave(self, group: int) -> None:
        del self._arrivals[group], self.decoding_s[group]
        del self.relegated_credit_s[group], self.payable_s[group]
        del self.lacking_s[group]
        del self._rounds[group], self._turns[group]

    def behind_s(self, group: int) -> float:
        """Return what a promise needs besides work: behind stage 0, and for its last batch.

        Work counts decodes as if every batch was full, but the last one is not.
        """
        return self.drain_s + self.decoding_s[group]

    def set_aside(self) -> None:
        """Set the relegated share aside if a prompt is relegated now, or may be."""
        relegated = self.relegates or any(queue.relegated for queue in self.waiting.values())
        self._inflation = 1.0 / (1.0 - self.settings.relegated_share) if relegated else 1.0

    @property
    def sets_aside(self) -> bool:
        """Promises leave relegated prompts a share of the time."""
        return self._inflation > 1.0

    def full_cost_s(self, work_s: float) -> float:
        """Return the time that a promise for that much work takes up."""
        return (work_s + self.overhead_s) * self._inflation

    # --- one request ------------------------------------------------------------------------------

    def fits_with_kept(self, sequence: Sequence, groups: abc.Iterable[int], start: float) -> bool:
        """Return whether a queued sequence fits with all kept ones in those groups."""
        for group in groups:
            if group in self.waiting:
                rows, place = self.waiting[group].rows, self.waiting[group].row_of(sequence)
                start_s = start + self.behind_s(group)
                if rows.room_with_kept_s(place, start_s, self.overhead_s) < 0.0:
                    return False
                if self._crowds(group, start, place):
                    return False
        return True

    def least_margin_s(self, group: int, now: float, *, tried: bool = False) -> float:
        """Return the least margin of a promise if everything else gives way; infinite with none.

        `tried`: of the works tried last, not of those that are counted.
        """
        waiting = self.waiting[group]
        if not waiting.promised_count:
            return math.inf
        start = now + self.behind_s(group)
        least_s = waiting.rows.least_margin_s(tried, start, self.overhead_s, self._inflation)
        if self.groups.shared:
            span_s = self.groups.spans.least_s(
                group, tried, start, self.overhead_s, self._inflation
            )
            least_s = min(least_s, span_s)
        return least_s

    def least_before_s(self, group: int, due_s: float) -> float:
        """Return the least margin of the promises due before `due_s`, as `update` computed it."""
        waiting = self.waiting[group]
        rows = waiting.rows
        if rows.least_promised_s >= 0.0:  # of nearly all
            return rows.least_promised_s
        places = waiting.promised[: rows.first_due(due_s)].nonzero()[0].tolist()
        return min([rows.margin_s(place) for place in places], default=math.inf)

    def count_arrival(self, work_by_group: dict[int, float], now: float) -> None:
        """Count a request: short ones determine the share of time kept free for more."""
        for group, work_s in work_by_group.items():
            if work_s <= self.long_s and group in self._arrivals:
                then, sum_s, began_s = self._arrivals[group]
                sum_s = sum_s * math.exp((then - now) / MEMORY_S) + work_s
                self._arrivals[group] = now, sum_s, min(began_s, now)

    def coming(self, group: int, now: float) -> float:
        """Return the part of the time that short requests took over the last `MEMORY_S`.

        Since the first one if that is less: a sum that begins at zero would be too low.
        """
        then, sum_s, began_s = self._arrivals[group]
        memory_s = MEMORY_S * -math.expm1(-max(now - began_s, LEAST_MEMORY_S) / MEMORY_S)
        return min(0.5, sum_s * math.exp(min(0.0, then - now) / MEMORY_S) / memory_s)

    def widened(self, coming: float) -> float:
        """Return the factor on a full cost that leaves room for short arrivals."""
        kept = 1.0 / self._inflation
        return kept / (kept - coming)

    def set_rank(self, sequence: Sequence, *, kept: bool, promised: bool) -> None:
        """Move a sequence to another rank, in every group where it waits."""
        sequence.set_rank(kept, promised)
        self.groups.queues.update_flags(sequence)

    def margins(
        self, group: int, start: float, most: int, after_s: float = 0.0
    ) -> list[tuple[float, float]]:
        """Return (due in, margin) of a group's promises, by the works tried last.

        From `start` on, by deadline; at most `most`, each of a run of promises if there are more.
        Times until due count from `after_s` before.
        """
        waiting, start = self.waiting[group], start + self.behind_s(group)
        return waiting.rows.promise_margins(most, start, self.overhead_s, self._inflation, after_s)

    def spare_before_s(self, group: int, due_s: float, now: float, *, room: bool) -> float:
        """Return the time to spare of promises due before `due_s`, by the works tried last.

        `room`: beyond what short prompts to come take of each one's time. Infinite with no promise.
        """
        coming = self.coming(group, now) if room else 0.0
        last_s, least_s = due_s - now - self.behind_s(group), math.inf
        for due_in_s, margin_s in self.margins(group, now, self.waiting[group].promised_count):
            if due_in_s >= last_s:
                break
            least_s = min(least_s, margin_s - coming * due_in_s)
        return least_s

    def room_s(self, group: int, due_s: float, start: float) -> float:
        """Return the work due at `due_s` that fits with a group's promises, by the works tried."""
        own_s = due_s - start - self.behind_s(group)
        before_s, least_s = 0.0, math.inf
        for due_in_s, margin_s in self.margins(group, start, self.waiting[group].promised_count):
            if due_in_s <= own_s:
                before_s = due_in_s - margin_s
            else:
                least_s = min(least_s, margin_s)
        return min(own_s - before_s, least_s)

    # --- one round --------------------------------------------------------------------------------

    def update(self, group: int, now: float, error: float) -> None:
        """Relegate requests that no longer fit and re-admit those that do. Recomputes margins."""
        if not self.promising:
            return
        waiting = self.waiting[group]
        if not self.settings.commit:
            self._choose(group, waiting, now)
        review = self._is_review_due(group, waiting)
        rows = self._margins(group, now)
        count, lost, broken = waiting.kept_count, 0, 0
        if (review or waiting.promised_count < count) and rows.least_s < 0.0:
            lost, broken = self._relegate(group, rows, now, error)
        changed = broken > 0
        if review and self.settings.commit and count - lost < len(waiting):
            changed = self._readmit(group, waiting, now) or changed
        if self._leave_room(group, now) or changed:
            self._margins(group, now)

    def can_idle(self, group: int, idle_s: float, now: float) -> bool:
        """Return whether the group can idle, then pay its relegated, without a broken promise."""
        if not self.promising:
            return True
        least_s = self._margins(group, now).least_promised_s - self.guard_s
        return least_s >= idle_s + max(0.0, self.relegated_credit_s[group])

    def can_idle_for_promise(self, group: int, idle_s: float, now: float) -> bool:
        """Return whether the group can idle without breaking a promise of this group alone."""
        rows, waiting = self._margins(group, now), self.waiting[group]
        return all(
            rows.margin_s(place) >= idle_s
            for place in waiting.promised.nonzero()[0].tolist()
            if waiting.sequences[place].number not in self.groups.shared
        )

    def view(self, group: int, limit: float, now: float) -> PrefillView:
        """Return a snapshot for a policy: ready rows that have or need at most `limit` pages."""
        settings, waiting = self.settings, self.waiting[group]
        rows: Places = (waiting.ready & (waiting.need <= limit)).nonzero()[0]
        work = waiting.work_s[rows]
        if settings.long_tokens is None:
            long = work > self.long_s
        else:
            long = waiting.values(native.TOKENS, rows) > settings.long_tokens
        return PrefillView(rows, waiting, waiting.due_s[rows] - now, work, long, settings.max_yield)

    def order(self, group: int, limit: float, now: float) -> native.Rows:
        """Order the same rows by `lars`. Requires `update` in the same round."""
        rows, long_tokens = self.waiting[group].rows, self.settings.long_tokens
        credit, self.payable_s[group] = native.NOTHING, self._payable_s(group, rows)
        if self.payable_s[group] > 0.0:
            credit = native.FIRST_DUE if self._turns[group] % 2 else native.SHORT_ONES
        rows.order(
            limit,
            now + self.behind_s(group),
            self.long_s if long_tokens is None else long_tokens,
            long_tokens is not None,
            self.guard_s,
            credit,
        )
        return rows

    def is_roomy(self, group: int) -> bool:
        """Return whether a group is in time though its batches are not filled whole.

        No promise is so tight that half a batch matters, and no prompt is relegated.
        """
        waiting = self.waiting[group]
        if not self.promising:
            return True
        return waiting.kept_count == len(waiting) and waiting.rows.last_s >= 2.0 * self.guard_s

    def account(
        self,
        group: int,
        batch_s: float,
        relegated_s: float,
        gaps_s: float,
        relegated_waits: bool,
    ) -> None:
        """Account a batch that spends `relegated_s` on the share of the relegated.

        They earn their share while they wait. Time in the gaps of others, `gaps_s`, costs them
        nothing: it goes to short ones first.
        """
        credit_s = self.relegated_credit_s[group] - relegated_s
        lacking_s = self.lacking_s[group] - relegated_s - gaps_s
        self._turns[group] += relegated_s > 0.0
        if relegated_waits:
            self.set_aside()
            earned_s = self.settings.relegated_share * batch_s
            credit_s, lacking_s = credit_s + earned_s, lacking_s + earned_s
        most_s = 3.0 * self.longest_s
        self.relegated_credit_s[group] = min(max(credit_s, -self.longest_s), most_s)
        self.lacking_s[group] = min(max(lacking_s, -most_s), most_s)

    def _margins(self, group: int, start: float) -> native.Rows:
        """Compute the margins of the group's kept rows from `start` on."""
        waiting = self.waiting[group]
        rows = waiting.rows
        start += self.behind_s(group)
        rows.margins(start, self.overhead_s, self._inflation)
        if self.groups.shared and waiting.promised_count:
            self.groups.spans.lower(group, start, self.overhead_s, self._inflation)
        return rows

    def _terms(
        self, group: int, start: float, rows: Places | slice = EVERY
    ) -> tuple[Floats, Floats]:
        """Return (due in, bare cost) of the group's rows from `start` on, of all by default."""
        waiting = self.waiting[group]
        due_in_s = waiting.due_s[rows] - (start + self.behind_s(group))
        return due_in_s, waiting.work_s[rows] + self.overhead_s

    def _payable_s(self, group: int, rows: native.Rows) -> float:
        """Return how much of the next batch the relegated get of what they are owed.

        A whole batch if no kept prompt is too tight: margins of promises include their share, so
        that they widen as promised work is done. If the batch is overdue, promises must only be
        able to spare it from the share that they include. Margins of promises that are due soon
        never hold a batch: if the relegated lack their share, they get half of what these bear.
        """
        owed_s, whole_s = self.relegated_credit_s[group], self.longest_s
        if owed_s < whole_s:
            return 0.0
        if rows.least_s >= whole_s or (owed_s >= 3.0 * whole_s and rows.least_bare_s >= whole_s):
            return whole_s
        if self.lacking_s[group] < whole_s:
            return 0.0
        part_s = 0.5 * rows.least_s
        return part_s if part_s >= self.settings.min_batch_s else 0.0

    def _is_review_due(self, group: int, waiting: WaitingQueue) -> bool:
        """Return whether to review which sequences fit and which cannot be kept.

        Room grows when work is removed, and slowly as batches take less time than their work was
        worth. Only sequences without a promise must give way at once.
        """
        self._rounds[group] = (self._rounds[group] + 1) % ROUNDS_PER_REVIEW
        due = waiting.freed or not self._rounds[group]
        if waiting.freed:
            waiting.clear_freed()
        return due

    def _relegate(
        self, group: int, rows: native.Rows, start: float, error: float
    ) -> tuple[int, int]:
        """Relegate until no margin is overrun; return how many gave way, and how many promises.

        The largest sequence without a promise due no later gives way; a promise only if the
        promised alone overrun by more than the hysteresis. Margins are up to date afterwards,
        except for such a promise.
        """
        waiting = self.waiting[group]

        def terms(rows: Places | slice) -> tuple[Floats, Floats]:
            return self._terms(group, start, rows)

        drop = functools.partial(
            self.loss_cap.drop, waiting, terms, start, CHANGES_PER_ROUND, self._relegate_one
        )
        lost = drop(functools.partial(self._overrunning, rows))
        if not waiting.promised_count or rows.least_s >= -self.longest_s:
            return lost, 0
        return lost, drop(functools.partial(self._broken, waiting.promised, terms, error))

    def _relegate_one(self, sequence: Sequence) -> None:
        self.set_rank(sequence, kept=False, promised=False)

    def _overrunning(self, rows: native.Rows, most: int, protected: Mask | None) -> list[int]:
        """Return at most `most` rows without a promise that must give way.

        A protected one gives way to a promise if no other can.
        """
        lost = rows.relegate(self.longest_s, most, protected)
        if (
            protected is not None
            and self.keeps_promises
            and not lost
            and rows.least_promised_s < 0.0
        ):
            lost = rows.relegate(math.inf, most)
        return lost

    def _broken(
        self,
        promised: Mask,
        terms: abc.Callable[[Places | slice], tuple[Floats, Floats]],
        error: float,
        most: int,
        protected: Mask | None,
    ) -> list[int]:
        """Return at most `most` rows whose promise must be withdrawn."""
        due_in, bare = terms(EVERY)
        sure = (bare * promised).cumsum() * (1.0 - min(0.9, 2.0 * error))
        left = np.where(promised, due_in - sure, np.inf)
        if left.min() >= -self.longest_s:
            return []
        lost = select_victims(left, bare, promised, self.longest_s, most, protected)
        self.broken_count += len(lost)
        return lost

    def _readmit(self, group: int, waiting: WaitingQueue, now: float) -> bool:
        """Keep relegated rows that fit with a batch to spare, smallest first; False if none."""
        rows, start = self.waiting[group].rows, now + self.behind_s(group)
        rows.open(start, self.overhead_s, self._inflation)
        for count in range(CHANGES_PER_ROUND):
            place = rows.fitting(self.guard_s)
            while place >= 0 and not self._may_keep(group, place, now):
                place = rows.fitting(self.guard_s, place)
            if place < 0:
                return count > 0
            self.set_rank(waiting.sequences[place], kept=True, promised=False)
            rows.keep(place)
        return True

    def _may_keep(self, group: int, place: int, now: float) -> bool:
        """Return whether a row that fits in `group` leaves room, and fits in its other groups."""
        waiting = self.waiting[group]
        if waiting.sequences[place].request.beyond_share or self._crowds(group, now, place):
            return False
        due_in_s = float(waiting.due_s[place]) - now - self.behind_s(group)
        return self._fits_elsewhere(waiting.sequences[place], group, due_in_s)

    def _leave_room(self, group: int, now: float) -> bool:
        """Relegate long prompts without a promise that take the room for short ones to come."""
        waiting, changed = self.waiting[group], False
        while 0 < waiting.promised_count < waiting.kept_count:
            place = waiting.rows.crowding(
                self.long_s,
                now,
                self.behind_s(group),
                self.overhead_s,
                self._inflation,
                waiting.expected,
                self.coming(group, now),
            )
            if place < 0:
                break
            self._relegate_one(waiting.sequences[place])
            changed = True
        return changed

    def _crowds(self, group: int, now: float, place: int) -> bool:
        """Return whether a row without a promise, if kept, takes the room for short ones to come.

        Only long prompts do. The margin of each promise must hold the part of the time that short
        prompts take, alongside the decodes that a new promise reckons with.
        """
        waiting = self.waiting[group]
        if not waiting.promised_count or waiting.work_s[place] <= self.long_s:
            return False
        return waiting.rows.is_tight(
            place,
            now,
            self.behind_s(group),
            self.overhead_s,
            self._inflation,
            waiting.expected,
            self.coming(group, now),
        )

    def _fits_elsewhere(self, sequence: Sequence, group: int, due_in_s: float) -> bool:
        """Return whether a sequence that fits in `group` fits in its other groups too."""
        others = [other for other in sequence.assigned_groups if other != group]
        start = sequence.key[0] - due_in_s - self.behind_s(group)
        return not others or self.fits_with_kept(sequence, others, start)

    def _choose(self, group: int, waiting: WaitingQueue, now: float) -> None:
        """Without `commit`: keep the largest feasible set, chosen again in each round.

        Members have the hysteresis. A protected sequence costs what a promise costs, and stays like
        one.
        """
        before, cap = waiting.kept, self.loss_cap
        due_in, bare = self._terms(group, now)
        protected = cap.protected(waiting, due_in, bare, now) if cap.capped else ~before & before
        hysteresis = np.where(before & ~protected, self.longest_s, 0.0)
        cost = np.where(protected, bare * self._inflation, bare)
        after = cap.largest(waiting, due_in + hysteresis, cost, now)
        firm = after & protected
        for place in np.flatnonzero((before != after) | (waiting.promised != firm)).tolist():
            sequence = waiting.sequences[place]
            keep = bool(after[place])
            if not keep or self._fits_elsewhere(sequence, group, float(due_in[place])):
                self.set_rank(sequence, kept=keep, promised=bool(firm[place]))


def _overhead_s(predictor: Predictor) -> float:
    """Return a batch's cost before its first token: the intercept through one and two tokens."""
    load = predictor.load()
    return max(0.0, 2.0 * load.seconds_with(1, 0) - load.seconds_with(2, 0))
