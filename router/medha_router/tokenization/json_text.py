"""Large JSON texts: bounds on the number of their values, and lists of token ids.

A value costs up to a hundred bytes as a Python object and as little as three as JSON. So a large
text is counted before it is decoded, and token ids are decoded in parts.
"""

from __future__ import annotations

import itertools
import re

import msgspec
import numpy as np
import numpy.typing as npt

from medha.errors import RequestError
from medha_router.protocol import TokenId, read_body

MAX_VALUES = 1 << 18
"""Most values of a body besides token ids: objects, lists, and the elements of both."""
MAX_IDS = 1 << 24
PART_BYTES = 1 << 20
MARKS = (b",", b"[", b"{")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


class _LargeFields(msgspec.Struct, frozen=True):
    """The fields of a body that may hold more than MAX_VALUES values: token ids."""

    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    tokens: msgspec.Raw = msgspec.Raw(b"")


def check_values(text: bytes | bytearray, where: str) -> None:
    """Raise RequestError if the text of a field holds more than MAX_VALUES values."""
    if _may_exceed(text) and count_values(text, MAX_VALUES) > MAX_VALUES:
        raise _too_many(where)


def check_body(body: bytes | bytearray) -> None:
    """Raise RequestError if the fields other than the large ones hold more than MAX_VALUES."""
    if not _may_exceed(body) or count_values(body, MAX_VALUES) <= MAX_VALUES:
        return
    large = read_body(body, _LargeFields)
    limit = MAX_VALUES
    limit += sum(count_values(bytes(raw)) for raw in (large.messages, large.prompt, large.tokens))
    if count_values(body, limit) > limit:
        raise _too_many(None)


def _may_exceed(text: bytes | bytearray) -> bool:
    """Return False for most texts at little cost. Counts marks in strings too."""
    return sum(map(text.count, MARKS)) > MAX_VALUES


def _too_many(where: str | None) -> RequestError:
    return RequestError(
        f"{where or 'the body'} holds more than {MAX_VALUES} JSON values: send fewer",
        code="invalid_value",
        param=where,
    )


def count_values(text: bytes | bytearray, most: int | None = None) -> int:
    """Return the number of opened objects and lists, and of commas, outside strings.

    Stops counting beyond `most`.
    """
    values, start = 0, 0
    strings = ((match.start(), match.end()) for match in _STRING.finditer(text))
    for begin, end in itertools.chain(strings, [(len(text), len(text))]):
        for at in range(start, begin, PART_BYTES):
            values += sum(text.count(mark, at, min(at + PART_BYTES, begin)) for mark in MARKS)
            if most is not None and values > most:
                return values
        start = end
    return values


def read_ids(text: bytes | bytearray, where: str) -> npt.NDArray[np.int32] | None:
    """Read a list of token ids; None if the text is something else, or is not valid.

    Decodes parts, so that it needs no more memory than the text. Raises RequestError if there are
    more than MAX_IDS.
    """
    body = text.strip()
    if not (body.startswith(b"[") and body.endswith(b"]")) or body.count(b"[") != 1:
        return None
    if body.count(b",") >= MAX_IDS:
        raise RequestError(
            f"{where} holds more than {MAX_IDS} token ids: send fewer",
            code="invalid_value",
            param=where,
        )
    parts: list[npt.NDArray[np.int32]] = []
    start, end = 1, len(body) - 1
    if not body[start:end].strip():
        return np.zeros(0, "<i4")
    while start <= end:
        comma = body.find(b",", min(start + PART_BYTES, end), end)
        stop = end if comma < 0 else comma
        try:
            ids = msgspec.json.decode(b"[" + body[start:stop] + b"]", type=list[TokenId])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if not ids:
            return None
        parts.append(np.asarray(ids, "<i4"))
        start = stop + 1
    return np.concatenate(parts)
