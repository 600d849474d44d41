"""CUDA backend: FlashInfer's paged kernels, selected by shape.

    single rows          fa2 on tensor cores, which splits keys by itself; without shared KV heads
                         the decode kernel on CUDA cores
    small chunks         fa2, too
    very large chunks    fa3 over keys that are copied from their pages to side by side
    other chunks         one causal entry each; where that leaves a part of the GPU idle, the prefix
                         in parts and the chunk's tail separately, merged (see `kv_splits`)
    deterministic        `fixed_blocks` of one size, so that no row's bits depend on another's
    windows over holes   plain torch: shared rows in a layer with a window, whose shard of the
                         keys is not contiguous

`plan` runs once per step and window with arrays on the CPU, about 100 µs per call; `run` runs once
per layer and only launches. A plan keeps its wrappers until `turns` more plans are made. States are
in the model's type, log-sum-exps in base 2. All calls belong to one thread and stream.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from medha_worker.attention.fixed_blocks import BlockBatch, block_rows, lay_blocks
from medha_worker.attention.flashinfer_plan import (
    BlockCall,
    ChunkCall,
    DecodeCall,
    GatheredCall,
    Geometry,
    Wrappers,
    to_device,
)
from medha_worker.attention.fp8_scales import Scales
from medha_worker.attention.kernel_interface import LogBase, Partial, Span
from medha_worker.attention.kv_splits import (
    GATHERED_TOKENS,
    H200,
    LEAST_TOKENS,
    MOST_STATES,
    SMALL_WORK,
    KernelBatch,
    Merges,
    PrefixSplit,
    lay,
    lay_singles,
    merges,
    sees_a_run,
)
from medha_worker.attention.reference import ReferenceAttention, ReferencePlan
from medha_worker.flashinfer import Library

# FP8 products are summed in few bits, so long sums lose precision: with FP8 queries a part of a
# prefix is at most this long. Measured on one H200: typically 2.6 % off with sums of 4,096, 11 %
# with 16,384, 32 % with 65,536, 71 % with 524,288.
NARROW_TOKENS = 4096
# Pages of keys that plain torch processes at once.
TILE_PAGES = 32
# Scalars of a row that FlashInfer can merge in one block: eight per thread.
MERGED = 8192


class PagedAttention:
    """Attention of a rank on a CUDA device; implements `kernel_interface.Attention`.

    `table`, `least_tokens`, `small_work`, `narrow_tokens`, `gathered_tokens`: layout of chunks (see
    `kv_splits` and NARROW_TOKENS).
    `turns`: plans alive at a time. `spare`: a page that no sequence owns, read by masked blocks.
    """

    def __init__(
        self,
        geometry: Geometry,
        library: Library,
        device: torch.device,
        *,
        table: Sequence[PrefixSplit] = H200,
        least_tokens: int = LEAST_TOKENS,
        small_work: int = SMALL_WORK,
        narrow_tokens: int = NARROW_TOKENS,
        gathered_tokens: int = GATHERED_TOKENS,
        turns: int = 4,
        spare: int = 0,
    ) -> None:
        G = self.geometry = geometry
        self.library, self.device, self.table, self.turns = library, device, tuple(table), turns
        self.wrappers = Wrappers(geometry, library, device)
        self.rest = ReferenceAttention(G.heads, G.kv_heads, G.head_dim, G.page_tokens, TILE_PAGES)
        self.least_tokens, self.spare, self._turn = least_tokens, spare, 0
        self.most_tokens = narrow_tokens if G.narrow_queries() else 0
        both = G.kernel == "fa3" and G.kv_dtype == G.dtype
        self.small_work = small_work if both else 0
        self.gathered_tokens = gathered_tokens if both else 0

    @property
    def scratch_bytes(self) -> int:
        """Upper bound of memory for a large chunk after a very long prefix, besides the pool.

        Queries and states of all parts, those of the batch before, and states again by row while
        they are merged; or gathered keys.
        """
        G = self.geometry
        row_bytes = G.heads * (4 * G.head_dim * G.dtype.itemsize + 3 * torch.float32.itemsize)
        token_bytes = 2 * G.kv_heads * G.head_dim * G.kv_dtype.itemsize
        return (MOST_STATES * row_bytes if self.most_tokens else 0) + (
            self.gathered_tokens * token_bytes
        )

    @torch.inference_mode()
    def plan(self, spans: Sequence[Span]) -> PagedPlan:
        """Lay out a step's spans, all of one window, and plan their kernels."""
        G, T = self.geometry, self.geometry.page_tokens
        runs = [span for span in spans if sees_a_run(span, T)]
        rest = [span for span in spans if not sees_a_run(span, T)]
        single, batches, blocks = None, tuple[KernelBatch, ...](), tuple[BlockBatch, ...]()
        if G.split_pages:
            rows, most = block_rows(G.group), G.most_parts
            blocks = lay_blocks(runs, T, rows, G.split_pages, most, self.spare)
        else:
            single = lay_singles([span for span in runs if span.length == 1], T)
            batches = lay(
                [span for span in runs if span.length > 1],
                T,
                G.group,
                self.table,
                self.least_tokens,
                self.most_tokens,
                self.small_work,
                self.gathered_tokens,
            )
        turn = self._turn = (self._turn + 1) % self.turns
        paged = [self.wrappers.chunks(turn, batch) for batch in batches if not batch.gathered]
        over_gathered = [batch for batch in batches if batch.gathered]
        gathered = [
            self.wrappers.gathered(turn, batch, number)
            for number, batch in enumerate(over_gathered)
        ]
        return PagedPlan(
            self,
            None if single is None else self.wrappers.decodes(turn, single),
            (*paged, *gathered),
            merges(batches),
            self.wrappers.blocks(turn, blocks),
            self.rest.plan(rest) if rest else None,
            [slice(s.start, s.start + s.length) for s in runs if not s.held and not s.tail],
            [slice(s.start, s.start + s.length) for s in rest],
        )


class PagedPlan:
    """A step's spans, planned for every layer; implements `kernel_interface.AttentionPlan`."""

    def __init__(
        self,
        attention: PagedAttention,
        single: DecodeCall | None,
        chunks: tuple[ChunkCall | GatheredCall, ...],
        states: Merges,
        blocks: tuple[BlockCall, ...],
        rest: ReferencePlan | None,
        bare: list[slice],
        rest_rows: list[slice],
    ) -> None:
        self.attention, self.single, self.chunks, self.blocks = attention, single, chunks, blocks
        self.rest, self.bare, self.rest_rows = rest, bare, rest_rows
        # A single call over contiguous rows writes them in place.
        direct = len(chunks) == 1 and not len(states.several) and isinstance(chunks[0].rows, slice)
        self.states = None if direct or not chunks else _Merging(states, chunks, attention)
        # Of all layers: on one stream a layer's states are used before the next one's are written.
        self._whole: Partial | None = None

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        scales: Scales | None = None,
    ) -> Partial:
        """Return states for `q` [rows, heads, head_dim]; they are valid until the next run."""
        if self._whole is None:
            out = torch.empty(q.shape, dtype=self.attention.geometry.dtype, device=q.device)
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            self._whole = Partial(out, lse, LogBase.TWO)
        out, lse = self._whole.out, self._whole.lse
        if self.single is not None:
            self.single.run(q, pool, scales, out, lse)
        if self.states is not None:
            self.states.run(q, pool, scales, out, lse)
        elif self.chunks:
            rows = self.chunks[0].rows
            self.chunks[0].run(q, pool, scales, out[rows], lse[rows])
        for block in self.blocks:
            block.run(q, pool, scales, out, lse)
        if self.rest is not None:
            self.rest.fill(q, k, v, pool, Partial(out, lse), scales)
            for rows in self.rest_rows:
                lse[rows].mul_(1.0 / math.log(LogBase.TWO.value))
        for rows in self.bare:
            out[rows].zero_()
            lse[rows].fill_(float("-inf"))
        return self._whole


@dataclasses.dataclass(frozen=True, slots=True)
class _Indices:
    """Rows and states of `kv_splits.Merges`, on the device."""

    alone_rows: torch.Tensor
    alone: torch.Tensor
    several_rows: torch.Tensor
    several: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class _States:
    """Memory for the states of calls, one empty state after the last, and views of each call's."""

    out: torch.Tensor
    lse: torch.Tensor
    of_calls: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]

    @staticmethod
    def of(counts: list[int], geometry: Geometry, device: torch.device) -> _States:
        """Allocate for calls of `counts` rows."""
        G, count = geometry, sum(counts) + 1
        out = torch.empty(count, G.heads, G.head_dim, dtype=G.dtype, device=device)
        lse = torch.empty(count, G.heads, dtype=torch.float32, device=device)
        out[-1].zero_()
        lse[-1].fill_(float("-inf"))
        views = torch.split(out[:-1], counts), torch.split(lse[:-1], counts)
        return _States(out, lse, views)


class _Merging:
    """Merges the states of several calls into those of batch rows.

    A host launches a layer in a fraction of a millisecond only if it does little in it: memory and
    views of it are made once for all layers.
    """

    def __init__(
        self, states: Merges, calls: Sequence[ChunkCall | GatheredCall], attention: PagedAttention
    ) -> None:
        device = attention.device
        self._geometry, self._library = attention.geometry, attention.library
        self._at = _Indices(
            *(to_device(x, device) for x in (states.alone_rows, states.alone)),
            *(to_device(x, device) for x in (states.several_rows, states.several.reshape(-1))),
        )
        self._calls = calls
        self._memory: _States | None = None

    def run(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        scales: Scales | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        if self._memory is None:
            counts = [len(call.batch.rows) for call in self._calls]
            self._memory = _States.of(counts, self._geometry, q.device)
        at, states, sums = self._at, self._memory.out, self._memory.lse
        for call, own, own_sums in zip(self._calls, *self._memory.of_calls, strict=True):
            call.run(q, pool, scales, own, own_sums)
        if len(at.alone):
            out.index_copy_(0, at.alone_rows, states.index_select(0, at.alone))
            lse.index_copy_(0, at.alone_rows, sums.index_select(0, at.alone))
        if len(at.several_rows):
            rows, most = len(at.several_rows), max(1, MERGED // out.shape[-1])
            for first in range(0, out.shape[1], most):
                heads = slice(first, first + most)
                theirs, their_sums = states[:, heads], sums[:, heads]
                merged, whole = self._library.merge_states(
                    theirs.index_select(0, at.several).view(rows, -1, *theirs.shape[1:]),
                    their_sums.index_select(0, at.several).view(rows, -1, theirs.shape[1]),
                )
                out[:, heads].index_copy_(0, at.several_rows, merged)
                lse[:, heads].index_copy_(0, at.several_rows, whole)
