"""Compile FlashInfer's kernels ahead of time, for machines without a compiler.

    python -m medha_worker.precompile_kernels FOLDER --archs "8.0 9.0a" \\
        --head-dims 128 --dtypes bfloat16

Compiles every kernel that `attention.backend` can request on GPUs of these architectures: pages of
the model's type and of FP8, layers with and without a window; `--latents` adds those of latent
attention. FOLDER then holds a package from
which FlashInfer loads them if FOLDER is on Python's path. Needs no GPU; takes minutes of a core
per kernel. The image that compiles copies only these files of the worker, so other changes do not
invalidate its cache.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from medha.errors import SetupError
from medha_worker import flashinfer

HEAD_DIMS = (64, 128, 256)
LATENTS = (512, 64)  # entries of the latent and of the rotated key
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FP8 = torch.float8_e4m3fn

# What FlashInfer looks for (flashinfer.jit.env).
PACKAGE, INSIDE = "flashinfer_jit_cache", "jit_cache"
CODE = f'''"""Kernels compiled ahead, of one release of FlashInfer."""

import pathlib

__version__ = "{flashinfer.VERSION}"


def get_jit_cache_dir():
    return str(pathlib.Path(__file__).parent / "{INSIDE}")
'''


def attention(
    head_dims: Sequence[int], dtypes: Sequence[torch.dtype], hopper: bool
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield kinds and arguments of FlashInfer's attention modules.

    Arguments: types of queries, keys, states and indices, head dims, no positions, the window, no
    cap on logits [, no short sums].
    """
    for dim in head_dims:
        for dtype in dtypes:
            for kept in (dtype, FP8):
                for window in (False, True):
                    rest = (dtype, torch.int32, dim, dim, 0, window, False)
                    yield "decode", (dtype, kept, *rest)
                    # Chunks on Ampere, small ones, those of FP8 through windows, and of batches
                    # that are deterministic; single rows on tensor cores.
                    yield "fa2", (dtype, kept, *rest, False)
                    # No FP8 through a window: see `attention.flashinfer_plan.Geometry.kernel_for`.
                    if hopper and not (window and kept == FP8):
                        yield "fa3", (kept, kept, *rest, False)


def of_latents(dtypes: Sequence[torch.dtype], hopper: bool) -> Iterator[tuple[Any, ...]]:
    """Yield arguments of FlashInfer's modules for latent attention.

    Backend, types of queries, latents, states and indices, sizes, no profiler.
    """
    for dtype in dtypes:
        for backend in ("fa2", "fa3") if hopper else ("fa2",):
            yield backend, dtype, dtype, dtype, torch.int32, *LATENTS, False


def modules(
    archs: str, head_dims: Sequence[int], dtypes: Sequence[torch.dtype], latents: bool = False
) -> list[Any]:
    """Return FlashInfer's JitSpecs. Raises SetupError if FlashInfer is not installed."""
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = archs
    flashinfer.flashinfer()
    jit = importlib.import_module("flashinfer.jit")
    specs = [
        jit.norm.gen_norm_module(),
        jit.rope.gen_rope_module(),
        jit.cascade.gen_cascade_module(),
        jit.activation.gen_act_and_mul_module("silu"),
    ]
    hopper = any(arch.startswith("9.") for arch in archs.split())
    for kind, arguments in attention(head_dims, dtypes, hopper):
        if kind == "decode":
            specs.append(jit.attention.gen_batch_decode_module(*arguments))
        else:
            specs.append(jit.attention.gen_batch_prefill_module(kind, *arguments))
    if latents:
        kernels = of_latents(dtypes, hopper)
        specs.extend(jit.attention.gen_batch_mla_module(*arguments) for arguments in kernels)
    return specs


def pack(libraries: dict[str, pathlib.Path], folder: pathlib.Path) -> None:
    """Write the package of compiled modules into `folder`."""
    package = folder / PACKAGE
    for name, library in libraries.items():
        target = package / INSIDE / name / f"{name}.so"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, target)
    (package / "__init__.py").write_text(CODE)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument(
        "--archs", default="8.0 9.0a", help="GPU architectures: 8.0 is A100, 9.0a is H100"
    )
    parser.add_argument("--head-dims", type=int, nargs="*", default=[128], choices=HEAD_DIMS)
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"], choices=sorted(DTYPES))
    parser.add_argument("--latents", action="store_true", help="latent attention, too")
    parser.add_argument("--only", default="", help="compile only modules whose names contain this")
    chosen = parser.parse_args(arguments)
    try:
        dtypes = [DTYPES[name] for name in chosen.dtypes]
        specs = modules(chosen.archs, chosen.head_dims, dtypes, chosen.latents)
    except SetupError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    wanted = [module for module in specs if chosen.only in module.name]
    sys.stdout.write("".join(f"{module.name}\n" for module in wanted))
    sys.stdout.flush()
    importlib.import_module("flashinfer.jit.core").build_jit_specs(wanted, skip_prebuilt=False)
    pack({module.name: module.jit_library_path for module in wanted}, chosen.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
