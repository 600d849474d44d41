"""Files of a checkpoint: whether they are whole, and a digest that distinguishes checkpoints.

Reads headers and samples only, within seconds.

The digest covers config.json, the index (if any) and, of each safetensors file, its name, size,
header (names, types, shapes and offsets of tensors, metadata) and three pages of every tensor: the
first, middle and last 4 KiB. For 140 GB of weights that is about 10 MB. So it distinguishes weights
whose files agree in names and sizes, such as two fine-tunings. It misses differences elsewhere in a
tensor, and the same weights split into other files count as different.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from medha.checkpoints.json_fields import read_json
from medha.errors import CheckpointError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SAMPLE_BYTES = 4096
HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""
SCALAR_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I32": 4, "I64": 8}
"""Of the types that are read; others count as any size."""
FLOATS: tuple[str, ...] = ("F32", "F16", "BF16")
"""Types of plain weights and of scales."""
READERS = 8
"""Files read at once: network storage is slow per request, but serves many in parallel."""


class TensorOffsets(msgspec.Struct, frozen=True):
    """Place of a tensor in its file, after the header; metadata has none."""

    data_offsets: tuple[int, int] = (0, 0)


class TensorHeader(TensorOffsets, frozen=True):
    """Place, type (as safetensors spells it) and shape of a tensor."""

    dtype: str = ""
    shape: tuple[int, ...] = ()


class HeldTensor(msgspec.Struct, frozen=True):
    """A tensor's file and its header there; None if the index names a file that lacks it."""

    file: pathlib.Path
    header: TensorHeader | None


class TokenizerJson(msgspec.Struct, frozen=True):
    """Minimal shape of tokenizer.json: enough to detect another or a truncated file."""

    model: dict[str, msgspec.Raw]


TOKENIZER_FILES = {
    "tokenizer.json": TokenizerJson,
    "tokenizer_config.json": dict[str, msgspec.Raw],
}
OTHER_TOKENIZERS = ("tekken.json", "tokenizer.model", "tiktoken.model")


def check_tokenizer(folder: pathlib.Path) -> None:
    """Raise CheckpointError unless the tokenizer's files are there and whole."""
    if not (folder / "tokenizer.json").is_file():
        for name in OTHER_TOKENIZERS:
            if (folder / name).is_file():
                raise CheckpointError(
                    f"{folder} has {name} but no tokenizer.json, the only format that is read:"
                    " convert it in Python, with from transformers import AutoTokenizer;"
                    f" AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained("
                    f"{str(folder)!r})"
                )
        raise CheckpointError(f"{folder} has no tokenizer.json: copy the whole checkpoint there")
    for name, shape in TOKENIZER_FILES.items():
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


def held_tensors(folder: pathlib.Path) -> dict[str, HeldTensor]:
    """Return all tensors of a folder by name. Raises CheckpointError unless its weight files are
    there, whole and sound."""
    indexed = file_of_each(folder)
    headers = _headers(folder, indexed)
    if indexed is None:
        indexed = dict.fromkeys(headers[SINGLE], SINGLE)
    return {
        name: HeldTensor(folder / file, headers[file].get(name)) for name, file in indexed.items()
    }


def _headers(
    folder: pathlib.Path, indexed: dict[str, str] | None
) -> dict[str, dict[str, TensorHeader]]:
    """Return the tensors of each weight file. Raises CheckpointError."""
    if indexed is None and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} has no *.safetensors: only that format is loaded; fetch the weights in it"
        )
    files = sorted({SINGLE} if indexed is None else set(indexed.values()))
    with ThreadPoolExecutor(READERS) as readers:
        tensors = readers.map(tensor_headers, [folder / name for name in files])
        return dict(zip(files, tensors, strict=True))


def tensor_headers(path: pathlib.Path) -> dict[str, TensorHeader]:
    """Return the tensors of a safetensors file by name. Raises CheckpointError unless it is whole,
    and each tensor has the bytes of its shape and type, after those of another."""
    with _readable(path), path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        length, header = _header(file.fileno(), size)
        tensors = msgspec.json.decode(header, type=dict[str, TensorHeader])
    tensors.pop("__metadata__", None)
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda held: held[1].data_offsets):
        begin, stop = tensor.data_offsets
        scalar = SCALAR_BYTES.get(tensor.dtype)
        if begin != end or (scalar and stop - begin != scalar * math.prod(tensor.shape)):
            raise CheckpointError(
                f"{path} is not a sound safetensors file ({name[:200]} has bytes {begin} to {stop},"
                f" begins after {end}, and is {tensor.dtype[:20]} {list(tensor.shape)}): fetch it"
                " again"
            )
        end = stop
    if 8 + length + end != size:
        raise CheckpointError(
            f"{path} is not a sound safetensors file (it has {size} bytes and must have "
            f"{8 + length + end}): fetch it again"
        )
    return tensors


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
    """Convert errors of reading a weight file to CheckpointError."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; fetch it, or name the folder of a complete checkpoint"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): fetch it again") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise CheckpointError(
            f"{path} is not a sound safetensors file (its header does not parse): fetch it again"
        ) from None


def _header(file: int, size: int) -> tuple[int, bytes]:
    """Return the length and the bytes of a header; no bytes if it would exceed the file."""
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    return length, os.pread(file, length, 8) if length <= min(size, HEADER_BYTES) else b""


def file_of_each(folder: pathlib.Path) -> dict[str, str] | None:
    """Return the file of each tensor by the index; None without an index, when all are in
    SINGLE."""
    index = folder / INDEX
    if not index.exists():
        return None
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{index} has no weight_map; fetch the file again")
    for file in files.values():
        if not isinstance(file, str) or pathlib.PurePath(file).name != file:
            raise CheckpointError(f"{index}: {file!r} is not a file name; fetch it again")
    return files


def extents(
    folder: pathlib.Path, layers: range, of: int, *, tied: bool
) -> list[tuple[pathlib.Path, int, int]]:
    """Return file, first byte and end of the tensors of `layers` out of `of`, in ascending order of
    layers, neighbours joined.

    Tables come first, with the first layers; the last ones bring the head, which may be `tied`.
    Raises CheckpointError.
    """
    indexed = file_of_each(folder)
    files = sorted({SINGLE} if indexed is None else set(indexed.values()))
    places: list[tuple[int, str, int, int]] = []
    for name in files:
        with _readable(folder / name), (folder / name).open("rb", buffering=0) as file:
            length, header = _header(file.fileno(), os.fstat(file.fileno()).st_size)
            tensors = msgspec.json.decode(header, type=dict[str, TensorOffsets])
        for tensor, held in tensors.items():
            number = _layer_of(tensor, layers, of, tied)
            if number is not None:
                begin, end = held.data_offsets
                places.append((number, name, 8 + length + begin, 8 + length + end))
    joined: list[tuple[pathlib.Path, int, int]] = []
    for _, name, begin, end in sorted(places):
        if joined and joined[-1][0] == folder / name and joined[-1][2] == begin:
            begin = joined.pop()[1]
        joined.append((folder / name, begin, end))
    return joined


def _layer_of(tensor: str, layers: range, of: int, tied: bool) -> int | None:
    """Return the layer of a tensor, or -1 for tables and the last norm; None if a stage with
    `layers` does not hold it."""
    parts = tensor.split(".")
    if parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdecimal():
        return int(parts[2]) if int(parts[2]) in layers else None
    first, last = layers.start == 0, layers.stop == of
    held = first or (last and tied) if "embed_tokens" in tensor else last
    return -1 if held else None


def digest_of(folder: pathlib.Path) -> str:
    """Return the digest of the checkpoint in `folder`, blake2b-128 in hex. Raises
    CheckpointError."""
    indexed = file_of_each(folder)
    whole = [CONFIG] if indexed is None else [CONFIG, INDEX]
    return digest_of_files(folder, whole, {SINGLE} if indexed is None else set(indexed.values()))


def digest_of_files(folder: pathlib.Path, whole: Sequence[str], weights: Iterable[str]) -> str:
    """Return the digest of the files `whole`, and of samples of the `weights`."""
    sampled = sorted(weights)
    digest = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor(READERS) as readers:
        parts = readers.map(_sampled, [folder / name for name in sampled])
        for name, part in zip(whole, map(_whole, (folder / name for name in whole)), strict=True):
            digest.update(name.encode() + b"\0" + part)
        for name, part in zip(sampled, parts, strict=True):
            digest.update(name.encode() + b"\0" + part)
    return digest.hexdigest()


def _whole(path: pathlib.Path) -> bytes:
    try:
        return hashlib.blake2b(path.read_bytes()).digest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): fetch it again") from None


def _sampled(path: pathlib.Path) -> bytes:
    digest = hashlib.blake2b()
    with _readable(path), path.open("rb", buffering=0) as file:
        for part in _samples(file.fileno()):
            digest.update(part)
    return digest.digest()


def _samples(file: int) -> Iterator[bytes]:
    """Yield the size, the header, and pages of every tensor in file order."""
    size = os.fstat(file).st_size
    yield size.to_bytes(8, "little")
    length, header = _header(file, size)
    yield header
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
    tensors = msgspec.json.decode(header, type=dict[str, TensorOffsets])
    for begin, end in sorted(tensor.data_offsets for tensor in tensors.values()):
        middle = (begin + end - SAMPLE_BYTES) // 2
        for place in sorted({max(begin, p) for p in (begin, middle, end - SAMPLE_BYTES)}):
            yield os.pread(file, max(0, min(SAMPLE_BYTES, end - place)), 8 + length + place)
