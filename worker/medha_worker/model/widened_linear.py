"""Products in bfloat16 and float16 on a CPU that has no instructions for them, in float32.

torch multiplies such types there with plain loops: 32 rows take a hundred times as long. A tile of
the weights is widened, multiplied, and the next tile takes its place; results are rounded once, so
that they are those of a CPU with the instructions, but for the order of sums.
"""

from __future__ import annotations

import dataclasses

import torch

from medha_worker.model.onednn_linear import OneDnnLinear

# Entries of a tile: 2 MiB of float32.
TILE = 1 << 19


def widens(weight: torch.Tensor) -> bool:
    """Return True if products with weights of that type are faster in float32."""
    narrow = weight.dtype in (torch.bfloat16, torch.float16)
    return weight.is_cpu and narrow and not OneDnnLinear.serves(weight)


@dataclasses.dataclass(frozen=True, slots=True)
class WidenedLinear:
    """x·W + b with `weight` [out, in]."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x·W + b for `x` [rows, in]."""
        out = x.new_empty(len(x), len(self.weight))
        wide, size = x.float(), max(TILE // max(self.weight.shape[1], 1), 1)
        for start in range(0, len(self.weight), size):
            tile = slice(start, start + size)
            out[:, tile] = torch.mm(wide, self.weight[tile].float().t())
        return out if self.bias is None else out.add_(self.bias)

    def onto(self, x: torch.Tensor, sum_: torch.Tensor) -> None:
        """sum ← sum + x·W + b, in place."""
        sum_.add_(self(x))

    def in_blocks(self, rows: int) -> WidenedLinear:
        """Raise ValueError: products in blocks are for GPUs."""
        raise ValueError(f"products of {rows} rows each are for weights on a GPU")

    def by_output(self) -> torch.Tensor:
        """Return the weight as [out, in]."""
        return self.weight


def products_of_each(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] ← x[i]·weights[i], of [n, rows, in] and [n, in, out]."""
    if widens(weights):
        out.copy_(torch.bmm(x.float(), weights.float()))
    else:
        torch.bmm(x, weights, out=out)
