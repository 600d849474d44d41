"""What goes into the next batch: decodes first, then as much prefill as the time budget holds.

Algorithms 1 and 2 of the paper (appendix A), with each prefill visited once, every decode counted
in the budget, and the time a batch may take never exceeded but for a counted escape. A plan is made
for a crew, the KVP groups that will run the batch together; nothing is taken until it is carried
out, so a plan may be thrown away. It prices chunks with the predictor and orders with a policy; it
owns no pages and gives no promises.
"""

from __future__ import annotations

from medha.batch import Chunk
from medha.config import Scheduling
from medha.predictor import Predictor
from medha.scheduling.decodes import Decodes
from medha.scheduling.growth import Groups
from medha.scheduling.ledger import Ledger
from medha.scheduling.plan import Part, Plan
from medha.scheduling.policies import OWED, POLICIES
from medha.scheduling.sequence import Sequence
from medha.scheduling.starts import Starts
from medha.scheduling.turns import Turns

MISSES = 4


class Packer:
    """Plans batches. `starved`: rounds without any prefill, by group; `escapes`: counted ones."""

    def __init__(
        self, settings: Scheduling, spp: int, predictor: Predictor, groups: Groups,
        decodes: Decodes, ledger: Ledger, starts: Starts,
    ) -> None:  # fmt: skip
        self.settings, self.spp, self.predictor = settings, spp, predictor
        self.groups, self.decodes, self.ledger = groups, decodes, ledger
        self.starts = starts
        self.turns = Turns(groups, ledger, starts, POLICIES.get(settings.policy))
        self.starved: dict[int, int] = {}
        self.escapes = 0

    def budget_s(self, now: float) -> float:
        """t_target, seconds per stage.

        `slack`: the smallest of credit and TPOT over every running decode, over the stages that a
        token passes; `max_batch_s` bounds it, and how long an arrival waits for the next decision.
        """
        one = self.settings
        if one.budget == "fixed":
            return one.fixed_s
        if one.budget == "tokens":
            return float("inf")
        credit_s = self.decodes.least_credit_s(now) * (1.0 - one.tbt_guard)
        least_s = min(credit_s, self.decodes.least_tpot_s()) / self.spp
        return min(max(least_s, one.min_batch_s), one.max_batch_s)

    def plan(self, crew: tuple[int, ...], now: float, limit_s: float, error: float) -> Plan | None:
        """The batch that `crew` would run, at most `limit_s` long; None when there is nothing."""
        budget_s = self.budget_s(now)
        plan = self._seat(crew, min(budget_s, limit_s))
        for group in crew:
            self.ledger.settle(group, now, error)
            plan.waits[group] = self.groups.waiting[group].able > 0
        if True in plan.waits.values():
            self._fill(plan, now)
            if not plan.parts:
                alone = limit_s >= budget_s and not self.decodes.in_groups(crew)
                self._starve(plan, now, at_once=alone)
        return plan if plan.parts or plan.cohorts else None

    def decode_tpot_s(self) -> float:
        """Predicted time per token of the decodes that wait for their next batch; 0 with none."""
        most_s = 0.0
        for groups, cohort in self.decodes.cohorts.items():
            for group in groups:
                load = self.predictor.load()
                load.add_decodes(len(cohort.chunks), cohort.keys[group], len(groups))
                most_s = max(most_s, self.spp * load.seconds())
        return most_s

    # --- decodes ----------------------------------------------------------------------------------

    def _seat(self, crew: tuple[int, ...], target_s: float) -> Plan:
        plan = Plan(crew, target_s, {}, [], {})
        for group in crew:
            plan.loads[group] = self.predictor.load()
        for groups, cohort in self.decodes.cohorts.items():
            if not cohort.chunks or (groups != crew and not set(groups) <= set(crew)):
                continue
            count = cohort.quota(self.spp)
            keys = self.decodes.keys_of(groups, count)
            plan.cohorts.append((groups, count))
            for group in groups:
                plan.loads[group].add_decodes(count, keys[group], len(groups))
        for group, load in plan.loads.items():
            plan.decode_s[group] = load.seconds() if plan.cohorts else 0.0
        return plan

    # --- prefills ---------------------------------------------------------------------------------

    def _fill(self, plan: Plan, now: float) -> None:
        """Visit prefills in policy order until the batch is full."""
        full_s, misses = plan.target_s, 0
        occupied: set[int] = set()
        yielding: list[tuple[Sequence, Part | None, float]] = []
        visits = self.turns.visits(plan.crew, now, occupied)
        for tier, _, group, sequence, long, yields in visits:
            if long and not occupied.isdisjoint(sequence.groups or sequence.plan[:1]):
                continue
            if not sequence.started and not self.starts.start(sequence, now):
                continue
            limit_s = full_s if not yields else min(full_s, plan.target_s * (1.0 - yields))
            part = self._where(plan, sequence)
            if part is None:
                continue
            if not self._chunk(plan, part, limit_s):
                if yields:
                    yielding.append((sequence, None, full_s))
                    occupied.update(part.groups)
                    continue
                misses += 1
                if misses >= MISSES or self._full(plan, full_s):
                    break
                continue
            part.owed = tier == OWED
            self._add(plan, part)
            if long:
                occupied.update(part.groups)
                if yields:
                    yielding.append((sequence, part, full_s))
            if sequence.packed + part.length == sequence.goal:
                full_s = min(full_s, self._finishing_s(plan, group, sequence, long, now))
            if part.cut and not yields:
                if len(plan.crew) == 1:
                    break
                if len(part.groups) > 1:  # others fill its groups' gaps, and keep none waiting
                    full_s = min(full_s, plan.seconds)
        for sequence, part, limit_s in yielding:
            self._grow(plan, sequence, part, limit_s)

    def _finishing_s(
        self, plan: Plan, group: int, sequence: Sequence, long: bool, now: float
    ) -> float:
        """How long a batch may become in which a prompt ends: its first token waits for all of it.

        Not beyond the deadline of a kept one; with a short one only to a set part of the budget,
        unless some promise is so close that half a batch matters.
        """
        most_s = plan.target_s
        if sequence.kept:
            most_s = sequence.key[0] - (now + self.ledger.drain_s)
        if not long and self.ledger.is_roomy(group):
            most_s = min(most_s, self.settings.finish_fill * plan.target_s)
        return most_s

    def _full(self, plan: Plan, limit_s: float) -> bool:
        """Not even one step of an empty prompt fits any more."""
        step = self.settings.chunk_step_tokens
        return all(load.seconds_with(step, 0) > limit_s for load in plan.loads.values())

    def _where(self, plan: Plan, sequence: Sequence) -> Part | None:
        """Where its next tokens go, as an empty part; None when there is no room for them, or when
        a group that they need is not in the crew."""
        tail, room = self.groups.next_tail(sequence)
        groups = sequence.groups
        for move in sequence.switching:
            groups = tuple(sorted({*groups, move.source, move.target}))
        if tail not in groups:
            groups = tuple(sorted((*groups, tail))) if groups else (tail,)
        if not room or (groups != plan.crew and not plan.loads.keys() >= set(groups)):
            return None
        limit = min(sequence.goal - sequence.packed, room)
        if self.settings.long_prefill_threshold_tokens is not None:
            limit = min(limit, self.settings.long_prefill_threshold_tokens)
        return Part(sequence, limit, tail, groups)

    def _chunk(self, plan: Plan, part: Part, limit_s: float) -> bool:
        """Cut the part to the largest chunk that keeps the batch within `limit_s` (Algorithm 2);
        False when none does."""
        one, sequence, limit = self.settings, part.sequence, part.length
        if one.budget == "tokens":
            rows = max(plan.loads[group].rows for group in part.groups)
            part.length = max(0, min(limit, one.batch_tokens - rows))
        else:
            remaining = sequence.goal - sequence.packed
            for group in part.groups:
                part.length = self.predictor.largest_chunk(
                    plan.loads[group], sequence.held.get(group, 0), part.length, limit_s,
                    one.chunk_step_tokens, len(part.groups), group == part.tail,
                    part.length == remaining,
                )  # fmt: skip
        part.cut = part.length < limit
        part.length -= self.groups.overhang(sequence, part.length, part.tail)
        return part.length > 0

    def _add(self, plan: Plan, part: Part) -> None:
        sequence = part.sequence
        self.groups.bespeak(sequence, part.length, part.tail)
        yields = sequence.packed + part.length == sequence.goal
        for group in part.groups:
            plan.loads[group].add_chunk(
                part.length, sequence.held.get(group, 0), len(part.groups), group == part.tail,
                yields,
            )  # fmt: skip
        plan.parts.append(part)

    def _grow(self, plan: Plan, sequence: Sequence, part: Part | None, limit_s: float) -> None:
        """What a long one yielded and nobody took goes back to it."""
        fresh = self._seat(plan.crew, plan.target_s)
        for one in plan.parts:
            if one is not part:
                self._add(fresh, one)
        larger = self._where(fresh, sequence)
        if larger is None or not self._chunk(fresh, larger, limit_s):
            return
        if part is not None and larger.length <= part.length:
            return
        self._add(fresh, larger)
        plan.loads, plan.parts = fresh.loads, fresh.parts

    def _starve(self, plan: Plan, now: float, *, at_once: bool) -> None:
        """The counted escape: after enough rounds without a prefill, one least chunk goes in;
        `at_once` where no decode runs, since no round would ever come to be counted."""
        for group in plan.crew:
            rounds = self.starved.get(group, 0) + 1
            if rounds < self.settings.max_starved_rounds and not at_once:
                continue
            for _, _, _, sequence, _, _ in self.turns.visits((group,), now, set()):
                if sequence.started or self.starts.start(sequence, now):
                    part = self._where(plan, sequence)
                    if part is not None:
                        part.length = min(part.length, self.settings.chunk_step_tokens)
                        self._add(plan, part)
                        plan.escaped = True
                        return

    # --- carrying out -----------------------------------------------------------------------------

    def carry_out(self, plan: Plan, batch_s: float) -> list[Chunk]:
        """Take the plan's pages and decodes; its chunks, decodes first. It lasts `batch_s`."""
        seated = [self.decodes.seat(groups, count) for groups, count in plan.cohorts]
        chunks = seated[0] if len(seated) == 1 else [chunk for one in seated for chunk in one]
        for part in plan.parts:
            sequence = part.sequence
            start = sequence.packed
            pages = self.groups.extend(sequence, part.length, part.tail)
            chunks.append(
                Chunk(
                    sequence.number, start, part.length, part.groups, part.tail, pages,
                    sequence.packed == sequence.goal,
                )
            )  # fmt: skip
        self._account(plan, batch_s)
        return chunks

    def _account(self, plan: Plan, batch_s: float) -> None:
        self.escapes += plan.escaped
        for group in plan.crew:
            tokens = owed = 0
            for one in plan.parts:
                if group in one.groups:
                    tokens += one.length
                    owed += one.length * one.owed
            starves = plan.waits[group] and not tokens
            self.starved[group] = self.starved.get(group, 0) + 1 if starves else 0
            if not self.ledger.promising:
                continue
            part = owed / tokens if tokens else 0.0
            waiting = self.groups.waiting[group]
            waits = waiting.keeps < len(waiting)
            # A prompt that spans the crew waits for what each of its groups owes: it is shared out.
            self.ledger.spend(group, batch_s / len(plan.crew), part * batch_s, waits)
            if tokens:
                self.ledger.shares.measure(group, plan.target_s, plan.decode_s[group])
