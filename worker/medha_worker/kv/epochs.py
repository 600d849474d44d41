"""Allocation epochs: how often each page was handed out, so that a reused page is recognised.

A page's epoch grows whenever a sequence receives the page to write it. Who remembers (page, epoch)
and finds it unchanged later knows that nobody wrote the page in between; a cached page that a
second sequence reads keeps its epoch. Which page goes to whom is the scheduler's decision.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from medha.errors import EngineError


class PageEpochs:
    """One counter per page of a rank's pool; all layers of a page share it."""

    def __init__(self, pages: int) -> None:
        self._epochs: npt.NDArray[np.int64] = np.zeros(pages, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._epochs)

    def hand_out(self, pages: Sequence[int]) -> None:
        """Note that these pages are about to be written anew; raises EngineError out of range."""
        if pages:
            self._epochs[self.check(pages)] += 1

    def of(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Epochs of these pages; raises EngineError out of range."""
        return tuple(self._epochs[self.check(pages)].tolist())

    def check(self, pages: Sequence[int]) -> npt.NDArray[np.int64]:
        """The pages as an index; raises EngineError when one is out of range or named twice."""
        index = np.asarray(pages, dtype=np.int64)
        if len(index) and not (index.min() >= 0 and index.max() < len(self._epochs)):
            wrong = next(p for p in pages if not 0 <= p < len(self._epochs))
            raise EngineError(f"page {wrong} is out of range: the pool has {len(self._epochs)}")
        if len(np.unique(index)) != len(index):
            raise EngineError(f"pages {tuple(pages)} name one twice: each must be distinct")
        return index
