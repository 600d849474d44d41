"""The CPU backend: chunks of several tokens by plain torch, single rows by the compiled kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from medha_worker.attention.interface import Attention, Partial, Plan, Span, unfilled
from medha_worker.attention.native import NativeKernel, NativePlan
from medha_worker.attention.reference import ReferenceAttention, ReferencePlan
from medha_worker.attention.scales import Scales


def cpu_attention(
    heads: int, kv_heads: int, head_dim: int, page_tokens: int, dtype: torch.dtype
) -> Attention:
    """Attention over pages of one geometry in `dtype`, with the kernel where it serves that.

    Raises SetupError when the kernel was not built.
    """
    chunks = ReferenceAttention(heads, kv_heads, head_dim, page_tokens)
    if not NativeKernel.serves(heads, kv_heads, head_dim, dtype):
        return chunks
    return CpuAttention(NativeKernel(heads, kv_heads, head_dim, page_tokens, dtype), chunks)


class CpuAttention:
    """Single rows by `singles`, everything else by `chunks`."""

    def __init__(self, singles: NativeKernel, chunks: ReferenceAttention) -> None:
        self.singles, self.chunks = singles, chunks

    def plan(self, spans: Sequence[Span]) -> Plan:
        single = [span for span in spans if span.length == 1]
        several = [span for span in spans if span.length > 1]
        return CpuPlan(
            self.singles.plan(single) if single else None,
            self.chunks.plan(several) if several else None,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class CpuPlan:
    """One step's spans, ready to run in every layer."""

    singles: NativePlan | None
    chunks: ReferencePlan | None

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor,
        scales: Scales | None = None,
    ) -> Partial:  # fmt: skip
        """`scales` is None: what has them is served by torch alone."""
        states = unfilled(q)
        if self.chunks is not None:
            self.chunks.fill(q, k, v, pool, states)
        if self.singles is not None:
            self.singles.fill(q, pool, states)
        return states
