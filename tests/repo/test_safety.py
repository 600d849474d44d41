"""Nothing in the tree turns bytes or text from elsewhere into code, found in the syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

# Modules whose reading of bytes runs code.
MODULES = {"cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle", "shelve"}
# Builtins that run text.
BUILTINS = {"eval", "exec", "__import__"}
# Methods that pickle, whatever object they belong to.
METHODS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "recv_pyobj",
    "scatter_object_list",
    "send_object_list",
    "send_pyobj",
}
# Functions of one module; yaml.safe_load is the way in, safetensors the other.
FUNCTIONS = {
    ("torch", "load"),
    ("torch", "save"),
    ("yaml", "full_load"),
    ("yaml", "load"),
    ("yaml", "load_all"),
    ("yaml", "unsafe_load"),
    ("os", "popen"),
    ("os", "system"),
}
# Keywords that open a door which is closed by default.
KEYWORDS = {"allow_pickle", "shell", "trust_remote_code"}


def dangers(text: str) -> Iterator[tuple[int, str]]:
    """Line and name of each construct of `text` that can run what it reads."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                tops = [alias.name.partition(".")[0] for alias in names]
                yield from ((node.lineno, top) for top in tops if top in MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                if module.partition(".")[0] in MODULES:
                    yield node.lineno, module
                imports = ((module, alias.name) for alias in names)
                yield from ((node.lineno, ".".join(pair)) for pair in imports if pair in FUNCTIONS)
            case ast.Name(id=name) if name in BUILTINS:
                yield node.lineno, name
            case ast.Attribute(value=ast.Name(id=module), attr=name) if (module, name) in FUNCTIONS:
                yield node.lineno, f"{module}.{name}"
            case ast.Attribute(attr=name) if name in METHODS:
                yield node.lineno, name
            case ast.keyword(arg=str(name), value=ast.Constant(value=True)) if name in KEYWORDS:
                yield node.lineno, f"{name}=True"


def dangerous(paths: Iterable[Path]) -> list[str]:
    return [f"{path}:{line}: {name}" for path in paths for line, name in dangers(path.read_text())]


def test_nothing_in_the_tree_runs_what_it_reads(code: list[Path]) -> None:
    assert dangerous(code) == []


@pytest.mark.parametrize(
    "text, name",
    [
        ("import pickle", "pickle"),
        ("from marshal import loads", "marshal"),
        ("import cloudpickle.compat as c", "cloudpickle"),
        ("eval(text)", "eval"),
        ("run = exec", "exec"),
        ("weights = torch.load(path)", "torch.load"),
        ("from torch import load", "torch.load"),
        ("message = socket.recv_pyobj()", "recv_pyobj"),
        ("dist.broadcast_object_list(values)", "broadcast_object_list"),
        ("yaml.load(text, Loader=yaml.SafeLoader)", "yaml.load"),
        ("np.load(path, allow_pickle=True)", "allow_pickle=True"),
        ("AutoTokenizer.from_pretrained(name, trust_remote_code=True)", "trust_remote_code=True"),
        ("subprocess.run(line, shell=True)", "shell=True"),
    ],
)
def test_each_danger_is_found_where_it_stands(tmp_path: Path, text: str, name: str) -> None:
    path = tmp_path / "sample.py"
    path.write_text(f"x = 1\n{text}\n")
    assert dangerous([path]) == [f"{path}:2: {name}"]


@pytest.mark.parametrize(
    "text", ["model.eval()", "yaml.safe_load(text)", "np.load(path, allow_pickle=False)"]
)
def test_a_harmless_namesake_is_let_through(text: str) -> None:
    assert list(dangers(text)) == []
