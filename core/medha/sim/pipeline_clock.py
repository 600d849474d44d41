"""Completion times of the stages of a batch, from the predictor instead of a machine.

Tracks the state of the ranks: the tokens of each sequence in a KVP group, and the time until which
each (group, stage) is busy. Used by the simulated replica, and as the oracle of controller tests: a
fake runner answers each Step with StageDone at the times of `run`.

    start(stage) = max(end(stage − 1), every participant's stage free)   end = start + slowest group

A shared chunk's partial attention is exchanged in every layer, so start and end are common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from medha.batch import Batch, Move
from medha.corrections import REGIMES
from medha.predictor import BatchLoad, Predictor

Layout = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
Slowness = Callable[[int, int, int], float]


class StageTimes(NamedTuple):
    """End of each stage of a batch (all participants), and the seconds of the slowest stage."""

    ends_s: tuple[float, ...]
    slowest_s: float


class Misprediction:
    """Factor of a replica's real batch times over the predicted ones, within `error` of 1.

    Half of the error is a bias of each regime, the same on all replicas, which the predictor can
    learn. The other half is drawn for each batch.
    """

    def __init__(self, error: float, seed: int, replica: int) -> None:
        self._half = 0.5 * error
        biases = np.random.default_rng(seed)
        self._biases = self._half * biases.choice((-1.0, 1.0), len(REGIMES))
        self._noise = np.random.default_rng((seed, replica))
        self._number, self._drawn = 0, 0.0

    def __call__(self, number: int, stage: int, regime: int) -> float:
        if number != self._number:
            self._number, self._drawn = number, self._half * self._noise.uniform(-1.0, 1.0)
        return float(1.0 + self._biases[regime] + self._drawn)


class PipelineClock:
    """Completion times of batches on one replica.

    `predictor` stands for the machine: not the scheduler's own, which learns from these times.
    `layout(seq)` returns the groups of a new sequence's cached pages, as `Scheduler.layout` does.
    `slowness(number, stage, regime)` multiplies the time of a stage (noise, stragglers).
    """

    def __init__(
        self,
        predictor: Predictor,
        page_tokens: int,
        layout: Callable[[int], Layout],
        slowness: Slowness | None = None,
    ) -> None:
        self.predictor, self.page_tokens = predictor, page_tokens
        self.spp = predictor.topology.spp
        self.free_s: dict[int, list[float]] = {}
        self.held: dict[int, dict[int, int]] = {}
        self.busy_s = 0.0
        self._layout, self._slowness = layout, slowness or _exact
        self._moves: dict[int, Move] = {}

    def join(self, group: int, now: float) -> None:
        """Add a group whose ranks are ready at `now`."""
        self.free_s[group] = [now] * self.spp

    def leave(self, group: int) -> None:
        """Remove a group with everything that it holds."""
        self.free_s.pop(group, None)
        for shards in self.held.values():
            shards.pop(group, None)

    def copied(self, move: Move) -> None:
        """Record copied pages; the batch that names the move switches to them."""
        self._moves[move.id] = move

    def free_groups(self, now: float) -> frozenset[int]:
        """Groups whose stage 0 is idle."""
        return frozenset(group for group, stages in self.free_s.items() if stages[0] <= now)

    def run(self, batch: Batch, now: float) -> StageTimes:
        """Start a batch at `now`."""
        loads = self._loads(batch)
        ends, end, slowest = [], now, 0.0
        for stage in range(self.spp):
            start = max([end, *(self.free_s[group][stage] for group in loads)])
            seconds = max(
                load.stage_s(stage) * self._slowness(batch.number, stage, load.regime)
                for load in loads.values()
            )
            end, slowest = start + seconds, max(slowest, seconds)
            for group in loads:
                self.free_s[group][stage] = end
            self.busy_s += seconds * len(loads)
            ends.append(end)
        return StageTimes(tuple(ends), slowest)

    def forget(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            self.held.pop(seq, None)

    def _loads(self, batch: Batch) -> dict[int, BatchLoad]:
        """Loads of a batch whose tokens are then counted as held."""
        self.forget(batch.ended)
        for chunk in batch.chunks:
            if chunk.seq not in self.held:
                self.held[chunk.seq] = {
                    group: len(pages) * self.page_tokens
                    for group, pages in self._layout(chunk.seq)
                    if pages
                }
            if len(chunk.groups) == 1:  # it may have caught up with others
                self.held[chunk.seq][chunk.tail] = chunk.start
        for number in batch.switches:
            self._switch(self._moves.pop(number))
        loads = self._batch_loads(batch)
        for chunk in batch.chunks:
            shards = self.held[chunk.seq]
            shards[chunk.tail] = shards.get(chunk.tail, 0) + chunk.length
        return loads

    def _batch_loads(self, batch: Batch) -> dict[int, BatchLoad]:
        loads: dict[int, BatchLoad] = {}
        for chunk in batch.chunks:
            shards, groups = self.held.get(chunk.seq, {}), len(chunk.groups)
            for group in chunk.groups:
                load = loads.get(group)
                if load is None:
                    load = loads[group] = self.predictor.load()
                keys, tail = shards.get(group, 0), group == chunk.tail
                if chunk.decode:
                    load.add_decode(keys, groups, tail)
                else:
                    load.add_chunk(chunk.length, keys, groups, tail, chunk.yields)
        return loads

    def _switch(self, move: Move) -> None:
        shards, tokens = self.held[move.seq], len(move.logical) * self.page_tokens
        shards[move.source] = shards.get(move.source, 0) - tokens
        shards[move.target] = shards.get(move.target, 0) + tokens


def _exact(number: int, stage: int, regime: int) -> float:
    return 1.0
