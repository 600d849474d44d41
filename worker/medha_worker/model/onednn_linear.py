"""Projections on a CPU by oneDNN, which comes with torch, with weights in the library's own layout.

torch's own products are MKL's, which keeps AVX-512 to Intel's processors: on others oneDNN takes
less than half the time for few and for many rows. Without AVX-512 both take the same time, and in
oneDNN's products a row's bits depend on the number of rows, so MKL's are used. With it they do not,
but for products of a single row.
"""

from __future__ import annotations

import dataclasses

import torch

LARGEST_STEP = 32


def padded_rows(rows: int) -> int:
    """Return the rows that are multiplied for that many: at most an eighth more.

    oneDNN compiles a kernel for each number of rows and keeps a thousand of them, 100 MiB. So eight
    numbers are used of each power of two, and every multiple of 32.
    """
    step = min(1 << max(0, rows.bit_length() - 4), LARGEST_STEP)
    return -(-rows // step) * step


@dataclasses.dataclass(frozen=True, slots=True)
class OneDnnLinear:
    """x·W + b with `weight` [out, in], plain or laid out by `of`."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @staticmethod
    def serves(weight: torch.Tensor) -> bool:
        """Return True if this machine's oneDNN multiplies weights of that type with AVX-512."""
        wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
        if not weight.is_cpu or not wide or not torch._C._has_mkldnn:
            return False
        if weight.dtype == torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        if weight.dtype == torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
        return weight.dtype == torch.float32

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> OneDnnLinear:
        """Lay out a copy of `weight` [out, in]."""
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x·W + b for `x` [rows, in]."""
        rows = x.shape[0]
        padded = padded_rows(rows)
        if padded > rows:
            x = torch.nn.functional.pad(x, (0, 0, 0, padded - rows))
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, "none", [], ""
        )
        return out[:rows]

    def onto(self, x: torch.Tensor, sum_: torch.Tensor) -> None:
        """sum ← sum + x·W + b, in place."""
        sum_.add_(self(x))

    def in_blocks(self, rows: int) -> OneDnnLinear:
        """Raise ValueError: products in blocks are for GPUs."""
        raise ValueError(f"products of {rows} rows each are for weights on a GPU")

    def by_output(self) -> torch.Tensor:
        """Return the weight as [out, in]."""
        return self.weight.to_dense() if self.weight.is_mkldnn else self.weight
