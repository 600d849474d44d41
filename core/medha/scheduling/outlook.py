"""What decodes will leave to prefills: those that run, and those that accepted prompts bring.

    share = rate beside those decodes, at the time budget that will hold then / rate without decodes

in prompt tokens per second. A promise counts with what is foreseen, as no batch of today shows it.
So a prompt without a promise may begin only once the promises given can bear its decodes too: it is
barred until enough of them are through, and once it has waited for long, new promises count it as
well. Decides who is barred; it gives no promises and packs nothing.
"""

from __future__ import annotations

from medha.config import Scheduling
from medha.predictor import BatchLoad, Predictor
from medha.scheduling.growth import Groups
from medha.scheduling.ledger import Ledger
from medha.scheduling.sequence import Sequence

LEAST_SHARE = 0.02
TRIES = 4


class Outlook:
    """`barred`: prompts that may not begin yet and since when, longest untried first; `changed`:
    work or decodes were struck off since somebody looked."""

    def __init__(
        self, settings: Scheduling, spp: int, predictor: Predictor, groups: Groups, ledger: Ledger
    ) -> None:
        self.settings, self.spp, self.predictor = settings, spp, predictor
        self.groups, self.ledger = groups, ledger
        self.active = ledger.gives and settings.budget != "tokens"
        self.patience_s = settings.growth_timeout_s / 8.0
        self.barred: dict[int, tuple[Sequence, float]] = {}
        self.changed = False
        self._of: dict[int, dict[int, int]] = {}  # keys that its decodes read, by group
        self._tpot_s: dict[int, float] = {}

    # --- whose decodes are to come ----------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Its decodes are to come; nothing where it ends with its first token."""
        output = sequence.request.max_output_tokens - sequence.emitted
        if not self.active or output < 2:
            return
        size, last = self.groups.tokens_per_group, len(sequence.plan) - 1
        tokens = sequence.goal + int(self.settings.output_reserve * output)
        self._tpot_s[sequence.number] = sequence.request.tpot_s
        self._of[sequence.number] = {
            group: max(0, tokens - turn * size if turn == last else min(size, tokens - turn * size))
            for turn, group in enumerate(sequence.plan)
        }
        self.foresee()

    def remove(self, sequence: Sequence) -> None:
        """It will not decode, or no more."""
        self.changed = True
        if self.barred.pop(sequence.number, None) is not None:
            sequence.barred = False
        self._drop(sequence)

    def moved(self, sequence: Sequence) -> None:
        """Its groups changed."""
        if sequence.number not in self.barred:
            self.add(sequence)
        self.changed = True

    def _drop(self, sequence: Sequence) -> None:
        if self._of.pop(sequence.number, None) is not None:
            del self._tpot_s[sequence.number]
            self.foresee()

    # --- who may begin ----------------------------------------------------------------------------

    def fits(
        self, sequence: Sequence, works: dict[int, float], starts: dict[int, float], now: float
    ) -> bool:
        """Whether it may be promised, beside those too that have been barred for long."""
        waited = [
            one for one, since_s in self.barred.values() if now - since_s > self.patience_s
        ]  # fmt: skip
        for one in waited:
            self.add(one)
        fits = self.ledger.fits(sequence, works, starts)
        for one in waited:
            self._drop(one)
        return fits

    def judge(self, sequence: Sequence, now: float) -> None:
        """It has no promise: bar it where those given cannot bear its decodes."""
        if sequence.number in self._of and not self._borne(sequence, now):
            self._drop(sequence)
            sequence.barred = True
            self.barred[sequence.number] = sequence, now
            self.groups.mark(sequence)

    def admit(self, now: float) -> None:
        """Let some of the barred begin whose decodes can be borne now."""
        self.changed = False
        for number in list(self.barred)[:TRIES]:
            sequence, since_s = self.barred.pop(number)
            self.add(sequence)
            if self._borne(sequence, now):
                self.changed, sequence.barred = True, False
                self.groups.mark(sequence)
            else:
                self._drop(sequence)
                self.barred[number] = sequence, since_s

    def _borne(self, sequence: Sequence, now: float) -> bool:
        return all(self.ledger.bears(one, now) for one in sequence.plan if one in self.groups)

    # --- shares -----------------------------------------------------------------------------------

    def foresee(self) -> None:
        """Groups share the budget, and a batch of a prompt that spans them waits for the slowest
        of them."""
        shares = dict.fromkeys(self.groups.generation, 1.0)
        if self._of:
            budget_s = self.budget_s(min(self._tpot_s.values()))
            shares = {group: self._share(group, budget_s) for group in shares}
        if self.groups.shared:
            shares = dict.fromkeys(shares, min(shares.values(), default=1.0))
        for group, share in shares.items():
            self.ledger.shares.foresee(group, share)

    def _share(self, group: int, budget_s: float) -> float:
        keys = [of[group] for of in self._of.values() if group in of]
        waiting, beside = self.groups.waiting[group], self.predictor.load()
        if keys:
            seats = -(-len(keys) // self.spp)
            beside.add_decodes(seats, sum(keys) * seats // len(keys))
        deepest = int(waiting.tokens.max()) if len(waiting) else 0
        deepest = min(deepest, self.groups.tokens_per_group)
        alone = self._rate(self.predictor.load(), deepest, self.ledger.longest_s)
        if not alone:
            return LEAST_SHARE
        return max(LEAST_SHARE, min(1.0, self._rate(beside, deepest, budget_s) / alone))

    def budget_s(self, tpot_s: float) -> float:
        """The time budget beside decodes of that TPOT, at its least: with a pipeline twice as many
        batches as stages may be in flight, each with a part of the decodes."""
        one = self.settings
        if one.budget == "fixed":
            return one.fixed_s
        batches = 1 if self.spp == 1 else 2 * self.spp
        least_s = tpot_s * (1.0 - one.tbt_guard) / batches
        return min(max(least_s, one.min_batch_s), one.max_batch_s)

    def _rate(self, load: BatchLoad, keys: int, budget_s: float) -> float:
        """Tokens per second of a prompt that has `keys` already. With a pipeline a batch waits for
        a longer one ahead of it: they differ by up to one step, and half of one is lost."""
        step, probe = self.settings.chunk_step_tokens, load.seconds_with
        chunk = self.predictor.largest_chunk(load, keys, 1 << 20, budget_s, step)
        if not chunk:
            return 0.0
        step_s = probe(chunk + step, keys) - probe(chunk, keys) if self.spp > 1 else 0.0
        return chunk / (probe(chunk, keys) + 0.5 * step_s)
