"""Messages between the router and the process that checks grammars.

A frame is its length in 8 little-endian bytes, then a msgpack message.
"""

from __future__ import annotations

import struct

import msgspec

LENGTH = struct.Struct("<Q")


class Check(msgspec.Struct, frozen=True, array_like=True):
    """A grammar to check for the tokenizer named `key`; `tokenizer` is its file when it is new.

    `calls`: marks with which an output may call tools instead of following a JSON schema, or
    schemas of such calls.
    `compile_s`: CPU time of compiling it; some masks get twice as much. `forget`: the name of a
    tokenizer to drop first, or empty.
    """

    key: str
    tokenizer: bytes
    kind: str
    text: str
    calls: tuple[str, ...]
    compile_s: float
    forget: str = ""


class Checked(msgspec.Struct, frozen=True, array_like=True):
    """The grammar in the library's form, or the `error`; `loaded`: the tokenizer can be used.

    `timed`: another check may end differently, as masks took a little too long.
    """

    grammar: str = ""
    error: str = ""
    loaded: bool = True
    timed: bool = False
