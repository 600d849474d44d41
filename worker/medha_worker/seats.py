"""What the device keeps of each sequence from step to step, and how changes get there.

Every sequence that a rank knows has a seat, a row of two tensors:

    last    [seats]           the token that this rank drew last; the host need not know it yet
    table   [seats, width]    page id of each logical page of the own group, −1 where it holds none

Pages are staged on the host and cross in one copy when the step that needs them is built: a decode
that takes no page brings nothing. Seats of sequences that ended are used again. The tensors grow by
doubling, so rows of the table are as wide as the longest sequence needs. Which page a sequence has
is decided elsewhere (`sequences`); the table on the device is only ever its copy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from medha_worker.device import CPU, Device

Ids = npt.NDArray[np.int64]
NO_PAGE = -1


class Seats:
    """Rows for `seats` sequences of `width` pages at first."""

    def __init__(self, device: Device = CPU, seats: int = 16, width: int = 16) -> None:
        self._device, self._count, self._width = device, seats, width
        self.last = torch.zeros(seats, dtype=torch.int64, device=device.at)
        self.table = self._empty(seats, width)
        self._free = list(range(seats))[::-1]
        self._cleared: list[int] = []
        self._staged: list[tuple[int, Ids, Ids]] = []

    def take(self) -> int:
        """A seat whose row of the table holds nothing."""
        if not self._free:
            self._grow(2 * self._count, self._width)
        seat = self._free.pop()
        self._cleared.append(seat)
        return seat

    def leave(self, seat: int) -> None:
        """The sequence ended; what was staged for it no longer matters."""
        self._staged = [each for each in self._staged if each[0] != seat]
        self._free.append(seat)

    def put(self, seat: int, logical: Ids, ids: Ids) -> None:
        """Stage that these logical pages of a seat are `ids` (−1: no longer held)."""
        if not len(logical):
            return
        needed = int(logical.max()) + 1
        if needed > self._width:
            self._grow(self._count, max(needed, 2 * self._width))
        self._staged.append((seat, logical, ids))

    def flush(self) -> None:
        """Bring what was staged to the device; of several changes to a page the last stands."""
        if self._cleared:
            cleared = np.array(self._cleared, dtype=np.int64)
            self._cleared = []
            self.table.index_fill_(0, self._device.upload(cleared)[0], NO_PAGE)
        if not self._staged:
            return
        places = np.concatenate([seat * self._width + pages for seat, pages, _ in self._staged])
        ids = np.concatenate([ids for _, _, ids in self._staged]).astype(np.int32)
        if len({seat for seat, _, _ in self._staged}) < len(self._staged):
            places, first = np.unique(places[::-1], return_index=True)
            ids = ids[::-1][first]
        self._staged = []
        where, what = self._device.upload(places, ids)
        self.table.view(-1).index_copy_(0, where, what)

    def pages(self, seats: torch.Tensor, logical: torch.Tensor) -> torch.Tensor:
        """Page ids (int64) of pairs of seat and logical page."""
        return self.table[seats, logical].long()

    def drew(self, seats: torch.Tensor, tokens: torch.Tensor) -> None:
        """The sequences at `seats` drew `tokens`."""
        self.last.index_copy_(0, seats, tokens)

    def _empty(self, seats: int, width: int) -> torch.Tensor:
        return torch.full((seats, width), NO_PAGE, dtype=torch.int32, device=self._device.at)

    def _grow(self, seats: int, width: int) -> None:
        grown, last = self._empty(seats, width), self.last.new_zeros(seats)
        grown[: self._count, : self._width] = self.table
        last[: self._count] = self.last
        self._free[:0] = range(seats - 1, self._count - 1, -1)
        self.table, self.last = grown, last
        self._count, self._width = seats, width
