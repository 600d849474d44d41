"""A checkpoint's config.json as typed values: what the engine needs to know of a Llama model.

Reads the names of Llama 1 to 3.1 and both spellings of rotary settings (`rope_theta` with
`rope_scaling`, and `rope_parameters` since transformers 5). What it does not know it refuses by
name: a setting that is silently ignored gives wrong tokens, not an error.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import msgspec

from medha.errors import CheckpointError
from medha.model import ModelShape

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position settings. `original_tokens`: context length that the model was trained at."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_tokens: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True


class LlamaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are whole-model. `max_context_tokens` is `max_position_embeddings`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    max_context_tokens: int = 2048
    stop_tokens: tuple[int, ...] = ()

    def shape(
        self, param_bytes: float, kv_bytes: float, max_context_tokens: int | None = None
    ) -> ModelShape:
        """The numbers that scheduling needs; bytes per parameter and per cached scalar."""
        return ModelShape(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate=self.intermediate,
            vocab=self.vocab,
            tied_embeddings=self.tied_embeddings,
            param_bytes=param_bytes,
            kv_bytes=kv_bytes,
            max_context_tokens=max_context_tokens or self.max_context_tokens,
        )


def read_config(folder: pathlib.Path) -> LlamaConfig:
    """The configuration of the checkpoint in `folder`; raises CheckpointError naming the file."""
    path = folder / "config.json"
    raw = read_json(path)
    _check_known(path, raw)
    heads = _count(path, raw, "num_attention_heads")
    hidden = _count(path, raw, "hidden_size")
    max_tokens = _count(path, raw, "max_position_embeddings", 2048)
    return LlamaConfig(
        layers=_count(path, raw, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_count(path, raw, "num_key_value_heads", heads),
        head_dim=_count(path, raw, "head_dim", hidden // heads),
        intermediate=_count(path, raw, "intermediate_size"),
        vocab=_count(path, raw, "vocab_size"),
        norm_eps=_epsilon(path, raw),
        rope=_rope(path, raw, max_tokens),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        max_context_tokens=max_tokens,
        stop_tokens=_stop_tokens(folder, raw),
    )


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint; raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); name the folder of a complete checkpoint"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object; fetch again")
    return value


def _check_known(path: pathlib.Path, raw: dict[str, Any]) -> None:
    expected = {"model_type": "llama", "hidden_act": "silu"}
    for key, value in expected.items():
        if raw.get(key, value) != value:
            raise CheckpointError(
                f"{path}: {key} is {raw[key]!r}: only {value!r} is served; use a Llama checkpoint"
            )
    if raw.get("quantization_config"):
        raise CheckpointError(
            f"{path}: quantization_config is set: quantised weights are not served;"
            " use the bfloat16 or float32 checkpoint"
        )


def _count(path: pathlib.Path, raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(
            f"{path}: {key} is {value!r}: must be a positive whole number; fix it"
        )
    return value


def _epsilon(path: pathlib.Path, raw: dict[str, Any]) -> float:
    value = raw.get("rms_norm_eps", 1e-6)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value < 1.0:
        raise CheckpointError(
            f"{path}: rms_norm_eps is {value!r}: must be a number between 0 and 1, such as 1e-05;"
            " fetch the file again"
        )
    return float(value)


def _rope(path: pathlib.Path, raw: dict[str, Any], max_tokens: int) -> Rope:
    """`rope_parameters` wins over `rope_scaling`; a theta inside wins over one outside."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"{path}: rope type is {kind!r}: must be one of {', '.join(ROPE_KINDS)};"
            " use a checkpoint with one of these"
        )
    if given.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1.0):
        raise CheckpointError(f"{path}: partial_rotary_factor must be 1; use a Llama checkpoint")
    for key in ROPE_NEEDS.get(kind, ()):
        if given.get(key) is None:
            raise CheckpointError(
                f"{path}: rope type {kind} lacks {key}: must be given; fetch config.json again"
            )
    # Dynamic NTK counts from max_position_embeddings; the others may name their own length.
    outside = raw.get("original_max_position_embeddings")
    original = outside or given.get("original_max_position_embeddings") or max_tokens
    if kind == "dynamic":
        original = max_tokens
    factor = given.get("factor")
    if factor is None:
        factor = max_tokens / original if kind == "yarn" else 1.0
    return Rope(
        kind=kind,
        theta=float(given.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        factor=float(factor),
        original_tokens=int(original),
        low_freq_factor=float(given.get("low_freq_factor") or 1.0),
        high_freq_factor=float(given.get("high_freq_factor") or 4.0),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        mscale=float(given.get("mscale") or 0.0),
        mscale_all_dim=float(given.get("mscale_all_dim") or 0.0),
        attention_factor=given.get("attention_factor"),
        truncate=bool(given.get("truncate", True)),
    )


def _stop_tokens(folder: pathlib.Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json's where it has them, else config.json's."""
    generation = folder / "generation_config.json"
    found = read_json(generation).get("eos_token_id") if generation.exists() else None
    found = raw.get("eos_token_id") if found is None else found
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)
