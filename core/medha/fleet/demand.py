"""Recent demand for each model: slack at arrival, offered work, SLOs met.

Counts in cells of one second over a window, so that each answer to `GET /demand` stands alone.
`medha.fleet.autoscaling` decides by it. `now` is an argument.
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
"""Seconds for which a request that ended without a replica still counts as held."""
WORK_FLOOR_S = 0.001
IMPOSSIBLE = ("no_replica", "context_length_exceeded", "tpot_infeasible")
"""Codes of refusals that more replicas would repeat."""
REFUSED_RATIO = -1.0
"""Slack of a request that is refused without an earliest TTFT."""


def slack_ratio(request: Request, finish_s: float) -> float:
    """Relative slack (D − finish) / W of a first token `finish_s` after arrival."""
    return (request.ttft_deadline_s - finish_s) / max(request.work_s, WORK_FLOOR_S)


class _Cell:
    """Counts of a model in a second."""

    def __init__(self, second: int) -> None:
        self.second = second
        self.slacks, self.alone = [0] * (len(RATIO) + 1), [0] * (len(RATIO) + 1)
        self.work_s = 0.0
        self.ended: collections.Counter[tuple[str, bool]] = collections.Counter()


class DemandWindow:
    """Demand of all models over the last WINDOW_S seconds. Not thread-safe."""

    def __init__(self) -> None:
        self._cells: dict[str, collections.deque[_Cell]] = {}
        self._held: collections.Counter[str] = collections.Counter()
        self._unserved_s: dict[str, float] = {}

    def arrived(self, model: str, request: Request, now: float) -> None:
        """Count the work of a request. `taken` and `refused` also count its slack."""
        self._cell(model, now).work_s += request.work_s

    def taken(
        self, model: str, request: Request, first_s: float, alone_s: float, now: float
    ) -> float | None:
        """Count an admitted request; returns its slack.

        None if not even an idle replica could meet the deadline: such a request does not measure
        load. `first_s` and `alone_s`: expected seconds from arrival to the first token, on the
        fleet as it is and on an idle replica.
        """
        self.arrived(model, request, now)
        return self._slack(model, request, first_s, alone_s, now)

    def refused(
        self, model: str, request: Request, refusal: Refusal, now: float, least_tpot_s: float = 0.0
    ) -> float | None:
        """Count a refused request as a miss; returns its slack, None if replicas cannot help."""
        steady = _steady(request, least_tpot_s)
        hopeless = (refusal.idle_ttft_s or 0.0) > request.ttft_deadline_s
        hopeless = hopeless or (refusal.code == "overloaded" and not steady)
        if refusal.code in IMPOSSIBLE or hopeless:
            return None
        first_s = request.ttft_deadline_s - REFUSED_RATIO * max(request.work_s, WORK_FLOOR_S)
        if refusal.earliest_ttft_s is not None:
            first_s = max(refusal.earliest_ttft_s, request.ttft_deadline_s)
        ratio = self._slack(model, request, first_s, request.work_s, now)
        if ratio is not None:
            self.arrived(model, request, now)
            self.over(model, request, False, now, least_tpot_s)
        return ratio

    def over(
        self, model: str, request: Request, met: bool, now: float, least_tpot_s: float = 0.0
    ) -> None:
        """Count an ended request, unless an idle replica would have missed its SLO too.

        `least_tpot_s`: the smallest TPOT target that a replica can keep.
        """
        if met or (_feasible(request) and _steady(request, least_tpot_s)):
            self.ended(model, request.slo_class, met, now)

    def ended(self, model: str, slo_class: str, met: bool, now: float) -> None:
        self._cell(model, now).ended[slo_class, met] += 1

    def unserved(self, model: str, now: float) -> None:
        """Count a request that was refused because no replica serves."""
        self._unserved_s[model] = now

    @contextlib.contextmanager
    def holding(self, model: str) -> Iterator[None]:
        """Context in which a request waits for the first replica."""
        self._held[model] += 1
        try:
            yield
        finally:
            self._held[model] -= 1
            if not self._held[model]:
                del self._held[model]

    def of(
        self,
        model: str,
        now: float,
        *,
        backlog_s: float = 0.0,
        waiting: int = 0,
        running: int = 0,
        stranded: int = 0,
    ) -> ModelDemand:
        """Demand in the window that ends now. `stranded`: queued requests without any replica."""
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
        """Forget all models except these."""
        kept = set(models)
        for by_model in (self._cells, self._unserved_s):
            for name in by_model.keys() - kept:
                del by_model[name]

    def _slack(
        self, model: str, request: Request, first_s: float, alone_s: float, now: float
    ) -> float | None:
        """Count the slack of a first token at `first_s` and at `alone_s`."""
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
    """True if an idle replica could meet the TTFT deadline."""
    return request.work_s <= request.ttft_deadline_s


def _steady(request: Request, least_tpot_s: float) -> bool:
    """True if a replica could keep the TPOT target."""
    return request.max_output_tokens == 1 or least_tpot_s <= request.tpot_s
