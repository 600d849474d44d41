"""The files of a checkpoint's weights, and a digest that tells two checkpoints apart in seconds.

The digest covers config.json, the index (where there is one) and, of each safetensors file that the
index names, its name, its size, its header (names, types, shapes and places of tensors, metadata)
and three pages of every tensor: its first 4 KiB, 4 KiB in its middle and its last 4 KiB. Of 140 GB
of weights that is about 10 MB. So it tells weights apart whose files agree in names and sizes, as
those of two fine-tunings do; what differs in other places of a tensor alone, it does not see, and
the same weights cut into other files count as others.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec

from medha.errors import CheckpointError
from medha_worker.model.config import read_json

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SAMPLE_BYTES = 4096
HEADER_BYTES = 100_000_000
"""No header may be longer, by the definition of the format."""
READERS = 8
"""Files read at once: storage behind a network answers slowly, but many at a time."""


class Tensor(msgspec.Struct, frozen=True):
    """Where a tensor lies in its file, after the header; metadata lies nowhere."""

    data_offsets: tuple[int, int] = (0, 0)


def file_of_each(folder: pathlib.Path) -> dict[str, str] | None:
    """File names by tensor as the index tells; None without an index, when all are in SINGLE."""
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


def digest_of(folder: pathlib.Path) -> str:
    """Which checkpoint it is, blake2b-128 in hex; raises CheckpointError."""
    indexed = file_of_each(folder)
    whole = [CONFIG] if indexed is None else [CONFIG, INDEX]
    sampled = sorted({SINGLE} if indexed is None else set(indexed.values()))
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
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): fetch it anew") from None


def _sampled(path: pathlib.Path) -> bytes:
    digest = hashlib.blake2b()
    try:
        with path.open("rb", buffering=0) as file:
            for part in _samples(file.fileno()):
                digest.update(part)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; fetch it, or name the folder of a complete checkpoint"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): fetch it anew") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise CheckpointError(
            f"{path} is not a sound safetensors file (its header does not parse): fetch it again"
        ) from None
    return digest.digest()


def _samples(file: int) -> Iterator[bytes]:
    """The size, the header, and pages of every tensor in the order in which they lie."""
    size = os.fstat(file).st_size
    yield size.to_bytes(8, "little")
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    header = os.pread(file, length, 8) if length <= min(size, HEADER_BYTES) else b""
    yield header
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # or each page brings its neighbours along
    tensors = msgspec.json.decode(header, type=dict[str, Tensor])
    for begin, end in sorted(each.data_offsets for each in tensors.values()):
        middle = (begin + end - SAMPLE_BYTES) // 2
        for place in sorted({max(begin, each) for each in (begin, middle, end - SAMPLE_BYTES)}):
            yield os.pread(file, max(0, min(SAMPLE_BYTES, end - place)), 8 + length + place)
