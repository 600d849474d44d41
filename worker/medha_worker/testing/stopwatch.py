"""What each batch of a `Served` replica costs the host: its time in the scheduler and the runner.

The loop's parts are timed where they are called, and the wait for the device apart from what the
host does after it. What a real controller does beside them (sockets, text) is not in it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from medha.messages import RankReport, StageDone, Step
from medha_worker.runner import Flight
from medha_worker.testing.served import Served


@dataclasses.dataclass(slots=True)
class Turn:
    """One batch of `rows` rows. `behind`: it was launched while the one before still ran."""

    rows: int
    behind: bool
    parts_s: dict[str, float]
    device_s: float = 0.0

    @property
    def host_s(self) -> float:
        return sum(self.parts_s.values())


def _watched(whole: Any, **calls: Callable[..., Any]) -> Any:
    """`whole`, but for these calls."""

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return calls.get(name) or getattr(whole, name)

    return Watched()


class Stopwatch:
    """Times the batches that `served` runs between entering and leaving."""

    parts = ("decide", "launch", "tell", "complete")

    def __init__(self, served: Served) -> None:
        self.turns: list[Turn] = []
        self._served, self._spent = served, dict.fromkeys(self.parts, 0.0)
        self._running: dict[int, tuple[Turn, Flight]] = {}
        self._own = served.scheduler, served.runner

    def __enter__(self) -> Stopwatch:
        scheduler, runner = self._own
        decide = self._timed("decide", scheduler.next_batch)
        complete = self._timed("complete", scheduler.complete)
        begin, finish = self._begin(runner.begin), self._finish(runner.finish)
        self._served.scheduler = _watched(scheduler, next_batch=decide, complete=complete)
        self._served.runner = _watched(runner, begin=begin, finish=finish)
        return self

    def __exit__(self, *_: object) -> None:
        self._served.scheduler, self._served.runner = self._own

    def of(self, rows: int) -> list[Turn]:
        """The batches of so many rows."""
        return [turn for turn in self.turns if turn.rows == rows]

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            found = call(*arguments)
            self._spent[part] += time.perf_counter() - began
            return found

        return timed

    def _begin(self, begin: Callable[[Step], Flight]) -> Callable[[Step], Flight]:
        launch = self._timed("launch", begin)

        def begun(step: Step) -> Flight:
            flight: Flight = launch(step)
            rows = sum(chunk.length for chunk in step.batch.chunks)
            behind = any(not one.ready for _, one in self._running.values())
            turn = Turn(rows, behind, self._spent)
            self._spent = dict.fromkeys(self.parts, 0.0)
            self._running[step.batch.number] = turn, flight
            return flight

        return begun

    def _finish(
        self, finish: Callable[[Flight], list[RankReport]]
    ) -> Callable[[Flight], list[RankReport]]:
        tell = self._timed("tell", finish)

        def finished(flight: Flight) -> list[RankReport]:
            if flight.arriving is not None:
                flight.arriving.wait()
            reports: list[RankReport] = tell(flight)
            turn, _ = self._running.pop(flight.batch.number)
            turn.device_s = sum(each.elapsed_s for each in reports if isinstance(each, StageDone))
            self.turns.append(turn)
            return reports

        return finished
