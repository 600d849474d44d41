"""What decodes leave to prefills: those that run, and those that prompts which have begun bring.

    share = rate beside those decodes, at the time budget that holds then / rate without decodes

in prompt tokens per second. Two shares of each group are foreseen:

    held     beside the decodes of all that have begun: what the promises given live on
    given    what a new promise may count on: beside its own decodes too, and those of the prompt
             without a promise that is next to begin, and never more than leaves a part free for
             decodes of prompts without a promise, as much as their share of the time for prefills

A prompt without a promise begins where the promises given can bear its decodes. What was left free
lets small ones in at any time, and a large one is next until new promises have left room for it.
Decides who may begin for the sake of decodes; it gives no promises and packs nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from medha.config import Scheduling
from medha.predictor import Predictor
from medha.scheduling.growth import Groups
from medha.scheduling.ledger import Ledger
from medha.scheduling.sequence import Sequence

# With chunks, and without: then some run all the same, one in so many rounds.
LEAST_SHARE, NO_SHARE = 0.02, 0.001
FEW = 8, 2
REMEMBERED = 4096

Shares = dict[int, float]


class Decode(NamedTuple):
    """What one sequence will bring: `keys` are the KV tokens that it reads, by group."""

    promised: bool
    tpot_s: float
    keys: dict[int, int]


class Seats:
    """How many decodes there will be in each group, and the KV tokens that they read."""

    def __init__(self) -> None:
        self.count: Counter[int] = Counter()
        self.keys: Counter[int] = Counter()

    def add(self, keys: dict[int, int], times: int) -> None:
        """Count one sequence in (`times` 1) or out (-1)."""
        for group, tokens in keys.items():
            self.count[group] += times
            self.keys[group] += times * tokens


class Outlook:
    """`closed`: groups in which no prompt without a promise may begin for now that needs so many
    pages, or more; `changed`: work or decodes were struck off since somebody looked."""

    def __init__(
        self, settings: Scheduling, spp: int, predictor: Predictor, groups: Groups, ledger: Ledger
    ) -> None:
        self.settings, self.spp, self.predictor = settings, spp, predictor
        self.groups, self.ledger = groups, ledger
        self.active = ledger.gives and settings.budget != "tokens"
        self.closed: dict[int, int] = {}
        self.changed = False
        self._next: Sequence | None = None
        self._of: dict[int, Decode] = {}
        self._free: dict[int, tuple[Decode, int]] = {}
        self._like: dict[int, Decode] = {}
        self._all, self._promised = Seats(), Seats()
        self._tpots: Counter[float] = Counter()
        self._learned = predictor.learned()
        self._rates: dict[tuple[int, int, int, float], float] = {}

    # --- whose decodes there will be --------------------------------------------------------------

    def counted(self) -> int:
        """Decodes that are counted, those among them for which a place is kept."""
        return self._tpots.total()

    def ended(self, sequence: Sequence) -> None:
        """It decodes no more, or begins anew."""
        if sequence is self._next:
            self._next = None
        self._count_out(sequence)
        self.changed = True  # a promise without decodes is a promise less, too

    def moved(self, sequence: Sequence) -> None:
        """Its groups changed."""
        if self._count_out(sequence):
            self._count_in(sequence)
        self.changed = True

    def _count_in(self, sequence: Sequence, promised: bool = False) -> bool:
        """False where it ends with its first token, or is counted already."""
        output = sequence.request.max_output_tokens - sequence.emitted
        if not self.active or output < 2 or sequence.number in self._of:
            return False
        size, last = self.groups.tokens_per_group, len(sequence.plan) - 1
        tokens = sequence.goal + int(self.settings.output_reserve * output)
        keys = {
            group: max(0, tokens - turn * size if turn == last else min(size, tokens - turn * size))
            for turn, group in enumerate(sequence.plan)
        }
        entry = self._of[sequence.number] = Decode(
            promised or sequence.promised, sequence.request.tpot_s, keys
        )
        self._tally(entry, 1)
        return True

    def _count_out(self, sequence: Sequence) -> bool:
        entry = self._of.pop(sequence.number, None)
        if entry is not None:
            self._tally(entry, -1)
        return entry is not None

    def _tally(self, entry: Decode, times: int) -> None:
        self._all.add(entry.keys, times)
        if entry.promised:
            self._promised.add(entry.keys, times)
        self._tpots[entry.tpot_s] += times
        if not self._tpots[entry.tpot_s]:
            del self._tpots[entry.tpot_s]

    # --- who may begin ----------------------------------------------------------------------------

    def admits(self, sequence: Sequence, now: float) -> bool:
        """Whether it may begin: it is promised, or the promises given can bear its decodes. They
        are counted from now on."""
        plan = [group for group in sequence.plan if group in self.groups]
        if sequence.promised or not self._bound():
            if self._count_in(sequence):
                self.changed = True
                if sequence.promised:
                    self.foresee()
            return True
        pages = self.groups.pages_needed(sequence)
        if any(pages >= self.closed.get(group, pages + 1) for group in plan):
            return False
        if not self._count_in(sequence):
            return True
        if len(plan) == 1 and self._spend(plan[0], self._of[sequence.number]):
            return True
        borne = self._borne(now)
        self.changed = True
        if not borne:
            self._count_out(sequence)
            self.foresee()
            self._next = self._next or sequence
        # Until somebody looks, nobody is tried after it; after a refusal, whoever is smaller.
        self.closed.update(dict.fromkeys(plan, 1 if borne else pages))
        return borne

    def retract(self, sequence: Sequence) -> None:
        """It did not begin after all."""
        self.changed = self._count_out(sequence) or self.changed

    def outdated(self) -> bool:
        """Whether somebody should look: promises may also be taken back."""
        return self.active and (self.changed or bool(self.closed and not self._bound()))

    def look(self, now: float) -> None:
        """Something ended or was struck off: foresee the shares anew, and see who may begin now, so
        that the next decision need not."""
        self.changed = False
        self.closed.clear()
        for group in list(self._free):
            self._withdraw(group)
        if self._next is not None and self._next.started:
            self._next = None
        if self._next is not None and self._count_in(self._next):
            if not self._borne(now):
                pages = self.groups.pages_needed(self._next)
                self.closed.update(dict.fromkeys(self._next.plan, pages))
            self._count_out(self._next)
        for group, like in self._like.items() if self._bound() else ():
            if group in self.groups:
                self._offer(group, like, now)
        self.foresee()

    def _bound(self) -> bool:
        """Whether there are promises to be kept. Groups share the budget, so any group's count."""
        return any(waiting.promises for waiting in self.groups.waiting.values())

    def _borne(self, now: float) -> bool:
        """Whether all promises can bear what is counted."""
        self.foresee()
        return all(
            self.ledger.bears(group, now)
            for group, waiting in self.groups.waiting.items() if waiting.promises
        )  # fmt: skip

    def _offer(self, group: int, like: Decode, now: float) -> None:
        """Keep some seats free for decodes no larger than `like`, as many as can be borne."""
        for count in FEW:
            self._free[group] = like, count
            self._tally(like, count)
            if self._borne(now):
                return
            self._withdraw(group)

    def _spend(self, group: int, entry: Decode) -> bool:
        """Take one of the seats that are free for such a decode."""
        seat, left = self._free.get(group, (entry, 0))
        if not left or seat.keys[group] < entry.keys[group] or seat.tpot_s > entry.tpot_s:
            self._like[group] = entry
            return False
        self._tally(seat, -1)
        self._free[group] = seat, left - 1
        return True

    def _withdraw(self, group: int) -> None:
        seat, left = self._free.pop(group)
        self._tally(seat, -left)

    # --- shares -----------------------------------------------------------------------------------

    def foresee(self) -> None:
        """Groups share the budget, and a batch of a prompt that spans them waits for the slowest
        of them."""
        for group, share in self._shares(self._all).items():
            self.ledger.shares.foresee(group, share)

    def given(self, newcomer: Sequence | None = None) -> Shares:
        """What a new promise may count on, by group."""
        lately = self.ledger.shares.measured
        extra = [
            one for one in (newcomer, self._next)
            if one is not None and one.plan and self._count_in(one, promised=one is newcomer)
        ]  # fmt: skip
        if not self._of:
            return dict(lately)
        longest = 0 if newcomer is None else newcomer.goal
        least, alone = self._shares(self._all, longest), self._shares(self._promised, longest)
        for one in extra:
            self._count_out(one)
        kept = 1.0 - self.settings.relegated_share
        return {group: min(least[group], kept * alone[group], lately[group]) for group in least}

    def _shares(self, seats: Seats, deepest: int = 0) -> Shares:
        shares = dict.fromkeys(self.groups.generation, 1.0)
        if self._tpots:
            budget_s = self.budget_s(min(self._tpots))
            shares = {group: self._share(seats, group, budget_s, deepest) for group in shares}
        if self.groups.shared:
            shares = dict.fromkeys(shares, min(shares.values(), default=1.0))
        return shares

    def _share(self, seats: Seats, group: int, budget_s: float, deepest: int) -> float:
        """For promises, and for one more that is so long."""
        waiting, count = self.groups.waiting[group], seats.count[group]
        some = -(-count // self.spp)
        read = seats.keys[group] * some // count if count else 0
        deepest = max(deepest, int((waiting.depth * waiting.promised).max(initial=0.0)))
        each, most = self.groups.tokens_per_group, self.groups.pool.groups_max
        deepest = min(
            deepest, max(each, deepest - (most - 1) * each)
        )  # the last one holds the rest
        alone = self._rate(0, 0, deepest, self.ledger.longest_s)
        rate = self._rate(some, read, deepest, budget_s) if alone else 0.0
        return max(LEAST_SHARE, min(1.0, rate / alone)) if rate else NO_SHARE

    def budget_s(self, tpot_s: float) -> float:
        """The time budget beside decodes of that TPOT, at its least: with a pipeline twice as many
        batches as stages may be in flight, each with a part of the decodes."""
        one = self.settings
        if one.budget == "fixed":
            return one.fixed_s
        batches = 1 if self.spp == 1 else 2 * self.spp
        least_s = tpot_s * (1.0 - one.tbt_guard) / batches
        return min(max(least_s, one.min_batch_s), one.max_batch_s)

    def _rate(self, decodes: int, read: int, keys: int, budget_s: float) -> float:
        """Tokens per second of a prompt that has `keys` already, beside decodes that read so many.
        With a pipeline a batch waits for a longer one ahead of it: they differ by up to one step,
        and half of one is lost. Kept as long as nothing is learned: most are asked for again, as
        who may not begin is counted out again."""
        learned, asked = self.predictor.learned(), (decodes, read, keys, budget_s)
        if learned != self._learned or len(self._rates) >= REMEMBERED:
            self._learned = learned
            self._rates.clear()
        known = self._rates.get(asked)
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
        self._rates[asked] = rate
        return rate
