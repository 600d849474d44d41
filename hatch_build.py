"""Compiles the worker's attention kernel, beside its source, when the project is installed.

Needs a C compiler, $CC or the first of those below, and nothing of Python's: it is plain C.
Images without the worker have nothing to compile.
"""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import subprocess
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = pathlib.Path("worker/medha_worker/attention/singles.c")
LIBRARY = SOURCE.with_suffix(".kernel.so")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-Wall", "-Wextra", "-fPIC", "-shared")


class Kernel(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling's view of it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = pathlib.Path(self.root, SOURCE)
        if not source.exists():
            return
        compile_kernel(source, pathlib.Path(self.root, LIBRARY))
        build_data["artifacts"].append(LIBRARY.as_posix())
        build_data["pure_python"], build_data["infer_tag"] = False, True


def compile_kernel(source: pathlib.Path, library: pathlib.Path) -> None:
    """Make `library`; processes that have the one before loaded keep that."""
    fresh = library.with_suffix(f".{os.getpid()}.so")
    command = [*compiler(), *FLAGS, "-o", str(fresh), str(source), "-lm"]
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
        f"none of {', '.join(COMPILERS)} is installed: the worker's attention kernel needs a C"
        " compiler; install one, or name it in CC"
    )
