"""Differences between the served model families.

All share the same layers (see `decoder`). A family defines the defaults of its config.json and the
parts it adds: biases of query, key and value, a norm of each head's query and key before rotation,
an attention window, experts among which a router selects a few for each token, latent attention.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any, Literal

import msgspec

from medha.checkpoints.routed_experts import Mixture
from medha.errors import CheckpointError


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults and added parts of a family.

    `max_tokens`, `kv_heads`, `head_dim`: defaults of config.json (None: as many as heads; hidden /
    heads). `biases`: "qkv" always has those three, "chosen" follows attention_bias and mlp_bias.
    `windowed`: "all" layers by sliding_window; "chosen": all, if use_sliding_window; "late": from
    max_window_layers on, if use_sliding_window. `mixture`: whose keys describe experts. `latent`:
    attention reads one latent per token (see `latent_attention`). `code`: beginnings of the classes
    that published checkpoints name in auto_map though they need none of them.
    """

    max_tokens: int
    kv_heads: int | None = None
    head_dim: int | None = None
    biases: Literal["none", "qkv", "chosen"] = "none"
    head_norms: bool = False
    windowed: Literal["none", "all", "chosen", "late"] = "none"
    mixture: Mixture = "none"
    latent: bool = False
    code: tuple[str, ...] = ()


FAMILIES = {
    "llama": Family(max_tokens=2048, biases="chosen"),
    "qwen2": Family(max_tokens=32_768, kv_heads=32, biases="qkv", windowed="late"),
    "qwen3": Family(
        max_tokens=32_768,
        kv_heads=32,
        head_dim=128,
        biases="chosen",
        head_norms=True,
        windowed="late",
    ),
    "qwen3_moe": Family(
        max_tokens=32_768,
        kv_heads=4,
        biases="chosen",
        head_norms=True,
        windowed="chosen",
        mixture="qwen3",
    ),
    "deepseek_v2": Family(
        max_tokens=2048,
        mixture="deepseek_v2",
        latent=True,
        code=("configuration_deepseek.DeepseekV2", "modeling_deepseek.DeepseekV2"),
    ),
    "deepseek_v3": Family(
        max_tokens=4096,
        mixture="deepseek_v3",
        latent=True,
        code=("configuration_deepseek.DeepseekV3", "modeling_deepseek.DeepseekV3"),
    ),
    "mistral": Family(max_tokens=131_072, kv_heads=8, windowed="all"),
}

ARCHITECTURES = tuple(f"{name.title().replace('_', '')}ForCausalLM" for name in FAMILIES)

# Defaults of sliding_window and max_window_layers.
WINDOW, WINDOWED_FROM = 4096, 28

KINDS = ("full_attention", "sliding_attention")


def family_of(path: pathlib.Path, raw: dict[str, Any]) -> Family:
    """Return the family that config.json `raw` names. Raises CheckpointError if it is not
    served."""
    name, code = raw.get("model_type"), raw.get("auto_map")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        given = "missing" if name is None else repr(name)
        raise CheckpointError(
            f"{path}: model_type is {given}: must be one of {', '.join(FAMILIES)};"
            " use a checkpoint of one of these families"
        )
    _check_architectures(path, raw.get("architectures"))
    if code and not _published(code, family):
        raise CheckpointError(
            f"{path}: auto_map is {json.dumps(code)[:160]}: must be absent, as a checkpoint's own"
            f" code is never run; remove auto_map if the model is a plain {name}, or use another"
            " checkpoint"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"{path}: hidden_act is {raw['hidden_act']!r}: must be 'silu', as the {name} family"
            " has it; use another checkpoint"
        )
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key) and (family.biases != "chosen" or (family.head_norms and key[0] == "m")):
            raise CheckpointError(
                f"{path}: {key} is {raw[key]!r}: must be false or absent for {name}, whose layers"
                " have no such choice; fetch the file again"
            )
    if raw.get("dual_chunk_attention_config"):
        raise CheckpointError(
            f"{path}: dual_chunk_attention_config is set: must be absent, as attention in dual"
            " chunks is not served; remove it from the file to serve the contexts that the model"
            " was trained at"
        )
    return family


def _check_architectures(path: pathlib.Path, given: object) -> None:
    """Raise CheckpointError unless the given class generates text; case does not count."""
    served = {name.casefold() for name in ARCHITECTURES}
    names = given if isinstance(given, list) else [given]
    texts = [name.casefold().removeprefix("fsdp") for name in names if isinstance(name, str)]
    if given and not served.intersection(texts):
        raise CheckpointError(
            f"{path}: architectures is {json.dumps(given)[:160]}: must be absent or name one of"
            f" {', '.join(ARCHITECTURES)}, as only models that generate text are served; use such a"
            " checkpoint, not one of a classifier, a reward model or an encoder"
        )


def _published(code: object, family: Family) -> bool:
    """Return True if auto_map names only classes that the family was published with."""
    names = code.values() if isinstance(code, dict) else ()
    return bool(names) and all(
        isinstance(name, str) and name.startswith(family.code) for name in names
    )


def windows_of(
    path: pathlib.Path, raw: dict[str, Any], family: Family, layers: int
) -> tuple[int, ...]:
    """Return the window of each layer in tokens, a row's own included (0: all); () if none has
    one."""
    window = raw.get("sliding_window", WINDOW)
    if family.windowed == "none" or window is None:
        window = 0
    if family.windowed in ("chosen", "late") and not raw.get("use_sliding_window", False):
        window = 0
    if not isinstance(window, int) or isinstance(window, bool) or window < 0:
        raise CheckpointError(
            f"{path}: sliding_window is {window!r}: must be a positive number of tokens, or null"
            " for none; fix it"
        )
    kinds = _kinds(path, raw, family, layers, bool(window))
    return tuple(window if sliding else 0 for sliding in kinds) if any(kinds) else ()


def _kinds(
    path: pathlib.Path, raw: dict[str, Any], family: Family, layers: int, windowed: bool
) -> list[bool]:
    """Return which layers have the window, by layer_types or else by the family's rule."""
    first = raw.get("max_window_layers", WINDOWED_FROM) if family.windowed == "late" else 0
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise CheckpointError(
            f"{path}: max_window_layers is {first!r}: must be the number of layers without a"
            " window; fix it"
        )
    ruled = [windowed and layer >= first for layer in range(layers)]
    given = raw.get("layer_types")
    if given is None:
        return ruled
    if (
        not isinstance(given, list)
        or len(given) != layers
        or any(kind not in KINDS for kind in given)
    ):
        raise CheckpointError(
            f"{path}: layer_types must hold one of {' or '.join(KINDS)} for each of {layers}"
            " layers; fetch the file again"
        )
    windowed_layers = [kind == KINDS[1] for kind in given]
    if windowed_layers != ruled and (family.windowed != "late" or not windowed):
        raise CheckpointError(
            f"{path}: layer_types has a window in {sum(windowed_layers)} of {layers} layers:"
            f" must have it in {sum(ruled)}, as sliding_window says; fetch the file again"
        )
    return windowed_layers
