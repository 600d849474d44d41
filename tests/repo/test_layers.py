"""Import contracts: import-linter passes, and finds each kind of violation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LINT = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]


def lint_imports(root: Path, folders: list[str]) -> subprocess.CompletedProcess[str]:
    """Checks the packages under `root` against the contracts in its pyproject.toml."""
    paths = os.pathsep.join(str(root / folder) for folder in folders)
    return subprocess.run(
        [*LINT, "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def copy(house: Path, packages: list[Path], tmp_path: Path) -> Path:
    """The packages and their contracts, in a place where they may be spoilt."""
    shutil.copy(house / "pyproject.toml", tmp_path)
    for package in packages:
        target = tmp_path / package.relative_to(house)
        shutil.copytree(package, target, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_every_import_stays_within_its_layer(house: Path, packages: list[Path]) -> None:
    result = lint_imports(house, [path.parent.name for path in packages])
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "path, line, contract",
    [
        ("core/medha/request.py", "import time", "Decisions read no clock"),
        ("core/medha/scheduling/policies.py", "import random", "Decisions read no clock"),
        ("core/medha/model.py", "import medha.batch", "The core is built in layers"),
        ("core/medha/stray.py", "'''A module without a layer.'''", "The core is built in layers"),
        ("core/medha/scheduling/stray.py", "'''Another.'''", "Scheduling is built in layers"),
        ("core/medha/batch.py", "import torch", "torch is imported in the worker only"),
        ("router/medha_router/stray.py", "import medha_worker", "Services never import"),
        ("worker/medha_worker/stray.py", "import nixl", "FlashInfer and NIXL"),
        ("worker/medha_worker/kv/pages.py", "import flashinfer", "FlashInfer and NIXL"),
        ("router/medha_router/stray.py", "import zmq", "ZeroMQ and prometheus-client"),
        ("worker/medha_worker/inputs.py", "import ctypes", "Foreign functions are called"),
    ],
)
def test_an_import_out_of_its_layer_fails_the_build(
    copy: Path, packages: list[Path], path: str, line: str, contract: str
) -> None:
    spoilt = copy / path
    spoilt.parent.mkdir(exist_ok=True)
    with spoilt.open("a") as file:
        file.write(f"\n{line}\n")
    result = lint_imports(copy, [package.parent.name for package in packages])
    assert result.returncode != 0
    broken = [line for line in result.stdout.splitlines() if " BROKEN" in line]
    assert any(line.startswith(contract) for line in broken), result.stdout + result.stderr
