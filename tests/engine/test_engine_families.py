"""Every family against transformers: what its config.json means, logits, tokens, faults."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.recalling_prompts import recalling
from tests.support.solo_engine import SoloEngine
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from medha.checkpoints.checkpoint_files import held_tensors
from medha.checkpoints.decoder_config import read_config
from medha.checkpoints.families import ARCHITECTURES
from medha.checkpoints.families import FAMILIES as KNOWN
from medha.checkpoints.tensor_names import check_tensors
from medha.errors import CheckpointError
from medha_worker.attention.reference import ReferenceAttention
from medha_worker.model.checkpoint_writer import FAMILIES, TinyModel
from medha_worker.model.experts import Experts
from medha_worker.model.layers import Linear, Projection

Tokens = npt.NDArray[np.int32]
Folder = Callable[[TinyModel], pathlib.Path]
Oracle = Callable[[pathlib.Path, Tokens], torch.Tensor]

TOLERANCE = 1e-4
WINDOWED = [name for name, model in FAMILIES.items() if model.window]
LATENT = [name for name, model in FAMILIES.items() if model.family.startswith("deepseek")]
MIXTURES = [
    name
    for name, model in FAMILIES.items()
    if model.family == "qwen3_moe" or (name in LATENT and model.first_sparse < model.layers)
]

family = pytest.mark.parametrize("name", FAMILIES)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.std())


def pieces(total: int, *sizes: int) -> Iterator[int]:
    done, turn = 0, 0
    while done < total:
        yield min(sizes[turn % len(sizes)], total - done)
        done, turn = done + sizes[turn % len(sizes)], turn + 1


def prefill(engine: SoloEngine, seq: int, tokens: Tokens, *sizes: int) -> torch.Tensor:
    engine.start(seq, tokens)
    return torch.cat([engine.step((seq, size)) for size in pieces(len(tokens), *sizes)])


def returning(period: int, tokens: int) -> Tokens:
    """The same words every `period` tokens, and never twice within one: copying heads look back
    exactly `period` − 1 tokens, or find nothing."""
    words = np.random.default_rng(period).permutation(np.arange(5, 512))[:period]
    return np.resize(words, tokens).astype(np.int32)


@family
def test_logits_agree_with_transformers(name: str, checkpoint: Folder, oracle: Oracle) -> None:
    folder = checkpoint(FAMILIES[name])
    tokens = recalling(1200, 512, seed=3)
    actual = prefill(SoloEngine(folder, pages=20), 1, tokens, 200, 1, 67, 1, 1, 333)
    expected = oracle(folder, tokens)
    assert difference(actual, expected) < TOLERANCE
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@family
def test_plain_torch_alone_gives_the_same(name: str, checkpoint: Folder, oracle: Oracle) -> None:
    """Single rows too, on pages and tiles smaller than a window."""
    folder = checkpoint(FAMILIES[name])
    config = read_config(folder)
    kernel = ReferenceAttention(
        config.heads, config.kv_heads, config.head_dim, 16, 3, 50, config.latent
    )
    tokens = recalling(400, 512, seed=4)
    engine = SoloEngine(folder, pages=25, page_tokens=16, attention=kernel)
    assert difference(prefill(engine, 1, tokens, 123, 1, 1), oracle(folder, tokens)) < TOLERANCE


@family
def test_greedy_tokens_are_those_of_transformers(name: str, checkpoint: Folder) -> None:
    folder = checkpoint(FAMILIES[name])
    prompts = [recalling(length, 512, seed=length) for length in (30, 130, 577)]
    actual = SoloEngine(folder, pages=64).generate(prompts, 50, chunk=128)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, tokens in zip(prompts, actual, strict=True):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        expected = model.generate(
            ids,
            max_new_tokens=50,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            bos_token_id=None,
        )
        assert tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_may_begin_in_the_pages_of_a_prefix_hit(
    name: str, checkpoint: Folder, oracle: Oracle
) -> None:
    folder = checkpoint(FAMILIES[name])
    shared, own = recalling(384, 512, seed=1), recalling(150, 512, seed=2)
    engine = SoloEngine(folder, pages=20)
    prefill(engine, 1, shared, 384)
    tokens = np.concatenate([shared, own])
    engine.start(2, tokens)
    engine.share(2, 1, pages=6)
    actual = torch.cat([engine.step((2, 1)), engine.step((2, 99)), engine.step((2, 50))])
    assert difference(actual, oracle(folder, tokens)[384:]) < TOLERANCE


@pytest.mark.parametrize("page_tokens", [1, 16, 128])
@pytest.mark.parametrize("name", WINDOWED)
def test_the_page_size_changes_nothing_in_a_window(
    name: str, page_tokens: int, checkpoint: Folder, oracle: Oracle
) -> None:
    folder = checkpoint(FAMILIES[name])
    tokens = recalling(500, 512, seed=1)
    engine = SoloEngine(folder, pages=-(-500 // page_tokens), page_tokens=page_tokens)
    assert difference(prefill(engine, 1, tokens, 90, 1, 231), oracle(folder, tokens)) < TOLERANCE


# --- faults ---------------------------------------------------------------------------------------


def faulty(folder: pathlib.Path, fault: Callable[[SoloEngine], None], tokens: Tokens) -> float:
    """By how much logits differ from those without the fault, over chunks and single rows."""
    engines = [SoloEngine(folder, pages=12), SoloEngine(folder, pages=12)]
    fault(engines[1])
    right, wrong = (prefill(engine, 1, tokens, 100, 1, 1, 131) for engine in engines)
    return difference(wrong, right)


def _shift_window(by: int) -> Callable[[SoloEngine], None]:
    def fault(engine: SoloEngine) -> None:
        config = engine.config
        windows = tuple(window + by if window else 0 for window in config.windows)
        engine.model.config = msgspec.structs.replace(config, windows=windows)
        engine.inputs.windows = engine.model.config.windows_in(range(config.layers))

    return fault


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_bias_that_is_left_out_is_seen(part: int, checkpoint: Folder) -> None:
    """Of query, key or value."""
    folder = checkpoint(FAMILIES["qwen2"])

    def fault(engine: SoloEngine) -> None:
        config = engine.config
        D, ends = config.head_dim, np.cumsum([config.heads, config.kv_heads, config.kv_heads])
        for layer in engine.model.weights.layers:
            assert layer.qkv.bias is not None
            layer.qkv.bias[
                int(ends[part] - (config.heads, config.kv_heads, config.kv_heads)[part]) * D : int(
                    ends[part]
                )
                * D
            ] = 0.0

    assert faulty(folder, fault, recalling(500, 512, seed=9)) > 1000 * TOLERANCE


@pytest.mark.parametrize("part", ["queries", "keys"])
def test_a_norm_of_heads_that_is_left_out_is_seen(part: str, checkpoint: Folder) -> None:
    folder = checkpoint(FAMILIES["qwen3"])

    def fault(engine: SoloEngine) -> None:
        heads = engine.config.heads
        for layer in engine.model.weights.layers:
            assert layer.head_norms is not None
            layer.head_norms[slice(heads) if part == "queries" else slice(heads, None)] = 1.0

    assert faulty(folder, fault, recalling(500, 512, seed=9)) > 1000 * TOLERANCE


def _weights_as_routed(mlp: Experts) -> Experts:
    routing = msgspec.structs.replace(mlp.routing, normalized=not mlp.routing.normalized)
    return dataclasses.replace(mlp, routing=routing)


def _neighbour_expert(mlp: Experts) -> Experts:
    return dataclasses.replace(
        mlp, gate_up=mlp.gate_up[1:] + mlp.gate_up[:1], down=mlp.down[1:] + mlp.down[:1]
    )


def _gate_for_up(mlp: Experts) -> Experts:
    def turned(linear: Projection) -> Linear:
        return Linear(linear.by_output().roll(len(linear.by_output()) // 2, 0).t())

    return dataclasses.replace(mlp, gate_up=tuple(map(turned, mlp.gate_up)))


def _expert_too_few(mlp: Experts) -> Experts:
    routing = msgspec.structs.replace(mlp.routing, per_token=mlp.routing.per_token - 1)
    return dataclasses.replace(mlp, routing=routing)


def _equal_weights(mlp: Experts) -> Experts:
    class Equal(Experts):
        def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights, selected = super().route(x)
            return weights.mean(1, keepdim=True).expand_as(weights), selected

    return Equal(*(getattr(mlp, field.name) for field in dataclasses.fields(mlp)))


@pytest.mark.parametrize(
    "mutant",
    [_weights_as_routed, _neighbour_expert, _gate_for_up, _expert_too_few, _equal_weights],
)
@pytest.mark.parametrize("name", MIXTURES)
def test_wrong_experts_are_seen(
    name: str, mutant: Callable[[Experts], Experts], checkpoint: Folder
) -> None:
    folder = checkpoint(FAMILIES[name])

    def fault(engine: SoloEngine) -> None:
        weights = engine.model.weights
        layers = tuple(
            dataclasses.replace(layer, mlp=mutant(layer.mlp))
            if isinstance(layer.mlp, Experts)
            else layer
            for layer in weights.layers
        )
        engine.model.weights = dataclasses.replace(weights, layers=layers)

    assert faulty(folder, fault, recalling(500, 512, seed=9)) > 1000 * TOLERANCE


@pytest.mark.parametrize(
    "name, tokens",
    [
        *itertools.product(MIXTURES, [1, 2, 65, 2100]),
        ("qwen3_moe", 8000),
        ("deepseek_v3, halves turn", 8000),
    ],
)
def test_experts_compute_prompts_of_any_length(
    name: str, tokens: int, checkpoint: Folder, oracle: Oracle
) -> None:
    """A prompt of one token selects `per_token` experts, a long one all of them."""
    folder = checkpoint(FAMILIES[name])
    prompt = recalling(tokens, 512, seed=tokens)
    actual = prefill(SoloEngine(folder, pages=126), 1, prompt, 2048, 1, 777)
    expected = oracle(folder, prompt)
    assert difference(actual, expected) < TOLERANCE
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixed_batch_and_a_prefix_hit_agree_with_transformers(
    name: str, checkpoint: Folder, oracle: Oracle
) -> None:
    folder = checkpoint(FAMILIES[name])
    shared, own, other = (recalling(n, 512, seed=n) for n in (384, 150, 310))
    engine = SoloEngine(folder, pages=40)
    prefill(engine, 1, shared, 384)
    hit = np.concatenate([shared, own])
    engine.start(2, hit)
    engine.share(2, 1, pages=6)
    engine.start(3, other)
    mixed = [engine.step((2, 1), (3, 200)), engine.step((3, 1), (2, 149)), engine.step((3, 109))]
    expected_hit, expected_other = oracle(folder, hit)[384:], oracle(folder, other)
    expected = [
        torch.cat([expected_hit[:1], expected_other[:200]]),
        torch.cat([expected_other[200:201], expected_hit[1:]]),
        expected_other[201:],
    ]
    for actual, right in zip(mixed, expected, strict=True):
        assert difference(actual, right) < TOLERANCE


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_that_is_off_by_one_is_seen(
    name: str, by: int, checkpoint: Folder, oracle: Oracle
) -> None:
    """The copied text stands at the last place in sight, or at the first beyond."""
    folder, window = checkpoint(FAMILIES[name]), FAMILIES[name].window
    tokens = returning(window if by < 0 else window + 1, 3 * window + 50)
    right = prefill(SoloEngine(folder, pages=12), 1, tokens, 100, 1, 1, 131)
    assert difference(right, oracle(folder, tokens)) < TOLERANCE
    assert faulty(folder, _shift_window(by), tokens) > 1000 * TOLERANCE


# --- config.json ----------------------------------------------------------------------------------

LEAST = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
GIVEN: dict[str, dict[str, Any]] = {
    "nothing said": {},
    "few heads": {"num_key_value_heads": 4, "head_dim": 64},
    "a window": {"sliding_window": 1000, "use_sliding_window": True, "max_window_layers": 20},
    "a window that is off": {"sliding_window": 1000, "use_sliding_window": False},
    "no window": {"sliding_window": None},
    "biases": {"attention_bias": True},
    "experts": {
        "num_experts": 16,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "decoder_sparse_step": 3,
        "mlp_only_layers": [0, 5, 40],
    },
    "experts as transformers 5 writes them": {"num_local_experts": 16},
}


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (kind, given)
        for kind, family in KNOWN.items()
        for given in GIVEN
        if not family.latent and (given != "biases" or family.biases == "chosen")
    ],
)
def test_config_json_means_what_transformers_reads_in_it(
    kind: str, given: str, tmp_path: pathlib.Path
) -> None:
    raw = LEAST | GIVEN[given] | {"model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    mine, theirs = read_config(tmp_path), AutoConfig.for_model(**raw)
    window = 0 if kind == "llama" else theirs.sliding_window or 0
    assert [mine.experts_in(layer) is not None for layer in range(30)] == [
        kind == "qwen3_moe"
        and layer not in theirs.mlp_only_layers
        and (layer + 1) % theirs.decoder_sparse_step == 0
        for layer in range(30)
    ]
    if mine.experts is not None:
        assert mine.experts.count == theirs.num_experts
        assert mine.experts.per_token == theirs.num_experts_per_tok
        assert mine.experts.intermediate == theirs.moe_intermediate_size
        assert mine.experts.normalized == theirs.norm_topk_prob
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 30
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    assert tuple(mine.window(layer) for layer in range(30)) == windows
    dim = getattr(theirs, "head_dim", None) or 128
    assert (mine.kv_heads, mine.head_dim) == (theirs.num_key_value_heads, dim)
    assert mine.max_context_tokens == theirs.max_position_embeddings
    assert mine.norm_eps == theirs.rms_norm_eps
    assert mine.rope.theta == theirs.rope_parameters["rope_theta"]
    biased = kind == "qwen2" or getattr(theirs, "attention_bias", False)
    assert mine.qkv_bias == biased and mine.out_bias == (biased and kind != "qwen2")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("given", [{}, {"num_key_value_heads": None}])
def test_heads_of_keys_that_are_null_are_as_many_as_the_heads(
    kind: str, given: dict[str, None], tmp_path: pathlib.Path
) -> None:
    raw = LEAST | {"num_attention_heads": 64} | given | {"model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path).kv_heads == AutoConfig.for_model(**raw).num_key_value_heads


def test_a_shape_tells_of_the_window(checkpoint: Folder) -> None:
    shape = read_config(checkpoint(FAMILIES["qwen2, late layers windowed"])).shape(4.0, 4.0)
    assert (shape.window_tokens, shape.window_layers, shape.windowed_share) == (150, 3, 0.5)
    assert read_config(checkpoint(FAMILIES["llama"])).shape(4.0, 4.0).windowed_share == 0.0


@pytest.mark.parametrize("name", ["llama", "qwen2", *MIXTURES])
def test_a_shape_counts_the_parameters_of_the_file(name: str, checkpoint: Folder) -> None:
    """All of them but biases and norms of heads and latents."""
    folder = checkpoint(FAMILIES[name])
    stored = 0
    for file in folder.glob("*.safetensors"):
        for tensor, array in load_file(file).items():
            less = ("bias", "q_norm.weight", "k_norm.weight", "a_layernorm.weight")
            if not tensor.endswith(less):
                stored += array.numel()
    assert read_config(folder).shape(4.0, 4.0).params == stored


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"model_type": "qwen2_moe"}, "model_type is 'qwen2_moe': must be one of llama, qwen2"),
        ({"model_type": "mistral", "sliding_window": 0.5}, "sliding_window is 0.5: must be"),
        ({"model_type": "mistral", "sliding_window": -4}, "sliding_window is -4: must be"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias is True: must be"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 30}, "layer_types has"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 30}, "layer_types has"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types must hold"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 30}, "layer_types must"),
        ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias is True: must be"),
        ({"model_type": "qwen3", "head_dim": 63}, "head_dim is 63: must be even"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "few"},
            "max_window_layers is 'few': must be",
        ),
        ({"model_type": "qwen2", "num_key_value_heads": 5}, "num_key_value_heads is 5: must"),
        (
            {"model_type": "qwen2", "dual_chunk_attention_config": {"chunk_size": 1}},
            "dual_chunk_attention_config is set: must be absent",
        ),
        ({"model_type": "qwen3_moe", "num_experts": 0}, "num_experts is 0: must be a positive"),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok is 5: must be at most num_experts, which is 4",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_local_experts": 8},
            "num_experts is 4 and num_local_experts is 8: must be equal",
        ),
        ({"model_type": "qwen3_moe", "norm_topk_prob": "yes"}, "norm_topk_prob is 'yes': must be"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers is 3: must be a list"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step is 0: must"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 1.5}, "moe_intermediate_size is 1.5"),
        ({"model_type": "llama", "rope_theta": "large"}, "rope_theta is 'large': must be"),
        ({"model_type": "llama", "rope_scaling": 3}, "rope_scaling is 3: must be an object"),
        *(
            ({"model_type": "qwen3", "architectures": given}, f"architectures is {text}: must be")
            for given, text in (
                (["Qwen3ForSequenceClassification"], '["Qwen3ForSequenceClassification"]'),
                (["Qwen2ForProcessRewardModel"], '["Qwen2ForProcessRewardModel"]'),
                (["Qwen3Model"], '["Qwen3Model"]'),
                (["LlamaForCausalLMEagle3"], '["LlamaForCausalLMEagle3"]'),
                ([3], "[3]"),
                ("Qwen3Model", '"Qwen3Model"'),
            )
        ),
    ],
)
def test_what_a_family_cannot_mean_is_told_in_one_sentence(
    raw: dict[str, Any], named: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LEAST | raw))
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    message = str(caught.value)
    assert named in message and str(tmp_path / "config.json") in message
    assert "\n" not in message


@pytest.mark.parametrize("given", [None, [], ["LLaMAForCausalLM"], ["LlamaForCausalLM", "Other"]])
def test_a_class_that_generates_text_is_served_and_may_be_absent(
    given: object, tmp_path: pathlib.Path
) -> None:
    raw = LEAST | {"model_type": "llama", "architectures": given}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path).layers == LEAST["num_hidden_layers"]


def test_the_classes_of_the_families_are_those_of_transformers() -> None:
    theirs = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] for name in KNOWN]
    assert list(ARCHITECTURES) == theirs


def test_tensors_that_a_family_needs_are_missed_by_name(
    checkpoint: Folder, tmp_path: pathlib.Path
) -> None:
    """A llama's weights under the config of a family with more."""
    for kind, missed in (("qwen2", r"q_proj\.bias"), ("qwen3", r"q_norm\.weight")):
        folder = tmp_path / kind
        folder.mkdir()
        source = checkpoint(FAMILIES["llama"])
        (folder / "model.safetensors").symlink_to(source / "model.safetensors")
        raw = json.loads((source / "config.json").read_text()) | {"model_type": kind}
        (folder / "config.json").write_text(json.dumps(raw))
        with pytest.raises(CheckpointError, match=f"has no tensor .*{missed}, which config.json"):
            SoloEngine(folder)


def test_tensors_that_a_family_does_not_have_are_named(
    checkpoint: Folder, tmp_path: pathlib.Path
) -> None:
    """A larger model's weights under the config of a smaller one would give other tokens."""
    more: dict[str, tuple[str, dict[str, Any]]] = {
        "q_proj.bias": ("qwen2", {"model_type": "llama"}),
        "k_norm.weight": ("qwen3", {"model_type": "llama"}),
        "layers.1.": ("llama", {"num_hidden_layers": 1}),
        "experts.5.": ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 2}),
    }
    for part, (family, change) in more.items():
        source = checkpoint(FAMILIES[family])
        folder = shutil.copytree(source, tmp_path / part)
        raw = json.loads((source / "config.json").read_text())
        raw = {key: value for key, value in raw.items() if key != "num_local_experts"} | change
        (folder / "config.json").write_text(json.dumps(raw | {"architectures": None}))
        for check in (lambda at: check_tensors(at, held_tensors(at), read_config(at)), SoloEngine):
            with pytest.raises(CheckpointError, match=f"{re.escape(part)}.*does not imply"):
                check(folder)


def test_tensors_that_change_nothing_may_be_there(
    checkpoint: Folder, oracle: Oracle, tmp_path: pathlib.Path
) -> None:
    """Tables of rotation, scales of FP8 pages, a layer that predicts further tokens."""
    source, tokens = checkpoint(FAMILIES["llama"]), recalling(100, 512, seed=1)
    folder = shutil.copytree(source, tmp_path / "more")
    held = load_file(folder / "model.safetensors")
    layers = FAMILIES["llama"].layers
    held["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    held["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    held[f"model.layers.{layers}.eh_proj.weight"] = torch.ones(4, 8)
    held[f"model.layers.{layers}.input_layernorm.weight"] = torch.ones(4)
    held["v_head.summary.weight"] = torch.ones(1, 4)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    check_tensors(folder, held_tensors(folder), read_config(folder))
    actual = prefill(SoloEngine(folder), 1, tokens, 100)
    assert difference(actual, oracle(source, tokens)) < TOLERANCE
