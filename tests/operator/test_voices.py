"""Who decides about the number of replicas, and from what: signals, writers, and what is said."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from medha.messages import ClassDemand, GroupStatus, ModelDemand, ReplicaStatus
from medha.metrics import RATIO
from medha.request import SloClass
from medha.scaling import Decision, Signals
from medha.spec.values import Autoscaling
from medha_operator.authors import Author, authors_of
from medha_operator.keda import is_ours, same, scaled_object
from medha_operator.memory import ScalingLine
from medha_operator.moments import rfc3339
from medha_operator.observed import PodView, ReportView
from medha_operator.published import router_models
from medha_operator.signals import STALE_S, Demand, signals_of, slo_of
from medha_operator.testing import NOW_S, resource
from medha_operator.voices import heard, judged

BUILTIN = Autoscaling(max_replicas=4)
OURS, THEIRS = Author("medha-operator"), Author("kubectl-edit")


def counts(ratio: float, many: int) -> tuple[int, ...]:
    place = sum(edge < ratio for edge in RATIO)
    return tuple(many if each == place else 0 for each in range(len(RATIO) + 1))


def leader(ordinal: int, ready: bool = True) -> PodView:
    return PodView(
        name=f"m-{ordinal}-g0-s0", uid=f"{ordinal}", ordinal=ordinal, group=0, stage=0, attempt=1,
        spec_hash="a", ready=ready, created_s=NOW_S - 100.0,
        ready_since_s=NOW_S - 60.0 if ready else None,
    )  # fmt: skip


def report(at_s: float = NOW_S, free: int = 100) -> ReportView:
    group = GroupStatus(group=0, state="running", pages=100, free_pages=free)
    status = ReplicaStatus(
        replica="m-0", ready=True, draining=False, generation=1, wanted_groups=1, groups=(group,)
    )
    return ReportView(status=status, at_s=at_s)


def seen_of(demand: Demand, pods: list[PodView], reports: dict[int, ReportView]) -> Signals:
    return signals_of(resource(), demand, pods, reports, NOW_S, cold_start_s=40.0)


def test_demand_is_the_sum_over_routers() -> None:
    one = ModelDemand(
        model="m", slack_counts=counts(-1.0, 10), alone_counts=counts(0.5, 1), work_s=30.0, held=1,
        classes=(ClassDemand(name="a", met=1, missed=2),),
    )  # fmt: skip
    other = ModelDemand(
        model="m", slack_counts=counts(5.0, 10), alone_counts=counts(5.0, 9), work_s=15.0,
        waiting=3,
        classes=(ClassDemand(name="a", met=6), ClassDemand(name="b", missed=1)),
    )  # fmt: skip
    demand = Demand(window_s=30.0, fresh=True, models=(one, other))
    seen = seen_of(demand, [leader(0)], {0: report(free=25)})
    assert seen.fresh and (seen.offered, seen.held, seen.busy) == (1.5, 1, 3)
    assert seen.slack_p10 is not None and seen.slack_p10 <= -1.0
    assert seen.alone_p10 == 0.5
    assert seen.kv_filled == 0.75 and seen.cold_start_s == 40.0 and seen.arrived == 20
    assert [(each.name, each.met, each.missed) for each in seen.classes] == [
        ("a", 7, 2), ("b", 0, 1),
    ]  # fmt: skip
    assert slo_of(demand)["attainmentPercent"] == 70
    assert slo_of(Demand(fresh=True)) == {}


@pytest.mark.parametrize(
    "reports, fresh",
    [({0: report()}, True), ({}, False), ({0: report(NOW_S - STALE_S - 1)}, False)],
)
def test_a_serving_replica_that_is_not_heard_of_makes_the_look_stale(
    reports: dict[int, ReportView], fresh: bool
) -> None:
    demand = Demand(fresh=True)
    assert seen_of(demand, [leader(0)], reports).fresh is fresh
    assert not seen_of(Demand(), [leader(0)], {0: report()}).fresh
    assert seen_of(demand, [leader(0, ready=False)], {}).fresh


def test_a_word_of_somebody_else_is_noticed_stands_for_a_while_and_is_forgotten() -> None:
    line = heard(BUILTIN, 1, (), None, 60.0, NOW_S)
    assert line == ScalingLine(mode="Builtin", replicas=1)
    ours = heard(BUILTIN, 2, (THEIRS, OURS), line, 60.0, NOW_S)
    assert (ours.replicas, ours.outside_by) == (2, "")
    theirs = heard(BUILTIN, 3, (THEIRS,), ours, 60.0, NOW_S)
    assert (theirs.replicas, theirs.outside_by) == (3, "kubectl-edit")
    assert theirs.outside_since == rfc3339(NOW_S)
    assert heard(BUILTIN, 3, (THEIRS,), theirs, 60.0, NOW_S + 59.0) == theirs
    assert heard(BUILTIN, 3, (THEIRS,), theirs, 60.0, NOW_S + 60.0).outside_by == ""


def test_a_number_of_which_the_api_server_forgot_the_writer_is_ours_if_we_wrote_it() -> None:
    line = ScalingLine(mode="Builtin", replicas=1)
    zero = heard(BUILTIN, 0, (), line, 60.0, NOW_S, written=0)
    assert (zero.replicas, zero.outside_by) == (0, "")
    assert heard(BUILTIN, 1, (), zero, 60.0, NOW_S, written=1).outside_by == ""
    assert heard(BUILTIN, 3, (), zero, 60.0, NOW_S, written=1).outside_by == "somebody"
    assert heard(BUILTIN, 1, (THEIRS,), zero, 60.0, NOW_S, written=1).outside_by == "kubectl-edit"


def test_another_mode_begins_anew_but_remembers_a_scaled_object() -> None:
    line = ScalingLine(mode="External", replicas=2, scaled_object="Expected")
    found = heard(BUILTIN, 5, (THEIRS,), line, 60.0, NOW_S)
    assert found == ScalingLine(mode="Builtin", replicas=5, scaled_object="Expected")
    external = msgspec.structs.replace(BUILTIN, mode="External")
    assert heard(external, 5, (THEIRS,), line, 60.0, NOW_S).outside_by == ""


@pytest.mark.parametrize(
    "why, status, reason",
    [
        ("Enough", "True", "Scaling"), ("Starting", "True", "Scaling"),
        ("NoData", "False", "NoData"), ("AtMaximum", "True", "AtMaximum"),
        ("NoRoom", "True", "NoRoom"),
    ],
)  # fmt: skip
def test_the_condition_tells_what_lasts_and_not_each_look(
    why: Any, status: str, reason: str
) -> None:
    line = ScalingLine(mode="Builtin", replicas=1)
    found = judged(BUILTIN, line, Decision(1, why, "numbers 1.23"), "")
    assert (found.status, found.reason) == (status, reason) and "1.23" not in found.message


def test_the_writer_of_the_replicas_is_read_from_managed_fields() -> None:
    def entry(manager: str, time: str, **spec: object) -> dict[str, object]:
        return {"manager": manager, "time": time, "fieldsV1": {"f:spec": spec}}

    found = authors_of({"managedFields": [
        entry("late", "2026-01-02T00:00:00Z", **{"f:replicas": {}}),
        entry("never", "2026-01-03T00:00:00Z", **{"f:model": {}}),
        entry("early", "2026-01-01T00:00:00Z", **{"f:replicas": {}}),
    ]})  # fmt: skip
    assert [each.name for each in found] == ["early", "late"]
    assert authors_of({}) == ()


def test_what_the_server_adds_to_a_scaled_object_is_no_difference() -> None:
    wanted = scaled_object(resource(), BUILTIN, "http://prometheus")
    found = msgspec.json.decode(msgspec.json.encode(wanted))
    found["metadata"]["uid"] = "x"
    found["spec"]["cooldownPeriod"] = 300
    assert same(wanted, found) and is_ours(found)
    found["spec"]["maxReplicaCount"] = 9
    assert not same(wanted, found)
    assert not is_ours({"metadata": {}})


def test_models_are_published_once_each_and_those_at_zero_are_waited_for() -> None:
    zero = resource("a", autoscaling={"minReplicas": 0, "maxReplicas": 2})
    again = resource("b", slo={"classes": [{"name": "gold"}]})
    (model,) = router_models([again, zero])
    assert model.name == "m" and model.hold_s > 0.0
    assert model.classes[0] == SloClass(slo=model.classes[0].slo) and len(model.classes) == 1
    (alone,) = router_models([again])
    assert alone.hold_s == 0.0 and [each.name for each in alone.classes] == ["default", "gold"]
