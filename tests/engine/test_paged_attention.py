"""The CUDA backend's plans and calls over the kernels' oracle, against plain softmax attention."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine import plain_library
from tests.engine.test_attention_splits import cut
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
    windowed,
    work,
)
from tests.engine.test_engine_attention import lay as lay_works

from medha.errors import SetupError
from medha_worker import flashinfer
from medha_worker.attention import kv_splits
from medha_worker.attention import paged as paged_backend
from medha_worker.attention.flashinfer_plan import Decodes, Geometry, Kernel, Wrapper, fold
from medha_worker.attention.fp8_scales import FP8, Scales
from medha_worker.attention.graph_decode import GraphDecodes
from medha_worker.attention.kernel_interface import Partial, Span
from medha_worker.attention.kv_splits import Choose, lay, merges
from medha_worker.attention.paged import PagedAttention
from medha_worker.attention.reference import ReferenceAttention
from medha_worker.attention.split_costs import PrefixSplit, whole
from medha_worker.graphs import SIZES

CPU = torch.device("cpu")


def paged(
    choose: Choose = cut,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    kernel: Kernel = "fa3",
    decodes: Decodes = "cores",
    split_pages: int = 0,
    gathered_tokens: int = 99,
) -> PagedAttention:
    geometry = Geometry(
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=D,
        page_tokens=T,
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        kernel=kernel,
        decodes=decodes,
        split_pages=split_pages,
    )
    library: flashinfer.Library = plain_library  # type: ignore[assignment]
    return PagedAttention(geometry, library, CPU, choose=choose, gathered_tokens=gathered_tokens)


@given(st.lists(work, min_size=1, max_size=6), st.integers(0, 3), st.sampled_from([whole, cut]))
def test_any_mix_of_spans_agrees_with_plain_attention_on_paged_kernels(
    works: list[Work], seed: int, choose: Choose
) -> None:
    assert same(*run(works, seed, paged(choose)))


@given(st.lists(windowed, min_size=1, max_size=6), st.integers(0, 3), st.integers(1, 40))
def test_paged_kernels_see_the_window_of_their_layers_alone(
    works: list[Work], seed: int, window: int
) -> None:
    windowed = [dataclasses.replace(work, window=window) for work in works]
    assert same(*run(windowed, seed, paged()))


def test_small_chunks_are_attended_to_beside_cut_ones_and_decodes() -> None:
    def small(rows: int, tokens: int) -> PrefixSplit:
        return PrefixSplit(small=True) if rows < 4 else cut(rows, tokens)

    attention = paged(small)
    works = [Work(44, 2, True), Work(47, 3, True), Work(9, 1, True), Work(60, 8, True)]
    plan = attention.plan([entry.span for entry in lay_works(works, 0)[0]])
    assert [(call.batch.small, len(call.batch.rows)) for call in plan.chunks][-1] == (True, 5)
    assert same(*run(works, 0, attention))


@settings(max_examples=20)
@given(st.lists(work, min_size=1, max_size=6), st.integers(0, 3), st.sampled_from([3 * T, 99]))
def test_large_chunks_over_gathered_keys_agree_with_plain_attention(
    works: list[Work], seed: int, most: int
) -> None:
    for split in (gathered, lambda rows, _: PrefixSplit(rows % 5, rows % 2 == 0, rows > 2)):
        attention = paged(split, gathered_tokens=most)
        assert same(*run(works, seed, attention))
        assert same(*run(works[::-1], seed, attention)), "with plans and memory of another batch"


def gathered(rows: int, tokens: int) -> PrefixSplit:
    """Gather the keys of chunks from four rows on."""
    return PrefixSplit(gathered=rows >= 4)


def test_keys_are_gathered_in_equal_parts_and_the_chunk_with_what_is_beside_it() -> None:
    works = [
        Work(7 * T + 1, 5, True),
        Work(6 * T + 3, 4, False),
        Work(2, 4, True),
        Work(0, 3, True),
    ]
    spans = [entry.span for entry in lay_works(works, 0)[0]]
    batches = lay(spans, T, GROUP, gathered, gathered_tokens=3 * T)
    assert [(b.gathered, b.causal, len(b.pages), int(b.last_page[0])) for b in batches] == [
        (False, True, 1, 3),
        (True, False, 2, T),
        (True, False, 3, T),
        (True, False, 2, T),
        (True, True, 2, 2),
        (True, False, 3, T),
        (True, False, 3, T),
        (True, False, 1, 3),
        (True, True, 2, 2),
    ]
    assert not any(batch.gathered for batch in lay(spans, T, GROUP))


def test_only_fa3_over_pages_of_the_models_type_gathers_keys() -> None:
    assert paged(gathered_tokens=99).gathered_tokens == 99
    for other in (
        paged(kernel="fa2", gathered_tokens=99),
        paged(kernel="fa2", split_pages=3, gathered_tokens=99),
        paged(dtype=torch.bfloat16, kv_dtype=FP8, gathered_tokens=99),
    ):
        assert other.gathered_tokens == 0
    wide, half = (paged(gathered_tokens=tokens).scratch_bytes for tokens in (2000, 1000))
    assert wide - half == 1000 * 2 * KV_HEADS * D * 4


def test_heads_are_merged_some_at_a_time_where_the_library_takes_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_backend, "MERGED", 4 * D)
    assert same(*run([Work(40, 2, True), Work(3, 10, True)], 0, paged()))


def test_plans_that_are_held_at_a_time_do_not_disturb_each_other() -> None:
    attention = paged()
    works = [Work(9, 3, True), Work(6, 1, True), Work(0, 5, True), Work(21, 1, True)]
    (first, pool), (second, other) = lay_works(works, 0), lay_works(works[::-1], 1)
    q, k, v = torch.randn(3, 10, HEADS, D, generator=torch.Generator().manual_seed(0))
    own = (k[:, :KV_HEADS], v[:, :KV_HEADS])
    plans = [attention.plan([entry.span for entry in laid]) for laid in (first, second)]
    for plan, laid, pages in zip(plans, (first, second), (pool, other), strict=True):
        again = paged().plan([entry.span for entry in laid]).run(q, *own, pages)
        actual = plan.run(q, *own, pages)
        assert torch.equal(actual.out, again.out) and torch.equal(actual.lse, again.lse)


def test_plans_of_layers_with_other_windows_run_between_those_of_a_plan() -> None:
    """The first has rows with fewer states than others, the second has more states in all."""
    attention = paged()
    works = [Work(40, 2, True), Work(9, 5, True), Work(30, 8, True)]
    laid, pool = lay_works(works, 0)
    wide, more = lay_works([Work(60, 2, True), *works, Work(60, 9, True)], 1)
    q, k, v = torch.randn(3, 26, HEADS, D, generator=torch.Generator().manual_seed(0))
    own = (k[:, :KV_HEADS], v[:, :KV_HEADS])
    plan = attention.plan([entry.span for entry in laid])
    other = attention.plan([entry.span for entry in wide])
    states = []
    for _ in range(2):
        other.run(q, *own, more)
        states.append(plan.run(q[:15], own[0][:15], own[1][:15], pool).out.clone())
    assert states[0].isfinite().all() and torch.equal(*states)


def test_decodes_side_by_side_and_one_chunk_are_written_where_they_belong() -> None:
    """No index is needed then, and no state is copied."""
    laid, _ = lay_works([Work(9, 1, True), Work(6, 1, True), Work(30, 7, True)], 0)
    plan = paged(whole).plan([entry.span for entry in laid])
    assert plan.single is not None and plan.single.rows == slice(0, 2)
    assert plan.states is None and plan.chunks[0].rows == slice(2, 9)


def test_usual_batches_find_their_wrappers_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def each(rows: int, tokens: int) -> PrefixSplit:
        return PrefixSplit(2, rows % 2 == 0, rows == 3, rows == 4)

    attention = paged(each)
    attention.prepare((0, 9))
    wrappers = (
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "BatchDecodeWithPagedKVCacheWrapper",
    )
    for name in wrappers:
        monkeypatch.delattr(plain_library, name)
    works = [Work(23, length, True) for length in (5, 2, 3, 4, 1)]
    for window in (0, 9):
        windowed = [dataclasses.replace(work, window=window) for work in works]
        assert same(*run(windowed, 0, attention))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(32, 8, 128), (16, 1, 128), (32, 2, 128), (64, 4, 128), (96, 8, 128), (8, 1, 256)],
)
def test_states_of_split_keys_fit_the_workspace_of_any_head_counts(
    heads: int, kv_heads: int, head_dim: int
) -> None:
    """Of Llama 3 8B and 405B, Qwen3-235B by TP 4, 2 and 1, Mistral Large and Gemma."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_tokens": 64}
    half = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    for kernel in ("fa3", "fa2"):
        geometry = Geometry(**sizes, **half, kernel=kernel, decodes="tensor")  # type: ignore[arg-type]
        attention = PagedAttention(geometry, plain_library, CPU)  # type: ignore[arg-type]
        for rows in (2, 5, 16, 32, 64, 128, 500):
            for held in (1_920, 8_064, 32_512, 1 << 20):
                span = Span(0, rows, held, np.arange(held // 64 + 9), True)
                attention.plan([span])
    decodes = GraphDecodes(attention, SIZES[-1], 512, spare=0)
    decodes.plan([])


def test_a_wrapper_is_planned_again_once_its_last_plan_was_copied() -> None:
    class Moments:
        def __init__(self) -> None:
            self.seen: list[str] = []

        def plan(self) -> None:
            self.seen.append("plan")

        def record(self) -> None:
            self.seen.append("record")

        def synchronize(self) -> None:
            self.seen.append("wait")

    moments = Moments()
    wrapper = Wrapper(moments, moments)  # type: ignore[arg-type]
    wrapper.plan()
    wrapper.plan()
    assert moments.seen == ["plan", "record", "wait", "plan", "record"]


def test_folded_queries_are_rows_of_their_kv_heads() -> None:
    q = torch.randn(5, HEADS, D)
    folded = fold(q[:, :HEADS], KV_HEADS)
    assert folded.shape == (5 * GROUP, KV_HEADS, D)
    assert torch.equal(folded[1 * GROUP + 2, 1], q[1, GROUP + 2])


def test_states_are_merged_by_row_in_the_order_of_the_parts() -> None:
    """Rows 0 and 1 see 8 full pages and a rest, cut in 3 parts and a tail; rows 2 to 11 are one
    entry."""
    spans = [entry.span for entry in lay_works([Work(34, 2, True), Work(3, 10, True)], 0)[0]]

    def three(rows: int, tokens: int) -> PrefixSplit:
        return PrefixSplit(3 if rows == 2 else 0, packed=True)

    batches = lay(spans, T, GROUP, three)
    assert [(batch.causal, batch.packed) for batch in batches] == [(False, True), (True, False)]
    alone, several = merges(batches)
    assert several.rows.tolist() == [0, 1]
    assert several.states.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert alone.rows.tolist() == list(range(2, 12))
    assert alone.states.tolist() == [[number] for number in range(8, 18)]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_rows_with_few_states_are_not_padded_for_those_with_many(parts: list[int]) -> None:
    starts = np.cumsum([0, *range(2, 1 + len(parts))]).tolist()
    spans = [
        Span(start, 2 + at, 21 * T + 1, np.arange(25), True) for at, start in enumerate(starts)
    ]
    batches = lay(spans, T, GROUP, lambda rows, _: PrefixSplit(parts[rows - 2]))
    rows = np.concatenate([batch.rows for batch in batches])
    merged = merges(batches)
    assert sum(merge.states.size for merge in merged) < 2 * len(rows)
    assert sorted(row for merge in merged for row in merge.rows.tolist()) == sorted(set(rows))
    for merge in merged:
        for row, states in zip(merge.rows, merge.states, strict=True):
            assert states[states < len(rows)].tolist() == np.flatnonzero(rows == row).tolist()


def test_the_own_keys_of_a_large_narrow_chunk_run_on_fa2() -> None:
    for length, small in ((2 * T, False), (2 * T + 1, True)):
        span = Span(0, length, 6 * T, np.arange(9), True)
        assert {batch.small for batch in lay([span], T, GROUP, most_tokens=T)} == {small}


def test_no_part_of_a_prefix_is_longer_than_narrow_sums_allow() -> None:
    span = lay_works([Work(40, 3, True)], 0)[0][0].span
    (prefix, tail) = lay([span], T, GROUP, most_tokens=2 * T)
    assert not prefix.causal and prefix.kv_indptr.tolist() == [0, 2, 4, 6, 8, 10]
    assert tail.causal and len(tail.q_indptr) == 2


def test_chunks_whose_narrow_parts_would_take_too_much_memory_run_on_fa2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five parts of three rows each do not fit into the states of 14 rows."""
    monkeypatch.setattr(kv_splits, "MOST_STATES", 14)
    span = lay_works([Work(40, 3, True)], 0)[0][0].span
    (only,) = lay([span], T, GROUP, most_tokens=2 * T)
    assert only.small and only.causal and len(only.pages) == 11
    attention = paged(whole, kv_dtype=FP8)
    attention.most_tokens = 2 * T
    (call,) = attention.plan([span]).chunks
    assert not call.narrow


@settings(max_examples=20)
@given(st.lists(st.integers(0, 30), max_size=4), st.integers(0, 3), st.sampled_from([0, 9]))
def test_a_graphs_decodes_are_those_of_a_plan(held: list[int], seed: int, window: int) -> None:
    attention, spare = paged(), PAGES
    captured = GraphDecodes(attention, 6, 64, spare=spare, window=window)
    for shift in (0, 1):  # replayed with another batch
        works = [Work(min(h + shift, 30), 1, True, window=window) for h in held]
        laid, pool = lay_works(works, seed + shift)
        pool = torch.cat([pool, torch.zeros(1, *pool.shape[1:])])
        spans = [entry.span for entry in laid]
        q = torch.randn(6, HEADS, D, generator=torch.Generator().manual_seed(shift))
        k, v = q[:, :KV_HEADS], q[:, :KV_HEADS]
        assert captured.fits(spans)
        captured.plan(spans)
        actual = captured.run(q, k, v, pool)
        n = len(spans)
        assert actual.out.isfinite().all()
        if n:
            expected = attention.plan(spans).run(q[:n], k[:n], v[:n], pool)
            assert torch.allclose(actual.out[:n], expected.out, atol=1e-6)
            assert torch.allclose(actual.lse[:n], expected.lse, atol=1e-6)


def test_a_graph_made_in_inference_mode_is_planned_and_run_outside_of_it() -> None:
    """As an engine makes it, before the steps whose inputs are built in no mode at all."""
    laid, pool = lay_works([Work(9, 1, True)], 0)
    q = torch.randn(2, HEADS, D)
    with torch.inference_mode():
        captured = GraphDecodes(paged(), 2, 8, spare=PAGES - 1)
        captured.plan([])
    captured.plan([laid[0].span])
    actual = captured.run(q, q[:, :KV_HEADS], q[:, :KV_HEADS], pool)
    assert actual.out.isfinite().all()


def test_what_does_not_fit_a_graph_is_refused() -> None:
    captured = GraphDecodes(paged(), 2, 8, spare=PAGES)
    laid, _ = lay_works([Work(9, 1, True), Work(6, 2, True), Work(8, 1, False)], 0)
    decode, chunk, shard = (entry.span for entry in laid)
    assert captured.fits([decode])
    assert not captured.fits([chunk]) and not captured.fits([shard])
    assert not captured.fits([decode, decode])  # the second is not in row 1
    with pytest.raises(ValueError, match="do not fit 2 rows"):
        captured.plan([chunk])
    fixed = GraphDecodes(paged(kernel="fa2", split_pages=3), 2, 8, spare=PAGES)
    assert fixed.fits([]) and not fixed.fits([decode])


def scales(seed: int) -> Scales:
    dice = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(-4, 4, (KV_HEADS,), generator=dice).float().exp2() for _ in range(3)]
    return Scales(*drawn)


@pytest.mark.parametrize("kernel", ["fa3", "fa2"])
def test_pages_in_fp8_are_attended_to_as_the_values_that_they_stand_for(kernel: Kernel) -> None:
    """fa3 has queries in FP8 too, whose rounding moves scores by some percents of their spread."""
    works = [Work(30, 5, True), Work(14, 1, True), Work(25, 1, True), Work(16, 2, False)]
    laid, _ = lay_works(works, 0)
    of = scales(0)
    dice = torch.Generator().manual_seed(1)
    kept = of.store(torch.randn(PAGES * T, 2 * KV_HEADS, D, generator=dice))
    values = kept.float() * torch.cat((of.key, of.value)).view(1, -1, 1)
    pool, plain = (
        x.view(PAGES, T, 2, KV_HEADS, D).permute(0, 2, 3, 1, 4).contiguous() for x in (kept, values)
    )
    rows = sum(work.length for work in works)
    q = torch.randn(rows, HEADS, D, generator=dice)
    own = torch.zeros(2, rows, KV_HEADS, D)
    narrow = torch.zeros(2, rows, KV_HEADS, D).to(FP8)
    for entry in laid:
        for i in range(entry.span.length if entry.span.tail else 0):
            page, at = divmod(entry.span.held + i, T)
            own[:, entry.span.start + i] = plain[entry.span.pages[page], :, :, at]
            narrow[:, entry.span.start + i] = pool[entry.span.pages[page], :, :, at]
    spans = [entry.span for entry in laid]
    reference = ReferenceAttention(HEADS, KV_HEADS, D, T)
    expected = reference.plan(spans).run(q, own[0], own[1], plain)
    straight = reference.plan(spans).run(q, narrow[0], narrow[1], pool, of)
    assert torch.allclose(straight.out, expected.out, atol=1e-5)
    assert torch.allclose(straight.lse, expected.lse, atol=1e-5)
    attention = paged(kv_dtype=FP8, kernel=kernel)
    actual = attention.plan(spans).run(q, narrow[0], narrow[1], pool, of)
    atol = 0.1 if kernel == "fa3" else 1e-5
    assert torch.allclose(actual.out, expected.out, atol=atol)
    assert torch.allclose(actual.natural().lse, expected.lse, atol=atol)


def test_a_missing_library_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(
        SetupError, match=r"pip install flashinfer-python==0\.6.*requirements/cuda\.txt"
    ):
        flashinfer.flashinfer()


CALLS = (
    "BatchPrefillWithPagedKVCacheWrapper.__init__",
    "BatchPrefillWithPagedKVCacheWrapper.plan",
    "BatchPrefillWithPagedKVCacheWrapper.run",
    "BatchPrefillWithRaggedKVCacheWrapper.__init__",
    "BatchPrefillWithRaggedKVCacheWrapper.plan",
    "BatchPrefillWithRaggedKVCacheWrapper.run",
    "BatchDecodeWithPagedKVCacheWrapper.__init__",
    "BatchDecodeWithPagedKVCacheWrapper.plan",
    "BatchDecodeWithPagedKVCacheWrapper.run",
    "BatchMLAPagedAttentionWrapper.__init__",
    "BatchMLAPagedAttentionWrapper.plan",
    "BatchMLAPagedAttentionWrapper.run",
    "cascade.get_cascade_module",
    "rmsnorm",
    "silu_and_mul",
    "apply_rope_with_cos_sin_cache_inplace",
)


@pytest.mark.parametrize("name", CALLS)
def test_the_oracles_signatures_are_the_librarys(name: str) -> None:
    real: object = pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    ours: object = plain_library
    for part in name.split("."):
        ours, real = getattr(ours, part), getattr(real, part)
    assert callable(ours) and callable(real)
    known = list(inspect.signature(real).parameters.values())
    names = [entry.name for entry in known]
    for place, mine in enumerate(inspect.signature(ours).parameters.values()):
        assert mine.name in names, f"{name} has no {mine.name}"
        if mine.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            assert names[place] == mine.name, f"{mine.name} of {name} stands elsewhere"


def test_a_poisoned_row_would_be_seen() -> None:
    """The oracle poisons what it is given, so a row that no call writes is not taken for zero."""
    partial = Partial(torch.full((1, HEADS, D), np.nan), torch.full((1, HEADS), np.nan))
    actual, expected = run([Work(3, 1, True)], 0, paged())
    assert same(actual, expected) and not same(partial, expected)
