"""One step ahead: a lone group's next batch is decided while one runs, and no rank waits for it.

    rank          | batch n .............................. | batch n+1 ........
    scheduler       ^ n−1 completes       ^ n+1 is decided   ^ n completes
                                          `lead_s` before n should be done

A decode in batch n+1 may stand on the token that batch n is only now drawing: the rank that draws
it reads it there (ADR 2), and we learn it later. What ends a sequence meanwhile makes one row
superfluous, whose token nobody takes; its pages come back with the last batch that names it, as
those of an aborted one do. An output that ends by its length is known ahead and has no such row.

A batch is decided ahead only as it would be decided behind: every decode of the batch that runs has
its next one prepared, so that none is skipped; nothing spans groups, since a token is known only
where it is drawn; and not before `lead_s`, since whoever arrives later waits for both batches.
Prices with the moment at which the batch can begin.
"""

from __future__ import annotations

from math import inf

from medha.config import Scheduling
from medha.scheduling.growth import Groups
from medha.scheduling.inflight import Flight, Flights
from medha.scheduling.packer import Packer
from medha.scheduling.plan import Plan
from medha.scheduling.progress import Progress


class Ahead:
    """`lead_s`: a batch is decided so long before it can begin, at most; 0: not ahead at all."""

    def __init__(
        self, settings: Scheduling, spp: int, groups: Groups, flights: Flights, packer: Packer,
        progress: Progress,
    ) -> None:  # fmt: skip
        self.lead_s = settings.lead_s(spp)
        self.groups, self.flights = groups, flights
        self.packer, self.progress = packer, progress

    def plan(self, offered: frozenset[int], now: float) -> Plan | None:
        """A batch to be sent behind the one that a group runs; None where there is none."""
        for group in sorted(offered):
            if group in self.groups and self._opens(group, now):
                begins_s = now + self.flights.free_in_s(group, now)
                plan = self.packer.plan((group,), begins_s, inf, self.packer.predictor.error)
                if plan is not None:
                    return plan
        return None

    def _opens(self, group: int, now: float) -> bool:
        """Whether a batch runs there, alone and about to end, behind which another is decided as if
        it had ended."""
        flights = self.flights.naming(group)
        if len(flights) != 1 or self.flights.free_in_s(group, now) > self.lead_s:
            return False
        spans = any(group in one.plan or group in one.held for one in self.groups.shared.values())
        if spans or len(flights[0].groups) > 1:
            return False
        if not flights[0].followed:
            self._follow(flights[0])
        return flights[0].open

    def _follow(self, flight: Flight) -> None:
        """Its prompts go on, and its decodes."""
        flight.followed = True
        self.progress.left_stage_0(flight.batch)
        ready = [
            self.progress.foresee(chunk, flight.due_out_s)
            for chunk in flight.batch.chunks if chunk.yields
        ]  # fmt: skip
        flight.open = all(ready)
