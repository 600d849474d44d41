"""Offered load (ρ): the seconds of a replica that requests take, prefill and decode.

While sequences decode, a batch lasts at most TPOT / spp, and a long prompt reads its whole prefix
in every batch. Prefills therefore take longer, the smaller the TPOT in force:

    decodes(t)  = arrivals per second · mean (output tokens − 1) · t     at once, with TPOT t
    in_force(t) = P(t is the least TPOT of a running decode)             their number is Poisson
    prefill     = 1 / Σ_t in_force(t) / busy seconds in batches of t / spp   (t = ∞: the longest)
    request     = prefill + (output tokens − 1) · seconds that one decode adds to a full batch

The pipeline's drain is not counted, because other batches run meanwhile. KVP groups work side by
side: a batch counts for the part of the replica's `kvp_max` groups that run it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from medha.predictor import Predictor

Floats = npt.NDArray[np.float64]
SAMPLE = 64  # decodes over which the steps of a machine's tiles are averaged
LONGEST_CHUNK = 1 << 20
LEAST_S = 1e-9
HALVINGS = 60


class Demand(NamedTuple):
    """Tokens of a request, those that are cached, and its TPOT target."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    tpot_s: float


class OfferedLoad:
    """Load that requests offer to one replica, by the rate at which they arrive.

    `min_batch_s`: length of the shortest batch that the scheduler fills, however small the TPOT.
    """

    def __init__(
        self, predictor: Predictor, requests: Sequence[Demand], min_batch_s: float = 0.0
    ) -> None:
        tokens: dict[float, int] = {}
        for request in requests:
            if request.output_tokens > 1:
                tokens[request.tpot_s] = tokens.get(request.tpot_s, 0) + request.output_tokens - 1
        tpots = sorted(tokens)
        self._at_once = [tokens[tpot_s] * tpot_s / len(requests) for tpot_s in tpots]
        spp = predictor.topology.spp
        batches = {
            tpot_s: FullBatches(predictor, max(min_batch_s, tpot_s / spp))
            for tpot_s in (*tpots, math.inf)
        }
        self._prefill_s = np.array(
            [[full.prefill_s(request) for request in requests] for full in batches.values()]
        )
        self._decode_s = np.array(
            [
                batches[request.tpot_s].decodes_s(request) if request.output_tokens > 1 else 0.0
                for request in requests
            ]
        )

    def request_s(self, per_second: float) -> Floats:
        """Seconds that each request takes of a replica at which `per_second` of them arrive."""
        without = [1.0]  # decodes with a TPOT up to the first, the second, … of them
        for at_once in self._at_once:
            without.append(without[-1] * math.exp(-per_second * at_once))
        in_force = [before - after for before, after in itertools.pairwise((*without, 0.0))]
        rates = sum(
            part / np.maximum(prefill_s, LEAST_S)
            for part, prefill_s in zip(in_force, self._prefill_s, strict=True)
        )
        return np.asarray(1.0 / rates + self._decode_s)

    def at(self, per_second: float) -> float:
        """Load of a replica at which `per_second` requests arrive."""
        return float(per_second * self.request_s(per_second).mean())

    def per_second(self, load: float) -> float:
        """Requests per second and replica that offer this load."""
        low, high = 0.0, load / float(self.request_s(0.0).mean())
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.at(middle) < load else (low, middle)
        return high


class FullBatches:
    """Batches of a replica that last `batch_s`, or as long as its batches may last."""

    def __init__(self, predictor: Predictor, batch_s: float) -> None:
        if batch_s < predictor.budget_s:
            topology = msgspec.structs.replace(
                predictor.topology, tokens_per_group=predictor.tokens_per_group
            )
            predictor = Predictor(predictor.profile, predictor.shape, topology, batch_s)
        self._predictor, self._groups = predictor, predictor.topology.kvp_max
        self._load = predictor.load()
        fits = predictor.largest_chunk(self._load, 0, LONGEST_CHUNK, predictor.budget_s)
        self._load.add_chunk(max(1, fits), 0)
        self._load.add_decode(0)
        self._seconds = self._load.seconds()

    def prefill_s(self, request: Demand) -> float:
        """Seconds of the replica until all prompt tokens are computed, without the drain."""
        if self._groups == 1:
            return self._predictor.busy_s(request.prompt_tokens, request.cached_tokens)
        seconds, start, size = 0.0, request.cached_tokens, self._predictor.tokens_per_group
        while start < request.prompt_tokens:
            groups, end = min(self._groups, start // size + 1), request.prompt_tokens
            if groups < self._groups:
                end = min(end, groups * size)
            seconds += self._predictor.busy_s(end, start) * groups / self._groups
            start = end
        return seconds

    def decodes_s(self, request: Demand) -> float:
        """Seconds of the replica that the decodes take, all at their mean depth."""
        depth, size = (
            request.prompt_tokens + request.output_tokens // 2,
            self._predictor.tokens_per_group,
        )
        groups = min(self._groups, -(-depth // size))
        one_s = self._added_s(depth - (groups - 1) * size, groups)
        if groups > 1:
            one_s += (groups - 1) * self._added_s(size, groups)
        return (request.output_tokens - 1) * one_s / self._groups

    def _added_s(self, keys: int, groups: int) -> float:
        """Seconds that a decode adds to the batch of a group that holds `keys` of its tokens."""
        load = self._load.copy()
        load.add_decodes(SAMPLE, SAMPLE * (keys + 1), groups)
        return (load.seconds() - self._seconds) / SAMPLE
