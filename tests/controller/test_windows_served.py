"""Windows in every layer, in real processes: layouts stream what transformers generates."""

from __future__ import annotations

import contextlib
import pathlib

import pytest
import torch
from tests.support.recalling_prompts import recalling
from tests.support.replica_processes import ReplicaProcesses
from transformers import AutoModelForCausalLM

from medha.config import Scheduling, WorkerConfig
from medha.model import KeptPages
from medha.topology import Topology
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

WINDOW, PAGE, OUTPUTS = 48, 16, 120


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    model = TinyModel(family="mistral", window=WINDOW, layers=4, hidden=64)
    return write_checkpoint(tmp_path_factory.mktemp("model"), model)


@pytest.mark.parametrize(
    "topology",
    [
        Topology(tp=2),
        Topology(spp=2),
        Topology(kvp_min=2, kvp_max=2, tokens_per_group=64),
    ],
    ids=["TP 2", "SPP 2", "KVP 2"],
)
def test_a_pool_shorter_than_its_contexts_streams_what_transformers_generates(
    topology: Topology, checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Pages of 400 tokens in a group, and prompts of up to 900."""
    prompts = {f"r{n}": recalling(n, 512, seed=n).tolist() for n in (1, 47, 49, 300, 900)}
    config = WorkerConfig(
        replica="r0",
        model="tiny",
        checkpoint=str(checkpoint),
        max_context_tokens=2048,
        topology=topology,
        page_tokens=PAGE,
        kv_pages=25,
        scheduling=Scheduling(long_prefill_threshold_tokens=96),
        rank_bind="",
        rank_timeout_s=12.0,
        collective_timeout_s=15.0,
    )
    assert KeptPages(WINDOW, PAGE).least(2048) < 25 < KeptPages(WINDOW, PAGE).pages(2048)
    with contextlib.closing(ReplicaProcesses(tmp_path, config)) as fleet:
        fleet.until_ready()
        for name, prompt in prompts.items():
            fleet.submit(name, prompt, OUTPUTS)
        fleet.until_over()
        replies = {name: fleet.replies[name] for name in prompts}
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for name, prompt in prompts.items():
        tokens = replies[name].tokens
        assert len(tokens) == OUTPUTS, replies[name].failed
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.inference_mode():
            expected = model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        assert tokens == expected, name
