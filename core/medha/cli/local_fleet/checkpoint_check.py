"""Check of a checkpoint folder before a fleet starts: config.json, tokenizer, file sizes, layout.

Reads no weights. Reports a wrong path, an incomplete download, or a parallel layout that does not
fit the model; the engine checks the rest when it loads.
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
    """Fields of a Hugging Face config.json that limit a plan."""

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
    """Minimal shape of tokenizer.json: enough to detect another or a truncated file."""

    model: dict[str, msgspec.Raw]


class TensorHeader(msgspec.Struct, frozen=True):
    """Byte range of a tensor in its safetensors file, after the header; absent for metadata."""

    data_offsets: tuple[int, int] = (0, 0)


def check_checkpoint(replica: MedhaReplica, *, weights: bool = True) -> pathlib.Path:
    """Check the folder of a replica's model against its layout, and return it.

    `weights` False: skip the weight files. Raises SpecError or CheckpointError.
    """
    source = replica.spec.model.source.host_path
    if source is None:
        raise SpecError(
            "spec.model.source",
            "pvc, image or uri",
            "must be hostPath on this machine",
            "set hostPath: {path: …}",
        )
    folder = pathlib.Path(source.path)
    if not folder.is_dir():
        raise SpecError(
            "spec.model.source.hostPath.path",
            source.path,
            "must be a folder",
            "put the checkpoint there or correct the path",
        )
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
            "spec.model.maxContextTokens",
            replica.spec.model.max_context_tokens,
            f"must be at most the model's max_position_embeddings, which is {longest}",
            f"use {longest} or less",
        )
    return folder


def _check_tokenizer(folder: pathlib.Path) -> None:
    """Check the tokenizer files: a router never registers a replica whose tokenizer is broken."""
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
                f"{file} cannot be read ({error.strerror}): fetch it again"
            ) from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} is incomplete ({error}): fetch it again") from None


def _check_weights(folder: pathlib.Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors: only that format is loaded")
    for file in files:
        _check_whole(file)


def _check_whole(file: pathlib.Path) -> None:
    """Compare a weight file's size with the size that its header implies."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = opened.read(length) if length <= size else b""
        tensors = msgspec.json.decode(header, type=dict[str, TensorHeader])
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}): fetch it again") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise CheckpointError(
            f"{file} is not a sound safetensors file (its header does not parse): fetch it again"
        ) from None
    expected = 8 + length + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if expected != size:
        raise CheckpointError(
            f"{file} is not a sound safetensors file (it has {size} bytes and must have "
            f"{expected}): fetch it again"
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
        raise CheckpointError(f"{path} is not a model config ({error}): copy it again") from None
