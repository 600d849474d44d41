"""Latent attention: config.json as in transformers, no part that may be missing, and refusals."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.test_engine_families import LATENT, TOLERANCE, difference, faulty, prefill
from tests.support.recalling_prompts import recalling
from tests.support.solo_engine import SoloEngine
from transformers import AutoConfig, DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from medha.checkpoints.decoder_config import DecoderConfig, read_config
from medha.checkpoints.fit import check_latent, misfits
from medha.checkpoints.latent_attention import LatentAttention
from medha.checkpoints.routed_experts import RoutedExperts
from medha.config import WorkerConfig
from medha.errors import CheckpointError, SpecError
from medha.model import LatentShape
from medha.topology import Topology
from medha_worker.attention.cpu import CpuAttention, cpu_attention
from medha_worker.attention.kernel_interface import Span
from medha_worker.attention.reference import ReferenceAttention
from medha_worker.model.checkpoint_writer import DEEPSEEK_YARN, FAMILIES, TinyModel
from medha_worker.model.experts import Experts
from medha_worker.model.layers import Linear
from medha_worker.model.rope import interleaved
from medha_worker.weights import LayerWeights

Folder = Callable[[TinyModel], pathlib.Path]
Oracle = Callable[[pathlib.Path, Any], torch.Tensor]

LEAST = {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "vocab_size": 102400,
}
LITE = LEAST | {"model_type": "deepseek_v2", "q_lora_rank": None, "num_experts_per_tok": 6}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
THIRD = LEAST | {"model_type": "deepseek_v3"}


def code_of(name: str) -> dict[str, str]:
    """Return auto_map, as published checkpoints have it."""
    return {
        "AutoConfig": f"configuration_deepseek.{name}Config",
        "AutoModel": f"modeling_deepseek.{name}Model",
        "AutoModelForCausalLM": f"modeling_deepseek.{name}ForCausalLM",
    }


# What the published config.json files say, and the defaults.
PUBLISHED: dict[str, dict[str, Any]] = {
    "V2-Lite": LITE
    | {
        "auto_map": code_of("DeepseekV2"),
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "scoring_func": "softmax",
        "max_position_embeddings": 163840,
        "rope_scaling": YARN,
    },
    "V2": LITE
    | {
        "q_lora_rank": 1536,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "routed_scaling_factor": 16.0,
        "n_routed_experts": 160,
    },
    "V3": THIRD,
    "V3 in full": THIRD
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "auto_map": code_of("DeepseekV3"),
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "V3 in one group": THIRD
    | {
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.446,
        "topk_method": "noaux_tc",
        "rope_interleave": False,
        "n_shared_experts": 2,
    },
}


def config_of(folder: pathlib.Path, raw: dict[str, Any]) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    return read_config(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_json_means_what_transformers_reads_in_it(name: str, tmp_path: pathlib.Path) -> None:
    raw = PUBLISHED[name]
    mine, theirs = config_of(tmp_path, raw), AutoConfig.for_model(**raw)
    assert mine.latent is not None and mine.experts is not None
    shape = mine.latent.shape
    assert (shape.q_rank or None) == theirs.q_lora_rank
    assert (shape.kv_rank, shape.rope_dim) == (theirs.kv_lora_rank, theirs.qk_rope_head_dim)
    assert (shape.nope_dim, shape.value_dim) == (theirs.qk_nope_head_dim, theirs.v_head_dim)
    assert (mine.kv_heads, mine.head_dim) == (1, theirs.kv_lora_rank + theirs.qk_rope_head_dim)
    assert mine.latent.paired == getattr(theirs, "rope_interleave", True)
    assert mine.norm_eps == theirs.rms_norm_eps
    assert mine.max_context_tokens == theirs.max_position_embeddings
    assert mine.rope.theta == theirs.rope_parameters["rope_theta"]
    experts = mine.experts
    assert experts.layers == tuple(range(theirs.first_k_dense_replace, mine.layers))
    assert experts.count == theirs.n_routed_experts
    assert experts.per_token == theirs.num_experts_per_tok
    assert experts.intermediate == theirs.moe_intermediate_size
    assert experts.shared_intermediate == theirs.moe_intermediate_size * theirs.n_shared_experts
    assert experts.factor == theirs.routed_scaling_factor
    if getattr(theirs, "topk_method", "") == "greedy":
        assert experts.groups == 1
    else:
        assert (experts.groups, experts.groups_chosen) == (theirs.n_group, theirs.topk_group)
    assert experts.scoring == ("sigmoid" if "V3" in name else "softmax")
    # The scale of scores is that of a layer of theirs.
    kind = DeepseekV3ForCausalLM if "V3" in name else DeepseekV2ForCausalLM
    theirs.num_hidden_layers = theirs.first_k_dense_replace = 1
    with torch.device("meta"):
        layer = kind(theirs).model.layers[0]
    assert mine.latent.scale == pytest.approx(layer.self_attn.scaling, rel=1e-12)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4: must be num_attention_heads"),
        ({"auto_map": code_of("DeepseekV3")}, "a checkpoint's own code is never run"),
        ({"auto_map": {"AutoModel": "code.DeepseekV2Model"}}, "own code is never run"),
        ({"q_lora_rank": 0}, "q_lora_rank is 0: must be a positive whole number"),
        ({"kv_lora_rank": 511}, "kv_lora_rank is 511: must be even"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63: must be even"),
        ({"v_head_dim": -1}, "v_head_dim is -1: must be a positive whole number"),
        ({"attention_bias": True}, "attention_bias is True: must be false or absent"),
        ({"mlp_bias": True}, "mlp_bias is True: must be false or absent"),
        ({"rope_interleave": False}, "rope_interleave is False: must be true or absent"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1: must be the number"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2: must be 1 or absent"),
        ({"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc': must be greedy or group"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid': must be softmax"),
        ({"norm_topk_prob": True}, "norm_topk_prob is true: must be false or absent"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is None: must be a positive"),
        ({"num_experts_per_tok": 65}, "must be at most n_routed_experts, which is 64"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0: must be a positive number"),
        ({"n_shared_experts": 0}, "n_shared_experts is 0: must be a positive whole number"),
        ({"topk_method": "group_limited_greedy"}, "n_group is None: must be a positive whole"),
        (THIRD | {"n_group": 7}, "n_group is 7: must divide n_routed_experts"),
        (THIRD | {"n_group": 256}, "into groups of at least 2"),
        (THIRD | {"topk_group": 9}, "topk_group is 9: must be at most"),
        (THIRD | {"n_group": 64, "topk_group": 1}, "groups must hold the 6 experts of a token"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    raw: dict[str, Any], named: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        config_of(tmp_path, LITE | raw)
    message = str(caught.value)
    assert named in message and str(tmp_path / "config.json") in message
    assert "\n" not in message


def test_settings_that_latents_do_not_allow_are_refused(tmp_path: pathlib.Path) -> None:
    model = config_of(tmp_path, PUBLISHED["V2-Lite"])
    config = WorkerConfig(
        replica="m-0",
        model="m",
        checkpoint=str(tmp_path),
        max_context_tokens=64,
        kv_pages=8,
        topology=Topology(),
        rank_bind="ipc:///m-0",
    )
    assert list(misfits(model, config, 1)) == []
    narrow = msgspec.structs.replace(config, kv_dtype="fp8_e4m3")
    fixed = msgspec.structs.replace(config, device="cuda", deterministic=True)
    for wrong, named in ((narrow, "spec.model.kvCacheDtype"), (fixed, "spec.engine.arithmetic")):
        assert any(named in str(error) for error in misfits(model, wrong, 1))
        with pytest.raises(SpecError, match=named):
            check_latent(model, wrong)
    # Heads are divided, latents are not.
    for tp, fits in ((16, True), (3, False)):
        divided = msgspec.structs.replace(config, topology=Topology(tp=tp))
        assert (list(misfits(model, divided, 1)) == []) == fits


# --- what is kept ---------------------------------------------------------------------------------


def test_pages_hold_a_latent_and_a_rotated_key_for_each_token(checkpoint: Folder) -> None:
    engine = SoloEngine(checkpoint(FAMILIES["deepseek_v3"]), pages=3)
    assert engine.kv.page_bytes == 64 * (96 + 16) * 4
    shape = engine.config.shape(4.0, 4.0)
    assert shape.kv_bytes_per_token_layer == (96 + 16) * 4
    prefill(engine, 1, recalling(64, 512, seed=1), 64)
    latents = engine.kv.page(2, 0)[0, 0, :, :96]
    norms = latents.square().mean(-1).sqrt()
    assert float(norms.min()) > 0.9 and float(norms.max()) < 1.1, "not normed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize(("heads", "rank", "rope"), [(1, 32, 16), (6, 80, 16), (64, 112, 64)])
def test_single_rows_in_the_compiled_kernel_are_those_of_plain_torch(
    heads: int, rank: int, rope: int, page_tokens: int, dtype: torch.dtype
) -> None:
    sizes = LatentShape(kv_rank=rank, nope_dim=24, rope_dim=rope, value_dim=8)
    latent, dim = LatentAttention(shape=sizes, scale=0.17), rank + rope
    compiled = cpu_attention(heads, 1, dim, page_tokens, dtype, latent)
    assert isinstance(compiled, CpuAttention)
    plain = ReferenceAttention(heads, 1, dim, page_tokens, latent=latent)
    dice = torch.Generator().manual_seed(heads)
    pool = torch.randn(300, 1, 1, page_tokens, dim, generator=dice).to(dtype)
    lengths = (1, 17, 150, 259)
    q = torch.randn(len(lengths), heads, dim, generator=dice)
    own = torch.empty(len(lengths), 1, dim, dtype=dtype)
    spans, ids = [], np.random.default_rng(0).permutation(300)
    for row, tokens in enumerate(lengths):
        pages = ids[: -(-tokens // page_tokens)]
        own[row, 0] = pool[pages[-1], 0, 0, (tokens - 1) % page_tokens]
        spans.append(Span(row, 1, tokens - 1, pages, True))
    actual, expected = (k.plan(spans).run(q, own, own, pool) for k in (compiled, plain))
    assert actual.out.shape == (len(lengths), heads, rank)
    torch.testing.assert_close(actual.out, expected.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual.lse, expected.lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 65, 3000])
def test_prompts_of_any_length_without_experts(
    tokens: int, checkpoint: Folder, oracle: Oracle
) -> None:
    folder = checkpoint(FAMILIES["deepseek_v2"])
    prompt = recalling(tokens, 512, seed=tokens)
    actual = prefill(SoloEngine(folder, pages=64), 1, prompt, 1500, 1, 777)
    assert difference(actual, oracle(folder, prompt)) < TOLERANCE


def test_a_rotated_part_of_a_single_pair_is_that_of_transformers(
    checkpoint: Folder, oracle: Oracle
) -> None:
    """Halves of a single pair are adjacent already."""
    family = FAMILIES["deepseek_v3, halves turn"]
    folder = checkpoint(msgspec.structs.replace(family, rope_dim=2, layers=3))
    tokens = recalling(200, 512, seed=1)
    actual = prefill(SoloEngine(folder, pages=4), 1, tokens, 150, 1)
    assert difference(actual, oracle(folder, tokens)) < TOLERANCE


def test_norms_of_latents_have_an_epsilon_of_their_own(
    checkpoint: Folder, oracle: Oracle, tmp_path: pathlib.Path
) -> None:
    source, folder = checkpoint(FAMILIES["deepseek_v3"]), tmp_path / "model"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    raw = json.loads((source / "config.json").read_text()) | {"rms_norm_eps": 0.3}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(raw))
    tokens = recalling(200, 512, seed=1)
    actual = prefill(SoloEngine(folder, pages=4), 1, tokens, 150, 1)
    assert difference(actual, oracle(folder, tokens)) < TOLERANCE


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3"])
def test_other_scalings_of_positions_scale_scores_too(
    kind: str, checkpoint: Folder, oracle: Oracle
) -> None:
    """With mscale_all_dim, as transformers has it for every kind but the default. Slower rotations
    make the copying heads sharper, and rounding larger: transformers is 1e-4 off float64 here."""
    rope = {
        "rope_type": kind,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
        "mscale_all_dim": 0.8,
    }
    family = FAMILIES["deepseek_v3"]
    folder = checkpoint(msgspec.structs.replace(family, rope=rope, max_tokens=256, layers=3))
    tokens = recalling(240, 512, seed=1)
    actual = prefill(SoloEngine(folder, pages=4), 1, tokens, 150, 1)
    assert difference(actual, oracle(folder, tokens)) < 3 * TOLERANCE


# --- faults ---------------------------------------------------------------------------------------


def changed(
    change: Callable[[LayerWeights], LayerWeights],
) -> Callable[[SoloEngine], None]:
    def fault(engine: SoloEngine) -> None:
        held = engine.model.weights
        layers = tuple(change(layer) for layer in held.layers)
        engine.model.weights = dataclasses.replace(held, layers=layers)

    return fault


def _latent(layer: LayerWeights, **changes: Any) -> LayerWeights:
    assert layer.latent is not None
    return dataclasses.replace(layer, latent=dataclasses.replace(layer.latent, **changes))


def no_norm_of_latents(layer: LayerWeights) -> LayerWeights:
    assert layer.latent is not None
    return _latent(layer, latent_norm=torch.ones_like(layer.latent.latent_norm))


def no_norm_of_queries(layer: LayerWeights) -> LayerWeights:
    assert layer.latent is not None and layer.latent.query_norm is not None
    return _latent(layer, query_norm=torch.ones_like(layer.latent.query_norm))


def heads_in_another_order(layer: LayerWeights) -> LayerWeights:
    assert layer.latent is not None
    return _latent(layer, value_up=layer.latent.value_up.roll(1, 0))


def halves_turn(layer: LayerWeights) -> LayerWeights:
    """Of queries and keys alike, so that only the meaning of positions changes."""
    assert layer.latent is not None and layer.latent.query_up is not None
    queries, rope, heads = layer.latent.query_up, layer.latent.rope_dim, len(layer.latent.key_up)
    up, first = queries.by_output().clone(), layer.qkv.by_output().clone()
    of_queries = up.view(heads, -1, up.shape[-1])[:, -rope:]
    of_queries.copy_(interleaved(of_queries.flatten(0, 1), rope).view(of_queries.shape))
    first[-rope:] = interleaved(first[-rope:].clone(), rope)
    layer = dataclasses.replace(layer, qkv=Linear(first.t()))
    return _latent(layer, query_up=Linear(up.t()))


@pytest.mark.parametrize(
    "mutant", [no_norm_of_latents, no_norm_of_queries, heads_in_another_order, halves_turn]
)
def test_a_part_of_latent_attention_that_is_wrong_is_seen(
    mutant: Callable[[LayerWeights], LayerWeights], checkpoint: Folder
) -> None:
    folder = checkpoint(FAMILIES["deepseek_v3"])
    assert faulty(folder, changed(mutant), recalling(500, 512, seed=9)) > 1000 * TOLERANCE


def test_scores_without_their_scale_are_seen(checkpoint: Folder, oracle: Oracle) -> None:
    folder = checkpoint(FAMILIES["deepseek_v2"])
    config, tokens = read_config(folder), recalling(500, 512, seed=9)
    assert config.latent is not None
    plain = (32 + 16) ** -0.5
    assert config.latent.scale == pytest.approx(plain * (1 + 0.0707 * np.log(40.0)) ** 2)
    unscaled = msgspec.structs.replace(config.latent, scale=plain)
    kernel = cpu_attention(4, 1, config.head_dim, 64, torch.float32, unscaled)
    engine = SoloEngine(folder, pages=12, attention=kernel)
    wrong = prefill(engine, 1, tokens, 100, 1, 1, 131)
    assert difference(wrong, oracle(folder, tokens)) > 1000 * TOLERANCE
    assert DEEPSEEK_YARN["mscale"] != DEEPSEEK_YARN["mscale_all_dim"], "cosines are scaled, too"


def _ruled(**changes: Any) -> Callable[[Experts], Experts]:
    return lambda mlp: dataclasses.replace(
        mlp, routing=msgspec.structs.replace(mlp.routing, **changes)
    )


def _no_bias(mlp: Experts) -> Experts:
    return dataclasses.replace(mlp, bias=None)


def _no_shared(mlp: Experts) -> Experts:
    return dataclasses.replace(mlp, shared=None)


def _biased_weights(mlp: Experts) -> Experts:
    class Biased(Experts):
        def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights, selected = super().route(x)
            assert self.bias is not None
            return weights + self.bias[selected], selected

    return Biased(*(getattr(mlp, field.name) for field in dataclasses.fields(mlp)))


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("deepseek_v3", _no_bias),
        ("deepseek_v3", _biased_weights),
        ("deepseek_v3", _no_shared),
        ("deepseek_v3", _ruled(factor=1.0)),
        ("deepseek_v3", _ruled(groups=1, groups_chosen=1)),
        ("deepseek_v3", _ruled(scoring="softmax")),
        ("deepseek_v2, groups", _ruled(groups=1, groups_chosen=1)),
        ("deepseek_v2, groups", _ruled(factor=1.0)),
        ("deepseek_v2, groups", _no_shared),
    ],
)
def test_a_rule_of_routing_that_is_left_out_is_seen(
    name: str, mutant: Callable[[Experts], Experts], checkpoint: Folder
) -> None:
    def change(layer: LayerWeights) -> LayerWeights:
        if not isinstance(layer.mlp, Experts):
            return layer
        return dataclasses.replace(layer, mlp=mutant(layer.mlp))

    tokens = recalling(500, 512, seed=9)
    assert faulty(checkpoint(FAMILIES[name]), changed(change), tokens) > 1000 * TOLERANCE


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
@settings(max_examples=60, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 4, 8]),
    of_group=st.integers(2, 5),
    chosen=st.integers(1, 8),
    share=st.floats(0.0, 1.0),
    normalized=st.booleans(),
    factor=st.sampled_from([1.0, 2.5, 16.0]),
    seed=st.integers(0, 1000),
)
def test_rows_are_routed_as_by_transformers(
    kind: str,
    groups: int,
    of_group: int,
    chosen: int,
    share: float,
    normalized: bool,
    factor: float,
    seed: int,
) -> None:
    chosen, count = min(chosen, groups), groups * of_group
    per_token = max(1, round(share * chosen * of_group))
    third = kind == "deepseek_v3"
    raw = {
        "model_type": kind,
        "hidden_size": 24,
        "num_attention_heads": 2,
        "n_routed_experts": count,
        "num_experts_per_tok": per_token,
        "n_group": groups,
        "topk_group": chosen,
        "routed_scaling_factor": factor,
        "norm_topk_prob": normalized and third,
        "topk_method": "noaux_tc" if third else "group_limited_greedy",
    }
    dice = torch.Generator().manual_seed(seed)
    theirs = (DeepseekV3TopkRouter if third else DeepseekV2TopkRouter)(AutoConfig.for_model(**raw))
    weight = torch.randn(count, 24, generator=dice) * 0.3
    theirs.weight.data.copy_(weight)
    bias = torch.randn(count, generator=dice) * 0.3 if third else None
    if bias is not None:
        theirs.e_score_correction_bias.copy_(bias)
    routing = RoutedExperts(
        count=count,
        per_token=per_token,
        intermediate=8,
        normalized=normalized and third,
        layers=(0,),
        factor=factor,
        scoring="sigmoid" if third else "softmax",
        groups=groups,
        groups_chosen=chosen,
    )
    x = torch.randn(50, 24, generator=dice)
    weights, selected = Experts(Linear(weight.t()), (), (), routing, bias).route(x)
    with torch.inference_mode():
        _, expected_weights, expected = theirs(x)
    order = expected.sort(-1)
    assert torch.equal(selected, order.values)
    torch.testing.assert_close(weights, expected_weights.gather(1, order.indices))


def test_every_form_of_the_families_is_among_those_tested() -> None:
    models = [FAMILIES[name] for name in LATENT]
    assert {model.q_rank > 0 for model in models} == {True, False}
    assert {model.groups > 1 for model in models if "v2" in model.family} == {True, False}
    assert {model.paired for model in models} == {True, False}
