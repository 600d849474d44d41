"""Latent attention: what a batch reads and computes of it, on every shard."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.model import LatentShape, ModelShape, pairs
from medha.predictor import Costs, Predictor, Products
from medha.profile import A100, CPU_CORE, H100, H200, Profile
from medha.topology import Topology

LATENT = LatentShape(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
DEEPSEEK_V3 = ModelShape(
    layers=61,
    hidden=7168,
    heads=128,
    kv_heads=1,
    head_dim=576,
    intermediate=18432,
    vocab=129280,
    experts=256,
    experts_per_token=8,
    expert_intermediate=2048,
    expert_layers=58,
    shared_intermediate=2048,
    latent=LATENT,
)
LITE = msgspec.structs.replace(
    DEEPSEEK_V3,
    layers=27,
    hidden=2048,
    heads=16,
    intermediate=10944,
    vocab=102400,
    experts=64,
    experts_per_token=6,
    expert_intermediate=1408,
    expert_layers=26,
    shared_intermediate=2816,
    latent=msgspec.structs.replace(LATENT, q_rank=0),
)
PROFILES = pytest.mark.parametrize("profile", [CPU_CORE, A100, H100, H200], ids=lambda p: p.name)


def test_the_published_models_have_the_parameters_that_their_reports_name() -> None:
    # 671 B and 15.7 B; a token needs 37 B and 2.4 B (2.65 B with both tables).
    for shape, params, active in ((DEEPSEEK_V3, 671e9, 37e9), (LITE, 15.7e9, 2.65e9)):
        assert shape.params == pytest.approx(params, rel=0.01)
        embeddings = 2 * shape.vocab * shape.hidden
        linear = shape.layers * shape.linear_flops(1) / 2
        assert linear + embeddings == pytest.approx(active, rel=0.02)


def test_a_token_keeps_one_latent_and_one_rotated_key_per_layer() -> None:
    assert DEEPSEEK_V3.kv_bytes_per_token == 61 * (512 + 64) * 2
    plain = msgspec.structs.replace(DEEPSEEK_V3, latent=None, kv_heads=128, head_dim=160)
    assert plain.kv_bytes_per_token > 70 * DEEPSEEK_V3.kv_bytes_per_token


def test_attention_computes_scores_over_both_parts_and_values_over_one() -> None:
    for chunk, prefix in ((1, 0), (512, 100_000)):
        expected = pairs(chunk, prefix) * 128 * 2 * (576 + 512)
        assert DEEPSEEK_V3.attention_flops(chunk, prefix) == expected


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_each_shard_reads_whole_latents_for_its_share_of_heads(tp: int) -> None:
    costs = Costs(H200, DEEPSEEK_V3, Topology(tp=tp))
    read_s = 1_000_000 * 576 * 2.0 / H200.attention_bytes_per_s
    flop_s = 1_000_000 * (128 / tp) * 2 * 1088 / H200.attention_flops_per_s
    assert costs.decodes(1, 1_000_000) == pytest.approx((read_s**2 + flop_s**2) ** 0.5)
    # Partial states that KVP groups exchange hold 512 entries and a sum.
    assert costs.kvp_row == 128 / tp * 513 * 4.0 / H200.kvp_bytes_per_s


@pytest.mark.parametrize("shape", [DEEPSEEK_V3, LITE], ids=["q_rank", "direct"])
def test_shards_divide_heads_but_not_first_products(shape: ModelShape) -> None:
    assert shape.latent is not None
    replicated = shape.hidden * (shape.latent.q_rank + 512 + 64)
    whole = shape.attention_params
    for tp in (2, 4, 16):
        expected = replicated + (whole - replicated) / tp
        assert shape.attention_params_of(tp) == pytest.approx(expected)


@PROFILES
@given(
    rows=st.integers(1, 20_000),
    more=st.integers(1, 3000),
    tp=st.sampled_from([1, 2, 8]),
    shape=st.sampled_from([DEEPSEEK_V3, LITE]),
)
@settings(max_examples=60, deadline=None)
def test_more_rows_never_take_less_and_never_beat_the_rate(
    profile: Profile, rows: int, more: int, tp: int, shape: ModelShape
) -> None:
    of = Products(profile, shape, tp)
    assert rows * of.flop <= of.layer(rows) * (1 + 1e-12) <= of.layer(rows + more) * (1 + 2e-12)


def test_long_chunks_cost_what_their_products_compute() -> None:
    rows = 200_000
    flop_s = DEEPSEEK_V3.linear_flops(rows) / H200.linear_flops_per_s
    moved = 8 * (4 * 7168 + 3 * 2048) + 3 * 2048
    moved_s = 58 / 61 * moved * 2.0 * rows / H200.elementwise_bytes_per_s
    seconds = Products(H200, DEEPSEEK_V3, 1).layer(rows)
    assert seconds == pytest.approx(flop_s + moved_s, rel=0.02)


def test_a_long_context_decodes_in_less_time_than_with_plain_heads() -> None:
    plain = msgspec.structs.replace(LITE, latent=None, kv_heads=16, head_dim=128)
    latent_s, plain_s = (
        Predictor(H200, shape, Topology()).batch_s(((1, 500_000, True),)) for shape in (LITE, plain)
    )
    assert latent_s < 0.4 * plain_s


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"kv_heads": 8}, "kv_heads is 8 and head_dim is 576: must be 1 and 576"),
        ({"head_dim": 128}, "kv_heads is 1 and head_dim is 128: must be 1 and 576"),
        ({"latent": {"kv_rank": 0, "nope_dim": 1, "rope_dim": 2, "value_dim": 1}}, "kv_rank"),
    ],
)
def test_a_shape_whose_latents_contradict_is_refused_by_name(
    wrong: dict[str, object], named: str
) -> None:
    fields = msgspec.to_builtins(DEEPSEEK_V3) | wrong
    with pytest.raises(msgspec.ValidationError, match=named):
        msgspec.convert(fields, ModelShape)


def test_other_models_are_described_to_older_releases_as_before() -> None:
    plain = ModelShape(layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, intermediate=8, vocab=8)
    text = msgspec.json.encode(plain)
    assert b"latent" not in text and b"shared" not in text
    assert msgspec.json.decode(msgspec.json.encode(DEEPSEEK_V3), type=ModelShape) == DEEPSEEK_V3
