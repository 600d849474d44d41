"""Which prompts may begin: whoever can have the pages of a whole prompt, at most so many at once,
and beside promises only those whose decodes they can bear.

A prompt that finds no pages is passed over, not waited for; one that was passed over for longer
than `patience_s` is waited for, as smaller ones would shut it out for ever. Takes pages by
reservation; it orders nothing.
"""

from __future__ import annotations

from medha.config import Scheduling
from medha.scheduling.growth import Groups
from medha.scheduling.outlook import Outlook
from medha.scheduling.sequence import Sequence
from medha.scheduling.waiting import Waiting

NOTES = 32


class Starts:
    """Begins prompts. `running`: how many have begun and hold pages; `tried`: how often one asked
    for its pages, ever."""

    def __init__(self, settings: Scheduling, groups: Groups, outlook: Outlook) -> None:
        self.groups, self.outlook, self.most = groups, outlook, settings.max_running
        self.patience_s = settings.growth_timeout_s / 8.0
        self.running = self.tried = 0

    def start(self, sequence: Sequence, now: float) -> bool:
        """Reserve its pages; False when it does not fit now, or too many run."""
        if self.running >= self.most or not self.outlook.admits(sequence, now):
            return False
        self.tried += 1
        if not self.groups.start(sequence):
            self.outlook.retract(sequence)
            return False
        self.running += 1
        for group in sequence.plan:
            if group in self.groups:
                self.groups.waiting[group].begun(sequence)
        if sequence.packed:
            self.groups.refresh(sequence)
        return True

    def aged(self, waiting: Waiting, now: float) -> Sequence | None:
        """Who has been passed over for want of pages longest, and longer than `patience_s`."""
        return waiting.aged(now - self.patience_s)

    def reach(self, group: int, waiting: Waiting, now: float) -> float:
        """Pages that a row of the group may still need to be tried now; 0: it has them already.

        Large ones leave a sixteenth of the pages to small ones. Who has been passed over for long
        is waited for, the oldest first; small ones still pass, or it would be a convoy again. So do
        promises, for which it may be waiting itself.
        """
        aged = self.aged(waiting, now)
        while aged is not None and self.start(aged, now):
            aged = self.aged(waiting, now)  # one that does not fit is waited for
        if self.running >= self.most:
            return 0.0
        pages = self.groups.pool[group]
        available, spare = pages.available, pages.total // 16
        small = min(spare, available)
        limit = max(small, available - spare) if available < pages.total else available
        if now >= waiting.noted_s:
            waiting.pass_over(waiting.need > limit, now)
            waiting.noted_s = now + self.patience_s / NOTES
        if aged is not None and (aged.promised or not self._owing(group)):
            limit = max(small, available - self.groups.pages_needed(aged))
        return min(limit, self.most_pages(group))

    def most_pages(self, group: int) -> int:
        """Pages that a row of the group may need, as far as it is known already."""
        available, closed = self.groups.pool.groups[group].available, self.outlook.closed
        if not closed or group not in closed or self._owing(group):
            return available
        return min(available, closed[group] - 1)

    def _owing(self, group: int) -> bool:
        """Whether a promise given elsewhere has not had its pages here."""
        waiting = self.groups.waiting[group]
        return bool((waiting.promised & (waiting.need > 0.0)).any())
