"""What a decoder layer computes beside its products and attention: norms, rotation, activation.

Plain torch anywhere; on a GPU the library's kernels, where each of these is one launch instead of
three to six. The two mean the same; narrow types are rounded at other places.
"""

from __future__ import annotations

from typing import Protocol

import torch

from medha_worker.kernels import Library
from medha_worker.model.layers import Linear, gated, rms_norm
from medha_worker.model.rope import rotate


class Arithmetic(Protocol):
    """Of one rank, for its model's ε and head size."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last dimension; `weight` [dim], or [heads, dim] of each head."""
        ...

    def turns(self, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """What `rotate` takes, from float32 [rows, 1, head_dim / 2] each."""
        ...

    def rotate(self, turned: torch.Tensor, heads: int, turns: torch.Tensor) -> None:
        """Rotate queries (the first `heads`) and keys, interleaved [rows, heads + kv_heads,
        head_dim], in place."""
        ...

    def gated(self, gate_up: Linear, x: torch.Tensor) -> torch.Tensor:
        """silu(gate x) · up x."""
        ...


class TorchArithmetic:
    """Plain torch."""

    def __init__(self, eps: float, at: torch.device | str = "cpu") -> None:
        self._eps = torch.tensor(eps, device=at)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self._eps)

    def turns(self, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return torch.complex(cos, sin)

    def rotate(self, turned: torch.Tensor, heads: int, turns: torch.Tensor) -> None:
        rotate(turned, turns)

    def gated(self, gate_up: Linear, x: torch.Tensor) -> torch.Tensor:
        return gated(gate_up, x)


class FusedArithmetic:
    """The library's kernels; turns are [rows, head_dim], cosines before sines, float32."""

    def __init__(self, library: Library, eps: float, at: torch.device | str) -> None:
        self._library, self._eps = library, eps
        # Row numbers, of doubling lengths. Graphs keep the addresses, so none is ever replaced.
        self._counts = [torch.arange(256, device=at)]

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight.ndim == 1:
            return self._library.rmsnorm(x, weight, self._eps)
        # Of each head; torch's own sums run in an order that follows the number of rows.
        heads = x.reshape(-1, x.shape[-1])
        ones = torch.ones_like(weight[0])
        return self._library.rmsnorm(heads, ones, self._eps).view(x.shape).mul_(weight)

    def turns(self, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return torch.cat((cos, sin), dim=-1).squeeze(1)

    def rotate(self, turned: torch.Tensor, heads: int, turns: torch.Tensor) -> None:
        rows, _, dim = turned.shape
        if rows > len(self._counts[-1]):
            self._counts.append(torch.arange(2 * rows, device=turned.device))
        numbers = next(count[:rows] for count in self._counts if rows <= len(count))
        # Each row has its own line of the table, so that any scaling of angles is served.
        self._library.apply_rope_with_cos_sin_cache_inplace(
            numbers, turned[:, :heads].flatten(1), turned[:, heads:].flatten(1), dim,
            turns, is_neox=False,
        )  # fmt: skip

    def gated(self, gate_up: Linear, x: torch.Tensor) -> torch.Tensor:
        return self._library.silu_and_mul(gate_up(x))
