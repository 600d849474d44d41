"""Signals for scaling decisions: demand from routers, controller reports, start-up times.

Pure. A model's demand is the sum over all routers. It is fresh if every router, and the controller
of every ready replica, reported within STALE_S: half of the reports could look like idleness. A
replica that has just become ready counts as starting until its controller's first report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from medha.fleet.autoscaling import ClassShare, Policy, ScalingSignals, quantile
from medha.messages import GroupStatus, ModelDemand, RouterDemand
from medha.metrics import RATIO
from medha.spec import MedhaReplica, seconds
from medha.spec.quantities import to_number
from medha.spec.values import AutoscalingSpec
from medha_operator.resources.views import PodView, ReportView

STALE_S = 15.0
USUAL_START_S = 60.0
ROUTER_GIVEN_UP_S = 120.0
NEVER_S = float("-inf")
LONGEST_START_S = 3600.0


class TotalDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Demand for one model, from all routers; not `fresh` if one is silent or there is none."""

    window_s: float = 1.0
    fresh: bool = False
    models: tuple[ModelDemand, ...] = ()

    @property
    def slack_p10(self) -> float | None:
        return _p10(demand.slack_counts for demand in self.models)

    @property
    def alone_p10(self) -> float | None:
        return _p10(demand.alone_counts for demand in self.models)

    @property
    def classes(self) -> tuple[ClassShare, ...]:
        shares = [share for demand in self.models for share in demand.classes]
        return tuple(
            ClassShare(
                name,
                met=sum(share.met for share in shares if share.name == name),
                missed=sum(share.missed for share in shares if share.name == name),
            )
            for name in sorted({share.name for share in shares})
        )


def policy_of(autoscaling: AutoscalingSpec) -> Policy:
    """Convert `spec.autoscaling` to a policy."""
    return Policy(
        least=autoscaling.min_replicas,
        most=autoscaling.max_replicas,
        target_slack=to_number(autoscaling.target_slack_p10),
        down_after_s=seconds(autoscaling.scale_down_stabilization),
    )


def signals_of(
    resource: MedhaReplica,
    demand: TotalDemand,
    pods: Iterable[PodView],
    reports: Mapping[int, ReportView],
    now_s: float,
    *,
    room: bool = True,
    cold_start_s: float,
) -> ScalingSignals:
    """Join demand and controller reports of a resource whose replicas start in `cold_start_s`."""
    fresh = {ordinal: view for ordinal, view in reports.items() if now_s - view.at_s <= STALE_S}
    leaders = [pod for pod in pods if pod.group == pod.stage == 0 and not pod.deleting]
    ready = {
        pod.ordinal
        for pod in leaders
        if pod.ready and (pod.ordinal in fresh or now_s - (pod.ready_since_s or 0.0) > STALE_S)
    }
    held = sum(model.held for model in demand.models)
    in_routers = sum(model.waiting + model.running for model in demand.models)
    in_controllers = sum(view.status.waiting + view.status.running for view in fresh.values())
    return ScalingSignals(
        at_s=now_s,
        current=resource.spec.replicas,
        ready=len(ready),
        fresh=demand.fresh and ready <= fresh.keys(),
        slack_p10=demand.slack_p10,
        arrived=sum(sum(model.slack_counts) for model in demand.models),
        alone_p10=demand.alone_p10,
        offered=sum(model.work_s for model in demand.models) / demand.window_s,
        backlog_s=sum(model.backlog_s for model in demand.models),
        held=held,
        busy=max(in_routers, in_controllers),
        kv_filled=sum(_used(fresh[ordinal].status.groups) for ordinal in ready & fresh.keys()),
        classes=demand.classes,
        cold_start_s=cold_start_s,
        room=room,
    )


def slo_of(demand: TotalDemand) -> dict[str, object]:
    """Build the status field `slo`, in steps that few requests change; empty without arrivals."""
    met, ended = 0, 0
    for share in demand.classes:
        met, ended = met + share.met, ended + share.met + share.missed
    slo: dict[str, object] = {}
    if ended:
        slo["attainmentPercent"] = round(100.0 * met / ended)
    if (slack := demand.slack_p10) is not None:
        slo["slackP10"] = f"{round(slack / 0.05) * 0.05:.2f}"
    return slo


def _used(groups: Iterable[GroupStatus]) -> float:
    """Return the share of the running groups' pages that sequences hold."""
    running = [group for group in groups if group.state == "running"]
    pages = sum(group.pages for group in running)
    return 1.0 - sum(group.free_pages for group in running) / pages if pages else 0.0


def _p10(counts: Iterable[Sequence[int]]) -> float | None:
    """Return the 10th percentile of histograms of several routers, summed."""
    histograms = [histogram for histogram in counts if histogram]
    return quantile(RATIO, [sum(bucket) for bucket in zip(*histograms, strict=True)], 0.1)


# --- demand reported by routers -------------------------------------------------------------------
#
# A model's demand is the sum over all routers, so a silent router leaves it unknown: its share may
# be anything. But a router that never answers (it crashes as it starts, say) must not stop the
# scaling of all models for ever: while others answer, a router that was silent for
# ROUTER_GIVEN_UP_S is left out until it answers again.


class RouterTracker:
    """The known routers by address, and the last report of each. All times are of one clock."""

    def __init__(self) -> None:
        self._known_since_s: dict[str, float] = {}
        self._reports: dict[str, tuple[float, RouterDemand]] = {}
        self._last_report_s = NEVER_S
        self._reporting_since_s = NEVER_S
        """Start of the time in which some router answers: silence of all is no router's fault."""

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self._known_since_s)

    def set_addresses(self, addresses: Iterable[str], now_s: float) -> None:
        """Replace the set of routers; forget the reports of those that left."""
        self._known_since_s = {
            address: self._known_since_s.get(address, now_s) for address in sorted(set(addresses))
        }
        self._reports = {
            address: self._reports[address]
            for address in self._known_since_s
            if address in self._reports
        }

    def record(self, address: str, demand: RouterDemand, now_s: float) -> None:
        """Record a router's report."""
        if now_s - self._last_report_s > STALE_S:
            self._reporting_since_s = now_s
        self._last_report_s = now_s
        self._reports[address] = now_s, demand

    def demand(self, model: str, now_s: float) -> TotalDemand:
        """Sum up the demand for a model."""
        counted = [address for address in self._known_since_s if not self._given_up(address, now_s)]
        fresh = [
            self._reports[address][1]
            for address in counted
            if address in self._reports and now_s - self._reports[address][0] <= STALE_S
        ]
        return TotalDemand(
            window_s=max((report.window_s for report in fresh), default=1.0),
            fresh=0 < len(fresh) == len(counted),
            models=tuple(
                demand for report in fresh for demand in report.models if demand.model == model
            ),
        )

    def _given_up(self, address: str, now_s: float) -> bool:
        report = self._reports.get(address)
        last_s = report[0] if report is not None else self._known_since_s[address]
        others_answer = now_s - self._last_report_s <= STALE_S
        silent_s = now_s - max(last_s, self._reporting_since_s)
        return others_answer and silent_s > ROUTER_GIVEN_UP_S


# --- start-up times -------------------------------------------------------------------------------
#
# A pod's Ready condition carries its last transition: days after the start if the pod was unready
# for a moment. So the first value seen is kept, and values that look like days are ignored.


def start_times(pods: Iterable[PodView], before: Mapping[str, float]) -> dict[str, float]:
    """Return by UID of each leader the seconds until it was ready; `before` is the last result."""
    times: dict[str, float] = {}
    for pod in pods:
        if pod.group or pod.stage:
            continue
        if pod.uid in before:
            times[pod.uid] = before[pod.uid]
        elif pod.ready_since_s is not None:
            took_s = max(0.0, pod.ready_since_s - pod.created_s)
            if took_s <= LONGEST_START_S:
                times[pod.uid] = took_s
    return times
