"""Commands of README.md exist, and continuous integration runs the same."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.support.medha_up import until


def targets(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))


def commands(markdown: str) -> list[str]:
    """Targets of the `make` lines inside fenced blocks, in order."""
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", markdown, flags=re.M | re.S)
    return re.findall(r"^(?:\$ )?make ([a-z-]+)", "\n".join(blocks), flags=re.MULTILINE)


def steps(script: str) -> list[str]:
    """Lines of a shell script that do something."""
    lines = [line.strip() for line in script.splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]


def scripts(makefile: str) -> list[str]:
    """Files and folders that recipes hand to Python or pytest, modules as their files."""
    recipes = "\n".join(line for line in makefile.splitlines() if line.startswith("\t"))
    recipes = re.sub(r"-m (demos|benchmarks)\.(\w+)", r"\1/\2.py", recipes)
    return re.findall(r"(?<= )(?:demos|examples|benchmarks|tests)(?:/[\w./]+)?", recipes)


@pytest.fixture(scope="module")
def makefile(house: Path) -> str:
    return (house / "Makefile").read_text()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_every_command_of_a_page_is_a_make_target(house: Path, makefile: str, page: str) -> None:
    named = commands((house / page).read_text())
    assert named != []
    assert set(named) <= targets(makefile)


def test_the_readme_says_how_to_try_and_how_to_test(house: Path) -> None:
    assert commands((house / "README.md").read_text())[:2] == ["demo", "test"]


def test_continuous_integration_runs_the_commands_of_a_person_and_nothing_else(house: Path) -> None:
    script = house / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()
    assert steps(script.read_text()) == ["exec make -j2 test test-api test-cluster SHORT=1"]


def test_a_signal_to_continuous_integration_ends_what_runs(house: Path, tmp_path: Path) -> None:
    """A program takes the place of Python in the recipes: it writes its number and waits."""
    python, started = tmp_path / "python", tmp_path / "started"
    python.write_text(f'#!/bin/sh\necho "$$ $*" >>{started}\nexec sleep 100\n')
    python.chmod(0o755)
    started.touch()
    environment = {**os.environ, "MAKEFLAGS": f"PY={python} READY="}
    process = subprocess.Popen([house / ".ci" / "run"], env=environment, stdout=subprocess.PIPE)
    try:
        until(lambda: len(started.read_text().splitlines()) == 2)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    lines = started.read_text().splitlines()
    assert sorted("tests/api" in line for line in lines) == [False, True]
    until(lambda: not any(Path(f"/proc/{line.split()[0]}").exists() for line in lines))


def test_every_target_is_declared_and_explained(makefile: str) -> None:
    declared = re.findall(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    explained = re.findall(r"^([a-z-]+):.*?## \S", makefile, flags=re.MULTILINE)
    assert set(" ".join(declared).split()) == targets(makefile) == set(explained)


def test_every_script_of_a_target_exists(house: Path, makefile: str) -> None:
    named = scripts(makefile)
    assert "demos/local.py" in named
    assert [name for name in named if not (house / name).exists()] == []


def test_scripts_are_read_from_recipes_only() -> None:
    text = "CODE := tests examples\ndemo:\n\tpython examples/ghost.py -v\n\tpytest benchmarks\n"
    assert scripts(text) == ["examples/ghost.py", "benchmarks"]
    assert scripts("demo:\n\tpython -m demos.ghost\n") == ["demos/ghost.py"]


def test_commands_are_read_from_fenced_blocks_only() -> None:
    page = "make believe\n```sh\nmake demo\n$ make ghost\nls\n```\n```python\nmake = 1\n```\n"
    assert commands(page) == ["demo", "ghost"]
    assert set(commands(page)) - targets("demo: x\n\techo\n") == {"ghost"}


def test_an_extra_step_in_the_script_is_found() -> None:
    assert steps("#!/bin/sh\nset -eu\nmake test\nmake bench\n") == ["make test", "make bench"]
