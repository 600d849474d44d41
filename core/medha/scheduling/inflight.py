"""Batches in flight: what was handed out and has not come back.

Up to `spp` batches are in flight per KVP group, counted by their time: as many as take less than
`spp` of the longest of them. (A short prompt's batch that counted like a full one would fill the
pipeline and leave stage 0 idle behind it.) "Stage 0 is free" and "the batch is done" are different
events: the first lets the next batch in, the second brings tokens. A batch is void when a group
that it names was lost; it never completes then.
"""

from __future__ import annotations

from medha.batch import Batch
from medha.costs import BatchLoad

# However short: a batch more costs every stage its messages.
MOST_PER_STAGE = 2


class Flight:
    """One batch on its way; `heaviest`: the load of its fullest group; `due_out_s`: when its stage
    0 should be free, by the prediction; `ends_s`: when each of its stages should end. `followed`:
    its sequences have moved on already, and another batch may be decided behind it if `open`."""

    __slots__ = (
        "batch", "due_out_s", "ends_s", "followed", "groups", "heaviest", "left", "open",
        "predicted_s",
    )  # fmt: skip

    def __init__(
        self, batch: Batch, groups: tuple[int, ...], now: float, heaviest: BatchLoad
    ) -> None:
        self.batch, self.groups, self.heaviest = batch, groups, heaviest
        self.predicted_s = batch.predicted_s
        self.due_out_s = now + batch.predicted_s
        self.ends_s = [self.due_out_s]
        self.left = self.followed = self.open = False


class Flights:
    """All of them, by number."""

    def __init__(self, spp: int) -> None:
        self.spp = spp
        self.by_number: dict[int, Flight] = {}
        self.of_group: dict[int, list[int]] = {}

    def add(self, flight: Flight) -> None:
        if self.spp > 1:
            self._foresee(flight)
        else:
            self._queue(flight)
        self.by_number[flight.batch.number] = flight
        for group in flight.groups:
            self.of_group[group].append(flight.batch.number)

    def _foresee(self, flight: Flight) -> None:
        """A stage takes it up once the stage before is done with it and with the batches ahead."""
        ahead = [
            self.by_number[numbers[-1]].ends_s
            for numbers in map(self.of_group.__getitem__, flight.groups) if numbers
        ]  # fmt: skip
        for stage in range(1, self.spp):
            start = max(flight.ends_s[-1], *(ends[stage] for ends in ahead), 0.0)
            flight.ends_s.append(start + flight.predicted_s)

    def _queue(self, flight: Flight) -> None:
        """It begins when the batch that runs there is done."""
        for numbers in map(self.of_group.__getitem__, flight.groups):
            if numbers:
                begins_s = self.by_number[numbers[-1]].due_out_s
                flight.due_out_s = max(flight.due_out_s, begins_s + flight.predicted_s)

    def remove(self, number: int) -> Flight | None:
        """The flight that ends; None when it is unknown or void."""
        flight = self.by_number.pop(number, None)
        if flight is not None:
            for group in flight.groups:
                if group in self.of_group:
                    self.of_group[group].remove(number)
        return flight

    def room(self, group: int) -> bool:
        """Whether the pipeline of `group` may take another batch."""
        return self._in_the_way(group) is None

    def _in_the_way(self, group: int) -> Flight | None:
        """The batch that must come out before `group` takes another; None when there is room."""
        numbers, spp = self.of_group[group], self.spp
        if len(numbers) < spp:
            return None
        if spp == 1:
            return self.by_number[numbers[-1]]
        flights = [self.by_number[number] for number in numbers]
        lengths_s = [flight.predicted_s for flight in flights]
        out = max(0, len(flights) - MOST_PER_STAGE * spp + 1)
        while len(flights) - out >= spp and sum(lengths_s[out:]) >= spp * max(lengths_s[out:]):
            out += 1
        return flights[out - 1] if out else None

    def naming(self, group: int) -> list[Flight]:
        """Flights in which `group` takes part, oldest first."""
        return [self.by_number[number] for number in self.of_group.get(group, ())]

    def free_in_s(self, group: int, now: float) -> float:
        """Seconds until stage 0 of `group` should be free and its pipeline has room; 0 when so it
        is, or is late."""
        latest = 0.0
        numbers = self.of_group.get(group, ())
        for number in numbers:
            flight = self.by_number[number]
            if not flight.left:
                latest = max(latest, flight.due_out_s - now)
        full = self._in_the_way(group) if self.spp > 1 else None
        return latest if full is None else max(latest, full.ends_s[-1] - now)

    def oldest(self, group: int) -> int | None:
        """Number of the oldest batch in flight that names `group`."""
        numbers = self.of_group.get(group)
        return min(numbers) if numbers else None
