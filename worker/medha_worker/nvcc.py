"""CUDA compiler from Python packages, for a machine without a CUDA toolkit.

FlashInfer compiles with the `nvcc` found through CUDA_HOME or PATH, and links against plain library
names that a toolkit provides. The package `nvidia-cuda-nvcc` and torch's headers and libraries lack
those names, so they are linked once in FlashInfer's cache. Nothing is done if there is a toolkit,
or no package to replace it.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
from collections.abc import MutableMapping

# An empty stub of the driver's library: programs linked with it load the driver at run time.
_STUB = ("-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull, "-o")


def find_cuda_home() -> pathlib.Path | None:
    """Return the folder where Python packages installed a CUDA compiler and runtime, if any."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for home in sorted(pathlib.Path(folder).glob("cu[0-9]*"), reverse=True):
            if (home / "bin" / "nvcc").is_file() and list((home / "lib").glob("libcudart.so.*")):
                return home
    return None


def cache(environment: MutableMapping[str, str]) -> pathlib.Path:
    """Return FlashInfer's cache folder, below FLASHINFER_WORKSPACE_BASE or the home folder."""
    base = environment.get("FLASHINFER_WORKSPACE_BASE") or pathlib.Path.home()
    return pathlib.Path(base) / ".cache" / "flashinfer"


def set_cuda_home(environment: MutableMapping[str, str], home: pathlib.Path | None) -> None:
    """Point FlashInfer to the compiler in `home`, unless it finds another one by itself."""
    path = environment.get("PATH")
    named = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    compiler = environment.get("CXX") or shutil.which("c++", path=path)
    if named or shutil.which("nvcc", path=path) or home is None or compiler is None:
        return
    links = cache(environment) / "medha-links"
    links.mkdir(parents=True, exist_ok=True)
    runtime = max((home / "lib").glob("libcudart.so.*"))
    targets = {links / "libcudart.so": runtime, links / "libcuda.so": _stub(compiler, links)}
    for name, target in targets.items():
        # Several ranks may do this at once, so each replaces the link atomically.
        fresh = links / f"{name.name}.{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target)
        fresh.replace(name)
    flags = environment.get("FLASHINFER_EXTRA_LDFLAGS", "")
    environment["FLASHINFER_EXTRA_LDFLAGS"] = f"{flags} -L{links}".strip()
    environment["CUDA_HOME"] = str(home)


def _stub(compiler: str, links: pathlib.Path) -> pathlib.Path:
    stub = links / "driver.so"
    if not stub.exists():
        fresh = links / f"driver.so.{os.getpid()}"
        subprocess.run([compiler, *_STUB, str(fresh)], check=True, capture_output=True)
        fresh.replace(stub)
    return stub
