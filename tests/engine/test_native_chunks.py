"""The compiled kernel for chunks, in every instruction set that it has, against plain softmax
attention in float64."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from medha.errors import EngineError
from medha_worker.attention.kernel_interface import Partial, Sight, Span
from medha_worker.attention.merge import merge
from medha_worker.attention.native_chunks import QUERIES, NativeChunks
from medha_worker.attention.native_singles import NativeKernel

LANES = pytest.mark.parametrize("lanes", [4, 8, 16])
# (length, held, tail) of each span.
Spans = list[tuple[int, int, bool]]


@dataclasses.dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    page_tokens: int = 16
    dtype: torch.dtype = torch.float32

    def chunks(self, lanes: int = 16) -> NativeChunks:
        sizes = self.heads, self.kv_heads, self.head_dim, self.page_tokens
        return NativeChunks(NativeKernel(*sizes, self.dtype, lanes))


@dataclasses.dataclass
class Laid:
    """Spans over a pool of random pages, NaN where no span has a token."""

    pool: torch.Tensor
    spans: list[Span]
    q: torch.Tensor


def lay(shape: Shape, spans: Spans, gap: int = 0, spread: float = 1.0) -> Laid:
    """`gap`: rows before each span that belong to none."""
    dice, T = np.random.default_rng(len(spans)), shape.page_tokens
    tokens = [held + length * tail for length, held, tail in spans]
    counts = [-(-n // T) for n in tokens]
    free = dice.permutation(sum(counts) + 3)
    tables = np.split(free[: sum(counts)], np.cumsum(counts)[:-1])
    full = (len(free), 2, shape.kv_heads, T, shape.head_dim)
    pool = torch.from_numpy(dice.normal(size=full, scale=spread)).float()
    pool[free[sum(counts) :]] = math.nan
    laid, row = [], 0
    for (length, held, tail), table, n in zip(spans, tables, tokens, strict=True):
        if n % T:
            pool[table[-1], :, :, n % T :] = math.nan
        laid.append(Span(row + gap, length, held, table, tail))
        row += gap + length
    q = torch.from_numpy(dice.normal(size=(row + gap, shape.heads, shape.head_dim), scale=spread))
    return Laid(pool.to(shape.dtype), laid, q.float())


def filled(shape: Shape, laid: Laid, lanes: int = 16) -> Partial:
    states = Partial(torch.full(laid.q.shape, math.nan), torch.full(laid.q.shape[:2], math.nan))
    shape.chunks(lanes).plan(laid.spans).fill(laid.q, laid.pool, states)
    return states


def by_definition(shape: Shape, laid: Laid, span: Span) -> Partial:
    group = shape.heads // shape.kv_heads
    rows = laid.q[span.start : span.start + span.length].double()
    held = laid.pool[torch.from_numpy(span.pages)].double()
    kv = held.permute(1, 0, 3, 2, 4).flatten(1, 2).repeat_interleave(group, 2)
    out, lse = torch.zeros_like(rows), torch.full(rows.shape[:2], -math.inf).double()
    for i, row in enumerate(rows):
        keys, values = kv[:, : span.held + span.tail * (i + 1)]
        if len(keys):
            scores = torch.einsum("hd,thd->ht", row, keys) * shape.head_dim**-0.5
            lse[i] = scores.logsumexp(1)
            out[i] = torch.einsum("ht,thd->hd", scores.softmax(1), values)
    return Partial(out.float(), lse.float())


def check(shape: Shape, laid: Laid, lanes: int = 16) -> None:
    states = filled(shape, laid, lanes)
    for span in laid.spans:
        expected, rows = (
            by_definition(shape, laid, span),
            slice(span.start, span.start + span.length),
        )
        torch.testing.assert_close(states.out[rows], expected.out, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(states.lse[rows], expected.lse, atol=2e-5, rtol=1e-5)


MIXED: Spans = [(5, 0, True), (70, 33, True), (3, 64, False), (2, 0, False), (130, 0, True)]


@LANES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_mix_of_spans_agrees_with_plain_attention(dtype: torch.dtype, lanes: int) -> None:
    shape = Shape(dtype=dtype)
    check(shape, lay(shape, MIXED), lanes)


@LANES
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 128, 512])
def test_heads_of_any_size_agree_with_plain_attention(head_dim: int, lanes: int) -> None:
    shape = Shape(head_dim=head_dim)
    check(shape, lay(shape, [(20, 100, True), (9, 0, True)]), lanes)


@pytest.mark.parametrize("group", [1, 3, 5, 7, 64])
@pytest.mark.parametrize("page_tokens", [1, 24, 64])
def test_any_group_and_page_size_agrees_with_plain_attention(group: int, page_tokens: int) -> None:
    shape = Shape(heads=2 * group, page_tokens=page_tokens)
    check(shape, lay(shape, [(11, 50, True), (2, 3, False), (33, 0, True)]))


def test_a_prefix_of_several_parts_agrees_with_plain_attention() -> None:
    """A part holds 64 tokens of heads of 512, and 512 of heads of 64."""
    for head_dim, held in ((512, 300), (64, 1500)):
        shape = Shape(2, 1, head_dim)
        check(shape, lay(shape, [(40, held, True), (9, held, False)]))


@LANES
@pytest.mark.parametrize("spread", [0.01, 4.0])
def test_extreme_scores_agree_with_plain_attention(spread: float, lanes: int) -> None:
    shape = Shape()
    check(shape, lay(shape, [(50, 90, True)], spread=spread), lanes)


@LANES
def test_a_rows_bits_do_not_depend_on_the_cut_of_its_prompt(lanes: int) -> None:
    shape = Shape(6, 2, 64)
    whole = lay(shape, [(190, 0, True)])
    expected = filled(shape, whole, lanes)
    pages = whole.spans[0].pages
    for cuts in ([2, 61, 127], [100, 90], [3] * 62 + [4]):
        at = np.cumsum([0, *cuts])[:-1].tolist()
        spans = [
            Span(first, length, first, pages, True) for first, length in zip(at, cuts, strict=True)
        ]
        states = filled(shape, dataclasses.replace(whole, spans=spans), lanes)
        rows = slice(0, sum(cuts))
        assert torch.equal(states.out[rows], expected.out[rows])
        assert torch.equal(states.lse[rows], expected.lse[rows])


def test_shards_merge_into_the_whole() -> None:
    shape = Shape()
    whole = lay(shape, [(30, 64, True)])
    pages = whole.spans[0].pages
    parts = [
        filled(shape, dataclasses.replace(whole, spans=[span]))
        for span in (Span(0, 30, 32, pages[:2], False), Span(0, 30, 32, pages[2:], True))
    ]
    expected = filled(shape, whole)
    merged = merge(parts)
    torch.testing.assert_close(merged.out, expected.out, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(merged.lse, expected.lse, atol=1e-6, rtol=1e-5)


def test_rows_of_no_span_are_not_written() -> None:
    shape = Shape()
    laid = lay(shape, MIXED, gap=2)
    check(shape, laid)
    states, others = filled(shape, laid), torch.ones(len(laid.q), dtype=torch.bool)
    for span in laid.spans:
        others[span.start : span.start + span.length] = False
    assert others.sum() == 2 * len(MIXED) + 2
    assert states.out[others].isnan().all() and states.lse[others].isnan().all()


def test_queries_may_be_a_slice_of_wider_or_narrower_rows() -> None:
    shape = Shape()
    laid = lay(shape, MIXED)
    expected = filled(shape, laid)
    wide = torch.randn(len(laid.q), 9, shape.head_dim)
    wide[:, 3:7] = laid.q
    for q in (wide[:, 3:7], laid.q.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(filled(shape, dataclasses.replace(laid, q=q)).out, expected.out)


def test_threads_share_a_plan_without_changing_a_bit() -> None:
    shape = Shape()
    laid = lay(shape, [(500, 900, True), (300, 0, True), (2, 5, True)])
    expected = filled(shape, laid)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        parts = shape.chunks().plan(laid.spans).parts
        assert len(parts) == 3 and parts[0][0] == 0
        states = filled(shape, laid)
    finally:
        torch.set_num_threads(before)
    tiles = sum(shape.kv_heads * -(-span.length * 2 // QUERIES) for span in laid.spans)
    assert parts[-1][1] == tiles and all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    assert torch.equal(states.out, expected.out) and torch.equal(states.lse, expected.lse)


def test_what_was_not_planned_for_is_refused() -> None:
    shape, pages = Shape(), np.arange(4)
    with pytest.raises(EngineError, match="sees 65 tokens on 4 pages of 16"):
        shape.chunks().plan([Span(0, 5, 60, pages, True)])
    with pytest.raises(EngineError, match="expected rows without a window"):
        shape.chunks().plan([Span(0, 5, 40, pages, True, Sight(8, 40, pages))])
    laid = lay(shape, MIXED)
    for pool in (laid.pool[:-9], laid.pool.bfloat16(), laid.pool[:, :1]):
        with pytest.raises(EngineError, match="must hold them"):
            filled(shape, dataclasses.replace(laid, pool=pool))
    with pytest.raises(EngineError, match="states contiguous"):
        filled(shape, dataclasses.replace(laid, q=laid.q[:-1]))
