"""Spans laid in parts over a paged kernel, run by plain torch, against attention all at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from medha_worker.attention.kernel_interface import LogBase, Partial, Sight, Span
from medha_worker.attention.kv_splits import (
    KernelBatch,
    lay,
    lay_singles,
    sees_a_run,
)
from medha_worker.attention.merge import empty, fold
from medha_worker.attention.reference import ReferenceAttention
from medha_worker.attention.split_costs import WHOLE, PrefixSplit

KV_HEADS, GROUP, D, T, PAGES = 2, 3, 16, 4, 200
SPLITS = {2: PrefixSplit(5, True), 5: PrefixSplit(3, gathered=True), 9: PrefixSplit(2, True)}


def cut(rows: int, tokens: int) -> PrefixSplit:
    """Split chunks of up to nine rows."""
    return next((split for most, split in SPLITS.items() if rows <= most), WHOLE)


def run_batch(batch: KernelBatch, q: torch.Tensor, pool: torch.Tensor, states: Partial) -> None:
    """Run the batch as a paged kernel does (log-sum-exp in base 2), merged into `states`."""
    rows = torch.from_numpy(batch.rows)
    queries, heads, at = q[rows], KV_HEADS * GROUP, 0
    if batch.packed:  # [rows, kv_heads, group, D] -> [rows · group, kv_heads, D]
        queries = queries.view(-1, KV_HEADS, GROUP, D).transpose(1, 2).reshape(-1, KV_HEADS, D)
    out, lse = torch.empty_like(queries), torch.empty(queries.shape[:2])
    for entry in range(len(batch.last_page)):
        cut = slice(int(batch.q_indptr[entry]), int(batch.q_indptr[entry + 1]))
        ids = batch.pages[batch.kv_indptr[entry] : batch.kv_indptr[entry + 1]]
        kv = pool[torch.from_numpy(ids.astype(np.int64))].permute(1, 2, 0, 3, 4).flatten(2, 3)
        count = (len(ids) - 1) * T + int(batch.last_page[entry])
        fold_of = 1 if batch.packed else GROUP
        keys, values = kv[:, :, :count].repeat_interleave(fold_of, dim=1)
        scores = torch.einsum("nhd,htd->nht", queries[cut], keys) / math.sqrt(D)
        if batch.causal:
            n = cut.stop - cut.start
            hidden = torch.ones(n, count).tril(count - n) == 0
            scores = scores.masked_fill(hidden.unsqueeze(1), -math.inf)
        out[cut] = torch.einsum("nht,htd->nhd", scores.softmax(-1), values)
        lse[cut] = scores.logsumexp(-1) / math.log(2)
    if batch.packed:
        out = out.view(-1, GROUP, KV_HEADS, D).transpose(1, 2).reshape(-1, heads, D)
        lse = lse.view(-1, GROUP, KV_HEADS).transpose(1, 2).reshape(-1, heads)
    for entry, first in enumerate(batch.q_indptr[:-1] // (GROUP if batch.packed else 1)):
        at = int(first)
        end = int(batch.q_indptr[entry + 1]) // (GROUP if batch.packed else 1)
        own = rows[at:end]
        whole = Partial(states.out[own], states.lse[own])
        fold(whole, Partial(out[at:end], lse[at:end], LogBase.TWO))
        states.out[own], states.lse[own] = whole.out, whole.lse


work = st.tuples(st.integers(0, 60), st.integers(2, 12), st.booleans()).map(
    lambda w: w if w[2] else (w[0] // T * T, *w[1:])
)


@given(st.lists(work, min_size=1, max_size=4), st.integers(0, 3))
@settings(deadline=None)
def test_parts_merge_into_attention_over_the_whole(
    works: list[tuple[int, int, bool]], seed: int
) -> None:
    dice = torch.Generator().manual_seed(seed)
    free, spans, row = np.random.default_rng(seed).permutation(PAGES), [], 0
    pool = torch.randn(PAGES, 2, KV_HEADS, T, D, generator=dice)
    for held, length, tail in works:
        count = -(-(held + (length if tail else 0)) // T)
        ids, free = free[:count], free[count:]
        spans.append(Span(row, length, held, ids.astype(np.int64), tail))
        row += length
    q = torch.randn(row, KV_HEADS * GROUP, D, generator=dice)
    own = torch.zeros(2, row, KV_HEADS, D)
    for span in spans:
        for i in range(span.length if span.tail else 0):
            place = span.held + i
            own[:, span.start + i] = pool[span.pages[place // T], :, :, place % T]
    expected = (
        ReferenceAttention(KV_HEADS * GROUP, KV_HEADS, D, T)
        .plan(spans)
        .run(q, own[0], own[1], pool)
    )
    states = empty(row, KV_HEADS * GROUP, D)
    for batch in lay(spans, T, GROUP, cut, gathered_tokens=5 * T):
        run_batch(batch, q, pool, states)
    assert torch.allclose(states.out, expected.out, atol=2e-5)
    assert torch.allclose(states.lse, expected.lse, atol=2e-5)


def test_small_chunks_run_on_the_kernel_that_splits_by_itself() -> None:
    def small(rows: int, tokens: int) -> PrefixSplit:
        return PrefixSplit(parts=3, small=rows == 16)

    pages = np.arange(128)
    spans = [Span(0, 16, 8176, pages, True), Span(16, 300, 0, np.arange(5), True)]
    batches = lay(spans, 64, GROUP, small)
    assert [(batch.small, batch.causal, batch.packed) for batch in batches] == [
        (False, True, False),
        (True, True, False),
    ]
    assert batches[1].rows.tolist() == list(range(16))
    assert batches[1].pages.tolist() == pages.tolist()


def test_a_chunk_that_is_not_cut_is_one_causal_entry() -> None:
    (batch,) = lay([Span(3, 20, 6, np.arange(7), True)], T, GROUP)
    assert batch.causal and not batch.packed
    assert batch.rows.tolist() == list(range(3, 23))
    assert batch.q_indptr.tolist() == [0, 20] and batch.kv_indptr.tolist() == [0, 7]
    assert batch.last_page.tolist() == [2]


def test_a_span_that_sees_nothing_is_in_no_entry() -> None:
    assert lay([Span(0, 3, 0, np.arange(0), False)], T, GROUP) == ()
    assert lay_singles([Span(0, 1, 0, np.arange(0), False)], T) is None


def test_a_window_over_a_run_of_pages_is_told_to_the_kernel_and_one_over_holes_refused() -> None:
    """Rows from 17 on see 8 tokens back: pages 2, 3 and their own; 2 is the first in sight."""
    span = Span(0, 3, 9, np.arange(5), True, Sight(8, 17, np.array([2, 3, 4])))
    assert sees_a_run(span, T)
    (batch,) = lay([span], T, GROUP, cut)
    assert batch.causal and batch.window == 8 and batch.q_indptr.tolist() == [0, 3]
    holes = replace(span, held=5, sight=Sight(8, 17, np.array([2, 4])))
    assert not sees_a_run(holes, T) and not sees_a_run(replace(span, tail=False), T)
    with pytest.raises(ValueError, match="separate pages"):
        lay([holes], T, GROUP)
