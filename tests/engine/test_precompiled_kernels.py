"""Kernels compiled ahead, and the compiler from Python packages."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil

import pytest
import torch

from medha_worker import flashinfer, nvcc, precompile_kernels
from medha_worker.attention import backend, latent_paged
from medha_worker.attention.fp8_scales import FP8


def test_what_can_be_compiled_ahead_is_what_the_engine_can_ask_for() -> None:
    assert precompile_kernels.HEAD_DIMS == backend.HEAD_DIMS
    assert (
        tuple(precompile_kernels.DTYPES.values()) == backend.DTYPES
        and precompile_kernels.FP8 == FP8
    )
    assert precompile_kernels.LATENTS == latent_paged.WIDTHS
    kernels = list(precompile_kernels.of_latents(backend.DTYPES, hopper=True))
    assert len(kernels) == 4 and kernels[0][0] == "fa2" and kernels[1][0] == "fa3"
    assert [kind for kind, *_ in precompile_kernels.of_latents([torch.float16], False)] == ["fa2"]


def test_a_model_has_each_kernel_for_both_kinds_of_pages_and_layers() -> None:
    kernels = list(precompile_kernels.attention([128], [torch.bfloat16], hopper=True))
    assert len(kernels) == len(set(kernels)) == 11
    kinds = {(kind, *arguments[:3], arguments[7]) for kind, arguments in kernels}
    own, small = torch.bfloat16, FP8
    for window in (False, True):
        assert ("decode", own, small, own, window) in kinds
        assert ("fa2", own, own, own, window) in kinds
        assert ("fa2", own, small, own, window) in kinds
        assert ("fa3", own, own, own, window) in kinds
    # Queries are narrow where keys are, but through a window, where fa3 would wait for ever.
    assert ("fa3", small, small, own, False) in kinds
    assert ("fa3", small, small, own, True) not in kinds
    assert not [
        kind for kind, _ in precompile_kernels.attention([64], [own], hopper=False) if kind == "fa3"
    ]


def test_compiled_modules_are_packed_where_the_library_looks(tmp_path: pathlib.Path) -> None:
    library = tmp_path / "made.so"
    library.write_bytes(b"machine code")
    precompile_kernels.pack({"silu": library, "norm": library}, tmp_path / "kernels")
    file = tmp_path / "kernels" / precompile_kernels.PACKAGE / "__init__.py"
    spec = importlib.util.spec_from_file_location("packed", file)
    assert spec is not None and spec.loader is not None
    packed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packed)
    assert packed.__version__ == flashinfer.VERSION
    folder = pathlib.Path(packed.get_jit_cache_dir())
    assert (folder / "silu" / "silu.so").read_bytes() == b"machine code"
    assert (folder / "norm" / "norm.so").exists()


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_compiler_from_python_packages_is_offered_with_names_to_link(
    tmp_path: pathlib.Path,
) -> None:
    home, empty = tmp_path / "cu13", tmp_path / "empty"
    for file in ("bin/nvcc", "lib/libcudart.so.13"):
        (home / file).parent.mkdir(parents=True)
        (home / file).write_text("")
    empty.mkdir()
    environment = {
        "PATH": str(empty),
        "CXX": str(shutil.which("cc")),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "base"),
        "FLASHINFER_EXTRA_LDFLAGS": "-s",
    }
    for _ in range(2):  # each process does it, in the same folder
        own = dict(environment)
        nvcc.set_cuda_home(own, home)
        links = tmp_path / "base" / ".cache" / "flashinfer" / "medha-links"
        assert own["CUDA_HOME"] == str(home)
        assert own["FLASHINFER_EXTRA_LDFLAGS"] == f"-s -L{links}"
        assert (links / "libcudart.so").resolve() == home / "lib" / "libcudart.so.13"
        assert b"libcuda.so.1" in (links / "libcuda.so").read_bytes()
    assert sorted(os.listdir(links)) == ["driver.so", "libcuda.so", "libcudart.so"]


def test_a_toolkit_that_is_there_stays_and_nothing_is_made_of_nothing(
    tmp_path: pathlib.Path,
) -> None:
    compiler = tmp_path / "nvcc"
    compiler.write_text("")
    compiler.chmod(0o755)
    for environment, home in (
        ({"PATH": "", "CUDA_HOME": "/usr/local/cuda", "CXX": "cc"}, tmp_path),
        ({"PATH": str(tmp_path), "CXX": "cc"}, tmp_path),
        ({"PATH": "", "CXX": "cc"}, None),
        ({"PATH": str(tmp_path / "none")}, tmp_path),
    ):
        before = dict(environment)
        nvcc.set_cuda_home(environment, home)
        assert environment == before
