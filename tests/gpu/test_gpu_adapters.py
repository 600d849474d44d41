"""LoRA adapters on a GPU: mixed batches, between batches that replay graphs."""

from __future__ import annotations

import pathlib

import pytest
import torch
from tests.gpu.models import CUTS, GRAPHS, MODELS, OFF, PROMPT, exact, off, prompt, written
from tests.support.adapter_writer import merge, write_adapter
from tests.support.solo_engine import SoloEngine

from medha_worker.device import device_of
from medha_worker.graphs import CudaGraphRecorder

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.kernels(64, 128),
]
# Lengths of the steps of every sequence, side by side.
STEPS = (300, 300, 60, 37, 1, 1, 1)


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe"])
def test_rows_of_adapters_and_of_none_are_those_of_float32(
    name: str, recorded: bool, tmp_path: pathlib.Path
) -> None:
    model = MODELS[name]
    base = written(model, tmp_path / "model")
    folders = {
        "legal": write_adapter(base, tmp_path / "legal", seed=1),
        "poems": write_adapter(base, tmp_path / "poems", seed=2, rank=3, targets=("q_proj",)),
    }
    plain = {"": base} | {
        adapter: merge(base, folder, tmp_path / f"{adapter}-merged")
        for adapter, folder in folders.items()
    }
    engine = SoloEngine(
        base, pages=64, dtype=torch.bfloat16, device=device_of("cuda"), adapters=folders
    )
    if recorded:
        engine.record(CudaGraphRecorder(), GRAPHS, CUTS)
    batch = ["legal", "", "poems", "legal"]
    for seq, adapter in enumerate(batch):
        engine.start(seq, prompt(model, seed=seq), adapter=adapter)
    assert sum(STEPS) == PROMPT
    steps = [engine.step(*((seq, length) for seq in range(4))) for length in STEPS]
    for seq, adapter in enumerate(batch):
        rows = [torch.chunk(step.float().cpu(), 4)[seq] for step in steps]
        assert off(torch.cat(rows), exact(plain[adapter], prompt(model, seed=seq))) < OFF
