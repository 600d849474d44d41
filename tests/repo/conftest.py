"""Root, packages and Python files of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

PACKAGES = (
    "core/medha",
    "operator/medha_operator",
    "router/medha_router",
    "worker/medha_worker",
)
FOLDERS = (
    "core",
    "operator",
    "router",
    "worker",
    "examples",
    "demos",
    "benchmarks",
    "dashboards",
    "tests",
)


@pytest.fixture(scope="session")
def house() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def packages(house: Path) -> list[Path]:
    """The folders of the packages that this checkout holds."""
    return [house / name for name in PACKAGES if (house / name).is_dir()]


@pytest.fixture(scope="session")
def code(house: Path) -> list[Path]:
    """Every Python file of the project, tests included."""
    paths = sorted(path for folder in FOLDERS for path in (house / folder).rglob("*.py"))
    return [house / "hatch_build.py", *paths]
