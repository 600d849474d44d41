"""Products in tiles: steps that only go up, never below the rate, and the plain law without."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.model import ModelShape
from medha.predictor import Predictor, Products
from medha.profile import A100, H100, H200, Profile, Tile
from medha.sim.scenario import LLAMA_3_8B
from medha.topology import Topology

# One product counts: 1,024 columns of depth 1,000, in tiles of 128 × 128, eight of them a wave.
LONE = ModelShape(
    layers=1, hidden=1000, heads=1, kv_heads=1, head_dim=1, intermediate=1, vocab=1024
)
EIGHT = msgspec.structs.replace(
    A100,
    tiles=(Tile(rows=128, columns=128),),
    multiprocessors=8,
    roofline_power=16.0,
    wave_share=1.0,
    product_s=0.0,
    linear_flops_per_s=1e12,
    linear_bytes_per_s=1e15,
)


@pytest.mark.parametrize("profile", [A100, H100])
@given(rows=st.integers(1, 20_000), more=st.integers(1, 3000), tp=st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=200, deadline=None)
def test_more_rows_never_take_less_and_never_beat_the_rate(
    profile: Profile, rows: int, more: int, tp: int
) -> None:
    of = Products(profile, LLAMA_3_8B, tp)
    assert rows * of.flop <= of.layer(rows) <= of.layer(rows + more)
    assert rows * of.head_flop <= of.head(rows) <= of.head(rows + more)


def test_a_row_beyond_a_tile_costs_the_next_one() -> None:
    of = Products(EIGHT, LONE, 1)
    wave_s = 2 * 1000 * 128 * 1024 / 1e12
    for rows, waves in ((1, 1), (128, 1), (129, 2), (256, 2), (257, 3)):
        assert of.head(rows) == pytest.approx(waves * wave_s, rel=1e-3), rows


def test_the_last_wave_counts_as_full_as_far_as_the_profile_says() -> None:
    wide = msgspec.structs.replace(LONE, vocab=1152)  # nine tiles, eight at a time
    wave_s = 2 * 1000 * 128 * 1024 / 1e12
    for share, waves in ((0.0, 1.125), (0.5, 1.5625), (1.0, 2.0)):
        of = Products(msgspec.structs.replace(EIGHT, wave_share=share), wide, 1)
        assert of.head(100) == pytest.approx(waves * wave_s, rel=1e-3)


def test_the_fastest_tile_counts() -> None:
    small = Tile(rows=64, columns=64, efficiency=0.8)
    of = Products(msgspec.structs.replace(EIGHT, tiles=(*EIGHT.tiles, small)), LONE, 1)
    wave_s = 2 * 1000 * 128 * 1024 / 1e12
    assert of.head(64) == pytest.approx(0.5 / 0.8 * wave_s, rel=1e-3)
    assert of.head(128) == pytest.approx(wave_s, rel=1e-3)


def test_without_tiles_time_grows_by_the_row() -> None:
    of = Products(H200, LLAMA_3_8B, 1)
    assert of.layer(128) < of.layer(129) < 1.01 * of.layer(128)
    p = H200.roofline_power
    weights = LLAMA_3_8B.attention_params + LLAMA_3_8B.mlp_params
    seconds = (2.0 * weights / H200.linear_bytes_per_s) ** p
    seconds += (2.0 * weights * 700 / H200.linear_flops_per_s) ** p
    assert of.layer(700) == pytest.approx(seconds ** (1.0 / p))


def test_small_work_of_a_layer_has_a_least_time() -> None:
    idle = msgspec.structs.replace(A100, elementwise_s=0.0)
    for rows, share in ((1, 1.0), (8192, 0.01)):
        least, none = (
            Predictor(profile, LLAMA_3_8B, Topology()).batch_s([(rows, 0, False)])
            for profile in (A100, idle)
        )
        assert least - none == pytest.approx(share * 32 * A100.elementwise_s, rel=0.3, abs=1e-5)
