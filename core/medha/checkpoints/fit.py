"""Fit of a model into a replica's layout: TP, stages, and the pages of its KV pool."""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Iterator
from typing import NoReturn

import msgspec

from medha.checkpoints.decoder_config import DecoderConfig
from medha.checkpoints.lora import Lora, read_lora
from medha.config import WorkerConfig
from medha.errors import SpecError
from medha.model import ModelShape
from medha.topology import check_tp, kv_heads_of, stage_layers

PARAM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_BYTES = {**PARAM_BYTES, "fp8_e4m3": 1}
PACKED_GROUPS = (32, 64, 128, 256)
"""Inputs that may share a scale in torch's products with packed weights."""


def param_bytes(config: WorkerConfig) -> int:
    """Return the bytes of a parameter. Raises SpecError for an unknown type."""
    return _bytes("dtype", config.dtype, PARAM_BYTES)


def packed_bytes(model: DecoderConfig, config: WorkerConfig) -> float:
    """Return the bytes of a weight that stays packed in memory; 0 if none do. Raises SpecError if
    they cannot."""
    check_packed(model, config)
    if not config.packed_weights or model.quantization is None:
        return 0.0
    return model.quantization.held_bytes(param_bytes(config))


def kv_bytes(config: WorkerConfig) -> int:
    """Return the bytes of a cached scalar. Raises SpecError for an unknown type."""
    if config.kv_dtype == "auto":
        return param_bytes(config)
    return _bytes("kv_dtype", config.kv_dtype, KV_BYTES)


def _bytes(field: str, dtype: str, known: dict[str, int]) -> int:
    if dtype not in known:
        raise SpecError(field, dtype, "must be known", f"use one of {', '.join(known)}")
    return known[dtype]


def page_bytes(
    kv_heads: int, page_tokens: int, head_dim: int, scalar_bytes: int, planes: int = 2
) -> int:
    """Return the bytes of a page of keys and values (`planes` 2), or of latents (1), in one
    layer."""
    return planes * kv_heads * page_tokens * head_dim * scalar_bytes


def _rank_page_bytes(model: DecoderConfig, config: WorkerConfig, layers: int) -> int:
    """Return the bytes of a page of a rank that holds `layers` layers."""
    heads = len(kv_heads_of(0, config.topology.tp, model.kv_heads))  # as many in each shard
    scalar = kv_bytes(config)
    return layers * page_bytes(heads, config.page_tokens, model.head_dim, scalar, model.planes)


def pool_pages(model: DecoderConfig, config: WorkerConfig, layers: int) -> int:
    """Return the pages in the pool of a rank that holds `layers` layers: `kv_pages`, or as many as
    fit into `kv_bytes`.

    Raises SpecError if not even one fits.
    """
    if config.kv_pages:
        return config.kv_pages
    size = _rank_page_bytes(model, config, layers)
    if config.kv_bytes < size:
        raise SpecError(
            "spec.engine.kvMemory",
            f"{config.kv_bytes} bytes",
            f"must hold a page of {size} bytes",
            f"use {_mebibytes(size)} or more, or make pageTokens smaller",
        )
    return config.kv_bytes // size


def misfits(model: DecoderConfig, config: WorkerConfig, groups: int) -> Iterator[SpecError]:
    """Yield every reason why the replica cannot serve `model` on at most `groups` KVP groups."""
    topology = config.topology
    divisible = True
    try:
        check_tp(topology.tp, model.heads, model.kv_heads, model.divided_width)
    except SpecError as error:
        divisible = False
        yield error
    try:
        layers = len(stage_layers(model.layers, topology.spp)[0])
    except SpecError as error:
        divisible = False
        yield error
    for check in (check_experts, check_latent, check_packed):
        try:
            check(model, config)
        except SpecError as error:
            yield error
    longest = model.max_context_tokens
    if config.max_context_tokens > longest:
        bound = "max_position_embeddings and rope scaling"
        if model.rope.kind == "dynamic":
            bound = "max_position_embeddings, as dynamic NTK beyond it is not served"
        yield SpecError(
            "spec.model.maxContextTokens",
            config.max_context_tokens,
            f"must be at most the model's longest context, which is {longest} by {bound}",
            f"use {longest} or less",
        )
    if divisible:
        try:
            _check_pool(model, config, layers, groups)
        except SpecError as error:
            yield error


def check_experts(model: DecoderConfig, config: WorkerConfig) -> None:
    """Raise SpecError unless a GPU can compute the model's experts in grouped products."""
    if model.experts is None or config.device != "cuda" or config.deterministic:
        return
    instead = "or set spec.engine.arithmetic to Deterministic, which is slower"
    if config.dtype != "bfloat16":
        raise SpecError(
            "spec.model.dtype",
            config.dtype,
            "must be bfloat16, as experts on a GPU are computed in that type",
            f"use bfloat16, {instead}",
        )
    tp, width = config.topology.tp, model.experts.intermediate
    if width % tp == 0 and width // tp % 8:
        raise SpecError(
            "spec.parallelism.tp",
            tp,
            f"must leave a multiple of 8 of each expert's width of {width} to a GPU",
            f"use a smaller one, {instead}",
        )


def check_latent(model: DecoderConfig, config: WorkerConfig) -> None:
    """Raise SpecError unless latent attention is served with these settings."""
    if model.latent is None:
        return
    if kv_bytes(config) == 1:
        raise SpecError(
            "spec.model.kvCacheDtype",
            config.kv_dtype,
            "must not be FP8, as latents are cached in the type of the weights",
            "remove it",
        )
    if config.device == "cuda" and config.deterministic:
        raise SpecError(
            "spec.engine.arithmetic",
            "Deterministic",
            "must be Fast on a GPU, as products with latents depend on the batch",
            "use Fast, or device Cpu",
        )


def check_packed(model: DecoderConfig, config: WorkerConfig) -> None:
    """Raise SpecError unless the model's weights can stay packed, if they shall."""
    packing = model.quantization
    if not config.packed_weights:
        return
    if packing is None:
        _refuse_packed("needs FP8 or 4-bit weights, which the checkpoint does not have")
    if config.dummy_weights:
        _refuse_packed("needs a checkpoint's weights, as random ones (--dummy-weights) are plain")
    if packing.method == "fp8":
        return
    if model.experts is not None or model.latent is not None:
        _refuse_packed("needs a model without experts and latent attention, or FP8 weights")
    if packing.ordered or packing.group not in PACKED_GROUPS:
        _refuse_packed(
            f"needs groups of {', '.join(map(str, PACKED_GROUPS))} neighbouring inputs (group_size,"
            " without desc_act)"
        )
    if config.device == "cuda" and (config.dtype != "bfloat16" or config.deterministic):
        _refuse_packed("needs dtype bfloat16 and arithmetic Fast on a GPU")
    tp = config.topology.tp
    heads = model.heads // tp + 2 * len(kv_heads_of(0, tp, model.kv_heads))
    inputs = (model.hidden, model.heads // tp * model.head_dim, model.intermediate // tp)
    outputs = (model.hidden, heads * model.head_dim, 2 * (model.intermediate // tp))
    if any(size % packing.group for size in inputs) or any(size % 16 for size in outputs):
        _refuse_packed(
            f"needs, on each of {tp} shards, inputs of projections that groups of {packing.group}"
            f" divide and outputs that 16 divides (inputs {inputs}, outputs {outputs})"
        )


def read_adapters(model: DecoderConfig, config: WorkerConfig) -> dict[str, Lora]:
    """Return the adapters by name. Raises CheckpointError, or SpecError if they are not served
    with these settings."""
    adapters: dict[str, Lora] = {}
    for adapter in config.adapters:
        lora = read_lora(pathlib.Path(adapter.folder), model)
        if kv_bytes(config) == 1 and any(
            name in ("k_proj", "v_proj") for _, name in lora.projections
        ):
            raise SpecError(
                "spec.model.kvCacheDtype",
                config.kv_dtype,
                f"must not be FP8, as the adapter {adapter.name} changes keys or values, and their"
                " scales follow from the base model",
                "use auto",
            )
        adapters[adapter.name] = lora
    return adapters


def adapted_shape(
    shape: ModelShape, model: DecoderConfig, adapters: Collection[Lora]
) -> ModelShape:
    """Return the shape of the model with its adapters."""
    params = sum(lora.params(model) for lora in adapters) / model.layers
    count = len(adapters)
    return msgspec.structs.replace(
        shape, adapters=count, adapter_params=params / count if count else 0.0
    )


def _refuse_packed(reason: str) -> NoReturn:
    raise SpecError("spec.engine.packedWeights", "Enabled", reason, "use Disabled")


def _check_pool(model: DecoderConfig, config: WorkerConfig, layers: int, groups: int) -> None:
    """Raises SpecError unless the pools of `groups` KVP groups hold the longest context.

    `layers`: of the largest stage, whose ranks have the fewest pages for their memory.
    """
    pages, page = pool_pages(model, config, layers), config.page_tokens
    kept = model.shape(1.0, 1.0, config.max_context_tokens).kept_pages(page)
    groups = 1 if kept.window_tokens else groups
    holds = groups * pages * page
    needed = -(-kept.least(config.max_context_tokens) // groups)
    if needed <= pages:
        return
    field = "kvPages"
    more = str(needed)
    if not config.kv_pages:
        field, more = "kvMemory", _mebibytes(needed * _rank_page_bytes(model, config, layers))
    raise SpecError(
        "spec.model.maxContextTokens",
        config.max_context_tokens,
        f"must be at most the {holds} tokens of the KV pool ({groups} KVP groups × {pages} pages"
        f" × {page} tokens)",
        f"use {holds} or less, or raise spec.engine.{field} to {more}",
    )


def _mebibytes(size: int) -> str:
    return f"{-(-size // (1 << 20))}Mi"
