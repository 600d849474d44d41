"""Host time of each batch of a `Served` replica, in the scheduler and in the runner.

The loop's parts are timed at their call sites, and the wait for the device separately from the
host's work after it. Other work of a real controller (sockets, text) is not included.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from tests.support.served import Served

from medha.messages import RankReport, StageDone, Step
from medha_worker.runner import LaunchedBatch


@dataclasses.dataclass(slots=True)
class Turn:
    """A batch of `rows` rows. `behind`: it was launched while the previous one still ran."""

    rows: int
    behind: bool
    parts_s: dict[str, float]
    device_s: float = 0.0

    @property
    def host_s(self) -> float:
        return sum(self.parts_s.values())


def _watched(whole: Any, **calls: Callable[..., Any]) -> Any:
    """Return `whole` without the time of these calls."""

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return calls.get(name) or getattr(whole, name)

    return Watched()


class Stopwatch:
    """Timer of the batches that `served` runs inside the context."""

    parts = ("decide", "launch", "tell", "complete")

    def __init__(self, served: Served) -> None:
        self.turns: list[Turn] = []
        self._served, self._spent = served, dict.fromkeys(self.parts, 0.0)
        self._running: dict[int, tuple[Turn, LaunchedBatch]] = {}
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
        """Return the batches of this many rows."""
        return [turn for turn in self.turns if turn.rows == rows]

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments)
            self._spent[part] += time.perf_counter() - began
            return result

        return timed

    def _begin(self, begin: Callable[[Step], LaunchedBatch]) -> Callable[[Step], LaunchedBatch]:
        launch = self._timed("launch", begin)

        def begun(step: Step) -> LaunchedBatch:
            launched: LaunchedBatch = launch(step)
            rows = sum(chunk.length for chunk in step.batch.chunks)
            behind = any(not launched.ready for _, launched in self._running.values())
            turn = Turn(rows, behind, self._spent)
            self._spent = dict.fromkeys(self.parts, 0.0)
            self._running[step.batch.number] = turn, launched
            return launched

        return begun

    def _finish(
        self, finish: Callable[[LaunchedBatch], list[RankReport]]
    ) -> Callable[[LaunchedBatch], list[RankReport]]:
        tell = self._timed("tell", finish)

        def finished(launched: LaunchedBatch) -> list[RankReport]:
            if launched.pending is not None:
                launched.pending.wait()
            reports: list[RankReport] = tell(launched)
            turn, _ = self._running.pop(launched.batch.number)
            turn.device_s = sum(r.elapsed_s for r in reports if isinstance(r, StageDone))
            self.turns.append(turn)
            return reports

        return finished
