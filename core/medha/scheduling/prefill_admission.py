"""Admission of prompts: those start that find pages for the whole prompt, a limited number at once.

With promises, only prompts start whose decodes the promises can bear. Decodes that run, and those
that started prompts bring, leave prefills a share of each group's time:

    share = rate alongside those decodes, at the time budget that holds then / rate without decodes

in prompt tokens per second. Two shares are forecast. The one alongside the decodes of all started
prompts is what existing promises live on (`forecast`). The one that a new promise may count on is
smaller (`available_shares`): alongside its own decodes too and those of the prompt without a
promise that starts next, and such that a part stays free for decodes of prompts without a promise.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from medha.scheduling.sequence import Sequence
from medha.scheduling.state import SchedulerState
from medha.scheduling.waiting_queue import WaitingQueue

# The least share with chunks, and without: an escape still runs some.
LEAST_SHARE, NO_SHARE = 0.02, 0.001
# Free places for decodes without a promise: the numbers that are tried, in this order.
FREE_PLACES = 8, 2
REMEMBERED = 4096
# How often `patience_s` is divided to record which prompts are passed over.
RECORDS = 32

GroupShares = dict[int, float]


class ExpectedDecode(NamedTuple):
    """The decode that a sequence will become; `keys`: KV tokens that it reads, by group."""

    promised: bool
    tpot_s: float
    keys: dict[int, int]


class DecodeTotals:
    """The number of decodes to come in each group, and the KV tokens that they read."""

    def __init__(self) -> None:
        self.count: Counter[int] = Counter()
        self.keys: Counter[int] = Counter()

    def add(self, keys: dict[int, int], times: int) -> None:
        """Add a sequence `times` times; a negative number removes it."""
        for group, tokens in keys.items():
            self.count[group] += times
            self.keys[group] += times * tokens


class DecodeForecast:
    """Decodes to come, and the share of time that they leave to prefills.

    A prompt without a promise may start if the existing promises can bear its decodes. Places kept
    free admit small ones at any time; a large one is next, until new promises have left room.
    `closed`: groups in which no prompt without a promise may start that needs that many pages or
    more.
    """

    def __init__(self, state: SchedulerState) -> None:
        self.settings, self.spp = state.settings, state.topology.spp
        self.predictor, self.groups, self.promises = state.predictor, state.groups, state.promises
        self.queues, self.waiting = state.queues, state.queues.by_group
        self.active = self.promises.gives and self.settings.budget != "tokens"
        self.closed: dict[int, int] = {}
        self._changed = False
        self._next: Sequence | None = None
        self._expected: dict[int, ExpectedDecode] = {}
        self._free: dict[int, tuple[ExpectedDecode, int]] = {}
        self._typical: dict[int, ExpectedDecode] = {}
        self._all, self._promised = DecodeTotals(), DecodeTotals()
        self._tpots: Counter[float] = Counter()
        self._learned = self.predictor.learned()
        self._rates: dict[tuple[int, int, int, float], float] = {}

    # --- expected decodes -------------------------------------------------------------------------

    def counted(self) -> int:
        """Return the number of expected decodes, including places kept free."""
        return self._tpots.total()

    def invalidate(self) -> None:
        """Request a refresh: work or decodes were removed."""
        self._changed = True

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that stopped; a promise without decodes is one promise less, too."""
        if sequence is self._next:
            self._next = None
        self._count_out(sequence)
        self._changed = True

    def update(self, sequence: Sequence) -> None:
        """Count a sequence again after its groups changed."""
        if self._count_out(sequence):
            self._count_in(sequence)
        self._changed = True

    def _count_in(self, sequence: Sequence, promised: bool = False) -> bool:
        """Count a sequence; False if it ends with its first token or is counted already."""
        output = sequence.request.max_output_tokens - sequence.output_tokens
        if not self.active or output < 2 or sequence.number in self._expected:
            return False
        size, last = self.groups.tokens_per_group, len(sequence.assigned_groups) - 1
        tokens = sequence.target_tokens + int(self.settings.output_reserve * output)
        keys = {
            group: max(0, tokens - turn * size if turn == last else min(size, tokens - turn * size))
            for turn, group in enumerate(sequence.assigned_groups)
        }
        decode = self._expected[sequence.number] = ExpectedDecode(
            promised or sequence.promised, sequence.request.tpot_s, keys
        )
        self._tally(decode, 1)
        return True

    def _count_out(self, sequence: Sequence) -> bool:
        decode = self._expected.pop(sequence.number, None)
        if decode is not None:
            self._tally(decode, -1)
        return decode is not None

    def _tally(self, decode: ExpectedDecode, times: int) -> None:
        self._all.add(decode.keys, times)
        if decode.promised:
            self._promised.add(decode.keys, times)
        self._tpots[decode.tpot_s] += times
        if not self._tpots[decode.tpot_s]:
            del self._tpots[decode.tpot_s]

    # --- admission --------------------------------------------------------------------------------

    def can_bear(self, sequence: Sequence, now: float) -> bool:
        """Return whether a sequence may start, and count its decodes if so.

        It may if it is promised, or if the existing promises can bear its decodes.
        """
        groups = [group for group in sequence.assigned_groups if group in self.waiting]
        if sequence.promised or not self._has_promises():
            if self._count_in(sequence):
                self._changed = True
                if sequence.promised:
                    self.forecast()
            return True
        pages = self.queues.pages_needed(sequence)
        if any(pages >= self.closed.get(group, pages + 1) for group in groups):
            return False
        if not self._count_in(sequence):
            return True
        if len(groups) == 1 and self._take_place(groups[0], self._expected[sequence.number]):
            return True
        fits = self._fits(now)
        self._changed = True
        if not fits:
            self._count_out(sequence)
            self.forecast()
            self._next = self._next or sequence
        # Until the next refresh no other is tried after it; after a refusal, only smaller ones.
        self.closed.update(dict.fromkeys(groups, 1 if fits else pages))
        return fits

    def retract(self, sequence: Sequence) -> None:
        """Count out a sequence that could not start after all."""
        self._changed = self._count_out(sequence) or self._changed

    def is_outdated(self) -> bool:
        """Return whether a refresh is due; promises may also be withdrawn."""
        return self.active and (self._changed or bool(self.closed and not self._has_promises()))

    def refresh(self, now: float) -> None:
        """Forecast the shares again, and decide which prompts may start now.

        Runs after a batch, so that the next decision need not.
        """
        self._changed = False
        self.closed.clear()
        for group in list(self._free):
            self._withdraw_places(group)
        if self._next is not None and self._next.started:
            self._next = None
        if self._next is not None and self._count_in(self._next):
            if not self._fits(now):
                pages = self.queues.pages_needed(self._next)
                self.closed.update(dict.fromkeys(self._next.assigned_groups, pages))
            self._count_out(self._next)
        for group, decode in self._typical.items() if self._has_promises() else ():
            if group in self.waiting:
                self._offer_places(group, decode, now)
        self.forecast()

    def _has_promises(self) -> bool:
        """Return whether any group holds a promise: groups share the budget."""
        return any(queue.promised_count for queue in self.waiting.values())

    def _fits(self, now: float) -> bool:
        """Return whether all promises can bear the expected decodes."""
        self.forecast()
        return all(
            self.promises.holds_with_promises_only(group, now)
            for group, queue in self.waiting.items()
            if queue.promised_count
        )

    def _offer_places(self, group: int, decode: ExpectedDecode, now: float) -> None:
        """Keep places free for decodes no larger than `decode`, as many as promises can bear."""
        for count in FREE_PLACES:
            self._free[group] = decode, count
            self._tally(decode, count)
            if self._fits(now):
                return
            self._withdraw_places(group)

    def _take_place(self, group: int, decode: ExpectedDecode) -> bool:
        """Take a place kept free for such a decode; False if there is none."""
        place, left = self._free.get(group, (decode, 0))
        if not left or place.keys[group] < decode.keys[group] or place.tpot_s > decode.tpot_s:
            self._typical[group] = decode
            return False
        self._tally(place, -1)
        self._free[group] = place, left - 1
        return True

    def _withdraw_places(self, group: int) -> None:
        place, left = self._free.pop(group)
        self._tally(place, -left)

    # --- shares -----------------------------------------------------------------------------------

    def forecast(self) -> None:
        """Forecast the share of batch time left for prefills, given all expected decodes.

        Groups share the budget, and a batch that spans groups waits for the slowest of them.
        """
        for group, share in self._shares(self._all).items():
            self.promises.shares.set_forecast(group, share)

    def available_shares(self, newcomer: Sequence | None = None) -> GroupShares:
        """Return the share of each group that a new promise may count on."""
        measured = self.promises.shares.measured
        extra = [
            sequence
            for sequence in (newcomer, self._next)
            if sequence is not None
            and sequence.assigned_groups
            and self._count_in(sequence, promised=sequence is newcomer)
        ]
        if not self._expected:
            return dict(measured)
        longest = 0 if newcomer is None else newcomer.target_tokens
        least, alone = self._shares(self._all, longest), self._shares(self._promised, longest)
        for sequence in extra:
            self._count_out(sequence)
        kept = 1.0 - self.settings.relegated_share
        return {group: min(least[group], kept * alone[group], measured[group]) for group in least}

    def _shares(self, totals: DecodeTotals, deepest: int = 0) -> GroupShares:
        shares = dict.fromkeys(self.waiting, 1.0)
        if self._tpots:
            budget_s = self.budget_s(min(self._tpots))
            shares = {group: self._share(totals, group, budget_s, deepest) for group in shares}
        if self.groups.shared:
            shares = dict.fromkeys(shares, min(shares.values(), default=1.0))
        return shares

    def _share(self, totals: DecodeTotals, group: int, budget_s: float, deepest: int) -> float:
        """Return the share for existing promises, and for a new one of `deepest` tokens."""
        queue, count = self.waiting[group], totals.count[group]
        in_batch = -(-count // self.spp)
        read = totals.keys[group] * in_batch // count if count else 0
        deepest = max(deepest, int((queue.depth * queue.promised).max(initial=0.0)))
        size, most = self.groups.tokens_per_group, self.groups.pool.groups_max
        # The last group holds what the others do not.
        deepest = min(deepest, max(size, deepest - (most - 1) * size))
        alone = self._rate(0, 0, deepest, self.promises.longest_s)
        rate = self._rate(in_batch, read, deepest, budget_s) if alone else 0.0
        return max(LEAST_SHARE, min(1.0, rate / alone)) if rate else NO_SHARE

    def budget_s(self, tpot_s: float) -> float:
        """Return the smallest time budget alongside decodes of that TPOT.

        In a pipeline up to twice as many batches as stages are in flight, each with a part of the
        decodes.
        """
        settings = self.settings
        if settings.budget == "fixed":
            return settings.fixed_s
        batches = 1 if self.spp == 1 else 2 * self.spp
        least_s = tpot_s * (1.0 - settings.tbt_guard) / batches
        return min(max(least_s, settings.min_batch_s), settings.max_batch_s)

    def _rate(self, decodes: int, read: int, keys: int, budget_s: float) -> float:
        """Return the tokens per second of a prompt with `keys` tokens alongside such decodes.

        In a pipeline a batch waits for a longer one ahead; they differ by up to one step, and half
        a step is lost. Rates are remembered until the predictor learns: most are needed again, when
        a prompt that may not start is counted out.
        """
        learned, key = self.predictor.learned(), (decodes, read, keys, budget_s)
        if learned != self._learned or len(self._rates) >= REMEMBERED:
            self._learned = learned
            self._rates.clear()
        known = self._rates.get(key)
        if known is not None:
            return known
        load, step = self.predictor.load(), self.settings.chunk_step_tokens
        if decodes:
            load.add_decodes(decodes, read)
        rate, probe = 0.0, load.seconds_with
        chunk = self.predictor.largest_chunk(load, keys, 1 << 20, budget_s, step)
        if chunk:
            step_s = probe(chunk + step, keys) - probe(chunk, keys) if self.spp > 1 else 0.0
            rate = chunk / (probe(chunk, keys) + 0.5 * step_s)
        self._rates[key] = rate
        return rate


class PrefillAdmission:
    """Starts prompts by reserving their pages.

    A prompt that finds no pages is passed over. After `patience_s` the others wait for it, because
    smaller ones would keep it out for ever. `started_count`: prompts that hold pages; `tried`:
    attempts to reserve pages so far.
    """

    def __init__(self, state: SchedulerState, forecast: DecodeForecast) -> None:
        self.groups, self.queues, self.forecast = state.groups, state.queues, forecast
        self.most = state.settings.max_running
        self.patience_s = state.settings.growth_timeout_s / 8.0
        self.started_count = self.tried = 0

    def try_start(self, sequence: Sequence, now: float) -> bool:
        """Reserve the pages of a prompt; False if it does not fit now, or too many run."""
        if self.started_count >= self.most or not self.forecast.can_bear(sequence, now):
            return False
        self.tried += 1
        if not self.groups.allocate(sequence):
            self.forecast.retract(sequence)
            return False
        self.started_count += 1
        self.queues.mark_started(sequence)
        return True

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
        while aged is not None and self.try_start(aged, now):
            aged = self.longest_passed_over(queue, now)  # the others wait for one that does not fit
        if self.started_count >= self.most:
            return 0.0, self.max_pages(group)
        pages = self.groups.pool.groups[group]
        available, spare = pages.available, pages.total // 16
        small = min(spare, available)
        limit = max(small, available - spare) if available < pages.total else available
        if now >= queue.noted_s:
            queue.pass_over(limit, now, now + self.patience_s / RECORDS)
        if aged is not None and (aged.promised or not self._promise_waits_for_pages(group)):
            limit = max(small, available - self.queues.pages_needed(aged))
        most = self.max_pages(group)
        return min(limit, most), most

    def max_pages(self, group: int) -> int:
        """Return how many pages a row of the group may need to start."""
        available, closed = self.groups.pool.groups[group].available, self.forecast.closed
        if not closed or group not in closed or self._promise_waits_for_pages(group):
            return available
        return min(available, closed[group] - 1)

    def _promise_waits_for_pages(self, group: int) -> bool:
        """Return whether a promise given elsewhere has no pages here yet."""
        queue = self.queues.by_group[group]
        return bool((queue.promised & (queue.need > 0.0)).any())
