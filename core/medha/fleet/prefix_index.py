"""Names of full pages, and the index of the prefix-cache pages of all replicas.

A page's name is a hash in a chain, so that equal prefixes have equal names:

    h[0] = H(salt, tokens of page 0)      h[i] = H(h[i-1], tokens of page i)

The salt binds tenant and model, so that a tenant can neither use nor probe another tenant's pages.
A replica's cached prefix of a prompt is the number of leading names that it holds; of a model that
drops what its windows have left behind, those of the last window are enough.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from medha.messages import KvEvents
from medha.model import KeptPages

HASH_BYTES = 16


def salt_of(model: str, tenant: str, secret: bytes = b"") -> bytes:
    """The chain's first link for a tenant of a model."""
    text = f"{len(model)}:{model}{len(tenant)}:{tenant}".encode()
    return hashlib.blake2b(text, digest_size=HASH_BYTES, key=secret[:64]).digest()


def next_hash(previous: bytes, page: npt.NDArray[np.int32]) -> bytes:
    """Hash of a page after the page with hash `previous` (or after the salt)."""
    digest = hashlib.blake2b(previous, digest_size=HASH_BYTES)
    digest.update(np.ascontiguousarray(page, dtype="<i4").tobytes())
    return digest.digest()


def page_names(tokens: bytes, page_bytes: int, salt: bytes) -> bytes:
    """Return the hashes of every full page of little-endian int32 tokens, joined, in order."""
    link, names = salt, []
    for start in range(0, len(tokens) - page_bytes + 1, page_bytes):
        page = tokens[start : start + page_bytes]
        link = hashlib.blake2b(link + page, digest_size=HASH_BYTES).digest()
        names.append(link)
    return b"".join(names)


def chain(tokens: npt.NDArray[np.int32], page_tokens: int, salt: bytes) -> Iterator[bytes]:
    """Yield the hash of every full page of `tokens`, in order."""
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    yield from _names(page_names(data, 4 * page_tokens, salt))


class PrefixIndex:
    """Page names held by replicas, fed by KvEvents and read by placement.

    Holds one bit per replica and name. Beyond `capacity` names the least recently used ones are
    evicted, which costs hits and nothing else.
    """

    def __init__(self, capacity: int = 1 << 20) -> None:
        self.capacity = capacity
        self._holders: dict[bytes, int] = {}
        self._bits: dict[str, int] = {}
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def apply(self, replica: str, events: KvEvents) -> bool:
        """Apply changes; False if earlier events are missing, so that a snapshot is needed.

        In that case the pages of the replica are forgotten until its snapshot arrives. Events that
        were already applied are ignored.
        """
        number = self._numbers.get(replica)
        if events.snapshot:
            self.forget(replica)
        elif number is None or events.number > number + 1:
            self.forget(replica)
            return False
        elif events.number <= number:
            return True
        bit = self._bit(replica)
        self._numbers[replica] = events.number
        holders = self._holders
        for name in _names(events.removed):
            left = holders.get(name, 0) & ~bit
            if left:
                holders[name] = left
            else:
                holders.pop(name, None)
        for name in _names(events.stored):
            holders[name] = holders.pop(name, 0) | bit
        while len(holders) > self.capacity:
            del holders[next(iter(holders))]
        return True

    def forget(self, replica: str) -> None:
        """Forget the pages of a replica."""
        bit = self._bits.pop(replica, 0)
        self._numbers.pop(replica, None)
        if not bit:
            return
        for name, held in list(self._holders.items()):
            if held & bit:
                if held == bit:
                    del self._holders[name]
                else:
                    self._holders[name] = held & ~bit

    def match(self, names: Iterable[bytes]) -> dict[str, int]:
        """Number of leading pages of a prompt by replica, without replicas that hold none.

        Takes no names after the first page that no replica holds.
        """
        pages_by_replica: dict[str, int] = {}
        holders, alive, depth = self._holders, -1, 0
        for name in names:
            held = holders.get(name, 0) & alive
            if alive != -1 and held != alive:
                self._note(pages_by_replica, alive & ~held, depth)
            alive = held
            if not alive:
                return pages_by_replica
            holders[name] = holders.pop(name)  # most recently used: last in the order
            depth += 1
        if alive != -1:
            self._note(pages_by_replica, alive, depth)
        return pages_by_replica

    def match_sliding(self, names: Sequence[bytes], kept: KeptPages) -> dict[str, int]:
        """Number of leading pages by replica, if a prompt can go on after them without those that
        `kept` drops."""
        pages_by_replica: dict[str, int] = {}
        for replica in self._bits:
            pages = kept.longest_hit(len(names), functools.partial(self._holds, replica, names))
            if pages:
                pages_by_replica[replica] = pages
        for name in names[: max(pages_by_replica.values(), default=0)]:
            if name in self._holders:
                self._holders[name] = self._holders.pop(name)
        return pages_by_replica

    def _holds(self, replica: str, names: Sequence[bytes], page: int) -> bool:
        return bool(self._holders.get(names[page], 0) & self._bits[replica])

    def _note(self, pages_by_replica: dict[str, int], bits: int, pages: int) -> None:
        for replica, bit in self._bits.items():
            if bits & bit:
                pages_by_replica[replica] = pages

    def _bit(self, replica: str) -> int:
        bit = self._bits.get(replica)
        if bit is None:
            used = 0
            for taken in self._bits.values():
                used |= taken
            bit = ~used & (used + 1)  # the lowest free bit
            self._bits[replica] = bit
        return bit


def _names(blob: bytes) -> list[bytes]:
    return [blob[at : at + HASH_BYTES] for at in range(0, len(blob), HASH_BYTES)]
