"""Latents through FlashInfer's calls, on their oracle: chunks, decodes and shards mixed."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.engine import plain_library
from tests.engine.test_engine_families import prefill
from tests.support.recalling_prompts import recalling
from tests.support.solo_engine import SoloEngine

from medha.checkpoints.decoder_config import read_config
from medha.checkpoints.latent_attention import LatentAttention
from medha.model import LatentShape
from medha_worker import flashinfer
from medha_worker.attention.kernel_interface import Span
from medha_worker.attention.latent_paged import (
    MOST_QUERIES,
    LatentGeometry,
    LatentPagedAttention,
)
from medha_worker.attention.reference import ReferenceAttention
from medha_worker.model.checkpoint_writer import FAMILIES, TinyModel

HEADS, RANK, ROPE, T = 3, 24, 8, 16
LATENT = LatentAttention(
    shape=LatentShape(kv_rank=RANK, nope_dim=8, rope_dim=ROPE, value_dim=8), scale=0.3
)
LIBRARY: flashinfer.Library = plain_library  # type: ignore[assignment]
CPU = torch.device("cpu")
# (earlier tokens here, rows, the chunk's own keys are here)
Work = tuple[int, int, bool]


def paged(
    latent: LatentAttention = LATENT, heads: int = HEADS, **more: int
) -> LatentPagedAttention:
    geometry = LatentGeometry(
        heads=heads, latent=latent, page_tokens=T, dtype=torch.float32, kernel="fa3"
    )
    return LatentPagedAttention(geometry, LIBRARY, CPU, **more)


def laid(works: list[Work]) -> tuple[list[Span], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Spans on pages in random order, with queries, own latents, and a pool that is NaN where
    nothing was written."""
    dice = torch.Generator().manual_seed(len(works))
    rows = sum(length for _, length, _ in works)
    ids = np.random.default_rng(1).permutation(400)
    pool = torch.full((400, 1, 1, T, RANK + ROPE), torch.nan)
    q = torch.randn(rows, HEADS, RANK + ROPE, generator=dice)
    own = torch.randn(rows, 1, RANK + ROPE, generator=dice)
    spans, start, taken = [], 0, 0
    for held, length, tail in works:
        tokens = held + length * tail
        pages = ids[taken : taken + -(-tokens // T)]
        taken += len(pages)
        keys = torch.randn(tokens, RANK + ROPE, generator=dice)
        if tail:
            keys[held:] = own[start : start + length, 0]
        for place, key in enumerate(keys):
            pool[pages[place // T], 0, 0, place % T] = key
        spans.append(Span(start, length, held, pages, tail))
        start += length
    return spans, q, own, pool


MIXED: list[Work] = [
    (100, 1, True),
    (0, 40, True),
    (32, 5, False),
    (0, 3, False),
    (47, 20, True),
    (0, 1, True),
    (64, 1, False),
]


@pytest.mark.parametrize(
    "works",
    [
        [(0, 1, True)],
        [(n, 1, True) for n in (0, 15, 16, 17, 200)],
        [(300, 70, True)],
        [(48, 30, False), (0, 7, False)],
        [(9, 1, True), (20, 3, True), (70, 1, True)],
        MIXED,
    ],
)
@pytest.mark.parametrize("most_queries", [MOST_QUERIES, 3 * HEADS, 1])
def test_every_mixture_is_attended_as_in_plain_torch(works: list[Work], most_queries: int) -> None:
    spans, q, own, pool = laid(works)
    plain = ReferenceAttention(HEADS, 1, RANK + ROPE, T, latent=LATENT)
    expected = plain.plan(spans).run(q, own, own, pool)
    actual = paged(most_queries=most_queries).plan(spans).run(q, own, own, pool).natural()
    torch.testing.assert_close(actual.out, expected.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual.lse, expected.lse, rtol=1e-4, atol=1e-5)


def test_a_batch_takes_one_call_for_each_mask_and_plans_outlive_others() -> None:
    attention = paged()
    spans, q, own, pool = laid(MIXED)
    first = attention.plan(spans)
    assert len(first.calls) == 2
    expected = first.run(q, own, own, pool)
    for _ in range(attention.turns - 1):
        assert len(attention.plan(spans[:1]).calls) == 1
    again = first.run(q, own, own, pool)
    assert torch.equal(again.out, expected.out) and torch.equal(again.lse, expected.lse)


def test_more_rows_than_the_work_list_holds_take_several_calls() -> None:
    """128 heads and 12,000 rows: the oracle refuses lists that are too long."""
    pages = np.arange(12_000 // T)
    calls = paged(heads=128).plan([Span(0, 12_000, 0, pages, True)]).calls
    borders = (0, 4096, 8192, 12_000)
    assert [call.rows for call in calls] == list(map(slice, borders, borders[1:]))


@pytest.mark.parametrize("name", ["deepseek_v2, groups", "deepseek_v3"])
def test_an_engine_on_these_calls_gives_the_tokens_of_the_compiled_kernel(
    name: str, checkpoint: Callable[[TinyModel], pathlib.Path]
) -> None:
    folder = checkpoint(FAMILIES[name])
    config = read_config(folder)
    assert config.latent is not None
    geometry = LatentGeometry(
        heads=4, latent=config.latent, page_tokens=64, dtype=torch.float32, kernel="fa2"
    )
    kernel = LatentPagedAttention(geometry, LIBRARY, CPU)
    prompts = [recalling(length, 512, seed=length) for length in (1, 30, 130, 577)]
    engine = SoloEngine(folder, pages=64, attention=kernel)
    assert engine.generate(prompts, 20, chunk=128) == SoloEngine(folder, pages=64).generate(
        prompts, 20, chunk=128
    )
    tokens = recalling(400, 512, seed=4)
    logits = prefill(engine, 1, tokens, 123, 1, 1)
    torch.testing.assert_close(
        logits, prefill(SoloEngine(folder, pages=8), 1, tokens, 400), rtol=1e-3, atol=2e-3
    )
