"""CURVE key files: one Z85 key per line. Secret files have mode 0600 and are never overwritten.

`sockets` makes key pairs and uses them.
"""

from __future__ import annotations

import os
import pathlib
import re

from medha.errors import SetupError

_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # 32 bytes in ZeroMQ's RFC 32


def write_secret(path: pathlib.Path, key: bytes) -> None:
    """Write a secret key to a new file that only this user can read; raises SetupError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise SetupError(
            f"key file {path} cannot be created ({error.strerror}): name a new file in a folder "
            "that this user owns"
        ) from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(key + b"\n")


def read_keys(path: str) -> tuple[bytes, ...]:
    """Read the Z85 keys of a file, one per line; raises SetupError if a line is not a key."""
    try:
        lines = pathlib.Path(path).read_bytes().split()
    except OSError as error:
        raise SetupError(f"key file {path} cannot be read ({error.strerror})") from None
    for number, line in enumerate(lines, start=1):
        if not _KEY.fullmatch(line):
            raise SetupError(
                f"key file {path}, key {number}: must be 40 characters of Z85; "
                "render the keys again"
            )
    return tuple(lines)


def read_key(path: str) -> bytes:
    """Read the only key of a file; raises SetupError if it holds none, or more than one."""
    keys = read_keys(path)
    if len(keys) != 1:
        raise SetupError(f"key file {path} holds {len(keys)} keys: must hold 1")
    return keys[0]
