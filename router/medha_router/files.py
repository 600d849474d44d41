"""Tokenizer files by content hash: fetched from a controller in parts, verified, kept.

A file is what its hash says or it is nothing: what arrives with another digest is dropped and asked
for again. Kept in memory, and in `folder` so that a restarted router fetches nothing twice. Decides
which part to ask for next; whoever owns the link sends it.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import tempfile

from medha.errors import ProtocolError
from medha.messages import FetchFile, FilePart

DIGEST_BYTES = 16
MAX_FILE_BYTES = 128 << 20
ASK_AGAIN_S = 2.0


def digest_of(data: bytes) -> str:
    """A file's name on the wire: blake2b-128 in hex."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


class FileStore:
    """Files by hash; `folder` None keeps them in memory only."""

    def __init__(self, folder: pathlib.Path | None) -> None:
        self._folder = folder
        self._held: dict[str, bytes] = {}

    def get(self, digest: str) -> bytes | None:
        """The file of that hash, from memory or from the folder; None when it is not here."""
        held = self._held.get(digest)
        if held is None and self._folder is not None and digest.isalnum():
            path = self._folder / digest
            if path.is_file():
                data = path.read_bytes()
                if digest_of(data) == digest:
                    held = self._held[digest] = data
        return held

    def put(self, digest: str, data: bytes) -> None:
        """Keep a file; raises ProtocolError when it is not what its hash says."""
        if digest_of(data) != digest:
            raise ProtocolError(
                f"file of {len(data)} bytes hashes to {digest_of(data)}: expected {digest}"
            )
        self._held[digest] = data
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._folder)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        pathlib.Path(name).replace(self._folder / digest)


class Fetch:
    """One file on its way from a controller; asks for the next part, again when none comes."""

    def __init__(self, digest: str, asked_s: float = float("-inf")) -> None:
        self._digest = digest
        self._data = bytearray()
        self._asked_s = asked_s

    def ask(self, now: float) -> FetchFile | None:
        """The next question, unless one was put a moment ago."""
        if now - self._asked_s < ASK_AGAIN_S:
            return None
        self._asked_s = now
        return FetchFile(self._digest, len(self._data))

    def take(self, part: FilePart) -> bytes | None:
        """Add a part; the whole file once it is complete. Raises ProtocolError when too long."""
        if part.total > MAX_FILE_BYTES:
            raise ProtocolError(f"file of {part.total} bytes: at most {MAX_FILE_BYTES}")
        if part.offset != len(self._data):
            return None  # an answer to a question that was put twice
        if len(self._data) + len(part.data) > part.total:
            raise ProtocolError(f"file has more than the {part.total} bytes that it said")
        self._data += part.data
        self._asked_s = float("-inf")
        if len(self._data) < part.total:
            return None
        data, self._data = bytes(self._data), bytearray()
        return data
