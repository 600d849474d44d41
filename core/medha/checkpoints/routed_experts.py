"""Experts of a mixture: layers that have several MLPs and a router, as config.json describes them.

The keys and their defaults are those of Qwen3-MoE.
"""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec

from medha.checkpoints.json_fields import count
from medha.errors import CheckpointError


class RoutedExperts(msgspec.Struct, frozen=True, kw_only=True):
    """Experts of the layers that have them: `per_token` of `count` compute each token.

    `intermediate`: width of one expert. `normalized`: the weights of a token's experts are divided
    by their sum. `layers`: numbers of the layers with experts, ascending.
    """

    count: int
    per_token: int
    intermediate: int
    normalized: bool
    layers: tuple[int, ...]


def experts_of(path: pathlib.Path, raw: dict[str, Any], layers: int) -> RoutedExperts | None:
    """Return the experts that config.json `raw` names; None if all `layers` have one MLP. Raises
    CheckpointError naming the field."""
    number = count(path, raw, _spelling(path, raw), 128)
    per_token = count(path, raw, "num_experts_per_tok", 8)
    if per_token > number:
        raise CheckpointError(
            f"{path}: num_experts_per_tok is {per_token}: must be at most num_experts, which is"
            f" {number}; fetch the file again"
        )
    normalized = raw.get("norm_topk_prob", False)
    if not isinstance(normalized, bool):
        raise CheckpointError(
            f"{path}: norm_topk_prob is {normalized!r}: must be true or false; fetch the file again"
        )
    step, dense = count(path, raw, "decoder_sparse_step", 1), _dense_layers(path, raw)
    sparse = tuple(n for n in range(layers) if n not in dense and (n + 1) % step == 0)
    if not sparse:
        return None
    return RoutedExperts(
        count=number,
        per_token=per_token,
        intermediate=count(path, raw, "moe_intermediate_size", 768),
        normalized=normalized,
        layers=sparse,
    )


def _spelling(path: pathlib.Path, raw: dict[str, Any]) -> str:
    """Return the key of the number of experts: transformers 5 writes num_local_experts."""
    old, new = raw.get("num_experts"), raw.get("num_local_experts")
    if old is not None and new is not None and old != new:
        raise CheckpointError(
            f"{path}: num_experts is {old!r} and num_local_experts is {new!r}: must be equal;"
            " remove the wrong one"
        )
    return "num_experts" if new is None else "num_local_experts"


def _dense_layers(path: pathlib.Path, raw: dict[str, Any]) -> set[int]:
    """Return the layers that mlp_only_layers names."""
    given = raw.get("mlp_only_layers")
    given = [] if given is None else given
    if not isinstance(given, list) or any(
        not isinstance(layer, int) or isinstance(layer, bool) or layer < 0 for layer in given
    ):
        raise CheckpointError(
            f"{path}: mlp_only_layers is {given!r}: must be a list of layer numbers; fetch the file"
            " again"
        )
    return set(given)
