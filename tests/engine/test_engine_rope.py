"""Rotary frequencies against transformers' own functions, kind by kind."""

from __future__ import annotations

import copy
import json
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from tests.support.recalling_prompts import recalling
from tests.support.solo_engine import SoloEngine
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from medha.checkpoints.decoder_config import read_config
from medha.checkpoints.fit import misfits
from medha.config import WorkerConfig
from medha.errors import CheckpointError
from medha.topology import Topology
from medha_worker.model.checkpoint_writer import TinyModel
from medha_worker.model.rope import Rotary, frequencies, interleaved, rotate

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 20_000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "rope_theta": 1_000_000.0,
    },
    "yarn, not truncated": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "truncate": False,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn, two scales": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "yarn, scale given": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
    },
}

BASE = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
}


def configured(folder: pathlib.Path, **more: Any) -> Rotary:
    (folder / "config.json").write_text(json.dumps(BASE | more))
    config = read_config(folder)
    return Rotary(config.rope, config.head_dim)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("length", [100, 20_000])
def test_angles_are_those_of_transformers(name: str, length: int, tmp_path: pathlib.Path) -> None:
    theirs = LlamaRotaryEmbedding(LlamaConfig(**BASE, rope_parameters=dict(SETTINGS[name])))
    positions = torch.arange(length)
    cos, sin = theirs(torch.zeros(1, 1, 64), positions[None])
    rotary = configured(tmp_path, rope_parameters=SETTINGS[name])
    mine = rotary.angles(positions, [(length, length)])
    for actual, expected in zip(mine, (cos, sin), strict=True):
        assert torch.allclose(actual[:, 0], expected[0, :, :32], atol=2e-5 * max(1, length // 1000))


@pytest.mark.parametrize("factor", [2.0, 3.7, 32.0])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", ["linear", "llama3", "yarn", "yarn, not truncated"])
def test_scaled_frequencies_are_those_of_transformers_to_the_last_bit(
    name: str, head_dim: int, factor: float, tmp_path: pathlib.Path
) -> None:
    """A rounding that differs would count a million times at position 1,000,000."""
    settings = {"rope_theta": 500_000.0} | SETTINGS[name] | {"factor": factor}
    raw = BASE | {"head_dim": head_dim, "rope_parameters": settings}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    expected, _ = ROPE_INIT_FUNCTIONS[str(settings["rope_type"])](LlamaConfig(**raw), "cpu")
    assert torch.equal(frequencies(read_config(tmp_path).rope, head_dim, 0), expected)


def test_old_and_new_names_mean_the_same(tmp_path: pathlib.Path) -> None:
    scaling = SETTINGS["llama3"].copy()
    theta = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    old = configured(tmp_path, rope_theta=theta, rope_scaling=scaling)
    new = configured(tmp_path, rope_parameters=SETTINGS["llama3"])
    assert old.rope == new.rope


@pytest.mark.parametrize(
    ("more", "theta"),
    [
        ({"rope_theta": 1e7, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}, 1e7),
        ({"rope_theta": 3e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}, 3e5),
        ({"rope_theta": 3e5, "rope_parameters": {}}, 3e5),
        ({"rope_theta": 3e5}, 3e5),
    ],
)
def test_rope_scaling_takes_precedence_as_in_transformers(
    more: dict[str, Any], theta: float, tmp_path: pathlib.Path
) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    settings = more | {"rope_scaling": scaling}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**BASE, **copy.deepcopy(settings)))
    rotary = configured(tmp_path, **settings)
    assert rotary.rope.theta == theta and rotary.rope.kind == "yarn"
    positions = torch.arange(3000)
    expected = theirs(torch.zeros(1, 1, 64), positions[None])
    for actual, other in zip(rotary.angles(positions, [(3000, 3000)]), expected, strict=True):
        assert torch.allclose(actual[:, 0], other[0, :, :32], atol=1e-4)


def test_a_theta_in_the_other_object_counts_if_there_is_no_other(tmp_path: pathlib.Path) -> None:
    more = {"rope_parameters": {"rope_theta": 1e7}, "rope_scaling": SETTINGS["linear"]}
    rope = configured(tmp_path, **more).rope
    assert (rope.kind, rope.theta) == ("linear", 1e7)


@pytest.mark.parametrize(
    ("more", "scale"),
    [
        ({"attn_factor": 0.8782488562869419}, 1.0),  # 1 / (0.1 ln 4 + 1)
        ({"attn_factor": 0.5}, 0.5 * (0.1 * math.log(4) + 1)),
        ({"attn_factor": 0.5, "attention_factor": 3.0}, 1.5),
        ({"attn_factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 2.0),
        ({"attn_factor": None}, 0.1 * math.log(4) + 1),
    ],
)
def test_attn_factor_multiplies_the_scale_of_yarn(
    more: dict[str, Any], scale: float, tmp_path: pathlib.Path
) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    rotary = configured(tmp_path, rope_scaling=yarn | more)
    assert rotary.scale == pytest.approx(scale)
    cos, sin = rotary.angles(torch.arange(5000), [(5000, 5000)])
    assert torch.allclose(cos**2 + sin**2, torch.tensor(scale**2))


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"type": "dynamic", "factor": 1.0, "alpha": 1000.0}, "alpha is 1000.0: must be absent"),
        ({"type": "default", "mrope_section": [8, 12, 12]}, r"mrope_section is \[8, 12, 12\]: "),
        ({"type": "linear", "factor": 2.0, "attn_factor": 2.0}, "attn_factor is 2.0: must be"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention is {'rope_type': 'def"),
    ],
)
def test_a_key_that_the_kind_of_rope_does_not_have_is_named(
    name: str, settings: dict[str, Any], named: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {name}\.{named}") as caught:
        configured(tmp_path, **{name: settings})
    assert "remove the key" in str(caught.value) and "\n" not in str(caught.value)


PUBLISHED: list[dict[str, Any]] = [
    {"type": "linear", "factor": 4.0},
    {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "finetuned": True},
    {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    SETTINGS["llama3"] | {"type": "llama3"},
    SETTINGS["yarn"]
    | {"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707, "truncate": True},
    {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
    {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": None},
]


@pytest.mark.parametrize("settings", PUBLISHED)
def test_settings_of_published_checkpoints_load(
    settings: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    assert configured(tmp_path, rope_scaling=settings).rope.kind in str(settings)


def test_a_type_that_is_not_served_is_named_before_its_keys(tmp_path: pathlib.Path) -> None:
    settings = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    with pytest.raises(CheckpointError, match="rope type is 'longrope': must be one of"):
        configured(tmp_path, rope_scaling=settings)


@pytest.mark.parametrize(
    ("settings", "max_tokens", "longest"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 40960, 131072),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 1 << 18, None),
        ({"type": "yarn", "factor": 2.5}, 4096, 10240),
        ({"type": "yarn", "original_max_position_embeddings": 1024, "factor": None}, 4096, None),
        ({"type": "linear", "factor": 4.0}, 4096, 16384),
        ({"type": "linear", "factor": 0.5}, 4096, None),
        ({"type": "dynamic", "factor": 4.0}, 4096, None),
        (SETTINGS["llama3"], 1 << 17, None),
        ({}, 4096, None),
    ],
)
def test_scaled_rotation_allows_longer_contexts(
    settings: dict[str, Any], max_tokens: int, longest: int | None, tmp_path: pathlib.Path
) -> None:
    raw = BASE | {"max_position_embeddings": max_tokens, "rope_scaling": settings}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = read_config(tmp_path)
    longest = longest or max_tokens
    assert model.max_context_tokens == longest
    config = WorkerConfig(
        replica="r",
        model="m",
        checkpoint="",
        max_context_tokens=longest,
        topology=Topology(),
        kv_bytes=1 << 40,
        rank_bind="",
    )
    assert not list(misfits(model, config, 1))
    (fault,) = misfits(model, msgspec.structs.replace(config, max_context_tokens=longest + 1), 1)
    expected = f"maxContextTokens is {longest + 1}: must be at most .* which is {longest} by max_"
    assert re.search(expected, str(fault)) and f"use {longest} or less" in str(fault)
    beyond = "as dynamic NTK beyond it is not served"
    assert (beyond in str(fault)) == (settings.get("type") == "dynamic")


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_contexts_beyond_max_position_embeddings_are_those_of_transformers(
    kind: str, checkpoint: Callable[[TinyModel], pathlib.Path], oracle: Callable[..., torch.Tensor]
) -> None:
    folder = checkpoint(TinyModel(rope={"rope_type": kind, "factor": 4.0}, max_tokens=256))
    tokens = recalling(900, 512, seed=5)
    engine = SoloEngine(folder, pages=30)
    engine.start(1, tokens)
    actual, expected = engine.step((1, 900)), oracle(folder, tokens)
    assert float((actual - expected).abs().max() / expected.std()) < 3e-4  # rounding of turns


def test_rotation_is_that_of_transformers() -> None:
    q = torch.randn(9, 4, 64)
    angle = torch.randn(9, 1, 32)
    double = torch.cat([angle, angle], -1).transpose(0, 1)
    expected, _ = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], q.transpose(0, 1)[None], double.cos(), double.sin()
    )
    actual = q.clone()
    _by_pairs(actual).copy_(q.view(9, 4, 2, 32).transpose(2, 3))
    rotate(actual, torch.complex(angle.cos(), angle.sin()))
    turned = _by_pairs(actual).transpose(2, 3).reshape(9, 4, 64)
    assert torch.allclose(turned, expected[0].transpose(0, 1), atol=1e-6)


def test_the_two_of_a_pair_come_to_stand_side_by_side_in_every_head() -> None:
    rows = torch.arange(12.0).view(12, 1).expand(12, 3)
    assert interleaved(rows, 6)[:, 2].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert interleaved(rows[:, 0], 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]


def _by_pairs(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:-1], -1, 2)


def test_narrow_types_are_turned_in_float32() -> None:
    wide = torch.randn(5, 2, 16).bfloat16().float()
    turns = torch.polar(torch.ones(5, 1, 8), torch.randn(5, 1, 8))
    narrow = wide.bfloat16()
    rotate(narrow, turns)
    rotate(wide, turns)
    assert torch.equal(narrow, wide.bfloat16())


def test_sequences_of_one_batch_keep_their_own_dynamic_base(tmp_path: pathlib.Path) -> None:
    rotary = configured(tmp_path, rope_parameters=SETTINGS["dynamic"])
    positions = torch.tensor([3000, 3001, 3000])
    together = rotary.angles(positions, [(2, 9000), (1, 100)])[0]
    assert torch.equal(together[:2], rotary.angles(positions[:2], [(2, 9000)])[0])
    assert torch.equal(together[2:], rotary.angles(positions[2:], [(1, 4096)])[0])
    assert not torch.allclose(together[0], together[2])


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_a_setting_that_is_not_served_is_named(
    more: dict[str, Any], named: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(CheckpointError, match=named) as caught:
        configured(tmp_path, **more)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)
