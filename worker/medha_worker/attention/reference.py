"""Attention over pages in plain torch: chunks of several tokens on CPU, every dtype and geometry,
and the oracle of every other kernel.

Computes in float32 whatever the pool holds, exactly, in bounded memory: pages are gathered tile by
tile into one reused workspace and the tiles' states are folded together; the scores of a chunk
never exist as a whole. Spans attend one by one: first the earlier pages without a mask (the query
heads of a KV head folded into rows), then the chunk itself causally. Where rows see a window only,
they attend in blocks, over what some row of the block sees, masked where not all do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from medha_worker.attention.interface import Partial, Span, unfilled
from medha_worker.attention.merge import fold

# (out, lse in base e) of softmax(q·kᵀ/√d)·v; blocked, so no score matrix is ever held.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class ReferenceAttention:
    """Plain-torch attention for pages of one geometry.

    `tile_pages` bounds the workspace: pages gathered at once; `block_rows` the masks: rows with a
    window that attend at once.
    """

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, page_tokens: int, tile_pages: int = 256,
        block_rows: int = 256,
    ) -> None:  # fmt: skip
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.page_tokens, self.tile_pages = page_tokens, tile_pages
        self.block_rows = block_rows
        self._workspace = torch.empty(0)

    def plan(self, spans: Sequence[Span]) -> ReferencePlan:
        return ReferencePlan(self, tuple(chunk for span in spans for chunk in self._chunks(span)))

    def gather(self, pool: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Planes `index` of `pool` seen as [-1, page_tokens · head_dim], float32, in the
        workspace."""
        row_size = self.page_tokens * self.head_dim
        size = index.numel() * row_size
        if self._workspace.numel() < size or self._workspace.dtype != pool.dtype:
            self._workspace = torch.empty(size, dtype=pool.dtype)
        rows = self._workspace[:size].view(index.numel(), row_size)
        torch.index_select(pool.view(-1, row_size), 0, index, out=rows)
        return rows.float()

    def _chunks(self, span: Span) -> Iterator[_Chunk]:
        """The span, or with a window its blocks of rows."""
        sight = span.sight
        if sight is None:
            yield _Chunk(span, 0, span.length, tuple(self._tiles(span, 0)))
            return
        for first in range(0, span.length, self.block_rows):
            end = min(first + self.block_rows, span.length)
            nearest = max(0, sight.position + first - sight.window + 1) // self.page_tokens
            page = int(np.searchsorted(sight.logical, nearest))
            yield _Chunk(span, first, end, tuple(self._tiles(span, page)))

    def _tiles(self, span: Span, page: int) -> Iterator[_Tile]:
        """The earlier pages from `page` on, each tile gathered as [2, kv_heads, tokens, dim]."""
        T, count = self.page_tokens, -(-span.held // self.page_tokens)
        planes = np.arange(2 * self.kv_heads, dtype=np.int64)[:, None]
        for first in range(page, count, self.tile_pages):
            end = min(first + self.tile_pages, count)
            index = torch.from_numpy((span.pages[first:end] * len(planes) + planes).reshape(-1))
            held = min(span.held - first * T, (end - first) * T)
            positions = None
            if span.sight is not None:
                begin = span.sight.logical[first:end, None] * T
                positions = torch.from_numpy((begin + np.arange(T)).reshape(-1)[:held])
            yield _Tile(index, held, positions)


@dataclasses.dataclass(frozen=True, slots=True)
class _Tile:
    """Pages that are gathered at once by `index`; where they stand matters with a window only."""

    index: torch.Tensor
    held: int
    positions: torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows [first, end) of a span, and what they see of its pages."""

    span: Span
    first: int
    end: int
    tiles: tuple[_Tile, ...]

    def sees(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Bool [rows, keys]: which rows see which keys; None where all see all."""
        sight = self.span.sight
        if sight is None:
            return None
        rows = torch.arange(sight.position + self.first, sight.position + self.end).unsqueeze(1)
        if int(positions[-1]) < int(rows[0]) and int(positions[0]) > int(rows[-1]) - sight.window:
            return None
        return (positions > rows - sight.window) & (positions <= rows)


@dataclasses.dataclass(frozen=True, slots=True)
class ReferencePlan:
    """One step's spans, ready to run in every layer."""

    kernel: ReferenceAttention
    chunks: tuple[_Chunk, ...]

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor) -> Partial:
        states = unfilled(q)
        self.fill(q, k, v, pool, states)
        return states

    def fill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        into: Partial,
    ) -> None:
        """Store the spans' states in `into`, and leave other rows alone."""
        for chunk in self.chunks:
            self._fill_chunk(chunk, q, k, v, pool, into)

    def _fill_chunk(
        self,
        chunk: _Chunk,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        into: Partial,
    ) -> None:
        """States in the layout [kv_heads, group, length, head_dim] until they are stored."""
        K, span = self.kernel, chunk.span
        G, n, D = K.heads // K.kv_heads, chunk.end - chunk.first, K.head_dim
        rows = slice(span.start + chunk.first, span.start + chunk.end)
        queries = q[rows].view(n, K.kv_heads, G, D).permute(1, 2, 0, 3).float().contiguous()
        whole: Partial | None = None
        for tile in chunk.tiles:
            kv = K.gather(pool, tile.index).view(2, K.kv_heads, -1, D)[:, :, : tile.held]
            seen = None if tile.positions is None else chunk.sees(tile.positions)
            whole = _joined(whole, _attended(queries, kv[0], kv[1], seen))
        if span.tail:
            whole = _joined(whole, self._own(chunk, queries, k, v))
        if whole is None:
            into.out[rows].zero_()
            into.lse[rows].fill_(float("-inf"))
            return
        into.out[rows].view(n, K.kv_heads, G, D).copy_(whole.out.permute(2, 0, 1, 3))
        into.lse[rows].view(n, K.kv_heads, G).copy_(whole.lse.permute(2, 0, 1))

    def _own(
        self, chunk: _Chunk, queries: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Partial:
        """Over the span's own keys, causally."""
        span, sight, first = chunk.span, chunk.span.sight, 0
        if sight is not None:
            first = max(0, chunk.first - sight.window + 1)
        cut = slice(span.start + first, span.start + chunk.end)
        keys, values = (x[cut].permute(1, 0, 2).float() for x in (k, v))
        if sight is None or (chunk.first == 0 and chunk.end <= sight.window):
            expanded = (x.unsqueeze(1).expand(queries.shape) for x in (keys, values))
            return Partial(*_flash(queries, *expanded, is_causal=True))
        positions = torch.arange(sight.position + first, sight.position + chunk.end)
        return _attended(queries, keys, values, chunk.sees(positions))


def _attended(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor | None
) -> Partial:
    """State of queries [kv_heads, group, rows, head_dim] over keys and values [kv_heads, tokens,
    head_dim], where `seen` [rows, tokens], if given."""
    heads, group, rows, dim = queries.shape
    if seen is None:  # a KV head's query heads are so many more rows
        out, lse = _flash(
            queries.view(1, heads, group * rows, dim), keys.unsqueeze(0), values.unsqueeze(0)
        )
        return Partial(out.view(queries.shape), lse.view(queries.shape[:3]))
    expanded = (x.unsqueeze(1).expand(heads, group, -1, dim) for x in (keys, values))
    mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
    out, lse = _flash(queries, *expanded, attn_mask=mask.view(1, 1, *seen.shape))
    # Of a row that sees nothing it says 0, 0.
    return Partial(out, lse.masked_fill_(~seen.any(1), float("-inf")))


def _joined(whole: Partial | None, part: Partial) -> Partial:
    if whole is None:
        return part
    fold(whole, part)
    return whole
