"""The device as the loop sees it: what crosses, and when anything waits."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from medha.batch import Batch, Chunk
from medha.config import WorkerConfig
from medha.errors import SetupError
from medha.messages import BatchTokens, Sampling, SequenceStart, StageDone, Step, to_bytes
from medha.topology import Coordinate, Topology
from medha_worker import sampler
from medha_worker.device import (
    CpuDevice,
    PendingFetch,
    block_bytes,
    device_of,
    pack,
    sum_exactly,
    unpack,
)
from medha_worker.engine import RankEngine
from medha_worker.model.checkpoint_writer import TinyModel
from medha_worker.model.layers import FusedArithmetic, Linear, TorchArithmetic, linear
from medha_worker.parallel.mesh import Mesh, Wiring
from medha_worker.runner import Runner

KINDS = (np.int64, np.int32, np.float32, np.float64, np.bool_)


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.integers(1, 3))))
def test_arrays_come_out_of_a_block_as_they_went_in(parts: list[tuple[Any, int, int]]) -> None:
    arrays = [np.arange(n * m).reshape(n, m).astype(kind) for kind, n, m in parts]
    block = torch.empty(block_bytes(arrays), dtype=torch.uint8)
    pack(arrays, block)
    for array, actual in zip(arrays, unpack(arrays, block), strict=True):
        assert np.array_equal(actual.numpy(), array) and actual.numpy().dtype == array.dtype


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_named_with_a_remedy() -> None:
    with pytest.raises(SetupError, match=r"device is cuda: torch finds no GPU .* set device to"):
        device_of("cuda")
    with pytest.raises(SetupError, match="device is tpu: must be cpu or cuda"):
        device_of("tpu")


class Late(CpuDevice):
    """A device whose results are ready only once `wait` is called."""

    def __init__(self) -> None:
        self.waits = 0

    def fetch(self, *tensors: torch.Tensor) -> PendingFetch:
        return _LateResult(self, tensors)


class _LateResult:
    def __init__(self, device: Late, tensors: tuple[torch.Tensor, ...]) -> None:
        self.ready, self._device, self._tensors = False, device, tensors

    def wait(self, timeout_s: float | None = None) -> tuple[torch.Tensor, ...]:
        if not self.ready:
            self._device.waits += 1
        self.ready = True
        return self._tensors


class NothingRead(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what makes the host wait for a GPU: reading a value, or a count of true ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        indices = args[1] if name.startswith(("aten.index.", "aten.index_put")) else ()
        masks = any(index is not None and index.dtype == torch.bool for index in indices)
        if masks or "_local_scalar_dense" in name or "nonzero" in name:
            raise AssertionError(f"{name} reads back")
        return func(*args, **(kwargs or {}))


def runner_of(folder: pathlib.Path, device: CpuDevice) -> Runner:
    config = WorkerConfig(
        replica="r",
        model="m",
        checkpoint=str(folder),
        max_context_tokens=256,
        topology=Topology(),
        page_tokens=16,
        kv_pages=64,
        rank_bind="ipc://unused",
    )
    at = Coordinate(0, 0, 0)
    engine = RankEngine(config, at, device, lambda *_: None)
    mesh = Mesh(at, Topology(), incarnation="a", interface="lo", timeout_s=1.0)
    return engine.runner(Wiring(None, None), mesh, sampler.draw)


SETTINGS = (
    Sampling(temperature=0.0, logprobs=2),
    Sampling(temperature=0.8, top_p=0.9, seed=3),
    Sampling(temperature=1.0, top_k=7, min_p=0.01, seed=4, logit_bias={5: 1.0}),
    Sampling(temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.2),
)


def steps(count: int, settings: tuple[Sampling, ...] = SETTINGS) -> list[Step]:
    """Prompts of five tokens in a batch, then decodes of whatever was drawn."""
    seqs = range(len(settings))
    prompts = np.arange(5 * len(settings), dtype=np.int64) + 3
    starts = tuple(
        SequenceStart(s, settings[s], 5, history=to_bytes(prompts[5 * s : 5 * s + 5])) for s in seqs
    )
    chunks = tuple(Chunk(s, 0, 5, (0,), 0, (s,), yields=True) for s in seqs)
    steps = [Step(step=1, batch=Batch(1, 0, chunks), tokens=to_bytes(prompts), starts=starts)]
    for number in range(2, count + 1):
        decodes = tuple(Chunk(s, 3 + number, 1, (0,), 0, (), True, True) for s in seqs)
        minus = to_bytes(np.full(len(settings), -1))
        steps.append(Step(step=number, batch=Batch(number, 0, decodes), tokens=minus))
    return steps


def told(reports: list[Any]) -> list[int]:
    assert isinstance(reports[-1], StageDone)
    return [out.token for r in reports if isinstance(r, BatchTokens) for out in r.tokens]


@pytest.fixture
def folder(checkpoint: Any) -> pathlib.Path:
    path: pathlib.Path = checkpoint(TinyModel())
    return path


def test_a_step_is_begun_without_reading_anything_back(folder: pathlib.Path) -> None:
    device = Late()
    runner = runner_of(folder, device)
    with NothingRead():  # type: ignore[no-untyped-call]
        in_flight = [runner.begin(step) for step in steps(6)]
    assert device.waits == 0
    assert not any(launched.ready for launched in in_flight)
    tokens = [told(runner.finish(launched)) for launched in in_flight]
    assert device.waits == 6, "one wait for each batch"
    plain = runner_of(folder, CpuDevice())
    assert tokens == [told(plain.run(step)) for step in steps(6)]


def test_results_that_are_ready_are_not_waited_for(folder: pathlib.Path) -> None:
    runner = runner_of(folder, CpuDevice())
    assert runner.begin(steps(1)[0]).ready


def test_a_batch_of_decodes_uploads_its_rows_and_its_settings_at_once(folder: pathlib.Path) -> None:
    class Counting(CpuDevice):
        def upload(self, *arrays: Any) -> list[torch.Tensor]:
            uploads.append(len(arrays))
            return super().upload(*arrays)

    uploads: list[int] = []
    runner = runner_of(folder, Counting())
    greedy = (Sampling(temperature=0.0), Sampling(temperature=0.0, stop_tokens=(2,)))
    for step in steps(3, greedy):
        uploads.clear()
        runner.run(step)
    assert uploads == [1, 1]


class PlainLibrary:
    """The library's functions that arithmetic uses, in plain torch, by its documentation."""

    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    def silu_and_mul(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def apply_rope_with_cos_sin_cache_inplace(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        head_size: int,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
    ) -> None:
        assert not is_neox, "pairs stand side by side"
        cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
        for rows in (query, key):
            pairs = rows.view(len(rows), -1, head_size // 2, 2)
            even, odd = pairs.unbind(-1)
            turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
            pairs.copy_(turned)


def test_the_librarys_arithmetic_means_what_plain_torch_does() -> None:
    dice = torch.Generator().manual_seed(1)
    plain = TorchArithmetic(1e-5)
    fused = FusedArithmetic(PlainLibrary(), 1e-5, "cpu")  # type: ignore[arg-type]
    x = torch.randn(300, 64, generator=dice)
    weight = torch.rand(64, generator=dice)
    torch.testing.assert_close(fused.norm(x, weight), plain.norm(x, weight))
    by_head = torch.randn(300, 6, 16, generator=dice), torch.rand(6, 16, generator=dice)
    torch.testing.assert_close(fused.norm(*by_head), plain.norm(*by_head))
    gate_up = Linear(torch.randn(64, 96, generator=dice), torch.randn(96, generator=dice))
    torch.testing.assert_close(fused.gated(gate_up, x), plain.gated(gate_up, x))
    angles = torch.rand(300, 1, 8, generator=dice) * 6.0
    qkv = torch.randn(300, 8, 16, generator=dice)
    rotated = []
    for arithmetic in (plain, fused):
        mine = qkv.clone()
        arithmetic.rotate(mine[:, :6], 4, arithmetic.turns(angles.cos(), angles.sin()))
        rotated.append(mine)
    torch.testing.assert_close(rotated[1], rotated[0])
    assert torch.equal(rotated[1][:, 6:], qkv[:, 6:])


def test_row_numbers_stay_where_graphs_found_them() -> None:
    """A graph reads them by address, whatever larger batches came after it was recorded."""
    seen: list[tuple[int, int]] = []

    class Noted(PlainLibrary):
        def apply_rope_with_cos_sin_cache_inplace(
            self, positions: torch.Tensor, *tensors: Any, **more: Any
        ) -> None:
            assert torch.equal(positions, torch.arange(len(positions)))
            seen.append((len(positions), positions.data_ptr()))
            super().apply_rope_with_cos_sin_cache_inplace(positions, *tensors, **more)

    fused = FusedArithmetic(Noted(), 1e-5, "cpu")  # type: ignore[arg-type]
    for rows in (8, 256, 300, 5000, 600, 300, 256, 8):
        angles = torch.rand(rows, 1, 4)
        fused.rotate(torch.ones(rows, 3, 8), 2, fused.turns(angles, angles))
    at = dict(seen)
    assert len(seen) == 8 and all(at[rows] == address for rows, address in seen)


def test_a_gpus_weights_keep_the_checkpoints_layout() -> None:
    weight = torch.empty(1024, 8, device="meta")
    product = linear(weight)
    assert isinstance(product, Linear) and product.weight.shape == (8, 1024)
    assert product.by_output().is_contiguous()


def test_only_the_backend_that_can_forbids_split_products() -> None:
    """Torch refuses every product in 16 bits otherwise, at the first one."""
    products = torch.backends.cuda.matmul
    before = (
        torch.backends.cuda.preferred_blas_library(),
        products.allow_bf16_reduced_precision_reduction_split_k,
    )
    try:
        sum_exactly(deterministic=False)
        assert products.allow_bf16_reduced_precision_reduction_split_k
        sum_exactly(deterministic=True)
        assert not products.allow_bf16_reduced_precision_reduction_split_k
        chosen = torch.backends.cuda.preferred_blas_library()
        assert chosen == torch._C._BlasBackend.Cublaslt
    finally:
        torch.backends.cuda.preferred_blas_library(before[0])
        sum_exactly(deterministic=not before[1])
