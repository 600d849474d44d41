"""What a batch costs, added up entry by entry: a profile applied to a shape and a topology.

The arithmetic under `medha.predictor`, which see for the law; plain floats, as the packer asks
thousands of times a second. It learns nothing and plans nothing.
"""

from __future__ import annotations

import math

from medha.corrections import PREFILL, Corrections
from medha.model import ModelShape, pairs
from medha.products import Products
from medha.profile import Profile
from medha.topology import Topology, kv_heads_of, stage_layers


class Costs:
    """Seconds per unit of work of one rank: a profile applied to a shape and a topology."""

    __slots__ = (
        "_heads_s", "_least", "all_reduce_row", "all_reduce_s", "batch_s", "byte", "corrections",
        "elementwise", "factors", "first", "flop", "half", "heads", "kvp_row", "kvp_s", "last",
        "layer_s", "p2p_row", "p2p_s", "products", "sequence_s", "skews", "stages", "window",
        "windowed",
    )  # fmt: skip

    def __init__(self, profile: Profile, shape: ModelShape, topology: Topology) -> None:
        tp, activation = topology.tp, max(shape.param_bytes, 2.0)
        self.products = Products(profile, shape, tp)
        moved = (8.0 * shape.hidden + 3.0 * shape.intermediate / tp) * activation
        self.elementwise = moved / profile.elementwise_bytes_per_s
        self._least = profile.elementwise_s * profile.elementwise_s

        self.heads = shape.heads / tp
        kv_heads = len(kv_heads_of(0, tp, shape.kv_heads))
        self.half = profile.attention_half_rows
        self.flop = 4.0 * shape.head_dim / profile.attention_flops_per_s
        self.byte = 2.0 * kv_heads * shape.head_dim * shape.kv_bytes / profile.attention_bytes_per_s
        self.windowed, self.window = shape.windowed_share, shape.window_tokens

        row_bytes = shape.hidden * activation
        ring = 2.0 * (tp - 1) / tp
        self.all_reduce_s = 2.0 * profile.all_reduce_latency_s if tp > 1 else 0.0
        self.all_reduce_row = 2.0 * ring * row_bytes / profile.all_reduce_bytes_per_s
        piped = topology.spp > 1
        self.p2p_s = profile.p2p_latency_s if piped else 0.0
        self.p2p_row = row_bytes / profile.p2p_bytes_per_s if piped else 0.0
        self.kvp_s = profile.kvp_latency_s
        self.kvp_row = self.heads * (shape.head_dim + 1) * 4.0 / profile.kvp_bytes_per_s

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
        )
        return seconds + self.kvp_s + kvp_rows * self.kvp_row if kvp_rows else seconds

    def small(self, rows: int, beside: float = 0.0) -> float:
        """Seconds of all that is elementwise in one layer, and of `beside` per row."""
        if not self._least:
            return rows * (self.elementwise + beside)
        moved_s = rows * self.elementwise
        return math.sqrt(self._least + moved_s * moved_s) + rows * beside

    def attention(self, length: int, keys: int, tail: bool) -> float:
        """Seconds of a chunk's attention in one layer, the mean of all; rate grows with chunk ×
        heads."""
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
        return seconds

    def decodes(self, count: int, keys: int) -> float:
        """Seconds of the attention of `count` single rows in one layer, the mean of all, that have
        `keys` tokens before and with them, all rows together."""
        seen = float(keys)
        if self.windowed:
            seen += self.windowed * (min(keys, count * self.window) - keys)
        flop, byte = self.flop * seen * self.heads, self.byte * seen
        return math.sqrt(flop * flop + byte * byte)

    def head(self, yields: int) -> float:
        """Seconds of the vocabulary projection of `yields` rows; `slowest` asks for the same few
        again and again."""
        if len(self._heads_s) > 4096:
            self._heads_s.clear()
        seconds = self.products.head(yields)
        self._heads_s[yields] = seconds
        return seconds

    def slowest(self, rows: int, layer_s: float, yields: int, entries: int) -> float:
        """Seconds of the slowest stage: the first has most layers, the last has the head."""
        ends = self.last * layer_s
        if yields:
            ends += self._heads_s.get(yields) or self.head(yields)
        starts = self.first * layer_s + self.p2p_s + rows * self.p2p_row
        return (starts if starts > ends else ends) + self.batch_s + entries * self.sequence_s


class BatchLoad:
    """What one KVP group runs in one batch, added up entry by entry.

    A shared entry is added to the load of each participating group with the keys which that group
    holds; all of them pay its rows. The batch takes as long as its slowest group.
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
        """One token of a sequence of which this group already holds `keys` tokens."""
        self.attention_s += self._costs.decodes(1, keys + tail)
        self.rows += 1
        self.yields += 1
        self.decodes += 1
        self.kvp_rows += groups - 1

    def add_decodes(self, count: int, keys: int, groups: int = 1) -> None:
        """`count` decodes at once that read `keys` tokens in all, their own included; O(1).

        A decode's attention is linear in the keys that it reads, so their sum is enough (with a
        window it is as if all had equally many).
        """
        self.attention_s += self._costs.decodes(count, keys)
        self.rows += count
        self.yields += count
        self.decodes += count
        self.kvp_rows += count * (groups - 1)

    def add_chunk(
        self, length: int, keys: int, groups: int = 1, tail: bool = True, yields: bool = False
    ) -> None:
        """`length` prompt tokens after `keys` older tokens that this group holds.

        `groups`: how many groups share it; `tail`: this group holds the chunk's own keys too;
        `yields`: its last row is sampled (the head runs).
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
        """The part of `seconds` that attention takes, in [0, 1]."""
        costs, regime, seconds = self._costs, self.regime, self.seconds()
        attention_s = costs.first * self.attention_s * costs.skews[regime] * costs.factors[regime]
        return min(1.0, attention_s / seconds) if seconds else 0.0

    def seconds_with(
        self, length: int, keys: int, groups: int = 1, tail: bool = True, yields: bool = False
    ) -> float:
        """`seconds` as if that chunk had been added; grows strictly with `length`."""
        costs = self._costs
        rows, kvp_rows = self.rows + length, self.kvp_rows + length * (groups - 1)
        regime = (2 if self.decodes else PREFILL) + (kvp_rows > 0)
        attention_s = self.attention_s + costs.attention(length, keys, tail)
        layer_s = costs.layer(rows, attention_s * costs.skews[regime], kvp_rows)
        entries = self.decodes + self.chunks + 1
        seconds = costs.slowest(rows, layer_s, self.yields + yields, entries)
        return seconds * costs.factors[regime]

    def most(self, keys: int, budget_s: float, tail: bool = True) -> tuple[float, float]:
        """(tokens, seconds): more tokens of a prompt than this never fit within `budget_s`, by the
        operations that they take at least; and what one more costs there."""
        costs = self._costs
        row_s = costs.products.flop + costs.elementwise + costs.all_reduce_row
        factors, skews, at = costs.factors, costs.skews, 2 if self.decodes else PREFILL
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
        seconds = costs.stages[stage] * costs.layer(self.rows, attention_s, self.kvp_rows)
        if stage == len(costs.stages) - 1:
            if self.yields:
                seconds += costs.head(self.yields)
        else:
            seconds += costs.p2p_s + self.rows * costs.p2p_row
        entries = self.decodes + self.chunks
        return (seconds + costs.batch_s + entries * costs.sequence_s) * costs.factors[self.regime]
