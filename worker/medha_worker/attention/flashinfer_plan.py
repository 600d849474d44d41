"""Planned calls of FlashInfer's paged kernels.

A FlashInfer wrapper keeps one plan: scheduling arrays that `plan` writes into pinned memory and
copies to the device in stream order. So a wrapper may be planned again once its last copy is done
(an event signals it), and once all launches that use its last plan are made (`paged` ensures it).
Log-sum-exps are in base 2. Every entry has at least one key per row, since FlashInfer does not
return −∞ for a row without keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from medha_worker.attention.fixed_blocks import TILE, BlockBatch
from medha_worker.attention.fp8_scales import FP8, Scales
from medha_worker.attention.kv_splits import GATHERED_TOKENS, KernelBatch, contiguous
from medha_worker.flashinfer import Library

# Enough for usual plans; see `workspace_bytes`.
WORKSPACE_BYTES = 256 << 20
# Largest number of single rows in a CUDA graph.
GRAPH_ROWS = 256
LAYOUT = "HND"

Kernel = Literal["fa3", "fa2"]
Decodes = Literal["cores", "tensor"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes and kernels common to all calls of a rank.

    `kernel`: for chunks, `fa3` (Hopper) or `fa2`. `decodes`: single rows run on CUDA cores or
    tensor cores. `split_pages`: fixed length of key splits (`fa2` only), with which all rows run in
    fixed blocks (see `fixed_blocks`); 0: FlashInfer chooses, depending on the batch.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    kernel: Kernel = "fa3"
    decodes: Decodes = "cores"
    split_pages: int = 0

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    def kernel_for(self, window: int) -> Kernel:
        """Return the chunk kernel for layers with this window (0: none).

        In FP8, `fa3` loads tiles at a window's left edge that it never consumes, and hangs.
        """
        return "fa2" if window and self.kv_dtype == FP8 else self.kernel

    def narrow_queries(self, window: int = 0) -> bool:
        """Return True if the chunk kernel needs FP8 queries: `fa3` does if keys are FP8."""
        return self.kernel_for(window) == "fa3" and self.kv_dtype == FP8

    @property
    def most_parts(self) -> int:
        """Limit of parts of a tile's keys whose states fit into FlashInfer's workspace."""
        return max(1, WORKSPACE_BYTES // (TILE * self.heads * (self.head_dim + 1) * 4) - 1)


def workspace_bytes(geometry: Geometry, processors: int) -> int:
    """Return the bytes that plans of `fa2` without fixed splits may need.

    Where keys are split, each tile's outputs and log-sum-exps of all heads are kept in float32.
    There are at most two tiles a processor, shared by the KV heads, and in a graph one for each
    single row in any case (FlashInfer's PrefillPlan).
    """
    G = geometry
    state_bytes = G.heads * (G.head_dim + 1) * 4
    split = 2 * processors // G.kv_heads
    largest = 64 if G.head_dim >= 256 else 128
    tile = 16 if G.group <= 16 else 64 if G.group <= 64 else largest
    in_graph = max(split, -(-GRAPH_ROWS * G.group // tile) + GRAPH_ROWS - 1)
    needed = max(split * largest, in_graph * tile) * state_bytes + (1 << 20)
    return max(WORKSPACE_BYTES, needed)


class Wrapper:
    """A FlashInfer wrapper, replanned only after its last plan has left pinned memory."""

    def __init__(self, inner: Any, copied: torch.cuda.Event | None) -> None:
        self.inner, self._copied, self._planned = inner, copied, False

    @staticmethod
    def on(device: torch.device, inner: Any) -> Wrapper:
        on_cuda = device.type == "cuda"
        return Wrapper(inner, torch.cuda.Event() if on_cuda else None)  # type: ignore[no-untyped-call]

    def plan(self, *args: Any, **options: Any) -> None:
        if self._copied is not None and self._planned:
            self._copied.synchronize()
        self.inner.plan(*args, **options)
        self._planned = True
        if self._copied is not None:
            self._copied.record()


class Wrappers:
    """FlashInfer wrappers for the plans alive at a time, created on first use.

    All share one workspace: on one stream a kernel finishes before the next writes there. A wrapper
    allocates and pins 8 MiB, so the usual ones are created ahead (`prepare`).
    """

    def __init__(
        self, geometry: Geometry, library: Library, device: torch.device, processors: int
    ) -> None:
        self.geometry, self.library, self.device = geometry, library, device
        size = workspace_bytes(geometry, processors)
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        self._gathered = GatheredKeys(geometry, device)
        self._made: dict[tuple[object, ...], Wrapper] = {}

    def blocks(self, turn: int, batches: Sequence[BlockBatch]) -> tuple[BlockCall, ...]:
        """Plan calls for blocks, each on a separate wrapper."""
        calls = ((batch, self.chunks(turn, batch, at)) for at, batch in enumerate(batches))
        return tuple(BlockCall(call, batch, self.device) for batch, call in calls)

    def prepare(self, turns: int, windows: Sequence[int], gathers: bool) -> None:
        """Create the wrappers of usual batches for layers with these windows (0: none).

        `gathers`: some chunks see gathered keys.
        """
        for turn in range(turns):
            for window in windows:
                self._decodes(turn, window)
                self._chunks(turn, True, False, False, window)
            if 0 in windows and self.geometry.kernel == "fa3":
                self._chunks(turn, False, False, False, 0)
                self._chunks(turn, False, True, False, 0)
            if 0 in windows and gathers:
                self._chunks(turn, True, False, True, 0)
                for number in range(2):
                    self._over_gathered(turn, number)

    def chunks(self, turn: int, batch: KernelBatch, number: int = 0) -> ChunkCall:
        """Plan a call for chunks on wrapper `number` of this turn."""
        kind = batch.causal, batch.packed, batch.small, batch.window
        return ChunkCall(self._chunks(turn, *kind, number), batch, self.geometry, self.device)

    def gathered(self, turn: int, batch: KernelBatch, number: int) -> GatheredCall:
        """Plan a call over gathered keys on wrapper `number` of this turn."""
        wrapper = self._over_gathered(turn, number)
        return GatheredCall(wrapper, batch, self.geometry, self._gathered)

    def decodes(self, turn: int, batch: KernelBatch) -> DecodeCall:
        """Plan a call for single rows on the wrapper of this turn."""
        wrapper = self._decodes(turn, batch.window)
        plan_decodes(wrapper, batch, self.geometry, self.device)
        return DecodeCall(wrapper, selection(batch.rows, self.device), self.geometry)

    def _chunks(
        self, turn: int, causal: bool, packed: bool, small: bool, window: int, number: int = 0
    ) -> Wrapper:
        key = (turn, causal, packed, small, window, number)
        if key not in self._made:
            kernel = "fa2" if small else self.geometry.kernel_for(window)
            inner = self.library.BatchPrefillWithPagedKVCacheWrapper(
                self.workspace, LAYOUT, backend=kernel
            )
            self._made[key] = Wrapper.on(self.device, inner)
        return self._made[key]

    def _over_gathered(self, turn: int, number: int) -> Wrapper:
        key = (turn, "gathered", number)
        if key not in self._made:
            inner = self.library.BatchPrefillWithRaggedKVCacheWrapper(
                self.workspace, "NHD", backend=self.geometry.kernel
            )
            self._made[key] = Wrapper.on(self.device, inner)
        return self._made[key]

    def _decodes(self, turn: int, window: int) -> Wrapper:
        key = (turn, "decodes", window)
        if key not in self._made:
            inner = decode_wrapper(self.library, self.geometry, self.workspace)
            self._made[key] = Wrapper.on(self.device, inner)
        return self._made[key]


def decode_wrapper(
    library: Library, geometry: Geometry, workspace: torch.Tensor, **buffers: Any
) -> Any:
    """Create FlashInfer's wrapper for single rows; `buffers` are those of a CUDA graph, if any."""
    tensor = geometry.decodes == "tensor"
    return library.BatchDecodeWithPagedKVCacheWrapper(
        workspace, LAYOUT, use_tensor_cores=tensor, backend="fa2" if tensor else "auto", **buffers
    )


def plan_decodes(
    wrapper: Wrapper, batch: KernelBatch, geometry: Geometry, device: torch.device
) -> None:
    """Plan entries of single rows on a wrapper."""
    G = geometry
    wrapper.plan(
        staged(batch.kv_indptr, device),
        to_device(batch.pages, device),
        staged(batch.last_page, device),
        G.heads,
        G.kv_heads,
        G.head_dim,
        G.page_tokens,
        window_left=batch.window - 1,
        q_data_type=G.dtype,
        kv_data_type=G.kv_dtype,
        o_data_type=G.dtype,
    )


class DecodeCall:
    """A planned call for single rows: row i of the selection is entry i."""

    def __init__(self, wrapper: Wrapper, rows: slice | torch.Tensor, geometry: Geometry) -> None:
        self.wrapper, self.rows, self.geometry = wrapper, rows, geometry

    def run(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        scales: Scales | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Write states of the selected rows of `q` into `out` and `lse` of the whole batch."""
        if isinstance(self.rows, slice):
            self._run(q[self.rows], pool, scales, out[self.rows], lse[self.rows])
            return
        own = torch.empty((len(self.rows), *q.shape[1:]), dtype=out.dtype, device=q.device)
        sums = torch.empty(own.shape[:2], dtype=torch.float32, device=q.device)
        self._run(q.index_select(0, self.rows), pool, scales, own, sums)
        out.index_copy_(0, self.rows, own)
        lse.index_copy_(0, self.rows, sums)

    def _run(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        scales: Scales | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        queries = q if scales is None else scales.meeting(q)
        self.wrapper.inner.run(queries, pool, out=out, lse=lse, return_lse=True)
        if scales is not None:
            scales.restore(out)


class ChunkCall:
    """A planned call for entries of several rows."""

    def __init__(
        self, wrapper: Wrapper, batch: KernelBatch, geometry: Geometry, device: torch.device
    ) -> None:
        self.wrapper, self.batch, self.geometry, self.device = wrapper, batch, geometry, device
        self.rows = selection(batch.rows, device)
        self.narrow = geometry.narrow_queries(batch.window) and not batch.small
        self._plan()

    def _plan(self) -> None:
        G, batch, device = self.geometry, self.batch, self.device
        self.wrapper.plan(
            staged(batch.q_indptr, device),
            staged(batch.kv_indptr, device),
            to_device(batch.pages, device),
            staged(batch.last_page, device),
            self.heads,
            G.kv_heads,
            G.head_dim,
            G.page_tokens,
            causal=batch.causal,
            window_left=batch.window - 1,
            q_data_type=FP8 if self.narrow else G.dtype,
            kv_data_type=G.kv_dtype,
            o_data_type=G.dtype,
            **({"fixed_split_size": G.split_pages} if G.split_pages else {}),
        )

    @property
    def heads(self) -> int:
        """Query heads of a row of the kernel."""
        return self.geometry.kv_heads if self.batch.packed else self.geometry.heads

    def run(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        scales: Scales | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Write states of the entries' rows, in entry order, into `out` [rows, heads, head_dim]
        and `lse` [rows, heads]."""
        queries = q[self.rows] if isinstance(self.rows, slice) else q.index_select(0, self.rows)
        narrow, own, sums = self.narrow, out, lse
        if scales is not None:
            queries = scales.query_numbers(queries) if narrow else scales.meeting(queries)
        if self.batch.packed:
            queries = fold(queries, self.heads)
            own, sums = torch.empty_like(queries, dtype=out.dtype), lse.new_empty(queries.shape[:2])
        self._attend(queries, pool, scales if narrow else None, own, sums)
        if self.batch.packed:
            unfold(own, out)
            unfold(sums, lse)
        if scales is not None and not narrow:
            scales.restore(out)

    def _attend(
        self,
        queries: torch.Tensor,
        pool: torch.Tensor,
        scales: Scales | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Launch the kernel; with `scales`, queries are FP8 numbers."""
        extra = () if scales is None else (None, scales.products, scales.value)
        self.wrapper.inner.run(queries, pool, *extra, out=out, lse=lse, return_lse=True)


class GatheredKeys:
    """Memory where the keys and values of some pages are side by side, allocated on first use.

    On one stream a call has read them before the next ones are copied there.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self._geometry, self.device = geometry, device
        self._memory = torch.empty(0, dtype=geometry.kv_dtype, device=device)

    def of(self, pool: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Return the tokens of `pages` (int64) [2, tokens, kv_heads, head_dim], keys first; they
        are valid until the next call."""
        G, count = self._geometry, len(pages)
        tokens = count * G.page_tokens
        if 2 * G.kv_heads * tokens * G.head_dim > len(self._memory):
            size = 2 * G.kv_heads * max(tokens, GATHERED_TOKENS) * G.head_dim
            self._memory = torch.empty(size, dtype=G.kv_dtype, device=self.device)
        side_by_side = self._memory[: 2 * G.kv_heads * tokens * G.head_dim]
        # Copied 16 bytes at once: a GPU selects by index element by element.
        shape = (2, G.kv_heads, count, G.page_tokens, -1)
        by_head = pool.view(torch.complex128).permute(1, 2, 0, 3, 4)
        torch.index_select(by_head, 2, pages, out=side_by_side.view(torch.complex128).view(shape))
        return side_by_side.view(2, G.kv_heads, tokens, G.head_dim).transpose(1, 2)


class GatheredCall(ChunkCall):
    """A planned call for entries over gathered keys."""

    def __init__(
        self, wrapper: Wrapper, batch: KernelBatch, geometry: Geometry, keys: GatheredKeys
    ) -> None:
        self._keys, self._pages = keys, to_device(batch.pages.astype(np.int64), keys.device)
        ends = batch.kv_indptr * geometry.page_tokens
        ends[-1] += batch.last_page[-1] - geometry.page_tokens
        self._ends = ends
        super().__init__(wrapper, batch, geometry, keys.device)

    def _plan(self) -> None:
        G, batch = self.geometry, self.batch
        self.wrapper.plan(
            staged(batch.q_indptr, self.device),
            staged(self._ends, self.device),
            self.heads,
            G.kv_heads,
            G.head_dim,
            causal=batch.causal,
            q_data_type=G.dtype,
            kv_data_type=G.kv_dtype,
            o_data_type=G.dtype,
        )

    def _attend(
        self,
        queries: torch.Tensor,
        pool: torch.Tensor,
        scales: Scales | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        k, v = self._keys.of(pool, self._pages)[:, : int(self._ends[-1])]
        self.wrapper.inner.run(queries, k, v, out=out, lse=lse, return_lse=True)


class BlockCall:
    """A planned call for entries of one size, whose padding rows are dropped."""

    def __init__(self, call: ChunkCall, batch: BlockBatch, device: torch.device) -> None:
        self._call = call
        self._kept = to_device(batch.kept, device)
        self._rows = to_device(batch.rows[batch.kept], device)

    def run(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        scales: Scales | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Write states of the entries' rows of `q` into `out` and `lse` of the whole batch."""
        own = out.new_empty(len(self._call.batch.rows), *out.shape[1:])
        sums = lse.new_empty(own.shape[:2])
        self._call.run(q, pool, scales, own, sums)
        out.index_copy_(0, self._rows, own.index_select(0, self._kept))
        lse.index_copy_(0, self._rows, sums.index_select(0, self._kept))


def fold(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return queries [n, kv_heads · group, head_dim] as rows [n · group, kv_heads, head_dim]."""
    n, _, head_dim = q.shape
    by_head = q.view(n, kv_heads, -1, head_dim).transpose(1, 2)
    return by_head.reshape(-1, kv_heads, head_dim).contiguous()


def unfold(folded: torch.Tensor, into: torch.Tensor) -> None:
    """Invert `fold`: [n · group, kv_heads, …] into [n, kv_heads · group, …]."""
    n, kv_heads, rest = len(into), folded.shape[1], folded.shape[2:]
    into.view(n, kv_heads, -1, *rest).copy_(folded.view(n, -1, kv_heads, *rest).transpose(1, 2))


def staged(array: npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """Return the array in memory from which an asynchronous copy can read."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy the array to the device asynchronously, in stream order."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def selection(rows: npt.NDArray[np.int64], device: torch.device) -> slice | torch.Tensor:
    """Return the numbers `rows` as a slice if they are contiguous, else on the device."""
    run = contiguous(rows)
    return to_device(rows, device) if run is None else run
