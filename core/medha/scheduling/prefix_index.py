"""Which replica holds how much of a prompt's prefix: an index of page names, fed by KvEvents.

For the router's placement. Page names form a chain (`medha.prefix`), so a prompt's cached prefix on
a replica is the number of its leading names held there. The index is bounded: beyond `capacity`
names the ones least lately stored or matched go, which costs hits and nothing else. It never asks
for anything itself: `apply` tells when a number is missing and a snapshot is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from medha.messages import KvEvents
from medha.prefix import HASH_BYTES


class PrefixIndex:
    """Page names held by replicas; one bit per replica and name."""

    def __init__(self, capacity: int = 1 << 20) -> None:
        self.capacity = capacity
        self._holders: dict[bytes, int] = {}
        self._bits: dict[str, int] = {}
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def apply(self, replica: str, events: KvEvents) -> bool:
        """Take changes over; False when a number is missing, so that a snapshot is needed.

        What was known of the replica is dropped then, and stays so until its snapshot. Events that
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
        """The replica went, or what is known of it is stale."""
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

    def match(self, names: Sequence[bytes]) -> dict[str, int]:
        """Leading pages of a prompt held by each replica; replicas that hold none are absent."""
        found: dict[str, int] = {}
        holders, alive = self._holders, -1
        for depth, name in enumerate(names):
            held = holders.get(name, 0) & alive
            if alive != -1 and held != alive:
                self._note(found, alive & ~held, depth)
            alive = held
            if not alive:
                return found
            holders[name] = holders.pop(name)  # lately used: kept longest
        if alive != -1:
            self._note(found, alive, len(names))
        return found

    def _note(self, found: dict[str, int], bits: int, pages: int) -> None:
        for replica, bit in self._bits.items():
            if bits & bit:
                found[replica] = pages

    def _bit(self, replica: str) -> int:
        bit = self._bits.get(replica)
        if bit is None:
            used = 0
            for taken in self._bits.values():
                used |= taken
            bit = ~used & (used + 1)  # the lowest bit that nobody has
            self._bits[replica] = bit
        return bit


def _names(blob: bytes) -> list[bytes]:
    return [blob[at : at + HASH_BYTES] for at in range(0, len(blob), HASH_BYTES)]
