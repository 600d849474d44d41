"""The house stays small: folders, pages and records have limits, and imports run one way."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

MAX_MODULES = 20
MAX_DOC_WORDS = 12_000
MAX_ADR_WORDS = 260
NO_ROOMS = ("__init__.py", "__main__.py")


def crowded(packages: Iterable[Path], most: int) -> dict[str, int]:
    """Folders with more modules than `most`."""
    counts: dict[str, int] = {}
    for package in packages:
        for path in package.rglob("*.py"):
            if path.name not in NO_ROOMS:
                counts[str(path.parent)] = counts.get(str(path.parent), 0) + 1
    return {folder: count for folder, count in counts.items() if count > most}


def words(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().split()) for path in paths)


def import_graph(packages: Iterable[Path]) -> dict[str, set[str]]:
    """Modules, and the project's modules that each imports, anywhere in its text."""
    files: dict[str, Path] = {}
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            files[".".join(parts[:-1] if path.name == "__init__.py" else parts)] = path
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    names.add(full if full in files else node.module)
        graph[module] = (names & files.keys()) - {module}
    return graph


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules of a cycle of imports; empty without one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        modules: list[str] = error.args[1]
        return modules
    return []


def test_no_folder_holds_more_modules_than_a_person_overlooks(packages: list[Path]) -> None:
    assert crowded(packages, MAX_MODULES) == {}


def test_a_crowded_folder_is_found(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "__init__", "__main__"):
        (tmp_path / f"{name}.py").touch()
    assert crowded([tmp_path], 2) == {str(tmp_path): 3}
    assert crowded([tmp_path], 3) == {}


def test_docs_are_short_enough_to_be_read(house: Path) -> None:
    pages = [*house.glob("*.md"), *house.glob("docs/*.md")]
    assert words(pages) <= MAX_DOC_WORDS


def test_each_decision_record_fits_a_page(house: Path) -> None:
    records = sorted((house / "docs" / "adr").glob("*.md"))
    assert {path.name: words([path]) for path in records if words([path]) > MAX_ADR_WORDS} == {}


def test_imports_form_no_cycle(packages: list[Path]) -> None:
    assert cycle(import_graph(packages)) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("import pkg.a", True),
        ("from pkg import a", True),
        ("from pkg.a import X", True),
        ("", False),
    ],
)
def test_a_cycle_is_found_even_inside_a_function(tmp_path: Path, line: str, expected: bool) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text("from pkg.b import Y\nX = Y\n")
    (package / "b.py").write_text(f"Y = 1\n\n\ndef f() -> None:\n    {line or 'pass'}\n")
    assert bool(cycle(import_graph([package]))) == expected
