"""In which order a plan visits the prefills of a crew: each group's by its policy, merged.

Most batches hold one prompt or two, so nothing is ranked before it is asked for: the few that come
first are taken out before they are sorted. Who would be tried in vain is left out: it can have no
pages, or none are left for it in this plan, or it is long where there is a long one already. Prices
nothing and packs nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from medha.scheduling.growth import Groups
from medha.scheduling.lars import Floats, Places
from medha.scheduling.ledger import Ledger
from medha.scheduling.native import Next, Rows
from medha.scheduling.policies import ABSORBED, Order, Policy, View
from medha.scheduling.sequence import Sequence
from medha.scheduling.starts import Starts

FEW = 12

# (tier, turn, group, sequence, whether it is long, yields)
Visit = tuple[int, int, int, Sequence, bool, float]


class Ranked:
    """Rows in the order of a policy that has no tiers; `native.Rows` is the same for `lars`.

    `yields`: part of the budget that a row leaves to others.
    """

    def __init__(self, view: View, order: Order) -> None:
        self._waiting, self._rows = view.waiting, view.rows
        self._left: Places = np.arange(len(view.rows))
        self._keys, self._long = order.keys, view.long
        self.yields: Floats | None = None
        if order.yields is not None:
            self.yields = np.zeros(len(view.waiting))
            self.yields[view.rows] = order.yields

    def few(self, pages: float, only_short: bool) -> list[Next]:
        """Those that come next; empty when nobody does."""
        left, rows = self._left, self._rows
        fits = self._waiting.need[rows[left]] <= pages
        if only_short:
            fits = np.greater(fits, self._long[left])
        left = left[fits]
        keys = self._keys[left]
        near = np.ones(len(left), dtype=np.bool_)
        if len(left) > 4 * FEW:
            near = keys <= np.partition(keys, FEW - 1)[FEW - 1]
        self._left, first = left[~near], left[near]
        first = first[np.lexsort((self._waiting.turn[rows[first]], keys[near]))]
        return [(int(rows[at]), ABSORBED, int(self._long[at])) for at in first]


class Turns:
    """Visits of one plan after the other. `policy`: None for `lars`."""

    def __init__(
        self, groups: Groups, ledger: Ledger, starts: Starts, policy: Policy | None
    ) -> None:
        self.groups, self.ledger, self.starts, self.policy = groups, ledger, starts, policy

    def visits(self, crew: tuple[int, ...], now: float, occupied: set[int]) -> Iterator[Visit]:
        """The visits of the crew's groups, each sequence once: a shared one when the last of its
        groups comes to it. `occupied`: groups that have their long one."""
        if len(crew) == 1:
            return self._turns(crew[0], now, occupied)
        return self._merged(crew, now, occupied)

    def _merged(self, crew: tuple[int, ...], now: float, occupied: set[int]) -> Iterator[Visit]:
        seen: dict[int, int] = {}
        for visit in heapq.merge(
            *(self._turns(group, now, occupied) for group in crew), key=lambda one: one[:3]
        ):
            sequence = visit[3]
            seen[sequence.number] = seen.get(sequence.number, 0) + 1
            if seen[sequence.number] == len(set(crew).intersection(sequence.plan)):
                yield visit

    def _turns(self, group: int, now: float, occupied: set[int]) -> Iterator[Visit]:
        """One group's rows that may be packed, in its policy's order; groups take turns within a
        tier when merged."""
        waiting = self.groups.waiting[group]
        ranked = self._ranked(group, self.starts.reach(group, waiting, now), now)
        need, yields, sequences = waiting.need, ranked.yields, waiting.sequences
        lonely, turn, least = not self.groups.shared, 0, self.starts.most_pages(group)
        while few := ranked.few(least, lonely and bool(occupied)):
            for row, tier, long in few:
                if need[row] > least or (long and lonely and occupied):
                    continue
                part = 0.0 if yields is None else float(yields[row])
                sequence = sequences[row]
                sequence.row = row
                yield tier, turn, group, sequence, bool(long), part
                turn += 1
                least = min(least, self.starts.most_pages(group))

    def _ranked(self, group: int, reach: float, now: float) -> Ranked | Rows:
        if self.policy is None:
            return self.ledger.order(group, reach, now)
        view = self.ledger.view(group, reach, now)
        return Ranked(view, self.policy(view))
