"""Who gives way when decodes need pages and none are left.

Prefills reserved their pages, decodes only a share of theirs; a decode that grows beyond it may
find none. Then the started prefill with the largest relative slack that has pages where they are
needed is taken back, unless it holds a promise and gets on; with no prefill to take from, the
decode with the most credit. A sequence that has the replica to itself and still finds no page
fails, with both numbers.
"""

from __future__ import annotations

from medha.scheduling.decodes import Decodes
from medha.scheduling.endings import Endings
from medha.scheduling.growth import Groups
from medha.scheduling.sequence import Sequence


class Pressure:
    """Finds victims. `preempted`: how many sequences were taken back for their pages."""

    def __init__(self, groups: Groups, decodes: Decodes, endings: Endings) -> None:
        self.groups, self.decodes, self.endings = groups, decodes, endings
        self.preempted = 0

    def relieve(self, hungry: Sequence, now: float) -> None:
        """Make room for the next token of `hungry`, now or when batches in flight are back."""
        wanted = set(hungry.groups)
        holders = [
            one for one in self.endings.sequences.values() if one.started and wanted & set(one.held)
        ]
        if any(one.over or one.taken_back for one in holders):
            return
        prefills = [
            one for one in holders
            if not one.decoding and one.packed < one.goal
            and (not one.promised or self._stuck(one))
        ]  # fmt: skip
        victim = self._prefill(prefills, now) or self._decode(holders)
        if victim is None or (victim is hungry and len(holders) == 1):
            pool = self.groups.pool
            total = len(pool.groups) * pool.pages_per_group * pool.page_tokens
            self.endings.fail(
                hungry,
                "kv_exhausted",
                f"sequence {hungry.id} holds {hungry.packed} tokens and finds no page for the next:"
                f" the running groups hold {total} tokens; lower max_tokens or add KVP groups",
            )
            return
        self.preempted += 1
        self.endings.take_back(victim, now)

    def _stuck(self, sequence: Sequence) -> bool:
        """Whether it waits for another group, so that its pages serve nobody now."""
        return sequence.ready and not self.groups.next_tail(sequence)[1]

    def _prefill(self, prefills: list[Sequence], now: float) -> Sequence | None:
        return max(prefills, key=lambda one: (self._rho(one, now), one.number), default=None)

    def _decode(self, holders: list[Sequence]) -> Sequence | None:
        decodes = [one for one in holders if one.decoding]
        return max(decodes, key=lambda one: (one.decode_due_s, one.number), default=None)

    def _rho(self, sequence: Sequence, now: float) -> float:
        work_s = sum(self.groups.works(sequence).values())
        return (sequence.key[0] - now - work_s) / sequence.norm_s
