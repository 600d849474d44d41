"""Attention over pages in plain torch, for CPU chunks, every dtype and geometry.

It is the oracle of all other kernels, and serves other devices where their kernels cannot. It
computes in float32, exactly, in bounded memory: pages are gathered tile by tile into a reused
workspace and the tiles' states are folded, so a chunk's score matrix never exists. Spans attend
separately: first to earlier pages without a mask (query heads of a KV head folded into rows), then
causally to the chunk itself. Rows with a window attend in blocks, over what some row of the block
sees, masked if not all rows see it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from medha.checkpoints.latent_attention import LatentAttention
from medha_worker.attention.fp8_scales import FP8, Scales
from medha_worker.attention.kernel_interface import Partial, Span
from medha_worker.attention.merge import fold

# (out, lse in base e) of softmax(scale·q·kᵀ)·v; blocked, so the score matrix never exists.
_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class ReferenceAttention:
    """Plain-torch attention for pages of one geometry.

    `tile_pages` bounds the workspace (pages gathered at once), `block_rows` the masks (windowed
    rows that attend at once). `latent`: pages hold latents.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_tokens: int,
        tile_pages: int = 256,
        block_rows: int = 256,
        latent: LatentAttention | None = None,
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.page_tokens, self.tile_pages = page_tokens, tile_pages
        self.block_rows, self.planes = block_rows, 1 if latent else 2
        self.scale = latent.scale if latent else head_dim**-0.5
        self.state_dim = latent.rank if latent else head_dim
        self._workspace = torch.empty(0)

    def plan(self, spans: Sequence[Span]) -> ReferencePlan:
        return ReferencePlan(self, tuple(chunk for span in spans for chunk in self._chunks(span)))

    def gather(self, pool: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Gather planes `index` of `pool`, seen as [-1, page_tokens · head_dim], in float32."""
        row_size = self.page_tokens * self.head_dim
        size = index.numel() * row_size
        held = pool.view(torch.uint8) if pool.dtype == FP8 else pool
        if self._workspace.numel() < size or self._workspace.dtype != held.dtype:
            self._workspace = torch.empty(size, dtype=held.dtype, device=pool.device)
        rows = self._workspace[:size].view(index.numel(), row_size)
        torch.index_select(held.view(-1, row_size), 0, index.to(pool.device), out=rows)
        return rows.view(pool.dtype).float()

    def _chunks(self, span: Span) -> Iterator[_Chunk]:
        """Yield the span, or its blocks of rows if it has a window."""
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
        """Yield tiles of earlier pages from `page` on, each gathered as [planes, kv_heads,
        tokens, dim]."""
        T, count = self.page_tokens, -(-span.held // self.page_tokens)
        planes = np.arange(self.planes * self.kv_heads, dtype=np.int64)[:, None]
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
    """Pages gathered at once by `index`; `positions` are set only with a window."""

    index: torch.Tensor
    held: int
    positions: torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows [first, end) of a span, and the tiles they see."""

    span: Span
    first: int
    end: int
    tiles: tuple[_Tile, ...]

    def sees(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Return a mask, bool [rows, keys]; None if all rows see all keys."""
        sight = self.span.sight
        if sight is None:
            return None
        rows = torch.arange(sight.position + self.first, sight.position + self.end).unsqueeze(1)
        if int(positions[-1]) < int(rows[0]) and int(positions[0]) > int(rows[-1]) - sight.window:
            return None
        return (positions > rows - sight.window) & (positions <= rows)


@dataclasses.dataclass(frozen=True, slots=True)
class ReferencePlan:
    """A step's spans, planned for every layer."""

    kernel: ReferenceAttention
    chunks: tuple[_Chunk, ...]

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        scales: Scales | None = None,
    ) -> Partial:
        states = unfilled(q)
        self.fill(q, k, v, pool, states, scales)
        return states.cut(self.kernel.state_dim)

    def fill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        into: Partial,
        scales: Scales | None = None,
    ) -> None:
        """Store the spans' states in `into`; other rows are untouched."""
        for chunk in self.chunks:
            span = chunk.span
            rows = slice(span.start + chunk.first, span.start + chunk.end)
            self._fill_chunk(
                chunk,
                q[rows] if scales is None else scales.meeting(q[rows]),
                k,
                v,
                pool,
                Partial(into.out[rows], into.lse[rows]),
            )
            if scales is not None:
                scales.restore(into.out[rows])

    def _fill_chunk(
        self,
        chunk: _Chunk,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        into: Partial,
    ) -> None:
        """Attend for one chunk.

        `q` and `into` are the chunk's rows; `k` and `v` those of the batch. States have the layout
        [kv_heads, group, length, head_dim] until they are stored.
        """
        K = self.kernel
        G, n, D = K.heads // K.kv_heads, chunk.end - chunk.first, K.head_dim
        queries = q.view(n, K.kv_heads, G, D).permute(1, 2, 0, 3).float().contiguous()
        whole: Partial | None = None
        for tile in chunk.tiles:
            kv = K.gather(pool, tile.index).view(K.planes, K.kv_heads, -1, D)[:, :, : tile.held]
            seen = None if tile.positions is None else chunk.sees(tile.positions)
            whole = _joined(whole, _attended(queries, kv[0], kv[-1], seen, K.scale))
        if chunk.span.tail:
            whole = _joined(whole, self._own(chunk, queries, k, v))
        if whole is None:
            into.out.zero_()
            into.lse.fill_(float("-inf"))
            return
        into.out.view(n, K.kv_heads, G, D).copy_(whole.out.permute(2, 0, 1, 3))
        into.lse.view(n, K.kv_heads, G).copy_(whole.lse.permute(2, 0, 1))

    def _own(
        self, chunk: _Chunk, queries: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Partial:
        """Attend causally over the span's own keys."""
        span, sight, first = chunk.span, chunk.span.sight, 0
        if sight is not None:
            first = max(0, chunk.first - sight.window + 1)
        cut = slice(span.start + first, span.start + chunk.end)
        keys, values = (x[cut].permute(1, 0, 2).float() for x in (k, v))
        if sight is None or (chunk.first == 0 and chunk.end <= sight.window):
            keys, values = (x.unsqueeze(1).expand(queries.shape) for x in (keys, values))
            return Partial(*_flash(queries, keys, values, self.kernel.scale, is_causal=True))
        positions = torch.arange(sight.position + first, sight.position + chunk.end)
        return _attended(queries, keys, values, chunk.sees(positions), self.kernel.scale)


def unfilled(q: torch.Tensor) -> Partial:
    """Allocate states for queries `q` [rows, heads, head_dim]."""
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    return Partial(out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device))


def _attended(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
) -> Partial:
    """Return the state of queries [kv_heads, group, rows, head_dim] over keys and values
    [kv_heads, tokens, head_dim], masked by `seen` [rows, tokens] if given."""
    heads, group, rows, dim = queries.shape
    if seen is None:  # fold a KV head's query heads into rows
        out, lse = _flash(
            queries.view(1, heads, group * rows, dim), keys.unsqueeze(0), values.unsqueeze(0), scale
        )
        return Partial(out.view(queries.shape), lse.view(queries.shape[:3]))
    keys, values = (x.unsqueeze(1).expand(heads, group, -1, dim) for x in (keys, values))
    seen = seen.to(queries.device)
    mask = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))
    out, lse = _flash(queries, keys, values, scale, mask.view(1, 1, *seen.shape))
    # torch returns 0, 0 for a row that sees no key.
    return Partial(out, lse.masked_fill_(~seen.any(1), float("-inf")))


def _flash(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse in base e) of softmax(scale·q·kᵀ + mask)·v, all [batch, heads, rows,
    head_dim].

    A row that sees no key gives 0, 0. On other devices than a CPU the scores are held as a whole.
    """
    if queries.is_cpu:
        state: tuple[torch.Tensor, torch.Tensor] = _flash_on_cpu(
            queries, keys, values, is_causal=is_causal, attn_mask=attn_mask, scale=scale
        )
        return state
    scores = queries @ keys.transpose(-1, -2) * scale
    if is_causal:
        square = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores.masked_fill_(~square.tril_(), float("-inf"))
    if attn_mask is not None:
        scores += attn_mask
    lse = scores.logsumexp(-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_().nan_to_num_(0.0)
    return weights @ values, lse.masked_fill(lse.isneginf(), 0.0)


def _joined(whole: Partial | None, part: Partial) -> Partial:
    if whole is None:
        return part
    fold(whole, part)
    return whole
