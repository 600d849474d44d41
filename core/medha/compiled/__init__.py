"""Machine code of the modules that decide, used where it was made of their sources as they stand.

`hatch_build.py` makes it with mypyc when the project is installed and Python's headers are there;
it lies in this folder, and in RECORD of what it was made. Where one source differs, none is used:
the sources run as they are, to the same decisions, in half as much time again.
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
"""The module that holds the code of all; those that are imported name it."""


class Finder(MetaPathFinder):
    """Finds modules by name in files of machine code."""

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
    """Where the source of `module` is, below the folder that holds the package."""
    return root.joinpath(*module.split(".")).with_suffix(".py")


def digest(source: pathlib.Path) -> str:
    return hashlib.sha256(source.read_bytes()).hexdigest()


def stale(folder: pathlib.Path = FOLDER) -> str | None:
    """Why the machine code in `folder` is not to be used; None where it is."""
    record = folder / RECORD
    if not record.exists():
        return "it was not made: run `make setup` where Python's headers are"
    made = json.loads(record.read_text())
    if made["python"] != sys.implementation.cache_tag:
        return f"it was made for {made['python']}: run `make compile`"
    for name in (*made["modules"], SHARED):
        if not (folder / f"{name}.so").exists():
            return f"that of {name} is missing: run `make compile`"
    root = folder.parent.parent
    for module, known in made["modules"].items():
        if digest(source_of(root, module)) != known:
            return f"the source of {module} has changed: run `make compile`"
    return None


def install(folder: pathlib.Path = FOLDER) -> bool:
    """Let imports find the machine code in `folder`; whether it is to be used."""
    if stale(folder) is not None:
        return False
    names = [*json.loads((folder / RECORD).read_text())["modules"], SHARED]
    sys.meta_path.insert(0, Finder({name: folder / f"{name}.so" for name in names}))
    return True
