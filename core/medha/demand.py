"""What clients wanted of each model lately: slack found at arrival, work brought, SLOs met.

Kept in cells of a second for as long as the window, so that an answer to `GET /demand` needs no
former answer to compare with. For the router and for the simulated fleet. Decides nothing: the
number of replicas follows it (`medha.scaling`). `now` is an argument.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
from collections.abc import Iterable, Iterator

from medha.errors import Refusal
from medha.messages import ClassDemand, ModelDemand
from medha.metrics import RATIO
from medha.request import Request

WINDOW_S = 30
UNSERVED_S = 15.0
"""A request that ended because no replica came still asks for one so long."""
WORK_FLOOR_S = 0.001
REFUSED_RATIO = -1.0
"""Slack of a request that is refused without saying when it could be served."""


def slack_ratio(request: Request, finish_s: float) -> float:
    """Relative slack (D − finish) / W of a first token that comes `finish_s` after arrival."""
    return (request.ttft_deadline_s - finish_s) / max(request.work_s, WORK_FLOOR_S)


class _Cell:
    """One model in one second."""

    def __init__(self, second: int) -> None:
        self.second = second
        self.slacks, self.alone = [0] * (len(RATIO) + 1), [0] * (len(RATIO) + 1)
        self.work_s = 0.0
        self.ended: collections.Counter[tuple[str, bool]] = collections.Counter()


class Demand:
    """Counts as requests come and end; thread-safe it is not."""

    def __init__(self) -> None:
        self._cells: dict[str, collections.deque[_Cell]] = {}
        self._held: collections.Counter[str] = collections.Counter()
        self._unserved_s: dict[str, float] = {}

    def arrived(self, model: str, request: Request, now: float) -> None:
        """It brings work; `taken` and `refused` count its slack, where that says something."""
        self._cell(model, now).work_s += request.work_s

    def taken(
        self, model: str, request: Request, first_s: float, alone_s: float, now: float
    ) -> float | None:
        """Admitted; returns its slack. What an idle replica could not do in time says nothing of
        the load: None. Seconds after arrival: `first_s` when its first token is expected,
        `alone_s` when an idle replica would be expected to bring it.
        """
        self.arrived(model, request, now)
        return self._slack(model, request, first_s, alone_s, now)

    def refused(
        self, model: str, request: Request, refusal: Refusal, now: float, idle_tpot_s: float = 0.0
    ) -> float | None:
        """Refused: a miss, and its slack is what was missing. None: no replica more would help."""
        steady = _steady(request, idle_tpot_s)
        hopeless = (refusal.idle_ttft_s or 0.0) > request.ttft_deadline_s
        hopeless = hopeless or (refusal.code == "overloaded" and not steady)
        if refusal.code in ("no_replica", "context_length_exceeded") or hopeless:
            return None
        first_s = request.ttft_deadline_s - REFUSED_RATIO * max(request.work_s, WORK_FLOOR_S)
        if refusal.earliest_ttft_s is not None:
            first_s = max(refusal.earliest_ttft_s, request.ttft_deadline_s)
        ratio = self._slack(model, request, first_s, request.work_s, now)
        if ratio is not None:
            self.arrived(model, request, now)
            self.over(model, request, False, now, idle_tpot_s)
        return ratio

    def over(
        self, model: str, request: Request, met: bool, now: float, idle_tpot_s: float = 0.0
    ) -> None:
        """It has ended. That an idle replica would have missed it too is no lack of replicas;
        `idle_tpot_s`: the time per token that one is expected to take for it alone."""
        if met or (_feasible(request) and _steady(request, idle_tpot_s)):
            self.ended(model, request.slo_class, met, now)

    def ended(self, model: str, slo_class: str, met: bool, now: float) -> None:
        self._cell(model, now).ended[slo_class, met] += 1

    def unserved(self, model: str, now: float) -> None:
        """A request was refused because there is no replica."""
        self._unserved_s[model] = now

    @contextlib.contextmanager
    def holding(self, model: str) -> Iterator[None]:
        """Within, a request waits for the first replica."""
        self._held[model] += 1
        try:
            yield
        finally:
            self._held[model] -= 1
            if not self._held[model]:
                del self._held[model]

    def of(
        self, model: str, now: float, *, backlog_s: float = 0.0, waiting: int = 0, running: int = 0,
        stranded: int = 0,
    ) -> ModelDemand:  # fmt: skip
        """The window that ends now. `stranded`: of those that wait, for whom no replica is left."""
        cells = self._recent(model, now)
        ended: collections.Counter[tuple[str, bool]] = collections.Counter()
        for cell in cells:
            ended.update(cell.ended)
        unserved = now - self._unserved_s.get(model, -UNSERVED_S) < UNSERVED_S
        return ModelDemand(
            model=model,
            slack_counts=tuple(map(sum, zip(*(cell.slacks for cell in cells), strict=True))),
            alone_counts=tuple(map(sum, zip(*(cell.alone for cell in cells), strict=True))),
            work_s=sum(cell.work_s for cell in cells),
            backlog_s=backlog_s,
            held=max(self._held[model] + stranded, int(unserved)),
            waiting=waiting,
            running=running,
            classes=tuple(
                ClassDemand(name=name, met=ended[name, True], missed=ended[name, False])
                for name in sorted({name for name, _ in ended})
            ),
        )

    def forget(self, models: Iterable[str]) -> None:
        """Keep nothing of models but these."""
        kept = set(models)
        for of in (self._cells, self._unserved_s):
            for name in of.keys() - kept:
                del of[name]

    def _slack(
        self, model: str, request: Request, first_s: float, alone_s: float, now: float
    ) -> float | None:
        """Counts what a first token at `first_s` leaves of its deadline, and one at `alone_s`."""
        if not _feasible(request):
            return None
        cell, ratio = self._cell(model, now), slack_ratio(request, first_s)
        cell.slacks[bisect.bisect_left(RATIO, ratio)] += 1
        cell.alone[bisect.bisect_left(RATIO, slack_ratio(request, alone_s))] += 1
        return ratio

    def _cell(self, model: str, now: float) -> _Cell:
        cells = self._recent(model, now)
        if not cells or cells[-1].second != int(now):
            cells.append(_Cell(int(now)))
        return cells[-1]

    def _recent(self, model: str, now: float) -> collections.deque[_Cell]:
        cells = self._cells.setdefault(model, collections.deque())
        while cells and cells[0].second <= now - WINDOW_S:
            cells.popleft()
        return cells


def _feasible(request: Request) -> bool:
    """An idle replica could do it in time."""
    return request.work_s <= request.ttft_deadline_s


def _steady(request: Request, idle_tpot_s: float) -> bool:
    """An idle replica's tokens would follow each other as fast as they should."""
    return request.max_output_tokens == 1 or idle_tpot_s <= request.tpot_s
