"""CUDA backend for latents: FlashInfer's kernel for multi-head latent attention.

Chunks of several rows in one causal call, single rows and shards of shared prompts in one without a
mask, as the kernel has one mask for a call; several calls where there are more rows than its work
list holds. It splits keys by itself. Latents and rotated keys are two views of a page, by their
strides. As in `paged`, a plan keeps its wrappers until `turns` more plans are made, and
log-sum-exps are in base 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from medha.checkpoints.latent_attention import LatentAttention
from medha_worker.attention.flashinfer_plan import (
    WORKSPACE_BYTES,
    Kernel,
    Wrapper,
    staged,
    to_device,
)
from medha_worker.attention.fp8_scales import Scales
from medha_worker.attention.kernel_interface import LogBase, Partial, Span
from medha_worker.flashinfer import Library

# Supported by the kernel: entries of the latent and of the rotated key.
WIDTHS = (512, 64)
# Rows times heads of a call. FlashInfer's plan has room for 16,384 works, which it does not check;
# a work is 64 or 128 of these products, and splits of keys add one for each multiprocessor.
MOST_QUERIES = 64 * 8192


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentGeometry:
    """Sizes common to all calls of a rank; `kernel`: `fa3` (Hopper) or `fa2`."""

    heads: int
    latent: LatentAttention
    page_tokens: int
    dtype: torch.dtype
    kernel: Kernel


class LatentPagedAttention:
    """Attention over latents of a rank on a CUDA device; implements `kernel_interface.Attention`.

    `turns`: plans alive at a time. `most_queries`: see MOST_QUERIES.
    """

    def __init__(
        self,
        geometry: LatentGeometry,
        library: Library,
        device: torch.device,
        *,
        turns: int = 4,
        most_queries: int = MOST_QUERIES,
    ) -> None:
        self.geometry, self.library, self.device, self.turns = geometry, library, device, turns
        self.most_rows = max(1, most_queries // geometry.heads)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[int, bool, int], Wrapper] = {}
        self._turn = 0

    @torch.inference_mode()
    def plan(self, spans: Sequence[Span]) -> LatentPlan:
        """Plan a step's spans. Latents have no windows."""
        self._turn = (self._turn + 1) % self.turns
        seeing = [span for span in spans if span.held or span.tail]
        calls = []
        for causal in (True, False):
            own = [span for span in seeing if (span.tail and span.length > 1) == causal]
            for number, part in enumerate(_parts(own, self.most_rows)):
                calls.append(self._call(part, causal, number))
        bare = [slice(s.start, s.start + s.length) for s in spans if not s.held and not s.tail]
        return LatentPlan(self.geometry, tuple(calls), bare)

    def _call(self, spans: Sequence[Span], causal: bool, number: int) -> _Call:
        G, key = self.geometry, (self._turn, causal, number)
        if key not in self._wrappers:
            inner = self.library.BatchMLAPagedAttentionWrapper(self._workspace, backend=G.kernel)
            self._wrappers[key] = Wrapper.on(self.device, inner)
        lengths = [span.length for span in spans]
        tokens = [span.held + span.length * span.tail for span in spans]
        pages = [
            span.pages[: -(-count // G.page_tokens)]
            for span, count in zip(spans, tokens, strict=True)
        ]
        self._wrappers[key].plan(
            staged(_ends(lengths), self.device),
            staged(_ends([len(ids) for ids in pages]), self.device),
            to_device(np.concatenate(pages).astype(np.int32), self.device),
            staged(np.array(tokens, dtype=np.int32), self.device),
            G.heads,
            G.latent.rank,
            G.latent.rope_dim,
            G.page_tokens,
            causal,
            G.latent.scale,
            G.dtype,
            G.dtype,
        )
        rows = np.concatenate([np.arange(s.start, s.start + s.length) for s in spans])
        first, count = int(rows[0]), len(rows)
        if np.array_equal(rows, np.arange(first, first + count)):
            return _Call(self._wrappers[key], slice(first, first + count))
        return _Call(self._wrappers[key], to_device(rows, self.device))


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """A planned call over `rows` of the batch."""

    wrapper: Wrapper
    rows: slice | torch.Tensor

    def run(
        self, q: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Write states of the rows into `out` [rows, heads, rank] and `lse` of the whole batch."""
        rank = out.shape[-1]
        latents, keys = pages[..., :rank], pages[..., rank:]
        if isinstance(self.rows, slice):
            queries, own, sums = q[self.rows], out[self.rows], lse[self.rows]
        else:
            queries = q.index_select(0, self.rows)
            own = out.new_empty(len(queries), *out.shape[1:])
            sums = lse.new_empty(len(queries), lse.shape[1])
        plain, turned = queries[..., :rank], queries[..., rank:]
        self.wrapper.inner.run(plain, turned, latents, keys, out=own, lse=sums, return_lse=True)
        if not isinstance(self.rows, slice):
            out.index_copy_(0, self.rows, own)
            lse.index_copy_(0, self.rows, sums)


@dataclasses.dataclass(frozen=True, slots=True)
class LatentPlan:
    """A step's spans, planned for every layer; implements `kernel_interface.AttentionPlan`.

    Rows of `bare` see no key.
    """

    geometry: LatentGeometry
    calls: tuple[_Call, ...]
    bare: list[slice]

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        scales: Scales | None = None,
    ) -> Partial:
        """Return partial states. `scales` is always None: latents are never kept in FP8."""
        rank = self.geometry.latent.rank
        out = torch.empty((*q.shape[:2], rank), dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        pages = pool[:, 0, 0]  # [pages, page_tokens, rank + rope_dim]
        for call in self.calls:
            call.run(q, pages, out, lse)
        for rows in self.bare:
            out[rows].zero_()
            lse[rows].fill_(float("-inf"))
        return Partial(out, lse, LogBase.TWO)


def _parts(spans: Sequence[Span], most_rows: int) -> Iterator[list[Span]]:
    """Yield the spans in parts of at most `most_rows` rows; a larger one is cut."""
    part: list[Span] = []
    room = most_rows
    for span in spans:
        done = 0
        while done < span.length:
            size = min(room, span.length - done)
            held = span.held + done * span.tail
            part.append(Span(span.start + done, size, held, span.pages, span.tail))
            done, room = done + size, room - size
            if not room:
                yield part
                part, room = [], most_rows
    if part:
        yield part


def _ends(counts: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return 0 and the running sums of `counts`."""
    return np.cumsum([0, *counts], dtype=np.int32)
