"""Checkpoints of other weights, or in other files, have other digests; a copy has the same."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable

import pytest

from medha.checkpoints.checkpoint_files import SINGLE, digest_of
from medha.errors import CheckpointError
from medha_worker.model.checkpoint_writer import TinyModel

Folder = Callable[[TinyModel], pathlib.Path]


@pytest.fixture
def copy(tiny: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(tiny, tmp_path / "copy"))


def change(path: pathlib.Path, place: int) -> None:
    """Another byte at a place of a file, counted from its end when negative."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_copy_elsewhere_is_the_same(tiny: pathlib.Path, copy: pathlib.Path) -> None:
    assert digest_of(copy) == digest_of(tiny)
    assert len(digest_of(copy)) == 32


def test_weights_of_the_same_names_and_sizes_are_told_apart(checkpoint: Folder) -> None:
    first, second = (checkpoint(TinyModel(seed=seed)) for seed in (0, 1))
    sizes = [(folder / SINGLE).stat().st_size for folder in (first, second)]
    assert sizes[0] == sizes[1]
    assert digest_of(first) != digest_of(second)


@pytest.mark.parametrize("place", ["header", "weight"])
def test_a_byte_of_a_header_and_of_a_weight_count(copy: pathlib.Path, place: str) -> None:
    before = digest_of(copy)
    data = (copy / SINGLE).read_bytes()
    change(copy / SINGLE, -1 if place == "weight" else data.index(b"F32"))
    assert digest_of(copy) != before


def test_the_config_counts(copy: pathlib.Path) -> None:
    before = digest_of(copy)
    path = copy / "config.json"
    path.write_text(path.read_text().replace("1e-05", "2e-05"))
    assert digest_of(copy) != before


def test_every_file_behind_an_index_counts(checkpoint: Folder, tmp_path: pathlib.Path) -> None:
    folder = shutil.copytree(checkpoint(TinyModel(files=3)), tmp_path / "copy")
    seen = {digest_of(folder)}
    for path in sorted(folder.glob("*.safetensors")):
        change(path, -1)
        seen.add(digest_of(folder))
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "is missing; fetch it"),
        (b"", "its header does not parse"),
        (b"\xff" * 8 + b"{}", "its header does not parse"),
        (b"\x02" + b"\0" * 7 + b"[]", "its header does not parse"),
    ],
)
def test_a_file_that_is_none_is_named(copy: pathlib.Path, data: bytes | None, reason: str) -> None:
    if data is None:
        (copy / SINGLE).unlink()
    else:
        (copy / SINGLE).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{SINGLE} .*{reason}"):
        digest_of(copy)


def test_a_tensor_that_lies_nowhere_sensible_does_no_harm(copy: pathlib.Path) -> None:
    header = b'{"a": {"data_offsets": [9, 3]}, "b": {"data_offsets": [0, 99999999999]}}'
    (copy / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header)
    assert len(digest_of(copy)) == 32
