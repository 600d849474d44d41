"""CUDA backend: FlashInfer's paged kernels, selected by shape.

    single rows          fa2 on tensor cores, which splits keys by itself; without shared KV heads
                         the decode kernel on CUDA cores
    small chunks         fa2, too
    other chunks         fa3, over pages or over keys copied from them to side by side: one causal
                         entry, or the prefix in parts and the chunk's tail separately, merged (see
                         `split_costs`)
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
    Geometry,
    Wrappers,
    selection,
    to_device,
)
from medha_worker.attention.fp8_scales import Scales
from medha_worker.attention.kernel_interface import LogBase, Partial, Span
from medha_worker.attention.kv_splits import (
    GATHERED_TOKENS,
    Choose,
    KernelBatch,
    Merge,
    lay,
    lay_singles,
    merges,
    sees_a_run,
)
from medha_worker.attention.reference import ReferenceAttention, ReferencePlan
from medha_worker.attention.split_costs import MOST_STATES, SPLIT_STATES, SplitCosts, whole
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

    `choose`, `narrow_tokens`, `gathered_tokens`: layout of chunks (see `kv_splits` and
    NARROW_TOKENS); None: where `fa3` runs, the fastest split on `processors`.
    `turns`: plans alive at a time. `spare`: a page that no sequence owns, read by masked blocks.
    """

    def __init__(
        self,
        geometry: Geometry,
        library: Library,
        device: torch.device,
        *,
        choose: Choose | None = None,
        processors: int = 132,
        narrow_tokens: int = NARROW_TOKENS,
        gathered_tokens: int = GATHERED_TOKENS,
        turns: int = 4,
        spare: int = 0,
    ) -> None:
        G = self.geometry = geometry
        self.library, self.device, self.turns = library, device, turns
        self.wrappers = Wrappers(geometry, library, device, processors)
        self.scratch = StateMemory(geometry, device)
        self.rest = ReferenceAttention(G.heads, G.kv_heads, G.head_dim, G.page_tokens, TILE_PAGES)
        self.spare, self._turn = spare, 0
        self.most_tokens = narrow_tokens if G.narrow_queries() else 0
        both = G.kernel == "fa3" and G.kv_dtype == G.dtype
        self.gathered_tokens = gathered_tokens if both else 0
        size = G.kv_dtype.itemsize
        costs = SplitCosts(G.heads, G.kv_heads, G.head_dim, size, processors, one_type=both)
        self.choose = choose or (costs.choose if G.kernel == "fa3" else whole)

    @property
    def scratch_bytes(self) -> int:
        """Upper bound of memory for a large chunk after a very long prefix, besides the pool.

        Queries and states of all parts, both folded, and states by row, padded to less than twice
        as many; and gathered keys.
        """
        G = self.geometry
        row_bytes = G.heads * (5 * G.head_dim * G.dtype.itemsize + 4 * torch.float32.itemsize)
        token_bytes = 2 * G.kv_heads * G.head_dim * G.kv_dtype.itemsize
        states = MOST_STATES if self.most_tokens else SPLIT_STATES if self.gathered_tokens else 0
        return states * row_bytes + self.gathered_tokens * token_bytes

    def prepare(self, windows: Sequence[int]) -> None:
        """Create what batches of layers with these windows (0: none) usually need.

        Otherwise the first of each kind would wait for it.
        """
        if not self.geometry.split_pages:
            self.wrappers.prepare(self.turns, windows, self.gathered_tokens > 0)

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
                self.choose,
                self.most_tokens,
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
        chunks: tuple[ChunkCall, ...],
        states: tuple[Merge, ...],
        blocks: tuple[BlockCall, ...],
        rest: ReferencePlan | None,
        bare: list[slice],
        rest_rows: list[slice],
    ) -> None:
        self.attention, self.single, self.chunks, self.blocks = attention, single, chunks, blocks
        self.rest, self.bare, self.rest_rows = rest, bare, rest_rows
        # A single call over contiguous rows writes them in place.
        unmerged = [merge.states.shape[1] for merge in states] == [1]
        direct = unmerged and len(chunks) == 1 and isinstance(chunks[0].rows, slice)
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


class StateMemory:
    """Memory for states, as large as a batch has needed yet; in new memory the first is empty.

    On one stream the states of a layer are used before the next ones are written. Plans for other
    windows use it between two layers of a plan.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self._geometry, self._device = geometry, device
        self._memory: dict[str, Partial] = {}

    def of(self, purpose: str, rows: int) -> Partial:
        """Return memory for the states of `rows` rows; they are valid until its next use."""
        G, memory = self._geometry, self._memory.get(purpose)
        if memory is None or len(memory.lse) < rows:
            out = torch.empty(rows, G.heads, G.head_dim, dtype=G.dtype, device=self._device)
            lse = torch.empty(rows, G.heads, dtype=torch.float32, device=self._device)
            out[0].zero_()
            lse[0].fill_(float("-inf"))
            memory = self._memory[purpose] = Partial(out, lse, LogBase.TWO)
        return Partial(memory.out[:rows], memory.lse[:rows], LogBase.TWO)


@dataclasses.dataclass(frozen=True, slots=True)
class _Gather:
    """States `numbers` of `states`, gathered into `gathered`, for some batch rows.

    `merge`: arguments of `merge_states` over views of them, if rows have several states. `result`
    goes to batch rows `rows`, unless it is a part of them.
    """

    states: Partial
    numbers: torch.Tensor
    gathered: Partial
    merge: tuple[torch.Tensor, ...]
    result: Partial
    rows: torch.Tensor | None


class _Merging:
    """Merges the states of several calls into those of batch rows.

    A call of torch or FlashInfer takes the host some ten microseconds, in every layer. So memory
    and views of it are the same in all layers, and contiguous rows are merged in place.
    """

    def __init__(
        self, states: Sequence[Merge], calls: Sequence[ChunkCall], attention: PagedAttention
    ) -> None:
        self._attention, self._calls, device = attention, calls, attention.device
        self._merge_states = attention.library.cascade.get_cascade_module().merge_states
        after = sum(len(call.batch.rows) for call in calls) + 1
        # In memory the empty state comes first, not last.
        self._wanted = [
            (
                selection(merge.rows, device),
                to_device((merge.states.ravel() + 1) % after, device),
                merge.states.shape,
            )
            for merge in states
        ]
        self._of_calls: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._gathers: list[_Gather] = []

    def run(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        scales: Scales | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Write states of the calls' rows of `q` into `out` and `lse`, the same in every layer."""
        if not self._gathers:
            self._lay(Partial(out, lse))
        for call, (own, sums) in zip(self._calls, self._of_calls, strict=True):
            call.run(q, pool, scales, own, sums)
        for some in self._gathers:
            torch.index_select(some.states.out, 0, some.numbers, out=some.gathered.out)
            torch.index_select(some.states.lse, 0, some.numbers, out=some.gathered.lse)
            if some.merge:
                self._merge_states(*some.merge)
            if some.rows is not None:
                out.index_copy_(0, some.rows, some.result.out)
                lse.index_copy_(0, some.rows, some.result.lse)

    def _lay(self, target: Partial) -> None:
        """Lay out the empty state, which nothing overwrites, the calls' and what is gathered."""
        counts = [len(call.batch.rows) for call in self._calls]
        states = self._attention.scratch.of("states", sum(counts) + 1)
        outs, sums = torch.split(states.out[1:], counts), torch.split(states.lse[1:], counts)
        self._of_calls = list(zip(outs, sums, strict=True))
        if merged := [n * most for *_, (n, most) in self._wanted if most > 1]:
            self._attention.scratch.of("by row", max(merged))
        self._gathers = [self._gather(*wanted, states, target) for wanted in self._wanted]

    def _gather(
        self,
        rows: slice | torch.Tensor,
        numbers: torch.Tensor,
        shape: tuple[int, int],
        states: Partial,
        target: Partial,
    ) -> _Gather:
        """Return how states `numbers`, `shape` [rows, most], become those of `rows`."""
        scratch, (count, most) = self._attention.scratch, shape
        if isinstance(rows, slice):
            index, result = None, Partial(target.out[rows], target.lse[rows])
        else:
            index, result = rows, scratch.of("merged" if most > 1 else "alone", count)
        if most == 1:
            return _Gather(states, numbers, result, (), result, index)
        # Of more heads than one block of the kernel merges, some are as further rows to it.
        heads, dim = result.out.shape[1:]
        fits = (n for n in range(1, heads + 1) if heads % n == 0 and n * dim <= MERGED)
        together = max(fits)
        split = heads // together
        parts = numbers.view(count, most, 1) * split + torch.arange(split, device=numbers.device)
        memory = scratch.of("by row", count * most)
        gathered = Partial(memory.out.view(-1, together, dim), memory.lse.view(-1, together))
        merge = (
            gathered.out.view(-1, most, together, dim),
            gathered.lse.view(-1, most, together),
            result.out.view(-1, together, dim),
            result.lse.view(-1, together),
        )
        states = Partial(states.out.view(-1, together, dim), states.lse.view(-1, together))
        return _Gather(states, parts.transpose(1, 2).reshape(-1), gathered, merge, result, index)
