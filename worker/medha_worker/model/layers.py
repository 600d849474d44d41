"""Weights of a decoder layer's TP shard, and the arithmetic on them in torch or FlashInfer.

Projection weights are stored [in, out], the transpose of the checkpoint's: on a CPU a product of
few rows is 1.4 times as fast that way, and large ones are not slower. Wide weights are stored as
contiguous panels of columns, which read from memory 1.5 times as fast. On a GPU a weight is a
transposed view of the checkpoint's layout, which its kernels are tuned for.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch.nn import functional

from medha_worker.flashinfer import Library
from medha_worker.model.rope import rotate

# Least number of outputs of a paneled weight, and least width of a panel.
WIDE, PANEL = 512, 128


class Projection(Protocol):
    """x·W + b: a Linear, or an Int4Linear, whose weights are packed."""

    @property
    def bias(self) -> torch.Tensor | None: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def onto(self, x: torch.Tensor, sum_: torch.Tensor) -> None:
        """sum ← sum + x·W + b, in place."""
        ...

    def in_blocks(self, rows: int) -> Projection:
        """Return the same weights with products of `rows` rows each."""
        ...

    def by_output(self) -> torch.Tensor:
        """Return the weight as [out, in]."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """x·W + b with `weight` [in, out], or [panels, in, out / panels] from `paneled`.

    `rows`: rows per product, the last padded with zeros, so that a GPU uses the same kernel for any
    batch and a row's bits depend on it alone; 0: all rows at once.
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

    def in_blocks(self, rows: int) -> Linear:
        """Return the same weights with products of `rows` rows each."""
        return dataclasses.replace(self, rows=rows)

    def by_output(self) -> torch.Tensor:
        """Return the weight as [out, in]."""
        weight = self.weight
        return weight.t() if weight.ndim == 2 else weight.transpose(1, 2).flatten(0, 1)

    def _in_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x·W from a fresh buffer, since kernels are also selected by alignment."""
        count = -(-len(x) // self.rows) * self.rows
        filled = x.new_zeros(count, x.shape[1])
        filled[: len(x)] = x
        out = x.new_empty(count, self.weight.shape[1])
        for first in range(0, count, self.rows):
            block = slice(first, first + self.rows)
            torch.mm(filled[block], self.weight, out=out[block])
        return out[: len(x)]

    def _by_panel(self, out: torch.Tensor) -> torch.Tensor:
        """View `out` [rows, out] as [panels, rows, out / panels]."""
        return out.view(len(out), len(self.weight), -1).transpose(0, 1)


def paneled(weight: torch.Tensor, parts: int = 1, *, few_rows: bool = False) -> torch.Tensor:
    """Return `weight` [in, out] in the layout of a Linear.

    On a CPU: contiguous, in panels for wide float32 weights; no panel spans two of the equal
    `parts`. Elsewhere the transpose is contiguous. `few_rows`: products mostly have one or two
    rows, which take twice as long with panels.
    """
    inputs, outputs = weight.shape
    if not weight.is_cpu:
        return weight if weight.t().is_contiguous() else weight.t().contiguous().t()
    if weight.dtype == torch.float32 and outputs >= WIDE and not few_rows:
        for width in range(PANEL, outputs // 2 + 1, 16):
            if outputs // parts % width == 0:
                return weight.reshape(inputs, -1, width).transpose(0, 1).contiguous()
    return weight.contiguous()


def blank(
    inputs: int, outputs: int, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Return an uninitialised weight [in, out], laid out so that `paneled` need not copy it on a
    GPU."""
    if torch.device(device).type == "cpu":
        return torch.empty(inputs, outputs, dtype=dtype)
    return torch.empty(outputs, inputs, dtype=dtype, device=device).t()


class Mlp(Protocol):
    """The part of a layer after attention, row by row: a GatedMlp, or Experts."""

    def __call__(self, x: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
        """Return the shard's part of the result [rows, hidden]."""
        ...

    def onto(self, x: torch.Tensor, sum_: torch.Tensor, arithmetic: Arithmetic) -> None:
        """sum ← sum + the shard's part, in place."""
        ...

    def in_blocks(self, rows: int) -> Mlp:
        """Return the same weights with products of `rows` rows each (see `Linear`)."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(silu(gate x) · up x), with `gate_up` [hidden, 2·intermediate] side by side, no panel in
    both, and `down` [intermediate, hidden]."""

    gate_up: Projection
    down: Projection

    def __call__(self, x: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
        return self.down(arithmetic.gated(self.gate_up, x))

    def onto(self, x: torch.Tensor, sum_: torch.Tensor, arithmetic: Arithmetic) -> None:
        self.down.onto(arithmetic.gated(self.gate_up, x), sum_)

    def in_blocks(self, rows: int) -> GatedMlp:
        return GatedMlp(self.gate_up.in_blocks(rows), self.down.in_blocks(rows))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """Return x / √(mean x² + ε) · weight over the last dimension; the mean is float32, like
    `eps`."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return torch.mul(x, scale).to(x.dtype).mul_(weight)


def gated(gate_up: Projection, x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate x) · up x [rows, intermediate], with gate and up side by side in
    `gate_up`."""
    if not isinstance(gate_up, Linear) or gate_up.weight.ndim == 2:
        gate, up = gate_up(x).chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)
    weight, bias = gate_up.weight, gate_up.bias
    panels, _, width = weight.shape  # the products stay [panels, rows, width] until gated
    both = torch.bmm(x.expand(panels, -1, -1), weight)
    if bias is not None:
        both.add_(bias.view(panels, 1, width))
    gate, up = both.chunk(2)
    out = x.new_empty(len(x), len(up) * width)
    torch.mul(functional.silu(gate), up, out=out.view(len(x), -1, width).transpose(0, 1))
    return out


class Arithmetic(Protocol):
    """Norms, rotation and activation of a layer, for its model's ε and head size.

    On a GPU each of these is one FlashInfer launch instead of three to six in torch. Both compute
    the same; narrow types are rounded at different places.
    """

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last dimension; `weight` is [dim], or [heads, dim] per head."""
        ...

    def turns(self, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the rotary factors for `rotate`, from float32 [rows, 1, head_dim / 2] each."""
        ...

    def rotate(self, turned: torch.Tensor, heads: int, turns: torch.Tensor) -> None:
        """Rotate queries (the first `heads`) and keys in place: interleaved [rows, heads +
        kv_heads, head_dim]."""
        ...

    def gated(self, gate_up: Projection, x: torch.Tensor) -> torch.Tensor:
        """silu(gate x) · up x."""
        ...

    def activated(self, both: torch.Tensor) -> torch.Tensor:
        """silu(gate) · up, of [rows, 2·intermediate] with the gates first."""
        ...

    def with_eps(self, eps: float) -> Arithmetic:
        """Return the same arithmetic with another ε."""
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

    def gated(self, gate_up: Projection, x: torch.Tensor) -> torch.Tensor:
        return gated(gate_up, x)

    def activated(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def with_eps(self, eps: float) -> TorchArithmetic:
        return TorchArithmetic(eps, self._eps.device)


class FusedArithmetic:
    """FlashInfer's kernels; rotary factors are [rows, head_dim], cosines before sines, float32."""

    def __init__(self, library: Library, eps: float, at: torch.device | str) -> None:
        self._library, self._eps, self._at = library, eps, at
        # Row numbers, in growing lengths; never replaced, as CUDA graphs keep their addresses.
        self._counts = [torch.arange(256, device=at)]

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight.ndim == 1:
            return self._library.rmsnorm(x, weight, self._eps)
        # Per head. torch's own sums depend on the number of rows.
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
        # The table has a line per row, so any scaling of angles works.
        self._library.apply_rope_with_cos_sin_cache_inplace(
            numbers,
            turned[:, :heads].flatten(1),
            turned[:, heads:].flatten(1),
            dim,
            turns,
            is_neox=False,
        )

    def gated(self, gate_up: Projection, x: torch.Tensor) -> torch.Tensor:
        return self.activated(gate_up(x))

    def activated(self, both: torch.Tensor) -> torch.Tensor:
        return self._library.silu_and_mul(both)

    def with_eps(self, eps: float) -> FusedArithmetic:
        return FusedArithmetic(self._library, eps, self._at)
