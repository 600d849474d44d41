"""Fitting a profile: recovers what made the samples, survives noise and pauses, never negative."""

from __future__ import annotations

import random

import msgspec
import pytest

from medha.calibration import Sample, fit
from medha.errors import SpecError
from medha.model import ModelShape
from medha.predictor import Predictor
from medha.profile import A100, CPU_CORE, Profile, decode, encode
from medha.topology import Topology

TINY = ModelShape(
    layers=4,
    hidden=256,
    heads=8,
    kv_heads=2,
    head_dim=32,
    intermediate=1024,
    vocab=4096,
    param_bytes=4.0,
    kv_bytes=4.0,
)
SOLO = Topology()
TRUTH = msgspec.structs.replace(
    CPU_CORE,
    linear_flops_per_s=9e10,
    linear_bytes_per_s=1.5e10,
    attention_flops_per_s=3e9,
    attention_bytes_per_s=2e9,
    batch_s=4e-3,
    layer_s=5e-4,
    sequence_s=5e-5,
)
WARMUP = (
    ((1, 0, True),),
    ((1, 4000, True),),
    ((1, 16, True),) * 8,
    ((1, 2000, True),) * 8,
    ((32, 0, False),),
    ((128, 0, False),),
    ((512, 0, False),),
    ((1024, 0, False),),
    ((64, 3000, False),),
    ((256, 3000, False),),
    ((512, 7000, False),),
    ((128, 0, False), (1, 500, True), (1, 500, True)),
)
UNSEEN = (
    ((300, 1500, False),),
    ((1, 1000, True),) * 4,
    ((2048, 0, False),),
    ((256, 20_000, False),),
)


def measured(noise: float = 0.0, repeats: int = 1, seed: int = 0) -> list[Sample]:
    rng, truth = random.Random(seed), Predictor(TRUTH, TINY, SOLO)
    return [
        Sample(entries, truth.batch_s(entries) * (1 + rng.uniform(0, noise)))
        for entries in WARMUP
        for _ in range(repeats)
    ]


def worst(profile: Profile) -> float:
    """Largest relative error on batches that were not measured."""
    mine, truth = Predictor(profile, TINY, SOLO), Predictor(TRUTH, TINY, SOLO)
    return max(abs(mine.batch_s(batch) / truth.batch_s(batch) - 1) for batch in UNSEEN)


def test_exact_measurements_are_reproduced_on_batches_never_seen() -> None:
    profile = fit(measured(), TINY, SOLO)
    assert profile.error < 0.01
    assert worst(profile) < 0.05
    assert profile.valid_rows == 1024 and profile.valid_keys == 7512


@pytest.mark.parametrize("seed", range(4))
def test_noise_of_a_fifth_costs_less_than_a_fifth(seed: int) -> None:
    assert worst(fit(measured(0.2, seed=seed), TINY, SOLO)) < 0.25


def test_a_pause_in_one_measurement_of_three_is_seen_through() -> None:
    samples = measured(0.02, repeats=3)
    spoiled = [
        msgspec.structs.replace(sample, seconds=sample.seconds * 20) if index % 3 == 0 else sample
        for index, sample in enumerate(samples)
    ]
    assert worst(fit(spoiled, TINY, SOLO)) < 0.1


def test_one_spoiled_batch_moves_the_rest_little() -> None:
    samples = measured(0.02)
    samples[5] = msgspec.structs.replace(samples[5], seconds=10.0)
    assert worst(fit(samples, TINY, SOLO)) < 0.25


@pytest.mark.parametrize("seconds", [1e-9, 1e-3, 50.0])
def test_no_measurement_makes_a_cost_vanish(seconds: float) -> None:
    samples = [Sample(entries, seconds) for entries in WARMUP]
    profile = fit(samples, TINY, SOLO)
    of = Predictor(profile, TINY, SOLO)
    assert of.batch_s([(64, 0, False)]) < of.batch_s([(128, 0, False)])
    for field, value in msgspec.structs.asdict(profile).items():
        if field.endswith("_per_s"):
            assert 0 < value < float("inf")


def test_nonsense_and_silence_leave_the_guess() -> None:
    nonsense = [Sample(((1, 0, True),), float("nan")), Sample((), 1.0), Sample(WARMUP[0], -1.0)]
    for samples in ([], nonsense):
        assert fit(samples, TINY, SOLO, name="cpu-core") == CPU_CORE


def test_a_profile_survives_its_json_and_junk_is_named() -> None:
    assert decode(encode(A100)) == A100
    with pytest.raises(SpecError, match=r"gpu\.json is .*must hold a profile"):
        decode(b'{"name": "x"}', "gpu.json")
    with pytest.raises(SpecError):
        decode(encode(A100).replace(b"231000000000000.0", b"0.0"))
