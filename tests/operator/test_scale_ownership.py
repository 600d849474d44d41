"""Scaling: its signals, the writers of the number of replicas, and its condition."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from medha.fleet.autoscaling import ScalingDecision, ScalingSignals
from medha.messages import ClassDemand, GroupStatus, ModelDemand, ReplicaStatus
from medha.metrics import RATIO
from medha.request import SloClass
from medha.spec.values import AutoscalingSpec
from medha_operator.controllers.model_publisher import router_models
from medha_operator.planning.resource_status import scaling_condition, update_owner
from medha_operator.planning.scaling_signals import STALE_S, TotalDemand, signals_of, slo_of
from medha_operator.resources.objects import FieldManager, replicas_managers, rfc3339
from medha_operator.resources.scaled_object import is_ours, same, scaled_object
from medha_operator.resources.views import PodView, ReportView, ScaleOwnerRecord
from medha_operator.testing import NOW_S, resource

BUILTIN = AutoscalingSpec(max_replicas=4)
OURS, THEIRS = FieldManager("medha-operator"), FieldManager("kubectl-edit")


def counts(ratio: float, many: int) -> tuple[int, ...]:
    place = sum(edge < ratio for edge in RATIO)
    return tuple(many if index == place else 0 for index in range(len(RATIO) + 1))


def leader(ordinal: int, ready: bool = True, ready_s: float = 60.0) -> PodView:
    return PodView(
        name=f"m-{ordinal}-g0-s0",
        uid=f"{ordinal}",
        ordinal=ordinal,
        group=0,
        stage=0,
        attempt=1,
        spec_hash="a",
        ready=ready,
        created_s=NOW_S - 100.0,
        ready_since_s=NOW_S - ready_s if ready else None,
    )


def report(at_s: float = NOW_S, free: int = 100) -> ReportView:
    group = GroupStatus(group=0, state="running", pages=100, free_pages=free)
    status = ReplicaStatus(
        replica="m-0", ready=True, draining=False, generation=1, wanted_groups=1, groups=(group,)
    )
    return ReportView(status=status, at_s=at_s)


def seen_of(
    demand: TotalDemand, pods: list[PodView], reports: dict[int, ReportView]
) -> ScalingSignals:
    return signals_of(resource(), demand, pods, reports, NOW_S, cold_start_s=40.0)


def test_demand_is_the_sum_over_routers() -> None:
    first = ModelDemand(
        model="m",
        slack_counts=counts(-1.0, 10),
        alone_counts=counts(0.5, 1),
        work_s=30.0,
        held=1,
        classes=(ClassDemand(name="a", met=1, missed=2),),
    )
    second = ModelDemand(
        model="m",
        slack_counts=counts(5.0, 10),
        alone_counts=counts(5.0, 9),
        work_s=15.0,
        waiting=3,
        classes=(ClassDemand(name="a", met=6), ClassDemand(name="b", missed=1)),
    )
    demand = TotalDemand(window_s=30.0, fresh=True, models=(first, second))
    seen = seen_of(demand, [leader(0)], {0: report(free=25)})
    assert seen.fresh and (seen.offered, seen.held, seen.busy) == (1.5, 1, 3)
    assert seen.slack_p10 is not None and seen.slack_p10 <= -1.0
    assert seen.alone_p10 == 0.5
    assert seen.kv_filled == 0.75 and seen.cold_start_s == 40.0 and seen.arrived == 20
    assert [(share.name, share.met, share.missed) for share in seen.classes] == [
        ("a", 7, 2),
        ("b", 0, 1),
    ]
    assert slo_of(demand)["attainmentPercent"] == 70
    assert slo_of(TotalDemand(fresh=True)) == {}


@pytest.mark.parametrize(
    "reports, fresh",
    [({0: report()}, True), ({}, False), ({0: report(NOW_S - STALE_S - 1)}, False)],
)
def test_a_silent_serving_replica_makes_the_signals_stale(
    reports: dict[int, ReportView], fresh: bool
) -> None:
    demand = TotalDemand(fresh=True)
    assert seen_of(demand, [leader(0)], reports).fresh is fresh
    assert not seen_of(TotalDemand(), [leader(0)], {0: report()}).fresh
    assert seen_of(demand, [leader(0, ready=False)], {}).fresh


def test_a_replica_counts_as_ready_from_its_first_report_and_is_awaited_for_a_while() -> None:
    demand, pods = TotalDemand(fresh=True), [leader(0), leader(1, ready_s=1.0)]
    awaited = seen_of(demand, pods, {0: report()})
    assert (awaited.fresh, awaited.ready) == (True, 1)
    reported = seen_of(demand, pods, {0: report(), 1: report()})
    assert (reported.fresh, reported.ready) == (True, 2)
    former = seen_of(demand, pods, {0: report(), 1: report(NOW_S - STALE_S - 1)})
    assert (former.fresh, former.ready) == (True, 1)
    silent = seen_of(demand, [leader(0), leader(1, ready_s=STALE_S + 1)], {0: report()})
    assert (silent.fresh, silent.ready) == (False, 2)


def test_the_number_of_another_writer_stands_for_a_while() -> None:
    line = update_owner(BUILTIN, 1, (), None, 60.0, NOW_S)
    assert line == ScaleOwnerRecord(mode="Builtin", replicas=1)
    ours = update_owner(BUILTIN, 2, (THEIRS, OURS), line, 60.0, NOW_S)
    assert (ours.replicas, ours.outside_by) == (2, "")
    theirs = update_owner(BUILTIN, 3, (THEIRS,), ours, 60.0, NOW_S)
    assert (theirs.replicas, theirs.outside_by) == (3, "kubectl-edit")
    assert theirs.outside_since == rfc3339(NOW_S)
    assert update_owner(BUILTIN, 3, (THEIRS,), theirs, 60.0, NOW_S + 59.0) == theirs
    assert update_owner(BUILTIN, 3, (THEIRS,), theirs, 60.0, NOW_S + 60.0).outside_by == ""


def test_a_number_without_a_field_manager_is_ours_if_we_wrote_it() -> None:
    line = ScaleOwnerRecord(mode="Builtin", replicas=1)
    zero = update_owner(BUILTIN, 0, (), line, 60.0, NOW_S, written=0)
    assert (zero.replicas, zero.outside_by) == (0, "")
    assert update_owner(BUILTIN, 1, (), zero, 60.0, NOW_S, written=1).outside_by == ""
    assert (
        update_owner(BUILTIN, 3, (), zero, 60.0, NOW_S, written=1).outside_by == "an unknown writer"
    )
    assert (
        update_owner(BUILTIN, 1, (THEIRS,), zero, 60.0, NOW_S, written=1).outside_by
        == "kubectl-edit"
    )


def test_another_mode_resets_the_owner_but_keeps_a_scaled_object() -> None:
    line = ScaleOwnerRecord(mode="External", replicas=2, scaled_object="Expected")
    record = update_owner(BUILTIN, 5, (THEIRS,), line, 60.0, NOW_S)
    assert record == ScaleOwnerRecord(mode="Builtin", replicas=5, scaled_object="Expected")
    external = msgspec.structs.replace(BUILTIN, mode="External")
    assert update_owner(external, 5, (THEIRS,), line, 60.0, NOW_S).outside_by == ""


@pytest.mark.parametrize(
    "why, status, reason",
    [
        ("Enough", "True", "Scaling"),
        ("Starting", "True", "Scaling"),
        ("NoData", "False", "NoData"),
        ("AtMaximum", "True", "AtMaximum"),
        ("NoRoom", "True", "NoRoom"),
    ],
)
def test_the_scaling_condition_holds_no_changing_numbers(
    why: Any, status: str, reason: str
) -> None:
    line = ScaleOwnerRecord(mode="Builtin", replicas=1)
    condition = scaling_condition(BUILTIN, line, ScalingDecision(1, why, "numbers 1.23"), "")
    assert (condition.status, condition.reason) == (
        status,
        reason,
    ) and "1.23" not in condition.message


def test_the_writer_of_the_replicas_is_read_from_managed_fields() -> None:
    def entry(manager: str, time: str, **spec: object) -> dict[str, object]:
        return {"manager": manager, "time": time, "fieldsV1": {"f:spec": spec}}

    managers = replicas_managers(
        {
            "managedFields": [
                entry("late", "2026-01-02T00:00:00Z", **{"f:replicas": {}}),
                entry("never", "2026-01-03T00:00:00Z", **{"f:model": {}}),
                entry("early", "2026-01-01T00:00:00Z", **{"f:replicas": {}}),
            ]
        }
    )
    assert [manager.name for manager in managers] == ["early", "late"]
    assert replicas_managers({}) == ()


def test_server_defaults_of_a_scaled_object_are_no_difference() -> None:
    wanted = scaled_object(resource(), BUILTIN, "http://prometheus")
    existing = msgspec.json.decode(msgspec.json.encode(wanted))
    existing["metadata"]["uid"] = "x"
    existing["spec"]["initialCooldownPeriod"] = 0
    assert same(wanted, existing) and is_ours(existing)
    existing["spec"]["maxReplicaCount"] = 9
    assert not same(wanted, existing)
    assert not is_ours({"metadata": {}})
    of_a_person = existing["metadata"] | {"ownerReferences": None}
    assert not is_ours({"metadata": of_a_person})


def test_each_model_is_published_once_with_a_hold_if_it_scales_to_zero() -> None:
    zero = resource("a", autoscaling={"minReplicas": 0, "maxReplicas": 2})
    again = resource("b", slo={"classes": [{"name": "gold"}]})
    (model,) = router_models([again, zero])
    assert model.name == "m" and model.hold_s > 0.0
    assert model.classes[0] == SloClass(slo=model.classes[0].slo) and len(model.classes) == 1
    (alone,) = router_models([again])
    assert alone.hold_s == 0.0 and [share.name for share in alone.classes] == ["default", "gold"]
