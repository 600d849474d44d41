"""Weights of a decoder layer's TP shard, and the arithmetic on them in torch or FlashInfer.

On a CPU, projections are oneDNN's (`onednn_linear`) in types that it multiplies, and float32's
(`widened_linear`) in other narrow ones. Elsewhere their weights are [in, out]: on a GPU a
transposed view of the checkpoint's layout, which its kernels are tuned for.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch.nn import functional

from medha_worker.flashinfer import Library
from medha_worker.model.onednn_linear import OneDnnLinear
from medha_worker.model.rope import rotate
from medha_worker.model.widened_linear import WidenedLinear, widens

# With AVX2, 8 rows take 0.77 times as long, 16 rows 0.79, and 4 or 18 rows 1.1 times.
FEW_ROWS = range(6, 17)
MKL: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


class Projection(Protocol):
    """x·W + b: a Linear, OneDnnLinear or WidenedLinear, with packed weights Fp8Linear or
    Int4Linear."""

    @property
    def bias(self) -> torch.Tensor | None: ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of x and of the result."""
        ...

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
    """x·W + b with `weight` [in, out].

    `rows`: rows per product, the last padded with zeros, so that a GPU uses the same kernel for any
    batch and a row's bits depend on it alone; 0: all rows at once.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    rows: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.rows:
            out = self._in_blocks(x)
        elif _few(x):
            out = self._turned(x).contiguous()
        else:
            out = torch.mm(x, self.weight)
        return out if self.bias is None else out.add_(self.bias)

    def onto(self, x: torch.Tensor, sum_: torch.Tensor) -> None:
        """sum ← sum + x·W + b, in place."""
        if self.rows:
            sum_.add_(self._in_blocks(x))
        elif _few(x):
            sum_.add_(self._turned(x))
        else:
            sum_.addmm_(x, self.weight)
        if self.bias is not None:
            sum_.add_(self.bias)

    def in_blocks(self, rows: int) -> Linear:
        """Return the same weights with products of `rows` rows each."""
        return dataclasses.replace(self, rows=rows)

    def by_output(self) -> torch.Tensor:
        """Return the weight as [out, in]."""
        return self.weight.t()

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x·W as (Wᵀ·xᵀ)ᵀ; the result is a transposed view."""
        return torch.mm(self.weight.t(), x.t()).t()

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


def _few(x: torch.Tensor) -> bool:
    """Return True if MKL multiplies these rows faster from the right: it then fills its registers
    with rows instead of outputs."""
    return x.is_cpu and x.shape[0] in FEW_ROWS and MKL


def linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, shared: bool = False
) -> Linear | OneDnnLinear | WidenedLinear:
    """Return a projection with `weight` [out, in] in the layout that suits its device; `shared`: in
    that memory."""
    if OneDnnLinear.serves(weight):
        return OneDnnLinear(weight, bias) if shared else OneDnnLinear.of(weight, bias)
    if widens(weight):
        return WidenedLinear(weight if shared else weight.contiguous(), bias)
    if weight.is_cpu and not shared:  # products of few rows are 1.4 times as fast that way
        return Linear(weight.t().contiguous(), bias)
    return Linear(weight.contiguous().t(), bias)


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
    """down(silu(gate x) · up x), with `gate_up` [hidden, 2·intermediate] side by side, and `down`
    [intermediate, hidden]."""

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
        return self.activated(gate_up(x))

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
