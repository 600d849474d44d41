"""Admission of prompts: those start that find pages for the whole prompt, a limited number at once.

With promises, what a prompt's answer will take counts too. The account of decodes:

1. The tightest TPOT of those that decode gives the time budget b of a batch, and b the decode
   capacity C: the time for decodes that leaves prefills a part of their rate (`PrefillTimes`).
2. A decode takes c(depth) of each batch, from its first token to its last at the pace of its TPOT.
3. A waiting prompt's work is the time that it takes alongside the decodes until it is due: those
   that run, those of started prompts, and those of promised long prompts due earlier. Never its
   own. While batches span groups, they wait for the slowest: then those of the group with most.
   What decodes take of one batch is added: the last batch holds them all, but is not full.
4. Routers promise by a report: works that leave `decode_room` or the recent peak of decodes free
   for others, and what is left of C. Short prompts may use that room where nothing is relegated.
5. A prompt without a promise starts if every promise still fits alongside its decode.
6. A long prompt ends once the promises that do not count its decode fit alongside it: all for
   one without a promise, for others those that are due before it.
7. A TPOT tighter than b stands for is granted if every promise fits the smaller b; else the prompt
   decodes at the pace that b allows. The first one does too, unless it is promised.

So a promise holds: what decodes take until it is due was counted when they began, and what it
left free was counted in its work.
"""

from __future__ import annotations

import math
from collections import Counter, abc

from medha.prefill_times import PrefillTimes, decode_capacity_s, slowed
from medha.request import SloClass
from medha.scheduling.native import (
    COMES,
    FOLLOWS,
    MOST_TRIED,
    RUNS,
    Added,
    Decodes,
    Floats,
)
from medha.scheduling.sequence import Sequence
from medha.scheduling.state import SchedulerState
from medha.scheduling.waiting_queue import WaitingQueue

STARTS_PER_ROUND = 4
"""Prompts without a promise that may start between two batches, while there are promises."""
PEAK_MEMORY_S, MOST_ROOM = 30.0, 0.25
"""Of the recent peak of decodes, and the part of the capacity that promises leave to it at most."""
BEYOND_SHARE = 0.25
"""Part of the decode capacity up to which prompts beyond their tenant's share start."""
HORIZONS_S = tuple(float(1 << power) for power in range(11))
"""Times until due for which a report says what decodes take until then."""
# How often `patience_s` is divided to record which prompts are passed over.
RECORDS = 32


class ComingDecode:
    """The decode of a long prompt that has started: from its prefill's end on, for `length_s`.

    `added`: as it is added to the rows of its group, if it has one only.
    """

    __slots__ = ("added", "cost_s", "length_s", "sequence")

    def __init__(
        self,
        sequence: Sequence,
        cost_s: dict[int, float],
        length_s: float,
        added: dict[int, Added],
    ) -> None:
        self.sequence, self.cost_s, self.length_s = sequence, cost_s, length_s
        self.added = added


class DecodeAccount:
    """The decodes that run or are to come, and what they leave to prefills.

    `closed`: groups in which no prompt without a promise may start that needs that many pages or
    more. `decodes`: those of each group that run, and those of short prompts that have started.
    `tpot_s`: the tightest TPOT in force; infinite until something decodes.
    """

    def __init__(self, state: SchedulerState, classes: tuple[SloClass, ...]) -> None:
        self.settings, self.spp = state.settings, state.topology.spp
        self.predictor, self.groups, self.promises = state.predictor, state.groups, state.promises
        self.queues, self.waiting = state.queues, state.queues.by_group
        self.closed: dict[int, int] = {}
        self.tpot_s = math.inf
        self.decodes: dict[int, Decodes] = {}
        self._class_tpot_s = min((slo_class.slo.tpot_s for slo_class in classes), default=math.inf)
        self._tighter: Counter[float] = Counter()
        self._granted: dict[int, float] = {}
        self._coming: dict[int, ComingDecode] = {}
        self._counted: dict[int, dict[int, float]] = {}
        # Of these, short prompts in progress whose decode is a large part of the capacity.
        self._prefilling: dict[int, Sequence] = {}
        # Of long prompts without a promise that wait to end: no other prompt counts them.
        self._held: dict[int, ComingDecode] = {}
        # Of those that were let end since the last refresh, and are not alongside anything yet.
        self._ending: dict[int, ComingDecode] = {}
        self._starts = 0
        self._peak_s, self._peak_as_of_s = 0.0, 0.0
        # Decodes of prompts that have started are counted, but not alongside the rows yet: these by
        # group, or so that all must be counted again.
        self._started: dict[int, list[Added]] = {}
        self._stale = False
        self._changed = self.spanning = self._all_span = False

    @property
    def capacity_s(self) -> float:
        """C: decode seconds of each batch and stage."""
        return self.queues.times.capacity_s

    @property
    def budget_s(self) -> float:
        """b: the time budget of a batch while decodes run."""
        return self.queues.times.budget_s

    def counted_count(self) -> int:
        """Return the number of decodes that are counted."""
        return len(self._counted) + len(self._coming) + len(self._held)

    def answers_come(self) -> bool:
        """Return whether a counted answer is to begin while another prompt waits."""
        count = self.counted_count()
        if not count:
            return False
        first: Sequence | None = None
        for queue in self.waiting.values():
            for sequence in queue.sequences[:2]:
                if first is not None and sequence is not first:
                    return True
                first = sequence
        return first is not None and count > self._is_counted(first.number)

    def join(self, group: int) -> None:
        self.decodes[group] = Decodes()

    def leave(self, group: int) -> None:
        del self.decodes[group]
        self.closed.pop(group, None)
        for cost_s in self._counted.values():
            cost_s.pop(group, None)

    # --- counting ---------------------------------------------------------------------------------

    def invalidate(self) -> None:
        """Request a refresh: work or decodes were removed."""
        self._changed = True

    def count(self, sequence: Sequence, now: float) -> None:
        """Count the decode of a prompt that has started."""
        if self._is_counted(sequence.number):
            return
        cost_s = self.cost_s(sequence)
        if not cost_s:
            return
        length_s = self._length_s(sequence)
        self._changed = True
        if self._is_long(sequence):
            added = {
                group: self._added(sequence, group, seconds, length_s, now)
                for group, seconds in cost_s.items()
                if len(sequence.assigned_groups) == 1
            }
            self._coming[sequence.number] = ComingDecode(sequence, cost_s, length_s, added)
            self._stale = True
            return
        self._run(sequence, cost_s, now)
        for group, seconds in cost_s.items():
            started = self._started.setdefault(group, [])
            started.append((RUNS, seconds, length_s, 0.0, -1, 0.0))
            if len(started) == MOST_TRIED or sequence.number in self._prefilling or self.spanning:
                self._stale = True

    def _is_counted(self, number: int) -> bool:
        return number in self._counted or number in self._coming or number in self._held

    def begin(self, sequence: Sequence, now: float) -> None:
        """The sequence decodes from now on."""
        self._uncount(sequence.number)
        self._run(sequence, self.cost_s(sequence), now)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that stopped."""
        number = sequence.number
        self._uncount(number)
        tpot_s = self._granted.pop(number, None)
        if tpot_s is not None:
            self._tighter[tpot_s] -= 1
            if not self._tighter[tpot_s]:
                del self._tighter[tpot_s]
                self._set_tpot(min([self._class_tpot_s, *self._tighter]))
        self._changed = True

    def update(self, sequence: Sequence, now: float) -> None:
        """Count a sequence again after its groups changed."""
        number = sequence.number
        if self._coming.pop(number, None) or self._held.pop(number, None):
            self.count(sequence, now)
        elif number in self._counted:
            self.begin(sequence, now)
        self._changed = True

    def _uncount(self, number: int) -> None:
        self._coming.pop(number, None)
        self._held.pop(number, None)
        self._prefilling.pop(number, None)
        if self._started:
            self._stale = True
        for group in self._counted.pop(number, ()):
            self.decodes[group].remove(number)

    def _run(self, sequence: Sequence, cost_s: dict[int, float], now: float) -> None:
        ends_s = now + self._length_s(sequence)
        for group, seconds in cost_s.items():
            self.decodes[group].add(sequence.number, seconds, ends_s)
        self._counted[sequence.number] = cost_s
        most_s = max(cost_s.values(), default=0.0)
        if not sequence.decoding and most_s > self.settings.decode_room * self.capacity_s:
            self._prefilling[sequence.number] = sequence

    def cost_s(self, sequence: Sequence) -> dict[int, float]:
        """Return what the decode takes of a batch in each group; empty if there is none.

        In a pipeline a batch holds one in `spp` of the decodes.
        """
        output = sequence.request.max_output_tokens - sequence.output_tokens
        groups = [group for group in sequence.assigned_groups if group in self.decodes]
        if output < 1 or sequence.request.max_output_tokens < 2:
            return {}
        size, count = self.groups.tokens_per_group, len(groups)
        tokens = sequence.target_tokens + int(self.settings.output_reserve * output)
        if count == 1:
            return {groups[0]: self.predictor.decode_s(tokens, 1) / self.spp}
        keys = [
            max(0, tokens - turn * size if turn == count - 1 else min(size, tokens - turn * size))
            for turn in range(count)
        ]
        return {
            group: self.predictor.decode_s(held, count) / self.spp
            for group, held in zip(groups, keys, strict=True)
        }

    def _length_s(self, sequence: Sequence) -> float:
        output = sequence.request.max_output_tokens - sequence.output_tokens
        return output * max(sequence.request.tpot_s, self.spp * self.budget_s)

    def _is_long(self, sequence: Sequence) -> bool:
        return sequence.total_work_s > self.promises.long_s

    # --- TPOT -------------------------------------------------------------------------------------

    def grant(self, sequence: Sequence, now: float) -> None:
        """Set the TPOT that the sequence gets: its own, or what the promises allow."""
        tpot_s = sequence.request.tpot_s
        if sequence.request.max_output_tokens < 2:
            return
        known_s = min(self.tpot_s, self._class_tpot_s)
        if math.isinf(known_s):  # no class is known: take the first one's
            self._class_tpot_s = known_s = tpot_s
        if math.isinf(self.tpot_s):  # routers count the first answer that they promise
            granted = sequence.request.promised or self._holds_at(known_s, now)
            self._set_tpot(known_s if granted else self._longest_tpot_s())
        if not sequence.request.promised:
            tpot_s = max(tpot_s, self._class_tpot_s)
        if tpot_s < self.tpot_s:
            if self._holds_at(tpot_s, now):
                self._set_tpot(tpot_s)
            else:
                tpot_s = self.tpot_s
        if tpot_s < self._class_tpot_s:
            self._tighter[tpot_s] += 1
            self._granted[sequence.number] = tpot_s
        sequence.grant_tpot(tpot_s)

    def taking(self) -> list[int]:
        """Return the sequences whose answers take, or will take, time from prefills, in order."""
        return sorted({*self._counted, *self._granted})

    def taken(self, sequences: abc.Iterable[Sequence]) -> list[tuple[Sequence, float]]:
        """Return the part of the time that answers take from prefills, of all that run or will.

        Its decode's part of the capacity that the classes' TPOT leaves; and if it was granted a
        tighter one, an equal part of what the batches of that cost all prefills.
        """
        times = self.queues.times
        if self._tighter:
            times = self._times(self._class_tpot_s)
        lost = 1.0 - 1.0 / slowed(self.predictor, times.budget_s, self.budget_s)
        shortening, capacity_s = lost / max(1, len(self._granted)), times.capacity_s
        taken: list[tuple[Sequence, float]] = []
        for sequence in sequences:
            number = sequence.number
            part = shortening if number in self._granted else 0.0
            cost_s = self._counted.get(number)
            if cost_s is not None:
                most_s = 0.0
                for seconds in cost_s.values():
                    most_s = max(most_s, seconds)
                part += min(1.0, most_s / capacity_s) if capacity_s else 1.0
            if part:
                taken.append((sequence, part))
        return taken

    def _longest_tpot_s(self) -> float:
        """Return the TPOT for which no batch is shorter than without decodes."""
        return self.spp * self.promises.longest_s / (1.0 - self.settings.plan_guard)

    def _set_tpot(self, tpot_s: float) -> None:
        if tpot_s == self.tpot_s:
            return
        self.tpot_s = tpot_s
        times = self._times(tpot_s)
        if times.budget_s != self.budget_s or times.capacity_s != self.capacity_s:
            self.queues.set_times(times)
            self._changed = True

    def _times(self, tpot_s: float) -> PrefillTimes:
        budget_s = self.settings.planned_budget_s(tpot_s, self.spp)
        capacity_s = decode_capacity_s(self.predictor, budget_s, self.settings.prefill_share)
        return PrefillTimes(self.predictor, budget_s, capacity_s)

    def _holds_at(self, tpot_s: float, now: float) -> bool:
        """Return whether all promises would hold at the time budget of that TPOT."""
        if not self._has_promises():
            return True
        before, after = self.queues.times, self._times(tpot_s)
        if after.budget_s == before.budget_s:
            return True
        self.queues.set_times(after)
        self.refresh(now)
        holds = all(self.promises.least_margin_s(group, now) >= 0.0 for group in self.waiting)
        if not holds:
            self.queues.set_times(before)
            self.refresh(now)
        return holds

    # --- decodes alongside prefills ---------------------------------------------------------------

    def is_outdated(self) -> bool:
        """Return whether a refresh is due."""
        return self._changed or bool(self.closed and not self._has_promises())

    def refresh(self, now: float) -> None:
        """Compute again what runs alongside each prompt, after a batch and before the next."""
        self._starts = 0
        self.closed.clear()
        self._ending.clear()
        if self.queues.times.outdated:
            self.queues.set_times(self._times(self.tpot_s))
        self.promises.set_aside()
        self._changed = False
        self._recount(now)

    def follow_spans(self, now: float) -> None:
        """Compute it again if a sequence spans groups now and none did before, or the reverse."""
        if self.spanning != bool(self.groups.shared):
            self._recount(now)

    def _recount(self, now: float) -> None:
        self._started.clear()
        self._stale, self.spanning = False, bool(self.groups.shared)
        self._all_span = self.spanning and any(len(groups) > 1 for groups in self._counted.values())
        self._peak_s, self._peak_as_of_s = self._recent_peak_s(now), now
        total_s = self._fullest_s()
        typical = self._part(total_s)
        shared = () if self._all_span else self.groups.shared.values()
        spanning = [sequence for sequence in shared if len(sequence.assigned_groups) > 1]
        for group, queue in self.waiting.items():
            decoding_s = total_s if self.spanning else self.decodes[group].total_s
            self.promises.decoding_s[group] = decoding_s
            self._count_alongside(group, [-1], self._all_span, now)
            queue.set_typical(typical, self.promise_part(now))
            rows = [row for sequence in spanning if (row := queue.find(sequence)) >= 0]
            if rows:
                self._count_alongside(group, rows, True, now)
            alone = [
                row
                for sequence in self._prefilling.values()
                if self._all_span or len(sequence.assigned_groups) == 1
                if group in sequence.assigned_groups and (row := queue.find(sequence)) >= 0
            ]
            if alone:
                self._count_alongside(group, alone, self._all_span, now)

    def count_alongside(self, sequence: Sequence, now: float) -> None:
        """Compute what runs alongside a prompt until it is due, after it joined its queues."""
        spans = self._all_span or len(sequence.assigned_groups) > 1
        if not self._coming and not spans:
            return  # what is typical
        for group in sequence.assigned_groups:
            if group in self.waiting:
                row = self.waiting[group].row_of(sequence)
                self._count_alongside(group, [row], spans, now)

    def _count_alongside(self, group: int, rows: list[int], spans: bool, now: float) -> None:
        """Compute what runs alongside rows of a group until they are due; -1 stands for all.

        A single row does not run alongside its own decode.
        """
        decodes, coming = self._alongside(group, spans, now)
        least_s, part, queue = self.spp * self.budget_s, self._part(1.0), self.waiting[group]
        for row in rows:
            number = queue.sequences[row].number if row >= 0 else -1
            own = [self.decodes[of] for of in self._counted.get(number, ())]
            for of_group in own:
                of_group.exclude(number)
            queue.rows.set_alongside(decodes, coming, row, now, self.budget_s, least_s, part)
            for of_group in own:
                of_group.include(number)

    def _alongside(
        self, group: int, spans: bool, now: float
    ) -> tuple[list[Decodes], list[list[Added]]]:
        """Return the decodes that run alongside a prompt of a group, and those that are to come.

        Of each group that its batches wait for: all groups if they span some (`spans`).
        """
        others = [other for other in self.waiting if spans and other != group]
        coming = [
            [
                decode.added[group]
                if of == group and group in decode.added
                else self._added(decode.sequence, group, decode.cost_s[of], decode.length_s, now)
                for decode in self._coming.values()
                if of in decode.cost_s
            ]
            for of in (group, *others)
        ]
        if not spans:
            coming[0] += [
                self._added(decode.sequence, group, self._waited_s(decode, group), math.inf, now)
                for decode in self._coming.values()
                if len(decode.cost_s) > 1
            ]
        return [self.decodes[of] for of in (group, *others)], coming

    def _waited_s(self, decode: ComingDecode, group: int) -> float:
        own_s = decode.cost_s.get(group, 0.0)
        slowest_s = self._slowest_s(group, decode.cost_s if own_s else {})
        return max(0.0, slowest_s - self.decodes[group].total_s - own_s)

    def _part(self, seconds: float) -> float:
        return seconds / self.capacity_s if self.capacity_s else 0.0

    def _fullest_s(self) -> float:
        """Return what the decodes that run take of a batch, in the fullest group."""
        fullest_s = 0.0
        for decodes in self.decodes.values():
            fullest_s = max(fullest_s, decodes.total_s)
        return fullest_s

    def _slowest_s(self, group: int, more_s: dict[int, float]) -> float:
        """Return what decodes take in the slowest other group, with those to come outside `group`.

        `more_s`: cost of a decode in question, by group.
        """
        slowest_s = 0.0
        for other in self.waiting:
            if other != group:
                total_s = self.decodes[other].total_s + more_s.get(other, 0.0)
                for coming in self._coming.values():
                    if group not in coming.cost_s:
                        total_s += coming.cost_s.get(other, 0.0)
                slowest_s = max(slowest_s, total_s)
        return slowest_s

    def _added_elsewhere_s(self, group: int, cost_s: dict[int, float]) -> float:
        """Return what a decode of other groups adds to the slowest group's, of those that run."""
        each_s = (self.decodes[other].total_s + cost_s[other] for other in cost_s)
        return max(0.0, max(each_s, default=0.0) - self._fullest_s())

    def _added(
        self,
        sequence: Sequence,
        group: int,
        cost_s: float,
        length_s: float,
        now: float,
    ) -> Added:
        """Return the decode that comes after a prompt, as it is added to the rows of a group.

        In the prompt's own group alongside a row that is due later, if the prompt is kept; a
        relegated prompt only has its share of the time. Mean over the time from its first token on,
        because rows due later run then.
        """
        begin_s, due_s, groups = 0.0, sequence.key[0], sequence.assigned_groups
        share = max(self.settings.relegated_share, 1e-3)
        if sequence.remaining_tokens:
            if group in groups and (len(groups) == 1 or self.waiting[group].find(sequence) >= 0):
                return FOLLOWS, cost_s, length_s, share, sequence.number, due_s
            for other in groups:
                row = self.waiting[other].find(sequence) if other in self.waiting else -1
                if row >= 0:
                    begin_s = self.waiting[other].rows.bare_work_s(row)
                    latest_s = max(due_s - now, self.budget_s)
                    begin_s = min(begin_s, latest_s) if sequence.kept else begin_s / share
                    break
        return COMES, cost_s, length_s, begin_s, -1, 0.0

    def try_nothing(self, group: int, now: float) -> None:
        """Compute what the work of each promise is for a new promise of next to no work.

        Where nothing is relegated, a short prompt uses the room that promises leave to others.
        """
        rows, part = self.waiting[group].rows, self._part(1.0)
        least = self.promise_part(now) if self.promises.sets_aside else 0.0
        rows.try_decodes(least, [], now, self.budget_s, part)

    def _try(self, sequence: Sequence, cost_s: dict[int, float], group: int, now: float) -> None:
        """Compute what the work of each promise becomes alongside the sequence's decode, too.

        And alongside those of the prompts that have started before it since the last batch.
        """
        added = self._started.get(group, [])
        if cost_s and sequence.number not in self._coming:
            length_s, added_s = self._length_s(sequence), cost_s.get(group, 0.0)
            if group not in cost_s and self.spanning:
                added_s = self._added_elsewhere_s(group, cost_s)
            if self._is_long(sequence):
                decode = self._added(sequence, group, added_s, length_s, now)
            else:
                decode = RUNS, added_s, length_s, 0.0, -1, 0.0
            added = [*added, decode]
        rows, part = self.waiting[group].rows, self._part(1.0)
        rows.try_decodes(0.0, added, now, self.budget_s, part)

    def promise_part(self, now: float) -> float:
        """Return the part of the capacity that a new promise reckons with at least.

        Prompts that have just started count, too: several may come between two batches.
        """
        if math.isinf(self.tpot_s):  # nothing has ever decoded
            return 0.0
        running, peak = self._part(self._fullest_s()), self._part(self._recent_peak_s(now))
        return min(1.0, max(self.settings.decode_room, running, min(peak, MOST_ROOM)))

    def _recent_peak_s(self, now: float) -> float:
        """Return the most that decodes took of a batch. It fades even while nothing runs."""
        faded = math.exp(min(0.0, self._peak_as_of_s - now) / PEAK_MEMORY_S)
        return max(self._fullest_s(), faded * self._peak_s)

    def promise_parts(self, now: float, *, spans: bool) -> tuple[tuple[float, float], ...]:
        """Return (due in up to, the part that a promise due by then reckons with), in any group.

        The last is for all that is due later. `spans`: of prompts that span groups; none if they
        reckon with the same.
        """
        least = self.promise_part(now)
        if spans and (self._all_span or len(self.waiting) == 1):
            return ()
        if not self._coming and not spans and not self._all_span:
            return ((HORIZONS_S[-1], least),)
        due_s = [now + horizon_s for horizon_s in HORIZONS_S]
        by_group = [self._parts_until(group, due_s, spans, now) for group in self.waiting]
        parts, before = list[tuple[float, float]](), least
        for place, horizon_s in enumerate(HORIZONS_S):
            part = least
            for of_group in by_group:
                part = max(part, of_group[place])
            parts.append((horizon_s, max(before, part)))  # of the two ends of the interval
            before = part
        return tuple(parts)

    def part_until(self, group: int, due_s: float, now: float) -> float:
        """Return the part that a promise in one group reckons with, if it is due then."""
        return max(self.promise_part(now), *self._parts_until(group, [due_s], False, now))

    def _parts_until(self, group: int, due_s: list[float], spans: bool, now: float) -> list[float]:
        """Return the part that decodes take alongside a prompt of a group, due at such times."""
        decodes, coming = self._alongside(group, spans or self._all_span, now)
        least_s = self.spp * self.budget_s
        rows = self.waiting[group].rows
        return [
            self._part(seconds)
            for seconds in rows.alongside_until_s(
                decodes, coming, due_s, now, self.budget_s, least_s
            )
        ]

    def room_s(self) -> float:
        """Return what the capacity holds alongside the decodes that run, in the fullest group."""
        return max(0.0, self.capacity_s - self._fullest_s())

    # --- admission --------------------------------------------------------------------------------

    def is_open_beyond(self, sequence: Sequence) -> bool:
        """Return whether a prompt beyond its tenant's share may start, because of its decode.

        In each of its groups nothing decodes, or most of the capacity stays free.
        """
        return all(
            not len(self.decodes[group])
            or self.decodes[group].total_s + cost_s <= BEYOND_SHARE * self.capacity_s
            for group, cost_s in self.cost_s(sequence).items()
        )

    def can_bear(self, sequence: Sequence, now: float) -> bool:
        """Return whether a sequence may start, and count its decode if so."""
        if sequence.promised or not self._has_promises():
            self.count(sequence, now)
            return True
        groups = [group for group in sequence.assigned_groups if group in self.waiting]
        pages = self.queues.pages_needed(sequence)
        if any(pages >= self.closed.get(group, pages + 1) for group in groups):
            return False
        cost_s = self.cost_s(sequence)
        if cost_s:
            if self._stale:
                self._recount(now)
            self.follow_spans(now)
            for group in self.waiting if self.spanning else groups:
                self._try(sequence, cost_s, group, now)
                margin_s = self.promises.least_margin_s(group, now, tried=True)
                if margin_s < 0.0 and margin_s < self.promises.least_margin_s(group, now):
                    self.closed.update(dict.fromkeys(groups, pages))
                    return False
        self.count(sequence, now)
        self._starts += 1
        if self._starts >= STARTS_PER_ROUND:
            self.closed.update(dict.fromkeys(groups, 1))
        return True

    def may_end(self, sequence: Sequence, now: float, *, guaranteed: bool) -> bool:
        """Return whether a prompt may end: the promises must fit alongside its decode.

        And after what is left of it, unless it is `guaranteed` that time. Those due after a
        promised long prompt count its decode already; as it has time until it is due, it leaves
        those due before the room that a new promise would. One without a promise may have got more
        than its share, or another rank since they counted it: it is held until all fit.
        """
        number, promised = sequence.number, sequence.promised
        coming = self._held.get(number) or self._coming.get(number)
        if coming is None:
            return True
        has_promises = self._has_promises()
        if number in self._coming and has_promises and not promised:
            self._held[number] = self._coming.pop(number)
            self._recount(now)
        due_s = sequence.key[0] if promised else math.inf
        bears = not has_promises or self._bears_from_now(
            coming, due_s, now, delays=not guaranteed, leaves_room=promised
        )
        if bears:
            self._ending[number] = coming
        if bears or promised:
            self._held.pop(number, None)
            self._coming[number] = coming
            self._changed = True
        return bears

    def _bears_from_now(
        self, coming: ComingDecode, due_s: float, now: float, *, delays: bool, leaves_room: bool
    ) -> bool:
        """Return whether promises due before `due_s` fit alongside a decode that begins now.

        And alongside those of other prompts that end. Promises that wait for pages do not count:
        the prompt may hold them.
        """
        for group in self.waiting if self.spanning else coming.cost_s:
            queue, available = self.waiting[group], self.groups.pool.groups[group].available
            before = queue.rows.first_due(due_s)
            firm = queue.promised[:before]
            if not firm.any() or (queue.need[:before][firm] > available).any():
                continue
            is_own, cost_s = group in coming.cost_s, coming.cost_s.get(group, 0.0)
            if not is_own:
                cost_s = self._added_elsewhere_s(group, coming.cost_s)
            elif len(coming.cost_s) > 1 and not self._all_span:
                cost_s += self._waited_s(coming, group)
            others = (other for other in self._ending.values() if other is not coming)
            cost_s += sum(other.cost_s.get(group, 0.0) for other in others)
            least, part = self.promise_part(now) if leaves_room else 0.0, self._part(1.0)
            decode = RUNS, cost_s, coming.length_s, 0.0, -1, 0.0
            queue.rows.try_decodes(least, [decode], now, self.budget_s, part)
            delay_s = 0.0
            if delays and is_own:
                delay_s = float(queue.work_s[queue.row_of(coming.sequence)])
            if self.promises.spare_before_s(group, due_s, now, room=leaves_room) < delay_s:
                return False
        return True

    def retract(self, sequence: Sequence) -> None:
        """Count out a sequence that could not start after all."""
        self._uncount(sequence.number)

    def _has_promises(self) -> bool:
        return any(queue.promised_count for queue in self.waiting.values())


class PrefillAdmission:
    """Starts prompts by reserving their pages.

    A prompt that finds no pages is passed over. After `patience_s` the others wait for it, because
    smaller ones would keep it out for ever. `started_count`: prompts that hold pages; `tried`:
    attempts to reserve pages so far.
    """

    def __init__(self, state: SchedulerState, account: DecodeAccount) -> None:
        self.groups, self.queues, self.account = state.groups, state.queues, account
        self.most = state.settings.max_running
        self.patience_s = state.settings.growth_timeout_s / 8.0
        self.started_count = self.tried = 0

    def try_start(self, sequence: Sequence, now: float) -> bool:
        """Reserve the pages of a prompt; False if it does not fit now, or too many run."""
        if not self.has_place(sequence) or not self._leaves_pages(sequence):
            return False
        if not self.account.can_bear(sequence, now):
            return False
        self.tried += 1
        if not self.groups.allocate(sequence):
            self.account.retract(sequence)
            return False
        self.started_count += 1
        self.queues.mark_started(sequence)
        return True

    @property
    def free_places(self) -> int:
        """Sequences that may still start, of `max_running` at once."""
        return self.most - self.started_count

    def has_place(self, sequence: Sequence) -> bool:
        """Return whether another sequence may start.

        A sixteenth of the places is for promises, and half for what is in its tenant's share, as
        is most of the decode capacity.
        """
        if sequence.promised:
            return self.free_places > 0
        if not sequence.request.beyond_share:
            return self.free_places > self.most // 16
        return self.free_places > self.most // 2 and self.account.is_open_beyond(sequence)

    def count_freed(self) -> None:
        """Count a started sequence whose pages were freed."""
        self.started_count -= 1

    def longest_passed_over(self, queue: WaitingQueue, now: float) -> Sequence | None:
        """Return the prompt passed over for lack of pages for longest, beyond `patience_s`."""
        return queue.longest_passed_over(now - self.patience_s)

    def page_limits(self, group: int, queue: WaitingQueue, now: float) -> tuple[float, int]:
        """Return how many pages a row may still need to be tried now, and `max_pages`.

        Limit 0: only rows that have their pages. Large prompts leave a sixteenth of the pages to
        small ones. All wait for a prompt passed over for too long, the oldest first; small ones
        still pass, or a convoy would form. So do promises, for which that prompt may be waiting
        itself.
        """
        aged = self.longest_passed_over(queue, now)
        while aged is not None and self._may_take_pages(aged, group):
            if not self.try_start(aged, now):
                break  # the others wait for one that does not fit
            aged = self.longest_passed_over(queue, now)
        if self.started_count >= self.most:
            return 0.0, self.max_pages(group)
        pages = self.groups.pool.groups[group]
        available, spare = pages.available, pages.total // 16
        small = min(spare, available)
        limit = max(small, available - spare) if available < pages.total else available
        if self._promise_waits_for_pages(group):
            owed = _owed(queue)
            if owed.min() > limit:  # no promise can start now: only what leaves it its pages
                limit = max(small, min(limit, available - int(owed.sum())))
        if now >= queue.noted_s:
            queue.pass_over(limit, now, now + self.patience_s / RECORDS)
        if aged is not None and self._may_take_pages(aged, group):
            limit = self._pages_beside(aged, group)
        most = self.max_pages(group)
        return min(limit, most), most

    def free_pages(self, group: int, now: float) -> int:
        """Return how many pages of a group new promises may take.

        Not those for which a prompt waits that was passed over for too long, but small ones pass.
        """
        aged = self.longest_passed_over(self.queues.by_group[group], now)
        if aged is None:
            return self.groups.pool.groups[group].available
        return self._pages_beside(aged, group)

    def _pages_beside(self, aged: Sequence, group: int) -> int:
        """Return how many pages of a group others may take while a prompt waits for pages."""
        pages = self.groups.pool.groups[group]
        small = min(pages.total // 16, pages.available)
        return max(small, pages.available - self.queues.pages_needed(aged))

    def max_pages(self, group: int) -> int:
        """Return how many pages a row of the group may need to start."""
        available, closed = self.groups.pool.groups[group].available, self.account.closed
        if not closed or group not in closed or self._promise_waits_for_pages(group):
            return available
        return min(available, closed[group] - 1)

    def _leaves_pages(self, sequence: Sequence) -> bool:
        """Return whether promises that wait for pages find as many after this start as before.

        Small prompts pass.
        """
        if sequence.promised:
            return True
        pages = self.queues.pages_needed(sequence)
        for group in sequence.assigned_groups:
            if group not in self.queues.by_group:
                continue
            queue, pool = self.queues.by_group[group], self.groups.pool.groups[group]
            if pages <= pool.total // 16 or not self._promise_waits_for_pages(group):
                continue
            if pages > pool.available - _owed(queue).sum():
                return False
        return True

    def _may_take_pages(self, sequence: Sequence, group: int) -> bool:
        return sequence.promised or not self._promise_waits_for_pages(group)

    def _promise_waits_for_pages(self, group: int) -> bool:
        """Return whether a promise given elsewhere has no pages here yet."""
        return self.queues.by_group[group].rows.promise_needs_pages()


def _owed(queue: WaitingQueue) -> Floats:
    """Return the pages of each promise that has none yet."""
    need = queue.need[queue.promised]
    return need[need > 0.0]
