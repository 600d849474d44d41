"""Messages between the router and its tokenizer processes, and their framing.

    router -> process   LoadFiles | Encode        process -> router   Loaded | Encoded | Declined

A frame is its length in 8 little-endian bytes, then a msgpack message.
"""

from __future__ import annotations

import socket
import struct

import msgspec

LENGTH = struct.Struct("<Q")
MAX_FRAME_BYTES = 1 << 30


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a checkpoint's tokenizer files; empty if missing. `key` names the set."""

    key: str
    tokenizer: bytes
    config: bytes = b""
    template: bytes = b""


class LoadFiles(msgspec.Struct, frozen=True, tag=True):
    files: TokenizerFiles


class Encode(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Encode raw JSON: `messages` (`chat`) or `prompt`.

    The hash chain that names full pages of `page_tokens` starts at `salt`. If `texts`, the outcome
    holds the text of each prompt (for `echo`).
    """

    key: str
    chat: bool
    raw: bytes
    page_tokens: int
    salt: bytes
    add_special_tokens: bool = True
    generation_prompt: bool = True
    texts: bool = False


class Prompt(msgspec.Struct, frozen=True):
    """Token ids (int32 bytes), names of the full pages, and the text if requested."""

    tokens: bytes
    hashes: bytes
    text: str | None = None

    @property
    def length(self) -> int:
        return len(self.tokens) // 4


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Outcome of LoadFiles; `error` is empty on success."""

    error: str = ""


class Encoded(msgspec.Struct, frozen=True, tag=True):
    prompts: tuple[Prompt, ...]


class Declined(msgspec.Struct, frozen=True, tag=True):
    """The fields of a RequestError."""

    message: str
    status: int
    code: str | None
    param: str | None


Job = LoadFiles | Encode
Outcome = Loaded | Encoded | Declined


def send_frame(link: socket.socket, payload: bytes) -> None:
    """Send one frame; raises OSError if the other end has closed."""
    link.sendall(LENGTH.pack(len(payload)))
    link.sendall(payload)


def receive_frame(link: socket.socket) -> bytearray:
    """Receive one frame; raises OSError if the other end has closed or the frame is too long."""
    (length,) = LENGTH.unpack(_exactly(link, LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise OSError(f"frame of {length} bytes: at most {MAX_FRAME_BYTES}")
    return _exactly(link, length)


def _exactly(link: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    got = 0
    while got < size:
        count = link.recv_into(view[got:])
        if count == 0:
            raise ConnectionResetError("the other end closed the link")
        got += count
    return data
