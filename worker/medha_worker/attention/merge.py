"""Exact merge of partial attention states (online softmax).

For parts p with o_p and lse_p:  lse = log Σ_p exp(lse_p),  o = Σ_p exp(lse_p − lse) · o_p (Medha,
KV parallelism; Milakov and Gimelshein, online normaliser). The sum runs in the given order, so
ranks that merge the same parts in the same order get equal bits. An empty part is (0, −∞); if all
parts are empty, so is the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from medha_worker.attention.kernel_interface import LogBase, Partial


def merge(parts: Sequence[Partial]) -> Partial:
    """Return the state over the union of the parts, in base e; inputs stay untouched."""
    first = parts[0].natural()
    whole = Partial(first.out.clone(), first.lse.clone(), LogBase.E)
    for part in parts[1:]:
        fold(whole, part)
    return whole


def fold(whole: Partial, part: Partial) -> None:
    """Fold `part` into `whole` (base e) in place."""
    other = part.natural()
    lse = torch.logaddexp(whole.lse, other.lse)
    # −∞ − −∞ is NaN: where both are empty any finite shift gives exp(−∞) = 0.
    shift = torch.where(lse.isneginf(), 0.0, lse)
    whole.out.mul_((whole.lse - shift).exp_().unsqueeze(-1))
    whole.out.addcmul_(other.out, (other.lse - shift).exp_().unsqueeze(-1))
    whole.lse.copy_(lse)


def empty(rows: int, heads: int, head_dim: int, device: torch.device | None = None) -> Partial:
    """Return the state over no keys."""
    return Partial(
        torch.zeros(rows, heads, head_dim, dtype=torch.float32, device=device),
        torch.full((rows, heads), float("-inf"), dtype=torch.float32, device=device),
    )
