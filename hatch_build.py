"""Compile the kernels of worker and scheduler, and the deciding modules with mypyc, at install.

The kernels are plain C and need a C compiler only: $CC, or the first of those below; that of the
scheduler is an extension module. Each library lies next to its source. The deciding modules need
mypyc and Python's headers, and run uncompiled without them. The router's image needs only these,
the operator's nothing.

    python hatch_build.py       compiles all of it again, after a change
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WORKER = pathlib.Path("worker/medha_worker")
ROUTER = pathlib.Path("router/medha_router")
ROWS = pathlib.Path("core/medha/scheduling/rows.c")
SOURCES = (
    WORKER / "attention/singles.c",
    WORKER / "attention/chunks.c",
    WORKER / "model/arithmetic.c",
    ROWS,
)
# Python takes a library of two dots for no module; one extension fits every Python from 3.11 on.
SUFFIX, MODULE_SUFFIX = ".kernel.so", ".abi3.so"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-Wall", "-Wextra", "-fPIC", "-shared")
# A decision is the same on every machine and in a replay: no fused multiply-add.
CONTRACT = "-ffp-contract=off"
# Functions of one library may be inlined in each other: nothing else replaces them.
INLINED = "-fno-semantic-interposition"

CORE, COMPILED = pathlib.Path("core"), pathlib.Path("core/medha/compiled")
# Modules that take part in a decision of a scheduler or of admission, or complete a batch.
# (`interface` and `offers` hold msgspec structs.)
MODULES = (
    "medha.corrections",
    "medha.predictor",
    "medha.prefill_times",
    "medha.fleet.margins",
    "medha.fleet.placement",
    "medha.fleet.replica_estimate",
    *(
        f"medha.scheduling.{name}"
        for name in (
            "batch_builder",
            "block_pool",
            "feasibility",
            "group_selection",
            "kv_groups",
            "lifecycle",
            "load_report",
            "membership",
            "native",
            "policies",
            "prefill_admission",
            "promises",
            "running",
            "scheduler",
            "sequence",
            "state",
            "waiting_queue",
        )
    ),
)
NEEDED = ("mypyc", "setuptools", "msgspec", "numpy")
TRANSLATE = """
from mypyc.build import mypycify
from setuptools import setup
flags = ["--no-error-summary", "--config-file="]
found = mypycify([*flags, *{files!r}], debug_level="0", group_name="medha")
"""
COMPILE = """
for each in found:
    each.extra_compile_args += {flags!r}
setup(name="medha", ext_modules=found, script_args=["--quiet", "build_ext", "--inplace"])
"""


class Kernels(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling's hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = pathlib.Path(self.root)
        if not any((root / part).exists() for part in (WORKER, ROUTER)):
            return
        if (root / WORKER).exists():
            build_data["artifacts"] += compile_kernels(root)
        if compile_modules(root):
            build_data["artifacts"].append(f"{COMPILED.as_posix()}/*")
        build_data["pure_python"], build_data["infer_tag"] = False, True


def compile_kernels(root: pathlib.Path) -> list[str]:
    """Compile all kernels; return the paths of their libraries in `root`."""
    libraries = [
        source.with_suffix(MODULE_SUFFIX if source == ROWS else SUFFIX) for source in SOURCES
    ]
    for source, library in zip(SOURCES, libraries, strict=True):
        compile_kernel(root / source, root / library)
    return [library.as_posix() for library in libraries]


def compile_kernel(source: pathlib.Path, library: pathlib.Path) -> None:
    """Compile `library`; processes that have loaded the previous one keep it."""
    fresh = library.with_suffix(f".{os.getpid()}.so")
    flags = [*FLAGS]
    if source.name == ROWS.name:
        flags += [CONTRACT]
    command = [*compiler(), *flags, "-o", str(fresh), str(source), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        fresh.unlink(missing_ok=True)
        raise SystemExit(
            f"{source} does not compile:\n{shlex.join(command)}\n{done.stderr[-4000:]}"
        )
    fresh.replace(library)


def compile_modules(root: pathlib.Path) -> bool:
    """Compile MODULES and record their sources; False, with a message, if that is impossible."""
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    headers = pathlib.Path(sysconfig.get_path("include"), "Python.h")
    if lacking or not headers.exists():
        missing = ", ".join(lacking) or headers
        sys.stderr.write(f"medha is not compiled, and slower: {missing} is missing\n")
        return False
    door = _door(root)
    sources = {name: f"{name.replace('.', '/')}.py" for name in MODULES}
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, CORE)
        leave = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(root / CORE, copy, ignore=leave)
        script = (TRANSLATE + COMPILE).format(files=[*sources.values()], flags=[CONTRACT, INLINED])
        environment = {**os.environ, "CC": shlex.join(compiler())}
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=copy,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode:
            output = done.stdout[-4000:]
            sys.stderr.write(f"medha is not compiled, and slower:\n{output}\n")
            return False
        suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
        built = {name: copy / f"{name.replace('.', '/')}{suffix}" for name in MODULES}
        built[door.SHARED] = copy / f"{door.SHARED}{suffix}"
        for name, library in built.items():  # processes keep the library they have loaded
            fresh = root / COMPILED / f"{name}.{os.getpid()}.so"
            shutil.copyfile(library, fresh)
            fresh.replace(root / COMPILED / f"{name}.so")
        record = {
            "python": sys.implementation.cache_tag,
            "modules": {name: door.digest(copy / source) for name, source in sources.items()},
        }
    (root / COMPILED / door.RECORD).write_text(json.dumps(record, indent=1))
    return True


def _door(root: pathlib.Path) -> Any:
    """Load medha.compiled before medha can be imported: it needs only Python."""
    spec = importlib.util.spec_from_file_location("door", root / COMPILED / "__init__.py")
    assert spec is not None and spec.loader is not None
    door = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(door)
    return door


def compiler() -> list[str]:
    if chosen := os.environ.get("CC"):
        return shlex.split(chosen)
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise SystemExit(
        f"none of {', '.join(COMPILERS)} is installed: the worker's attention kernel and the"
        " scheduler need a C compiler; install one, or name it in CC"
    )


if __name__ == "__main__":
    ROOT = pathlib.Path(__file__).parent
    compile_kernels(ROOT)
    raise SystemExit(not compile_modules(ROOT))
