"""The next batch: decodes first, then as much prefill as the time budget holds.

Algorithms 1 and 2 of the paper (appendix A), with each prefill visited once, every decode counted
in the budget, and the time limit of a batch never exceeded except by a counted escape. A draft is
made for a group set, the KVP groups that run the batch together. It takes nothing until it is
committed, so that it may be thrown away.
"""

from __future__ import annotations

import heapq
from collections import abc

import numpy as np

from medha.batch import Chunk
from medha.predictor import BatchLoad
from medha.scheduling.native import TURN, Floats, Next, Rows
from medha.scheduling.policies import (
    ABSORBED,
    GUARANTEED,
    POLICIES,
    Policy,
    PolicyKeys,
    PrefillView,
)
from medha.scheduling.prefill_admission import PrefillAdmission
from medha.scheduling.sequence import Sequence
from medha.scheduling.state import SchedulerState
from medha.scheduling.waiting_queue import Places

# Rows that are sorted at a time: most batches hold one prompt or two.
FEW_ROWS = 12
# Prefills that may fail to fit before the batch counts as full.
MISSES = 4
# A decode that is late shortens batches to this part of what its TPOT allows, and no further: far
# shorter ones hold few tokens, and win hardly any time.
RECOVERY = 0.5
# Where less than this part of a batch fits in front of second tokens, none goes in front of them.
FITS = 0.5
# A batch of a pipeline without decodes takes at most this number of those alongside decodes, until
# none has run for a while.
LONGER, QUIET_S = 3.0, 2.0
# Part of a batch's budget for prompts beyond their tenant's share.
BEYOND_SHARE = 0.25

# (tier, turn, group, sequence, is long, yields)
Candidate = tuple[int, int, int, Sequence, bool, float]


class ChunkDraft:
    """A prefill's chunk in a draft: where its tokens go and which groups compute it.

    `cut`: the batch had no room for more of it. `guaranteed`: it runs on the relegated share.
    """

    __slots__ = ("cut", "groups", "guaranteed", "length", "sequence", "tail")

    def __init__(self, sequence: Sequence, length: int, tail: int, groups: tuple[int, ...]) -> None:
        self.sequence, self.length, self.tail, self.groups = sequence, length, tail, groups
        self.cut = self.guaranteed = False


class BatchDraft:
    """The batch that a group set would run. `decodes`: how many to take, by their groups."""

    __slots__ = ("chunks", "decodes", "escaped", "group_set", "loads", "target_s", "waits")

    def __init__(self, group_set: tuple[int, ...], target_s: float) -> None:
        self.group_set, self.target_s = group_set, target_s
        self.loads: dict[int, BatchLoad] = {}
        self.decodes: list[tuple[tuple[int, ...], int]] = []
        self.chunks: list[ChunkDraft] = []
        self.waits: dict[int, bool] = {}
        self.escaped = False

    @property
    def seconds(self) -> float:
        """Predicted seconds per stage: those of the slowest group."""
        return max([load.seconds() for load in self.loads.values()])

    @property
    def shared(self) -> bool:
        return any(len(chunk.groups) > 1 for chunk in self.chunks) or any(
            len(groups) > 1 for groups, _ in self.decodes
        )


class RankedRows:
    """Rows in the order of a policy without tiers; `native.Rows` is the same for `lars`.

    `yields`: part of the budget that a row leaves to others.
    """

    def __init__(self, view: PrefillView, keys: PolicyKeys) -> None:
        self._waiting, self._rows = view.waiting, view.rows
        self._left: Places = np.arange(len(view.rows))
        self._keys, self._long = keys.keys, view.long
        self.yields: Floats | None = None
        if keys.yields is not None:
            self.yields = np.zeros(len(view.waiting))
            self.yields[view.rows] = keys.yields

    def few(self, pages: float, only_short: bool) -> list[Next]:
        """Return the next rows in order; none are left if it is empty."""
        left, rows = self._left, self._rows
        fits = self._waiting.need[rows[left]] <= pages
        if only_short:
            fits = np.greater(fits, self._long[left])
        left = left[fits]
        keys = self._keys[left]
        near = np.ones(len(left), dtype=np.bool_)
        if len(left) > 4 * FEW_ROWS:
            near = keys <= np.partition(keys, FEW_ROWS - 1)[FEW_ROWS - 1]
        self._left, first = left[~near], left[near]
        first = first[np.lexsort((self._waiting.values(TURN, rows[first]), keys[near]))]
        return [(int(rows[at]), ABSORBED, int(self._long[at])) for at in first]


class PrefillOrder:
    """The order in which a draft visits prefills: each group's by its policy, merged.

    Rows are ranked a few at a time. Prefills that cannot be in the draft are left out: they find no
    pages, or they are long where a long one is in already.
    """

    def __init__(self, state: SchedulerState, admission: PrefillAdmission) -> None:
        self.groups, self.promises, self.admission = state.groups, state.promises, admission
        self.waiting = state.queues.by_group
        self.policy: Policy | None = POLICIES.get(state.settings.policy)  # None: `lars`

    def iterate(
        self, group_set: tuple[int, ...], now: float, occupied: set[int]
    ) -> abc.Iterator[Candidate]:
        """Yield each candidate once, a shared one when the last of its groups comes to it.

        `occupied`: groups that have a long prefill in the draft.
        """
        if len(group_set) == 1:
            return self._candidates(group_set[0], now, occupied)
        return self._merged(group_set, now, occupied)

    def _merged(
        self, group_set: tuple[int, ...], now: float, occupied: set[int]
    ) -> abc.Iterator[Candidate]:
        seen: dict[int, int] = {}
        for candidate in heapq.merge(
            *(self._candidates(group, now, occupied) for group in group_set),
            key=lambda candidate: candidate[:3],
        ):
            sequence = candidate[3]
            seen[sequence.number] = seen.get(sequence.number, 0) + 1
            if seen[sequence.number] == len(set(group_set).intersection(sequence.assigned_groups)):
                yield candidate

    def _candidates(self, group: int, now: float, occupied: set[int]) -> abc.Iterator[Candidate]:
        """Yield one group's rows in its policy's order; merged groups alternate within a tier."""
        waiting, admission = self.waiting[group], self.admission
        limit, most = admission.page_limits(group, waiting, now)
        ranked = self._rank(group, limit, now)
        need, yields, sequences = waiting.need, ranked.yields, waiting.sequences
        alone, turn = not self.groups.shared, 0
        pages, closed = self.groups.pool.groups[group], admission.account.closed
        while few := ranked.few(most, alone and bool(occupied)):
            for row, tier, long in few:
                if need[row] > most or (long and alone and occupied):
                    continue
                part = 0.0 if yields is None else float(yields[row])
                sequence = sequences[row]
                sequence.set_row(row)
                yield tier, turn, group, sequence, bool(long), part
                turn += 1
                most = min(most, admission.max_pages(group) if closed else pages.available)

    def _rank(self, group: int, limit: float, now: float) -> RankedRows | Rows:
        if self.policy is None:
            return self.promises.order(group, limit, now)
        view = self.promises.view(group, limit, now)
        return RankedRows(view, self.policy(view))


class BatchBuilder:
    """Drafts batches and commits them.

    `starved`: rounds without any prefill, by group; `escapes`: escapes so far; `decoded_s`: when
    decodes ran last.
    """

    def __init__(self, state: SchedulerState, admission: PrefillAdmission) -> None:
        self.settings, self.spp = state.settings, state.topology.spp
        self.predictor, self.groups, self.running = state.predictor, state.groups, state.running
        self.promises, self.admission = state.promises, admission
        self.waiting, self.in_flight = state.queues.by_group, state.in_flight
        self.order = PrefillOrder(state, admission)
        self.starved: dict[int, int] = {}
        self.decoded_s = -float("inf")
        self.escapes = 0

    def budget_s(self, now: float) -> float:
        """Return t_target, in seconds per stage.

        `slack`: the smallest of credit and TPOT over every running decode, divided by the stages
        that a token passes; at least `RECOVERY` of the TPOT. `max_batch_s` bounds it, and so the
        time that an arrival waits for the next decision. In a pipeline batches alongside decodes
        wait for longer ones ahead of them: while decodes come and go, or one is to come, `LONGER`
        times what promises count on is the bound.
        """
        settings, account = self.settings, self.admission.account
        if settings.budget == "fixed":
            return settings.fixed_s
        if settings.budget == "tokens":
            return float("inf")
        least_s = float("inf")
        if self.running.running:
            credit_s, tpot_s = self.running.least_credit(now)
            credit_s = max(credit_s * (1.0 - settings.tbt_guard), RECOVERY * tpot_s)
            least_s = min(credit_s, tpot_s) / self.spp
            self.decoded_s = now
        elif self.spp > 1 and (now - self.decoded_s < QUIET_S or account.answers_come()):
            least_s = LONGER * account.budget_s
        return min(max(least_s, settings.min_batch_s), settings.max_batch_s)

    def build(
        self, group_set: tuple[int, ...], now: float, limit_s: float, error: float
    ) -> BatchDraft | None:
        """Draft the next batch of a group set, at most `limit_s` long; None if there is nothing."""
        budget_s, wait_s = self.budget_s(now), 0.0
        if self.spp > 1:
            most_s, wait_s = self._before_second_s(group_set, now)
            budget_s = min(budget_s, most_s)
        draft = self._draft_decodes(group_set, min(budget_s, limit_s))
        for group in group_set:
            self.promises.update(group, now, error)
            draft.waits[group] = self.waiting[group].ready_count > 0
        if wait_s > 0.0 and all(
            self.promises.least_before_s(group, float("inf")) > wait_s for group in group_set
        ):
            return draft if draft.decodes else None
        if True in draft.waits.values():
            if self.spp > 1:
                self._hurry(draft, now)
            self._fill(draft, now)
            if not draft.chunks:
                alone = limit_s >= budget_s and not self.running.in_groups(group_set)
                self._escape(draft, now, at_once=alone)
        return draft if draft.chunks or draft.decodes else None

    def _before_second_s(self, group_set: tuple[int, ...], now: float) -> tuple[float, float]:
        """Return how long a batch behind a prompt's last may be, whose second token passes next.

        The second token waits for a place in stage 0, then passes all stages, behind all that has
        entered the pipeline by then. If that fills the time of its TPOT, also return the seconds
        for which stage 0 should wait, else 0: the last stage has work meanwhile. Shorter batches
        pile up behind one that is longer than they are.
        """
        most_s, wait_s, least_s = float("inf"), 0.0, self.settings.min_batch_s
        for group in group_set:
            last_s = self.in_flight.last_end_s(group)
            for tpot_s, first_s in self.in_flight.beginnings(group):
                part_s = max((1.0 - self.settings.tbt_guard) * tpot_s / (self.spp + 1), least_s)
                left_s = first_s + self.spp * part_s - last_s
                most_s = min(most_s, part_s)
                if left_s < FITS * part_s:
                    wait_s = max(wait_s, first_s - now)
        return most_s, wait_s

    def decode_tpot_s(self) -> float:
        """Predict the time per token of the decodes that wait for their next batch; 0 if none."""
        most_s = 0.0
        for groups, decodes in self.running.by_groups.items():
            for group in groups:
                load = self.predictor.load()
                load.add_decodes(len(decodes), decodes.keys[group], len(groups))
                most_s = max(most_s, self.spp * load.seconds())
        return most_s

    def _hurry(self, draft: BatchDraft, now: float) -> None:
        """Shorten a batch in a pipeline that a promise due soon would wait for too long.

        Routers leave a promise `least_drain_s` behind stage 0; the longest batches take `drain_s`.
        A batch that ends before those ahead of it have left the next stages delays nothing. Long
        before the end of a long prompt, shorter batches cost it more than they win.
        """
        promises, groups = self.promises, draft.group_set
        soon_s = now + promises.long_s
        least_s = min([promises.least_before_s(group, soon_s) for group in groups])
        if least_s < 0.0:
            drain_s = max(promises.drain_s + least_s, promises.least_drain_s)
            covered_s = min([self.in_flight.covered_s(group, now) for group in groups])
            draft.target_s = min(draft.target_s, max(drain_s / (self.spp - 1), covered_s))

    # --- decodes ----------------------------------------------------------------------------------

    def _draft_decodes(self, group_set: tuple[int, ...], target_s: float) -> BatchDraft:
        draft = BatchDraft(group_set, target_s)
        for group in group_set:
            draft.loads[group] = self.predictor.load()
        for groups, decodes in self.running.by_groups.items():
            if not len(decodes) or (groups != group_set and not set(groups) <= set(group_set)):
                continue
            count = decodes.batch_share(self.spp)
            keys = decodes.keys_of(count)
            draft.decodes.append((groups, count))
            for group in groups:
                draft.loads[group].add_decodes(count, keys[group], len(groups))
        return draft

    # --- prefills ---------------------------------------------------------------------------------

    def _fill(self, draft: BatchDraft, now: float) -> None:
        """Visit prefills in policy order until the batch is full.

        The relegated may have less of it than they are owed: others take the rest.
        """
        full_s, misses = draft.target_s, 0
        empty_s = max(draft.seconds, self.promises.overhead_s)
        occupied: set[int] = set()
        roomy: dict[int, bool] = {}
        yielding: list[tuple[Sequence, ChunkDraft | None, float]] = []
        candidates = self.order.iterate(draft.group_set, now, occupied)
        for tier, _, group, sequence, long, yields in candidates:
            if long and not occupied.isdisjoint(sequence.groups or sequence.assigned_groups[:1]):
                continue
            if not sequence.started and not self.admission.try_start(sequence, now):
                continue
            limit_s = full_s if not yields else min(full_s, draft.target_s * (1.0 - yields))
            if sequence.request.beyond_share and not sequence.kept:
                # A promised arrival of another tenant waits for this batch to end.
                limit_s = min(limit_s, BEYOND_SHARE * draft.target_s)
            rationed = tier == GUARANTEED and self.promises.payable_s[group] < draft.target_s
            if rationed:
                part = self.promises.payable_s[group] / draft.target_s
                limit_s = min(limit_s, empty_s + part * (draft.target_s - empty_s))
            chunk = self._place(draft, sequence)
            if chunk is None:
                continue
            if not self._cut(draft, chunk, limit_s):
                if rationed:
                    continue
                if yields:
                    yielding.append((sequence, None, full_s))
                    occupied.update(chunk.groups)
                    continue
                misses += 1
                if misses >= MISSES or self._is_full(draft, full_s):
                    break
                continue
            ends = sequence.scheduled_tokens + chunk.length == sequence.target_tokens
            chunk.guaranteed = tier == GUARANTEED
            if ends and not self.admission.account.may_end(
                sequence, now, guaranteed=chunk.guaranteed
            ):
                continue
            self._add(draft, chunk)
            if long and not rationed:
                occupied.update(chunk.groups)
                if yields:
                    yielding.append((sequence, chunk, full_s))
            if ends:
                if group not in roomy:
                    roomy[group] = self.promises.is_roomy(group)
                short = not long and roomy[group]
                full_s = min(full_s, self._finishing_s(draft, sequence, short, now))
            if chunk.cut and not yields and not rationed:
                if len(draft.group_set) == 1:
                    break
                if len(chunk.groups) > 1:  # others fill its groups' gaps and delay nothing
                    full_s = min(full_s, draft.seconds)
        for sequence, chunk_or_none, limit_s in yielding:
            self._grow(draft, sequence, chunk_or_none, limit_s)

    def _finishing_s(self, draft: BatchDraft, sequence: Sequence, short: bool, now: float) -> float:
        """Return how long a batch may be in which a prompt ends: its first token waits for it all.

        Not beyond the deadline of a kept prompt. With a short one only a set part of the budget,
        unless a promise is so tight that half a batch matters.
        """
        most_s = draft.target_s
        if sequence.kept:
            most_s = sequence.key[0] - (now + self.promises.drain_s)
        if short:
            most_s = min(most_s, self.settings.finish_fill * draft.target_s)
        return most_s

    def _is_full(self, draft: BatchDraft, limit_s: float) -> bool:
        """Return whether not even one step of an empty prompt fits."""
        step = self.settings.chunk_step_tokens
        return all(load.seconds_with(step, 0) > limit_s for load in draft.loads.values())

    def _place(self, draft: BatchDraft, sequence: Sequence) -> ChunkDraft | None:
        """Draft the largest chunk that has pages; None if there is no room in the group set."""
        left = self.groups.catch_up(sequence)
        tail, room = self.groups.next_tail(sequence)
        groups = sequence.groups
        for move in sequence.switching:
            groups = tuple(sorted({*groups, move.source, move.target}))
        if tail not in groups:
            groups = tuple(sorted((*groups, tail))) if groups else (tail,)
        if not room or (groups != draft.group_set and not draft.loads.keys() >= set(groups)):
            return None
        limit = min(left, room)
        if self.settings.long_prefill_threshold_tokens is not None:
            limit = min(limit, self.settings.long_prefill_threshold_tokens)
        return ChunkDraft(sequence, limit, tail, groups)

    def _cut(self, draft: BatchDraft, chunk: ChunkDraft, limit_s: float) -> bool:
        """Cut a chunk so that the batch stays within `limit_s` (Algorithm 2).

        False if no chunk fits."""
        settings, sequence, limit = self.settings, chunk.sequence, chunk.length
        if settings.budget == "tokens":
            rows = max(draft.loads[group].rows for group in chunk.groups)
            chunk.length = max(0, min(limit, settings.batch_tokens - rows))
        else:
            remaining = sequence.target_tokens - sequence.scheduled_tokens
            for group in chunk.groups:
                chunk.length = self.predictor.largest_chunk(
                    draft.loads[group],
                    sequence.tokens_by_group.get(group, 0),
                    chunk.length,
                    limit_s,
                    settings.chunk_step_tokens,
                    len(chunk.groups),
                    group == chunk.tail,
                    chunk.length == remaining,
                )
        chunk.cut = chunk.length < limit
        if len(sequence.assigned_groups) > 1:
            chunk.length -= self.groups.overhang(sequence, chunk.length, chunk.tail)
        return chunk.length > 0

    def _add(self, draft: BatchDraft, chunk: ChunkDraft) -> None:
        sequence = chunk.sequence
        self.groups.reserve(sequence, chunk.length, chunk.tail)
        yields = sequence.scheduled_tokens + chunk.length == sequence.target_tokens
        for group in chunk.groups:
            draft.loads[group].add_chunk(
                chunk.length,
                sequence.tokens_by_group.get(group, 0),
                len(chunk.groups),
                group == chunk.tail,
                yields,
            )
        draft.chunks.append(chunk)

    def _grow(
        self, draft: BatchDraft, sequence: Sequence, chunk: ChunkDraft | None, limit_s: float
    ) -> None:
        """Return to a long prefill the budget that it left to others and that they did not use."""
        larger_draft = self._draft_decodes(draft.group_set, draft.target_s)
        for other in draft.chunks:
            if other is not chunk:
                self._add(larger_draft, other)
        larger = self._place(larger_draft, sequence)
        if larger is None or not self._cut(larger_draft, larger, limit_s):
            return
        if chunk is not None and larger.length <= chunk.length:
            return
        self._add(larger_draft, larger)
        draft.loads, draft.chunks = larger_draft.loads, larger_draft.chunks

    def _escape(self, draft: BatchDraft, now: float, *, at_once: bool) -> None:
        """Add one smallest chunk after enough rounds without a prefill: the counted escape.

        `at_once`: no decode runs, so that no further round would be counted.
        """
        for group in draft.group_set:
            rounds = self.starved.get(group, 0) + 1
            if rounds < self.settings.max_starved_rounds and not at_once:
                continue
            for _, _, _, sequence, _, _ in self.order.iterate((group,), now, set()):
                if sequence.started or self.admission.try_start(sequence, now):
                    chunk = self._place(draft, sequence)
                    if chunk is not None:
                        chunk.length = min(chunk.length, self.settings.chunk_step_tokens)
                        self._add(draft, chunk)
                        draft.escaped = True
                        return

    # --- commit -----------------------------------------------------------------------------------

    def commit(self, draft: BatchDraft, batch_s: float) -> list[Chunk]:
        """Take the pages of the draft's prefills; return their chunks."""
        chunks = []
        for prefill in draft.chunks:
            sequence = prefill.sequence
            start = sequence.scheduled_tokens
            self.groups.extend(sequence, prefill.length, prefill.tail)
            chunks.append(
                Chunk(
                    sequence.number,
                    start,
                    prefill.length,
                    prefill.groups,
                    prefill.tail,
                    sequence.newest_pages(),
                    sequence.scheduled_tokens == sequence.target_tokens,
                )
            )
        self._account(draft, batch_s)
        return chunks

    def _account(self, draft: BatchDraft, batch_s: float) -> None:
        self.escapes += draft.escaped
        for group in draft.group_set:
            tokens = guaranteed = relegated = 0
            for chunk in draft.chunks:
                if group in chunk.groups:
                    tokens += chunk.length
                    guaranteed += chunk.length * chunk.guaranteed
                    relegated += 0 if chunk.sequence.kept else chunk.length
            starves = draft.waits[group] and not tokens
            self.starved[group] = self.starved.get(group, 0) + 1 if starves else 0
            if not self.promises.promising:
                continue
            token_s = batch_s / tokens if tokens else 0.0
            waiting = self.waiting[group]
            waits = waiting.relegated
            # A prompt that spans the group set waits for each group's relegated: it is divided.
            self.promises.account(
                group,
                batch_s / len(draft.group_set),
                guaranteed * token_s,
                (relegated - guaranteed) * token_s,
                waits,
            )
