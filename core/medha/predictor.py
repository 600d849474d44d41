"""How long a batch takes, the largest chunk that fits a time, and how long a prefill takes.

Predicts from a machine's profile, a model's shape and a topology; serves the packer (per chunk),
the scheduler and admission (per request), and the simulator (in place of the GPU). Per layer and
rank, with rows summed over the batch and attention summed over its entries:

    t_layer = products(rows) + elementwise + Σ attention + all-reduce + KVP
    t_stage = layers·t_layer [+ head on the last] + batch + entries·sequence + point-to-point

(Medha, section 4.4, with a smooth roofline, and in steps of a tile where those are known, see
`products`.) Every term grows with a chunk's length, so the largest chunk is found by interpolation
and halving. It measures nothing: `observe` is told, and
corrects attention and the rest (see `corrections`).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable

from medha.corrections import PREFILL, Corrections, Learned
from medha.costs import BatchLoad, Costs
from medha.model import ModelShape
from medha.profile import Profile
from medha.topology import Topology

__all__ = ["BatchLoad", "Predictor"]


REMEMBERED = 4096  # lengths of prompts
# Of a limit of so few steps all is tried at once; after so many guesses the rest is halved.
SHORT_STEPS, GUESSES = 128, 8

# Uncorrected seconds of all but attention, and of attention.
Parts = tuple[float, float]


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
        self._corrections = self._costs.corrections
        self.tokens_per_group = topology.tokens_per_group or self._keys_within(budget_s)
        self._empty = BatchLoad(self._costs)
        # knots[i]: prefix; spent[i]: stage seconds up to it, slowest[i]: slowest chunk up to it,
        # both uncorrected
        self._knots, self._chunks = [0], [1 << 20]
        self._spent: list[Parts] = [(0.0, 0.0)]
        self._slowest: list[Parts] = [(0.0, 0.0)]
        self._whole: dict[int, tuple[Parts, Parts]] = {}
        self._head_s = self._costs.head(1)

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
        above, above_s = -(-limit_tokens // step_tokens), 0.0  # in steps: too many, if not all
        if above <= SHORT_STEPS:
            above_s = probe(limit_tokens, keys, groups, tail, yields)
            if above_s <= budget_s:
                return limit_tokens
        most, row_s = load.most(keys, budget_s, tail)
        bound = math.ceil(max(1.0, most / step_tokens)) + 1
        if bound < above or (bound == above and not above_s):
            above, above_s = bound, probe(bound * step_tokens, keys, groups, tail)
        elif not above_s:
            above_s = probe(limit_tokens, keys, groups, tail, yields)
            if above_s <= budget_s:
                return limit_tokens
        below, at, at_s, guesses = 0, above, above_s, 0
        while above - below > 1:  # seconds(below) <= budget < seconds(above)
            guess = at - (at_s - budget_s) / (row_s * step_tokens)
            if guesses >= GUESSES:
                guess = (below + above) / 2
            at = min(max(int(guess), below + 1), above - 1)
            at_s = probe(at * step_tokens, keys, groups, tail)
            guesses += 1
            if at_s <= budget_s:
                below = at
            else:
                above = at
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
        (keys, groups), length = self._shard(cached), tokens - cached
        if length <= max(self.step_tokens, self._empty.most(keys, self.budget_s)[0]):  # one chunk?
            load = BatchLoad(self._costs)
            load.add_chunk(length, keys, groups, yields=True)
            if length <= self.step_tokens or load.seconds() <= self.budget_s:
                whole_s = sum(load.stage_s(stage) for stage in range(self.topology.spp))
                return whole_s, whole_s - load.seconds() if self.topology.spp > 1 else 0.0
        costs, regime = self._costs, PREFILL + (groups > 1)
        factor, skew = costs.factors[regime], costs.skews[regime]
        (rest_s, attention_s), worst = self._whole.get(tokens) or self._spent_on(tokens)
        spent, slowest = rest_s + skew * attention_s, worst[0] + skew * worst[1]
        if cached:
            rest_s, attention_s = self._share(cached)
            spent -= rest_s + skew * attention_s
        rows = min(length, self._chunks[1])
        unsent_s = costs.p2p_s + rows * costs.p2p_row  # the last stage hands nothing on
        total = max(spent, slowest) + (self.topology.spp - 1) * slowest - unsent_s
        drain = (self.topology.spp - 1) * slowest
        return (total + self._head_s) * factor, drain * factor

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

    def observe(self, load: BatchLoad, predicted_s: float, measured_s: float) -> None:
        """Learn from a batch that was predicted and measured; `load`: of its fullest group."""
        self._corrections.observe(load.regime, predicted_s, measured_s, load.attention)

    @property
    def correction(self) -> float:
        """Factor by which prefills exceed the profile, their attention aside."""
        return self._costs.factors[PREFILL]

    @property
    def error(self) -> float:
        """Relative error of the batches that hold chunks, exponentially weighted."""
        errors = self._corrections.errors
        return max(errors[2], errors[PREFILL])

    def learned(self) -> Learned:
        """All that observation changed."""
        return self._corrections.learned()

    def restore(self, learned: Learned) -> None:
        """Take over what another predictor of the same profile has learned (a router, from
        LoadReport)."""
        self._corrections.restore(learned)

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
        corrections = self._corrections
        kept = corrections.learned()
        corrections.restore(Corrections(0.0).learned())
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
                parts, (rest_s, attention_s) = self._parts(chunk, keys, groups), self._spent[-1]
                self._knots.append(prefix + many * chunk)
                self._spent.append((rest_s + many * parts[0], attention_s + many * parts[1]))
                self._slowest.append(max(self._slowest[-1], parts, key=sum))
                self._chunks.append(chunk)
        finally:
            corrections.restore(kept)

    def _parts(self, length: int, keys: int, groups: int) -> Parts:
        """A chunk alone."""
        costs = self._costs
        attention_s = costs.attention(length, keys, tail=True)
        layer_s = costs.layer(length, attention_s, length * (groups - 1))
        whole_s = costs.slowest(length, layer_s, 0, 1)
        return whole_s - costs.first * attention_s, costs.first * attention_s

    def _spent_on(self, tokens: int) -> tuple[Parts, Parts]:
        """Of a whole prefill of `tokens`: its stage's time, and its slowest chunk's; kept, as the
        remaining work of a waiting prompt is asked for again with every chunk."""
        self._extend(tokens)
        after = bisect.bisect_left(self._knots, tokens)
        before = after - 1
        if self._knots[after] == tokens:
            spent = self._spent[after], self._slowest[after]
        elif self._knots[after] - self._knots[before] > self._chunks[after]:
            spent = self._share(tokens), self._slowest[after]
        else:
            keys, groups = self._shard(self._knots[before])
            parts = self._parts(tokens - self._knots[before], keys, groups)
            rest_s, attention_s = self._spent[before]
            whole = rest_s + parts[0], attention_s + parts[1]
            spent = whole, max(self._slowest[before], parts, key=sum)
        if len(self._whole) >= REMEMBERED:
            self._whole.clear()
        self._whole[tokens] = spent
        return spent

    def _share(self, tokens: int) -> Parts:
        """The stage's time up to `tokens`, linear between knots."""
        if self._knots[-1] < tokens:
            self._extend(tokens)
        after = bisect.bisect_left(self._knots, tokens)
        if self._knots[after] == tokens:
            return self._spent[after]
        low, high = self._knots[after - 1], self._knots[after]
        part = (tokens - low) / (high - low)
        (rest_s, attention_s), above = self._spent[after - 1], self._spent[after]
        return rest_s + part * (above[0] - rest_s), attention_s + part * (above[1] - attention_s)
