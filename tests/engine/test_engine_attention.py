"""The CPU backend, the reference kernel and the merge against plain softmax attention."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medha.batch import Chunk
from medha_worker.attention.cpu import CpuAttention, cpu_attention
from medha_worker.attention.kernel_interface import Attention, LogBase, Partial, Span
from medha_worker.attention.merge import empty, merge
from medha_worker.attention.reference import ReferenceAttention
from medha_worker.inputs import seen
from medha_worker.sequences import PageTable

KV_HEADS, GROUP, D, T = 2, 3, 16, 4
HEADS = KV_HEADS * GROUP
PAGES = 64


@dataclasses.dataclass
class Work:
    """A chunk: how many of its sequence's tokens this group held, and its own rows. `holes`:
    pages of other groups are between the held ones. `window`: tokens that a row sees, 0: all."""

    held: int
    length: int
    tail: bool
    holes: bool = False
    window: int = 0


@dataclasses.dataclass
class Laid:
    """A work's span, keys and values [2, tokens, kv, D] with their positions, its first row's."""

    span: Span
    own: torch.Tensor
    positions: list[int]
    start: int

    def visible(self, row: int, window: int) -> list[int]:
        """Return the keys of `own` that a row of the chunk sees."""
        at = self.start + row
        return [
            i
            for i, key in enumerate(self.positions)
            if key <= at and (not window or key > at - window)
        ]


def lay(works: list[Work], seed: int) -> tuple[list[Laid], torch.Tensor]:
    """The works over a pool of random page ids; unused slots are 7."""
    dice = np.random.default_rng(seed)
    free = dice.permutation(PAGES)
    pool = torch.full((PAGES, 2, KV_HEADS, T, D), 7.0)
    actual, row = [], 0
    for work in works:
        total = work.held + (work.length if work.tail else 0)
        ids, free = free[: -(-total // T)], free[-(-total // T) :]
        # Positions of the held tokens, then of the chunk's.
        steps = dice.integers(1, 4, -(-work.held // T) + 1) if work.holes else 1
        numbers = np.cumsum(np.broadcast_to(steps, -(-work.held // T) + 1)) - 1
        held = (numbers[:, None] * T + np.arange(T)).reshape(-1)[: work.held]
        start = int(held[-1]) + 1 if work.held % T else int(numbers[-1]) * T
        if not work.tail:
            start += int(dice.integers(0, T))
        positions = held.tolist() + [start + i for i in range(total - work.held)]
        own = torch.from_numpy(dice.normal(size=(2, total, KV_HEADS, D)).astype(np.float32))
        for token in range(total):
            pool[ids[token // T], :, :, token % T] = own[:, token]
        span = Span(row, work.length, work.held, ids.astype(np.int64), work.tail)
        table = PageTable((positions[i] // T, int(ids[i // T])) for i in range(0, total, T))
        chunk = Chunk(0, start, work.length, (0,), 0)
        span = seen(span, chunk, table, work.window, T)
        actual.append(Laid(span, own, positions, start))
        row += work.length
    return actual, pool


def plain(q: torch.Tensor, kv: torch.Tensor, visible: list[list[int]]) -> Partial:
    """Softmax attention of rows q [n, heads, D] in float64; row i sees the tokens visible[i]."""
    out = torch.zeros(len(q), HEADS, D, dtype=torch.float64)
    lse = torch.full((len(q), HEADS), -math.inf, dtype=torch.float64)
    for i, tokens in enumerate(visible):
        for head in range(HEADS):
            keys, values = kv[:, tokens, head // GROUP].double()
            if tokens:
                score = keys @ q[i, head].double() / math.sqrt(D)
                lse[i, head] = score.logsumexp(0)
                out[i, head] = score.softmax(0) @ values
    return Partial(out, lse)


def run(
    works: list[Work], seed: int = 0, kernel: Attention | None = None
) -> tuple[Partial, Partial]:
    """(found by the CPU backend or by `kernel`, expected) over all rows."""
    kernel = kernel or cpu_attention(HEADS, KV_HEADS, D, T, torch.float32)
    laid, pool = lay(works, seed)
    rows = sum(work.length for work in works)
    q, k, v = torch.randn(3, rows, HEADS, D, generator=torch.Generator().manual_seed(seed)).mul_(
        2.0
    )
    k, v = k[:, :KV_HEADS], v[:, :KV_HEADS]
    expected = []
    for work, entry in zip(works, laid, strict=True):
        cut = slice(entry.span.start, entry.span.start + work.length)
        if work.tail:
            k[cut], v[cut] = entry.own[0, work.held :], entry.own[1, work.held :]
        visible = [entry.visible(row, work.window) for row in range(work.length)]
        expected.append(plain(q[cut], entry.own, visible))
    actual = kernel.plan([entry.span for entry in laid]).run(q, k, v, pool)
    return actual, Partial(
        torch.cat([p.out for p in expected]), torch.cat([p.lse for p in expected])
    )


def same(actual: Partial, expected: Partial) -> bool:
    lse = expected.lse.float()
    return torch.allclose(actual.out, expected.out.float(), atol=2e-5) and torch.allclose(
        actual.natural().lse, lse, atol=2e-5
    )


work = st.builds(
    Work,
    held=st.integers(0, 30),
    length=st.sampled_from([1, 1, 1, 2, 3, 9]),
    tail=st.booleans(),
).map(lambda w: w if w.tail else dataclasses.replace(w, held=w.held // T * T))


@given(st.lists(work, min_size=1, max_size=6), st.integers(0, 3), st.sampled_from([1, 2, 256]))
def test_any_mix_of_spans_agrees_with_plain_attention(
    works: list[Work], seed: int, tile_pages: int
) -> None:
    assert same(*run(works, seed))
    assert same(*run(works, seed, ReferenceAttention(HEADS, KV_HEADS, D, T, tile_pages)))


windowed = st.tuples(work, st.booleans(), st.integers(1, 40)).map(
    lambda drawn: dataclasses.replace(drawn[0], holes=drawn[1], window=drawn[2])
)


@given(
    st.lists(windowed, min_size=1, max_size=6),
    st.integers(0, 3),
    st.sampled_from([1, 2, 256]),
    st.sampled_from([1, 2, 5, 256]),
)
def test_rows_see_their_window_alone_in_any_shard(
    works: list[Work], seed: int, tile_pages: int, block: int
) -> None:
    assert same(*run(works, seed))
    assert same(*run(works, seed, ReferenceAttention(HEADS, KV_HEADS, D, T, tile_pages, block)))


@pytest.mark.parametrize("window", [1, 3, 300, 700, 1100])
def test_long_chunks_see_their_window_alone(window: int) -> None:
    """Longer than a block of rows, and than the tiles that torch's own kernel works in."""
    q, k, v = torch.randn(3, 900, 1, D, generator=torch.Generator().manual_seed(window))
    k, v = torch.cat([torch.randn(200, 1, D), k]), torch.cat([torch.randn(200, 1, D), v])
    ids = np.random.default_rng(0).permutation(-(-1100 // T))
    pool = torch.full((len(ids), 2, 1, T, D), 7.0)
    pool[ids, 0, 0], pool[ids, 1, 0] = k.view(-1, T, D), v.view(-1, T, D)
    chunk = Chunk(0, 200, 900, (0,), 0)
    span = seen(Span(0, 900, 200, ids, True), chunk, PageTable(enumerate(ids)), window, T)
    actual = ReferenceAttention(1, 1, D, T).plan([span]).run(q, k[200:], v[200:], pool)
    far = torch.arange(200, 1100).unsqueeze(1) - torch.arange(1100)
    scores = q[:, 0] @ k[:, 0].T / math.sqrt(D)
    scores = scores.masked_fill((far < 0) | (far >= window), -math.inf)
    assert torch.allclose(actual.out[:, 0], scores.softmax(-1) @ v[:, 0], atol=2e-5)
    assert torch.allclose(actual.lse[:, 0], scores.logsumexp(-1), atol=2e-5)


def test_a_span_keeps_only_the_pages_in_sight() -> None:
    """T is 4: the row at 50 sees 41 … 50, so pages 10, 11 and 12; page 11 is in another group."""
    table = PageTable((page, 100 + page) for page in (0, 1, 2, 9, 10, 12))
    span, chunk = Span(0, 1, 5 * 4 + 2, table.ids, True), Chunk(0, 50, 1, (0, 1), 0)
    near = seen(span, chunk, table, 10, T)
    assert near.pages.tolist() == [110, 112] and near.held == 4 + 2
    assert near.sight is not None and near.sight.logical.tolist() == [10, 12]
    assert near.sight.hidden(T) == 1
    assert seen(span, chunk, table, 0, T) is span and seen(span, chunk, table, 51, T) is span
    assert len(seen(span, chunk, table, 50, T).pages) == 6


def test_what_the_compiled_kernel_does_not_serve_is_computed_by_torch() -> None:
    odd = cpu_attention(HEADS, KV_HEADS, D + 8, T, torch.float32)
    half = cpu_attention(HEADS, KV_HEADS, D, T, torch.float16)
    assert isinstance(odd, ReferenceAttention) and isinstance(half, ReferenceAttention)
    assert isinstance(cpu_attention(HEADS, KV_HEADS, D, T, torch.bfloat16), CpuAttention)


def test_an_empty_shard_contributes_nothing() -> None:
    for length in (1, 5):
        actual, _ = run([Work(0, length, False), Work(8, 3, True)])
        assert torch.equal(actual.out[:length], torch.zeros(length, HEADS, D))
        assert torch.isneginf(actual.lse[:length]).all()


def test_a_long_chunk_needs_no_square_of_scores() -> None:
    """12,000 rows: the scores would be 576 MB a head; queries, states and copies stay below 1 %."""
    n = 12_000
    q, k, v = torch.randn(3, n, 1, 4)
    pages = np.arange(-(-n // 64), dtype=np.int64)
    pool = torch.zeros(len(pages), 2, 1, 64, 4)
    kernel = ReferenceAttention(1, 1, 4, 64)
    plan = kernel.plan([Span(0, n, 0, pages, True)])
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        state = plan.run(q, k, v, pool)
    largest = max(event.self_cpu_memory_usage for event in profile.key_averages())
    assert largest < 0.01 * n * n * 4
    assert torch.allclose(state.out[1], torch.softmax(q[1, 0] @ k[:2, 0].T / 2, 0) @ v[:2, 0])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.sampled_from([1.0, 40.0]))
def test_merged_parts_are_the_whole(sizes: list[int], spread: float) -> None:
    dice = torch.Generator().manual_seed(sum(sizes))
    q = torch.randn(3, HEADS, D, generator=dice) * spread
    kv = torch.randn(2, sum(sizes), KV_HEADS, D, generator=dice)
    parts, at = [], 0
    for size in sizes:
        part = plain(q, kv[:, at : at + size], [list(range(size))] * 3)
        parts.append(Partial(part.out.float(), part.lse.float()))
        at += size
    whole = plain(q, kv, [list(range(at))] * 3)
    assert same(merge(parts), whole)
    assert not merge(parts).out.isnan().any()


def test_merging_in_one_order_gives_equal_bits() -> None:
    parts = [run([Work(8, 3, False)], seed)[0] for seed in range(4)]
    first, second = merge(parts), merge([dataclasses.replace(part) for part in parts])
    assert torch.equal(first.out, second.out) and torch.equal(first.lse, second.lse)


def test_a_part_in_base_two_merges_as_itself() -> None:
    first, second = (run([Work(8, 3, False)], seed)[0] for seed in range(2))
    in_twos = Partial(second.out, second.lse / math.log(2), LogBase.TWO)
    assert torch.allclose(merge([first, in_twos]).out, merge([first, second]).out, atol=1e-6)


def test_empty_parts_change_nothing() -> None:
    part, _ = run([Work(8, 3, False)])
    for merged in (merge([empty(3, HEADS, D), part]), merge([part, empty(3, HEADS, D)])):
        assert torch.equal(merged.out, part.out) and torch.equal(merged.lse, part.lse)
    nothing = merge([empty(3, HEADS, D), empty(3, HEADS, D)])
    assert torch.equal(nothing.out, torch.zeros(3, HEADS, D)) and nothing.lse.isneginf().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_pools_are_read_in_float32(dtype: torch.dtype) -> None:
    laid, pool = lay([Work(9, 1, True), Work(6, 5, True)], 0)
    spans = [entry.span for entry in laid]
    q, k, v = torch.randn(3, 6, HEADS, D).to(dtype)
    k, v = k[:, :KV_HEADS], v[:, :KV_HEADS]
    pool = pool.to(dtype)
    narrow = cpu_attention(HEADS, KV_HEADS, D, T, dtype).plan(spans).run(q, k, v, pool)
    wide = (
        (
            cpu_attention(HEADS, KV_HEADS, D, T, torch.float32)
            if dtype == torch.bfloat16
            else ReferenceAttention(HEADS, KV_HEADS, D, T)
        )
        .plan(spans)
        .run(q.float(), k.float(), v.float(), pool.float())
    )
    assert narrow.out.dtype == torch.float32
    assert torch.equal(narrow.out, wide.out) and torch.equal(narrow.lse, wide.lse)
