"""Names and shapes of the tensors that ranks load, as config.json implies them."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from medha.checkpoints.checkpoint_files import FLOATS, HeldTensor
from medha.checkpoints.decoder_config import DecoderConfig
from medha.checkpoints.quantization import fp8_scales, refuse_unnamed
from medha.errors import CheckpointError

# Beginning of a tensor's name in a layer, and the module of what changes the layer's results. Other
# parts (scales, zeros, tables of rotation) belong to a module's format.
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_COUNTS = re.compile(r"(.+)\.(?:weight|weight_packed|qweight|bias|e_score_correction_bias)")
# Only layers that predict further tokens (MTP), which are not served, have this projection.
_OF_FURTHER_TOKENS = ".eh_proj."

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def check_tensors(
    folder: pathlib.Path, held: Mapping[str, HeldTensor], model: DecoderConfig
) -> None:
    """Raise CheckpointError for a tensor that ranks need, and which the files lack or hold in
    another shape or type. Ranks compare shapes of FP8 scales as they load them."""
    if not model.tied_embeddings and HEAD not in held:
        raise missing_head(folder)
    refuse_more(folder, held, model)
    for name, shape in vectors(model):
        check_tensor(folder, name, held.get(name), shape)
    if HEAD in held:
        check_tensor(folder, HEAD, held[HEAD], (model.vocab, model.hidden))
    packing = model.quantization
    for module, shape in projections(model):
        name = module + ".weight"
        header = held[name].header if name in held else None
        plain = header is not None and header.dtype in FLOATS
        if packing is None and not plain:
            refuse_unnamed(folder, module)
        if packing is None or (
            plain and (packing.suffix == ".weight" or module + packing.suffix not in held)
        ):
            check_tensor(folder, name, held.get(name), shape)
            continue
        for end, (stored, types) in packing.parts(shape).items():
            check_tensor(folder, module + end, held.get(module + end), stored, types)
        if packing.method == "fp8":
            scales = fp8_scales(module, held)
            check_tensor(folder, scales, held.get(scales), None)


def refuse_more(folder: pathlib.Path, held: Collection[str], model: DecoderConfig) -> None:
    """Raise CheckpointError for a tensor of a layer that config.json does not imply: without it the
    layer computes something else.

    Layers that predict further tokens do not count, nor biases of GPTQ, whose tools write zeros.
    """
    known = {name for name, _ in vectors(model)}
    modules = {module for module, _ in projections(model)}
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


def check_tensor(
    folder: pathlib.Path,
    name: str,
    held: HeldTensor | None,
    shape: Sequence[int] | None,
    types: Sequence[str] = FLOATS,
) -> None:
    """Raise CheckpointError unless a tensor is held in `shape` (None: any) and one of `types`."""
    if held is None:
        raise missing(folder, name)
    if held.header is None:
        raise CheckpointError(
            f"{held.file} lacks {name}, which the index places there; fetch the file and its index"
            " again"
        )
    if shape is not None and held.header.shape != tuple(shape):
        raise CheckpointError(
            f"{held.file}: {name} is {list(held.header.shape)}: config.json implies"
            f" {list(shape)}; config.json and the weights must be of one model"
        )
    if held.header.dtype not in types:
        raise CheckpointError(
            f"{held.file}: {name} is {held.header.dtype[:20]}: must be {' or '.join(types)}, as"
            " quantization_config in config.json says; fetch both again, or use the bfloat16"
            " checkpoint"
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


Vector = tuple[str, tuple[int, ...]]
Matrix = tuple[str, tuple[int, int]]


def vectors(model: DecoderConfig) -> Iterator[Vector]:
    """Yield name and shape of the tensors that are never packed: tables, norms and biases, without
    the head."""
    hidden, latent = (model.hidden,), model.latent
    yield EMBEDDING, (model.vocab, model.hidden)
    yield NORM, hidden
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        attention, experts = prefix + "self_attn.", model.experts_in(layer)
        yield prefix + "input_layernorm.weight", hidden
        yield prefix + "post_attention_layernorm.weight", hidden
        if model.head_norms:
            for name in ("q_norm", "k_norm"):
                yield f"{attention}{name}.weight", (model.head_dim,)
        if latent:
            yield attention + "kv_a_layernorm.weight", (latent.rank,)
            if latent.shape.q_rank:
                yield attention + "q_a_layernorm.weight", (latent.shape.q_rank,)
        if experts and experts.biased:
            yield prefix + "mlp.gate.e_score_correction_bias", (experts.count,)
        biased = ["q_proj", "k_proj", "v_proj"] if model.qkv_bias else []
        biased += ["o_proj"] if model.out_bias else []
        modules = [
            pair for pair in _attention(model, attention) if pair[0].split(".")[-1] in biased
        ]
        if model.mlp_bias:
            modules += _mlp(prefix + "mlp.", model.hidden, model.intermediate)
        yield from ((f"{module}.bias", (outputs,)) for module, (outputs, _) in modules)


def projections(model: DecoderConfig) -> Iterator[Matrix]:
    """Yield the modules whose weights may be packed, without `.weight`, and [outputs, inputs]."""
    hidden = model.hidden
    for layer in range(model.layers):
        prefix, experts = f"model.layers.{layer}.", model.experts_in(layer)
        yield from _attention(model, prefix + "self_attn.")
        if experts is None:
            yield from _mlp(prefix + "mlp.", hidden, model.intermediate)
            continue
        yield prefix + "mlp.gate", (experts.count, hidden)
        for expert in range(experts.count):
            yield from _mlp(f"{prefix}mlp.experts.{expert}.", hidden, experts.intermediate)
        if shared := experts.shared_intermediate:
            yield from _mlp(prefix + "mlp.shared_experts.", hidden, shared)


def _attention(model: DecoderConfig, prefix: str) -> list[Matrix]:
    heads, hidden = model.heads, model.hidden
    if model.latent is None:
        queries, keys = heads * model.head_dim, model.kv_heads * model.head_dim
        sizes = {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
        }
    else:
        shape = model.latent.shape
        wide = heads * (shape.nope_dim + shape.rope_dim)
        sizes = {"q_proj": (wide, hidden)}
        if shape.q_rank:
            sizes = {"q_a_proj": (shape.q_rank, hidden), "q_b_proj": (wide, shape.q_rank)}
        sizes |= {
            "kv_a_proj_with_mqa": (model.latent.width, hidden),
            "kv_b_proj": (heads * (shape.nope_dim + shape.value_dim), shape.kv_rank),
            "o_proj": (hidden, heads * shape.value_dim),
        }
    return [(prefix + name, size) for name, size in sizes.items()]


def _mlp(prefix: str, hidden: int, width: int) -> list[Matrix]:
    return [
        (prefix + "gate_proj", (width, hidden)),
        (prefix + "up_proj", (width, hidden)),
        (prefix + "down_proj", (hidden, width)),
    ]
