"""CPU backend: compiled kernels for single rows and for chunks; plain torch for windowed chunks,
and where sizes or types do not suit the kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from medha.checkpoints.latent_attention import LatentAttention
from medha_worker.attention.fp8_scales import Scales
from medha_worker.attention.kernel_interface import Attention, AttentionPlan, Partial, Span
from medha_worker.attention.native_chunks import NativeChunkPlan, NativeChunks
from medha_worker.attention.native_singles import NativeKernel, NativePlan
from medha_worker.attention.reference import ReferenceAttention, ReferencePlan, unfilled


def cpu_attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_tokens: int,
    dtype: torch.dtype,
    latent: LatentAttention | None = None,
) -> Attention:
    """Return attention over pages in `dtype`, with the compiled kernel if it supports the sizes.

    Raises SetupError if the kernel was not built.
    """
    chunks = ReferenceAttention(heads, kv_heads, head_dim, page_tokens, latent=latent)
    if not NativeKernel.serves(heads, kv_heads, head_dim, dtype):
        return chunks
    singles = NativeKernel(heads, kv_heads, head_dim, page_tokens, dtype, latent=latent)
    native = NativeChunks(singles) if NativeChunks.serves(head_dim) else None
    return CpuAttention(singles, native, chunks)


class CpuAttention:
    """Attention that sends single rows to `singles`, chunks without a window to `native`, if there
    is one, and everything else to `chunks`."""

    def __init__(
        self, singles: NativeKernel, native: NativeChunks | None, chunks: ReferenceAttention
    ) -> None:
        self.singles, self.native, self.chunks = singles, native, chunks

    def plan(self, spans: Sequence[Span]) -> AttentionPlan:
        single = [span for span in spans if span.length == 1]
        several = [span for span in spans if span.length > 1]
        plain = [s for s in several if self.native is not None and s.sight is None]
        others = [s for s in several if self.native is None or s.sight is not None]
        return CpuPlan(
            self.singles.plan(single) if single else None,
            self.native.plan(plain) if self.native is not None and plain else None,
            self.chunks.plan(others) if others else None,
            self.chunks.state_dim,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class CpuPlan:
    """A step's spans, planned for every layer."""

    singles: NativePlan | None
    native: NativeChunkPlan | None
    chunks: ReferencePlan | None
    state_dim: int

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        scales: Scales | None = None,
    ) -> Partial:
        """Return partial states. `scales` is always None: pages with scales are served by torch
        alone."""
        states = unfilled(q)
        if self.chunks is not None:
            self.chunks.fill(q, k, v, pool, states)
        for plan in (self.native, self.singles):
            if plan is not None:
                plan.fill(q, pool, states)
        return states.cut(self.state_dim)
