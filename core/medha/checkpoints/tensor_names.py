"""Names of the tensors that ranks load, as config.json implies them."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Collection, Iterator

from medha.checkpoints.checkpoint_files import SINGLE, file_of_each, tensor_headers
from medha.checkpoints.decoder_config import DecoderConfig
from medha.checkpoints.quantization import refuse_unnamed
from medha.errors import CheckpointError

# Beginning of a tensor's name in a layer, and the module of what changes the layer's results. Other
# parts (scales, zeros, tables of rotation) belong to a module's format.
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_COUNTS = re.compile(r"(.+)\.(?:weight|weight_packed|qweight|bias|e_score_correction_bias)")
# Only layers that predict further tokens (MTP), which are not served, have this projection.
_OF_FURTHER_TOKENS = ".eh_proj."

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def check_names(folder: pathlib.Path, model: DecoderConfig) -> None:
    """Raise CheckpointError for a tensor that ranks need and the files lack."""
    held = file_of_each(folder) or tensor_headers(folder / SINGLE)
    if not model.tied_embeddings and HEAD not in held:
        raise missing_head(folder)
    for name in vectors(model):
        if name not in held:
            raise missing(folder, name)
    packed = model.quantization.suffix if model.quantization else ".weight"
    for module in projections(model):
        if module + packed not in held and module + ".weight" not in held:
            if model.quantization is None:
                refuse_unnamed(folder, module)
            raise missing(folder, module + packed)
    refuse_more(folder, held, model)


def refuse_more(folder: pathlib.Path, held: Collection[str], model: DecoderConfig) -> None:
    """Raise CheckpointError for a tensor of a layer that config.json does not imply: without it the
    layer computes something else.

    Layers that predict further tokens do not count, nor biases of GPTQ, whose tools write zeros.
    """
    known = set(vectors(model))
    modules = set(projections(model))
    further = {
        place[1] for name in held if _OF_FURTHER_TOKENS in name and (place := _LAYER.match(name))
    }
    for name in held:
        place, part = _LAYER.match(name), _COUNTS.fullmatch(name)
        if place is None or part is None or name in known or place[1] in further:
            continue
        if not name.endswith("bias") and part[1] in modules:
            continue
        if model.quantization and model.quantization.method == "gptq" and name.endswith(".bias"):
            continue
        raise CheckpointError(
            f"{folder} has a tensor {name}, which config.json does not imply, and without which the"
            " answers would be wrong; config.json and the weights must be of one model: fetch both"
            " again"
        )


def missing(folder: pathlib.Path, name: str) -> CheckpointError:
    """Return the error for a tensor that the files lack."""
    return CheckpointError(
        f"{folder} has no tensor {name}, which config.json implies; config.json and the weights"
        " must be of one model: fetch both again"
    )


def missing_head(folder: pathlib.Path) -> CheckpointError:
    """Return the error for files without an output table."""
    return CheckpointError(
        f"{folder} has no tensor {HEAD}: needed where config.json does not"
        ' say "tie_word_embeddings": true; say so if the model ties them, or fetch the'
        " weights again"
    )


def vectors(model: DecoderConfig) -> Iterator[str]:
    """Yield the tensors that are never packed: tables, norms and biases, without the head."""
    yield from (EMBEDDING, NORM)
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        attention, experts = prefix + "self_attn.", model.experts_in(layer)
        yield prefix + "input_layernorm.weight"
        yield prefix + "post_attention_layernorm.weight"
        if model.head_norms:
            yield from (attention + "q_norm.weight", attention + "k_norm.weight")
        if model.latent:
            yield attention + "kv_a_layernorm.weight"
            if model.latent.shape.q_rank:
                yield attention + "q_a_layernorm.weight"
        if experts and experts.biased:
            yield prefix + "mlp.gate.e_score_correction_bias"
        biased = ["q_proj", "k_proj", "v_proj"] if model.qkv_bias else []
        biased += ["o_proj"] if model.out_bias else []
        yield from (f"{attention}{name}.bias" for name in biased)
        if model.mlp_bias:
            yield from (f"{module}.bias" for module in _mlp(prefix + "mlp."))


def projections(model: DecoderConfig) -> Iterator[str]:
    """Yield the modules whose weights may be packed, without `.weight`."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if model.latent:
        queries = ["q_a_proj", "q_b_proj"] if model.latent.shape.q_rank else ["q_proj"]
        names = [*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    for layer in range(model.layers):
        prefix, experts = f"model.layers.{layer}.", model.experts_in(layer)
        yield from (f"{prefix}self_attn.{name}" for name in names)
        if experts is None:
            yield from _mlp(prefix + "mlp.")
            continue
        yield prefix + "mlp.gate"
        for expert in range(experts.count):
            yield from _mlp(f"{prefix}mlp.experts.{expert}.")
        if experts.shared_intermediate:
            yield from _mlp(prefix + "mlp.shared_experts.")


def _mlp(prefix: str) -> tuple[str, str, str]:
    return prefix + "gate_proj", prefix + "up_proj", prefix + "down_proj"
