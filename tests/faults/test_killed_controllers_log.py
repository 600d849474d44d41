"""The decision log of a killed controller holds its last decision."""

from __future__ import annotations

from pathlib import Path

import pytest

from medha.errors import SpecError
from medha_worker.controller.__main__ import new_log


def test_each_line_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    with new_log(path) as log:
        for count in (1, 2, 3):
            log.write(b'{"call":"next_batch"}\n')
            assert path.read_bytes().count(b"\n") == count


def test_the_log_of_the_previous_controller_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    for life in (b"first\n", b"second\n"):
        with new_log(path) as log:
            log.write(life)
    assert path.read_bytes() == b"second\n"
    assert path.with_name("decisions.jsonl.before").read_bytes() == b"first\n"


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"decision_log is .*/nowhere/a: must be a file that can"):
        new_log(tmp_path / "nowhere" / "a")
