"""Stories of one MedhaReplica in a small cluster: updated, scaled, drained, replaced."""

from __future__ import annotations

import msgspec

from medha_operator.resources.actions import ApplyObject, DeletePod, Drain, EmitEvent
from medha_operator.testing import Cluster, node, resource


def test_an_update_surges_one_replica_and_drains_the_old_one_after_it() -> None:
    cluster = Cluster(resource(replicas=2, parallelism={"tp": 4}), [node("a"), node("b", 4)])
    cluster.settle()
    cluster.load = {0: 5, 1: 0}
    cluster.update(replicas=2, parallelism={"tp": 4}, template={"image": "worker:2"})
    events = []
    for _ in range(40):
        ready = sum(pod.ready for pod in cluster.pods.values())
        assert ready >= 2
        assert len(cluster.ordinals) <= 3
        events += [
            (type(action).__name__, action.ordinal)
            for action in cluster.reconcile().actions
            if isinstance(action, Drain)
        ]
        cluster.turn()
    assert events == [("Drain", 1), ("Drain", 0)]
    assert cluster.condition("Updated")["status"] == "True"
    assert cluster.ordinals == {1, 2} or cluster.ordinals == {0, 2} or len(cluster.ordinals) == 2
    assert cluster.status["retiring"] == []


def test_an_update_creates_configs_for_new_replicas_only() -> None:
    cluster = Cluster(resource(replicas=2), [node("a"), node("b")])
    cluster.settle()
    cluster.update(replicas=2, template={"image": "worker:2"})
    cluster.done.clear()
    for _ in range(60):
        for _ in range(3):  # drained, deleted, and looked at while the pods take their time
            cluster.reconcile()
        cluster.turn()
    assert cluster.condition("Updated")["status"] == "True"
    configs = [
        action.manifest["metadata"]["name"]
        for action in cluster.done
        if isinstance(action, ApplyObject) and action.manifest["kind"] == "ConfigMap"
    ]
    assert len(configs) == 2


def test_without_room_for_a_surge_the_old_replica_retires_first() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8}), [node("a")])
    cluster.settle()
    cluster.load = {0: 3}
    cluster.update(parallelism={"tp": 8}, template={"image": "worker:2"})
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.condition("Updated")["status"] == "True"


def test_an_update_that_could_never_be_placed_leaves_the_old_replica_serving() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8}), [node("a")])
    cluster.settle()
    cluster.update(parallelism={"tp": 16})
    cluster.settle()
    assert [pod.ready for pod in cluster.pods.values()] == [True, False]
    assert cluster.condition("Ready")["status"] == "True"
    assert (
        "a pod needs 16 nvidia.com/gpu on one node and the largest has 8"
        in (cluster.condition("PlacementUnsatisfiable")["message"])
    )


def test_an_update_to_other_stages_keeps_the_old_replica_until_the_new_one_serves() -> None:
    cluster = Cluster(resource(parallelism={"spp": 2}), [node("a")])
    cluster.settle()
    cluster.update(parallelism={"spp": 3, "kvp": {"min": 2, "max": 2}})
    for _ in range(20):
        cluster.reconcile()
        cluster.turn()
        leaders = [pod for pod in cluster.pods.values() if pod.group == pod.stage == 0]
        assert any(pod.ready for pod in leaders)
    cluster.settle()
    assert len(cluster.pods) == 6


def test_a_scale_down_retires_the_replica_with_the_least_work() -> None:
    cluster = Cluster(resource(replicas=3), [node("a")])
    cluster.settle()
    cluster.load = {0: 50, 1: 10, 2: 30}
    cluster.update(replicas=1)
    actions = cluster.reconcile().actions
    assert [action.ordinal for action in actions if isinstance(action, Drain)] == [1, 2]
    cluster.settle()
    assert cluster.ordinals == {0}


def test_a_scale_up_creates_replicas_while_those_of_a_scale_down_still_drain() -> None:
    cluster = Cluster(resource(replicas=8), [node("a", 16)])
    cluster.settle()
    cluster.load = {0: 20_000} | dict.fromkeys(range(1, 8), 10_000)
    cluster.update(replicas=1)
    for _ in range(3):
        cluster.reconcile()
        cluster.turn()
    assert len(cluster.ordinals) == 8 and len(cluster.draining) == 7
    cluster.update(replicas=7)
    for _ in range(5):
        cluster.reconcile()
        cluster.turn()
    assert cluster.ordinals == set(range(14))
    assert cluster.status["readyReplicas"] == 7
    cluster.load.clear()
    cluster.settle()
    assert cluster.ordinals == {0, *range(8, 14)}


def test_an_update_surges_by_one_also_during_a_scale_down() -> None:
    cluster = Cluster(resource(replicas=4), [node("a", 16)])
    cluster.settle()
    cluster.load = {0: 20_000, 1: 20_000, 2: 10_000, 3: 10_000}
    cluster.update(replicas=2)
    cluster.reconcile()
    leaving = {pod.ordinal for pod in cluster.pods.values() if pod.uid in cluster.draining}
    assert len(leaving) == 2
    cluster.update(replicas=2, template={"image": "worker:2"})
    for _ in range(30):
        cluster.reconcile()
        cluster.turn()
        assert len(cluster.ordinals - leaving) <= 3
        assert sum(pod.ready for pod in cluster.pods.values()) >= 2
    assert leaving < cluster.ordinals
    assert cluster.status["readyReplicas"] == 2


def test_a_replica_on_a_cordoned_node_is_replaced_before_it_drains() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8}), [node("a"), node("b")])
    cluster.settle()
    cluster.load = {0: 4}
    home = cluster.pods["tiny-0-g0-s0"].node
    cluster.change_node(home, schedulable=False)
    for _ in range(20):
        assert any(pod.ready for pod in cluster.pods.values())
        cluster.reconcile()
        cluster.turn()
    assert [pod.node for pod in cluster.pods.values()] == [{"a": "b", "b": "a"}[home]]
    assert cluster.condition("Ready")["status"] == "True"


def test_a_cordoned_replica_without_other_nodes_keeps_serving() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8}), [node("a")])
    cluster.settle()
    cluster.change_node("a", schedulable=False)
    cluster.settle()
    assert [pod.ready for pod in cluster.pods.values()] == [True, False]  # its successor waits
    assert "1 cordoned" in cluster.condition("PlacementUnsatisfiable")["message"]


def test_a_replica_that_does_not_finish_in_time_is_deleted() -> None:
    cluster = Cluster(resource(drainTimeout="20s"), [node("a")])
    cluster.settle()
    cluster.load = {0: 10_000}
    cluster.update(replicas=0, drainTimeout="20s")
    start = cluster.now_s
    while cluster.pods:
        cluster.reconcile()
        cluster.turn()
    assert 20 <= cluster.now_s - start < 30
    cluster.reconcile()
    assert cluster.condition("Ready")["reason"] == "NoneAskedFor"
    (event,) = [e for e in cluster.done if isinstance(e, EmitEvent) and e.reason == "Drained"]
    assert "requests after spec.drainTimeout" in event.message


def test_pods_carry_the_current_spec() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.settle()
    labels = msgspec.structs.asdict(cluster.pods["tiny-0-g0-s0"])
    cluster.update(template={"labels": {"team": "x"}})
    cluster.settle()
    (pod,) = cluster.pods.values()
    assert pod.spec_hash != labels["spec_hash"]


def test_a_restarted_operator_does_not_take_a_draining_replica_for_dead() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.settle()
    cluster.load = {0: 30}
    cluster.update(replicas=0)
    cluster.reconcile()
    cluster.change("tiny-0-g0-s0", ready=False)  # a controller that drains is not ready
    cluster.reports_since_s = cluster.now_s
    assert [action for action in cluster.reconcile().actions if isinstance(action, DeletePod)] == []
    cluster.turn(3.0)
    assert cluster.reports()[0].status.draining
    assert [action for action in cluster.reconcile().actions if isinstance(action, DeletePod)] == []
    cluster.settle()
    assert cluster.pods == {}


def test_an_update_that_does_not_start_says_why() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.settle()
    cluster.update(template={"image": "worker:none"})
    for _ in range(3):
        cluster.reconcile()
        cluster.turn()
    cluster.change("tiny-1-g0-s0", ready=False, why="ErrImagePull", message="worker:none: no such")
    cluster.reconcile()
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.condition("Updated")["reason"] == "ImagePull"
    assert "worker:none: no such" in cluster.condition("Updated")["message"]
