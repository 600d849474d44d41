"""Each image imports its code with nothing but what its requirements lock.

An image copies core/ and one service's folder and installs one locked file. Here a child process
imports every module of both, while each distribution missing from that file is kept out of reach.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

IMAGES = {"operator": "medha_operator", "router": "medha_router", "worker": "medha_worker"}

# Runs in the child: argv holds the distributions the image lacks, then the packages to import.
IMPORT_ALL = """
import importlib, importlib.abc, pkgutil, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"{name} is not in this image", name=name)
        return None

absent = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Absent())
for package in sys.argv[2:]:
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(found.__path__, f"{package}."):
        if module.name.endswith(".__main__"):
            continue
        importlib.import_module(module.name)
print("torch" in sys.modules)
"""


def locked_names(requirements: Path) -> set[str]:
    names = re.findall(r"^([A-Za-z0-9._-]+)==", requirements.read_text(), flags=re.MULTILINE)
    return {canonicalize_name(name) for name in names}


def absent_modules(requirements: Path) -> set[str]:
    """Top-level modules installed here whose distributions the image does not hold."""
    from importlib.metadata import packages_distributions

    present = locked_names(requirements) | {"medha"}
    return {
        module
        for module, distributions in packages_distributions().items()
        if not present & {canonicalize_name(name) for name in distributions}
    }


def import_all(
    absent: set[str], packages: list[str], *search: Path
) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(path) for path in search)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_ALL, ",".join(sorted(absent)), *packages],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_imports_with_what_its_requirements_lock(house: Path, image: str) -> None:
    folders = [house / "core", house / image]
    packages = ["medha", IMAGES[image]] if (house / image).is_dir() else ["medha"]
    absent = absent_modules(house / "requirements" / f"{image}.txt")
    result = import_all(absent, packages, *folders)
    assert result.returncode == 0, result.stderr
    assert (result.stdout.strip() == "True") == (image == "worker")


@pytest.mark.parametrize("image", ["operator", "router"])
def test_the_operator_and_router_images_hold_no_torch(house: Path, image: str) -> None:
    locked = locked_names(house / "requirements" / f"{image}.txt")
    heavy = ("torch", "nvidia-", "cuda-", "nixl", "triton", "safetensors", "transformers")
    assert [name for name in sorted(locked) if name.startswith(heavy)] == []


def test_kernels_are_compiled_with_the_few_files_that_the_image_copies_for_it(
    house: Path, tmp_path: Path
) -> None:
    """The stage that compiles says what it lacks: without FlashInfer that, and nothing else."""
    stage = (house / "Dockerfile").read_text().partition("AS cuda-kernels")[2].partition("FROM")[0]
    for line in stage.replace("\\\n", " ").splitlines():
        if line.startswith("COPY") and "--from" not in line:
            *sources, folder = line.split()[1:]
            for source in sources:
                target = tmp_path / folder / Path(source).name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((house / source).read_bytes())
    script = (
        "import sys; sys.modules['flashinfer'] = None;"
        "from medha_worker.precompile_kernels import main; sys.exit(main(['kernels']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert "FlashInfer cannot be imported" in result.stderr


def test_what_pods_may_write_to_is_where_the_images_keep_caches(house: Path) -> None:
    manifests = (house / "operator" / "medha_operator" / "resources/manifests.py").read_text()
    (mounted,) = re.findall(r'^RUN_FOLDER = "(.+)"$', manifests, flags=re.MULTILINE)
    assert re.findall(r"HOME=(\S+)", (house / "Dockerfile").read_text()) == [mounted]


def test_an_import_that_the_image_lacks_is_found(house: Path, tmp_path: Path) -> None:
    package = tmp_path / "careless"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("import torch\n")
    absent = absent_modules(house / "requirements" / "router.txt")
    result = import_all(absent, ["careless"], tmp_path)
    assert result.returncode != 0
    assert "torch is not in this image" in result.stderr
