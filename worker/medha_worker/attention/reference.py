"""Attention over pages in plain torch: chunks of several tokens on CPU, every dtype and geometry,
and the oracle of every other kernel.

Computes in float32 whatever the pool holds, exactly, in bounded memory: pages are gathered tile by
tile into one reused workspace and the tiles' states are folded together; the scores of a chunk
never exist as a whole. Spans attend one by one: first the earlier pages without a mask (the query
heads of a KV head folded into rows), then the chunk itself causally.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from medha_worker.attention.interface import Partial, Span, unfilled
from medha_worker.attention.merge import fold

# (out, lse in base e) of softmax(q·kᵀ/√d)·v; blocked, so no score matrix is ever held.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class ReferenceAttention:
    """Plain-torch attention for pages of one geometry.

    `tile_pages` bounds the workspace: pages gathered at once.
    """

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, page_tokens: int, tile_pages: int = 256
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.page_tokens, self.tile_pages = page_tokens, tile_pages
        self._workspace = torch.empty(0)

    def plan(self, spans: Sequence[Span]) -> ReferencePlan:
        return ReferencePlan(self, tuple(self._plan_chunk(span) for span in spans))

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

    def _plan_chunk(self, span: Span) -> _Chunk:
        """Tiles of the earlier pages, each gathered as [2, kv_heads, tokens, head_dim]."""
        count = -(-span.held // self.page_tokens)
        planes = np.arange(2 * self.kv_heads, dtype=np.int64)[:, None]
        tiles = []
        for first in range(0, count, self.tile_pages):
            pages = span.pages[first : min(first + self.tile_pages, count)]
            index = torch.from_numpy((pages * (2 * self.kv_heads) + planes).reshape(-1))
            held = min(span.held - first * self.page_tokens, len(pages) * self.page_tokens)
            tiles.append((index, held))
        return _Chunk(span, tuple(tiles))


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    span: Span
    tiles: tuple[tuple[torch.Tensor, int], ...]  # (gather index, tokens held)


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
        G, n, D = K.heads // K.kv_heads, span.length, K.head_dim
        rows = slice(span.start, span.start + n)
        queries = q[rows].view(n, K.kv_heads, G, D).permute(1, 2, 0, 3).float().contiguous()
        whole: Partial | None = None
        for index, held in chunk.tiles:
            kv = K.gather(pool, index).view(2, 1, K.kv_heads, -1, D)
            out, lse = _flash(
                queries.view(1, K.kv_heads, G * n, D), kv[0, :, :, :held], kv[1, :, :, :held]
            )
            part = Partial(out.view(K.kv_heads, G, n, D), lse.view(K.kv_heads, G, n))
            whole = _joined(whole, part)
        if span.tail:
            own = (x[rows].permute(1, 0, 2).float().unsqueeze(1) for x in (k, v))
            keys, values = (x.expand(K.kv_heads, G, n, D) for x in own)
            whole = _joined(whole, Partial(*_flash(queries, keys, values, is_causal=True)))
        if whole is None:
            into.out[rows].zero_()
            into.lse[rows].fill_(float("-inf"))
            return
        into.out[rows].view(n, K.kv_heads, G, D).copy_(whole.out.permute(2, 0, 1, 3))
        into.lse[rows].view(n, K.kv_heads, G).copy_(whole.lse.permute(2, 0, 1))


def _joined(whole: Partial | None, part: Partial) -> Partial:
    if whole is None:
        return part
    fold(whole, part)
    return whole
