"""Predictor of batch times, of the largest chunk within a time budget, and of prefill times.

Applies a machine's profile to a model's shape and a topology. Serves the batch builder (per chunk),
the scheduler and admission (per request) and the simulator (in place of the GPU). Per layer and
rank, with rows summed over the batch and attention summed over its entries:

    t_layer = products(rows) + elementwise + Σ attention + all-reduce + KVP [+ adapters]
    t_stage = layers·t_layer [+ head on the last] + batch + entries·sequence + point-to-point

(Medha, section 4.4, with a smooth roofline, and in steps of tiles where known, see `Products`.)
Every term grows with a chunk's length, so interpolation and bisection find the largest chunk.
`observe` takes measured times and corrects attention and the rest (see `corrections`). Plain
floats, because the batch builder calls this code thousands of times a second.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from math import pow as power

from medha.config import CHUNK_STEP_TOKENS
from medha.corrections import MIXED, PREFILL, Corrections, Learned
from medha.model import ModelShape, pairs
from medha.profile import Profile
from medha.topology import Topology, kv_heads_of, stage_layers

REMEMBERED = 4096  # lengths of prompts, steps of rows
# Up to SHORT_STEPS the whole limit is tried first; after GUESSES interpolations, bisect.
SHORT_STEPS, GUESSES = 128, 8
ENDLESS = 1 << 40  # tokens
# Batches for the cost of one more decode: from few rows to many, and a step of one tile.
FEW_ROWS, MANY_ROWS, STEP_ROWS = 256, 768, 64

# Uncorrected seconds of all but attention, and of attention.
Parts = tuple[float, float]
# Depth, columns, groups, and seconds to read a weight.
Product = tuple[float, float, float, float]


class Products:
    """Seconds of one rank's matrix products, of 1/`tp` of a layer and of the head.

    A GPU computes in tiles. Per product of `rows` with a matrix of depth K and N columns, on S
    multiprocessors:

        waves   = ⌈rows / tile_rows⌉ · ⌈N / tile_columns⌉ / S, rounded up by `wave_share`
        t_flop  = min over tiles of 2·K·tile_rows·tile_columns·S·waves / (flops per s · efficiency)
        t       = (t_mem^p + t_flop^p)^(1/p) + product_s

    So 136 rows cost as much as 192 or 256, and time grows in steps of the smallest tile; each step
    is computed once. Without tiles (a CPU, or a machine with unknown tiles) all products of a layer
    are one: `(t_mem^p + (rows·t_flop)^p)^(1/p)`. The result is never less than rows · `flop`.

    A layer with E experts, k per token, reads those that any row selects: by expectation
    G = E·(1 − (1 − k/E)^rows). Each multiplies rows·k/G rows. Gathering, gating and adding these
    rows·k results counts here too. `layer` is the mean of all layers.
    """

    __slots__ = (
        "_bytes_s",
        "_dense_flop",
        "_expert_flop",
        "_expert_mem",
        "_expert_share",
        "_head_bytes_s",
        "_heads",
        "_inverse",
        "_layer",
        "_mixture",
        "_moved",
        "_of_attention",
        "_of_expert",
        "_of_head",
        "_of_layer",
        "_of_routed",
        "_p",
        "_product_s",
        "_routed",
        "_routed_mem",
        "_shape",
        "_share",
        "_spots",
        "_steps",
        "_tiles",
        "flop",
        "head_flop",
        "head_mem",
        "mem",
    )

    def __init__(self, profile: Profile, shape: ModelShape, tp: int) -> None:
        self._p, self._inverse = profile.roofline_power, 1.0 / profile.roofline_power
        self._bytes_s = shape.projection_bytes / profile.linear_bytes_per_s
        self._head_bytes_s = shape.param_bytes / profile.linear_bytes_per_s
        weights = shape.attention_params_of(tp) + shape.mlp_params / tp
        plain_s = shape.absorbed_params_of(tp) * (self._head_bytes_s - self._bytes_s)
        head = shape.vocab / tp
        head_weights = head * shape.hidden
        self.mem = power(weights * self._bytes_s + plain_s, self._p)
        self.flop = self._dense_flop = 2.0 * weights / profile.linear_flops_per_s
        self.head_mem = power(head_weights * self._head_bytes_s, self._p)
        self.head_flop = 2.0 * head_weights / profile.linear_flops_per_s
        self._product_s, self._share = profile.product_s, profile.wave_share
        self._spots = float(profile.multiprocessors)
        # (rows, columns, seconds of a wave of them per unit of depth)
        self._tiles = tuple(
            (
                tile.rows,
                float(tile.columns),
                2.0
                * tile.rows
                * tile.columns
                * self._spots
                / (profile.linear_flops_per_s * tile.efficiency),
            )
            for tile in profile.tiles
        )
        self._steps = min((tile.rows for tile in profile.tiles), default=1)
        hidden, inner = float(shape.hidden), shape.intermediate / tp
        # (depth, columns, groups, seconds to read a weight): of attention, into the gated MLP, out
        # of it; the head
        read_s, head_read_s = self._bytes_s, self._head_bytes_s
        self._of_attention = _attention_products(shape, tp, read_s, head_read_s)
        into, out_of = (hidden, 2.0 * inner, 1.0, read_s), (inner, hidden, 1.0, read_s)
        self._of_layer = (*self._of_attention, into, out_of)
        self._of_head = ((hidden, head, 1.0, head_read_s),)
        self._layer: dict[int, float] = {}
        self._heads: dict[int, float] = {}
        self._shape, self._expert_share = shape, shape.expert_share
        if self._expert_share:
            self._set_experts(profile, shape, tp)

    def _set_experts(self, profile: Profile, shape: ModelShape, tp: int) -> None:
        """Set the costs of layers with experts, and the mean `flop`."""
        selected, inner = shape.experts_per_token, shape.expert_intermediate / tp
        hidden = float(shape.hidden)
        shared = shape.shared_intermediate / tp
        rest = shape.attention_params_of(tp) + shape.router_params + shape.shared_params / tp
        plain = shape.absorbed_params_of(tp) + shape.router_params
        expert = shape.expert_params / tp
        self._routed_mem = (rest - plain) * self._bytes_s + plain * self._head_bytes_s
        self._expert_mem = expert * self._bytes_s
        self._expert_flop = 2.0 * (rest + selected * expert) / profile.linear_flops_per_s
        moved = selected * (4.0 * hidden + 3.0 * inner) + 3.0 * shared
        moved *= max(shape.param_bytes, 2.0)
        self._moved = moved / profile.elementwise_bytes_per_s
        router = (hidden, float(shape.experts), 1.0, self._head_bytes_s)
        self._of_routed = (*self._of_attention, router)
        if shared:
            read_s = self._bytes_s
            into, out_of = (hidden, 2.0 * shared, 1.0, read_s), (shared, hidden, 1.0, read_s)
            self._of_routed = (*self._of_routed, into, out_of)
        self._of_expert = ((hidden, 2.0 * inner), (inner, hidden))
        self._routed: dict[int, float] = {}
        self._mixture: dict[int, float] = {}
        self.flop += self._expert_share * (self._expert_flop + self._moved - self.flop)

    def layer(self, rows: int) -> float:
        """Seconds of a layer's products over `rows`; non-decreasing in `rows`."""
        share = self._expert_share
        if not share:
            return self._dense(rows)
        seconds = self._mixture.get(rows)
        if seconds is None:
            if len(self._mixture) >= REMEMBERED:
                self._mixture.clear()
            seconds = share * self._experts(rows)
            if share < 1.0:
                seconds += (1.0 - share) * self._dense(rows)
            self._mixture[rows] = seconds
        return seconds

    def _dense(self, rows: int) -> float:
        """Seconds of a layer without experts."""
        if not self._tiles:
            return power(self.mem + power(rows * self._dense_flop, self._p), self._inverse)
        return self._looked_up(self._layer, self._of_layer, -(-rows // self._steps))

    def _experts(self, rows: int) -> float:
        """Seconds of a layer with experts."""
        read = self._shape.experts_read(rows)
        moved_s = rows * self._moved
        if not self._tiles:
            mem = power(self._routed_mem + read * self._expert_mem, self._p)
            return power(mem + power(rows * self._expert_flop, self._p), self._inverse) + moved_s
        step = -(-rows // self._steps)
        seconds = self._looked_up(self._routed, self._of_routed, step)
        rows_each = rows * self._shape.experts_per_token / read
        for depth, columns in self._of_expert:
            seconds += self._product(depth, columns, rows_each, self._bytes_s, read)
        return seconds + moved_s

    def head(self, rows: int) -> float:
        """Seconds of the vocabulary projection of `rows`."""
        if not self._tiles:
            return power(self.head_mem + power(rows * self.head_flop, self._p), self._inverse)
        step = -(-rows // self._steps)
        return self._looked_up(self._heads, self._of_head, step)

    def _looked_up(
        self,
        known: dict[int, float],
        products: tuple[Product, ...],
        step: int,
    ) -> float:
        seconds = known.get(step)
        if seconds is None:
            if len(known) >= REMEMBERED:
                known.clear()
            seconds = 0.0
            for depth, columns, groups, bytes_s in products:
                seconds += self._product(depth, columns, step * self._steps, bytes_s, groups)
            known[step] = seconds
        return seconds

    def _product(
        self, depth: float, columns: float, rows: float, bytes_s: float, groups: float = 1.0
    ) -> float:
        """Seconds of a product of `rows`, or of as many rows in each of `groups` in one launch;
        `bytes_s` of them to read a weight."""
        best_s = math.inf
        for tile_rows, tile_columns, wave_s in self._tiles:
            tiles = groups * math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
            waves = tiles / self._spots
            waves += self._share * (math.ceil(waves) - waves)
            best_s = min(best_s, depth * wave_s * waves)
        mem = power(groups * depth * columns * bytes_s, self._p)
        return power(mem + power(best_s, self._p), self._inverse) + self._product_s


def _attention_products(
    shape: ModelShape, tp: int, read_s: float, plain_s: float
) -> tuple[Product, ...]:
    """Return a shard's products around attention; `plain_s` to read a weight that never stays
    packed.

    With a latent, each head has two of its own: its query onto the latent's entries, its output
    from them.
    """
    hidden, heads, latent = float(shape.hidden), shape.heads / tp, shape.latent
    if latent is None:
        queries = heads * shape.head_dim
        kept = 2.0 * shape.kv_heads * shape.head_dim / tp
        return ((hidden, queries + kept, 1.0, read_s), (queries, hidden, 1.0, read_s))
    queries = heads * (latent.nope_dim + latent.rope_dim)
    first = float(latent.q_rank) or queries
    products = [(hidden, first + latent.kv_rank + latent.rope_dim, 1.0, read_s)]
    if latent.q_rank:
        products.append((float(latent.q_rank), queries, 1.0, read_s))
    return (
        *products,
        (float(latent.nope_dim), float(latent.kv_rank), heads, plain_s),
        (float(latent.kv_rank), float(latent.value_dim), heads, plain_s),
        (heads * latent.value_dim, hidden, 1.0, read_s),
    )


def all_reduce_share(ranks: int) -> float:
    """Return the part of a tensor that each rank sends to sum it over all: in a ring, twice all but
    its own part."""
    return 2.0 * (ranks - 1) / ranks


class Costs:
    """Seconds per unit of work of one rank: a profile applied to a shape and a topology."""

    __slots__ = (
        "_adapted",
        "_heads_s",
        "_least",
        "_shape",
        "adapter_row",
        "adapter_s",
        "all_reduce_row",
        "all_reduce_s",
        "attention_s",
        "batch_s",
        "byte",
        "corrections",
        "elementwise",
        "factors",
        "first",
        "flop",
        "half",
        "heads",
        "kvp_row",
        "kvp_s",
        "last",
        "layer_s",
        "p2p_row",
        "p2p_s",
        "products",
        "sequence_s",
        "skews",
        "stages",
        "window",
        "windowed",
    )

    def __init__(self, profile: Profile, shape: ModelShape, topology: Topology) -> None:
        tp, activation = topology.tp, max(shape.param_bytes, 2.0)
        self.products = Products(profile, shape, tp)
        gated = (1.0 - shape.expert_share) * 3.0 * shape.intermediate / tp  # see `Products`
        moved = (8.0 * shape.hidden + gated) * activation
        self.elementwise = moved / profile.elementwise_bytes_per_s
        self._least = profile.elementwise_s * profile.elementwise_s

        self.heads = shape.heads / tp
        kv_heads = len(kv_heads_of(0, tp, shape.kv_heads))
        self.half, self.attention_s = profile.attention_half_rows, profile.attention_s
        self.flop = shape.pair_flops / profile.attention_flops_per_s
        kept = shape.planes * kv_heads * shape.head_dim
        self.byte = kept * shape.kv_bytes / profile.attention_bytes_per_s
        self.windowed, self.window = shape.windowed_share, shape.window_tokens

        row_bytes = shape.hidden * activation
        self.all_reduce_s = 2.0 * profile.all_reduce_latency_s if tp > 1 else 0.0
        self.all_reduce_row = (
            2.0 * all_reduce_share(tp) * row_bytes / profile.all_reduce_bytes_per_s
        )
        piped = topology.spp > 1
        self.p2p_s = profile.p2p_latency_s if piped else 0.0
        self.p2p_row = row_bytes / profile.p2p_bytes_per_s if piped else 0.0
        self.kvp_s = profile.kvp_latency_s
        self.kvp_row = self.heads * (shape.state_dim + 1) * 4.0 / profile.kvp_bytes_per_s

        # A column-parallel projection has its adapter's A whole and a part of B; a row-parallel one
        # the reverse. An adapter launches about as much as the rest of a layer.
        self._shape, self._adapted = shape, shape.adapters > 0
        adapter = shape.adapter_params * (1.0 + 1.0 / tp) / 2.0
        read_s = adapter * shape.param_bytes / profile.linear_bytes_per_s
        self.adapter_s = profile.layer_s + read_s
        self.adapter_row = shape.adapted_share * 2.0 * adapter / profile.linear_flops_per_s

        self.layer_s, self.batch_s = profile.layer_s, profile.batch_s
        self.sequence_s = profile.sequence_s
        self.stages = tuple(len(layers) for layers in stage_layers(shape.layers, topology.spp))
        self.first, self.last = self.stages[0], self.stages[-1]
        self.corrections = Corrections(profile.error)
        self.factors, self.skews = self.corrections.factors, self.corrections.skews
        self._heads_s: dict[int, float] = {}

    def layer(self, rows: int, attention_s: float, kvp_rows: int) -> float:
        """Seconds of one layer."""
        seconds = (
            self.products.layer(rows)
            + self.small(rows, self.all_reduce_row)
            + attention_s
            + self.all_reduce_s
            + self.layer_s
            + rows * self.adapter_row
        )
        return seconds + self.kvp_s + kvp_rows * self.kvp_row if kvp_rows else seconds

    def adapters(self, entries: int) -> float:
        """Seconds per layer of the adapters that `entries` name, by expectation, without those of
        their rows."""
        return self._shape.adapters_read(entries) * self.adapter_s

    def small(self, rows: int, extra: float = 0.0) -> float:
        """Seconds of the elementwise operators of one layer, plus `extra` per row."""
        if not self._least:
            return rows * (self.elementwise + extra)
        moved_s = rows * self.elementwise
        return math.sqrt(self._least + moved_s * moved_s) + rows * extra

    def attention(self, length: int, keys: int, tail: bool) -> float:
        """Seconds of a chunk's attention, mean of all layers; the rate grows with chunk × heads."""
        seen = length * (keys + 0.5 * (length + 1)) if tail else float(length * keys)
        flop = self.flop * seen * (self.heads + self.half / length)
        byte = self.byte * (keys + length if tail else keys)
        seconds = math.sqrt(flop * flop + byte * byte)
        if self.windowed:
            near = min(keys, self.window)
            seen = pairs(length, keys, self.window) if tail else float(length * near)
            flop = self.flop * seen * (self.heads + self.half / length)
            byte = self.byte * (near + length if tail else near)
            seconds += self.windowed * (math.sqrt(flop * flop + byte * byte) - seconds)
        return seconds + self.attention_s

    def decodes(self, count: int, keys: int) -> float:
        """Seconds of the attention of `count` decodes, mean of all layers.

        `keys`: tokens that all of them read together, their own included.
        """
        seen = float(keys)
        if self.windowed:
            seen += self.windowed * (min(keys, count * self.window) - keys)
        flop, byte = self.flop * seen * self.heads, self.byte * seen
        return math.sqrt(flop * flop + byte * byte)

    def head(self, yields: int) -> float:
        """Seconds of the vocabulary projection of `yields` rows; cached."""
        if len(self._heads_s) > 4096:
            self._heads_s.clear()
        seconds = self.products.head(yields)
        self._heads_s[yields] = seconds
        return seconds

    def slowest(self, rows: int, layer_s: float, yields: int, entries: int) -> float:
        """Seconds of the slowest stage: the first has the most layers, the last has the head."""
        if self._adapted:
            layer_s += self.adapters(entries)
        ends = self.last * layer_s
        if yields:
            ends += self._heads_s.get(yields) or self.head(yields)
        starts = self.first * layer_s + self.p2p_s + rows * self.p2p_row
        return (starts if starts > ends else ends) + self.batch_s + entries * self.sequence_s


class BatchLoad:
    """Load of one KVP group in one batch, summed entry by entry.

    A shared entry is added to the load of each participating group with the keys that the group
    holds; each computes all of its rows. The batch takes as long as its slowest group.
    """

    __slots__ = ("_costs", "attention_s", "chunks", "decodes", "kvp_rows", "rows", "yields")

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.rows = self.yields = self.decodes = self.chunks = self.kvp_rows = 0
        self.attention_s = 0.0

    def copy(self) -> BatchLoad:
        twin = BatchLoad(self._costs)
        twin.rows, twin.yields, twin.kvp_rows = self.rows, self.yields, self.kvp_rows
        twin.decodes, twin.chunks = self.decodes, self.chunks
        twin.attention_s = self.attention_s
        return twin

    def add_decode(self, keys: int, groups: int = 1, tail: bool = True) -> None:
        """Add one token of a sequence; this group already holds `keys` of its tokens."""
        self.attention_s += self._costs.decodes(1, keys + tail)
        self.rows += 1
        self.yields += 1
        self.decodes += 1
        self.kvp_rows += groups - 1

    def add_decodes(self, count: int, keys: int, groups: int = 1) -> None:
        """Add `count` decodes that read `keys` tokens in all, their own included; O(1).

        A decode's attention is linear in the keys that it reads, so their sum is enough. If only
        some layers have a window, all decodes count as equally long.
        """
        self.attention_s += self._costs.decodes(count, keys)
        self.rows += count
        self.yields += count
        self.decodes += count
        self.kvp_rows += count * (groups - 1)

    def add_chunk(
        self, length: int, keys: int, groups: int = 1, tail: bool = True, yields: bool = False
    ) -> None:
        """Add `length` prompt tokens after `keys` older tokens that this group holds.

        `groups`: number of groups that share the chunk; `tail`: this group holds the chunk's own
        keys too; `yields`: its last row is sampled (the head runs).
        """
        self.attention_s += self._costs.attention(length, keys, tail)
        self.rows += length
        self.yields += yields
        self.chunks += 1
        self.kvp_rows += length * (groups - 1)

    @property
    def regime(self) -> int:
        """Index into REGIMES: which corrections apply."""
        kind = 2 * (self.decodes == 0) + (self.chunks > 0 and self.decodes > 0)
        return 2 * kind + (self.kvp_rows > 0)

    def seconds(self) -> float:
        """Predicted seconds of the slowest stage; 0 when empty."""
        if not self.rows:
            return 0.0
        costs, regime = self._costs, self.regime
        layer_s = costs.layer(self.rows, self.attention_s * costs.skews[regime], self.kvp_rows)
        seconds = costs.slowest(self.rows, layer_s, self.yields, self.decodes + self.chunks)
        return seconds * costs.factors[regime]

    @property
    def attention(self) -> float:
        """Share of attention in `seconds`, in [0, 1]."""
        costs, regime, seconds = self._costs, self.regime, self.seconds()
        attention_s = costs.first * self.attention_s * costs.skews[regime] * costs.factors[regime]
        return min(1.0, attention_s / seconds) if seconds else 0.0

    def seconds_with(
        self, length: int, keys: int, groups: int = 1, tail: bool = True, yields: bool = False
    ) -> float:
        """Seconds with that chunk added; strictly increasing in `length`."""
        costs = self._costs
        rows, kvp_rows = self.rows + length, self.kvp_rows + length * (groups - 1)
        regime = (MIXED if self.decodes else PREFILL) + (kvp_rows > 0)
        attention_s = self.attention_s + costs.attention(length, keys, tail)
        layer_s = costs.layer(rows, attention_s * costs.skews[regime], kvp_rows)
        entries = self.decodes + self.chunks + 1
        seconds = costs.slowest(rows, layer_s, self.yields + yields, entries)
        return seconds * costs.factors[regime]

    def most(self, keys: int, budget_s: float, tail: bool = True) -> tuple[float, float]:
        """Upper bound of prompt tokens that fit within `budget_s`, and the cost of one more there.

        The bound counts only operations that a token takes in any case.
        """
        costs = self._costs
        row_s = costs.products.flop + costs.elementwise + costs.all_reduce_row
        factors, skews, at = costs.factors, costs.skews, MIXED if self.decodes else PREFILL
        factor, skew = min(factors[at], factors[at + 1]), min(skews[at], skews[at + 1])
        # Attention's operations, of layers without a window: flop · (heads + half / length) ·
        # length · (keys + length / 2)
        flop, keys_seen = (1.0 - costs.windowed) * skew * costs.flop, keys + 0.5 * tail
        left_s = budget_s / (factor * costs.first) - skew * self.attention_s - self.rows * row_s
        left_s -= flop * costs.half * keys_seen
        if left_s <= 0.0:
            left_s = 0.0
        each_s = row_s + flop * (keys_seen * costs.heads + 0.5 * tail * costs.half)
        last_s = math.sqrt(each_s * each_s + 2.0 * tail * flop * costs.heads * left_s)
        return 2.0 * left_s / (each_s + last_s), factor * costs.first * last_s

    def stage_s(self, stage: int) -> float:
        """Predicted seconds of one stage; the largest of all stages is `seconds`."""
        if not self.rows:
            return 0.0
        costs = self._costs
        attention_s = self.attention_s * costs.skews[self.regime]
        entries = self.decodes + self.chunks
        layer_s = costs.layer(self.rows, attention_s, self.kvp_rows) + costs.adapters(entries)
        seconds = costs.stages[stage] * layer_s
        if stage == len(costs.stages) - 1:
            if self.yields:
                seconds += costs.head(self.yields)
        else:
            seconds += costs.p2p_s + self.rows * costs.p2p_row
        return (seconds + costs.batch_s + entries * costs.sequence_s) * costs.factors[self.regime]


class Predictor:
    """Predicted times of batches and prefills. State: online corrections and a lazy table.

    `budget_s`: time budget of a batch for the adaptive chunks of `prefill_s`.
    """

    def __init__(
        self,
        profile: Profile,
        shape: ModelShape,
        topology: Topology,
        budget_s: float = 0.1,
        step_tokens: int = CHUNK_STEP_TOKENS,
        costs: Costs | None = None,
    ) -> None:
        self.profile, self.shape, self.topology = profile, shape, topology
        self.budget_s, self.step_tokens = budget_s, step_tokens
        self._costs = Costs(profile, shape, topology) if costs is None else costs
        self._others: dict[float, Predictor] = {}
        self._corrections = self._costs.corrections
        self.tokens_per_group = self._tokens_per_group()
        self._empty = BatchLoad(self._costs)
        # knots[i]: prefix; spent[i]: stage seconds up to it, slowest[i]: slowest chunk up to it,
        # both uncorrected
        self._knots, self._chunks = [0], [1 << 20]
        self._spent: list[Parts] = [(0.0, 0.0)]
        self._slowest: list[Parts] = [(0.0, 0.0)]
        self._whole: dict[int, tuple[Parts, Parts]] = {}
        self._head_s = self._costs.head(1)
        # By number of groups: the corrections at which the rest was computed, seconds of a row, and
        # seconds of a typical batch.
        self._decode_rows: dict[int, tuple[tuple[float, float], float, float]] = {}

    def at_budget(self, budget_s: float) -> Predictor:
        """Return the predictor of prefills in batches of another budget; it learns with this."""
        if budget_s == self.budget_s:
            return self
        if budget_s not in self._others:
            other = Predictor(
                self.profile, self.shape, self.topology, budget_s, self.step_tokens, self._costs
            )
            other.tokens_per_group = self.tokens_per_group
            self._others[budget_s] = other
        return self._others[budget_s]

    def load(self) -> BatchLoad:
        """Empty load of one group."""
        return BatchLoad(self._costs)

    def load_alongside(self) -> BatchLoad:
        """Load of one group whose chunks run alongside decodes, which take no time themselves."""
        load = BatchLoad(self._costs)
        load.decodes = 1
        return load

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
        self,
        load: BatchLoad,
        keys: int,
        limit_tokens: int,
        budget_s: float,
        step_tokens: int = CHUNK_STEP_TOKENS,
        groups: int = 1,
        tail: bool = True,
        yields: bool = False,
        near: int = 0,
    ) -> int:
        """Largest number of prompt tokens that fit into `load` within `budget_s`; 0 if none.

        A multiple of `step_tokens`, or `limit_tokens` itself (`yields`: the chunk of the full limit
        samples). A shared chunk is the smallest of the results for its groups. The search begins
        at `near` tokens, if given.
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
        begin = near // step_tokens
        if bound < above or (bound == above and not above_s):
            above = bound
            if not 0 < begin < bound:
                above_s = probe(bound * step_tokens, keys, groups, tail)
        elif not above_s:
            above_s = probe(limit_tokens, keys, groups, tail, yields)
            if above_s <= budget_s:
                return limit_tokens
        below, at, at_s, guesses = 0, above, above_s, 0
        if 0 < begin < above:
            at, at_s = begin, probe(begin * step_tokens, keys, groups, tail)
            if at_s <= budget_s:
                below = at
            else:
                above = at
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
        """T(n): seconds until the first token on an idle replica that caches `cached` tokens.

        Adaptive chunks of `budget_s`, one after the other through the pipeline (a proportionate
        flow shop: Σ t + (spp − 1) · max t), KVP groups joining as the context grows. Also the
        remaining work of a prefill whose stage-0 cursor is at `cached`.
        """
        return self._prefill_s(tokens, cached)[0]

    def busy_s(self, tokens: int, cached: int = 0) -> float:
        """Busy seconds of the slowest stage within `prefill_s`: Σ t, without the drain."""
        whole_s, drain_s = self._prefill_s(tokens, cached)
        return whole_s - drain_s

    def _prefill_s(self, tokens: int, cached: int) -> tuple[float, float]:
        """T(n), and the seconds of it in which the pipeline drains."""
        if tokens <= cached:
            return 0.0, 0.0
        (keys, groups), length = self.shard(cached), tokens - cached
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
        unsent_s = costs.p2p_s + rows * costs.p2p_row  # the last stage sends nothing
        total = max(spent, slowest) + (self.topology.spp - 1) * slowest - unsent_s
        drain = (self.topology.spp - 1) * slowest
        return (total + self._head_s) * factor, drain * factor

    def step_s(self, tokens: int) -> float:
        """Seconds that one more step adds, for a prompt with `tokens` computed."""
        keys, groups = self.shard(tokens)
        probe, step = self._empty.seconds_with, self.step_tokens
        return probe(2 * step, keys, groups) - probe(step, keys, groups)

    def decode_s(self, keys: int, groups: int = 1) -> float:
        """Seconds by which one decode that reads `keys` tokens lengthens a batch with prefills.

        A row of a typical batch, over many steps of tiles, and what a decode takes besides.
        """
        regime, middle = MIXED + (groups > 1), (FEW_ROWS + MANY_ROWS) // 2
        corrections = self._costs.factors[regime], self._costs.skews[regime]
        known = self._decode_rows.get(groups)
        if known is None or known[0] != corrections:
            others = self.load()
            others.add_decodes(1, 0, groups)
            probe = others.seconds_with
            row_s = (probe(MANY_ROWS, 0) - probe(FEW_ROWS, 0)) / (MANY_ROWS - FEW_ROWS)
            known = corrections, row_s, probe(middle + STEP_ROWS, 0)
            self._decode_rows[groups] = known
        load = BatchLoad(self._costs)
        load.add_decodes(1 + STEP_ROWS, STEP_ROWS * keys, groups)
        more_s = load.seconds_with(middle, 0) - known[2]
        return known[1] + more_s / STEP_ROWS

    def prefill_corrections(self) -> tuple[float, ...]:
        """Return the corrections of prefills' whole time and of their attention.

        In batches of their own, then alongside decodes.
        """
        costs = self._costs
        return tuple(of[at] for at in (PREFILL, MIXED) for of in (costs.factors, costs.skews))

    def move_s(self, tokens: int) -> float:
        """Seconds to copy the KV of `tokens` from one group to another (all stages at once)."""
        kv_bytes = tokens * self._costs.first * self.shape.kv_bytes_per_token_layer
        shard_bytes = kv_bytes / min(self.topology.tp, self.shape.kv_heads)
        return self.profile.transfer_latency_s + shard_bytes / self.profile.transfer_bytes_per_s

    def observe(self, load: BatchLoad, predicted_s: float, measured_s: float) -> None:
        """Learn from a measured batch; `load`: the load of its fullest group."""
        self._corrections.observe(load.regime, predicted_s, measured_s, load.attention)

    @property
    def correction(self) -> float:
        """Correction factor of prefills, without attention."""
        return self._costs.factors[PREFILL]

    @property
    def error(self) -> float:
        """Relative error of batches with chunks, exponentially weighted."""
        errors = self._corrections.errors
        return max(errors[MIXED], errors[PREFILL])

    def learned(self) -> Learned:
        """State that observation changed."""
        return self._corrections.learned()

    def restore(self, learned: Learned) -> None:
        """Replace the learned state by another predictor's (a router: from LoadReport)."""
        self._corrections.restore(learned)

    def _tokens_per_group(self) -> int:
        """Tokens after which a context takes another group; one that slides never does."""
        if self.shape.sliding_tokens:
            return ENDLESS
        return self.topology.tokens_per_group or self._keys_within(self.budget_s)

    def _keys_within(self, budget_s: float) -> int:
        """Longest context at which two steps of a prompt fit into the budget."""
        load, low, high = BatchLoad(self._costs), 1024, ENDLESS
        if self.topology.kvp_max == 1:
            return high
        while high - low > 1024:
            middle = (low + high) // 2
            fits = load.seconds_with(self.step_tokens, middle) <= 0.5 * budget_s
            low, high = (middle, high) if fits else (low, middle)
        return low

    def shard(self, tokens: int) -> tuple[int, int]:
        """Keys in the fullest group, and active groups, of a sequence that holds `tokens`."""
        most = self.topology.kvp_max
        active = min(most, max(1, -(-tokens // self.tokens_per_group)))
        return max(min(tokens, self.tokens_per_group), -(-tokens // active)), active

    def _extend(self, tokens: int) -> None:
        """Extend the table up to `tokens`; a knot spans one chunk, or many far from 0."""
        corrections = self._corrections
        kept = corrections.learned()
        corrections.restore(Corrections(0.0).learned())
        try:
            while self._knots[-1] < tokens:
                prefix, last = self._knots[-1], self._chunks[-1]
                keys, groups = self.shard(prefix)
                chunk = self.largest_chunk(
                    self._empty, keys, 2 * last, self.budget_s, self.step_tokens, groups
                )
                chunk = chunk or self.step_tokens
                many = max(1, prefix // (256 * chunk))
                keys, groups = self.shard(prefix + (many - 1) * chunk // 2)
                parts, (rest_s, attention_s) = self._parts(chunk, keys, groups), self._spent[-1]
                self._knots.append(prefix + many * chunk)
                self._spent.append((rest_s + many * parts[0], attention_s + many * parts[1]))
                self._slowest.append(max(self._slowest[-1], parts, key=sum))
                self._chunks.append(chunk)
        finally:
            corrections.restore(kept)

    def _parts(self, length: int, keys: int, groups: int) -> Parts:
        """Uncorrected seconds of a chunk alone."""
        costs = self._costs
        attention_s = costs.attention(length, keys, tail=True)
        layer_s = costs.layer(length, attention_s, length * (groups - 1))
        whole_s = costs.slowest(length, layer_s, 0, 1)
        return whole_s - costs.first * attention_s, costs.first * attention_s

    def _spent_on(self, tokens: int) -> tuple[Parts, Parts]:
        """Stage seconds of a whole prefill of `tokens`, and those of its slowest chunk.

        Cached: the remaining work of a waiting prompt is needed again with every chunk.
        """
        self._extend(tokens)
        after = bisect.bisect_left(self._knots, tokens)
        before = after - 1
        if self._knots[after] == tokens:
            spent = self._spent[after], self._slowest[after]
        elif self._knots[after] - self._knots[before] > self._chunks[after]:
            spent = self._share(tokens), self._slowest[after]
        else:
            keys, groups = self.shard(self._knots[before])
            parts = self._parts(tokens - self._knots[before], keys, groups)
            rest_s, attention_s = self._spent[before]
            whole = rest_s + parts[0], attention_s + parts[1]
            spent = whole, max(self._slowest[before], parts, key=sum)
        if len(self._whole) >= REMEMBERED:
            self._whole.clear()
        self._whole[tokens] = spent
        return spent

    def _share(self, tokens: int) -> Parts:
        """Stage seconds up to `tokens`, linear between knots."""
        if self._knots[-1] < tokens:
            self._extend(tokens)
        after = bisect.bisect_left(self._knots, tokens)
        if self._knots[after] == tokens:
            return self._spent[after]
        low, high = self._knots[after - 1], self._knots[after]
        part = (tokens - low) / (high - low)
        (rest_s, attention_s), above = self._spent[after - 1], self._spent[after]
        return rest_s + part * (above[0] - rest_s), attention_s + part * (above[1] - attention_s)
