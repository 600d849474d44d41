"""Batches in flight: what was handed out and has not come back.

Up to `spp` batches are in flight per KVP group. "Stage 0 is free" and "the batch is done" are
different events: the first lets the next batch in, the second brings tokens. A batch is void when a
group that it names was lost; it never completes then.
"""

from __future__ import annotations

from medha.batch import Batch
from medha.costs import BatchLoad


class Flight:
    """One batch on its way; `heaviest`: the load of its fullest group; `due_out_s`: when its stage
    0 should be free, by the prediction; `ends_s`: when each of its stages should end."""

    __slots__ = ("batch", "due_out_s", "ends_s", "groups", "heaviest", "left", "predicted_s")

    def __init__(
        self, batch: Batch, groups: tuple[int, ...], now: float, heaviest: BatchLoad
    ) -> None:
        self.batch, self.groups, self.heaviest = batch, groups, heaviest
        self.predicted_s = batch.predicted_s
        self.due_out_s = now + batch.predicted_s
        self.ends_s = [self.due_out_s]
        self.left = False


class Flights:
    """All of them, by number."""

    def __init__(self, spp: int) -> None:
        self.spp = spp
        self.by_number: dict[int, Flight] = {}
        self.of_group: dict[int, list[int]] = {}

    def add(self, flight: Flight) -> None:
        if self.spp > 1:
            self._foresee(flight)
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
        return len(self.of_group[group]) < self.spp

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
        if len(numbers) >= self.spp > 1:
            latest = max(latest, self.by_number[numbers[-self.spp]].ends_s[-1] - now)
        return latest

    def idle_below_s(self, groups: tuple[int, ...], now: float) -> float:
        """How long the next batch of `groups` may be for nothing: were it shorter, and those after
        it too, the pipeline would be full before its oldest batch is out, and stage 0 idle."""
        longest = 0.0
        for group in groups if self.spp > 1 else ():
            numbers = self.of_group[group]
            if numbers:
                left_s = self.by_number[numbers[0]].ends_s[-1] - now
                longest = max(longest, left_s / (self.spp - len(numbers)))
        return longest

    def oldest(self, group: int) -> int | None:
        """Number of the oldest batch in flight that names `group`."""
        numbers = self.of_group.get(group)
        return min(numbers) if numbers else None
