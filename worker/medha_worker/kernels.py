"""FlashInfer's one door: the CUDA kernels that this engine does not write itself.

Nothing is imported until a CUDA device asks for it. Everything else names only what `Library` names
here, so that a test can put plain torch in its place and see every plan and call. The kernels are
compiled when first used, into FlashInfer's cache (FLASHINFER_WORKSPACE_BASE, or the home folder):
minutes once, where that folder is kept. An image has them from `medha_worker.ahead`.
"""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from medha.errors import SetupError
from medha_worker import toolkit

VERSION = "0.6.13"


class Library(Protocol):
    """What is used of FlashInfer 0.6 (docs.flashinfer.ai/api), by its names."""

    BatchPrefillWithPagedKVCacheWrapper: Callable[..., Any]
    BatchDecodeWithPagedKVCacheWrapper: Callable[..., Any]

    def merge_states(
        self, v: torch.Tensor, s: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def rmsnorm(
        self, input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...  # fmt: skip

    def silu_and_mul(
        self, input: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def apply_rope_with_cos_sin_cache_inplace(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int,
        cos_sin_cache: torch.Tensor, is_neox: bool = True,
    ) -> None: ...  # fmt: skip


def flashinfer() -> Library:
    """The library; raises SetupError where it is not installed or does not load."""
    # Its norms in plain CUDA, which need no more than its other kernels do.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    try:
        toolkit.offer(os.environ, toolkit.toolkit())
        return cast(Library, importlib.import_module("flashinfer"))
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise SetupError(
            f"device is cuda: FlashInfer cannot be imported ({error}); run `pip install"
            f" flashinfer-python=={VERSION}`, or what requirements/cuda.txt locks, or set device to"
            " cpu"
        ) from None
