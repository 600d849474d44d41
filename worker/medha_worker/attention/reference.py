"""Attention over pages in plain torch: the CPU backend, and the oracle of every other kernel.

Computes in float32 whatever the pool holds, exactly, in bounded memory: pages are gathered tile by
tile into one reused workspace and the tiles' states are folded together; the scores of a chunk
never exist as a whole. Two paths, each a few large operations per layer:

* rows of chunks of several tokens attend span by span: first the earlier pages without a mask (the
  query heads of a KV head folded into rows), then the chunk itself causally;
* single rows of all sequences (decodes) attend together: every page is one entry of a batched
  product, and the pages' states are summed per row. So ragged lengths cost no padding, and where
  the batch's pages lie side by side in the pool, whoever owns them, they are read in place: a
  stretch that fits the cache is streamed into it first, for products of few rows wait for memory
  at every page. Pages partly filled stand apart: they alone need a mask, and are read no further
  than the fullest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from medha_worker.attention.interface import LogBase, Partial, Plan, Span
from medha_worker.attention.merge import empty, fold

Ids = npt.NDArray[np.int64]

# Pages side by side from which on a call of their own is cheaper than gathering them.
RUN_PAGES = 8
# Pages from which on a run is worth parting: its partial pages are then read less far.
PARTED_PAGES = 16
# Bytes of single rows' pages gathered at once, or streamed at once where they are read in place:
# few enough to stay in a core's cache until they are used.
GATHERED_BYTES, STREAMED_BYTES = 2**20, 2**21
# Tiles of single rows are larger: most of their pages need no workspace.
SINGLES_TILES = 4

_NONE = np.empty(0, dtype=np.int64)

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
        page_bytes = 2 * kv_heads * page_tokens * head_dim * 4
        self.gathered_pages = max(GATHERED_BYTES // page_bytes, 1)
        self.streamed_pages = max(STREAMED_BYTES // page_bytes, RUN_PAGES)
        self._workspace = torch.empty(0)

    def plan(self, spans: Sequence[Span]) -> Plan:
        single = [span for span in spans if span.length == 1]
        several = [span for span in spans if span.length > 1]
        return ReferencePlan(
            kernel=self,
            rows=sum(span.length for span in spans),
            singles=self._plan_singles(single) if single else None,
            chunks=tuple(self._plan_chunk(span) for span in several),
        )

    def gather(self, pool: torch.Tensor, index: torch.Tensor, row_size: int) -> torch.Tensor:
        """Rows `index` of `pool` seen as [-1, row_size], float32, in the workspace."""
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

    def _plan_singles(self, spans: list[Span]) -> _Singles:
        """All pages of all single rows, by page id, cut into tiles."""
        T, limit = self.page_tokens, SINGLES_TILES * self.tile_pages
        lengths = [span.held + (1 if span.tail else 0) for span in spans]
        counts = [-(-n // T) for n in lengths]
        pages = np.concatenate([s.pages[:c] for s, c in zip(spans, counts, strict=True)])
        owner = np.repeat(np.arange(len(spans)), counts)
        ordinal = np.arange(len(pages)) - np.repeat(np.cumsum(counts) - counts, counts)
        filled = np.minimum(np.array(lengths)[owner] - ordinal * T, T)
        order = np.argsort(pages, kind="stable")
        cuts = [order[first : first + limit] for first in range(0, len(order), limit)]
        tiles = tuple(self._plan_tile(pages[c], owner[c], filled[c], len(spans)) for c in cuts)
        return _Singles(torch.tensor([span.start for span in spans]), tiles)

    def _plan_tile(self, pages: Ids, owner: Ids, filled: Ids, rows: int) -> _Tile:
        """A tile of ascending `pages` with their owners and tokens filled."""
        full = filled == self.page_tokens
        runs = _runs(pages, full)
        orders = [
            piece
            for run in runs
            if len(run) >= RUN_PAGES
            for piece in np.array_split(run, -(-len(run) // self.streamed_pages))
        ]
        in_place = len(orders)
        short = np.concatenate([*(run for run in runs if len(run) < RUN_PAGES), _NONE])
        for alike in (short[full[short]], short[~full[short]]):
            starts = range(0, len(alike), self.gathered_pages)
            orders.extend(alike[at : at + self.gathered_pages] for at in starts)
        blocks = tuple(
            self._plan_block(pages[order], owner[order], filled[order], number < in_place)
            for number, order in enumerate(orders)
        )
        apart = np.full((rows, len(pages)), np.float32("-inf"))
        apart[owner[np.concatenate(orders)], np.arange(len(pages))] = 0.0
        bare = np.flatnonzero(np.bincount(owner, minlength=rows) == 0)
        apart[bare] = 0.0
        return _Tile(blocks, torch.from_numpy(apart),
                     torch.from_numpy(bare) if len(bare) else None)  # fmt: skip

    def _plan_block(self, pages: Ids, owner: Ids, filled: Ids, in_place: bool) -> _Block:
        T, most = self.page_tokens, int(filled.max())
        index = None if in_place else torch.from_numpy(pages)
        if not in_place and most < T:  # the beginnings of pages move token by token
            planes = np.arange(2 * self.kv_heads)[:, None] * T + np.arange(most)
            rows = pages[:, None, None] * (2 * self.kv_heads * T) + planes
            index = torch.from_numpy(rows.reshape(-1))
        mask = None
        if int(filled.min()) < most:
            beyond = np.arange(most) >= filled[:, None]
            mask = torch.from_numpy(np.where(beyond, np.float32("-inf"), np.float32(0.0)))
            mask = mask.view(-1, 1, 1, most).expand(-1, 1, self.heads // self.kv_heads, most)
        return _Block(int(pages[0]), index, torch.from_numpy(owner), most, mask)


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    span: Span
    tiles: tuple[tuple[torch.Tensor, int], ...]  # (gather index, tokens held)


@dataclasses.dataclass(frozen=True, slots=True)
class _Block:
    """Pages of single rows that one product reads: from `first` on in place, or by `index`.

    `index` what to gather, in pages when they are full, else in tokens; `owner` [pages] the row of
    each; `tokens` how far pages are read; `mask` [pages, 1, group, tokens] −∞ beyond a page's last
    token, None when all are filled so far.
    """

    first: int
    index: torch.Tensor | None
    owner: torch.Tensor
    tokens: int
    mask: torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Tile:
    """`apart` [rows, pages of all blocks] 0 where the page is the row's, −∞ elsewhere; `bare` the
    rows without a page here, None when there are none."""

    blocks: tuple[_Block, ...]
    apart: torch.Tensor
    bare: torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Singles:
    rows: torch.Tensor
    tiles: tuple[_Tile, ...]


def _runs(pages: Ids, full: npt.NDArray[np.bool_]) -> list[Ids]:
    """Places of ascending `pages` in pieces side by side in the pool; one whose full pages stand
    all on one side of its partial ones is parted there if that is worth it."""
    runs = []
    for piece in np.split(np.arange(len(pages)), np.flatnonzero(np.diff(pages) != 1) + 1):
        if len(piece) >= 2 * PARTED_PAGES:
            border = np.flatnonzero(np.diff(full[piece])) + 1
            if len(border) == 1 and PARTED_PAGES <= border[0] <= len(piece) - PARTED_PAGES:
                runs.extend(np.split(piece, border))
                continue
        runs.append(piece)
    return runs


@dataclasses.dataclass(frozen=True, slots=True)
class ReferencePlan:
    """One step's spans, ready to run in every layer."""

    kernel: ReferenceAttention
    rows: int
    singles: _Singles | None
    chunks: tuple[_Chunk, ...]

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor) -> Partial:
        K = self.kernel
        if not self.chunks and self.singles is not None:
            return self._run_singles(self.singles, q, pool)
        out = torch.empty(self.rows, K.heads, K.head_dim)
        lse = torch.empty(self.rows, K.heads)
        for chunk in self.chunks:
            self._run_chunk(chunk, q, k, v, pool, Partial(out, lse))
        if self.singles is not None:
            rows = self.singles.rows
            part = self._run_singles(self.singles, q.index_select(0, rows), pool)
            out.index_copy_(0, rows, part.out)
            lse.index_copy_(0, rows, part.lse)
        return Partial(out, lse, LogBase.E)

    def _run_chunk(
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
            kv = K.gather(pool, index, K.page_tokens * D).view(2, 1, K.kv_heads, -1, D)
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

    def _run_singles(self, singles: _Singles, q: torch.Tensor, pool: torch.Tensor) -> Partial:
        """All single rows `q` [rows, heads, head_dim], tile by tile."""
        K = self.kernel
        queries = q.float().view(-1, K.kv_heads, K.heads // K.kv_heads, K.head_dim)
        whole: Partial | None = None
        for tile in singles.tiles:
            whole = _joined(whole, self._run_tile(tile, queries, pool))
        return empty(len(q), K.heads, K.head_dim) if whole is None else whole

    def _run_tile(self, tile: _Tile, queries: torch.Tensor, pool: torch.Tensor) -> Partial:
        """Per page first, then per row: lse = log Σ exp(lse_p), o = Σ exp(lse_p − lse) · o_p."""
        states = [self._per_page(block, queries, pool) for block in tile.blocks]
        page_lse = states[0][1] if len(states) == 1 else torch.cat([lse for _, lse in states], -1)
        scores = page_lse.unsqueeze(1) + tile.apart
        weight = scores.softmax(-1)
        # The heaviest page's weight is exp(lse_p − lse).
        lse = scores.amax(-1).sub_(weight.amax(-1).log_())
        total = torch.bmm(weight[..., : states[0][0].shape[1]], states[0][0])
        at = states[0][0].shape[1]
        for out, _ in states[1:]:
            total.baddbmm_(weight[..., at : (at := at + out.shape[1])], out)
        whole = Partial(total.transpose(0, 1).contiguous(), lse.t())
        if tile.bare is not None:  # what stands there is other rows'
            whole.out.index_fill_(0, tile.bare, 0.0)
            whole.lse.index_fill_(0, tile.bare, float("-inf"))
        return whole

    def _per_page(
        self, block: _Block, queries: torch.Tensor, pool: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [heads, pages, head_dim], lse [heads, pages]) of each page alone."""
        K, P = self.kernel, block.owner.numel()
        if block.index is None:
            kv = pool[block.first : block.first + P, :, :, : block.tokens].float()
            kv.sum()  # reads it in one stream
        else:
            size = pool[0].numel() if block.tokens == K.page_tokens else K.head_dim
            kv = K.gather(pool, block.index, size).view(P, 2, K.kv_heads, block.tokens, -1)
        own = queries.index_select(0, block.owner)
        out, lse = _flash(own, kv[:, 0], kv[:, 1], attn_mask=block.mask)
        by_head = out.reshape(P, K.heads, K.head_dim).transpose(0, 1)
        return by_head, lse.permute(1, 2, 0).reshape(K.heads, P)


def _joined(whole: Partial | None, part: Partial) -> Partial:
    if whole is None:
        return part
    fold(whole, part)
    return whole
