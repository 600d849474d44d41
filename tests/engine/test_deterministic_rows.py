"""`deterministic` on a GPU, as far as a CPU shows it: what kernels get depends on a row alone.

The oracle of the kernel walks keys as FlashInfer's does, tile by tile (see `tiled_kernel`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine import tiled_kernel
from tests.engine.test_engine_attention import (
    GROUP,
    HEADS,
    KV_HEADS,
    PAGES,
    D,
    T,
    Work,
    run,
    same,
    work,
)
from tests.engine.test_paged_attention import paged
from tests.support.recalling_prompts import recalling
from tests.support.solo_engine import SoloEngine
from torch.utils._python_dispatch import TorchDispatchMode

from medha.batch import Chunk
from medha.config import WorkerConfig
from medha.errors import SetupError
from medha.messages import Sampling
from medha.topology import Topology
from medha_worker import sampler, weights
from medha_worker.attention import fixed_blocks
from medha_worker.attention.backend import attention_for
from medha_worker.attention.fixed_blocks import block_rows, lay_blocks
from medha_worker.attention.fp8_scales import Scales
from medha_worker.attention.kernel_interface import AttentionPlan, Partial, Span
from medha_worker.attention.paged import PagedAttention
from medha_worker.inputs import seen
from medha_worker.model.checkpoint_writer import FAMILIES, TinyModel
from medha_worker.model.experts import Experts
from medha_worker.model.layers import GatedMlp, Linear, Mlp, Projection
from medha_worker.rank import set_environment
from medha_worker.sampler import SampledRow
from medha_worker.sequences import PageTable

SPARE = PAGES
TOKENS = 100


@pytest.fixture(autouse=True)
def tiles_of_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_blocks, "KEY_TILE", tiled_kernel.TILE_KEYS)


@functools.cache  # its workspace takes longer to clear than a test runs
def fixed(split_pages: int = 12) -> PagedAttention:
    attention = paged(kernel="fa2", split_pages=split_pages)
    attention.spare = SPARE
    return attention


@settings(max_examples=30)
@given(st.lists(work, min_size=1, max_size=5), st.integers(0, 3), st.sampled_from([3, 12]))
def test_any_mix_of_spans_agrees_with_plain_attention_in_blocks(
    works: list[Work], seed: int, split_pages: int
) -> None:
    assert same(*run(works, seed, fixed(split_pages)))


class Beside:
    """Over the pool and a spare page behind it."""

    def __init__(self, attention: PagedAttention) -> None:
        self._attention = attention

    def plan(self, spans: Sequence[Span]) -> AttentionPlan:
        self._plan = self._attention.plan(spans)
        return self

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        scales: Scales | None = None,
    ) -> Partial:
        return self._plan.run(q, k, v, torch.cat((pool, torch.zeros_like(pool[:1]))), scales)


@settings(max_examples=20)
@given(st.lists(work, min_size=1, max_size=4), st.booleans(), st.integers(0, 3), st.integers(1, 40))
def test_blocks_see_the_window_of_their_layers_alone(
    works: list[Work], holes: bool, seed: int, window: int
) -> None:
    windowed = [dataclasses.replace(entry, window=window, holes=holes) for entry in works]
    assert same(*run(windowed, seed, Beside(fixed(3))))


@dataclasses.dataclass
class Prompt:
    """A sequence of TOKENS tokens whose pages stand in a pool, what does not follow being 7."""

    pool: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pages: list[int]

    def states(
        self, attention: PagedAttention, lengths: Sequence[int], window: int, beside: bool
    ) -> bytes:
        """Of all rows, attended in chunks of these lengths, each next to other chunks."""
        actual, start = list[torch.Tensor](), 0
        for length in lengths:
            spans = [self.span(0, start, length, window)]
            rows = list(range(start, start + length))
            if beside:  # of the same keys, as other sequences would bring others
                spans.append(self.span(length, TOKENS - 9, 9, window))
                spans.append(self.span(length + 9, start, 1, window))
                rows += [*range(TOKENS - 9, TOKENS), start]
            if len(actual) % 2:
                spans.reverse()
            at = attention.plan(spans).run(self.q[rows], self.k[rows], self.v[rows], self.pool)
            actual.append(torch.cat((at.out[:length].flatten(), at.lse[:length].flatten())))
            start += length
        outs = [entry[: -length * HEADS] for entry, length in zip(actual, lengths, strict=True)]
        sums = [entry[-length * HEADS :] for entry, length in zip(actual, lengths, strict=True)]
        return torch.cat(outs + sums).numpy().tobytes()

    def span(self, row: int, start: int, length: int, window: int) -> Span:
        held = self.pages[: -(-(start + length) // T)]
        whole = Span(row, length, start, np.array(held, dtype=np.int64), True)
        table = PageTable(enumerate(held))
        return seen(whole, Chunk(0, start, length, (0,), 0), table, window, T, always=True)


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    dice = torch.Generator().manual_seed(0)
    pages = np.random.default_rng(0).permutation(PAGES)[: -(-TOKENS // T)].tolist()
    pool = torch.full((PAGES + 1, 2, KV_HEADS, T, D), 7.0)
    pool[SPARE] = 0.0
    keys = torch.randn(TOKENS, 2, KV_HEADS, D, generator=dice)
    for at in range(TOKENS):
        pool[pages[at // T], :, :, at % T] = keys[at]
    q = torch.randn(TOKENS, HEADS, D, generator=dice) * 2
    return Prompt(pool, q, keys[:, 0], keys[:, 1], pages)


def cut(sizes: Sequence[int]) -> list[int]:
    """TOKENS in chunks of these sizes, again and again."""
    actual, left = list[int](), TOKENS
    for size in itertools.cycle(sizes):
        actual.append(min(size, left))
        left -= actual[-1]
        if not left:
            return actual
    return actual


@pytest.mark.parametrize("window", [0, 30], ids=lambda window: f"window {window}")
def test_a_row_has_the_same_bytes_in_any_chunk_beside_any_others(
    prompt: Prompt, window: int
) -> None:
    """In one chunk, in chunks that end anywhere, as decodes, alone and in company."""
    whole = prompt.states(fixed(), [TOKENS], window, beside=False)
    for sizes, beside in (([1], False), ([17, 50, 1, 5], True), ([42], False), ([43, 1, 1], True)):
        assert prompt.states(fixed(), cut(sizes), window, beside) == whole, sizes


def test_keys_that_are_split_elsewhere_would_be_seen(prompt: Prompt) -> None:
    whole = prompt.states(fixed(), [TOKENS], 0, beside=False)
    assert prompt.states(fixed(5), [TOKENS], 0, beside=False) != whole


@pytest.mark.parametrize("wrong", ["blocks in a window", "no pages before a window"])
def test_a_window_that_begins_elsewhere_would_be_seen(
    prompt: Prompt, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    entries = fixed_blocks._entries

    def other(
        span: Span, page_tokens: int, rows: int, split_pages: int, window: int
    ) -> Iterator[fixed_blocks._Entry]:
        if wrong == "blocks in a window":
            yield from entries(span, page_tokens, rows, split_pages, 0)
        else:
            for entry in entries(span, page_tokens, rows, split_pages, window):
                yield entry._replace(tokens=entry.tokens - entry.lead, lead=0)

    whole = prompt.states(fixed(), [TOKENS], 30, beside=False)
    monkeypatch.setattr(fixed_blocks, "_entries", other)
    assert prompt.states(fixed(), cut([43, 1, 1]), 30, beside=False) != whole


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16, 48, 64])
def test_an_entry_fills_one_tile_and_takes_the_largest(group: int) -> None:
    assert 64 < block_rows(group) * group <= 128


def test_calls_hold_no_more_states_than_the_librarys_workspace() -> None:
    pages = np.arange(100, dtype=np.int64)
    spans = [Span(40 * n, 40, 4 * (20 * n + 1), pages[: 20 * n + 11], True) for n in range(4)]
    calls = lay_blocks(spans, T, 16, 10, 12)
    counts = [[-(-int(n) // 10) for n in np.diff(call.kv_indptr)] for call in calls]
    cut_up = [parts for parts in counts if max(parts) > 1]
    assert cut_up and all(sum(parts) <= 12 for parts in cut_up)
    assert all(max(parts) == 1 for parts in counts if parts not in cut_up)
    rows = np.concatenate([call.rows[call.kept] for call in calls])
    assert sorted(rows.tolist()) == list(range(160)), "each row once"
    assert all(set(np.diff(call.q_indptr)) == {16} for call in calls)


def test_shapes_without_kernels_that_keep_bits_are_refused_on_a_gpu() -> None:
    for head_dim, dtype in ((96, torch.bfloat16), (128, torch.float32)):
        with pytest.raises(SetupError, match=r"Deterministic.*set spec.engine.arithmetic to Fast"):
            attention_for(8, 2, head_dim, 64, dtype, dtype, "cuda", deterministic=True)
    assert GROUP == 3  # what the cases above stand for: no divisor of a tile


class Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Of the products that are made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = set[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.rows.add(len(args[-2]))
        assert func.overloadpacket not in (torch.ops.aten.bmm, torch.ops.aten.baddbmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 50])
def test_products_in_blocks_have_one_shape_and_mean_the_same(count: int) -> None:
    dice = torch.Generator().manual_seed(count)
    plain = Linear(torch.randn(24, 40, generator=dice), torch.randn(40, generator=dice))
    blocked = dataclasses.replace(plain, rows=16)
    x, onto = torch.randn(count, 24, generator=dice), torch.randn(count, 40, generator=dice)
    expected, actual = onto.clone(), onto.clone()
    with Shapes() as shapes:
        product = blocked(x)
        blocked.onto(x, actual)
    assert shapes.rows == {16}
    plain.onto(x, expected)
    torch.testing.assert_close(product, plain(x))
    torch.testing.assert_close(actual, expected)


def as_on_a_gpu(linear: Projection) -> Linear:
    return Linear(linear.by_output().t(), linear.bias)


def flattened(mlp: Mlp) -> Mlp:
    if isinstance(mlp, GatedMlp):
        return GatedMlp(as_on_a_gpu(mlp.gate_up), as_on_a_gpu(mlp.down))
    assert isinstance(mlp, Experts)
    gate_up, down = tuple(map(as_on_a_gpu, mlp.gate_up)), tuple(map(as_on_a_gpu, mlp.down))
    return dataclasses.replace(mlp, router=as_on_a_gpu(mlp.router), gate_up=gate_up, down=down)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe, some layers dense"])
def test_a_model_in_blocks_makes_no_product_of_another_shape(
    name: str, checkpoint: Callable[[TinyModel], pathlib.Path]
) -> None:
    """Whatever a batch holds; and it draws what the model does that is not."""
    model = FAMILIES[name]
    folder = checkpoint(model)
    prompts = [recalling(length, model.vocab, length) for length in (40, 9, 70)]
    expected = SoloEngine(folder, pages=64, page_tokens=16).generate(prompts, 8, chunk=24)
    engine = SoloEngine(folder, pages=64, page_tokens=16)
    held = engine.model.weights
    layers = tuple(
        dataclasses.replace(
            layer,
            qkv=as_on_a_gpu(layer.qkv),
            out=as_on_a_gpu(layer.out),
            mlp=flattened(layer.mlp),
        )
        for layer in held.layers
    )
    assert held.head is not None
    flat = dataclasses.replace(held, layers=layers, head=as_on_a_gpu(held.head))
    engine.model.weights = weights.in_blocks(flat, 32)
    with Shapes() as shapes:
        assert engine.generate(prompts, 8, chunk=24) == expected
    assert shapes.rows == {32}


def test_rows_drawn_one_by_one_draw_what_they_do_together() -> None:
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(0)) * 3
    draws = [
        SampledRow(Sampling(temperature=0.4 * (i % 3), top_k=9 * (i % 2), top_p=0.9, seed=i), i, 0)
        for i in range(9)
    ]
    together, alone = (sampler.draw(logits, draws, alone=entry).read() for entry in (False, True))
    assert together == alone


def test_products_of_a_deterministic_rank_get_no_memory_to_be_cut_in() -> None:
    plain, fixed_ones = dict[str, str](), {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    config = WorkerConfig(
        replica="m-0",
        model="m",
        checkpoint="",
        max_context_tokens=64,
        topology=Topology(),
        device="cuda",
        rank_bind="ipc:///m-0",
    )
    set_environment(plain, config)
    set_environment(fixed_ones, msgspec.structs.replace(config, deterministic=True))
    assert not any(name.startswith("CUBLAS") for name in plain)
    assert fixed_ones["CUBLASLT_WORKSPACE_SIZE"] == "1"
    assert fixed_ones["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8", "what a person set stays"
