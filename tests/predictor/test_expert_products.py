"""Layers with experts: what a batch reads and computes of them, and what fits into a budget."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.calibration import Operator, Sample, fit, operator_s
from medha.model import ModelShape
from medha.predictor import Costs, Predictor, Products
from medha.profile import A100, CPU_CORE, H100, H200, Profile
from medha.topology import Topology

QWEN3_30B_A3B = ModelShape(
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    intermediate=6144,
    vocab=151936,
    experts=128,
    experts_per_token=8,
    expert_intermediate=768,
    expert_layers=48,
)
DENSE = msgspec.structs.replace(
    QWEN3_30B_A3B, experts=0, experts_per_token=0, expert_intermediate=0, expert_layers=0
)
HALF = msgspec.structs.replace(QWEN3_30B_A3B, expert_layers=24)
PROFILES = pytest.mark.parametrize("profile", [CPU_CORE, A100, H100, H200], ids=lambda p: p.name)


def test_all_parameters_count_but_few_compute() -> None:
    # 30,532,122,624 in the published files, with a norm of 128 for queries and for keys per layer.
    assert QWEN3_30B_A3B.params == 30_532_122_624 - 48 * 2 * 128
    per_token = 48 * QWEN3_30B_A3B.linear_flops(1) / 2 + QWEN3_30B_A3B.vocab * 2048
    assert per_token == pytest.approx(3.0e9, rel=0.02)
    assert QWEN3_30B_A3B.kv_bytes_per_token == 48 * 2 * 4 * 128 * 2


@given(experts=st.integers(1, 64), share=st.floats(0, 1), rows=st.integers(1, 80))
@settings(max_examples=20)
def test_distinct_experts_are_those_that_draws_find(experts: int, share: float, rows: int) -> None:
    selected = max(1, round(share * experts))
    shape = msgspec.structs.replace(
        QWEN3_30B_A3B, experts=experts, experts_per_token=selected, kv_heads=1
    )
    dice, trials, distinct = random.Random(experts), 400, 0
    for _ in range(trials):
        distinct += len({n for _ in range(rows) for n in dice.sample(range(experts), selected)})
    expected = shape.experts_read(rows)
    # Counts of draws without replacement vary less than a binomial's.
    spread = (expected * (1.0 - expected / experts) / trials) ** 0.5
    assert abs(distinct / trials - expected) <= 5.0 * spread + 1e-9


def test_a_lone_decode_reads_the_weights_of_its_experts_and_many_read_all() -> None:
    of, layer = Products(H200, QWEN3_30B_A3B, 1), QWEN3_30B_A3B
    rest = layer.attention_params + layer.router_params
    for rows, experts in ((1, 8.0), (16, 128 * (1 - (15 / 16) ** 16)), (100, 127.8)):
        read_s = 2.0 * (rest + experts * layer.expert_params) / H200.linear_bytes_per_s
        assert of.layer(rows) == pytest.approx(read_s, rel=0.06), rows
    as_wide = msgspec.structs.replace(DENSE, intermediate=128 * 768)
    assert of.layer(1) < Products(H200, as_wide, 1).layer(1) / 8


def test_long_chunks_cost_what_their_active_experts_compute() -> None:
    rows = 200_000
    flop_s = QWEN3_30B_A3B.linear_flops(rows) / H200.linear_flops_per_s
    moved_s = 8 * (4 * 2048 + 3 * 768) * 2.0 * rows / H200.elementwise_bytes_per_s
    seconds = Products(H200, QWEN3_30B_A3B, 1).layer(rows)
    assert seconds == pytest.approx(flop_s + moved_s, rel=0.01)


def test_the_rows_of_each_expert_fill_tiles_of_their_own() -> None:
    """16 rows select 8 of 8 experts: eight tiles of a row or two each, not one of 128."""
    few = msgspec.structs.replace(QWEN3_30B_A3B, experts=8, experts_per_token=8)
    lone = msgspec.structs.replace(few, experts=1, experts_per_token=1)
    memory_is_free = msgspec.structs.replace(A100, linear_bytes_per_s=1e18, wave_share=0.0)
    eight, lonely = (Products(memory_is_free, shape, 1) for shape in (few, lone))
    rest = Products(memory_is_free, msgspec.structs.replace(lone, expert_intermediate=1), 1)
    extra = (eight.layer(16) - rest.layer(16)) / (lonely.layer(16) - rest.layer(16))
    assert 6.0 < extra < 10.0


@PROFILES
@given(
    rows=st.integers(1, 20_000),
    more=st.integers(1, 3000),
    tp=st.sampled_from([1, 2, 4]),
    shape=st.sampled_from([QWEN3_30B_A3B, HALF]),
)
@settings(max_examples=100, deadline=None)
def test_more_rows_never_take_less_and_never_beat_the_rate(
    profile: Profile, rows: int, more: int, tp: int, shape: ModelShape
) -> None:
    of = Products(profile, shape, tp)
    assert rows * of.flop <= of.layer(rows) * (1 + 1e-12) <= of.layer(rows + more) * (1 + 2e-12)


def test_layers_without_experts_count_as_such() -> None:
    for profile in (H100, H200):
        whole, half, none = (Products(profile, s, 2) for s in (QWEN3_30B_A3B, HALF, DENSE))
        for rows in (1, 77, 4096):
            mean = 0.5 * (whole.layer(rows) + none.layer(rows))
            assert half.layer(rows) == pytest.approx(mean)


@PROFILES
@given(
    keys=st.integers(0, 200_000),
    decodes=st.integers(0, 64),
    budget_s=st.floats(0.002, 0.3),
    limit=st.integers(1, 40_000),
)
@settings(max_examples=60, deadline=None)
def test_the_largest_chunk_fits_and_one_step_more_does_not(
    profile: Profile, keys: int, decodes: int, budget_s: float, limit: int
) -> None:
    of = Predictor(profile, QWEN3_30B_A3B, Topology())
    load = of.load()
    if decodes:
        load.add_decodes(decodes, 1000 * decodes)
    chunk = of.largest_chunk(load, keys, limit, budget_s)
    if chunk:
        assert load.seconds_with(chunk, keys) <= budget_s
    if chunk < limit:
        assert load.seconds_with(min(chunk + 32, limit), keys) > budget_s


def test_calibration_recovers_a_machine_from_a_model_with_experts() -> None:
    shape = msgspec.structs.replace(
        QWEN3_30B_A3B, layers=4, hidden=256, expert_layers=3, expert_intermediate=96, vocab=4096
    )
    truth = msgspec.structs.replace(
        CPU_CORE, linear_flops_per_s=9e10, linear_bytes_per_s=1.5e10, batch_s=1e-3
    )
    of, costs = Predictor(truth, shape, Topology()), Costs(truth, shape, Topology())
    sizes = (1, 4, 16, 64, 256, 1024)
    batches = [((rows, 0, False),) for rows in sizes] + [((1, 500, True),) * n for n in (1, 8, 64)]
    operators = [Operator("linear", rows) for rows in sizes]
    operators += [Operator("elementwise", rows) for rows in sizes[2:]]
    profile = fit(
        [Sample(entries, of.batch_s(entries)) for entries in batches],
        shape,
        Topology(),
        operators=[(part, operator_s(part, costs)) for part in operators],
    )
    fitted = Predictor(profile, shape, Topology())
    for unseen in (((1, 900, True),) * 24, ((500, 0, False), (1, 50, True))):
        assert fitted.batch_s(unseen) == pytest.approx(of.batch_s(unseen), rel=0.05)


@pytest.mark.parametrize(
    "wrong",
    [{"experts_per_token": 0}, {"expert_layers": 49}, {"experts": 0}, {"experts_per_token": 129}],
)
def test_a_shape_whose_experts_contradict_is_refused_by_name(wrong: dict[str, int]) -> None:
    fields = msgspec.structs.asdict(QWEN3_30B_A3B) | wrong
    with pytest.raises(msgspec.ValidationError, match=r"experts_per_token.* (is|are) .*must be|at"):
        msgspec.convert(fields, ModelShape)


def test_a_dense_model_is_described_to_older_releases_as_before() -> None:
    assert b"expert" not in msgspec.json.encode(DENSE)
    assert msgspec.json.decode(msgspec.json.encode(QWEN3_30B_A3B), type=ModelShape) == QWEN3_30B_A3B
