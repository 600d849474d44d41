"""Plain English and unique names: the rules of language.py hold, and each finds its offence."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.repo.language import offences

# Folders and files whose sentences are still being rewritten; nothing may be added.
UNFINISHED: tuple[str, ...] = ()

# Names that stand for the same thing, seen by two layers or services.
SHARED_CLASSES: dict[str, str] = {}
SHARED_MODULES = {
    "__main__": "the entry point of each program",
    "app": "the composition root of a service",
    "controller": "the controller's package, and its main class",
    "errors": "the errors of each package",
    "metrics": "the catalogue, and the metrics of a service",
    "model": "the model: its shape in the core, its layers in the worker",
    "testing": "the builders of tests of each package",
}


def finished(house: Path, path: Path) -> bool:
    relative = path.relative_to(house)
    return not any(relative.is_relative_to(name) for name in UNFINISHED)


def shared(places: Iterable[tuple[str, str]], accepted: dict[str, str]) -> dict[str, list[str]]:
    """Names with several places, without the accepted ones."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for name, place in places:
        by_name[name].append(place)
    return {
        name: sorted(places_of_name)
        for name, places_of_name in by_name.items()
        if len(places_of_name) > 1 and name not in accepted
    }


def public_classes(paths: Iterable[Path]) -> list[tuple[str, str]]:
    return [
        (node.name, str(path))
        for path in paths
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def modules(package: Path) -> list[tuple[str, str]]:
    """Modules and folders of a package, by name; not the package itself."""
    return [
        (path.parent.name if path.name == "__init__.py" else path.stem, str(path))
        for path in sorted(package.rglob("*.py"))
        if path != package / "__init__.py"
    ]


def written(folder: Path, text: str) -> Path:
    path = folder / "sample.py"
    path.write_text(text)
    return path


def test_all_code_is_in_plain_english(house: Path, code: list[Path]) -> None:
    rows = [row for path in code if finished(house, path) for row in offences(path)]
    assert rows == []


def test_what_is_unfinished_exists_and_has_offences(house: Path, code: list[Path]) -> None:
    for name in UNFINISHED:
        paths = [path for path in code if path.relative_to(house).is_relative_to(name)]
        assert any(offences(path) for path in paths), f"{name} is clean: remove it from UNFINISHED"


@pytest.mark.parametrize(
    ("text", "offence"),
    [
        ('"""Which replica serves a request."""\n', "docstring opens with 'Which'"),
        ('def f() -> None:\n    """It drains."""\n', "docstring opens with 'It'"),
        ("# the router tells its clients\n", "word 'tells'"),
        ('"""Groups beside each other."""\n', "word 'beside'"),
        ('raise ValueError("nobody answers")\n', "word 'nobody'"),
        ("for each in pods:\n    pass\n", "variable 'each'"),
        ("found = 1\n", "variable 'found'"),
        ("def f(one: int) -> None: ...\n", "variable 'one'"),
    ],
)
def test_an_offence_is_found(tmp_path: Path, text: str, offence: str) -> None:
    assert [row.split(": ", 1)[1] for row in offences(written(tmp_path, text))] == [offence]


@pytest.mark.parametrize(
    "text",
    [
        '"""Return the replica that serves a request."""\n',
        "# one pod for each stage: `rate()` misses the first increment\n",
        "for pod in pods:\n    pass\n",
        'raise ValueError("port 8000 is in use: choose another with --port")\n',
        "each_s = 1.0\n",
    ],
)
def test_plain_text_passes(tmp_path: Path, text: str) -> None:
    assert offences(written(tmp_path, text)) == []


def test_messages_in_tests_are_not_judged(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    assert offences(written(folder, 'match = "nobody answers"\n')) == []


def test_no_two_public_classes_share_a_name(packages: list[Path]) -> None:
    paths = [path for package in packages for path in sorted(package.rglob("*.py"))]
    assert shared(public_classes(paths), SHARED_CLASSES) == {}


def test_no_two_modules_share_a_name(packages: list[Path]) -> None:
    places = [place for package in packages for place in modules(package)]
    assert shared(places, SHARED_MODULES) == {}


def test_a_shared_class_name_is_found_unless_accepted(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text("class Plan: ...\nclass _Own: ...\n")
    places = public_classes(sorted(tmp_path.glob("*.py")))
    assert list(shared(places, {})) == ["Plan"]
    assert shared(places, {"Plan": "the same plan"}) == {}


def test_a_shared_module_name_is_found(tmp_path: Path) -> None:
    for folder in ("fleet", "sim"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
        (tmp_path / folder / "queue.py").touch()
    assert list(shared(modules(tmp_path), {})) == ["queue"]
