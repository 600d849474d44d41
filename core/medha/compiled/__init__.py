"""Machine code of the decision modules, used only if it matches their current sources.

`hatch_build.py` compiles them with mypyc at installation, if Python's headers are present. This
folder holds the result, and RECORD the digests of its sources. If any source differs, the sources
run instead: same decisions, half as much time again.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType

FOLDER = pathlib.Path(__file__).parent
RECORD = "record.json"
SHARED = "medha__mypyc"
"""Module that holds all machine code; the imported modules refer to it."""


class Finder(MetaPathFinder):
    """Importer of modules from files of machine code."""

    def __init__(self, files: Mapping[str, pathlib.Path]) -> None:
        self.files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self.files.get(fullname)
        if file is None:
            return None
        loader = ExtensionFileLoader(fullname, str(file))
        return spec_from_file_location(fullname, file, loader=loader)


def source_of(root: pathlib.Path, module: str) -> pathlib.Path:
    """Path of the source of `module`; `root` is the folder of the package."""
    return root.joinpath(*module.split(".")).with_suffix(".py")


def digest(source: pathlib.Path) -> str:
    return hashlib.sha256(source.read_bytes()).hexdigest()


def stale(folder: pathlib.Path = FOLDER) -> str | None:
    """Reason not to use the machine code in `folder`; None if it can be used."""
    record = folder / RECORD
    if not record.exists():
        return "it was not compiled: run `make setup` where Python's headers are installed"
    compiled = json.loads(record.read_text())
    if compiled["python"] != sys.implementation.cache_tag:
        return f"it was compiled for {compiled['python']}: run `make compile`"
    for name in (*compiled["modules"], SHARED):
        if not (folder / f"{name}.so").exists():
            return f"the code of {name} is missing: run `make compile`"
    root = folder.parent.parent
    for module, known in compiled["modules"].items():
        source = source_of(root, module)
        if not source.exists():
            return f"the source of {module} is gone: run `make compile`"
        if digest(source) != known:
            return f"the source of {module} has changed: run `make compile`"
    return None


def install(folder: pathlib.Path = FOLDER) -> bool:
    """Import modules from `folder` if their machine code matches; returns True if so."""
    if stale(folder) is not None:
        return False
    names = [*json.loads((folder / RECORD).read_text())["modules"], SHARED]
    sys.meta_path.insert(0, Finder({name: folder / f"{name}.so" for name in names}))
    return True
