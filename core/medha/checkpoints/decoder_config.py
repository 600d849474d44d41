"""Typed values of a checkpoint's config.json, as far as the engine needs them.

Reads the keys of the `families` and both spellings of rotary settings (`rope_theta` with
`rope_scaling`, and `rope_parameters` since transformers 5). Unknown settings are refused by name: a
silently ignored setting gives wrong tokens, not an error.
"""

from __future__ import annotations

import math
import pathlib
from typing import Any

import msgspec

from medha.checkpoints.families import family_of, windows_of
from medha.checkpoints.json_fields import count, read_json
from medha.checkpoints.quantization import Quantization, quantization_of
from medha.checkpoints.routed_experts import RoutedExperts, experts_of
from medha.errors import CheckpointError
from medha.messages import GenerationDefaults
from medha.model import ModelShape

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position settings. `original_tokens`: context length during training."""

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


GENERATION_CONFIG = "generation_config.json"


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and options of the whole model. `max_context_tokens` is `max_position_embeddings`.

    `head_norms`: each head's query and key are normed before rotation. `windows`: window of each
    layer in tokens, a row's own included (0: all); () if no layer has one. `experts` is None if all
    layers have one MLP, of width `intermediate`. `quantization` is None if no weights are packed.
    """

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
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    windows: tuple[int, ...] = ()
    experts: RoutedExperts | None = None
    quantization: Quantization | None = None
    max_context_tokens: int = 2048
    stop_tokens: tuple[int, ...] = ()

    def window(self, layer: int) -> int:
        """Return the window of `layer` in tokens; 0: all."""
        return self.windows[layer] if self.windows else 0

    def windows_in(self, layers: range) -> tuple[int, ...]:
        """Return the distinct windows of `layers`."""
        return tuple(sorted({self.window(layer) for layer in layers}))

    def experts_in(self, layer: int) -> RoutedExperts | None:
        """Return the experts of `layer`; None: it has one MLP."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    @property
    def divided_width(self) -> int:
        """The greatest common divisor of the widths that TP divides: of MLPs and experts."""
        if self.experts is None:
            return self.intermediate
        if len(self.experts.layers) == self.layers:
            return self.experts.intermediate
        return math.gcd(self.intermediate, self.experts.intermediate)

    def shape(
        self, param_bytes: float, kv_bytes: float, max_context_tokens: int | None = None
    ) -> ModelShape:
        """Return the sizes that scheduling needs, with bytes per parameter and per cached
        scalar."""
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
            window_tokens=max(self.windows, default=0),
            window_layers=sum(window > 0 for window in self.windows),
            experts=self.experts.count if self.experts else 0,
            experts_per_token=self.experts.per_token if self.experts else 0,
            expert_intermediate=self.experts.intermediate if self.experts else 0,
            expert_layers=len(self.experts.layers) if self.experts else 0,
        )


def read_config(folder: pathlib.Path) -> DecoderConfig:
    """Return the configuration of the checkpoint in `folder`. Raises CheckpointError naming the
    file."""
    path = folder / "config.json"
    raw = read_json(path)
    family = family_of(path, raw)
    layers = count(path, raw, "num_hidden_layers")
    heads = count(path, raw, "num_attention_heads")
    hidden = count(path, raw, "hidden_size")
    max_tokens = count(path, raw, "max_position_embeddings", family.max_tokens)
    chosen = family.biases == "chosen"
    attention_bias = chosen and bool(raw.get("attention_bias", False))
    kv_heads = count(path, raw, "num_key_value_heads", family.kv_heads or heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{path}: num_key_value_heads is {kv_heads}: must divide num_attention_heads, which is"
            f" {heads}; fetch the file again"
        )
    return DecoderConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(path, raw, family.head_dim or hidden // heads),
        intermediate=count(path, raw, "intermediate_size"),
        vocab=count(path, raw, "vocab_size"),
        norm_eps=_epsilon(path, raw),
        rope=_rope(path, raw, max_tokens),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.biases == "qkv" or attention_bias,
        out_bias=attention_bias,
        mlp_bias=chosen and bool(raw.get("mlp_bias", False)),
        head_norms=family.head_norms,
        windows=windows_of(path, raw, family, layers),
        experts=experts_of(path, raw, layers) if family.mixture else None,
        quantization=quantization_of(path, raw),
        max_context_tokens=max_tokens,
        stop_tokens=_stop_tokens(folder, raw),
    )


def _head_dim(path: pathlib.Path, raw: dict[str, Any], default: int) -> int:
    """Return the head size, which must be even: rotation turns pairs of scalars."""
    value = count(path, raw, "head_dim", default)
    if value % 2:
        raise CheckpointError(f"{path}: head_dim is {value}: must be even; fetch the file again")
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
    """Return the rotary settings.

    `rope_parameters` takes precedence over `rope_scaling`, and a theta inside over one outside.
    """
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise CheckpointError(
            f"{path}: rope_parameters is {given!r}: must be an object; fetch the file again"
        )
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"{path}: rope type is {kind!r}: must be one of {', '.join(ROPE_KINDS)};"
            " use a checkpoint with one of these"
        )
    rotated = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if rotated not in (None, 1.0):
        raise CheckpointError(
            f"{path}: partial_rotary_factor is {rotated!r}: must be 1, as all of a head is rotated;"
            " use another checkpoint"
        )
    for key in ROPE_NEEDS.get(kind, ()):
        if given.get(key) is None:
            raise CheckpointError(
                f"{path}: rope type {kind} lacks {key}: must be given; fetch config.json again"
            )
    # Dynamic NTK scales from max_position_embeddings; the others may name another length.
    outside = raw.get("original_max_position_embeddings")
    original = outside or given.get("original_max_position_embeddings") or max_tokens
    if kind == "dynamic":
        original = max_tokens
    numbers = {
        "original_max_position_embeddings": original,
        "rope_theta": given.get("rope_theta") or raw.get("rope_theta") or 10_000.0,
        "factor": given.get("factor"),
        "low_freq_factor": given.get("low_freq_factor") or 1.0,
        "high_freq_factor": given.get("high_freq_factor") or 4.0,
        "beta_fast": given.get("beta_fast") or 32.0,
        "beta_slow": given.get("beta_slow") or 1.0,
        "mscale": given.get("mscale") or 0.0,
        "mscale_all_dim": given.get("mscale_all_dim") or 0.0,
        "attention_factor": given.get("attention_factor"),
    }
    settings = {key: _rope_number(path, key, value) for key, value in numbers.items()}
    factor = settings.pop("factor")
    if factor is None:
        factor = max_tokens / original if kind == "yarn" else 1.0
    attention_factor = settings.pop("attention_factor")
    plain = {key: value for key, value in settings.items() if value is not None}
    return Rope(
        kind=kind,
        original_tokens=int(plain.pop("original_max_position_embeddings")),
        theta=plain.pop("rope_theta"),
        factor=factor,
        attention_factor=attention_factor,
        truncate=bool(given.get("truncate", True)),
        **plain,
    )


def _rope_number(path: pathlib.Path, key: str, value: Any) -> float | None:
    """Return a numeric rotary setting; None if it is absent."""
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise CheckpointError(
            f"{path}: {key} is {value!r}: must be a number that is not negative; fetch the file"
            " again"
        )
    return float(value)


def read_generation_defaults(folder: pathlib.Path) -> GenerationDefaults:
    """Return the sampling parameters in generation_config.json; CheckpointError if one is out of
    range.

    As in vLLM, `do_sample` does not count.
    """
    path = folder / GENERATION_CONFIG
    if not path.exists():
        return GenerationDefaults()
    given = read_json(path)
    names = GenerationDefaults.__struct_fields__
    try:
        return msgspec.convert(
            {name: given[name] for name in names if name in given}, GenerationDefaults
        )
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"{path} does not fit ({error}): correct or remove the field"
        ) from None


def _stop_tokens(folder: pathlib.Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """Return end-of-sequence ids, from generation_config.json or else config.json."""
    generation = folder / GENERATION_CONFIG
    ids = read_json(generation).get("eos_token_id") if generation.exists() else None
    ids = raw.get("eos_token_id") if ids is None else ids
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)
