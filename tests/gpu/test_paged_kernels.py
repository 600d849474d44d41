"""Every path of the CUDA backend against attention in float32, over poisoned memory.

Kernels are compiled first, in one build for all tests that are chosen (see conftest.py).
"""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest
import torch
from benchmarks import gpu_kernels
from benchmarks.gpu_kernels import LONG, SINGLES
from tests.support.paged_case import (
    CASES,
    EXACT,
    Case,
    Laid,
    Work,
    difference,
    lay,
    limit,
    poison,
)

from medha.batch import Chunk
from medha.checkpoints.decoder_config import read_config
from medha_worker import flashinfer, weights
from medha_worker.attention.backend import attention_for
from medha_worker.attention.fp8_scales import FP8
from medha_worker.attention.graph_decode import GraphDecodes
from medha_worker.attention.kernel_interface import Partial, Span
from medha_worker.attention.paged import PagedAttention
from medha_worker.inputs import seen
from medha_worker.kv.pages import KvPages
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint
from medha_worker.sequences import PageTable

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="a CUDA device is needed, and none is here"
    ),
    pytest.mark.kernels(128),
]


def attention(
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    kv_dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False,
) -> PagedAttention:
    actual = attention_for(
        heads,
        kv_heads,
        head_dim,
        64,
        torch.bfloat16,
        kv_dtype,
        "cuda",
        deterministic=deterministic,
    )
    assert isinstance(actual, PagedAttention)
    return actual


def run(laid: Laid, on: PagedAttention) -> Partial:
    plan = on.plan(laid.spans)
    poison(on.device)
    return plan.run(laid.q, laid.k, laid.v, laid.pool, laid.scales)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_states_are_those_of_attention_in_float32(case: Case, kv_dtype: torch.dtype) -> None:
    on = attention(kv_dtype=kv_dtype)
    laid = lay(case, on.geometry, on.device)
    assert difference(run(laid, on), laid.expected(on.geometry)).within(limit(case, on.geometry))


@pytest.mark.parametrize("case", [*LONG, *SINGLES], ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_sums_over_a_million_keys_and_rows_in_graphs_are_exact(case: Case, name: str) -> None:
    singles = case in SINGLES
    for how in ("tensor cores", "a graph") if singles else ("",):
        row = gpu_kernels.off(name, case, how)
        assert row.met, f"{row.what}: {row.note}"


@pytest.mark.kernels(64, 256)
@pytest.mark.parametrize(
    "shape", [(28, 4, 128), (8, 8, 64), (8, 4, 256)], ids=["groups of 7", "no groups", "wide heads"]
)
def test_heads_of_other_shapes_have_kernels_too(shape: tuple[int, int, int]) -> None:
    on = attention(*shape)
    works = (Work(9000, 1), Work(120_000, 33), Work(70, 1), Work(0, 65), Work(64 * 90, 20, False))
    laid = lay(Case("", works), on.geometry, on.device)
    assert difference(run(laid, on), laid.expected(on.geometry)).within(EXACT)


@pytest.mark.parametrize("window", [0, 1024])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_a_deterministic_batch_gives_a_row_the_same_bits_in_any_chunk_beside_any_others(
    kv_dtype: torch.dtype, window: int
) -> None:
    """The last rows of 70,000 in one chunk, then in others and as decodes, among strangers."""
    on = attention(kv_dtype=kv_dtype, deterministic=True)
    tokens, last = 70_000, 300
    case = Case("", (Work(tokens - last, last), Work(900, 1), Work(40, 70)), window)
    laid = lay(case, on.geometry, on.device)
    on.spare = len(laid.pool) - 1
    whole = run(laid, on)
    assert difference(whole, laid.expected(on.geometry)).within(limit(case, on.geometry))
    pages, own = laid.spans[0].pages, slice(0, last)
    logical = laid.spans[0].sight.logical if laid.spans[0].sight else np.arange(len(pages))
    for sizes in ((1, 31, 64, 4, 200), (299, 1), (150, 150)):
        start = tokens - last
        for number, size in enumerate(sizes):
            at = start - (tokens - last)
            held = start - int(logical[0]) * 64
            count = -(-(held + size) // 64)
            there = Span(at, size, held, pages[:count], True)
            table = PageTable(zip(logical[:count].tolist(), pages.tolist(), strict=False))
            chunk = Chunk(0, start, size, (0,), 0)
            mine = seen(there, chunk, table, window, 64, always=True)
            beside = laid.spans[1:] if number % 2 else []
            actual = run(dataclasses.replace(laid, spans=[mine, *beside]), on)
            for these, those in ((actual.out, whole.out), (actual.lse, whole.lse)):
                assert torch.equal(these[own][at : at + size], those[own][at : at + size])
            start += size


def test_pages_beyond_two_billion_numbers_of_a_layer_are_found() -> None:
    """Numbers of a layer are counted in 64 bits: 20,000 pages of 8 heads hold 2.6 · 10⁹."""
    on = attention()
    laid = lay(Case("", (Work(3000, 1), Work(5000, 100))), on.geometry, on.device)
    high = 20_000 - len(laid.pool)
    pool = torch.zeros(20_000, *laid.pool.shape[1:], dtype=torch.bfloat16, device="cuda")
    pool[high:] = laid.pool
    spans = [type(s)(s.start, s.length, s.held, s.pages + high, s.tail) for s in laid.spans]
    moved = dataclasses.replace(laid, spans=spans, pool=pool)
    assert difference(run(moved, on), laid.expected(on.geometry)).within(EXACT)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_a_graph_replayed_with_other_batches_attends_for_them(kv_dtype: torch.dtype) -> None:
    on = attention(kv_dtype=kv_dtype)
    batches = [
        lay(Case("", tuple(Work(n, 1) for n in held)), on.geometry, on.device, seed)
        for seed, held in enumerate([(5000, 3), (1, 2, 70_000, 64), (), (9,)])
    ]
    pages = max(len(laid.pool) for laid in batches)
    pool = torch.zeros(pages + 1, *batches[0].pool.shape[1:], device="cuda").to(kv_dtype)
    captured = GraphDecodes(on, 4, pages, spare=pages)
    q = torch.zeros(4, 32, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.zeros(4, 8, 128, device="cuda").to(kv_dtype)
    scales = batches[0].scales
    captured.plan([])
    captured.run(q, k, k, pool, scales)  # compiles, outside the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = captured.run(q, k, k, pool, scales)
    for laid in batches:
        rows = len(laid.spans)
        raw = laid.pool.view(torch.uint8) if scales is not None else laid.pool
        (pool.view(torch.uint8) if scales is not None else pool)[: len(raw)] = raw
        q.zero_()[:rows] = laid.q
        captured.plan(laid.spans)
        graph.replay()
        if rows:
            states = Partial(actual.out[:rows], actual.lse[:rows], actual.base)
            assert difference(states, laid.expected(on.geometry)).within(EXACT)


def test_plans_made_ahead_of_the_device_do_not_spoil_those_before() -> None:
    """The device is kept busy while the next plans are made, as a step ahead makes them."""
    on = attention()
    batches = [
        lay(
            Case("", (Work(1000 * (i + 1), 1), Work(30_000 + 64 * i, 64))),
            on.geometry,
            on.device,
            seed=i,
        )
        for i in range(8)
    ]
    expected = [laid.expected(on.geometry) for laid in batches]
    run(batches[0], on)
    torch.cuda.synchronize()
    busy = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    actual = []
    for laid in batches:
        for _ in range(20):
            busy @ busy
        plan = on.plan(laid.spans)
        actual.append(plan.run(laid.q, laid.k, laid.v, laid.pool, laid.scales))
    for mine, theirs in zip(actual, expected, strict=True):
        assert difference(mine, theirs).within(EXACT)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_written_rows_are_found_in_their_pages(kv_dtype: torch.dtype) -> None:
    on = attention(kv_dtype=kv_dtype)
    laid = lay(Case("", (Work(0, 1),)), on.geometry, on.device)
    scales = () if laid.scales is None else (laid.scales,)
    kv = KvPages(range(1), 5, 8, 64, 128, kv_dtype, "cuda", scales=scales, spare=1)
    rows = torch.randn(70, 16, 128, device="cuda", dtype=torch.bfloat16)
    at = torch.arange(70, device="cuda")
    kept = kv.kept(0, rows)
    kv.write(0, kept, (4 - at // 64, at % 64))
    pages = [kv.page(0, page).view(torch.uint8) for page in (4, 3)]
    back = torch.cat(pages, dim=2)[:, :, :70].flatten(0, 1).transpose(0, 1)
    assert torch.equal(back, kept.view(torch.uint8))


@pytest.fixture(scope="module")
def library() -> flashinfer.Library:
    return flashinfer.flashinfer()


def test_norms_and_activations_of_the_library_are_ours(library: flashinfer.Library) -> None:
    dice = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(70, 4096, generator=dice, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, generator=dice, device="cuda", dtype=torch.bfloat16)
    exact = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    actual = library.rmsnorm(x, weight, 1e-5)
    assert torch.allclose(actual.float(), exact * weight.float(), rtol=1e-2, atol=1e-2)
    gate, up = x.float().chunk(2, dim=-1)
    actual = library.silu_and_mul(x)
    assert torch.allclose(actual.float(), torch.nn.functional.silu(gate) * up, rtol=1e-2, atol=1e-2)


def test_a_needle_at_two_hundred_thousand_tokens_is_found_over_fp8_pages() -> None:
    """A single key of 200,000 matches the query, and every path that reads FP8 must return its
    value."""
    on = attention(kv_dtype=FP8)
    tokens = 200_000
    for length in (1, 16, 64, 128, 512):
        laid = lay(Case("", (Work(tokens, length),)), on.geometry, on.device, seed=length)
        assert laid.scales is not None
        span = laid.spans[0]
        for depth in (0.02, 0.5, 0.97):
            place = int(depth * tokens)
            page, offset = int(span.pages[place // 64]), place % 64
            marked = torch.zeros(1, 16, 128, device="cuda", dtype=torch.bfloat16)
            marked[0, :8, 64:] = 16.0  # |q|² of the same entries is 64 · 4: it wins by far
            marked[0, 8:] = torch.linspace(-2, 2, 128, device="cuda")
            pool = laid.pool.clone()
            kept = laid.scales.store(marked).view(torch.uint8).view(2, 8, 128)
            pool.view(torch.uint8)[page, :, :, offset] = kept
            q = torch.zeros_like(laid.q)
            q[:, :, 64:] = 2.0
            plan = on.plan(laid.spans)
            actual = plan.run(q, laid.k, laid.v, pool, laid.scales)
            value = torch.linspace(-2, 2, 128, device="cuda")
            assert torch.allclose(actual.out.float(), value.expand_as(actual.out), atol=0.2)


def test_scales_on_the_device_are_those_on_a_cpu(tmp_path: pathlib.Path) -> None:
    folder = write_checkpoint(tmp_path, TinyModel())
    config = read_config(folder)
    held = [
        weights.load(
            weights.Checkpoint(folder), config, range(6), 0, 1, torch.bfloat16, device=device
        )
        for device in ("cpu", "cuda")
    ]
    on_cpu, on_cuda = (weights.kv_scales(layer, 2, 32, 1.0) for layer in held)
    for mine, theirs in zip(on_cpu, on_cuda, strict=True):
        assert torch.equal(mine.key, theirs.key.cpu()) and np.isfinite(mine.key.numpy()).all()
