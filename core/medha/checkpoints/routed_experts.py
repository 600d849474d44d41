"""Experts of a mixture: layers that have several MLPs and a router, as config.json describes them.

The keys and their defaults are those of transformers for Qwen3-MoE, DeepSeek-V2 and DeepSeek-V3.
"""

from __future__ import annotations

import pathlib
from typing import Any, Literal

import msgspec

from medha.checkpoints.json_fields import count
from medha.errors import CheckpointError

Mixture = Literal["none", "qwen3", "deepseek_v2", "deepseek_v3"]


class RoutedExperts(msgspec.Struct, frozen=True, kw_only=True):
    """Experts of the layers that have them: `per_token` of `count` compute each token.

    `intermediate`: width of one expert. `normalized`: the weights of a token's experts are divided
    by their sum, and then multiplied by `factor`. `layers`: numbers of the layers with experts,
    ascending. Scores are the router's outputs through `scoring`; with "sigmoid" a bias, read from
    the weights, takes part in the choice alone. Experts are chosen from the `groups_chosen` best of
    `groups` equal groups. `shared_intermediate`: width of an MLP that computes every token (0:
    none). `exact`: the router computes in float32.
    """

    count: int
    per_token: int
    intermediate: int
    normalized: bool
    layers: tuple[int, ...]
    factor: float = 1.0
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    groups_chosen: int = 1
    shared_intermediate: int = 0
    exact: bool = False

    @property
    def biased(self) -> bool:
        """True if a bias takes part in the choice."""
        return self.scoring == "sigmoid"


def experts_of(
    path: pathlib.Path, raw: dict[str, Any], layers: int, mixture: Mixture
) -> RoutedExperts | None:
    """Return the experts that config.json `raw` names; None if all `layers` have one MLP. Raises
    CheckpointError naming the field."""
    if mixture == "none":
        return None
    return _qwen3(path, raw, layers) if mixture == "qwen3" else _deepseek(path, raw, layers)


def _qwen3(path: pathlib.Path, raw: dict[str, Any], layers: int) -> RoutedExperts | None:
    spelling = _spelling(path, raw)
    number, per_token = _counts(path, raw, spelling, 128, 8)
    step, dense = count(path, raw, "decoder_sparse_step", 1), _dense_layers(path, raw)
    sparse = tuple(n for n in range(layers) if n not in dense and (n + 1) % step == 0)
    if not sparse:
        return None
    return RoutedExperts(
        count=number,
        per_token=per_token,
        intermediate=count(path, raw, "moe_intermediate_size", 768),
        normalized=_flag(path, raw, "norm_topk_prob", False),
        layers=sparse,
    )


def _deepseek(path: pathlib.Path, raw: dict[str, Any], layers: int) -> RoutedExperts | None:
    third = raw["model_type"] == "deepseek_v3"
    dense = raw.get("first_k_dense_replace", 3 if third else 0)
    if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
        raise CheckpointError(
            f"{path}: first_k_dense_replace is {dense!r}: must be the number of layers without"
            " experts; fix it"
        )
    if dense >= layers:
        return None
    method = _choice(
        path, raw, "topk_method", ("noaux_tc",) if third else ("greedy", "group_limited_greedy")
    )
    scoring = _choice(path, raw, "scoring_func", ("sigmoid",) if third else ("softmax",))
    if raw.get("moe_layer_freq", 1) != 1:
        raise CheckpointError(
            f"{path}: moe_layer_freq is {raw['moe_layer_freq']!r}: must be 1 or absent, as every"
            " layer from first_k_dense_replace on has experts; use another checkpoint"
        )
    normalized = _flag(path, raw, "norm_topk_prob", third)
    if normalized and not third:
        raise CheckpointError(
            f"{path}: norm_topk_prob is true: must be false or absent for deepseek_v2, whose"
            " implementations disagree about it; use another checkpoint"
        )
    number, per_token = _counts(
        path, raw, "n_routed_experts", 256 if third else 64, 8 if third else None
    )
    groups, chosen = 1, 1
    if method != "greedy":
        groups = count(path, raw, "n_group", 8 if third else None)
        chosen = count(path, raw, "topk_group", 4 if third else None)
        _check_groups(path, number, per_token, groups, chosen, least=2 if third else 1)
    width = count(path, raw, "moe_intermediate_size", 2048 if third else 1407)
    return RoutedExperts(
        count=number,
        per_token=per_token,
        intermediate=width,
        normalized=normalized,
        layers=tuple(range(dense, layers)),
        factor=_factor(path, raw, 2.5 if third else 1.0),
        scoring="sigmoid" if scoring == "sigmoid" else "softmax",
        groups=groups,
        groups_chosen=chosen,
        shared_intermediate=width * count(path, raw, "n_shared_experts", 1 if third else 2),
        exact=True,
    )


def _counts(
    path: pathlib.Path, raw: dict[str, Any], key: str, default: int, per_token: int | None
) -> tuple[int, int]:
    """Return the number of experts, under `key`, and of those per token."""
    number = count(path, raw, key, default)
    selected = count(path, raw, "num_experts_per_tok", per_token)
    if selected > number:
        raise CheckpointError(
            f"{path}: num_experts_per_tok is {selected}: must be at most {key}, which is"
            f" {number}; fetch the file again"
        )
    return number, selected


def _check_groups(
    path: pathlib.Path, number: int, per_token: int, groups: int, chosen: int, least: int
) -> None:
    """Raise CheckpointError unless `chosen` of `groups` equal groups hold `per_token` experts, and
    each group `least`."""
    if number % groups or number // groups < least:
        raise CheckpointError(
            f"{path}: n_group is {groups}: must divide n_routed_experts, which is {number}, into"
            f" groups of at least {least}; fetch the file again"
        )
    if chosen > groups or chosen * (number // groups) < per_token:
        raise CheckpointError(
            f"{path}: topk_group is {chosen}: must be at most n_group, which is {groups}, and the"
            f" groups must hold the {per_token} experts of a token; fetch the file again"
        )


def _choice(path: pathlib.Path, raw: dict[str, Any], key: str, served: tuple[str, ...]) -> str:
    """Return one of the served values; the first if the key is absent."""
    value = raw.get(key)
    if value is None:
        return served[0]
    if value not in served:
        raise CheckpointError(
            f"{path}: {key} is {value!r}: must be {' or '.join(served)} for {raw['model_type']};"
            " use another checkpoint"
        )
    return str(value)


def _factor(path: pathlib.Path, raw: dict[str, Any], default: float) -> float:
    value = raw.get("routed_scaling_factor", default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(
            f"{path}: routed_scaling_factor is {value!r}: must be a positive number; fetch the file"
            " again"
        )
    return float(value)


def _flag(path: pathlib.Path, raw: dict[str, Any], key: str, default: bool) -> bool:
    value = raw.get(key, default)
    if not isinstance(value, bool):
        raise CheckpointError(
            f"{path}: {key} is {value!r}: must be true or false; fetch the file again"
        )
    return value


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
