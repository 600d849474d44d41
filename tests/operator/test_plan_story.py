"""Stories of one MedhaReplica in a small cluster: created, failed, repaired, grown."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from medha_operator.cluster.cluster_state import ClusterState
from medha_operator.planning.planner import decide
from medha_operator.planning.resource_status import events_between
from medha_operator.resources.actions import (
    CreatePod,
    DeleteObject,
    DeletePod,
    EmitEvent,
    RemoveSchedulingGate,
    RequeueAt,
)
from medha_operator.settings import Flows
from medha_operator.testing import SETTINGS, Cluster, node, rack, resource

RACK = "topology.kubernetes.io/rack"


def test_a_replica_is_created_gated_ungated_as_a_gang_and_becomes_ready() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8, "spp": 2}), rack("r1", 2))
    first = [action for action in cluster.reconcile().actions if isinstance(action, CreatePod)]
    assert [create.manifest["metadata"]["name"] for create in first] == [
        "tiny-0-g0-s0",
        "tiny-0-g0-s1",
    ]
    assert all(pod.gated for pod in cluster.pods.values())
    assert cluster.condition("Ready")["reason"] == "Placing"
    second = cluster.reconcile().actions
    assert [item.pod for item in second if isinstance(item, RemoveSchedulingGate)] == [
        *cluster.pods
    ]
    cluster.settle()
    assert cluster.places == {"tiny-0-g0-s0": "r1-0", "tiny-0-g0-s1": "r1-1"}
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.status["readyReplicas"] == 1


def test_a_gang_that_was_ungated_in_part_is_ungated_as_a_whole() -> None:
    """The operator ended after the first pod's gate was removed; that pod runs already."""
    cluster = Cluster(resource(parallelism={"tp": 8, "spp": 2}), rack("r1", 2))
    cluster.reconcile()
    first, second = cluster.pods.values()
    cluster.pods[first.name] = msgspec.structs.replace(
        first, gated=False, node=first.target, phase="Running", ready=True
    )
    actions = cluster.reconcile().actions
    assert [action.pod for action in actions if isinstance(action, RemoveSchedulingGate)] == [
        second.name
    ]


def test_a_converged_replica_causes_no_action_and_no_new_status() -> None:
    cluster = Cluster(resource(replicas=2, parallelism={"tp": 4}), [node("a")])
    cluster.settle()
    before = cluster.status
    cluster.now_s += 3600
    assert cluster.reconcile().actions == ()
    assert cluster.status == before


def test_a_failed_group_restarts_after_its_failure_is_recorded() -> None:
    cluster = Cluster(resource(parallelism={"tp": 1, "spp": 2}), [node("a")])
    cluster.settle()
    cluster.change("tiny-0-g0-s1", phase="Failed", ready=False, why="OOMKilled")
    assert [type(action) for action in cluster.reconcile().actions] == [RequeueAt]
    (line,) = cluster.status["restarts"]
    assert (line["attempt"], line["reason"]) == (1, "pod tiny-0-g0-s1 ended (OOMKilled)")
    deleted = [action for action in cluster.reconcile().actions if isinstance(action, DeletePod)]
    assert [delete.pod for delete in deleted] == ["tiny-0-g0-s0", "tiny-0-g0-s1"]
    assert cluster.condition("GroupsReady")["message"] == (
        "KVP group 0 of tiny-0 restarts: pod tiny-0-g0-s1 ended (OOMKilled)"
    )
    cluster.settle()
    assert {pod.attempt for pod in cluster.pods.values()} == {2}
    assert cluster.condition("Ready")["status"] == "True"


def test_restarts_back_off_until_the_budget_is_spent() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.settle()
    started = []
    for _ in range(20):
        if cluster.pods and cluster.pods["tiny-0-g0-s0"].ready:
            started.append(cluster.now_s)
            cluster.change("tiny-0-g0-s0", phase="Failed", ready=False)
        for _ in range(80):
            cluster.reconcile()
            cluster.turn()
            if cluster.pods and cluster.pods["tiny-0-g0-s0"].ready:
                break
    gaps = [b - a for a, b in itertools.pairwise(started)]
    assert gaps[:5] == sorted(gaps[:5])
    assert gaps[5] > 500
    exhausted = cluster.condition("RestartBudgetExhausted")
    assert exhausted["type"] == "RestartBudgetExhausted"


def test_a_spent_budget_is_reported_with_the_last_failure() -> None:
    cluster = Cluster(resource(), [node("a")])
    for _ in range(200):
        cluster.reconcile()
        cluster.turn()
        for name, pod in cluster.pods.items():
            if pod.phase == "Running":
                cluster.change(name, phase="Failed", why="Error", message="/models has no config")
    condition = cluster.condition("RestartBudgetExhausted")
    assert condition["status"] == "True"
    assert (
        "KVP group 0 of tiny-0 failed more than 5 times within 10 minutes" in condition["message"]
    )
    assert cluster.condition("Ready")["reason"] == "ModelMissing"
    assert "/models has no config" in cluster.condition("Ready")["message"]


def test_a_group_is_added_near_its_replica_and_deleted_when_its_controller_releases_it() -> None:
    cluster = Cluster(
        resource(parallelism={"tp": 8, "kvp": {"max": 2}}, placement={"packLevel": RACK}),
        [*rack("r1", 1), *rack("r2", 2)],
    )
    cluster.settle()
    assert cluster.places == {"tiny-0-g0-s0": "r2-0"}
    cluster.wanted[0] = 2
    events = [action for action in cluster.reconcile().actions if isinstance(action, EmitEvent)]
    assert [event.message for event in events] == ["tiny-0: group 1 on r2-1 (2 groups are wanted)"]
    assert cluster.condition("KvpGrowing")["status"] == "True"
    cluster.settle()
    assert cluster.status["groups"] == [
        {"replica": 0, "kvpGroups": 2, "wanted": 2, "generation": 2}
    ]
    cluster.release(0, 1)
    cluster.settle()
    assert cluster.places == {"tiny-0-g0-s0": "r2-0"}
    assert cluster.status["kvpGroups"] == 1


def test_an_unplaced_group_blocks_no_replica() -> None:
    """Racks are full of the resource's own groups; another replica would fit."""
    three = {"tp": 8, "kvp": {"max": 3}}
    cluster = Cluster(
        resource(parallelism=three, placement={"packLevel": RACK}),
        [*rack("r1", 2), *rack("r2", 1)],
    )
    cluster.settle()
    cluster.wanted[0] = 3
    cluster.settle()
    key, state = ("team", "tiny"), ClusterState(lambda key, after_s: None)
    decision = cluster.reconcile()
    assert decision.unplaced_groups
    state.set_waiting(
        key, replicas=bool(decision.unplaced_replicas), groups=bool(decision.unplaced_groups)
    )
    assert key in state.waiting and key not in state.unplaced
    cluster.update(replicas=2, parallelism=three, placement={"packLevel": RACK})
    cluster.settle()
    assert cluster.status["readyReplicas"] == 2


def test_a_lower_target_alone_deletes_no_group() -> None:
    cluster = Cluster(resource(parallelism={"kvp": {"max": 3}}), [node("a")])
    cluster.wanted[0] = 3
    cluster.settle()
    cluster.wanted[0] = 1
    cluster.settle()
    assert len(cluster.pods) == 3


def test_a_new_group_that_is_not_wanted_any_more_stays_for_the_cooldown() -> None:
    cluster = Cluster(resource(parallelism={"kvp": {"max": 2}}), [node("a")])
    cluster.settle()
    cluster.wanted[0] = 2
    cluster.reconcile()
    cluster.reconcile()  # the budget
    cluster.wanted[0] = 1
    (again,) = cluster.reconcile().actions
    assert isinstance(again, RequeueAt)
    assert again.at_s == cluster.now_s + 30


def test_a_released_group_is_not_recreated_by_an_operator_that_has_not_polled_yet() -> None:
    """The former one died after its deletions, before the status had recorded them."""
    cluster = Cluster(resource(parallelism={"kvp": {"max": 2}}), [node("a")])
    cluster.wanted[0] = 2
    cluster.settle()
    cluster.release(0, 1)
    cluster.turn(60.0)
    for action in decide(cluster.resource, cluster.observed(), cluster.settings).actions:
        cluster.execute(action)
    cluster.turn()
    cluster.reports_since_s = cluster.now_s
    assert list(cluster.pods) == ["tiny-0-g0-s0"] and cluster.status["groups"][0]["wanted"] == 2
    for _ in range(5):
        cluster.reconcile()
        cluster.turn()
        assert list(cluster.pods) == ["tiny-0-g0-s0"]
    assert cluster.status["groups"][0]["wanted"] == 1


def test_a_group_that_is_being_released_is_not_restarted() -> None:
    """The operator died between its deletions."""
    cluster = Cluster(resource(parallelism={"spp": 2, "kvp": {"max": 2}}), rack("r1", 4))
    cluster.wanted[0] = 2
    cluster.settle()
    cluster.release(0, 1)
    del cluster.pods["tiny-0-g1-s0"]
    cluster.reports_since_s = cluster.now_s
    for _ in range(5):
        cluster.reconcile()
        cluster.turn()
    assert sorted(cluster.pods) == ["tiny-0-g0-s0", "tiny-0-g0-s1"]
    assert not cluster.status.get("restarts")


def test_a_replica_that_waits_to_be_recreated_keeps_its_objects() -> None:
    flows = msgspec.structs.replace(SETTINGS, worker_flows=Flows())
    cluster = Cluster(resource(), [node("a")], flows)
    cluster.settle()
    before = dict(cluster.objects)
    assert {kind for kind, _ in before} >= {"ConfigMap", "NetworkPolicy"}
    cluster.change("tiny-0-g0-s0", phase="Failed", ready=False)
    while cluster.pods:
        cluster.reconcile()
        cluster.turn(0.1)
    assert not [action for action in cluster.reconcile().actions if isinstance(action, CreatePod)]
    assert cluster.objects == before
    cluster.settle()
    assert cluster.pods["tiny-0-g0-s0"].attempt == 2
    assert not [action for action in cluster.done if isinstance(action, DeleteObject)]


def test_a_failed_extra_group_is_repaired_even_while_its_controller_is_silent() -> None:
    cluster = Cluster(resource(parallelism={"kvp": {"max": 2}}), [node("a")])
    cluster.wanted[0] = 2
    cluster.settle()
    cluster.change("tiny-0-g1-s0", phase="Failed", ready=False)
    cluster.settle()
    assert cluster.pods["tiny-0-g1-s0"].attempt == 2
    assert cluster.pods["tiny-0-g0-s0"].attempt == 1


def test_pods_of_a_dead_node_are_deleted_by_force_and_recreated_elsewhere() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8}), [node("a"), node("b")])
    cluster.settle()
    home = cluster.pods["tiny-0-g0-s0"].node
    cluster.power(home, False)
    cluster.turn()
    cluster.settle()
    (pod,) = cluster.pods.values()
    assert (pod.node != home, pod.attempt, pod.ready) == (True, 2, True)
    forced = [action for action in cluster.done if isinstance(action, DeletePod)]
    assert [delete.grace_s for delete in forced] == [0]


def test_pods_of_a_node_that_is_not_known_yet_stay() -> None:
    """The operator's nodes are older than its pods, as after a slow list."""
    cluster = Cluster(resource(parallelism={"tp": 8, "spp": 2}), rack("r1", 4))
    cluster.settle()
    before = dict(cluster.pods)
    home = cluster.pods["tiny-0-g0-s0"].node
    cluster.unseen.add(home)
    for _ in range(5):
        cluster.reconcile()
        cluster.turn()
    assert cluster.pods == before
    deletes = [action for action in cluster.done if isinstance(action, DeletePod)]
    assert deletes and {delete.if_lost for delete in deletes} == {home}  # its siblings' end, too
    cluster.unseen.clear()
    cluster.settle()
    assert cluster.pods == before
    assert cluster.condition("Ready")["status"] == "True"


def test_a_node_that_reports_that_it_is_not_ready_keeps_its_pods() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8}), [node("a"), node("b")])
    cluster.settle()
    pods = dict(cluster.pods)
    cluster.change_node(cluster.pods["tiny-0-g0-s0"].node, ready=False)
    assert cluster.reconcile().actions == ()
    assert cluster.pods == pods


def test_a_hung_group_restarts_when_it_does_not_recover() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.settle()
    cluster.hung.add(cluster.pods["tiny-0-g0-s0"].uid)
    cluster.change("tiny-0-g0-s0", ready=False)
    cluster.reconcile()
    cluster.turn(100)
    assert [type(action) for action in cluster.reconcile().actions] == [RequeueAt]
    cluster.settle()
    assert cluster.pods["tiny-0-g0-s0"].attempt == 2
    assert "did not recover" in cluster.status["restarts"][0]["reason"]


def test_pods_of_a_silent_node_wait_for_it_if_there_is_no_other_node() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8}), [node("a")])
    cluster.settle()
    uid = cluster.pods["tiny-0-g0-s0"].uid
    cluster.power("a", False)
    cluster.turn()
    cluster.settle()
    cluster.power("a", True)
    cluster.settle()
    assert cluster.pods["tiny-0-g0-s0"].uid == uid
    assert cluster.pods["tiny-0-g0-s0"].ready


def test_objects_deleted_by_hand_are_recreated() -> None:
    cluster = Cluster(resource(parallelism={"spp": 2}), [node("a")])
    cluster.settle()
    cluster.objects.clear()
    cluster.pods.clear()
    cluster.settle()
    assert len(cluster.pods) == 2
    assert len(cluster.objects) == 4


def test_a_replica_moves_as_a_whole_when_its_domain_has_no_room_for_its_base() -> None:
    cluster = Cluster(
        resource(parallelism={"tp": 8, "kvp": {"max": 2}}, placement={"packLevel": RACK}),
        [*rack("r1", 2), *rack("r2", 2)],
    )
    cluster.wanted[0] = 2
    cluster.settle()
    home = cluster.pods["tiny-0-g0-s0"].node
    cluster.power(home, False)
    cluster.turn()
    cluster.settle(turns=120)
    assert cluster.condition("Ready")["status"] == "True"
    racks = {pod.node.partition("-")[0] for pod in cluster.pods.values()}
    assert racks == {"r2" if home.startswith("r1") else "r1"}


@pytest.mark.parametrize(
    "written", [{}, {"groups": 7}, {"conditions": [{"type": 1}]}, {"restarts": [{}]}]
)
def test_a_status_that_a_person_wrote_does_no_harm(written: dict[str, Any]) -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.settle()
    pods = dict(cluster.pods)
    cluster.status = written
    cluster.settle()
    assert cluster.pods == pods
    assert cluster.condition("Ready")["status"] == "True"


def test_status_changes_emit_events() -> None:
    cluster = Cluster(resource(parallelism={"kvp": {"max": 2}}), [node("a")])
    statuses = [cluster.status]
    for turn in range(16):
        cluster.wanted[0] = 1 + (turn > 6)
        cluster.reconcile()
        cluster.turn()
        statuses.append(cluster.status)
    events = [
        event for a, b in itertools.pairwise(statuses) for event in events_between("tiny", a, b)
    ]
    assert [(event.reason, event.message) for event in events] == [
        ("Serving", "all replicas of spec.replicas serve"),
        ("GroupJoined", "tiny-0 runs 2 KVP groups, generation 2"),
    ]
    cluster.power("a", False)
    cluster.turn()
    before = cluster.status
    cluster.reconcile()
    (gone,) = events_between("tiny", before, cluster.status)
    assert (gone.reason, gone.warning) == ("NotServing", True)
