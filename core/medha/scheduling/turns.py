"""In which order a plan visits the prefills of a crew: each group's by its policy, merged.

Most batches hold one prompt or two, so nothing is ranked before it is asked for: a policy yields
its tiers lazily, and of a tier the few that come first are taken out before they are sorted. Who
would be tried in vain is left out: it can have no pages, or none are left for it in this plan, or
it is long where there is a long one already. Prices nothing and packs nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from medha.scheduling.growth import Groups
from medha.scheduling.lars import Floats, Places
from medha.scheduling.ledger import Kept, Ledger
from medha.scheduling.policies import Policy, View
from medha.scheduling.sequence import Sequence
from medha.scheduling.starts import Starts
from medha.scheduling.waiting import Waiting

FEW = 12

# (tier, turn, group, sequence, view, its row there, yields)
Visit = tuple[int, int, int, Sequence, View, int, float]


class Turns:
    """Visits of one plan after the other."""

    def __init__(self, groups: Groups, ledger: Ledger, starts: Starts, policy: Policy) -> None:
        self.groups, self.ledger, self.starts, self.policy = groups, ledger, starts, policy

    def visits(
        self, crew: tuple[int, ...], kept: dict[int, Kept], now: float, occupied: set[int]
    ) -> Iterator[Visit]:
        """The visits of the crew's groups, each sequence once: a shared one when the last of its
        groups comes to it. `occupied`: groups that have their long one."""
        if len(crew) == 1:
            return self._turns(crew[0], kept, now, occupied)
        return self._merged(crew, kept, now, occupied)

    def _merged(
        self, crew: tuple[int, ...], kept: dict[int, Kept], now: float, occupied: set[int]
    ) -> Iterator[Visit]:
        seen: dict[int, int] = {}
        for visit in heapq.merge(
            *(self._turns(group, kept, now, occupied) for group in crew), key=lambda one: one[:3]
        ):
            sequence = visit[3]
            seen[sequence.number] = seen.get(sequence.number, 0) + 1
            if seen[sequence.number] == len(set(crew).intersection(sequence.plan)):
                yield visit

    def _turns(
        self, group: int, kept: dict[int, Kept], now: float, occupied: set[int]
    ) -> Iterator[Visit]:
        """One group's rows that may be packed, in its policy's order; groups take turns within a
        tier when merged."""
        waiting, pages = self.groups.waiting[group], self.groups.pool[group]
        rows = self.starts.able(group, waiting, now)
        view = self.ledger.view(group, rows, kept[group], now)
        order = self.policy(view)
        need, yields, sequences = waiting.need, order.yields, waiting.sequences
        lonely, turn = not self.groups.shared, 0
        available = least = pages.available
        for tier, left, keys in order.tiers:
            while len(left):
                if least < available or (lonely and occupied):
                    fits = need[rows[left]] <= least
                    if lonely and occupied:
                        fits = np.greater(fits, view.long[left])
                    left, keys = left[fits], keys[fits]
                near = None
                first, nearest = left, keys
                if len(left) > 4 * FEW:
                    nearest = keys.copy()
                    nearest.partition(FEW - 1)
                    near = keys <= nearest[FEW - 1]
                    first, nearest = left[near], keys[near]
                for at in _ranked(first, nearest, rows, waiting):
                    row = rows[at]
                    if least < available and need[row] > least:
                        continue
                    if lonely and occupied and view.long[at]:
                        continue
                    part = 0.0 if yields is None else float(yields[at])
                    yield tier, turn, group, sequences[row], view, at, part
                    turn += 1
                    least = min(least, pages.available)
                if near is None:
                    break
                far = ~near
                left, keys = left[far], keys[far]


def _ranked(places: Places, keys: Floats, rows: Places, waiting: Waiting) -> list[int]:
    """Those places of the view, the smallest key first; ties by `turn`."""
    if len(places) > 1:
        places = places[np.lexsort((waiting.turn[rows[places]], keys))]
    ranked: list[int] = places.tolist()
    return ranked
