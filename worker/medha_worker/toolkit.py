"""The CUDA compiler of a Python package, for a machine that has no CUDA toolkit.

FlashInfer compiles with the `nvcc` that CUDA_HOME or the path leads to, and links with libraries
that a toolkit has under their plain names. The package `nvidia-cuda-nvcc`, beside the headers and
libraries that torch brings, lacks those names; here they are made, once, in FlashInfer's cache.
Nothing is done where there is a toolkit, or nothing to make one of.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
from collections.abc import MutableMapping

# A library of this name that holds nothing: what is linked with it asks for the driver's.
_STUB = ("-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull, "-o")


def toolkit() -> pathlib.Path | None:
    """Where Python packages put a CUDA toolkit that has a compiler."""
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or ()) if found else ():
        for home in sorted(pathlib.Path(folder).glob("cu[0-9]*"), reverse=True):
            if (home / "bin" / "nvcc").is_file() and list((home / "lib").glob("libcudart.so.*")):
                return home
    return None


def cache(environment: MutableMapping[str, str]) -> pathlib.Path:
    """FlashInfer's: FLASHINFER_WORKSPACE_BASE, or the home folder, and what follows."""
    base = environment.get("FLASHINFER_WORKSPACE_BASE") or pathlib.Path.home()
    return pathlib.Path(base) / ".cache" / "flashinfer"


def offer(environment: MutableMapping[str, str], home: pathlib.Path | None) -> None:
    """Lead FlashInfer to the toolkit in `home`, unless it finds another by itself."""
    path = environment.get("PATH")
    named = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    compiler = environment.get("CXX") or shutil.which("c++", path=path)
    if named or shutil.which("nvcc", path=path) or home is None or compiler is None:
        return
    links = cache(environment) / "medha-links"
    links.mkdir(parents=True, exist_ok=True)
    runtime = max((home / "lib").glob("libcudart.so.*"))
    made = {links / "libcudart.so": runtime, links / "libcuda.so": _stub(compiler, links)}
    for name, target in made.items():
        # Several ranks do this at once: each puts the whole thing in place.
        fresh = links / f"{name.name}.{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target)
        fresh.replace(name)
    flags = environment.get("FLASHINFER_EXTRA_LDFLAGS", "")
    environment["FLASHINFER_EXTRA_LDFLAGS"] = f"{flags} -L{links}".strip()
    environment["CUDA_HOME"] = str(home)


def _stub(compiler: str, links: pathlib.Path) -> pathlib.Path:
    made = links / "driver.so"
    if not made.exists():
        fresh = links / f"driver.so.{os.getpid()}"
        subprocess.run([compiler, *_STUB, str(fresh)], check=True, capture_output=True)
        fresh.replace(made)
    return made
