"""Norms and gated activations on a CPU, each in one pass: the kernel of arithmetic.c.

Every pointer passed to the kernel refers to a tensor checked here. Other types, sizes and layouts
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
