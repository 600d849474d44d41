"""The compiled kernel for single rows, in every instruction set that it has, against plain softmax
attention in float64."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from medha.errors import EngineError, SetupError
from medha_worker.attention.kernel_interface import Partial, Span
from medha_worker.attention.merge import merge
from medha_worker.attention.native_singles import GROUP, LIBRARY, NativeKernel, load

# Float lanes of the widest registers that may be used: where a machine lacks them it uses narrower.
LANES = pytest.mark.parametrize("lanes", [4, 8, 16])


@dataclasses.dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: torch.dtype = torch.float32

    def kernel(self, lanes: int = 16) -> NativeKernel:
        return NativeKernel(
            self.heads, self.kv_heads, self.head_dim, self.page_tokens, self.dtype, lanes
        )


SMALL = Shape(4, 2, 32, 16)


@dataclasses.dataclass
class Laid:
    """Rows laid over a pool whose unused slots are NaN: `tables[i]` and `tokens[i]` of row i."""

    pool: torch.Tensor
    tables: list[np.ndarray]
    tokens: list[int]
    q: torch.Tensor

    def spans(self) -> list[Span]:
        """A row that sees tokens is its sequence's tail; its last token is its own."""
        return [
            Span(row, 1, count - (count > 0), table, count > 0)
            for row, (table, count) in enumerate(zip(self.tables, self.tokens, strict=True))
        ]


def lay(shape: Shape, tokens: list[int], seed: int = 0, spread: float = 1.0) -> Laid:
    """Random page ids; a third of the pages stays unused."""
    dice = np.random.default_rng(seed)
    T = shape.page_tokens
    counts = [-(-n // T) for n in tokens]
    free = dice.permutation(sum(counts) + sum(counts) // 2 + 1)
    tables = np.split(free[: sum(counts)], np.cumsum(counts)[:-1])
    full = (len(free), 2, shape.kv_heads, T, shape.head_dim)
    pool = torch.from_numpy(dice.normal(size=full, scale=spread).astype(np.float32))
    pool[free[sum(counts) :]] = math.nan
    for table, n in zip(tables, tokens, strict=True):
        if n % T:
            pool[table[-1], :, :, n % T :] = math.nan
    q = torch.from_numpy(dice.normal(size=(len(tokens), shape.heads, shape.head_dim), scale=spread))
    return Laid(pool.to(shape.dtype), tables, tokens, q.float())


def found(shape: Shape, laid: Laid, lanes: int = 16) -> Partial:
    states = Partial(torch.full_like(laid.q, math.nan), torch.full(laid.q.shape[:2], math.nan))
    shape.kernel(lanes).plan(laid.spans()).fill(laid.q, laid.pool, states)
    return states


def plain(shape: Shape, laid: Laid) -> Partial:
    """In float64, row by row."""
    out = torch.zeros(laid.q.shape, dtype=torch.float64)
    lse = torch.full(laid.q.shape[:2], -math.inf, dtype=torch.float64)
    for row, (table, n) in enumerate(zip(laid.tables, laid.tokens, strict=True)):
        if n:
            pages = laid.pool[torch.from_numpy(table)].double()
            keys, values = (
                pages.permute(1, 2, 0, 3, 4)
                .flatten(2, 3)[:, :, :n]
                .repeat_interleave(shape.heads // shape.kv_heads, dim=1)
            )
            scores = torch.einsum("hd,htd->ht", laid.q[row].double(), keys)
            scores /= math.sqrt(shape.head_dim)
            out[row] = torch.einsum("ht,htd->hd", scores.softmax(-1), values)
            lse[row] = scores.logsumexp(-1)
    return Partial(out, lse)


def assert_same(shape: Shape, laid: Laid, lanes: int = 16, within: float = 2e-6) -> None:
    mine, expected = found(shape, laid, lanes), plain(shape, laid)
    torch.testing.assert_close(mine.out.double(), expected.out, atol=within, rtol=within)
    torch.testing.assert_close(mine.lse.double(), expected.lse, atol=within, rtol=within)


@LANES
@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_any_length_agree_with_plain_attention(
    dtype: torch.dtype, head_dim: int, page_tokens: int, lanes: int
) -> None:
    shape = Shape(4, 2, head_dim, page_tokens, dtype)
    assert_same(shape, lay(shape, [1, 0, 15, 64, 65, 131, 16, 700]), lanes)


@LANES
@pytest.mark.parametrize("group", range(1, 9))
def test_any_number_of_query_heads_shares_a_kv_head(group: int, lanes: int) -> None:
    shape = Shape(2 * group, 2, 64, 16)
    assert_same(shape, lay(shape, [37, 5, 64], seed=group), lanes)


@LANES
def test_a_lone_long_row_agrees_with_plain_attention(lanes: int) -> None:
    shape = Shape(2, 1, 64, 64)
    assert_same(shape, lay(shape, [4000]), lanes)


def test_the_largest_group_and_odd_pages_are_served() -> None:
    shape = Shape(GROUP, 1, 16, 7)
    assert_same(shape, lay(shape, [40, 7, 6]))
    shape = Shape(2, 1, 16, 200)
    assert_same(shape, lay(shape, [401, 199, 65]))


def test_many_rows_of_random_lengths_agree_with_plain_attention() -> None:
    lengths = np.random.default_rng(3).integers(0, 300, size=60).tolist()
    assert_same(SMALL, lay(SMALL, lengths))


def test_rows_may_share_pages() -> None:
    laid = lay(SMALL, [64, 48])
    laid.tables[1] = np.concatenate([laid.tables[0][:2], laid.tables[1][2:]])
    assert_same(SMALL, laid)


@LANES
@pytest.mark.parametrize("spread", [1e-3, 30.0])
def test_extreme_scores_agree_with_plain_attention(spread: float, lanes: int) -> None:
    """With a spread of 30 scores reach thousands: one token takes all of the weight."""
    laid = lay(SMALL, [130, 3, 64], spread=spread)
    assert_same(SMALL, laid, lanes, within=3e-4 if spread > 1 else 2e-6)
    assert found(SMALL, laid, lanes).out.isfinite().all()


@LANES
def test_a_weight_is_exact_to_the_last_digits(lanes: int) -> None:
    """Two tokens with scores 0 and −x, values 0 and 1: the output is e^−x / (1 + e^−x)."""
    shape = Shape(1, 1, 16, 4)
    depths = torch.cat([torch.linspace(0, 87, 400), torch.tensor([88.5, 100.0, 1e4, 1e30])])
    pool = torch.zeros(len(depths), 2, 1, 4, 16)
    pool[:, 0, 0, 1, 0], pool[:, 1, 0, 1] = -4.0 * depths, 1.0
    q = torch.zeros(len(depths), 1, 16)
    q[..., 0] = 1.0
    laid = Laid(pool, list(np.arange(len(depths))[:, None]), [2] * len(depths), q)
    mine = found(shape, laid, lanes).out[:, 0, 0].double()
    e = torch.exp(-depths.double())
    # Rounding x·log2(e) alone costs x/2 units in the last place.
    close = (mine - e / (1 + e)).abs() <= (3e-7 + 1.2e-7 * depths.double()) * e
    assert close[:400].all()
    assert torch.equal(mine[401:], torch.zeros(3, dtype=torch.float64))


@LANES
def test_shards_merge_into_the_whole(lanes: int) -> None:
    laid = lay(SMALL, [160, 96])
    parts = []
    for cut in (slice(0, 3), slice(3, 3), slice(3, None)):
        tables = [table[cut] for table in laid.tables]
        tokens = [16 * len(table) for table in tables]
        parts.append(found(SMALL, Laid(laid.pool, tables, tokens, laid.q), lanes))
    whole = merge(parts)
    expected = plain(SMALL, laid)
    assert torch.allclose(whole.out.double(), expected.out, atol=2e-6)
    assert torch.allclose(whole.lse.double(), expected.lse, atol=2e-6)


def test_a_row_without_tokens_is_empty() -> None:
    states = found(SMALL, lay(SMALL, [0, 20, 0]))
    assert torch.equal(states.out[::2], torch.zeros(2, 4, 32))
    assert states.lse[::2].isneginf().all() and states.lse[1].isfinite().all()


@LANES
def test_a_nan_among_the_keys_is_not_hidden(lanes: int) -> None:
    laid = lay(SMALL, [40, 40])
    laid.pool[laid.tables[0][1], 0, :, 3, 5] = math.nan
    states = found(SMALL, laid, lanes)
    assert states.out[0].isnan().all() and states.out[1].isfinite().all()


def test_rows_between_chunks_are_the_only_ones_written() -> None:
    laid = lay(SMALL, [20, 33])
    spans = [Span(1, 1, 19, laid.tables[0], True), Span(3, 1, 32, laid.tables[1], True)]
    q = torch.randn(5, 4, 32)
    q[[1, 3]] = laid.q
    states = Partial(torch.full_like(q, 7.0), torch.full((5, 4), 7.0))
    SMALL.kernel().plan(spans).fill(q, laid.pool, states)
    expected = found(SMALL, laid)
    assert torch.equal(states.out[[1, 3]], expected.out)
    assert torch.equal(states.lse[[1, 3]], expected.lse)
    assert (states.out[[0, 2, 4]] == 7).all() and (states.lse[[0, 2, 4]] == 7).all()


def test_queries_may_be_a_slice_of_wider_or_narrower_rows() -> None:
    laid = lay(SMALL, [20, 33])
    wide = torch.randn(2, 9, 32)
    wide[:, :4] = laid.q
    states = Partial(torch.empty(2, 4, 32), torch.empty(2, 4))
    SMALL.kernel().plan(laid.spans()).fill(wide[:, :4], laid.pool, states)
    assert torch.equal(states.out, found(SMALL, laid).out)
    narrow = dataclasses.replace(laid, q=laid.q.bfloat16().float())
    SMALL.kernel().plan(laid.spans()).fill(laid.q.bfloat16(), laid.pool, states)
    assert torch.equal(states.out, found(SMALL, narrow).out)


def test_threads_share_a_plan_without_changing_a_bit() -> None:
    shape = Shape(4, 2, 64, 64)
    laid = lay(shape, [9000, 0, 4000, 3, 4000])
    alone = found(shape, laid)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        plan = shape.kernel().plan(laid.spans())
        shared = found(shape, laid)
    finally:
        torch.set_num_threads(threads)
    assert len(plan.parts) == 3
    assert torch.equal(alone.out, shared.out) and torch.equal(alone.lse, shared.lse)


def test_a_page_outside_the_pool_is_refused() -> None:
    laid = lay(SMALL, [20, 33])
    for wrong in (len(laid.pool), -1):
        laid.tables[1][-1] = wrong
        with pytest.raises(EngineError, match=r"for pages .*: must hold them"):
            found(SMALL, laid)


def test_a_row_with_too_few_pages_is_refused() -> None:
    kernel = SMALL.kernel()
    with pytest.raises(EngineError, match="sees 33 tokens on 2 pages of 16"):
        kernel.plan([Span(0, 1, 32, np.arange(2), True)])
    with pytest.raises(EngineError, match="a span of 2 rows"):
        kernel.plan([Span(0, 2, 0, np.arange(2), True)])
    with pytest.raises(EngineError, match="from row -1"):
        kernel.plan([Span(-1, 1, 0, np.arange(2), True)])


@pytest.mark.parametrize("wrong", ["kv_heads", "dtype", "strided", "rows", "heads", "states"])
def test_a_tensor_that_was_not_planned_for_is_refused(wrong: str) -> None:
    laid = lay(SMALL, [20, 33])
    pool, q = laid.pool, laid.q
    states = Partial(torch.empty_like(q), torch.empty(q.shape[:2]))
    if wrong == "kv_heads":
        pool = pool[:, :, :1].contiguous()
    if wrong == "dtype":
        pool = pool.bfloat16()
    if wrong == "strided":
        pool = pool.repeat(1, 1, 1, 1, 2)[..., :32]
    if wrong == "rows":
        q, states = q[:1], Partial(states.out[:1], states.lse[:1])
    if wrong == "heads":
        q = q[:, :3]
    if wrong == "states":
        states.out = states.out.double()
    with pytest.raises(EngineError, match=r"must (hold|be)"):
        SMALL.kernel().plan(laid.spans()).fill(q, pool, states)


def test_a_missing_library_is_told_with_its_remedy(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SetupError, match=r"absent\.so .* run `make setup`"):
        load(tmp_path / "absent.so", "medha_singles")
    (tmp_path / "torn.so").write_bytes(b"\x7fELF and no more")
    with pytest.raises(SetupError, match=r"torn\.so .* C compiler"):
        load(tmp_path / "torn.so", "medha_singles")


def test_an_install_without_the_library_says_so_when_attention_is_made(
    tmp_path: pathlib.Path,
) -> None:
    source = LIBRARY.parents[1]
    shutil.copytree(
        source, tmp_path / "medha_worker", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    script = (
        "import torch; from medha_worker.attention.cpu import cpu_attention;"
        " cpu_attention(2, 1, 32, 16, torch.float32)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    assert "SetupError" in done.stderr and "make setup" in done.stderr
