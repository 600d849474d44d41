"""Splits of chunks' keys: what a model of tiles on multiprocessors says, and when it was right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha_worker.attention.split_costs import (
    MOST_PARTS,
    SPLIT_STATES,
    WHOLE,
    PrefixSplit,
    SplitCosts,
)

LLAMA = SplitCosts(32, 8, 128, 2, 132, one_type=True)
SHARD = SplitCosts(8, 1, 128, 2, 132, one_type=True)

# One H200, microseconds of a layer: rows, prefix, split -> measured.
MEASURED = (
    (128, 129_024, PrefixSplit(), 1712),
    (128, 129_024, PrefixSplit(4), 492),
    (160, 129_024, PrefixSplit(2), 914),
    (160, 129_024, PrefixSplit(3, True), 643),
    (192, 129_024, PrefixSplit(8, True), 764),
    (384, 129_024, PrefixSplit(4), 1392),
    (448, 129_024, PrefixSplit(7, True), 1685),
    (512, 129_024, PrefixSplit(1, False, True), 1758),
    (768, 129_024, PrefixSplit(2, False, True), 2511),
    (896, 129_024, PrefixSplit(4), 3275),
    (1024, 129_024, PrefixSplit(), 3792),
    (1280, 129_024, PrefixSplit(2, False, True), 4062),
    (2048, 129_024, PrefixSplit(2), 7739),
    (2048, 129_024, PrefixSplit(2, True, True), 6508),
    (128, 32_768, PrefixSplit(small=True), 215),
    (32, 32_768, PrefixSplit(small=True), 62),
    (32, 8192, PrefixSplit(small=True), 25),
    (96, 8192, PrefixSplit(small=True), 53),
    (1024, 32_768, PrefixSplit(0, False, True), 855),
)


@pytest.mark.parametrize(("rows", "tokens", "split", "measured_us"), MEASURED)
def test_costs_are_near_what_a_gpu_took(
    rows: int, tokens: int, split: PrefixSplit, measured_us: int
) -> None:
    assert LLAMA.seconds(split, rows, tokens) == pytest.approx(1e-6 * measured_us, rel=0.17)


def test_rows_that_fill_a_tile_badly_are_packed_and_few_rows_are_split_for_all_processors() -> None:
    assert LLAMA.choose(160, 129_024).packed and not LLAMA.choose(128, 129_024).packed
    assert LLAMA.choose(128, 129_024) == PrefixSplit(4)
    assert LLAMA.choose(64, 129_024).parts >= 8
    assert LLAMA.choose(64, 8192).small
    assert SHARD.choose(128, 129_024).parts > 8, "one KV head leaves most processors idle"


def test_keys_are_gathered_where_many_rows_share_the_copy() -> None:
    assert LLAMA.choose(2048, 129_024).gathered
    assert not LLAMA.choose(256, 129_024).gathered
    other = SplitCosts(32, 8, 128, 1, 132, one_type=False)
    assert not other.choose(2048, 129_024).gathered and not other.choose(32, 8192).small


@given(st.integers(2, 20_000), st.integers(0, 1 << 20), st.sampled_from([LLAMA, SHARD]))
def test_a_choice_is_no_slower_than_one_entry_and_its_states_fit(
    rows: int, tokens: int, costs: SplitCosts
) -> None:
    split = costs.choose(rows, tokens)
    assert costs.seconds(split, rows, tokens) <= 1.15 * costs.seconds(WHOLE, rows, tokens)
    assert (split.parts <= MOST_PARTS and split.parts * rows <= SPLIT_STATES) or not split.parts
