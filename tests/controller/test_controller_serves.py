"""Real controller, real ranks, a router's socket: tokens equal those of transformers."""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tests.support.replica_processes import LIMIT_S, ReplicaProcesses
from tests.support.solo_engine import SoloEngine
from transformers import AutoModelForCausalLM

from medha.config import Scheduling, WorkerConfig
from medha.messages import Sampling
from medha.scheduling.decision_log import replay
from medha.topology import Coordinate, Topology
from medha_router.structured.checker import grammar_of
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

Greedy = Callable[[list[int], int], list[int]]
NAMES = {
    "type": "array",
    "items": {"type": "string", "minLength": 30, "maxLength": 45},
    "minItems": 3,
    "maxItems": 3,
}
BOUND = Sampling(
    temperature=1.0,
    seed=11,
    stop_tokens=(1, 3),
    grammar=grammar_of("json_schema", json.dumps(NAMES)),
)


def decoded(checkpoint: pathlib.Path, tokens: list[int]) -> str:
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return str(tokenizer.decode(tokens))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), TinyModel(layers=4, hidden=64))


@pytest.fixture(scope="module")
def greedy(checkpoint: pathlib.Path) -> Greedy:
    """Generate with transformers."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def generate(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(count):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        return [int(token) for token in ids[0, len(prompt) :]]

    return generate


@pytest.fixture
def start(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> Iterator[Callable[..., ReplicaProcesses]]:
    with contextlib.ExitStack() as running:

        def begin(topology: Topology, *, kv_pages: int, **settings: Any) -> ReplicaProcesses:
            config = WorkerConfig(
                replica="r0",
                model="tiny",
                checkpoint=str(checkpoint),
                max_context_tokens=1024,
                topology=topology,
                page_tokens=16,
                kv_pages=kv_pages,
                scheduling=Scheduling(**settings),
                rank_bind="",
                decision_log=str(tmp_path / "decisions"),
                rank_timeout_s=12.0,  # importing torch on busy cores silences a rank
                collective_timeout_s=15.0,
            )
            fleet = ReplicaProcesses(tmp_path, config)
            running.callback(fleet.close)
            return fleet

        yield begin


def test_two_stages_stream_what_transformers_generates(
    start: Callable[..., ReplicaProcesses], greedy: Greedy, tmp_path: pathlib.Path
) -> None:
    prompts = {"a": [5, 9, 200, 31, 77], "b": list(range(1, 150)), "c": [3]}
    expected = {name: greedy(prompt, 12) for name, prompt in prompts.items()}
    fleet = start(Topology(spp=2), kv_pages=256)
    hello = fleet.until_ready()
    assert hello.model == "tiny" and "tokenizer.json" in hello.files and hello.profile
    for name, prompt in prompts.items():
        fleet.submit(name, prompt, 12)
    fleet.until_over()
    for name, tokens in expected.items():
        client = fleet.replies[name]
        assert client.tokens == tokens, client.failed
        assert client.finished is not None and client.finished.reason == "length"
    assert fleet.ask("/readyz") == b"ok\n"
    assert b'medha_batch_seconds_count{model="tiny"}' in fleet.ask("/metrics")
    fleet.ask("/drain", "POST")
    refused = fleet.submit("late", [1, 2], 1)
    fleet.until_over()
    assert refused.failed is not None and refused.failed.code == "draining"
    fleet.controller.terminate()
    assert fleet.controller.wait(LIMIT_S) == 0
    lines = (tmp_path / "decisions").read_bytes().splitlines()
    assert replay(lines) == len(lines) - 1 > 30


def test_a_group_joins_a_long_prompt_and_a_killed_one_costs_no_token(
    start: Callable[..., ReplicaProcesses], greedy: Greedy, checkpoint: pathlib.Path
) -> None:
    short, long = [7, 8, 9], [1 + i % 400 for i in range(380)]
    # Before the fleet starts: a router that computes sends no heartbeats and would be lost.
    expected = {"short": greedy(short, 100), "long": greedy(long, 100)}
    alone = SoloEngine(checkpoint, page_tokens=16, grammars=True)
    names = alone.answer(np.array(long, np.int32), BOUND, 200)
    assert len(json.loads(decoded(checkpoint, names))) == 3
    topology = Topology(kvp_min=1, kvp_max=2, tokens_per_group=192)
    fleet = start(topology, kv_pages=20, release_cooldown_s=300.0)
    fleet.until_ready()
    fleet.submit("short", short, 100)
    fleet.submit("long", long, 100)
    fleet.until_over()
    assert {name: client.tokens for name, client in fleet.replies.items()} == expected
    assert [group.state for group in fleet.status().groups] == ["running", "running"]

    bound = fleet.submit("bound", long, 200, BOUND)
    fleet.until_over()
    assert bound.tokens == names, bound.failed
    again = fleet.submit("again", long, 200, BOUND)
    ends_s = time.monotonic() + LIMIT_S
    while len(again.tokens) < 20:
        fleet.turn(0.02)
        assert time.monotonic() < ends_s, f"no token comes:\n{fleet.text}"
    fleet.ranks[Coordinate(1, 0, 0)].kill()
    fleet.until_over()
    assert again.tokens == names, again.failed
    assert fleet.status().generation > 2, "the group was not lost: the test shows nothing"
