"""The only door to FlashInfer, whose CUDA kernels this engine does not write itself.

FlashInfer is imported only for a CUDA device. Callers use only names of `Library`, so a test can
substitute plain torch and observe every plan and call. Kernels are compiled on first use into
FlashInfer's cache (FLASHINFER_WORKSPACE_BASE, or the home folder), which takes minutes once. Images
contain them already, from `medha_worker.precompile_kernels`.
"""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from medha.errors import SetupError
from medha_worker import nvcc

VERSION = "0.6.13"


class CascadeModule(Protocol):
    """The compiled functions of `flashinfer.cascade`."""

    def merge_states(
        self, v: torch.Tensor, s: torch.Tensor, v_merged: torch.Tensor, s_merged: torch.Tensor
    ) -> None: ...


class Cascade(Protocol):
    def get_cascade_module(self) -> CascadeModule: ...


class Library(Protocol):
    """The functions used of FlashInfer 0.6 (docs.flashinfer.ai/api), under its names."""

    BatchPrefillWithPagedKVCacheWrapper: Callable[..., Any]
    BatchPrefillWithRaggedKVCacheWrapper: Callable[..., Any]
    BatchDecodeWithPagedKVCacheWrapper: Callable[..., Any]
    BatchMLAPagedAttentionWrapper: Callable[..., Any]

    # Its functions write into given memory; those of the package allocate in every call.
    cascade: Cascade

    def rmsnorm(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def silu_and_mul(
        self, input: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def apply_rope_with_cos_sin_cache_inplace(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        head_size: int,
        cos_sin_cache: torch.Tensor,
        is_neox: bool = True,
    ) -> None: ...


def flashinfer() -> Library:
    """Import and return the library. Raises SetupError if it is not installed or does not load."""
    # Plain CUDA norms need no further dependency.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    try:
        nvcc.set_cuda_home(os.environ, nvcc.find_cuda_home())
        return cast(Library, importlib.import_module("flashinfer"))
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise SetupError(
            f"device is cuda: FlashInfer cannot be imported ({error}); run `pip install"
            f" flashinfer-python=={VERSION}`, or what requirements/cuda.txt locks, or set device to"
            " cpu"
        ) from None
