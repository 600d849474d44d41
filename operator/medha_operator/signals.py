"""What routers and controllers said, as the signals that scaling is decided by. Pure.

A model's demand is the sum over all routers. It is fresh when every router, and the controller of
every replica that serves, was heard of within STALE_S: half an answer could look like idleness.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from medha.messages import GroupStatus, ModelDemand
from medha.metrics import RATIO
from medha.scaling import ClassShare, Policy, Signals, quantile
from medha.spec import MedhaReplica, seconds
from medha.spec.quantities import to_number
from medha.spec.values import Autoscaling
from medha_operator.observed import PodView, ReportView

STALE_S = 15.0
USUAL_START_S = 60.0


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Of one model, from all routers; `fresh` unless one of them is silent or there is none."""

    window_s: float = 1.0
    fresh: bool = False
    models: tuple[ModelDemand, ...] = ()

    @property
    def slack_p10(self) -> float | None:
        return _p10(each.slack_counts for each in self.models)

    @property
    def alone_p10(self) -> float | None:
        return _p10(each.alone_counts for each in self.models)

    @property
    def classes(self) -> tuple[ClassShare, ...]:
        every = [each for model in self.models for each in model.classes]
        return tuple(
            ClassShare(
                name,
                met=sum(each.met for each in every if each.name == name),
                missed=sum(each.missed for each in every if each.name == name),
            )
            for name in sorted({each.name for each in every})
        )


def policy_of(asked: Autoscaling) -> Policy:
    """What `spec.autoscaling` asks for."""
    return Policy(
        least=asked.min_replicas,
        most=asked.max_replicas,
        target_slack=to_number(asked.target_slack_p10),
        down_after_s=seconds(asked.scale_down_stabilization),
    )


def signals_of(
    resource: MedhaReplica,
    demand: Demand,
    pods: Iterable[PodView],
    reports: Mapping[int, ReportView],
    now_s: float,
    *,
    room: bool = True,
    cold_start_s: float,
) -> Signals:
    """One look at a resource, whose replicas take `cold_start_s` to start."""
    leaders = [pod for pod in pods if pod.group == pod.stage == 0 and not pod.deleting]
    ready = {pod.ordinal for pod in leaders if pod.ready}
    heard = {ordinal: view for ordinal, view in reports.items() if now_s - view.at_s <= STALE_S}
    held = sum(each.held for each in demand.models)
    routers = sum(each.waiting + each.running for each in demand.models)
    controllers = sum(view.status.waiting + view.status.running for view in heard.values())
    return Signals(
        at_s=now_s,
        current=resource.spec.replicas,
        ready=len(ready),
        fresh=demand.fresh and ready <= heard.keys(),
        slack_p10=demand.slack_p10,
        arrived=sum(sum(each.slack_counts) for each in demand.models),
        alone_p10=demand.alone_p10,
        offered=sum(each.work_s for each in demand.models) / demand.window_s,
        backlog_s=sum(each.backlog_s for each in demand.models),
        held=held,
        busy=max(routers, controllers),
        kv_filled=sum(_used(heard[ordinal].status.groups) for ordinal in ready & heard.keys()),
        classes=demand.classes,
        cold_start_s=cold_start_s,
        room=room,
    )


def slo_of(demand: Demand) -> dict[str, object]:
    """For the status, in steps that do not change with every request; empty: nobody arrived."""
    met, ended = 0, 0
    for each in demand.classes:
        met, ended = met + each.met, ended + each.met + each.missed
    found: dict[str, object] = {}
    if ended:
        found["attainmentPercent"] = round(100.0 * met / ended)
    if (slack := demand.slack_p10) is not None:
        found["slackP10"] = f"{round(slack / 0.05) * 0.05:.2f}"
    return found


def _used(groups: Iterable[GroupStatus]) -> float:
    """Share of the pages of the running ones that sequences hold."""
    running = [group for group in groups if group.state == "running"]
    pages = sum(group.pages for group in running)
    return 1.0 - sum(group.free_pages for group in running) / pages if pages else 0.0


def _p10(counts: Iterable[Sequence[int]]) -> float | None:
    """Of the sum of what all routers counted."""
    counted = [each for each in counts if each]
    return quantile(RATIO, [sum(each) for each in zip(*counted, strict=True)], 0.1)
