"""Compiles the worker's attention kernel and the scheduler's, each beside its source, when the
project is installed.

Needs a C compiler, $CC or the first of those below, and nothing of Python's: both are plain C.
Images without the worker run no scheduler, and have nothing to compile.
"""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import subprocess
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WORKER = pathlib.Path("worker/medha_worker")
SOURCES = (WORKER / "attention/singles.c", pathlib.Path("core/medha/scheduling/lars.c"))
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-Wall", "-Wextra", "-fPIC", "-shared")
# A decision is the same on every machine, and a replay repeats it: no product melts into a sum.
EXACT = {"lars.c": ("-ffp-contract=off",)}


class Kernels(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling's view of them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not pathlib.Path(self.root, WORKER).exists():
            return
        for source in SOURCES:
            library = source.with_suffix(".kernel.so")
            compile_kernel(pathlib.Path(self.root, source), pathlib.Path(self.root, library))
            build_data["artifacts"].append(library.as_posix())
        build_data["pure_python"], build_data["infer_tag"] = False, True


def compile_kernel(source: pathlib.Path, library: pathlib.Path) -> None:
    """Make `library`; processes that have the one before loaded keep that."""
    fresh = library.with_suffix(f".{os.getpid()}.so")
    flags = FLAGS + EXACT.get(source.name, ())
    command = [*compiler(), *flags, "-o", str(fresh), str(source), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        fresh.unlink(missing_ok=True)
        raise SystemExit(
            f"{source} does not compile:\n{shlex.join(command)}\n{done.stderr[-4000:]}"
        )
    fresh.replace(library)


def compiler() -> list[str]:
    if chosen := os.environ.get("CC"):
        return shlex.split(chosen)
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise SystemExit(
        f"none of {', '.join(COMPILERS)} is installed: the worker's attention kernel and the"
        " scheduler need a C compiler; install one, or name it in CC"
    )
