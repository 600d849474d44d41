"""The locked files are complete, hash-locked, in step with pyproject.toml, and name no host."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

LOCKS = ("bootstrap", "build", "conformance", "cuda", "dev", "operator", "router", "worker")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
# An address, an option of pip that names one, or a direct reference to a file.
PLACE = re.compile(r"://|--(?:extra-)?index-url|--find-links|--trusted-host|\bfile:|\s@\s")


def entries(text: str) -> list[str]:
    """Split into one string per locked package, with continuation lines joined."""
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    return [line.strip() for line in "\n".join(lines).replace("\\\n", " ").splitlines()]


def unlocked(text: str) -> list[str]:
    """Entries without an exact version or without a hash."""
    return [
        entry
        for entry in entries(text)
        if not re.match(r"[A-Za-z0-9._-]+==[^*\s]+", entry) or not HASH.search(entry)
    ]


def places(text: str) -> list[str]:
    return [line for line in text.splitlines() if PLACE.search(line)]


def out_of_step(text: str, wanted: Iterable[str]) -> list[str]:
    """Requirements of the project that the locked text does not satisfy."""
    locked: dict[str, set[Version]] = {}
    for entry in entries(text):
        name, _, version = entry.split()[0].partition("==")
        locked.setdefault(canonicalize_name(name), set()).add(Version(version))
    requirements = [Requirement(line) for line in wanted]
    return [
        str(requirement)
        for requirement in requirements
        if not (versions := locked.get(canonicalize_name(requirement.name)))
        or not all(requirement.specifier.contains(version) for version in versions)
    ]


@pytest.fixture(scope="module")
def project(house: Path) -> dict[str, Any]:
    return tomllib.loads((house / "pyproject.toml").read_text())


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_is_locked_with_its_hashes(house: Path, lock: str) -> None:
    text = (house / "requirements" / f"{lock}.txt").read_text()
    assert entries(text) != []
    assert unlocked(text) == []
    assert places(text) == []


def test_no_file_of_requirements_goes_unguarded(house: Path) -> None:
    present = {path.stem for path in (house / "requirements").iterdir()}
    assert present == {*LOCKS, "constraints"}


@pytest.mark.parametrize("extra", ["cuda", "operator", "router", "worker"])
def test_an_image_locks_what_the_project_file_asks_for(
    house: Path, project: dict[str, Any], extra: str
) -> None:
    text = (house / "requirements" / f"{extra}.txt").read_text()
    optional = project["project"]["optional-dependencies"]
    assert out_of_step(text, [*project["project"]["dependencies"], *optional[extra]]) == []


def test_the_development_lock_holds_all_but_what_is_for_gpus_and_conformance(
    house: Path, project: dict[str, Any]
) -> None:
    text = (house / "requirements" / "dev.txt").read_text()
    optional = project["project"]["optional-dependencies"]
    extras = [lines for extra, lines in optional.items() if extra != "cuda"]
    assert len(out_of_step(text, optional["cuda"])) == len(optional["cuda"])
    groups = {**project["dependency-groups"]}
    tools = groups.pop("conformance")  # aiperf needs another release of rich
    wanted = [line for lines in [*extras, *groups.values()] for line in lines]
    conformance = (house / "requirements" / "conformance.txt").read_text()
    assert out_of_step(conformance, tools) == []
    assert out_of_step(text, [*project["project"]["dependencies"], *wanted]) == []


def test_images_and_development_hold_the_same_versions(house: Path) -> None:
    dev = set(entries((house / "requirements" / "dev.txt").read_text()))
    pins = {entry.split()[0] for entry in dev}
    for lock in ("operator", "router", "worker"):
        text = (house / "requirements" / f"{lock}.txt").read_text()
        assert {entry.split()[0] for entry in entries(text)} - pins == set()


def test_a_worker_with_a_gpu_holds_what_one_without_holds_and_more(house: Path) -> None:
    cuda, worker = (
        {entry.split()[0] for entry in entries((house / "requirements" / file).read_text())}
        for file in ("cuda.txt", "worker.txt")
    )
    assert worker < cuda
    assert {name.partition("==")[0] for name in cuda - worker} >= {
        "flashinfer-python",
        "nvidia-cuda-nvcc",
        "nvidia-cuda-crt",
        "nvidia-nvvm",
    }


def test_the_compiler_is_of_the_cuda_release_that_torch_brings(house: Path) -> None:
    pins = {
        entry.split()[0].split("==")[0]: Version(entry.split()[0].split("==")[1])
        for entry in entries((house / "requirements" / "cuda.txt").read_text())
    }
    releases = {
        pins[name].release[:2]
        for name in ("cuda-toolkit", "nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")
    }
    assert len(releases) == 1, releases
    assert f"nixl-cu{releases.pop()[0]}" in pins


SHA = "0" * 64


@pytest.mark.parametrize(
    "entry", ["numpy==2.4.6", f"numpy>=2.4 --hash=sha256:{SHA}", "numpy==2.4.6 --hash=md5:00"]
)
def test_an_entry_that_is_not_locked_is_found(entry: str) -> None:
    good = f"msgspec==0.22.0 \\\n    --hash=sha256:{SHA}\n"
    assert unlocked(good) == []
    assert unlocked(f"# a comment\n{good}{entry}\n") == [entry]


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://packages.example/simple",
        "--find-links wheels",
        "medha @ file:///somewhere/else",
        "torch @ packages.example/torch.whl",
    ],
)
def test_a_line_that_names_a_place_is_found(line: str) -> None:
    assert places(f"numpy==2.4.6\n{line}\n") == [line]


def test_a_lock_behind_the_project_file_is_found() -> None:
    text = f"kopf==1.45.1 --hash=sha256:{SHA}\n"
    assert out_of_step(text, ["kopf>=1.45.2", "kubernetes"]) == ["kopf>=1.45.2", "kubernetes"]
    assert out_of_step(text, ["kopf>=1.45"]) == []
