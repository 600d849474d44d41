"""Has FlashInfer's kernels compiled for the GPU that is here, all in one build, before their use.

A kernel that is compiled when first used starts a build of its own, on every core: one after the
other they take long, side by side they take the machine's memory. Here one build knows all files;
MAX_JOBS says how many compilers run at a time, if not one for each core.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable
from typing import Any

import torch

from medha_worker import ahead

# Head size, and whether there are pages of FP8 too.
Need = tuple[int, bool]


def compile_kernels(needs: Iterable[Need]) -> float:
    """Compile what models in bfloat16 with these needs ask for on this GPU; seconds. Raises
    SetupError where FlashInfer is not installed, RuntimeError where a file does not compile."""
    began = time.perf_counter()
    wanted = specs(needs, arch_of(*torch.cuda.get_device_capability()))
    core = importlib.import_module("flashinfer.jit.core")
    core.build_jit_specs(wanted, skip_prebuilt=True)
    return time.perf_counter() - began


def arch_of(major: int, minor: int) -> str:
    """As FlashInfer and nvcc call it."""
    return f"{major}.{minor}a" if major >= 9 else f"{major}.{minor}"


def specs(needs: Iterable[Need], arch: str) -> list[Any]:
    """FlashInfer's modules, each once."""
    found: dict[str, Any] = {}
    for head_dim, fp8 in needs:
        for module in ahead.modules(arch, [head_dim], [torch.bfloat16]):
            if wanted(module.name, fp8, hopper=arch.startswith("9.")):
                found[module.name] = module
    return list(found.values())


def wanted(name: str, fp8: bool, *, hopper: bool) -> bool:
    """Whether the module of this name is asked for; all are but those for pages of FP8, and for
    bfloat16 through windows on Hopper the plain ones, which only deterministic batches take."""
    small = "e4m3" in name
    plain = name.startswith("batch_prefill") and not name.endswith("_sm90")
    return (fp8 or not small) and not (hopper and plain and not small and "use_swa_True" in name)
