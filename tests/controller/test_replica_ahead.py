"""Real processes one step ahead: clients read what a single engine samples, byte for byte."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from tests.support.recalling_prompts import recalling
from tests.support.replica_processes import ReplicaProcesses
from tests.support.solo_engine import SoloEngine

from medha.batch import Batch
from medha.config import Scheduling, WorkerConfig
from medha.messages import Sampling
from medha.profile import CPU_CORE, encode
from medha.scheduling.decision_log import replay
from medha.topology import Topology
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

MODEL = TinyModel(layers=2, hidden=64, max_tokens=2048)
OUTPUTS = 24
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, seed=7, top_p=0.9),
    Sampling(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4),
    Sampling(temperature=0.9, seed=3, presence_penalty=0.8, logprobs=3),
    Sampling(temperature=1.1, seed=11, logit_bias={9: 3.0}),
)
PROMPTS = [recalling(length, MODEL.vocab, length).tolist() for length in (1, 15, 33, 130, 500)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), MODEL)


@pytest.fixture(scope="module")
def expected(folder: pathlib.Path) -> dict[str, tuple[list[int], Sampling]]:
    """Answer and sampling of each request; the last kind stops at a token of its own answer."""
    engine, answers = SoloEngine(folder, page_tokens=16), dict[str, tuple[list[int], Sampling]]()
    for number, prompt in enumerate(PROMPTS):
        for kind, sampling in enumerate(SAMPLINGS):
            tokens = alone(engine, prompt, sampling)
            if sampling.logit_bias:
                sampling = msgspec.structs.replace(sampling, stop_tokens=(tokens[9 + number],))
                tokens = tokens[: tokens.index(tokens[9 + number]) + 1]
            answers[f"r{10 * number + kind}"] = tokens, sampling
    return answers


def alone(engine: SoloEngine, prompt: list[int], sampling: Sampling) -> list[int]:
    engine.start(1, np.array(prompt), sampling, rope_tokens=len(prompt) + OUTPUTS)
    tokens = [engine.sample((1, len(prompt)))[0][0]]
    tokens += [engine.sample((1, 1))[0][0] for _ in range(OUTPUTS - 1)]
    engine.end(1)
    return tokens


@pytest.fixture(params=["shards", "groups"])
def fleet(
    request: pytest.FixtureRequest, folder: pathlib.Path, tmp_path: pathlib.Path
) -> Iterator[ReplicaProcesses]:
    """Two shards; or one group that the longest prompts outgrow, so that another joins."""
    grows = Topology(kvp_min=1, kvp_max=2, tokens_per_group=256)
    config = WorkerConfig(
        replica="r0",
        model="tiny",
        checkpoint=str(folder),
        max_context_tokens=1024,
        topology=Topology(tp=2) if request.param == "shards" else grows,
        page_tokens=16,
        kv_pages=64,
        scheduling=Scheduling(ahead_s=0.05),
        rank_bind="",
        rank_timeout_s=60.0,
        decision_log=str(tmp_path / "decisions"),
        profile=str(tmp_path / "profile"),
    )
    (tmp_path / "profile").write_bytes(encode(CPU_CORE))
    with contextlib.closing(ReplicaProcesses(tmp_path, config)) as running:
        yield running


@pytest.mark.timeout(500)
def test_a_replica_one_step_ahead_answers_as_an_engine_alone(
    fleet: ReplicaProcesses, expected: dict[str, tuple[list[int], Sampling]]
) -> None:
    fleet.until_ready()
    prompts = {f"r{10 * n + kind}": PROMPTS[n] for n in range(5) for kind in range(5)}
    for name, (_, sampling) in expected.items():
        fleet.submit(name, prompts[name], OUTPUTS, sampling)
    fleet.submit("leaves", PROMPTS[3], 400)
    while not fleet.replies["leaves"].tokens:
        fleet.turn(0.05)
    fleet.abort("leaves")
    fleet.until_over()
    wrong = [name for name, (tokens, _) in expected.items() if fleet.replies[name].tokens != tokens]
    assert wrong == []
    assert all(client.finished is not None for client in fleet.replies.values())
    written = pathlib.Path(fleet.config.decision_log).read_bytes()
    lines = written.rpartition(b"\n")[0].splitlines()  # it writes on, perhaps just now
    assert replay(lines) == len(lines) - 1
    assert decided_ahead(lines) > 5  # as many as a busy machine leaves time for


def decided_ahead(lines: list[bytes]) -> int:
    """Batches that were decided while another ran in one of their groups."""
    running: dict[int, set[int]] = {}
    count = 0
    for call in map(msgspec.json.decode, lines[1:]):
        if call["call"] == "complete":
            running.pop(call["args"][0])
        elif call["call"] == "next_batch" and call["outcome"] is not None:
            batch = msgspec.convert(call["outcome"], Batch)
            count += any(not groups.isdisjoint(batch.groups) for groups in running.values())
            running[batch.number] = set(batch.groups)
    return count
