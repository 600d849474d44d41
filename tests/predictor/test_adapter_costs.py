"""LoRA adapters: what a batch reads, launches and computes for them, by expectation."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.model import ModelShape
from medha.predictor import BatchLoad, Costs, Predictor
from medha.profile import CPU_CORE, H100, H200, Profile
from medha.sim.scenario import LLAMA_3_8B
from medha.topology import Topology

RANK = 16
# Of all seven projections of a layer.
PARAMS = RANK * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
PROFILES = pytest.mark.parametrize("profile", [CPU_CORE, H100, H200], ids=lambda p: p.name)


def adapted(count: int, params: float = PARAMS) -> ModelShape:
    return msgspec.structs.replace(LLAMA_3_8B, adapters=count, adapter_params=params)


def load(
    shape: ModelShape, profile: Profile, topology: Topology, chunks: int, decodes: int
) -> BatchLoad:
    batch = Predictor(profile, shape, topology).load()
    for _ in range(chunks):
        batch.add_chunk(100, 0, yields=True)
    for _ in range(decodes):
        batch.add_decode(1000)
    return batch


def test_the_expected_number_of_adapters_grows_to_all_of_them() -> None:
    shape = adapted(3)
    assert shape.adapters_read(0) == 0.0
    assert shape.adapters_read(1) == pytest.approx(3 / 4)
    assert shape.adapters_read(2) == pytest.approx(3 / 4 + (9 / 16 * 2 / 3 + 3 / 16))
    assert shape.adapters_read(1000) == pytest.approx(3.0)
    assert adapted(0).adapters_read(9) == 0.0


@PROFILES
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_long_chunk_pays_two_operations_per_entry_and_adapted_row(
    profile: Profile, tp: int
) -> None:
    plain, with_adapters = (
        Costs(profile, shape, Topology(tp=tp)) for shape in (LLAMA_3_8B, adapted(1))
    )
    shard = PARAMS * (1 + 1 / tp) / 2
    rows = 10_000
    extra_s = with_adapters.layer(rows, 0.0, 0) - plain.layer(rows, 0.0, 0)
    assert extra_s == pytest.approx(0.5 * rows * 2 * shard / profile.linear_flops_per_s, rel=1e-6)
    read_s = shard * 2.0 / profile.linear_bytes_per_s
    assert with_adapters.adapter_s == pytest.approx(profile.layer_s + read_s)


@PROFILES
def test_each_adapter_of_a_batch_costs_its_launches_and_its_bytes(profile: Profile) -> None:
    shapes = [adapted(count, params=0.0) for count in (0, 1, 4)]
    for chunks, decodes in ((1, 0), (0, 32), (2, 40)):
        plain_s, single_s, four_s = (
            load(shape, profile, Topology(), chunks, decodes).seconds() for shape in shapes
        )
        entries = chunks + decodes
        for shape, seconds in zip(shapes[1:], (single_s, four_s), strict=True):
            expected = 32 * shape.adapters_read(entries) * profile.layer_s
            assert seconds - plain_s == pytest.approx(expected)


@PROFILES
@given(
    count=st.integers(0, 32),
    chunks=st.integers(0, 3),
    decodes=st.integers(0, 30),
    length=st.integers(1, 4000),
    spp=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=50, deadline=None)
def test_time_grows_with_every_token_and_every_adapter(
    profile: Profile, count: int, chunks: int, decodes: int, length: int, spp: int
) -> None:
    topology = Topology(spp=spp)
    fewer = load(adapted(count), profile, topology, chunks, decodes)
    more = load(adapted(count + 1), profile, topology, chunks, decodes)
    if chunks + decodes:
        assert fewer.seconds() < more.seconds()
        stages = [fewer.stage_s(stage) for stage in range(spp)]
        assert max(stages) == pytest.approx(fewer.seconds())
    assert fewer.seconds_with(length, 0) < fewer.seconds_with(length + 1, 0)
    assert fewer.seconds_with(length, 0) < more.seconds_with(length, 0)


@PROFILES
def test_the_largest_chunk_keeps_within_its_budget_with_adapters(profile: Profile) -> None:
    predictor = Predictor(profile, adapted(8), Topology())
    budget_s = 20 * predictor.step_s(0)
    running = load(adapted(8), profile, Topology(), 0, 4)
    tokens = predictor.largest_chunk(running, 500, 1 << 20, budget_s, step_tokens=1)
    if tokens:
        assert running.seconds_with(tokens, 500) <= budget_s < running.seconds_with(tokens + 1, 500)
    assert predictor.prefill_s(5000) > Predictor(profile, LLAMA_3_8B, Topology()).prefill_s(5000)


def test_a_model_without_adapters_is_described_to_older_releases_as_before() -> None:
    assert b"adapter" not in msgspec.json.encode(LLAMA_3_8B)
    assert msgspec.json.decode(msgspec.json.encode(adapted(2)), type=ModelShape) == adapted(2)
