"""Reading ahead: a rank's own part of the files, in order, and no fault of it stops a start."""

from __future__ import annotations

import pathlib

import msgspec
import pytest

from medha.config import WorkerConfig
from medha.topology import Coordinate, Topology
from medha_worker import read_ahead as module
from medha_worker.low_priority_start import read_weights_ahead
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint
from medha_worker.read_ahead import pieces_of, read_ahead

ALL = 1 << 40
FIRST, LAST = Coordinate(0, 0, 0), Coordinate(0, 1, 0)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    place = tmp_path_factory.mktemp("read_ahead")
    return write_checkpoint(place, TinyModel(layers=5, files=3, tied=request.param))


def config(folder: pathlib.Path, spp: int = 1) -> WorkerConfig:
    return WorkerConfig(
        replica="m-0",
        model="m",
        checkpoint=str(folder),
        max_context_tokens=64,
        topology=Topology(spp=spp),
        rank_bind="ipc://unused",
    )


def tensors_in(pieces: list[module.Piece], folder: pathlib.Path) -> list[str]:
    """Names of the tensors whose bytes lie in the pieces as a whole, in the order of pieces."""
    names: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        base = 8 + int.from_bytes(raw[:8], "little")
        header = msgspec.json.decode(raw[8:base])
        own = [(at, at + size) for name, at, size in pieces if name == path]
        order = [number for number, piece in enumerate(pieces) if piece[0] == path]
        for tensor in header.keys() - {"__metadata__"}:
            begin, end = (base + offset for offset in header[tensor]["data_offsets"])
            covered = sum(max(0, min(b, end) - max(a, begin)) for a, b in own)
            assert covered in (0, end - begin), "a piece cuts a tensor"
            if covered:
                first = next(i for i, (a, b) in enumerate(own) if a <= begin < b)
                names[tensor] = order[first]
    return sorted(names, key=lambda name: names[name])


def layers_of(names: list[str]) -> set[int]:
    return {int(name.split(".")[2]) for name in names if ".layers." in name}


def test_a_rank_alone_reads_every_tensor_once(folder: pathlib.Path) -> None:
    pieces = pieces_of(config(folder), FIRST, ALL)
    assert layers_of(tensors_in(pieces, folder)) == set(range(5))
    weights = sum(
        path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
        for path in folder.glob("*.safetensors")
    )
    assert sum(size for _, _, size in pieces) == weights


def test_a_stage_reads_its_layers_and_tables(folder: pathlib.Path) -> None:
    tied = "lm_head.weight" not in tensors_in(pieces_of(config(folder), FIRST, ALL), folder)
    first, last = (
        tensors_in(pieces_of(config(folder, spp=2), at, ALL), folder) for at in (FIRST, LAST)
    )
    assert layers_of(first) == {0, 1, 2} and layers_of(last) == {3, 4}
    assert "model.embed_tokens.weight" in first and "model.norm.weight" in last
    assert ("model.embed_tokens.weight" in last) == tied
    assert ("lm_head.weight" in last) == (not tied) and "lm_head.weight" not in first
    assert "model.norm.weight" not in first


def test_what_memory_does_not_hold_is_left_out_from_the_end(folder: pathlib.Path) -> None:
    whole = pieces_of(config(folder), FIRST, ALL)
    assert pieces_of(config(folder), FIRST, whole[0][2] + 1)[0] == whole[0]
    part = pieces_of(config(folder), FIRST, whole[0][2])
    assert part == whole[:1] and pieces_of(config(folder), FIRST, 0) == []


def test_large_tensors_are_read_in_pieces(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pieces_of(config(folder), FIRST, ALL)
    monkeypatch.setattr(module, "PIECE_BYTES", 10_000)
    cut = pieces_of(config(folder), FIRST, ALL)
    assert max(size for _, _, size in cut) == 10_000
    assert sum(size for _, _, size in cut) == sum(size for _, _, size in whole)


def test_pieces_are_really_read(folder: pathlib.Path) -> None:
    counters = pathlib.Path("/proc/self/io")
    before = int(counters.read_text().split()[1])
    read_ahead(config(folder), FIRST).join(30.0)
    read = int(counters.read_text().split()[1]) - before
    assert read >= sum(size for _, _, size in pieces_of(config(folder), FIRST, ALL))


def test_faults_are_left_to_the_rank(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for place in (tmp_path / "absent", tmp_path):
        read_ahead(config(place), FIRST).join(30.0)
    dummy = msgspec.structs.replace(config(tmp_path), dummy_weights=True)
    assert pieces_of(dummy, FIRST, ALL) == []
    torn = tmp_path / "config.json"
    torn.write_text("{")
    for arguments in ([], ["--config", str(torn)], ["--config", "absent"], ["--stage", "x"]):
        read_weights_ahead(arguments)
