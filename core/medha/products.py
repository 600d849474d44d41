"""How long the matrix products of a layer take, and the vocabulary's: a GPU works in tiles.

Per product of `rows` with a matrix of depth K and N columns, on S multiprocessors:

    waves   = ⌈rows / tile_rows⌉ · ⌈N / tile_columns⌉ / S, by `wave_share` of the way to the next ⌈⌉
    t_flop  = min over tiles of 2·K·tile_rows·tile_columns·S·waves / (flops per s · efficiency)
    t       = (t_mem^p + t_flop^p)^(1/p) + product_s

So 136 rows cost what 192 or 256 do, and time grows in steps of the smallest tile; each step is
worked out once. Without tiles (a CPU, a machine of which they are not known) all products of a
layer are one, `(t_mem^p + (rows·t_flop)^p)^(1/p)`. Never less than rows · `flop`.
"""

from __future__ import annotations

import math
from math import pow as power

from medha.model import ModelShape
from medha.profile import Profile

REMEMBERED = 4096  # steps


class Products:
    """Seconds of one rank's products, of 1/`tp` of a layer and of the head."""

    __slots__ = (
        "_bytes_s", "_heads", "_inverse", "_layer", "_of_head", "_of_layer", "_p", "_product_s",
        "_share", "_spots", "_steps", "_tiles", "flop", "head_flop", "head_mem", "mem",
    )  # fmt: skip

    def __init__(self, profile: Profile, shape: ModelShape, tp: int) -> None:
        self._p, self._inverse = profile.roofline_power, 1.0 / profile.roofline_power
        self._bytes_s = shape.param_bytes / profile.linear_bytes_per_s
        weights, head = (shape.attention_params + shape.mlp_params) / tp, shape.vocab / tp
        head_weights = head * shape.hidden
        self.mem = power(weights * self._bytes_s, self._p)
        self.flop = 2.0 * weights / profile.linear_flops_per_s
        self.head_mem = power(head_weights * self._bytes_s, self._p)
        self.head_flop = 2.0 * head_weights / profile.linear_flops_per_s
        self._product_s, self._share = profile.product_s, profile.wave_share
        self._spots = float(profile.multiprocessors)
        # (rows, columns, seconds of a wave of them per unit of depth)
        self._tiles = tuple(
            (tile.rows, float(tile.columns),
             2.0 * tile.rows * tile.columns * self._spots
             / (profile.linear_flops_per_s * tile.efficiency))
            for tile in profile.tiles
        )  # fmt: skip
        self._steps = min((tile.rows for tile in profile.tiles), default=1)
        hidden, inner = float(shape.hidden), shape.intermediate / tp
        queries = shape.heads * shape.head_dim / tp
        kept = 2.0 * shape.kv_heads * shape.head_dim / tp
        # (depth, columns): into attention, out of it, into the gated MLP, out of it; the head
        self._of_layer = (
            (hidden, queries + kept), (queries, hidden), (hidden, 2.0 * inner), (inner, hidden),
        )  # fmt: skip
        self._of_head = ((hidden, head),)
        self._layer: dict[int, float] = {}
        self._heads: dict[int, float] = {}

    def layer(self, rows: int) -> float:
        """Seconds of a layer's products over `rows`; never less for more rows."""
        if not self._tiles:
            return power(self.mem + power(rows * self.flop, self._p), self._inverse)
        return self._looked_up(self._layer, self._of_layer, -(-rows // self._steps))

    def head(self, rows: int) -> float:
        """Seconds of the vocabulary projection of `rows`."""
        if not self._tiles:
            return power(self.head_mem + power(rows * self.head_flop, self._p), self._inverse)
        return self._looked_up(self._heads, self._of_head, -(-rows // self._steps))

    def _looked_up(
        self, known: dict[int, float], products: tuple[tuple[float, float], ...], step: int
    ) -> float:
        found = known.get(step)
        if found is None:
            if len(known) >= REMEMBERED:
                known.clear()
            found = 0.0
            for depth, columns in products:
                found += self._product(depth, columns, step * self._steps)
            known[step] = found
        return found

    def _product(self, depth: float, columns: float, rows: int) -> float:
        best_s = math.inf
        for tile_rows, tile_columns, wave_s in self._tiles:
            tiles = -(-rows // tile_rows) * math.ceil(columns / tile_columns)
            waves = tiles / self._spots
            waves += self._share * (math.ceil(waves) - waves)
            best_s = min(best_s, depth * wave_s * waves)
        mem = power(depth * columns * self._bytes_s, self._p)
        return power(mem + power(best_s, self._p), self._inverse) + self._product_s
