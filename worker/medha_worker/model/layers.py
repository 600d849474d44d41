"""What a TP shard holds of a decoder layer: weights as plain tensors, math beside them.

Projection weights are kept [in, out], the transpose of the checkpoint's: on CPU a product of few
rows with that layout runs 1.4 times as fast, and large ones do not mind. Wide ones are kept as
panels of columns, each contiguous: read in one stream they come from memory 1.5 times as fast.
On a GPU a weight is seen as [in, out] through the checkpoint's own layout, which is what its
kernels are tuned for.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional

# Outputs from which on a weight is kept in panels, and the least width of one.
WIDE, PANEL = 512, 128


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """x·W + b with `weight` [in, out], or [panels, in, out / panels] as `paneled` makes it.

    `rows`: how many each product has, the last filled up with zeros, so that a GPU takes the same
    kernel for any batch and a row's bits depend on it alone; 0: all at once.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    rows: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.rows:
            out = self._in_blocks(x)
        elif self.weight.ndim == 2:
            out = torch.mm(x, self.weight)
        else:
            panels, _, width = self.weight.shape
            out = x.new_empty(len(x), panels * width)
            torch.bmm(x.expand(panels, -1, -1), self.weight, out=self._by_panel(out))
        return out if self.bias is None else out.add_(self.bias)

    def onto(self, x: torch.Tensor, sum_: torch.Tensor) -> None:
        """sum ← sum + x·W + b, in place."""
        if self.rows:
            sum_.add_(self._in_blocks(x))
        elif self.weight.ndim == 2:
            sum_.addmm_(x, self.weight)
        else:
            self._by_panel(sum_).baddbmm_(x.expand(len(self.weight), -1, -1), self.weight)
        if self.bias is not None:
            sum_.add_(self.bias)

    def by_output(self) -> torch.Tensor:
        """The weight as [out, in]."""
        weight = self.weight
        return weight.t() if weight.ndim == 2 else weight.transpose(1, 2).flatten(0, 1)

    def _in_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """x·W, from memory of its own: kernels are chosen by alignment too."""
        count = -(-len(x) // self.rows) * self.rows
        filled = x.new_zeros(count, x.shape[1])
        filled[: len(x)] = x
        out = x.new_empty(count, self.weight.shape[1])
        for first in range(0, count, self.rows):
            block = slice(first, first + self.rows)
            torch.mm(filled[block], self.weight, out=out[block])
        return out[: len(x)]

    def _by_panel(self, out: torch.Tensor) -> torch.Tensor:
        """`out` [rows, out] seen as [panels, rows, out / panels]."""
        return out.view(len(out), len(self.weight), -1).transpose(0, 1)


def paneled(weight: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """`weight` [in, out] as a Linear keeps it: contiguous, in panels where that pays (float32 on a
    CPU). No panel holds columns of two of the equal `parts`. Elsewhere its transpose is
    contiguous."""
    inputs, outputs = weight.shape
    if not weight.is_cpu:
        return weight if weight.t().is_contiguous() else weight.t().contiguous().t()
    if weight.dtype == torch.float32 and outputs >= WIDE:
        for width in range(PANEL, outputs // 2 + 1, 16):
            if outputs // parts % width == 0:
                return weight.reshape(inputs, -1, width).transpose(0, 1).contiguous()
    return weight.contiguous()


def blank(
    inputs: int, outputs: int, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """An unfilled weight [in, out], laid out so that `paneled` need not copy it on a GPU."""
    if torch.device(device).type == "cpu":
        return torch.empty(inputs, outputs, dtype=dtype)
    return torch.empty(outputs, inputs, dtype=dtype, device=device).t()


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's share of a shard.

    `qkv` [hidden, (heads + 2·kv_heads)·head_dim]: query, key, value side by side, those of query
    and key with the halves of each head `interleaved`; `out` [heads·head_dim, hidden]; `gate_up`
    [hidden, 2·intermediate], no panel in both; `down` [intermediate, hidden].
    `head_norms` [heads + kv_heads, head_dim]: of queries and keys, `interleaved` like them; None in
    families without.
    Counts are the shard's. A row-parallel bias (`out`, `down`) is held by shard 0 alone.
    """

    attention_norm: torch.Tensor
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    head_norms: torch.Tensor | None = None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """x / √(mean x² + ε) · weight over the last dimension; the mean in float32, as `eps` is."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return torch.mul(x, scale).to(x.dtype).mul_(weight)


def gated(gate_up: Linear, x: torch.Tensor) -> torch.Tensor:
    """silu(gate x) · up x [rows, intermediate], gate and up side by side in `gate_up`."""
    weight, bias = gate_up.weight, gate_up.bias
    if weight.ndim == 2:
        gate, up = gate_up(x).chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)
    panels, _, width = weight.shape  # the products stay [panels, rows, width] until gated
    both = torch.bmm(x.expand(panels, -1, -1), weight)
    if bias is not None:
        both.add_(bias.view(panels, 1, width))
    gate, up = both.chunk(2)
    out = x.new_empty(len(x), len(up) * width)
    torch.mul(functional.silu(gate), up, out=out.view(len(x), -1, width).transpose(0, 1))
    return out
