"""The profiles that come with the package, against the timings that they stand for."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from benchmarks.profiles import FILES, TIMINGS, Timings, growing
from hypothesis import given
from hypothesis import strategies as st

from medha import profile as profile_module
from medha.calibration import Operator, operator_s
from medha.model import ModelShape
from medha.predictor import Costs
from medha.profile import CPU_CORE, H200, SHIPPED, shipped
from medha.sim.scenario import LLAMA_3_8B
from medha.topology import Topology


def test_every_file_is_a_profile_of_its_own_name() -> None:
    folder = pathlib.Path(profile_module.__file__).parent / "profiles"
    names = {path.stem for path in folder.glob("*.json")}
    assert names == SHIPPED.keys() >= {"cpu-core", "a100", "h100", "h200"}
    for name, profile in SHIPPED.items():
        assert profile.name == name and shipped(name) == profile


@pytest.mark.skipif(not TIMINGS.is_dir(), reason="the public timings are not at hand")
@pytest.mark.parametrize(
    ("name", "file", "most_rows", "mean", "p95"),
    [
        (*which[:3], *bounds)
        for which, bounds in zip(FILES, ((0.05, 0.1), (0.03, 0.08), (0.05, 0.12)), strict=True)
    ],
)
def test_layers_take_as_long_as_they_were_timed(
    name: str, file: str, most_rows: int, mean: float, p95: float
) -> None:
    timings = Timings(SHIPPED[name], TIMINGS / file, most_rows)
    off = timings.errors[timings.unseen]
    assert off.mean() < mean and np.quantile(off, 0.95) < p95, (off.mean(), np.quantile(off, 0.95))
    sums = [times[timings.unseen].sum() for times in (timings.predicted, timings.measured)]
    assert sums[0] == pytest.approx(sums[1], rel=0.05)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30))
def test_the_nearest_growing_values_grow_and_are_nearest(values: list[float]) -> None:
    fitted = growing(np.array(values))
    assert len(fitted) == len(values) and (np.diff(fitted) >= 0).all()
    assert fitted.mean() == pytest.approx(np.mean(values))
    flat = np.full(len(values), np.mean(values))
    risen = np.maximum.accumulate(values)
    apart = ((fitted - values) ** 2).sum()
    assert apart <= ((flat - values) ** 2).sum() + 1e-9
    assert apart <= ((risen - values) ** 2).sum() + 1e-9


# One H200, bfloat16: rows of a 4,096 × 28,672 product and its TFLOP/s; chunk over a million tokens
# (32 heads of 128 over 8) and TFLOP/s by the best kernel.
PRODUCTS = {128: 371, 256: 532, 512: 676, 2048: 759}
CHUNKS = {32: 422, 64: 498, 128: 554, 512: 542, 2048: 545}


def test_the_h200_is_as_it_was_measured() -> None:
    lone = ModelShape(
        layers=1, hidden=4096, heads=1, kv_heads=1, head_dim=1, vocab=8, intermediate=28672 // 3
    )
    costs = Costs(H200, lone, Topology())
    for rows, rate in PRODUCTS.items():
        seconds = lone.linear_flops(rows) / (rate * 1e12)
        assert operator_s(Operator("linear", rows), costs) == pytest.approx(seconds, rel=0.05)
    costs = Costs(H200, LLAMA_3_8B, Topology())
    for chunk, rate in CHUNKS.items():
        seconds = LLAMA_3_8B.attention_flops(chunk, 1_000_000) / (rate * 1e12)
        predicted = operator_s(Operator("attention", chunk, 1_000_000), costs)
        assert predicted == pytest.approx(seconds, rel=0.08)
    read = 1_000_001 * LLAMA_3_8B.kv_bytes_per_token_layer
    assert costs.decodes(1, 1_000_001) == pytest.approx(read / 4.351e12, rel=0.05)


def test_faster_machines_are_predicted_to_be_faster() -> None:
    seconds = [
        sum(
            operator_s(part, Costs(SHIPPED[name], LLAMA_3_8B, Topology()))
            for part in (Operator("linear", 512), Operator("attention", 512, 100_000))
        )
        for name in ("h200", "h100", "a100", "cpu-core")
    ]
    assert seconds == sorted(seconds)
    assert CPU_CORE.valid_rows == 0
