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
from medha.predictor import Costs, Predictor
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


# One H200, bfloat16, Llama-3-8B. Tokens of isolated prefills and their seconds; then batches that
# the fit has not seen: chunks (rows, keys before), decodes, the keys that they read, milliseconds.
PREFILLS_S = {2048: 0.04761, 8192: 0.2251, 32_768: 1.3472, 131_072: 12.4395}
BATCHES = (
    (((102, 64), (102, 0)), 3, 74_496, 10.97),
    (((1099, 0), (44, 0)), 3, 29_056, 29.14),
    (((1206, 448), (128, 0)), 7, 43_904, 34.86),
    (((753, 0), (28, 0)), 1, 11_520, 20.60),
    (((985, 88_448), (891, 0)), 9, 167_296, 141.97),
    (((28, 0),), 12, 126_592, 9.92),
    (((26, 0),), 5, 16_064, 6.37),
    (((23, 0),), 2, 2048, 5.85),
    (((31, 0),), 17, 260_224, 14.22),
    (((34, 0),), 2, 5184, 6.29),
    (((208, 128),), 4, 3072, 9.10),
)


def test_the_h200_is_as_it_was_measured() -> None:
    of = Predictor(H200, LLAMA_3_8B, Topology())
    for tokens, seconds in PREFILLS_S.items():
        assert of.prefill_s(tokens) == pytest.approx(seconds, rel=0.035)
    for chunks, decodes, keys, measured_ms in BATCHES:
        load = of.load()
        for rows, before in chunks:
            load.add_chunk(rows, before, yields=True)
        load.add_decodes(decodes, keys + decodes)
        assert 1e3 * load.seconds() == pytest.approx(measured_ms, rel=0.11)


# The H100's attention is scaled from the A100 by peak rate, which an H200 was seen not to reach.
@pytest.mark.parametrize("newest", ["h200", "h100"])
def test_faster_machines_are_predicted_to_be_faster(newest: str) -> None:
    seconds = [
        sum(
            operator_s(part, Costs(SHIPPED[name], LLAMA_3_8B, Topology()))
            for part in (Operator("linear", 512), Operator("attention", 512, 100_000))
        )
        for name in (newest, "a100", "cpu-core")
    ]
    assert seconds == sorted(seconds)
    assert CPU_CORE.valid_rows == 0
