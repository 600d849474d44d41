"""The house is small, and every room is found by its name."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

VAGUE = {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}


def misplaced_inits(root: Path) -> list[Path]:
    """`operator/__init__.py` would shadow Python's own `operator`; tests are no packages."""
    return [*root.glob("operator/__init__.py"), *root.glob("tests/**/__init__.py")]


def overruled_formatting(paths: Iterable[Path]) -> list[Path]:
    """Files that switch the formatter off for a line or a block."""
    return [path for path in paths if re.search(r"#\s*fmt:\s*(skip|off)", path.read_text())]


def without_docstring(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if not ast.get_docstring(ast.parse(path.read_text()))]


def vaguely_named(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if path.stem in VAGUE or path.parent.name in VAGUE]


def terse_tests(paths: Iterable[Path]) -> list[str]:
    """Test functions whose name is no sentence: fewer than three words after `test_`."""
    return [
        f"{path}: {node.name}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and len(node.name.split("_")) < 4
    ]


def repeated_names(paths: Iterable[Path]) -> list[str]:
    names = Counter(path.name for path in paths if path.name != "conftest.py")
    return [name for name, count in names.items() if count > 1]


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_neither_operator_nor_tests_is_a_package(house: Path) -> None:
    assert misplaced_inits(house) == []


def test_a_package_marker_out_of_place_is_found(tmp_path: Path) -> None:
    shadow = written(tmp_path / "operator" / "__init__.py", "")
    nested = written(tmp_path / "tests" / "topic" / "__init__.py", "")
    assert misplaced_inits(tmp_path) == [shadow, nested]


def test_no_line_overrules_the_formatter(code: list[Path]) -> None:
    assert overruled_formatting(code) == []


def test_a_line_that_overrules_the_formatter_is_found(tmp_path: Path) -> None:
    neat = written(tmp_path / "neat.py", "x = (1, 2)\n")
    skipped = written(tmp_path / "skipped.py", "x = (1,2)  # fmt" + ": skip\n")
    off = written(tmp_path / "off.py", "# fmt" + ": off\nx = (1,2)\n")
    assert overruled_formatting([neat, skipped, off]) == [skipped, off]


def test_every_module_opens_with_its_docstring(house: Path, code: list[Path]) -> None:
    tests = house / "tests"
    assert without_docstring(path for path in code if not path.is_relative_to(tests)) == []


def test_a_module_without_docstring_is_found(tmp_path: Path) -> None:
    bare = written(tmp_path / "bare.py", "# a comment says less\nx = 1\n")
    documented = written(tmp_path / "told.py", '"""Says what it decides."""\n')
    assert without_docstring([bare, documented]) == [bare]


def test_every_module_has_a_name_of_the_field(code: list[Path]) -> None:
    assert vaguely_named(code) == []


@pytest.mark.parametrize("name", ["utils.py", "manager.py", "common/pages.py"])
def test_a_vague_name_is_found(tmp_path: Path, name: str) -> None:
    assert vaguely_named([tmp_path / name]) == [tmp_path / name]


def test_names_of_tests_are_sentences(house: Path) -> None:
    assert terse_tests((house / "tests").rglob("test_*.py")) == []


def test_a_terse_test_name_is_found(tmp_path: Path) -> None:
    text = "def test_pack(): ...\ndef test_a_lone_prompt_gets_the_whole_budget(): ...\n"
    path = written(tmp_path / "test_packer.py", text)
    assert terse_tests([path]) == [f"{path}: test_pack"]


def test_no_two_test_files_share_a_name(house: Path) -> None:
    assert repeated_names((house / "tests").rglob("*.py")) == []


def test_a_shared_file_name_is_found(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "test_x.py", tmp_path / "b" / "test_x.py", tmp_path / "test_y.py"]
    assert repeated_names(paths) == ["test_x.py"]


def test_every_package_is_built_and_watched_by_the_layers(
    house: Path, packages: list[Path]
) -> None:
    project = tomllib.loads((house / "pyproject.toml").read_text())
    built = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    watched = project["tool"]["importlinter"]["root_packages"]
    present = {str(path.relative_to(house)) for path in packages}
    assert present <= set(built)
    assert sorted(watched) == sorted(Path(name).name for name in present)
    tops = {path.parent.relative_to(house).as_posix() for path in house.glob("*/medha*/*.py")}
    assert tops == present
