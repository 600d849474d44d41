"""Codec of one link direction: messages of a union to bytes and back."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from medha.errors import ProtocolError
from medha.messages.fields import MAX_MESSAGE_BYTES

M = TypeVar("M")


class Codec(Generic[M]):
    """Encodes and decodes one union; malformed or oversized bytes raise ProtocolError."""

    def __init__(self, union: object) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def encode(self, message: M) -> bytes:
        data = self._encoder.encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"{type(message).__name__} is {len(data)} bytes: at most {MAX_MESSAGE_BYTES} cross "
                "a socket; split it"
            )
        return data

    def decode(self, data: bytes | memoryview) -> M:
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"message is {len(data)} bytes: at most {MAX_MESSAGE_BYTES}")
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"message does not decode: {error}") from None


def to_bytes(tokens: npt.ArrayLike) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def from_bytes(data: bytes) -> npt.NDArray[np.int32]:
    """The inverse of `to_bytes`; raises ProtocolError if the length is not a multiple of four."""
    if len(data) % 4:
        raise ProtocolError(f"token bytes have length {len(data)}: must be a multiple of 4")
    return np.frombuffer(data, dtype="<i4")
