"""How long a batch takes, the largest chunk that fits a time, and how long a prefill takes.

Predicts from a machine's profile, a model's shape and a topology; serves the packer (per chunk),
the scheduler and admission (per request), and the simulator (in place of the GPU). Per layer and
rank, with rows summed over the batch and attention summed over its entries:

    t_layer = (t_mem^p + (rows·t_flop)^p)^(1/p) + elementwise + Σ attention + all-reduce + KVP
    t_stage = layers·t_layer [+ head on the last] + batch + entries·sequence + point-to-point

(Medha, section 4.4, with a smooth roofline.) Every term is convex and grows with a chunk's
length, so the largest chunk is found by interpolation. It measures nothing: `observe` is told.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable

from medha.costs import PREFILL, REGIMES, BatchLoad, Costs
from medha.model import ModelShape
from medha.profile import Profile
from medha.topology import Topology

__all__ = ["BatchLoad", "Predictor"]


class Predictor:
    """Times of batches and prefills; the only state is the online correction and a lazy table.

    `budget_s`: time per batch of the adaptive chunks behind `prefill_s`.
    """

    def __init__(
        self, profile: Profile, shape: ModelShape, topology: Topology,
        budget_s: float = 0.1, step_tokens: int = 32,
    ) -> None:  # fmt: skip
        self.profile, self.shape, self.topology = profile, shape, topology
        self.budget_s, self.step_tokens = budget_s, step_tokens
        self._costs = Costs(profile, shape, topology)
        self._errors = [profile.error] * len(REGIMES)
        self.tokens_per_group = topology.tokens_per_group or self._keys_within(budget_s)
        self._empty = BatchLoad(self._costs)
        # knots[i]: prefix; spent[i]: stage seconds up to it; slowest[i]: slowest chunk up to it
        self._knots, self._spent, self._slowest, self._chunks = [0], [0.0], [0.0], [1 << 20]

    def load(self) -> BatchLoad:
        """An empty batch of one group, to be added to."""
        return BatchLoad(self._costs)

    def batch_s(self, entries: Iterable[tuple[int, int, bool]]) -> float:
        """Seconds of the slowest stage for (length, keys, decode) entries in one group."""
        load = BatchLoad(self._costs)
        for length, keys, decode in entries:
            if decode:
                load.add_decode(keys)
            else:
                load.add_chunk(length, keys)
        return load.seconds()

    def largest_chunk(
        self, load: BatchLoad, keys: int, limit_tokens: int, budget_s: float, step_tokens: int = 32,
        groups: int = 1, tail: bool = True, yields: bool = False,
    ) -> int:  # fmt: skip
        """Most tokens of a prompt that `load` can take within `budget_s`; 0 when none fit.

        A multiple of `step_tokens`, or `limit_tokens` itself (`yields`: the chunk of the full limit
        samples). A shared chunk is the smallest of the answers for its groups.
        """
        if limit_tokens <= 0:
            return 0
        probe = load.seconds_with
        most = max(step_tokens, math.ceil(load.most(keys, budget_s) / step_tokens) * step_tokens)
        if most >= limit_tokens:
            above_s = probe(limit_tokens, keys, groups, tail, yields)
            if above_s <= budget_s:
                return limit_tokens
            above = -(-limit_tokens // step_tokens)  # in steps: too many
        else:
            above = most // step_tokens + 1
            above_s = probe(above * step_tokens, keys, groups, tail)
        below = 1
        if below >= above:
            return 0
        below_s = probe(step_tokens, keys, groups, tail)
        if below_s > budget_s:
            return 0
        halve = False
        while above - below > 1:  # seconds(below) <= budget < seconds(above)
            if halve:
                middle = (below + above) // 2
            else:
                part = (budget_s - below_s) / (above_s - below_s)
                middle = below + max(1, min(above - below - 1, int(part * (above - below))))
            seconds = probe(middle * step_tokens, keys, groups, tail)
            if seconds <= budget_s:
                halve = not halve and middle - below < (above - below) // 4
                below, below_s = middle, seconds
            else:
                halve = False
                above, above_s = middle, seconds
        return below * step_tokens

    def prefill_s(self, tokens: int, cached: int = 0) -> float:
        """T(n): seconds until the first token of `tokens`, of which `cached` are held, when idle.

        Adaptive chunks of `budget_s`, one after the other through the pipeline (a proportionate
        flow shop: Σ t + (spp − 1) · max t), KVP groups joining as the context grows. Also the
        remaining work of a prefill whose stage-0 cursor is at `cached`.
        """
        return self._prefill_s(tokens, cached)[0]

    def busy_s(self, tokens: int, cached: int = 0) -> float:
        """Seconds of `prefill_s` that the slowest stage works: Σ t, without the drain."""
        whole_s, drain_s = self._prefill_s(tokens, cached)
        return whole_s - drain_s

    def _prefill_s(self, tokens: int, cached: int) -> tuple[float, float]:
        """(T(n), how much of it the pipeline drains)."""
        if tokens <= cached:
            return 0.0, 0.0
        keys, groups = self._shard(cached)
        load, length = BatchLoad(self._costs), tokens - cached
        load.add_chunk(length, keys, groups, yields=True)
        if length <= self.step_tokens or load.seconds() <= self.budget_s:
            whole_s = sum(load.stage_s(stage) for stage in range(self.topology.spp))
            return whole_s, whole_s - load.seconds() if self.topology.spp > 1 else 0.0
        spent, slowest = self._spent_s(tokens)
        if cached:
            spent -= self._share_s(cached)
        factor = self._costs.factors[PREFILL + (groups > 1)]
        costs, rows = self._costs, min(length, self._chunks[1])
        unsent_s = costs.p2p_s + rows * costs.p2p_row  # the last stage hands nothing on
        total = max(spent, slowest) + (self.topology.spp - 1) * slowest - unsent_s
        drain = (self.topology.spp - 1) * slowest
        return (total + costs.head(1)) * factor, drain * factor

    def step_s(self, tokens: int) -> float:
        """Seconds by which a batch grows with one more step of a prompt that holds `tokens`."""
        keys, groups = self._shard(tokens)
        probe, step = self._empty.seconds_with, self.step_tokens
        return probe(2 * step, keys, groups) - probe(step, keys, groups)

    def move_s(self, tokens: int) -> float:
        """Seconds to copy the KV of `tokens` from one group to another (all stages at once)."""
        kv_bytes = tokens * self._costs.first * self.shape.kv_bytes_per_token_layer
        each = kv_bytes / min(self.topology.tp, self.shape.kv_heads)
        return self.profile.transfer_latency_s + each / self.profile.transfer_bytes_per_s

    def observe(self, regime: int, predicted_s: float, measured_s: float) -> None:
        """Learn from a batch of `regime` (see BatchLoad.regime) that was predicted and measured.

        The factor moves by an exponentially weighted mean of the log ratio; one sample counts for
        at most a factor of two, so a single pause of the machine moves it by at most 7 %.
        """
        if predicted_s <= 0.0 or measured_s <= 0.0:
            return
        ratio = math.log(measured_s / predicted_s)
        factors = self._costs.factors
        moved = factors[regime] * math.exp(0.1 * min(math.log(2.0), max(-math.log(2.0), ratio)))
        factors[regime] = min(16.0, max(1.0 / 16.0, moved))
        self._errors[regime] += 0.05 * (min(1.0, abs(ratio)) - self._errors[regime])

    @property
    def corrections(self) -> dict[str, float]:
        """Factor by regime, by which measured batches exceed the profile."""
        return dict(zip(REGIMES, self._costs.factors, strict=True))

    @property
    def correction(self) -> float:
        """Factor of prefills, the one that admission needs."""
        return self._costs.factors[PREFILL]

    @property
    def error(self) -> float:
        """Relative error of the batches that hold chunks, exponentially weighted."""
        return max(self._errors[2], self._errors[PREFILL])

    def learned(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(factors, errors) by regime: all that observation changed."""
        return tuple(self._costs.factors), tuple(self._errors)

    def restore(self, learned: tuple[tuple[float, ...], tuple[float, ...]]) -> None:
        """Take over what another predictor of the same profile has learned."""
        self._costs.factors[:], self._errors[:] = learned[0], learned[1]

    def correct(self, factor: float) -> None:
        """Take over a factor measured elsewhere (a router learns it from LoadReport)."""
        self._costs.factors[:] = [factor] * len(REGIMES)

    def _keys_within(self, budget_s: float) -> int:
        """Context at which one step of a prompt still fits twice into the budget."""
        load, low, high = BatchLoad(self._costs), 1024, 1 << 40
        if self.topology.kvp_max == 1:
            return high
        while high - low > 1024:
            middle = (low + high) // 2
            fits = load.seconds_with(self.step_tokens, middle) <= 0.5 * budget_s
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _shard(self, tokens: int) -> tuple[int, int]:
        """Keys in the fullest group, and active groups, of a sequence that holds `tokens`."""
        most = self.topology.kvp_max
        active = min(most, max(1, -(-tokens // self.tokens_per_group)))
        return max(min(tokens, self.tokens_per_group), -(-tokens // active)), active

    def _extend(self, tokens: int) -> None:
        """Lay knots up to `tokens`; each spans one chunk, or many equal ones far from zero."""
        factor = self._costs.factors
        kept, factor[:] = factor[:], [1.0] * len(REGIMES)
        try:
            while self._knots[-1] < tokens:
                prefix, last = self._knots[-1], self._chunks[-1]
                keys, groups = self._shard(prefix)
                chunk = self.largest_chunk(
                    self._empty, keys, 2 * last, self.budget_s, self.step_tokens, groups
                )
                chunk = chunk or self.step_tokens
                many = max(1, prefix // (256 * chunk))
                keys, groups = self._shard(prefix + (many - 1) * chunk // 2)
                seconds = self._empty.seconds_with(chunk, keys, groups)
                self._knots.append(prefix + many * chunk)
                self._spent.append(self._spent[-1] + many * seconds)
                self._slowest.append(max(self._slowest[-1], seconds))
                self._chunks.append(chunk)
        finally:
            factor[:] = kept

    def _spent_s(self, tokens: int) -> tuple[float, float]:
        """Uncorrected stage seconds of a whole prefill of `tokens`, and its slowest chunk's."""
        self._extend(tokens)
        after = bisect.bisect_left(self._knots, tokens)
        if self._knots[after] == tokens:
            return self._spent[after], self._slowest[after]
        before = after - 1
        if self._knots[after] - self._knots[before] > self._chunks[after]:
            return self._share_s(tokens), self._slowest[after]
        keys, groups = self._shard(self._knots[before])
        raw = self._empty.seconds_with(tokens - self._knots[before], keys, groups)
        raw /= self._costs.factors[PREFILL + (groups > 1)]
        return self._spent[before] + raw, max(self._slowest[before], raw)

    def _share_s(self, tokens: int) -> float:
        """Uncorrected stage seconds up to `tokens`, linear between knots."""
        self._extend(tokens)
        after = bisect.bisect_left(self._knots, tokens)
        if self._knots[after] == tokens:
            return self._spent[after]
        low, high = self._knots[after - 1], self._knots[after]
        part = (tokens - low) / (high - low)
        return self._spent[after - 1] + part * (self._spent[after] - self._spent[after - 1])
