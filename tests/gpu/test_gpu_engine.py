"""The loop of a rank on a real GPU: what crosses, what is replayed, and that it means the same.

Run when named: python -m pytest tests/gpu
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.support.served import Served, Wish

from medha.batch import Chunk
from medha.messages import Sampling, Step
from medha.profile import H200
from medha_worker import sampler
from medha_worker.attention.kernel_interface import Span
from medha_worker.device import CPU, ComputeDevice, device_of
from medha_worker.graphs import CudaGraphRecorder
from medha_worker.inputs import StepInputs, WholeBatch
from medha_worker.kv.pages import KvPages
from medha_worker.model.checkpoint_writer import TinyModel, write_config
from medha_worker.parallel.collectives import KvpColumn, SoloColumn
from medha_worker.piecewise_graphs import SIZES, PiecewiseGraphs
from medha_worker.runner import LaunchedBatch
from medha_worker.sampler import SampledRow

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.kernels(64),
]

MODEL = TinyModel(
    layers=4,
    hidden=512,
    heads=8,
    kv_heads=2,
    head_dim=64,
    intermediate=1408,
    vocab=4096,
    max_tokens=65_536,
)


@pytest.fixture(scope="module")
def device() -> ComputeDevice:
    return device_of("cuda")


@pytest.fixture(scope="module")
def served(device: ComputeDevice, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder: pathlib.Path = tmp_path_factory.mktemp("shape")
    write_config(folder, MODEL)
    return Served(folder, device, profile=H200, pages=1024)


def test_arrays_cross_as_they_are_and_come_back(device: ComputeDevice) -> None:
    arrays: list[npt.NDArray[Any]] = [
        np.arange(7),
        np.linspace(0, 1, 5),
        np.ones((3, 2), np.float32),
        np.empty(0, np.int64),
    ]
    there = device.upload(*arrays)
    assert all(tensor.is_cuda for tensor in there)
    for array, here in zip(arrays, device.fetch(*there).wait(), strict=True):
        assert np.array_equal(here.numpy(), array)


def test_a_pinned_block_is_not_filled_again_before_it_has_left(device: ComputeDevice) -> None:
    # The copies wait behind this.
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    there = [device.upload(np.full(1 << 16, number))[0] for number in range(64)]
    for number, tensor in enumerate(there):
        (here,) = device.fetch(tensor).wait()
        assert bool((here == number).all())


def test_the_same_tokens_are_drawn_as_on_a_cpu(device: ComputeDevice) -> None:
    logits = torch.randn(40, 1000, generator=torch.Generator().manual_seed(2)) * 3
    draws = [
        SampledRow(
            Sampling(
                temperature=0.7 * (i % 3),
                top_k=20 * (i % 2),
                top_p=0.9,
                min_p=0.01,
                seed=i,
                logprobs=i % 4,
            ),
            10 + i,
            0,
        )
        for i in range(40)
    ]
    ours = sampler.sample(logits.to(device.at), draws, device)
    theirs = sampler.sample(logits, draws, CPU)
    assert [token for token, _ in ours] == [token for token, _ in theirs]


class Both:
    """Runs a batch launch by launch, then replays it, and keeps the logits of both."""

    def __init__(
        self, served: Served, graph: WholeBatch, spans: Mapping[int, Sequence[Span]]
    ) -> None:
        self.served, self.graph = served, graph
        attention = served.runner._inputs.attention
        self.plans = {window: attention.plan(those) for window, those in spans.items()}
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self, rows: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        pieces = self.served.runner._model
        assert isinstance(pieces, PiecewiseGraphs)
        model = pieces.model  # launched kernel by kernel, whatever the pieces hold
        plain = dataclasses.replace(inputs, whole=None, attention=dict(self.plans))
        hidden = model.forward(rows.clone(), plain, self.served.engine.kv, SoloColumn())
        launched = model.logits(hidden).clone()
        replayed = self.graph.run(rows, inputs)
        self.seen.append((launched, replayed.clone()))
        return replayed


def test_replayed_decodes_are_what_launched_ones_are(served: Served) -> None:
    inputs, batches = served.runner._inputs, list[Both]()
    choose = inputs.choose

    def both(chunks: Sequence[Chunk], spans: Mapping[int, Sequence[Span]]) -> WholeBatch | None:
        graph = choose(chunks, spans)
        if graph is not None:
            batches.append(Both(served, graph, spans))
            return batches[-1]
        return None

    inputs.choose = both
    served.play([Wish(prompt_tokens=100 * n, output_tokens=3 * n) for n in range(1, 8)])
    inputs.choose = choose
    assert batches and all(batch.seen for batch in batches)
    for launched, replayed in (pair for batch in batches for pair in batch.seen):
        torch.testing.assert_close(replayed, launched, rtol=0.05, atol=0.1)


class Twice:
    """Launches each batch, then runs it in pieces, and keeps the hidden states of both."""

    def __init__(self, pieces: PiecewiseGraphs) -> None:
        self.pieces, self.seen = pieces, list[tuple[torch.Tensor, torch.Tensor]]()

    def forward(
        self, x: torch.Tensor, inputs: StepInputs, kv: KvPages, column: KvpColumn
    ) -> torch.Tensor:
        launched = self.pieces.model.forward(x, inputs, kv, column).clone()
        actual = self.pieces.forward(x, inputs, kv, column)
        if inputs.rows <= self.pieces.largest:
            self.seen.append((launched, actual.clone()))
        return actual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.pieces.logits(hidden)


def test_batches_in_pieces_are_what_launched_ones_are(served: Served) -> None:
    pieces = served.runner._model
    assert isinstance(pieces, PiecewiseGraphs) and pieces.largest == SIZES[-1]
    twice = Twice(pieces)
    served.runner._model = twice  # type: ignore[assignment]
    for n in range(1, 12):  # two prompts in one batch, then their decodes
        served.play(
            [Wish(prompt_tokens=37 * n, output_tokens=3), Wish(prompt_tokens=5, output_tokens=9)]
        )
    served.runner._model = pieces
    assert {len(launched) for launched, _ in twice.seen} >= {37 * n + 5 for n in range(1, 12)}
    for launched, actual in twice.seen:
        torch.testing.assert_close(actual, launched, rtol=0.05, atol=0.1)


def test_recordings_share_one_stream_and_so_one_workspace_of_products(
    device: ComputeDevice,
) -> None:
    record = CudaGraphRecorder()
    with torch.inference_mode():
        x = torch.randn(64, 1024, device=device.at, dtype=torch.bfloat16)
        record(lambda: x @ x.t())
        before = torch.cuda.memory_reserved()
        for _ in range(40):
            record(lambda: x @ x.t())
    assert torch.cuda.memory_reserved() - before < 100 << 20


def test_a_batch_is_launched_while_another_runs(served: Served) -> None:
    begin, behind = served.runner.begin, list[bool]()

    def noted(step: Step) -> LaunchedBatch:
        behind.append(any(r.launched and not r.launched.ready for r in served._running))
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # 10 ms: slower than any host
        return begin(step)

    served.runner.begin = noted  # type: ignore[method-assign]
    served.play([Wish(prompt_tokens=50, output_tokens=60)] * 8)
    del served.runner.begin
    assert sum(behind) > 40


def test_many_requests_of_all_sizes_are_served_to_the_end(served: Served) -> None:
    dice = np.random.default_rng(0)
    wishes = [
        Wish(
            prompt_tokens=int(dice.integers(1, 2000)),
            output_tokens=int(dice.integers(1, 60)),
            arrival_s=float(dice.uniform(0, 0.5)),
        )
        for _ in range(60)
    ]
    for story in served.play(wishes):
        assert len(story.token_s) == story.wish.output_tokens
