"""FlashInfer's calls in plain torch: what each means, said once more, as an oracle of geometry.

Signatures are the library's, less what we never pass (a test compares the two where the library is
installed). Results are poisoned first, log-sum-exps are in base 2, a row without keys gets the
library's −5·10⁴ and not −∞, and what was not planned for is refused as there.
"""

from __future__ import annotations

import bisect
import itertools
import math
from typing import Any

import torch
from tests.engine import tiled_kernel

NO_KEYS = -5e4
PROCESSORS = 132


def workspace_bytes(
    rows: list[int], pages: list[int], heads: tuple[int, int, int], page_size: int, graph: bool
) -> int:
    """Return what the library's PrefillPlan takes of its workspace for states of split keys.

    `rows`, `pages`: of the entries. In a graph a place is kept for every tile that there may be.
    """
    heads_, kv_heads, dim = heads
    group, most = heads_ // kv_heads, 2 * PROCESSORS // kv_heads
    packed = [count * group for count in rows]
    mean = group if graph else sum(packed) // len(packed)
    tile = 128 if mean > 64 and dim < 256 else 64 if mean > 16 else 16
    tiles = [-(-count // tile) for count in packed]

    def works(part: int) -> int:
        return sum(n * -(-max(count, 1) // part) for n, count in zip(tiles, pages, strict=True))

    longest = max(1, *pages)
    parts = range(max(128 // page_size, 1), longest)
    part = parts.start + bisect.bisect_left(parts, True, key=lambda part: works(part) <= most)
    if not graph and part >= longest:
        return 0
    places = works(part)
    if graph:
        places = max(most, -(-sum(packed) // tile) + len(rows) - 1)
    return int(heads_ * places * tile * (dim + 1) * 4)


class _Planned:
    """State of a plan, common to both wrappers."""

    def __init__(self) -> None:
        self.plans = 0
        self.causal, self.window_left, self.page_size = False, -1, 0
        self.heads = (0, 0, 0)
        self.dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3
        self.part_keys = 0

    def _plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        heads: tuple[int, int, int],
        page_size: int,
        dtypes: tuple[torch.dtype, ...],
    ) -> None:
        for array in (indptr, indices, last_page_len):
            assert array.dtype == torch.int32
        assert len(indptr) == len(last_page_len) + 1 and int(indptr[-1]) == len(indices)
        assert (indptr[1:] >= indptr[:-1]).all()
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        assert heads[0] % heads[1] == 0
        self.plans += 1
        self.heads, self.page_size, self.dtypes = heads, page_size, dtypes

    def _attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        spans: list[tuple[int, int]],
        pages: list[torch.Tensor],
        lengths: list[int],
        scales: tuple[Any, ...],
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        heads, kv_heads, dim = self.heads
        assert cache.shape[1:] == (2, kv_heads, self.page_size, dim)
        assert q.shape[1:] == (heads, dim) and (q.dtype, cache.dtype) == self.dtypes[:2]
        assert out.shape == q.shape and out.dtype == self.dtypes[2]
        assert lse.shape == q.shape[:2] and lse.dtype == torch.float32
        assert q.stride(-1) == 1 and out.is_contiguous() and lse.is_contiguous()
        out.fill_(math.nan)
        lse.fill_(math.nan)
        scale_q, scale_k, scale_v = (_of_heads(scale, heads) for scale in scales)
        for (first, end), ids, count in zip(spans, pages, lengths, strict=True):
            numbers = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
            kv = numbers[ids.long()].view(cache.dtype).float().permute(1, 2, 0, 3, 4).flatten(2, 3)
            kv = kv[:, :, :count].repeat_interleave(heads // kv_heads, dim=1)
            if self.part_keys:
                own, sums = tiled_kernel.attend(
                    q[first:end].float(),
                    kv,
                    heads // kv_heads,
                    self.causal,
                    self.window_left,
                    self.part_keys,
                )
                out[first:end], lse[first:end] = own.to(out.dtype), sums
                continue
            scores = torch.einsum("nhd,htd->nht", q[first:end].float(), kv[0])
            scores *= (scale_q * scale_k / math.sqrt(dim)).view(1, -1, 1)
            row = torch.arange(count - (end - first), count).view(-1, 1, 1)
            key = torch.arange(count)
            if self.causal:
                scores.masked_fill_(key > row, -math.inf)
            if self.window_left >= 0:
                scores.masked_fill_(key < row - self.window_left, -math.inf)
            values = torch.einsum("nht,htd->nhd", scores.softmax(-1), kv[1])
            empty = scores.isneginf().all(-1)
            values = values.masked_fill(empty.unsqueeze(-1), 0.0) * scale_v.view(1, -1, 1)
            out[first:end] = values.to(out.dtype)
            sums = scores.logsumexp(-1) / math.log(2)
            lse[first:end] = sums.masked_fill(empty, NO_KEYS)


class BatchPrefillWithPagedKVCacheWrapper(_Planned):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        assert kv_layout == "HND" and backend in ("fa2", "fa3")
        self.backend, self.workspace = backend, len(float_workspace_buffer)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        fixed_split_size: int | None = None,
    ) -> None:
        assert qo_indptr.dtype == torch.int32 and len(qo_indptr) == len(paged_kv_indptr)
        dtypes = (q_data_type, kv_data_type or q_data_type, o_data_type or q_data_type)
        heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._plan(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, heads, page_size, dtypes
        )
        narrow = q_data_type.itemsize == 1
        assert narrow == (self.backend == "fa3" and dtypes[1].itemsize == 1)
        assert not (narrow and window_left >= 0), "fa3 would wait for ever"
        self.causal, self.window_left = causal, window_left
        if fixed_split_size is not None:
            assert self.backend == "fa2"
            packed = int(qo_indptr[-1]) * (num_qo_heads // num_kv_heads) // (len(qo_indptr) - 1)
            assert 64 < packed <= 128, "another tile, or several for an entry"
            self.part_keys = fixed_split_size * page_size
        self.spans = list(zip(qo_indptr[:-1].tolist(), qo_indptr[1:].tolist(), strict=True))
        self.pages = list(_cut(paged_kv_indices, paged_kv_indptr))
        self.lengths = _lengths(self.pages, paged_kv_last_page_len, page_size)
        if self.backend == "fa2" and fixed_split_size is None and window_left < 0:
            rows = [end - first for first, end in self.spans]
            taken = [len(ids) for ids in self.pages]
            assert workspace_bytes(rows, taken, heads, page_size, False) <= self.workspace

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        *args: Any,
        out: torch.Tensor,
        lse: torch.Tensor,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert return_lse and len(q) == self.spans[-1][1]
        assert len(args) == (3 if q.dtype.itemsize == 1 else 0)
        self._attend(
            q, paged_kv_cache, self.spans, self.pages, self.lengths, args or (None,) * 3, out, lse
        )
        return out, lse


class BatchPrefillWithRaggedKVCacheWrapper(_Planned):
    """The keys of an entry are those of a page as large as all of them."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        assert kv_layout == "NHD" and backend == "fa3"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        causal: bool = False,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
    ) -> None:
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
        assert len(qo_indptr) == len(kv_indptr)
        self.spans, self.keys = (
            list(itertools.pairwise(indptr.tolist())) for indptr in (qo_indptr, kv_indptr)
        )
        for rows, keys in zip(self.spans, self.keys, strict=True):
            assert keys[1] > keys[0] and not (causal and rows[1] - rows[0] > keys[1] - keys[0])
        dtypes = (q_data_type, kv_data_type or q_data_type, o_data_type or q_data_type)
        self.plans, self.causal, self.dtypes = self.plans + 1, causal, dtypes
        self.heads = (num_qo_heads, num_kv_heads, head_dim_qk)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert return_lse and len(q) == self.spans[-1][1] and k.stride(-1) == v.stride(-1) == 1
        assert len(k) == len(v) == self.keys[-1][1]
        only = [torch.zeros(1, dtype=torch.int32)]
        for (first, end), keys in zip(self.spans, self.keys, strict=True):
            kv, count = torch.stack((k, v))[:, slice(*keys)], end - first
            self.page_size = kv.shape[1]
            page, own = kv.transpose(1, 2).unsqueeze(0), slice(first, end)
            spans, lengths = [(0, count)], [self.page_size]
            self._attend(q[own], page, spans, only, lengths, (None,) * 3, out[own], lse[own])
        return out, lse


class BatchDecodeWithPagedKVCacheWrapper(_Planned):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        assert kv_layout == "HND"
        buffers = (
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )
        assert use_cuda_graph == all(buffer is not None for buffer in buffers)
        self.buffers, self.use_tensor_cores = buffers, use_tensor_cores
        self.workspace = len(float_workspace_buffer)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
    ) -> None:
        dtypes = (q_data_type, kv_data_type or q_data_type, o_data_type or q_data_type)
        heads = (num_qo_heads, num_kv_heads, head_dim)
        self._plan(indptr, indices, last_page_len, heads, page_size, dtypes)
        assert q_data_type.itemsize > 1
        self.window_left = window_left
        given = (indptr, indices, last_page_len)
        if self.use_tensor_cores and window_left < 0:
            taken, graph = indptr.diff().tolist(), self.buffers[0] is not None
            needed = workspace_bytes([1] * len(taken), taken, heads, page_size, graph)
            assert needed <= self.workspace
        if self.buffers[0] is None:
            self.held = tuple(x.clone() for x in given)
            return
        held = []
        for buffer, x in zip(self.buffers, given, strict=True):
            assert buffer is not None and len(x) <= len(buffer)
            buffer[: len(x)] = x
            held.append(buffer)
        assert len(last_page_len) == len(held[2])  # a graph's batch is of one size
        self.held = tuple(held)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        indptr, indices, last = self.held
        assert return_lse and len(q) == len(last)
        pages = list(_cut(indices, indptr))
        spans = [(row, row + 1) for row in range(len(q))]
        self._attend(
            q,
            paged_kv_cache,
            spans,
            pages,
            _lengths(pages, last, self.page_size),
            (None,) * 3,
            out,
            lse,
        )
        return out, lse


class BatchMLAPagedAttentionWrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor, *, backend: str = "auto") -> None:
        assert backend in ("fa2", "fa3")
        self.plans = 0

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        for array in (qo_indptr, kv_indptr, kv_indices, kv_len_arr):
            assert array.dtype == torch.int32
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1
        assert int(kv_indptr[-1]) == len(kv_indices)
        works = sum(-(-rows * num_heads // 64) for rows in qo_indptr.diff().tolist())
        assert works + 132 <= 16384, "written beyond the work list"
        self.plans += 1
        self.sizes = (num_heads, head_dim_ckv, head_dim_kpe, page_size)
        self.causal, self.scale, self.dtypes = causal, sm_scale, (q_data_type, kv_data_type)
        self.spans = list(itertools.pairwise(qo_indptr.tolist()))
        self.pages, self.lengths = _cut(kv_indices, kv_indptr), kv_len_arr.tolist()
        for ids, count in zip(self.pages, self.lengths, strict=True):
            assert (len(ids) - 1) * page_size < count <= len(ids) * page_size

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads, rank, rope, page_size = self.sizes
        assert return_lse and len(q_nope) == self.spans[-1][1]
        assert q_nope.shape[1:] == (heads, rank) and q_pe.shape[1:] == (heads, rope)
        assert ckv_cache.shape[1:] == (page_size, rank) and kpe_cache.shape[1:] == (page_size, rope)
        assert (q_nope.dtype, ckv_cache.dtype) == (q_pe.dtype, kpe_cache.dtype) == self.dtypes
        assert all(x.stride(-1) == 1 for x in (q_nope, q_pe, ckv_cache, kpe_cache))
        assert out.shape == q_nope.shape and out.dtype == q_nope.dtype and out.is_contiguous()
        assert lse.shape == q_nope.shape[:2] and lse.dtype == torch.float32 and lse.is_contiguous()
        out.fill_(math.nan)
        lse.fill_(math.nan)
        spans = zip(self.spans, self.pages, self.lengths, strict=True)
        for (first, end), ids, count in spans:
            latents = ckv_cache[ids.long()].flatten(0, 1)[:count].float()
            keys = kpe_cache[ids.long()].flatten(0, 1)[:count].float()
            scores = q_nope[first:end].float() @ latents.t() + q_pe[first:end].float() @ keys.t()
            scores *= self.scale
            if self.causal:
                row = torch.arange(count - (end - first), count).view(-1, 1, 1)
                scores.masked_fill_(torch.arange(count) > row, -math.inf)
            out[first:end] = (scores.softmax(-1) @ latents).to(out.dtype)
            lse[first:end] = scores.logsumexp(-1) / math.log(2)
        return out, lse


class _CascadeModule:
    @staticmethod
    def merge_states(
        v: torch.Tensor, s: torch.Tensor, v_merged: torch.Tensor, s_merged: torch.Tensor
    ) -> None:
        assert v.shape[:3] == s.shape and v.is_contiguous() and s.is_contiguous()
        assert v_merged.shape == v[:, 0].shape and v_merged.is_contiguous()
        assert s_merged.shape == s[:, 0].shape and s_merged.is_contiguous()
        sums = torch.logsumexp(s * math.log(2), dim=1) / math.log(2)
        shares = (s - sums.unsqueeze(1)).exp2().unsqueeze(-1)
        v_merged.copy_((v.float() * shares).sum(1))
        s_merged.copy_(sums)


class _Cascade:
    @staticmethod
    def get_cascade_module() -> type[_CascadeModule]:
        return _CascadeModule


cascade = _Cascade


def rmsnorm(
    input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: torch.Tensor | None = None
) -> torch.Tensor:
    x = input.float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (torch.empty_like(input) if out is None else out).copy_(normed)


def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    gate, up = input.float().chunk(2, dim=-1)
    product = torch.nn.functional.silu(gate) * up
    return product.to(input.dtype) if out is None else out.copy_(product)


def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    assert not is_neox and cos_sin_cache.dtype == torch.float32
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    for x in (query, key):
        heads = x.view(len(x), -1, head_size)
        even, odd = heads[..., ::2].float(), heads[..., 1::2].float()
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        heads.copy_(turned.flatten(-2))


def _cut(indices: torch.Tensor, indptr: torch.Tensor) -> list[torch.Tensor]:
    return [indices[first:end] for first, end in itertools.pairwise(indptr.tolist())]


def _lengths(pages: list[torch.Tensor], last: torch.Tensor, page_size: int) -> list[int]:
    counts = zip(pages, last.tolist(), strict=True)
    return [max(len(ids) - 1, 0) * page_size + int(rest) for ids, rest in counts]


def _of_heads(scale: torch.Tensor | None, heads: int) -> torch.Tensor:
    """Repeat KV heads for their query heads."""
    return torch.ones(heads) if scale is None else scale.repeat_interleave(heads // len(scale))
