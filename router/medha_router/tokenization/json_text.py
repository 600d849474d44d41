"""Large JSON texts: bounds on the number of their values, and lists of token ids.

A value costs up to a hundred bytes as a Python object and as little as three as JSON. So a large
text is counted before it is decoded, and token ids are decoded in parts.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from medha.errors import RequestError
from medha_router.protocol import TokenId, read_body

MAX_VALUES = 1 << 18
"""Most values of a body besides token ids: objects, lists, and the elements of both."""
MAX_IDS = 1 << 24
PART_BYTES = 1 << 20
COUNTED = b",[{"


class _LargeFields(msgspec.Struct, frozen=True):
    """The fields of a body that may hold more than MAX_VALUES values: token ids."""

    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    tokens: msgspec.Raw = msgspec.Raw(b"")


def check_values(text: bytes | bytearray, where: str) -> None:
    """Raise RequestError if the text of a field holds more than MAX_VALUES values."""
    if not _may_exceed(text):
        return
    values = count_values(text)
    if values > MAX_VALUES:
        raise _too_many(values, where)


def check_body(body: bytes | bytearray) -> None:
    """Raise RequestError if the fields other than the large ones hold more than MAX_VALUES."""
    if not _may_exceed(body):
        return
    large = read_body(body, _LargeFields)
    values = count_values(body)
    values -= sum(count_values(bytes(raw)) for raw in (large.messages, large.prompt, large.tokens))
    if values > MAX_VALUES:
        raise _too_many(values, None)


def _may_exceed(text: bytes | bytearray) -> bool:
    """Return False for most texts at little cost. Counts marks in strings too."""
    return sum(text.count(mark) for mark in (b",", b"[", b"{")) > MAX_VALUES


def _too_many(values: int, where: str | None) -> RequestError:
    return RequestError(
        f"{where or 'the body'} holds {values} JSON values: at most {MAX_VALUES}; send fewer",
        code="invalid_value",
        param=where,
    )


def count_values(text: bytes | bytearray) -> int:
    """Return the number of opened objects and lists, and of commas, outside strings."""
    data = np.frombuffer(text, np.uint8)
    values, inside, escaped = 0, False, False
    for start in range(0, len(data), PART_BYTES):
        part = data[start : start + PART_BYTES]
        quotes = part == ord('"')
        backslashes = part == ord("\\")
        if escaped or backslashes.any():
            escaped = _drop_escaped(quotes, backslashes, escaped)
        in_string = np.logical_xor.accumulate(quotes) ^ inside
        inside = bool(in_string[-1])
        marks = np.isin(part, np.frombuffer(COUNTED, np.uint8))
        values += int(np.count_nonzero(marks & ~in_string))
    return values


def _drop_escaped(
    quotes: npt.NDArray[np.bool_], backslashes: npt.NDArray[np.bool_], escaped: bool
) -> bool:
    """Drop quotes after an odd run of backslashes; return True if the next byte is escaped.

    `escaped` is True if the part before this one ended in an odd run.
    """
    size = len(backslashes)
    position = np.arange(size)
    # The position of the last byte that is no backslash, before each byte.
    last = np.maximum.accumulate(np.where(backslashes, -1, position))
    run = position - last  # length of the run that ends with each byte
    if escaped:
        run[last < 0] += 1
    odd = backslashes & (run % 2 == 1)
    quotes[1:] &= ~odd[:-1]
    if escaped and not backslashes[0]:
        quotes[0] = False
    return bool(odd[-1])


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
