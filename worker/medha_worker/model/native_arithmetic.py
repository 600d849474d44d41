"""Norms, gated activations, penalties and products with FP8 weights on a CPU: the kernels of
arithmetic.c.

Every pointer passed to a kernel refers to a tensor checked here. Other types, sizes and layouts
are left to torch, and so is a process of many threads, among which torch shares the work.
"""

from __future__ import annotations

import ctypes
import pathlib

import torch

from medha_worker.attention.native_singles import LANES, NUMBER, POINTER, load
from medha_worker.model.layers import TorchArithmetic

LIBRARY = pathlib.Path(__file__).with_name("arithmetic.kernel.so")
# Threads from which on torch is faster.
MANY_THREADS = 4
# The same for FP8 products, and rows up to which it is slower with any vector width.
FP8_THREADS, FP8_ROWS = 8, 8
# Inputs that the kernel reads at once, even ones first.
FP8_INPUTS = 32


class NativeArithmetic(TorchArithmetic):
    """The compiled kernel for float32 rows, and torch for everything else.

    `lanes` limits the width of the registers, in float32 scalars.
    """

    def __init__(self, eps: float, lanes: int = LANES) -> None:
        super().__init__(eps)
        self._number, self._lanes = eps, lanes
        self._gated = load(LIBRARY, "medha_gated", POINTER, NUMBER, NUMBER, POINTER, NUMBER)
        self._norm = load(
            LIBRARY,
            "medha_norm",
            *(POINTER, NUMBER, NUMBER, POINTER, ctypes.c_double, POINTER, NUMBER),
        )

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        same = weight.dtype == x.dtype and weight.shape == x.shape[-1:]
        if not (_served(x) and same and weight.is_contiguous()):
            return super().norm(x, weight)
        out = torch.empty_like(x)
        rows, size = x.shape
        self._norm(
            *(x.data_ptr(), rows, size, weight.data_ptr(), self._number),
            *(out.data_ptr(), self._lanes),
        )
        return out

    def activated(self, both: torch.Tensor) -> torch.Tensor:
        if not (_served(both) and both.shape[-1] % (2 * LANES) == 0):
            return super().activated(both)
        rows, size = both.shape[0], both.shape[-1] // 2
        out = both.new_empty(rows, size)
        self._gated(both.data_ptr(), rows, size, out.data_ptr(), self._lanes)
        return out

    def with_eps(self, eps: float) -> NativeArithmetic:
        return NativeArithmetic(eps, self._lanes)


def _served(x: torch.Tensor) -> bool:
    """Return True if the kernel reads these rows."""
    return (
        x.dtype == torch.float32
        and x.ndim == 2
        and x.is_cpu
        and x.is_contiguous()
        and x.shape[-1] % LANES == 0
        and torch.get_num_threads() < MANY_THREADS
    )


class NativePenalties:
    """The compiled kernel for penalties on repeated tokens (see `penalties`)."""

    def __init__(self, lanes: int = LANES) -> None:
        self._lanes = lanes
        self._penalised = load(
            LIBRARY,
            "medha_penalised",
            *(POINTER, POINTER, POINTER, NUMBER, NUMBER, ctypes.c_double, ctypes.c_double, NUMBER),
        )

    def __call__(
        self,
        scores: torch.Tensor,
        factor: torch.Tensor,
        output: torch.Tensor,
        raises: bool,
        once: float,
        per_time: float,
    ) -> None:
        """Change a row of scores in place; all rows are [vocab]."""
        for row in (scores, factor, output):
            assert row.dtype == torch.float32 and row.is_cpu and row.is_contiguous()
            assert row.shape == scores.shape and row.ndim == 1
        self._penalised(
            *(scores.data_ptr(), factor.data_ptr(), output.data_ptr(), len(scores)),
            *(raises, once, per_time, self._lanes),
        )


class NativeFp8:
    """The compiled kernel for products of few float32 rows with FP8 weights.

    Of the weights, [outputs, inputs], `scales` [blocks, parts] multiply equal parts of the inputs;
    `of_output` [outputs] is the block of each output.
    """

    def __init__(self, lanes: int = LANES) -> None:
        self._lanes = lanes
        self._product = load(
            LIBRARY,
            "medha_fp8",
            *(POINTER, NUMBER, NUMBER, NUMBER, POINTER, NUMBER),
            *(POINTER, POINTER, POINTER, NUMBER),
        )

    def serves(
        self,
        x: torch.Tensor,
        numbers: torch.Tensor,
        scales: torch.Tensor,
        of_output: torch.Tensor,
    ) -> bool:
        """Return True if the kernel computes this product, and is faster than torch."""
        outputs, inputs = numbers.shape
        return (
            0 < len(x) <= FP8_ROWS
            and x.shape[1] == inputs
            and inputs % (FP8_INPUTS * scales.shape[1]) == 0
            and of_output.shape == (outputs,)
            and torch.get_num_threads() < FP8_THREADS
            and all(
                part.dtype == dtype and part.is_cpu and part.is_contiguous()
                for part, dtype in (
                    (x, torch.float32),
                    (numbers, torch.float8_e4m3fn),
                    (scales, torch.float32),
                    (of_output, torch.int32),
                )
            )
        )

    def __call__(
        self,
        x: torch.Tensor,
        numbers: torch.Tensor,
        scales: torch.Tensor,
        of_output: torch.Tensor,
    ) -> torch.Tensor:
        """Return x·W [rows, outputs] for a product that it `serves`."""
        (outputs, inputs), parts = numbers.shape, scales.shape[1]
        ordered = x.view(len(x), -1, FP8_INPUTS // 2, 2).transpose(2, 3).contiguous()
        out = x.new_empty(len(x), outputs)
        self._product(
            *(ordered.data_ptr(), len(x), inputs // parts, parts, numbers.data_ptr(), outputs),
            *(scales.data_ptr(), of_output.data_ptr(), out.data_ptr(), self._lanes),
        )
        return out
