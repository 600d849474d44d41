"""Compile FlashInfer's kernels for the present GPU in one build, before their first use.

A kernel compiled on first use starts its own build on all cores: builds in sequence take long, and
parallel ones exhaust the memory. Here one build covers all files; MAX_JOBS limits its compilers
(default: one per core).
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable
from typing import Any

import torch

from medha_worker import precompile_kernels

# Head size, and whether there are pages of FP8 too.
Need = tuple[int, bool]


def compile_kernels(needs: Iterable[Need]) -> float:
    """Compile the kernels that bfloat16 models with these needs use on this GPU; return the
    seconds.

    Raises SetupError if FlashInfer is not installed, RuntimeError if a file does not compile.
    """
    began = time.perf_counter()
    wanted = specs(needs, arch_of(*torch.cuda.get_device_capability()))
    core = importlib.import_module("flashinfer.jit.core")
    core.build_jit_specs(wanted, skip_prebuilt=True)
    return time.perf_counter() - began


def arch_of(major: int, minor: int) -> str:
    """Return the architecture in FlashInfer's and nvcc's notation."""
    return f"{major}.{minor}a" if major >= 9 else f"{major}.{minor}"


def specs(needs: Iterable[Need], arch: str) -> list[Any]:
    """Return FlashInfer's modules, without duplicates."""
    specs_by_name: dict[str, Any] = {}
    for head_dim, fp8 in needs:
        for module in precompile_kernels.modules(arch, [head_dim], [torch.bfloat16]):
            if wanted(module.name, fp8):
                specs_by_name[module.name] = module
    return list(specs_by_name.values())


def wanted(name: str, fp8: bool) -> bool:
    """Return True if the module of this name is needed: FP8 ones on request only."""
    return fp8 or "e4m3" not in name
