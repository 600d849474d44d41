"""Stories of one MedhaReplica in a small cluster: made, failed, mended, grown."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from medha_operator.actions import CreatePod, DeleteObject, DeletePod, LiftGate, LookAgain, Tell
from medha_operator.observe import World
from medha_operator.plan import decide
from medha_operator.settings import Flows
from medha_operator.story import changes
from medha_operator.testing import SETTINGS, Cluster, node, rack, resource

RACK = "topology.kubernetes.io/rack"


def test_a_replica_is_made_gated_let_go_as_a_gang_and_becomes_ready() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8, "spp": 2}), rack("r1", 2))
    first = [each for each in cluster.look().actions if isinstance(each, CreatePod)]
    assert [each.manifest["metadata"]["name"] for each in first] == ["tiny-0-g0-s0", "tiny-0-g0-s1"]
    assert all(pod.gated for pod in cluster.pods.values())
    assert cluster.condition("Ready")["reason"] == "Placing"
    second = cluster.look().actions
    assert [each.pod for each in second if isinstance(each, LiftGate)] == [*cluster.pods]
    cluster.settle()
    assert cluster.places == {"tiny-0-g0-s0": "r1-0", "tiny-0-g0-s1": "r1-1"}
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.status["readyReplicas"] == 1


def test_a_gang_of_which_only_a_part_was_let_go_is_let_go_whole() -> None:
    """The operator ended between the first pod's gate and the second's; the first runs already."""
    cluster = Cluster(resource(parallelism={"tp": 8, "spp": 2}), rack("r1", 2))
    cluster.look()
    first, second = cluster.pods.values()
    cluster.pods[first.name] = msgspec.structs.replace(
        first, gated=False, node=first.target, phase="Running", ready=True
    )
    found = cluster.look().actions
    assert [each.pod for each in found if isinstance(each, LiftGate)] == [second.name]


def test_a_converged_replica_causes_no_action_and_no_new_status() -> None:
    cluster = Cluster(resource(replicas=2, parallelism={"tp": 4}), [node("a")])
    cluster.settle()
    before = cluster.status
    cluster.now_s += 3600
    assert cluster.look().actions == ()
    assert cluster.status == before


def test_a_group_that_failed_is_counted_first_and_then_started_anew() -> None:
    cluster = Cluster(resource(parallelism={"tp": 1, "spp": 2}), [node("a")])
    cluster.settle()
    cluster.change("tiny-0-g0-s1", phase="Failed", ready=False, why="OOMKilled")
    assert [type(each) for each in cluster.look().actions] == [LookAgain]
    (line,) = cluster.status["restarts"]
    assert (line["attempt"], line["reason"]) == (1, "pod tiny-0-g0-s1 ended (OOMKilled)")
    deleted = [each for each in cluster.look().actions if isinstance(each, DeletePod)]
    assert [each.pod for each in deleted] == ["tiny-0-g0-s0", "tiny-0-g0-s1"]
    assert cluster.condition("GroupsReady")["message"] == (
        "KVP group 0 of tiny-0 is started anew: pod tiny-0-g0-s1 ended (OOMKilled)"
    )
    cluster.settle()
    assert {pod.attempt for pod in cluster.pods.values()} == {2}
    assert cluster.condition("Ready")["status"] == "True"


def test_failures_in_a_row_are_put_off_longer_and_longer_until_the_budget_is_spent() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.settle()
    started = []
    for _ in range(20):
        if cluster.pods and cluster.pods["tiny-0-g0-s0"].ready:
            started.append(cluster.now_s)
            cluster.change("tiny-0-g0-s0", phase="Failed", ready=False)
        for _ in range(80):
            cluster.look()
            cluster.turn()
            if cluster.pods and cluster.pods["tiny-0-g0-s0"].ready:
                break
    gaps = [b - a for a, b in itertools.pairwise(started)]
    assert gaps[:5] == sorted(gaps[:5])
    assert gaps[5] > 500
    exhausted = cluster.condition("RestartBudgetExhausted")
    assert exhausted["type"] == "RestartBudgetExhausted"


def test_a_spent_budget_is_told_with_the_last_failure() -> None:
    cluster = Cluster(resource(), [node("a")])
    for _ in range(200):
        cluster.look()
        cluster.turn()
        for name, pod in cluster.pods.items():
            if pod.phase == "Running":
                cluster.change(name, phase="Failed", why="Error", message="/models has no config")
    told = cluster.condition("RestartBudgetExhausted")
    assert told["status"] == "True"
    assert "KVP group 0 of tiny-0 failed more than 5 times within 10 minutes" in told["message"]
    assert cluster.condition("Ready")["reason"] == "ModelMissing"
    assert "/models has no config" in cluster.condition("Ready")["message"]


def test_a_group_grows_beside_its_replica_and_is_removed_when_its_controller_let_it_go() -> None:
    cluster = Cluster(
        resource(parallelism={"tp": 8, "kvp": {"max": 2}}, placement={"packLevel": RACK}),
        [*rack("r1", 1), *rack("r2", 2)],
    )
    cluster.settle()
    assert cluster.places == {"tiny-0-g0-s0": "r2-0"}
    cluster.wanted[0] = 2
    told = [each for each in cluster.look().actions if isinstance(each, Tell)]
    assert [each.message for each in told] == ["tiny-0: group 1 on r2-1 (2 groups are wanted)"]
    assert cluster.condition("KvpGrowing")["status"] == "True"
    cluster.settle()
    assert cluster.status["groups"] == [
        {"replica": 0, "kvpGroups": 2, "wanted": 2, "generation": 2}
    ]
    cluster.release(0, 1)
    cluster.settle()
    assert cluster.places == {"tiny-0-g0-s0": "r2-0"}
    assert cluster.status["kvpGroups"] == 1


def test_a_group_without_a_place_keeps_no_replica_from_one() -> None:
    """Racks are full of the one resource's own groups; another replica would find a place."""
    three = {"tp": 8, "kvp": {"max": 3}}
    cluster = Cluster(
        resource(parallelism=three, placement={"packLevel": RACK}),
        [*rack("r1", 2), *rack("r2", 1)],
    )
    cluster.settle()
    cluster.wanted[0] = 3
    cluster.settle()
    key, world = ("team", "tiny"), World(lambda key, after_s: None)
    decision = cluster.look()
    assert decision.stunted
    world.note_waiting(key, replicas=bool(decision.misfits), groups=bool(decision.stunted))
    assert key in world.waiting and key not in world.homeless
    cluster.update(replicas=2, parallelism=three, placement={"packLevel": RACK})
    cluster.settle()
    assert cluster.status["readyReplicas"] == 2


def test_fewer_groups_than_run_are_never_a_reason_to_delete_one() -> None:
    cluster = Cluster(resource(parallelism={"kvp": {"max": 3}}), [node("a")])
    cluster.wanted[0] = 3
    cluster.settle()
    cluster.wanted[0] = 1
    cluster.settle()
    assert len(cluster.pods) == 3


def test_a_group_that_was_just_made_stays_for_a_while_when_the_pressure_is_gone() -> None:
    cluster = Cluster(resource(parallelism={"kvp": {"max": 2}}), [node("a")])
    cluster.settle()
    cluster.wanted[0] = 2
    cluster.look()
    cluster.wanted[0] = 1
    (again,) = cluster.look().actions
    assert isinstance(again, LookAgain)
    assert again.at_s == cluster.now_s + 30


def test_a_group_given_back_is_not_made_again_by_an_operator_that_has_not_asked_yet() -> None:
    """The former one died after its deletions, before the status told of them."""
    cluster = Cluster(resource(parallelism={"kvp": {"max": 2}}), [node("a")])
    cluster.wanted[0] = 2
    cluster.settle()
    cluster.release(0, 1)
    cluster.turn(60.0)
    for action in decide(cluster.resource, cluster.observed(), cluster.settings).actions:
        cluster.carry_out(action)
    cluster.turn()
    cluster.reports_since_s = cluster.now_s
    assert list(cluster.pods) == ["tiny-0-g0-s0"] and cluster.status["groups"][0]["wanted"] == 2
    for _ in range(5):
        cluster.look()
        cluster.turn()
        assert list(cluster.pods) == ["tiny-0-g0-s0"]
    assert cluster.status["groups"][0]["wanted"] == 1


def test_a_group_of_which_a_part_was_given_back_is_not_taken_for_one_that_failed() -> None:
    """The operator died between its deletions."""
    cluster = Cluster(resource(parallelism={"spp": 2, "kvp": {"max": 2}}), rack("r1", 4))
    cluster.wanted[0] = 2
    cluster.settle()
    cluster.release(0, 1)
    del cluster.pods["tiny-0-g1-s0"]
    cluster.reports_since_s = cluster.now_s
    for _ in range(5):
        cluster.look()
        cluster.turn()
    assert sorted(cluster.pods) == ["tiny-0-g0-s0", "tiny-0-g0-s1"]
    assert not cluster.status.get("restarts")


def test_a_replica_that_is_made_anew_keeps_what_was_made_for_it_meanwhile() -> None:
    flows = msgspec.structs.replace(SETTINGS, worker_flows=Flows())
    cluster = Cluster(resource(), [node("a")], flows)
    cluster.settle()
    before = dict(cluster.objects)
    assert {kind for kind, _ in before} >= {"ConfigMap", "NetworkPolicy"}
    cluster.change("tiny-0-g0-s0", phase="Failed", ready=False)
    while cluster.pods:
        cluster.look()
        cluster.turn(0.1)
    assert not [each for each in cluster.look().actions if isinstance(each, CreatePod)]
    assert cluster.objects == before
    cluster.settle()
    assert cluster.pods["tiny-0-g0-s0"].attempt == 2
    assert not [each for each in cluster.done if isinstance(each, DeleteObject)]


def test_a_grown_group_that_fails_is_repaired_even_while_its_controller_is_silent() -> None:
    cluster = Cluster(resource(parallelism={"kvp": {"max": 2}}), [node("a")])
    cluster.wanted[0] = 2
    cluster.settle()
    cluster.change("tiny-0-g1-s0", phase="Failed", ready=False)
    cluster.settle()
    assert cluster.pods["tiny-0-g1-s0"].attempt == 2
    assert cluster.pods["tiny-0-g0-s0"].attempt == 1


def test_pods_of_a_dead_node_are_removed_by_force_and_made_elsewhere() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8}), [node("a"), node("b")])
    cluster.settle()
    home = cluster.pods["tiny-0-g0-s0"].node
    cluster.power(home, False)
    cluster.turn()
    cluster.settle()
    (pod,) = cluster.pods.values()
    assert (pod.node != home, pod.attempt, pod.ready) == (True, 2, True)
    forced = [each for each in cluster.done if isinstance(each, DeletePod)]
    assert [each.grace_s for each in forced] == [0]


def test_pods_of_a_node_that_is_only_not_known_yet_stay() -> None:
    """What is known of nodes is older than what is known of pods, as after a lagging list."""
    cluster = Cluster(resource(parallelism={"tp": 8, "spp": 2}), rack("r1", 4))
    cluster.settle()
    before = dict(cluster.pods)
    home = cluster.pods["tiny-0-g0-s0"].node
    cluster.unseen.add(home)
    for _ in range(5):
        cluster.look()
        cluster.turn()
    assert cluster.pods == before
    asked = [each for each in cluster.done if isinstance(each, DeletePod)]
    assert asked and {each.if_lost for each in asked} == {home}  # its siblings' end, too
    cluster.unseen.clear()
    cluster.settle()
    assert cluster.pods == before
    assert cluster.condition("Ready")["status"] == "True"


def test_a_node_that_says_itself_that_it_is_not_ready_keeps_its_pods() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8}), [node("a"), node("b")])
    cluster.settle()
    pods = dict(cluster.pods)
    cluster.change_node(cluster.pods["tiny-0-g0-s0"].node, ready=False)
    assert cluster.look().actions == ()
    assert cluster.pods == pods


def test_a_group_that_its_controller_gave_up_is_made_anew_when_it_does_not_come_back() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.settle()
    cluster.hung.add(cluster.pods["tiny-0-g0-s0"].uid)
    cluster.change("tiny-0-g0-s0", ready=False)
    cluster.look()
    cluster.turn(100)
    assert [type(each) for each in cluster.look().actions] == [LookAgain]
    cluster.settle()
    assert cluster.pods["tiny-0-g0-s0"].attempt == 2
    assert "did not come back" in cluster.status["restarts"][0]["reason"]


def test_pods_of_a_silent_node_wait_for_it_where_there_is_no_other_place() -> None:
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


def test_a_gang_whose_place_was_taken_is_planned_again_elsewhere() -> None:
    cluster = Cluster(resource(parallelism={"tp": 4, "spp": 2}), [node("a"), node("b")])
    cluster.look()
    taken = cluster.pods["tiny-0-g0-s0"].target
    cluster.change_node(taken, used={"nvidia.com/gpu": 8})
    cluster.settle()
    assert taken not in cluster.places.values()
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.status["restarts"] == []


def test_a_pod_that_is_not_bound_in_time_is_planned_again() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8}), [node("a"), node("b")])
    cluster.look()
    target = cluster.pods["tiny-0-g0-s0"].target
    cluster.change_node(target, used={"cpu": 64_000})
    again = [each for each in cluster.look().actions if isinstance(each, LookAgain)]
    assert [each.at_s - cluster.now_s for each in again] == [60.0]
    cluster.settle(turns=90)
    assert list(cluster.places.values()) == [{"a": "b", "b": "a"}[target]]


def test_a_pod_that_was_gated_for_long_has_its_time_to_be_bound_from_then_on() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8, "spp": 2}), [node("a"), node("b")])
    cluster.look()
    cluster.now_s += 100.0  # its group could not be begun, or another clock is ahead
    cluster.look()
    assert not any(each.gated or each.node for each in cluster.pods.values())
    again = [each for each in cluster.look().actions if isinstance(each, LookAgain)]
    assert [each.at_s - cluster.now_s for each in again] == [60.0]
    cluster.settle()
    assert {each.attempt for each in cluster.pods.values()} == {1}


def test_what_is_deleted_by_hand_is_made_again() -> None:
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


def test_what_came_about_is_told_once_it_stands_in_the_status() -> None:
    cluster = Cluster(resource(parallelism={"kvp": {"max": 2}}), [node("a")])
    statuses = [cluster.status]
    for turn in range(16):
        cluster.wanted[0] = 1 + (turn > 6)
        cluster.look()
        cluster.turn()
        statuses.append(cluster.status)
    told = [each for a, b in itertools.pairwise(statuses) for each in changes("tiny", a, b)]
    assert [(each.reason, each.message) for each in told] == [
        ("Serving", "every replica that is asked for serves"),
        ("GroupJoined", "tiny-0 runs 2 KVP groups, as generation 2"),
    ]
    cluster.power("a", False)
    cluster.turn()
    before = cluster.status
    cluster.look()
    (gone,) = changes("tiny", before, cluster.status)
    assert (gone.reason, gone.warning) == ("NotServing", True)


def test_a_pod_whose_node_goes_away_before_it_is_bound_is_planned_again_at_once() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8}), [node("a"), node("b")])
    cluster.look()
    target = cluster.pods["tiny-0-g0-s0"].target
    del cluster.nodes[target]
    began_s = cluster.now_s
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.now_s - began_s < 20
