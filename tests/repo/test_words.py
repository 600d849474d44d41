"""No text of the project names the machine it was written on, a registry, or work left over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

TEXT = {"", ".cfg", ".in", ".ini", ".json", ".jsonl", ".md", ".py", ".sh", ".toml", ".tpl", ".txt"}
TEXT |= {".yaml", ".yml", ".html", ".css", ".js", ".csv", ".svg", ".promql"}
SKIPPED = {"__pycache__", "build", "dist", "node_modules", "shared"}

# One letter of each word stands in brackets, so that this file does not hold what it looks for.
WORDS = {
    "a path of one machine": r"(?<![\w.}])/([w]ork|[r]oot|[h]ome|[U]sers|[o]pt/wheels)/",
    "a package registry": r"[p]ypi\.org|[p]ythonhosted\.org|[n]pmjs\.org",
    "work left over": r"\b([T]ODO|[F]IXME|[X]XX)\b",
}


def texts(root: Path) -> Iterator[Path]:
    """Text files a person may read; hidden folders (but .ci and .github) and caches left out."""
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") and part not in {".ci", ".github"} for part in parts[:-1])
        if path.is_file() and path.suffix in TEXT and not hidden and not SKIPPED & set(parts):
            yield path


def findings(paths: Iterable[Path]) -> list[str]:
    return [
        f"{path}:{number}: {kind}: {match.group()}"
        for path in paths
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        for kind, pattern in WORDS.items()
        if (match := re.search(pattern, line, flags=re.IGNORECASE))
    ]


def test_no_text_names_a_machine_a_registry_or_work_left_over(house: Path) -> None:
    assert findings(texts(house)) == []


@pytest.mark.parametrize(
    "words, kind",
    [
        (["path = '", "work", "main'"], "a path of one machine"),
        (["see ", "home", "someone", "notes"], "a path of one machine"),
        (["--index-url https:", "", "pypi" + ".org", "simple"], "a package registry"),
        (["# TO" + "DO: one day"], "work left over"),
        (["# fix" + "me"], "work left over"),
    ],
)
def test_each_unwanted_word_is_found(tmp_path: Path, words: list[str], kind: str) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("fine\n" + "/".join(words) + "\n")
    assert [finding.split(": ")[1] for finding in findings(texts(tmp_path))] == [kind]


def test_ordinary_words_pass_unhindered(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("worker/medha_worker and {home}/work/ and homework/1\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "hidden.md").write_text("/".join(["", "work", "main", ""]))
    assert findings(texts(tmp_path)) == []
