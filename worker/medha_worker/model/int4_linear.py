"""Projections whose 4-bit weights stay packed in memory, multiplied by torch's own kernels.

    w[o, i] = (q − 8) · scale[group(i), o] + shift[group(i), o]          shift = (8 − zero) · scale

Less than a third of bfloat16's memory with its scales, and so faster decodes; large products are
slower than plain ones. On a GPU the kernel takes bfloat16 only. Scales and shifts are rounded to
the type of the activations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from medha_worker.model.packed_weights import Int4Parts


@dataclasses.dataclass(frozen=True, slots=True)
class Int4Linear:
    """x·W + b with `packed` in the order of the device's kernel; `scales` [groups, outputs, 2] are
    scales and shifts of `group` inputs each."""

    packed: torch.Tensor
    scales: torch.Tensor
    group: int
    bias: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.scales.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        multiply = (
            torch._weight_int4pack_mm_for_cpu if self.packed.is_cpu else torch._weight_int4pack_mm
        )
        out = multiply(x.contiguous(), self.packed, self.group, self.scales)
        return out if self.bias is None else out.add_(self.bias)

    def onto(self, x: torch.Tensor, sum_: torch.Tensor) -> None:
        """sum ← sum + x·W + b, in place."""
        sum_.add_(self(x))

    def in_blocks(self, rows: int) -> Int4Linear:
        """Raise ValueError: the kernels have no fixed order of sums."""
        raise ValueError(f"products of {rows} rows need weights that are not packed")

    def by_output(self) -> torch.Tensor:
        """Return the weight as [out, in]."""
        inputs = len(self.scales) * self.group
        unit = torch.eye(inputs, dtype=self.scales.dtype, device=self.scales.device)
        return dataclasses.replace(self, bias=None)(unit).t()


def int4_linear(
    parts: Sequence[Int4Parts], dtype: torch.dtype, bias: torch.Tensor | None
) -> Int4Linear:
    """Return projections side by side, for activations of `dtype`."""
    numbers = torch.cat([part.numbers for part in parts])
    zeros = torch.cat([part.zeros for part in parts]).t()
    scales = torch.cat([part.scales for part in parts]).t()
    both = torch.stack((scales, (8 - zeros) * scales), dim=-1).to(dtype).contiguous()
    group = numbers.shape[1] // len(scales)
    return Int4Linear(_packed(numbers.contiguous()), both, group, bias)


def _packed(numbers: torch.Tensor) -> torch.Tensor:
    """Return the numbers [outputs, inputs] in the order of the device's kernel."""
    if numbers.is_cpu:
        return torch._convert_weight_to_int4pack_for_cpu(numbers, 1)
    pairs = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)
    # Inputs that a tile of the kernel covers, 16 each; more are faster.
    tiles = next(tiles for tiles in (8, 4, 2) if numbers.shape[1] % (16 * tiles) == 0)
    return torch._convert_weight_to_int4pack(pairs.contiguous(), tiles)
