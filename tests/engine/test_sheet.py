"""Tables of benchmarks: what was measured stays, whatever comes after it."""

from __future__ import annotations

import io
import json
import pathlib
from collections.abc import Iterator

import pytest
from rich.console import Console
from tests.support.sheet import Row, Sheet

from medha.errors import SpecError


def fast() -> Iterator[Row]:
    yield Row(row="fast", what="a product", value=3.0, unit="ms", target=4.0, met=True)


def test_rows_are_on_the_screen_and_in_the_file_before_the_next_is_measured(
    tmp_path: pathlib.Path,
) -> None:
    screen, path = io.StringIO(), tmp_path / "table.json"
    sheet = Sheet(Console(file=screen, width=200), path, {"machine": "this"})
    seen: list[tuple[int, bool]] = []

    def rows() -> Iterator[Row]:
        for number in range(3):
            yield Row(row="slow", what=f"number {number}", value=1.0, unit="s")
            table = json.loads(path.read_text())
            assert table["machine"] == "this" and not table["whole"]
            seen.append((len(table["rows"]), f"number {number}" in screen.getvalue()))

    assert sheet.section("slow", rows)
    assert seen == [(1, True), (2, True), (3, True)]
    assert sheet.close() == 0 and json.loads(path.read_text())["whole"]
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def test_a_section_that_breaks_is_a_row_and_the_next_one_goes_on(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen, path = io.StringIO(), tmp_path / "table.json"
    sheet = Sheet(Console(file=screen, width=200), path, {})

    def broken() -> Iterator[Row]:
        yield Row(row="broken", what="its first row", value=1.0, unit="s")
        raise RuntimeError("\nCUDA error: an illegal memory access\nCompile with …")

    assert not sheet.section("broken", broken)
    assert sheet.section("fast", fast)
    rows = json.loads(path.read_text())["rows"]
    assert [row["row"] for row in rows] == ["broken", "broken", "fast"]
    assert rows[1]["failed"] and "RuntimeError: CUDA error: an illegal" in rows[1]["note"]
    assert sheet.close() == 1 and "FAILED: broken: the rest of broken" in screen.getvalue()
    assert "Traceback" in capsys.readouterr().err


def test_an_attempt_that_breaks_is_its_row() -> None:
    sheet = Sheet(Console(file=io.StringIO()), None, {})

    def measure() -> Row:
        raise ValueError("no such kernel")

    sheet.attempt("exact", "a decode", measure)
    sheet.attempt("exact", "a product", lambda: next(fast()))
    assert [(row.what, row.failed) for row in sheet.rows] == [
        ("a decode", True),
        ("a product", False),
    ]
    assert sheet.rows[0].note == "ValueError: no such kernel"


def test_what_a_person_can_mend_is_not_measured_and_no_failure() -> None:
    sheet = Sheet(Console(file=io.StringIO()), None, {})

    def small() -> Iterator[Row]:
        for tokens in (1,):
            raise SpecError("--pool-tokens", tokens, "must be more", "give more")
        yield from fast()

    assert not sheet.section("small", small) and sheet.close() == 0
    assert sheet.rows[0].verdict == "not measured" and "--pool-tokens is 1" in sheet.rows[0].note


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Row(row="r", what="w", value=1.0, target=2.0, met=True), "met"),
        (Row(row="r", what="w", value=3.0, target=2.0, met=False), "MISSED"),
        (Row(row="r", what="w", value=3.0, target=2.0), "not timed"),
        (Row(row="r", what="w", value=3.0), ""),
        (Row(row="r", what="w", note="too long"), "not measured"),
        (Row(row="r", what="w", failed=True), "FAILED"),
    ],
)
def test_a_row_has_the_verdict_that_its_target_gives(row: Row, verdict: str) -> None:
    sheet = Sheet(Console(file=io.StringIO()), None, {})
    sheet.add(row)
    assert row.verdict == verdict
    assert sheet.close() == int(verdict in ("MISSED", "FAILED"))
