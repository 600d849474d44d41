"""Tokens of the prompts of growing conversations, by prefix.

A key names a prompt's text up to the end of one piece, for one tokenizer, page size and salt. So a
tenant neither uses nor probes what another tenant sent. Its value is the piece's tokens and the
names of the pages that it fills. The least recently used pieces are dropped beyond `max_bytes`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from medha_router.tokenization.wire import KEY_BYTES

ENTRY_BYTES = 300
"""Cost of an entry in addition to its tokens and names."""


class PrefixTokens:
    """A bounded cache, shared by the threads of all lanes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: dict[bytes, tuple[bytes, bytes]] = {}
        self._lock = threading.Lock()
        self.held_bytes = 0

    def match(self, keys: bytes) -> list[tuple[bytes, bytes]]:
        """Return tokens and names of the leading pieces that are held."""
        held: list[bytes] = []
        with self._lock:
            for key in _split(keys):
                if key not in self._pieces:
                    break
                held.append(key)
            for key in reversed(held):  # the most recently used is last, so the first piece
                self._pieces[key] = self._pieces.pop(key)
            return [self._pieces[key] for key in held]

    def put(self, keys: bytes, index: int, tokens: bytes, hashes: bytes) -> None:
        """Hold the piece of number `index` of a prompt; its last piece has no key."""
        key = keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
        if not key:
            return
        with self._lock:
            if key in self._pieces:
                return
            self._pieces[key] = tokens, hashes
            self.held_bytes += _size(tokens, hashes)
            while self.held_bytes > self._max_bytes:
                self.held_bytes -= _size(*self._pieces.pop(next(iter(self._pieces))))


def _size(tokens: bytes, hashes: bytes) -> int:
    return len(tokens) + len(hashes) + ENTRY_BYTES


def _split(keys: bytes) -> Iterator[bytes]:
    for at in range(0, len(keys), KEY_BYTES):
        yield keys[at : at + KEY_BYTES]
