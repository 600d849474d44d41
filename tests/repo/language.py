"""Mechanical rules of names and English, found in the syntax tree and in comments.

    python tests/repo/language.py core/medha/scheduling tests/scheduling

Prints one line per offence. Rules: a docstring opens with a verb or a noun phrase; no archaic or
vague words in docstrings, comments and messages; no variable is named `one`, `each` or the like.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

# A docstring that opens so is a question or points at nothing.
OPENINGS = re.compile(
    r"\W*(?:who|what|whose|whom|whether|which|how|its?|ones?|those|these|this|that|whoever|nobody|"
    r"somebody|where|when|why|there|they)\b",
    re.IGNORECASE,
)
# Words and phrases outside plain technical English, or that let machines speak.
WORDS = re.compile(
    r"\b(?:anew|lately|hence|thence|whence|thereof|whereof|for want of|so many|of which|beside|"
    r"keeps? (?:its|their|his) word|whoever|nobody|somebody|told|tells?|telling|hears?|heard)\b",
    re.IGNORECASE,
)
# Variables named after nothing, or after what was done to get them.
VAGUE = frozenset({"one", "each", "told", "found", "made", "asked", "said", "heard"})


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node, clean=False)):
            yield node.body[0].lineno, text


def questions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings that open with a question word or a pronoun."""
    for line, text in docstrings(tree):
        if opening := OPENINGS.match(text):
            yield line, f"docstring opens with {opening[0].strip()!r}"


def vague_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Variables and arguments that are named after nothing."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name in VAGUE:
                yield node.lineno, f"variable {name!r}"


def odd_words(text: str, tree: ast.AST, messages: bool) -> Iterator[tuple[int, str]]:
    """Words that plain English does without: in comments, docstrings and, if asked, messages."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from ((token.start[0], f"word {word!r}") for word in WORDS.findall(token.string))
    documented = dict(docstrings(tree))
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        if messages or documented.get(node.lineno) == node.value:
            yield from ((node.lineno, f"word {word!r}") for word in WORDS.findall(node.value))


def offences(path: Path) -> list[str]:
    """Every offence of one file; strings of tests are not messages to people."""
    text = path.read_text()
    tree = ast.parse(text)
    rows = [
        *questions(tree),
        *vague_names(tree),
        *odd_words(text, tree, messages="tests" not in path.parts),
    ]
    return [f"{path}:{line}: {offence}" for line, offence in sorted(rows)]


def sources(roots: Iterable[Path]) -> list[Path]:
    return sorted(
        path for root in roots for path in ([root] if root.is_file() else root.rglob("*.py"))
    )


def main(names: list[str]) -> int:
    rows = [row for path in sources(map(Path, names)) for row in offences(path)]
    print("\n".join([*rows, f"{len(rows)} offences"]))
    return bool(rows)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
