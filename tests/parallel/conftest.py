"""Real rank processes for these tests: one fork server, one checkpoint, one oracle for all."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.support.adapter_writer import merge, write_adapter
from tests.support.quantiser import FORMATS, quantise
from tests.support.rank_rig import ForkServer, Rig

from medha.config import AdapterFolder, WorkerConfig
from medha.topology import Topology
from medha_worker.model.checkpoint_writer import FAMILIES, TinyModel, write_checkpoint

PAGE_TOKENS = 16
PAGES = 700
MODEL = TinyModel()

Oracle = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.float32]]
# The folder of a family's checkpoint, and transformers' logits for it.
Families = Callable[[str], tuple[pathlib.Path, Oracle]]
# The same for a format of packed weights, of a dense model or of that family.
Formats = Callable[..., tuple[pathlib.Path, Oracle]]
MakeRig = Callable[..., Rig]
# A base checkpoint of that format ("": plain), its adapters, and the oracle of each.
Adapted = Callable[[str], tuple[pathlib.Path, tuple[AdapterFolder, ...], dict[str, Oracle]]]
ADAPTERS: dict[str, dict[str, Any]] = {
    "legal": {"rank": 8, "seed": 1},
    "poems": {"rank": 3, "seed": 2, "targets": ("q_proj", "v_proj", "down_proj")},
}


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), MODEL)


@pytest.fixture(scope="session")
def oracle(checkpoint: pathlib.Path) -> Oracle:
    return oracle_of(checkpoint)


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    """Created at first use."""

    @functools.cache
    def made(name: str) -> tuple[pathlib.Path, Oracle]:
        folder = write_checkpoint(tmp_path_factory.mktemp("family"), FAMILIES[name])
        return folder, oracle_of(folder)

    return made


@pytest.fixture(scope="session")
def formats(tmp_path_factory: pytest.TempPathFactory) -> Formats:
    """Folders of packed checkpoints; the oracle has the weights that they stand for."""

    @functools.cache
    def made(name: str, family: str = "") -> tuple[pathlib.Path, Oracle]:
        model = FAMILIES[family] if family else TinyModel(intermediate=384)
        checkpoint = write_checkpoint(tmp_path_factory.mktemp("model"), model)
        target = tmp_path_factory.mktemp("format")
        packed, plain = quantise(checkpoint, target, FORMATS[name])
        return packed, oracle_of(plain)

    return made


@pytest.fixture(scope="session")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """Created at first use, over a plain or a packed checkpoint."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("model"), TinyModel(intermediate=384))

    @functools.cache
    def made(name: str) -> tuple[pathlib.Path, tuple[AdapterFolder, ...], dict[str, Oracle]]:
        target = tmp_path_factory.mktemp("adapted")
        base = plain = checkpoint
        if name:
            base, plain = quantise(checkpoint, target, FORMATS[name])
        oracles = {"": oracle_of(plain)}
        folders = []
        for adapter, settings in ADAPTERS.items():
            folder = write_adapter(plain, target / adapter, **settings)
            folders.append(AdapterFolder(name=adapter, folder=str(folder)))
            oracles[adapter] = oracle_of(merge(plain, folder, target / f"{adapter}-merged"))
        return base, tuple(folders), oracles

    return made


def oracle_of(checkpoint: pathlib.Path) -> Oracle:
    """Logits [tokens, vocab] of transformers, float32, over a whole sequence at once."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def logits(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            out = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
        return np.asarray(out.numpy(), dtype=np.float32)

    return logits


@pytest.fixture
def make_rig(
    fork_server: ForkServer, checkpoint: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeRig]:
    """Rigs whose ranks end with the test."""
    rigs: list[Rig] = []

    def make(tp: int = 1, spp: int = 1, kvp: int = 1, change: str = "", **more: object) -> Rig:
        settings: dict[str, object] = {
            "replica": "r",
            "model": "tiny",
            "checkpoint": str(checkpoint),
            "max_context_tokens": 8192,
            "topology": Topology(tp=tp, spp=spp, kvp_max=kvp),
            "kv_pages": PAGES,
            "page_tokens": PAGE_TOKENS,
            "rank_bind": "ipc://set-by-the-rig",
            "log_level": "warning",
            **more,
        }
        config = WorkerConfig(**settings)  # type: ignore[arg-type]
        folder = tmp_path_factory.mktemp("r")
        rigs.append(Rig(config, folder, fork_server, vocab=MODEL.vocab, change=change))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
