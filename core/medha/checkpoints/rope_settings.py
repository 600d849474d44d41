"""Rotary position settings of a checkpoint's config.json.

Reads both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters` since transformers 5.
"""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec

from medha.errors import CheckpointError

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
ROPE_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "attn_factor",
    "truncate",
    "finetuned",  # changes nothing
}


LEAST = {"rope_theta": 2, "factor": 0.01, "original_max_position_embeddings": 1}
"""Of numbers that must not be as small as 0: with smaller ones there are no frequencies."""
MOST = 1e15


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position settings. `original_tokens`: context length during training.

    `attn_factor` multiplies yarn's scale, and `attention_factor` replaces it.
    """

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
    attn_factor: float = 1.0
    truncate: bool = True

    def longest_context(self, max_tokens: int) -> int:
        """Return the tokens that rotation covers, given max_position_embeddings.

        Dynamic NTK stays within the original length: beyond it, requests of different lengths
        rotate keys differently and cannot share cached pages.
        """
        trained = {"linear": max_tokens, "yarn": self.original_tokens}.get(self.kind, 0)
        return max(max_tokens, int(min(self.factor * trained, 1e9)))


def rope_of(path: pathlib.Path, raw: dict[str, Any], max_tokens: int) -> Rope:
    """Return the rotary settings that config.json `raw` names. Raises CheckpointError naming the
    field.

    `rope_scaling` takes precedence over `rope_parameters`, as in transformers, and a theta inside
    over one outside.
    """
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = raw.get(name) or {}
    if not isinstance(given, dict):
        raise CheckpointError(
            f"{path}: {name} is {given!r}: must be an object; fetch the file again"
        )
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"{path}: rope type is {kind!r}: must be one of {', '.join(ROPE_KINDS)};"
            " use a checkpoint with one of these"
        )
    _check_keys(path, name, kind, given)
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
        "rope_theta": given.get("rope_theta") or _theta_outside(raw),
        "factor": given.get("factor"),
        "low_freq_factor": given.get("low_freq_factor") or 1.0,
        "high_freq_factor": given.get("high_freq_factor") or 4.0,
        "beta_fast": given.get("beta_fast") or 32.0,
        "beta_slow": given.get("beta_slow") or 1.0,
        "mscale": given.get("mscale") or 0.0,
        "mscale_all_dim": given.get("mscale_all_dim") or 0.0,
        "attention_factor": given.get("attention_factor"),
        "attn_factor": given.get("attn_factor") or 1.0,
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


def _check_keys(path: pathlib.Path, name: str, kind: str, given: dict[str, Any]) -> None:
    """Raise CheckpointError for a key that the kind does not have."""
    for key, value in given.items():
        if value is None or (key in ROPE_KEYS and (key != "attn_factor" or kind == "yarn")):
            continue
        raise CheckpointError(
            f"{path}: {name}.{key} is {value!r:.80}: must be absent, as rope type {kind} is served"
            " without it; use another checkpoint, or remove the key if the model does not need it"
        )


def _theta_outside(raw: dict[str, Any]) -> Any:
    """Return the theta for settings that have none."""
    other = raw.get("rope_parameters")
    inside = other.get("rope_theta") if isinstance(other, dict) else None
    return raw.get("rope_theta") or inside or 10_000.0


def _rope_number(path: pathlib.Path, key: str, value: Any) -> float | None:
    """Return a numeric rotary setting; None if it is absent."""
    if value is None:
        return None
    least = LEAST.get(key, 0)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= MOST:
        raise CheckpointError(
            f"{path}: {key} is {value!r:.80}: must be a number from {least} to {MOST:g}; fetch the"
            " file again"
        )
    return float(value)
