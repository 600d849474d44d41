"""Costs of a chunk's attention on a GPU by how its keys are split, and the fastest split.

`fa3` computes tiles: 128 query rows of a head against all keys of their entry, one tile at a time
on each multiprocessor. So a chunk's time is that of the multiprocessor with the most tiles, and two
things make it long: rows that fill their last tile badly, and tiles that fill the last round badly.
Against both, a long prefix is cut in parts, whose tiles are smaller and more; and query heads that
share keys are packed as rows of one head, so that little of a tile is empty:

    160 rows, 32 heads that share 8 KV heads, 132 multiprocessors
    as they are    2 tiles · 32 heads · 2 parts = 128 in 1 round; 63 % of their rows exist
    packed         5 tiles · 8 heads · 3 parts = 120 in 1 round; 100 % exist

Each part leaves a state per row, to be merged, so more parts cost more copies. Pure.
"""

from __future__ import annotations

import dataclasses
import functools

import msgspec

TILE = 128
MOST_PARTS = 16
# Limits of a chunk's states, in rows of all heads: a gigabyte for 32 heads of 128 in 16 bits, where
# sums must be short; else 134 megabytes.
MOST_STATES, SPLIT_STATES = 1 << 17, 1 << 14
# Measured on one H200, head size 128, 16 bits: a tile takes this long per key in pages and per key
# that lies side by side with the others, and this long besides. Other GPUs and sizes change all
# times alike, and the choice depends on their ratios only.
KEY_S, GATHERED_KEY_S, TILE_S, WIDTH = 14.5e-9, 12.4e-9, 4e-6, 128
# The same of `fa2`, which packs heads and spreads keys evenly over the multiprocessors.
FA2_KEY_S, FA2_S = 25e-9, 13e-6
# A launch of a small kernel and the gap before it; the copies' rate, bytes read and written.
KERNEL_S, BYTES_PER_S = 4e-6, 3.5e12


class PrefixSplit(msgspec.Struct, frozen=True):
    """Layout of a chunk's keys: its prefix in `parts`, then the chunk itself; 0: all keys in one
    causal entry.

    `packed`: query heads of a KV head are rows of it in the parts. `gathered`: keys are copied from
    their pages to side by side first. `small`: `fa2` takes all of it, and splits keys by itself.
    """

    parts: int = 0
    packed: bool = False
    gathered: bool = False
    small: bool = False


WHOLE, SMALL = PrefixSplit(), PrefixSplit(small=True)


def whole(rows: int, tokens: int) -> PrefixSplit:
    """Split nothing."""
    return WHOLE


@dataclasses.dataclass(frozen=True, slots=True)
class SplitCosts:
    """Costs of splits for these heads, of entries of `item_bytes`, on `processors`.

    `one_type`: keys are of the queries' type, so they can be gathered, and `fa2` can serve.
    """

    heads: int
    kv_heads: int
    head_dim: int
    item_bytes: int
    processors: int
    one_type: bool

    def choose(self, rows: int, tokens: int) -> PrefixSplit:
        """Return the fastest split for a chunk of `rows` after a prefix of `tokens`."""
        # Similar prefixes are split alike, and found among the last ones.
        unit = max(0, tokens.bit_length() - 4)
        return _fastest(self, rows, tokens >> unit << unit)

    def seconds(self, split: PrefixSplit, rows: int, tokens: int) -> float:
        """Return what a layer's attention takes."""
        width, own = self.head_dim / WIDTH, rows / 2  # the mean row sees half of the chunk
        packed_rows = rows * self.heads // self.kv_heads
        if split.small:
            tiles = -(-2 * packed_rows // TILE) / 2 * self.kv_heads  # with tiles of 64 rows, too
            return FA2_S + tiles * FA2_KEY_S * width * (tokens + own) / self.processors
        key_s = (GATHERED_KEY_S if split.gathered else KEY_S) * width
        token_bytes = 2 * self.kv_heads * self.head_dim * self.item_bytes
        copied_s = self._copied_s((tokens + rows) * token_bytes) if split.gathered else 0.0
        tiles = -(-rows // TILE) * self.heads
        rounds = self._rounds(tiles)
        own_s = rounds * TILE_S + tiles * key_s * own / self.processors
        if not split.parts:
            return copied_s + own_s + rounds * key_s * tokens
        if split.packed:
            tiles = -(-packed_rows // TILE) * self.kv_heads
        part_s = key_s * tokens / split.parts + TILE_S
        # Queries are selected, states written, gathered by row and merged; packed ones are folded
        # and unfolded besides.
        copies, kernels = (5, 7) if split.packed else (3, 4)
        state_bytes = rows * split.parts * self.heads * self.head_dim * self.item_bytes
        merged_s = self._copied_s(copies * state_bytes) + kernels * KERNEL_S
        return copied_s + own_s + self._rounds(tiles * split.parts) * part_s + merged_s

    def _rounds(self, tiles: int) -> int:
        """Return the tiles of the busiest multiprocessor."""
        return -(-tiles // self.processors)

    def _copied_s(self, size: int) -> float:
        return KERNEL_S + 2 * size / BYTES_PER_S


@functools.lru_cache(maxsize=4096)
def _fastest(costs: SplitCosts, rows: int, tokens: int) -> PrefixSplit:
    most = min(MOST_PARTS, SPLIT_STATES // rows)
    splits = [
        PrefixSplit(parts, packed, gathered)
        for gathered in ((False, True) if costs.one_type else (False,))
        for parts in range(most + 1)
        for packed in ((False, True) if parts and costs.heads > costs.kv_heads else (False,))
    ]
    if costs.one_type:
        splits.append(SMALL)
    return min(splits, key=lambda split: (costs.seconds(split, rows, tokens), split.parts))
