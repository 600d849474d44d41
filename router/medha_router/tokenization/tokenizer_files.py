"""Tokenizer files by content hash: fetched from a controller in parts, verified, stored.

A file whose content does not match its hash is dropped and requested again. Files are kept in
memory and in a folder, so that a restarted router need not fetch them again. `FileFetch` decides
which part to request next; its caller sends the request.
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
REQUEST_RETRY_S = 2.0


def digest_of(data: bytes) -> str:
    """Return the name of a file on the wire: blake2b-128 in hex."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


class FileStore:
    """Files by hash; `folder` None keeps them in memory only."""

    def __init__(self, folder: pathlib.Path | None) -> None:
        self._folder = folder
        self._files: dict[str, bytes] = {}

    def get(self, digest: str) -> bytes | None:
        """Return the file from memory or from the folder; None if it is in neither."""
        file = self._files.get(digest)
        if file is None and self._folder is not None and digest.isalnum():
            path = self._folder / digest
            if path.is_file():
                data = path.read_bytes()
                if digest_of(data) == digest:
                    file = self._files[digest] = data
        return file

    def put(self, digest: str, data: bytes) -> None:
        """Store a file; raises ProtocolError if it does not match its hash."""
        if digest_of(data) != digest:
            raise ProtocolError(
                f"file of {len(data)} bytes hashes to {digest_of(data)}: expected {digest}"
            )
        self._files[digest] = data
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._folder)
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        pathlib.Path(name).replace(self._folder / digest)


class FileFetch:
    """Transfer of one file from a controller, part by part."""

    def __init__(self, digest: str, requested_s: float = float("-inf")) -> None:
        self._digest = digest
        self._data = bytearray()
        self._requested_s = requested_s

    def next_request(self, now: float) -> FetchFile | None:
        """Return the request for the next part, or None if the last request is recent."""
        if now - self._requested_s < REQUEST_RETRY_S:
            return None
        self._requested_s = now
        return FetchFile(self._digest, len(self._data))

    def take(self, part: FilePart) -> bytes | None:
        """Add a part; return the complete file. Raises ProtocolError if it is too long."""
        if part.total > MAX_FILE_BYTES:
            raise ProtocolError(f"file of {part.total} bytes: at most {MAX_FILE_BYTES}")
        if part.offset != len(self._data):
            return None  # the answer to a repeated request
        if len(self._data) + len(part.data) > part.total:
            raise ProtocolError(f"file has more than the {part.total} bytes that it announced")
        self._data += part.data
        self._requested_s = float("-inf")
        if len(self._data) < part.total:
            return None
        data, self._data = bytes(self._data), bytearray()
        return data
