"""LoRA adapters of a checkpoint, in the format of PEFT: a projection W becomes W + scale · B·A.

    adapter_config.json         rank r, alpha; scale = alpha / r, or alpha / √r (rank-stabilised)
    adapter_model.safetensors   A [r, inputs] and B [outputs, r] of each adapted projection
    chat_template.jinja         of chats with the adapter, or in tokenizer_config.json; optional

Reads headers only. Settings that would change the result in another way are refused by name.
"""

from __future__ import annotations

import math
import pathlib
import re
from typing import Any

import msgspec

from medha.checkpoints.checkpoint_files import TensorHeader, digest_of_files, tensor_headers
from medha.checkpoints.decoder_config import DecoderConfig
from medha.checkpoints.json_fields import count, read_json
from medha.errors import CheckpointError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
MAX_RANK, MAX_ALPHA = 512, 1e6
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
FLOATS = ("F32", "BF16", "F16")
INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initial weights of training that leave the base model as it is."""
FREE = {
    *("auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying"),
    *("eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern"),
    *("layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "megatron_config"),
    *("megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision"),
    *("runtime_config", "target_modules", "task_type", "use_rslora"),
}
"""Settings that are checked below, or that change nothing once the weights are trained."""

_TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(0|[1-9][0-9]{0,8})\.(self_attn|mlp)\.([a-z]+_proj)"
    r"\.lora_([AB])\.weight"
)
_REMEDY = "merge the adapter into its base model (PEFT's merge_and_unload) and serve that"


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter's folder, rank and scale, its projections as (layer, name), and the chat template
    in its folder, if any."""

    folder: str
    rank: int
    scale: float
    projections: frozenset[tuple[int, str]]
    template: str = ""

    def params(self, model: DecoderConfig) -> int:
        """Return the entries of all A and B."""
        return sum(self.rank * sum(sizes_of(name, model)) for _, name in self.projections)


def sizes_of(name: str, model: DecoderConfig) -> tuple[int, int]:
    """Return the outputs and inputs of the projection `name`, of a model without latents."""
    heads, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return {
        "q_proj": (heads, model.hidden),
        "k_proj": (kv, model.hidden),
        "v_proj": (kv, model.hidden),
        "o_proj": (model.hidden, heads),
        "gate_proj": (model.intermediate, model.hidden),
        "up_proj": (model.intermediate, model.hidden),
        "down_proj": (model.hidden, model.intermediate),
    }[name]


def tensor_name(layer: int, name: str, part: str) -> str:
    """Return the file's name of a projection's `part`: A or B."""
    module = "self_attn" if name in ATTENTION else "mlp"
    return f"base_model.model.model.layers.{layer}.{module}.{name}.lora_{part}.weight"


def read_lora(folder: pathlib.Path, model: DecoderConfig) -> Lora:
    """Return the adapter in `folder`, made for `model`. Raises CheckpointError naming the file and
    the setting or tensor that is not served."""
    path = folder / CONFIG
    raw = read_json(path)
    _check_settings(path, raw)
    rank = count(path, raw, "r")
    if rank > MAX_RANK:
        raise CheckpointError(f"{path}: r is {rank}: must be at most {MAX_RANK}; {_REMEDY}")
    alpha = raw.get("lora_alpha", 8)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha <= MAX_ALPHA:
        raise CheckpointError(
            f"{path}: lora_alpha is {str(alpha)[:80]}: must be a positive number of at most"
            f" {MAX_ALPHA:g}; fetch the file again"
        )
    return Lora(
        folder=str(folder),
        rank=rank,
        scale=alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank),
        projections=_projections(folder, rank, model),
        template=read_template(folder),
    )


def digest_of_adapter(folder: pathlib.Path) -> str:
    """Return a digest that distinguishes adapters, as `digest_of` does checkpoints."""
    return digest_of_files(folder, [CONFIG], [WEIGHTS])


def read_template(folder: pathlib.Path) -> str:
    """Return the chat template of a checkpoint or an adapter; empty if the folder has none. Raises
    CheckpointError."""
    path = folder / TEMPLATE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); fetch it again") from None
    path = folder / TOKENIZER_CONFIG
    given = read_json(path).get("chat_template") if path.is_file() else None
    if isinstance(given, list):
        named = [entry for entry in given if isinstance(entry, dict)]
        given = {entry.get("name"): entry.get("template") for entry in named}.get("default")
    return given if isinstance(given, str) else ""


def _check_settings(path: pathlib.Path, raw: dict[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{path}: peft_type is {raw.get('peft_type')!r}: must be LORA; {_REMEDY}"
        )
    if raw.get("bias", "none") != "none":
        raise CheckpointError(f"{path}: bias is {raw['bias']!r}: must be none; {_REMEDY}")
    initial = raw.get("init_lora_weights", True)
    if initial not in INITIAL:
        raise CheckpointError(
            f"{path}: init_lora_weights is {initial!r}, which changes the base model: must be true,"
            " false, gaussian, eva or orthogonal; convert the adapter"
            " (path_initial_model_for_weight_conversion of PEFT's save_pretrained)"
        )
    rslora = raw.get("use_rslora", False)
    if not isinstance(rslora, bool):
        raise CheckpointError(f"{path}: use_rslora is {rslora!r}: must be true or false; fix it")
    for key, value in raw.items():
        if key not in FREE and value not in (None, False, "", [], {}):
            raise CheckpointError(
                f"{path}: {key} is {str(value)[:80]!r}: must be absent, as only plain LoRA is"
                f" served; {_REMEDY}"
            )


def _projections(
    folder: pathlib.Path, rank: int, model: DecoderConfig
) -> frozenset[tuple[int, str]]:
    """Return the adapted projections, after checks of all tensors."""
    path = folder / WEIGHTS
    if not path.is_file() and (folder / PICKLED).is_file():
        raise CheckpointError(
            f"{folder} has {PICKLED} and no {WEIGHTS}: only that format is loaded; save the"
            " adapter again with safe_serialization=True"
        )
    if model.latent is not None:
        raise CheckpointError(
            f"{folder} is an adapter, and its base model has latent attention: must be a model"
            f" without; {_REMEDY}"
        )
    tensors = tensor_headers(path)
    parts: dict[tuple[int, str], set[str]] = {}
    for name, tensor in tensors.items():
        layer, projection, part = _place(path, name, model)
        outputs, inputs = sizes_of(projection, model)
        _check_tensor(path, name, tensor, (rank, inputs) if part == "A" else (outputs, rank))
        parts.setdefault((layer, projection), set()).add(part)
    for (layer, projection), held in parts.items():
        if len(held) < 2:
            missing = tensor_name(layer, projection, "B" if "A" in held else "A")
            raise CheckpointError(f"{path} has no tensor {missing}: fetch the file again")
    if not parts:
        raise CheckpointError(f"{path} holds no tensors: fetch the file again")
    return frozenset(parts)


def _place(path: pathlib.Path, name: str, model: DecoderConfig) -> tuple[int, str, str]:
    """Return layer, projection and part (A or B) of a tensor that is served."""
    served = ATTENTION if model.experts is not None else (*ATTENTION, *MLP)
    matched = _TENSOR.fullmatch(name)
    if matched is None or matched[3] not in served or (matched[2] == "mlp") != (matched[3] in MLP):
        raise CheckpointError(
            f"{path}: {name[:200]} is not served: must be an adapter of {', '.join(served)}"
            f"{', as the model has experts' if model.experts is not None else ''}; train one of"
            f" these (target_modules), or {_REMEDY}"
        )
    layer = int(matched[1])
    if layer >= model.layers:
        raise CheckpointError(
            f"{path}: {name} adapts layer {layer}, and the model has {model.layers}: must be an"
            " adapter of this model; name the model that it was trained on"
        )
    return layer, matched[3], matched[4]


def _check_tensor(
    path: pathlib.Path, name: str, tensor: TensorHeader, shape: tuple[int, int]
) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"{path}: {name} is {list(tensor.shape)}: {CONFIG} and the base model imply"
            f" {list(shape)}; name the model that it was trained on"
        )
    if tensor.dtype not in FLOATS:
        raise CheckpointError(
            f"{path}: {name} is {tensor.dtype[:20]}: must be {', '.join(FLOATS)}; save the adapter"
            " again in one of these types"
        )
