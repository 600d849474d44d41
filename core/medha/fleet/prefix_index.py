"""Names of full pages, and the index of the prefix-cache pages of all replicas.

A page's name is a hash in a chain, so that equal prefixes have equal names:

    h[0] = H(salt, tokens of page 0)      h[i] = H(h[i-1], tokens of page i)

The salt binds tenant and model, so that a tenant can neither use nor probe another tenant's pages.
A replica's cached prefix of a prompt is the number of leading names that it holds; of a model that
drops what its windows have left behind, those of the last window are enough.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from medha.messages import KvEvents
from medha.model import KeptPages

HASH_BYTES = 16
MAX_STALE = 16
"""Forgotten replicas whose names may stay, before a sweep begins."""
SHARDS, LARGE_SHARD = 256, 1024
"""Parts of a large index: to enlarge, sweep or compact one takes a few milliseconds."""
LONG_NAMES, STEP, REMEMBERED = 256, 512, 256
"""Pages of a prompt whose match is remembered, pages of a step, and prompts that are remembered."""
FRESH = 2048
"""Events for which a match is remembered: then a prompt that comes again uses its names again."""


class PageNames(Sequence[bytes]):
    """Page names in a joined byte string; none is cut out before it is read."""

    def __init__(self, joined: bytes) -> None:
        self._joined = joined

    @property
    def joined(self) -> bytes:
        return self._joined

    def __len__(self) -> int:
        return len(self._joined) // HASH_BYTES

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> PageNames: ...
    def __getitem__(self, at: int | slice) -> bytes | PageNames:
        if isinstance(at, slice):
            first, last, step = at.indices(len(self))
            if step != 1:
                raise IndexError(f"pages in steps of {step}")
            return PageNames(self._joined[first * HASH_BYTES : last * HASH_BYTES])
        start = (at if at >= 0 else at + len(self)) * HASH_BYTES
        name = self._joined[start : start + HASH_BYTES] if start >= 0 else b""
        if not name:
            raise IndexError(f"page {at} of {len(self)}")
        return name

    def __iter__(self) -> Iterator[bytes]:
        joined = self._joined
        return (joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES))


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
    return b"".join(page_name_parts(tokens, page_bytes, salt))


def page_name_parts(tokens: bytes, page_bytes: int, salt: bytes) -> Iterator[bytes]:
    """Yield the hash of every full page of little-endian int32 tokens, in order."""
    link = salt
    for start in range(0, len(tokens) - page_bytes + 1, page_bytes):
        page = tokens[start : start + page_bytes]
        link = hashlib.blake2b(link + page, digest_size=HASH_BYTES).digest()
        yield link


def chain(tokens: npt.NDArray[np.int32], page_tokens: int, salt: bytes) -> Iterator[bytes]:
    """Yield the hash of every full page of `tokens`, in order."""
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    yield from page_name_parts(data, 4 * page_tokens, salt)


class PrefixIndex:
    """Page names held by replicas, fed by KvEvents and read by placement.

    Holds one bit per replica and name. Beyond `capacity` names the least recently used ones are
    evicted, which costs hits and nothing else. To forget a replica takes constant time: its names
    stay under a bit that no longer counts, until others take their room or a sweep comes by.
    """

    def __init__(self, capacity: int = 1 << 20) -> None:
        count = SHARDS if capacity >= SHARDS << 8 else 1
        # Bits by name, the least recently used first; by the first byte of the name.
        self._shards: list[dict[bytes, int]] = [{} for _ in range(count)]
        self._mask, self._most = count - 1, capacity // count
        self._bits: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._live = self._stale = 0  # bits of known and of forgotten replicas
        self._sweeping, self._unswept = 0, 0  # stale bits, and shards that may have them
        # What was matched before of long prompts, by the name of the last page.
        self._matched: dict[bytes, tuple[int, dict[str, int]]] = {}
        self._applied = 0
        # The prompt matched last: to admit it takes two calls, mostly with nothing in between.
        self._last: tuple[bytes, dict[str, int]] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._shards)) if self._live else 0

    def __bool__(self) -> bool:
        return bool(self._live)

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
        self._last = None
        self._numbers[replica] = events.number
        self._applied += 1
        live, shards, mask, most = self._live, self._shards, self._mask, self._most
        for name in _names(events.removed):
            holders = shards[name[0] & mask]
            left = holders.get(name, 0) & live & ~bit
            if left:
                holders[name] = left
            else:
                holders.pop(name, None)
        for name in _names(events.stored):
            holders = shards[name[0] & mask]
            holders[name] = holders.pop(name, 0) & live | bit
            if len(holders) > most:  # several at once: a dict scans what was deleted at its front
                evicted = most >> 3 if most >= LARGE_SHARD else 1
                kept = itertools.islice(holders.items(), evicted, None)
                shards[name[0] & mask] = dict(kept)
        self._sweep()
        return True

    def forget(self, replica: str) -> None:
        """Forget the pages of a replica."""
        bit = self._bits.pop(replica, 0)
        self._last = None
        self._numbers.pop(replica, None)
        self._live &= ~bit
        self._stale |= bit
        if not self._unswept and (not self._live or self._stale.bit_count() >= MAX_STALE):
            self._sweeping, self._unswept = self._stale, len(self._shards)

    def _sweep(self) -> None:
        """Remove stale bits from the next shard; after the last one these bits are free."""
        if self._unswept:
            self._unswept -= 1
            live, holders = self._live, self._shards[self._unswept]
            self._shards[self._unswept] = {
                name: held & live for name, held in holders.items() if held & live
            }
            if not self._unswept:
                self._stale &= ~self._sweeping

    def match(self, names: Sequence[bytes]) -> dict[str, int]:
        """Number of leading pages of a prompt by replica, without replicas that hold none.

        Reads no names after the first page that no replica holds. A long prompt that was matched
        before is only followed from where its replicas ended: to admit and place it takes several
        calls.
        """
        if len(names) >= LONG_NAMES:
            for _ in self.matching(names):
                pass
            return dict(self._matched[names[-1]][1])
        joined = names.joined if isinstance(names, PageNames) else b"".join(names)
        if self._last is not None and self._last[0] == joined:
            return dict(self._last[1])
        pages_by_replica: dict[str, int] = {}
        for _ in self._walk(names, pages_by_replica):
            pass
        self._last = joined, pages_by_replica
        return dict(pages_by_replica)

    def matching(self, names: Sequence[bytes]) -> Iterator[None]:
        """Match a long prompt in steps of about a millisecond, so that `match` then takes none."""
        if len(names) < LONG_NAMES:
            return
        known = self._known(names[-1])
        if known is not None:
            yield from self._follow(names, known)
        else:
            pages_by_replica: dict[str, int] = {}
            yield from self._walk(names, pages_by_replica)
            self._remember(names[-1], pages_by_replica)
        yield

    def _walk(self, names: Iterable[bytes], pages_by_replica: dict[str, int]) -> Iterator[None]:
        """Match names from the first, and use those that are held: the first ones last, which are
        worth the most."""
        shards, mask, alive, used = self._shards, self._mask, self._live, list[bytes]()
        for name in names:
            held = shards[name[0] & mask].get(name, 0) & alive
            if used and held != alive:
                self._note(pages_by_replica, alive & ~held, len(used))
            alive = held
            if not alive:
                break
            used.append(name)
            if not len(used) % STEP:
                yield
                alive &= self._live  # replicas may leave in between
        if used and alive:
            self._note(pages_by_replica, alive, len(used))
        for place, name in enumerate(reversed(used), 1):
            self._use(name)
            if not place % STEP:
                yield

    def _known(self, last: bytes) -> dict[str, int] | None:
        """Return what a prompt matched a moment ago."""
        applied, pages_by_replica = self._matched.get(last, (0, None))
        return pages_by_replica if self._applied - applied <= FRESH else None

    def _remember(self, last: bytes, pages_by_replica: dict[str, int]) -> None:
        self._matched.pop(last, None)
        self._matched[last] = self._applied, pages_by_replica
        if len(self._matched) > REMEMBERED:
            del self._matched[next(iter(self._matched))]

    def _follow(self, names: Sequence[bytes], pages_by_replica: dict[str, int]) -> Iterator[None]:
        """Correct what replicas hold of a prompt, page by page from where each ended."""
        for replica in pages_by_replica.keys() - self._bits.keys():
            del pages_by_replica[replica]
        for replica, bit in list(self._bits.items()):
            pages = pages_by_replica.get(replica, 0)
            while pages and not self._held(names[pages - 1]) & bit:
                pages -= 1
                if not pages % STEP:
                    yield
            while pages < len(names) and self._held(names[pages]) & bit:
                pages += 1
                if not pages % STEP:
                    pages_by_replica[replica] = pages
                    yield
            if pages:
                pages_by_replica[replica] = pages
            else:
                pages_by_replica.pop(replica, None)

    def match_sliding(self, names: Sequence[bytes], kept: KeptPages) -> dict[str, int]:
        """Number of leading pages by replica, if a prompt can go on after them without those that
        `kept` drops."""
        pages_by_replica: dict[str, int] = {}
        # `kept.longest_hit` of all replicas together. By length that they may have: their bits, and
        # the page from which they hold all.
        left, longest = {len(names): (self._live, len(names))}, [-len(names)]
        while longest:
            end = -heapq.heappop(longest)
            bits, known = left.pop(end)
            first = kept.first_page(end * kept.page_tokens)
            for page in range(first, known):
                held = self._held(names[page]) & bits
                if held == bits:
                    continue
                others, other_known = left.get(page, (0, first))
                if not others:
                    heapq.heappush(longest, -page)
                left[page] = others | bits & ~held, max(first, other_known)
                bits = held
                if not bits:
                    break
            if bits and end:
                self._note(pages_by_replica, bits, end)
        for pages in set(pages_by_replica.values()):
            for name in reversed(names[kept.first_page(pages * kept.page_tokens) : pages]):
                self._use(name)
        return pages_by_replica

    def _held(self, name: bytes) -> int:
        return self._shards[name[0] & self._mask].get(name, 0)

    def _use(self, name: bytes) -> None:
        """Make a name the most recently used, if it is still held."""
        holders = self._shards[name[0] & self._mask]
        if held := holders.pop(name, 0):
            holders[name] = held

    def _note(self, pages_by_replica: dict[str, int], bits: int, pages: int) -> None:
        for replica, bit in self._bits.items():
            if bits & bit:
                pages_by_replica[replica] = pages

    def _bit(self, replica: str) -> int:
        bit = self._bits.get(replica)
        if bit is None:
            used = self._live | self._stale
            bit = ~used & (used + 1)  # the lowest free bit
            self._bits[replica] = bit
            self._live |= bit
        return bit


def _names(blob: bytes) -> list[bytes]:
    return [blob[at : at + HASH_BYTES] for at in range(0, len(blob), HASH_BYTES)]
