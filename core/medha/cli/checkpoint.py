"""What a model's folder says about itself, as far as a plan needs it: config.json and file names.

Reads no weights. The engine checks the rest when it loads; here a wrong path, an incomplete
download or a layout that the model does not allow is told before anything is started.
"""

from __future__ import annotations

import pathlib
from typing import Annotated

import msgspec

from medha.errors import CheckpointError, SpecError
from medha.spec import MedhaReplica
from medha.topology import check_tp, stage_layers

Positive = Annotated[int, msgspec.Meta(ge=1)]


class ConfigJson(msgspec.Struct, frozen=True):
    """The fields of a Hugging Face config.json that bound a plan; others are left to the engine."""

    num_hidden_layers: Positive
    hidden_size: Positive
    num_attention_heads: Positive
    vocab_size: Positive
    num_key_value_heads: Positive | None = None
    max_position_embeddings: Positive | None = None

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads


class TokenizerJson(msgspec.Struct, frozen=True):
    """tokenizer.json, as far as it shows that the file is one, and whole."""

    model: dict[str, msgspec.Raw]


class Tensor(msgspec.Struct, frozen=True):
    """Where a tensor lies in its safetensors file, after the header; absent for metadata."""

    data_offsets: tuple[int, int] = (0, 0)


def check_checkpoint(replica: MedhaReplica, *, weights: bool = True) -> pathlib.Path:
    """The folder of a replica's model, once it is there and the plan fits it.

    Without `weights` none are needed. Raises SpecError or CheckpointError in one sentence.
    """
    source = replica.spec.model.source.host_path
    if source is None:
        raise SpecError(
            "spec.model.source", "pvc, image or uri", "must be hostPath on this machine",
            "set hostPath: {path: …}",
        )  # fmt: skip
    folder = pathlib.Path(source.path)
    if not folder.is_dir():
        raise SpecError("spec.model.source.hostPath.path", source.path, "must be a folder",
                        "put the checkpoint there or correct the path")  # fmt: skip
    config = _read_config(folder)
    _check_tokenizer(folder)
    if weights:
        _check_weights(folder)
    parallelism = replica.spec.parallelism
    check_tp(parallelism.tp, config.num_attention_heads, config.kv_heads)
    stage_layers(config.num_hidden_layers, parallelism.spp)
    longest = config.max_position_embeddings
    if longest is not None and replica.spec.model.max_context_tokens > longest:
        raise SpecError(
            "spec.model.maxContextTokens", replica.spec.model.max_context_tokens,
            f"must be at most the model's max_position_embeddings, which is {longest}",
            f"use {longest} or less",
        )  # fmt: skip
    return folder


def _check_tokenizer(folder: pathlib.Path) -> None:
    """The router would wait for ever for a replica whose tokenizer it cannot load."""
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json: copy the whole checkpoint there")
    shapes = {"tokenizer.json": TokenizerJson, "tokenizer_config.json": dict[str, msgspec.Raw]}
    for name, shape in shapes.items():
        file = folder / name
        if not file.exists():
            continue
        try:
            msgspec.json.decode(file.read_bytes(), type=shape)
        except OSError as error:
            raise CheckpointError(
                f"{file} cannot be read ({error.strerror}): fetch it anew"
            ) from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} is not whole ({error}): fetch it again") from None


def _check_weights(folder: pathlib.Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors: only that format is loaded")
    for file in files:
        _check_whole(file)


def _check_whole(file: pathlib.Path) -> None:
    """A file of weights begins with the length of its header, and the header gives the file's:
    what was cut short or is something else shows without reading a weight."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = opened.read(length) if length <= size else b""
        tensors = msgspec.json.decode(header, type=dict[str, Tensor])
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}): fetch it anew") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise CheckpointError(
            f"{file} is not a sound safetensors file (its header does not parse): fetch it again"
        ) from None
    told = 8 + length + max((each.data_offsets[1] for each in tensors.values()), default=0)
    if told != size:
        raise CheckpointError(
            f"{file} is not a sound safetensors file (it has {size} bytes and must have {told}): "
            "fetch it again"
        )


def _read_config(folder: pathlib.Path) -> ConfigJson:
    path = folder / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=ConfigJson)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): point spec.model.source at a Hugging Face "
            "checkpoint"
        ) from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path} is no model's config ({error}): copy it anew") from None
