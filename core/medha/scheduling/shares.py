"""Which part of a KVP group's time prefills get beside decodes.

The smaller of two: what batches lately had, and what is foreseen of the decodes that are still to
come (see `outlook`). Numbers only.
"""

from __future__ import annotations

WEIGHT = 0.1
LEAST = 0.05


class Shares:
    """`of`: the share of each group; `measured`: what batches lately had."""

    def __init__(self) -> None:
        self.of: dict[int, float] = {}
        self.measured: dict[int, float] = {}
        self._foreseen: dict[int, float] = {}

    def join(self, group: int) -> None:
        self.of[group] = self.measured[group] = self._foreseen[group] = 1.0

    def leave(self, group: int) -> None:
        for each in (self.of, self.measured, self._foreseen):
            del each[group]

    def measure(self, group: int, batch_s: float, decode_s: float) -> None:
        """Learn from a batch of that length, in which decodes alone would have taken `decode_s`."""
        if decode_s <= 0.0 or batch_s <= 0.0:
            measured = 1.0
        else:
            part, before = max(LEAST, 1.0 - decode_s / batch_s), self.measured[group]
            measured = before + WEIGHT * (part - before)
        self.measured[group] = measured
        self.of[group] = min(measured, self._foreseen[group])

    def foresee(self, group: int, share: float) -> None:
        """What it will be beside the decodes that run and those that are to come."""
        self._foreseen[group] = share
        self.of[group] = min(share, self.measured[group])
