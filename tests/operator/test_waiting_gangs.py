"""Stories of gangs that the cluster has no room for: they wait, are given back, and come again."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha_operator.resources.actions import CreatePod, DeletePod
from medha_operator.resources.objects import rfc3339, unix_s
from medha_operator.testing import REQUIRED, Cluster, node, rack, resource

RACK = "topology.kubernetes.io/rack"
FULL = {"nvidia.com/gpu": 8}


def waiting(cluster: Cluster) -> list[str]:
    """Pods that the scheduler has refused, and that wait for nothing else."""
    return [
        name
        for name, pod in sorted(cluster.pods.items())
        if pod.refused and not pod.gated and not pod.deleting
    ]


def step(cluster: Cluster, seconds: float, tick_s: float = 1.0) -> None:
    for _ in range(int(seconds / tick_s)):
        cluster.reconcile()
        cluster.turn(tick_s)


def domain(cluster: Cluster, pod: str) -> list[str]:
    """The rack that the pod requires by label; empty if it is left open."""
    affinity = cluster.specs[pod]["affinity"].get("nodeAffinity", {})
    terms = affinity.get(REQUIRED, {"nodeSelectorTerms": []})["nodeSelectorTerms"]
    return [
        value for term in terms for rule in term["matchExpressions"] for value in rule["values"]
    ]


# --- waiting for nodes that an autoscaler makes ---------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        {"parallelism": {"tp": 16}},
        {"placement": {"nodeSelector": {"pool": "h200"}}},
        {
            "placement": {"packLevel": "cloud.example/block"}
            | {"topologyLevels": ["cloud.example/block"]}
        },
        {"parallelism": {"tp": 8, "spp": 3}, "placement": {"packLevel": RACK}},
        {"device": {"kind": "Cuda", "resource": "amd.com/gpu"}},
    ],
)
def test_pods_without_room_exist_and_wait_for_a_node_of_any_name(spec: dict[str, Any]) -> None:
    cluster = Cluster(resource(**spec), [node("a")])
    cluster.settle()
    assert waiting(cluster) == sorted(cluster.pods) != []
    for pod in cluster.specs.values():
        assert "matchFields" not in str(pod) and "nodeName" not in pod
        assert "nodeAffinity" not in pod["affinity"]
    assert cluster.condition("PlacementUnsatisfiable")["status"] == "True"
    cluster.now_s += 36_000
    assert cluster.reconcile().actions == ()


def test_replicas_beyond_the_room_wait_next_to_those_that_serve() -> None:
    cluster = Cluster(resource(replicas=9, parallelism={"tp": 8}), rack("r1", 5))
    cluster.settle()
    assert cluster.status["readyReplicas"] == 5
    assert waiting(cluster) == [f"tiny-{ordinal}-g0-s0" for ordinal in range(5, 9)]
    for new in rack("r2", 4):
        cluster.nodes[new.name] = new
    cluster.settle()
    assert cluster.status["readyReplicas"] == 9


def test_a_gang_begins_in_a_new_rack_and_stays_there() -> None:
    cluster = Cluster(
        resource(parallelism={"tp": 8, "spp": 2}, placement={"packLevel": RACK}),
        rack("r1", 1, used=FULL),
    )
    cluster.settle()
    assert len(waiting(cluster)) == 2
    for new in (*rack("r2", 1), *rack("r3", 1)):
        cluster.nodes[new.name] = new
    step(cluster, 5)
    assert len(waiting(cluster)) == 1  # r2 has one node, and the gang must not be torn apart
    cluster.nodes["r2-1"] = rack("r2", 2)[1]
    cluster.settle()
    assert {pod.node for pod in cluster.pods.values()} == {"r2-0", "r2-1"}


def in_parts(cluster: Cluster) -> None:
    """Let the gang hold a part of a rack for the first time, and wait for its next attempt."""
    step(cluster, 30)
    assert 0 < len(waiting(cluster)) < len(cluster.pods)
    step(cluster, 100)
    assert {pod.attempt for pod in cluster.pods.values()} == {2}


def test_a_gang_that_holds_a_part_of_a_rack_makes_room_for_a_whole_new_one() -> None:
    """An autoscaler makes a rack only for pods that would fit there, and for all of them."""
    cluster = Cluster(
        resource(parallelism={"tp": 8, "spp": 3}, placement={"packLevel": RACK}),
        [*rack("r1", 2), *rack("r2", 1), *rack("r3", 4, used=FULL)],
    )
    in_parts(cluster)
    assert waiting(cluster) == sorted(cluster.pods)
    assert cluster.condition("PlacementUnsatisfiable")["status"] == "True"
    for new in rack("r4", 3):
        cluster.nodes[new.name] = new
    cluster.settle()
    assert {pod.node for pod in cluster.pods.values()} == {"r4-0", "r4-1", "r4-2"}
    assert cluster.status["restarts"] == cluster.status["waits"] == []


@given(st.lists(st.integers(0, 2), max_size=5), st.sampled_from([(3, 1), (4, 1), (2, 2)]))
@settings(max_examples=25, deadline=None)
def test_a_gang_that_fits_in_no_rack_gets_the_one_that_an_autoscaler_makes_for_all_of_it(
    sizes: list[int], shape: tuple[int, int]
) -> None:
    stages, groups = shape
    parallelism = {"tp": 8, "spp": stages, "kvp": {"min": groups, "max": groups}}
    racks = [rack(f"r{index}", size) for index, size in enumerate(sizes)]
    cluster = Cluster(
        resource(parallelism=parallelism, placement={"packLevel": RACK}),
        [node for nodes in racks for node in nodes],
    )
    began_s = cluster.now_s
    while len(waiting(cluster)) < stages * groups:
        assert cluster.now_s - began_s < 120
        step(cluster, 1)
    for new in rack("new", stages * groups):
        cluster.nodes[new.name] = new
    step(cluster, 30)
    assert {pod.node.partition("-")[0] for pod in cluster.pods.values()} == {"new"}
    assert cluster.condition("Ready")["status"] == "True"


def test_a_gang_that_waits_for_a_new_rack_takes_room_that_appears_in_an_old_one() -> None:
    cluster = Cluster(
        resource(parallelism={"tp": 8, "spp": 3}, placement={"packLevel": RACK}), rack("r1", 2)
    )
    in_parts(cluster)
    cluster.nodes["r1-2"] = rack("r1", 3)[2]
    step(cluster, 30)
    assert {pod.node for pod in cluster.pods.values()} == {"r1-0", "r1-1", "r1-2"}


def test_a_gang_alternates_between_the_growth_of_old_racks_and_a_new_one() -> None:
    cluster = Cluster(
        resource(parallelism={"tp": 8, "spp": 3}, placement={"packLevel": RACK}), rack("r1", 2)
    )
    held: dict[int, set[bool]] = {}
    for _ in range(3000):
        cluster.reconcile()
        cluster.turn()
        for pod in cluster.pods.values():
            held.setdefault(pod.attempt, set()).add(bool(pod.node))
    assert [True in held[attempt] for attempt in range(1, 7)] == [True, False] * 3
    assert cluster.status["restarts"] == []


def test_a_group_that_a_replica_grows_by_waits_in_the_rack_of_its_replica() -> None:
    cluster = Cluster(
        resource(parallelism={"tp": 8, "kvp": {"max": 2}}, placement={"packLevel": RACK}),
        [*rack("r1", 1), *rack("r2", 1)],
    )
    cluster.settle()
    home = cluster.pods["tiny-0-g0-s0"].node.partition("-")[0]
    cluster.wanted[0] = 2
    cluster.settle()
    assert waiting(cluster) == ["tiny-0-g1-s0"]
    assert domain(cluster, "tiny-0-g1-s0") == [home]
    assert cluster.condition("Ready")["status"] == "True"


# --- given back -----------------------------------------------------------------------------------


def test_a_plan_that_the_scheduler_refuses_is_followed_by_an_open_one() -> None:
    """A volume, or pods that the operator does not see, bind the gang to another rack."""
    cluster = Cluster(
        resource(parallelism={"tp": 8, "spp": 2}, placement={"packLevel": RACK}),
        [*rack("r1", 2), *rack("r2", 2)],
    )
    cluster.reconcile()
    assert domain(cluster, "tiny-0-g0-s0") == ["r1"]
    cluster.bound_to = "r2"
    cluster.settle()
    assert {pod.node for pod in cluster.pods.values()} == {"r2-0", "r2-1"}
    assert {pod.attempt for pod in cluster.pods.values()} == {2}
    assert cluster.status["restarts"] == cluster.status["waits"] == []


def test_a_gang_is_given_back_only_after_the_status_says_so() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8, "spp": 2}), rack("r1", 2))
    cluster.reconcile()
    cluster.bound_to = "nowhere"
    before: list[Any] = []
    for _ in range(30):
        known = cluster.status.get("waits", [])
        deletes = [
            action for action in cluster.reconcile().actions if isinstance(action, DeletePod)
        ]
        assert not deletes or known, "pods were deleted first"
        before += deletes
        cluster.turn()
    assert {deleted.pod for deleted in before} == {"tiny-0-g0-s0", "tiny-0-g0-s1"}


def test_a_gang_that_holds_a_part_of_its_nodes_gives_all_of_them_back() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8, "spp": 3}), rack("r1", 2))
    step(cluster, 50)
    assert len(waiting(cluster)) == 1
    step(cluster, 60)
    deleted = {action.pod for action in cluster.done if isinstance(action, DeletePod)}
    assert deleted == {"tiny-0-g0-s0", "tiny-0-g0-s1", "tiny-0-g0-s2"}
    assert cluster.status["restarts"] == []
    cluster.nodes["r1-2"] = rack("r1", 3)[2]
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"


def test_two_gangs_that_hold_what_the_other_needs_do_not_wait_for_ever() -> None:
    nodes = rack("r1", 4, used=FULL)
    cluster = Cluster(resource(replicas=2, parallelism={"tp": 8, "spp": 4}), nodes)
    cluster.settle()
    for index, name in enumerate(["tiny-0-g0-s0", "tiny-1-g0-s0", "tiny-0-g0-s1", "tiny-1-g0-s1"]):
        cluster.change_node(f"r1-{index}", used={})
        cluster.change(name, node=f"r1-{index}", why="", message="")
    began_s = cluster.now_s
    while not cluster.status["readyReplicas"]:
        step(cluster, 1)
        assert cluster.now_s - began_s < 900
    assert cluster.status["restarts"] == []


def test_a_gang_that_the_scheduler_has_not_judged_yet_is_left_alone() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8, "spp": 2}), rack("r1", 2))
    cluster.reconcile()
    for _ in range(5):
        cluster.now_s += 600  # the scheduler is down
        assert not [a for a in cluster.reconcile().actions if isinstance(a, DeletePod)]
    cluster.settle()
    assert {pod.attempt for pod in cluster.pods.values()} == {1}


def test_the_wait_for_nodes_grows_and_the_pauses_stay_short() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8, "spp": 3}), rack("r1", 2))
    created, deleted = [], []
    for _ in range(2400):
        for action in cluster.reconcile().actions:
            if isinstance(action, CreatePod):
                created.append(cluster.now_s)
            elif isinstance(action, DeletePod):
                deleted.append(cluster.now_s)
        cluster.turn()
    starts, ends = sorted(set(created)), sorted(set(deleted))
    holds = [end - start for start, end in zip(starts, ends, strict=False)]
    assert all(60 <= hold <= 460 for hold in holds)
    assert holds[1] > holds[0] and holds[2] > holds[1]
    assert all(start - end <= 20 for end, start in zip(ends, starts[1:], strict=False))
    assert cluster.status["restarts"] == []


# --- quotas, preemption, and gates of others ------------------------------------------------------


def test_a_gang_that_a_quota_cuts_short_is_given_back_and_told_as_a_quota() -> None:
    cluster = Cluster(resource(parallelism={"tp": 1, "spp": 3}), [node("a")])
    cluster.pods_allowed = 2
    step(cluster, 3, tick_s=0.5)
    assert cluster.pods == {}
    ready = cluster.condition("Ready")
    assert (ready["reason"], "exceeded quota" in ready["message"]) == ("QuotaExceeded", True)
    assert cluster.status["restarts"] == []
    cluster.pods_allowed = 3
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.status["waits"] == []


def test_two_gangs_under_one_quota_run_one_after_the_other() -> None:
    cluster = Cluster(resource(replicas=2, parallelism={"tp": 1, "spp": 3}), [node("a")])
    cluster.pods_allowed = 3
    step(cluster, 60)
    assert cluster.status["readyReplicas"] == 1
    assert len(cluster.pods) == 3
    assert cluster.condition("Updated")["reason"] == "QuotaExceeded"
    cluster.pods_allowed = 6
    cluster.settle()
    assert cluster.status["readyReplicas"] == 2


def test_a_refused_gang_asks_a_quota_ever_more_rarely() -> None:
    cluster = Cluster(resource(parallelism={"tp": 1, "spp": 3}), [node("a")])
    cluster.pods_allowed = 0
    refused_s: list[float] = []
    for _ in range(1200):
        cluster.reconcile()
        if cluster.quota is not None and cluster.quota.at_s not in refused_s:
            refused_s.append(cluster.quota.at_s)
        cluster.turn(0.25)
    gaps = [later - sooner for sooner, later in itertools.pairwise(refused_s)]
    assert len(refused_s) < 40 and all(gap >= 7 for gap in gaps[6:])


def test_a_preempted_group_comes_back_and_spends_no_restart() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8, "spp": 2}), rack("r1", 2))
    cluster.settle()
    cluster.change("tiny-0-g0-s1", deleting=True, disrupted="a more important pod needs the node")
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"
    assert {pod.attempt for pod in cluster.pods.values()} == {2}
    assert cluster.status["restarts"] == []


def test_a_pod_behind_the_gate_of_another_waits_without_an_end() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8, "spp": 2}), rack("r1", 2))
    cluster.reconcile()
    for name in cluster.pods:
        cluster.change(name, held="kueue.x-k8s.io/admission")
    step(cluster, 900, tick_s=10)
    assert {pod.attempt for pod in cluster.pods.values()} == {1}
    placed = cluster.condition("Placed")
    assert (placed["reason"], "kueue.x-k8s.io/admission" in placed["message"]) == ("Queued", True)
    assert cluster.condition("PlacementUnsatisfiable")["status"] == "False"
    for name in cluster.pods:
        cluster.change(name, held="")
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"


def test_an_ended_pod_that_a_queue_keeps_makes_room_for_its_successor() -> None:
    """The queue waits for a pod in its place, which needs the same name."""
    cluster = Cluster(resource(parallelism={"tp": 8, "spp": 2}), rack("r1", 2))
    cluster.settle()
    for name in cluster.pods:
        cluster.change(name, kept=True)
    cluster.change("tiny-0-g0-s1", phase="Failed", ready=False)
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"
    assert {pod.attempt for pod in cluster.pods.values()} == {2}
    for name in cluster.pods:
        cluster.change(name, kept=True)
    cluster.update(replicas=0, parallelism={"tp": 8, "spp": 2})
    cluster.settle()
    assert cluster.pods == {}


def test_an_update_in_a_full_queue_retires_the_old_replica_first() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8}), [node("a"), node("b")])
    cluster.settle()
    cluster.update(parallelism={"tp": 8}, template={"image": "worker:2"})
    cluster.reconcile()
    cluster.change("tiny-1-g0-s0", held="kueue.x-k8s.io/admission")
    step(cluster, 50)
    assert cluster.pods["tiny-0-g0-s0"].ready
    step(cluster, 40)
    assert list(cluster.pods) == ["tiny-1-g0-s0"]
    cluster.change("tiny-1-g0-s0", held="")
    cluster.settle()
    assert cluster.condition("Updated")["status"] == "True"


def test_pods_for_a_queue_are_left_open_and_alike() -> None:
    of = resource(parallelism={"tp": 8, "spp": 2}, placement={"packLevel": RACK})
    labels = {"kueue.x-k8s.io/queue-name": "models"}
    cluster = Cluster(msgspec.structs.replace(of, labels=labels), rack("r1", 2))
    cluster.settle()
    assert len({str(spec["affinity"]) for spec in cluster.specs.values()}) == 1
    assert {pod.target for pod in cluster.pods.values()} == {""}
    assert cluster.condition("Ready")["status"] == "True"


def test_a_new_replica_that_the_scheduler_refuses_makes_the_old_one_go_first() -> None:
    """The operator believes that there is room, and the scheduler knows better."""
    cluster = Cluster(resource(parallelism={"tp": 8}), [node("a"), node("b")])
    cluster.settle()
    home = cluster.pods["tiny-0-g0-s0"].node
    cluster.bound_to = home
    cluster.update(parallelism={"tp": 8}, template={"image": "worker:2"})
    cluster.settle(200)
    assert cluster.condition("Updated")["status"] == "True"
    assert [pod.node for pod in cluster.pods.values()] == [home]


def test_a_group_that_waits_for_room_does_not_hurry_a_rolling_update() -> None:
    parallelism = {"tp": 8, "spp": 2, "kvp": {"max": 2}}
    cluster = Cluster(resource(parallelism=parallelism), rack("r1", 5))
    cluster.settle()
    cluster.update(replicas=1, parallelism=parallelism, template={"image": "worker:2"})
    waits = [{"replica": 0, "group": 1, "attempt": 1, "at": rfc3339(cluster.now_s)}]
    for _ in range(8):
        cluster.status["waits"] = waits
        cluster.reconcile()
        cluster.turn()
        assert cluster.status["readyReplicas"] >= 1
    cluster.settle()
    assert cluster.condition("Updated")["status"] == "True"


def test_a_record_of_waiting_speaks_of_its_last_time() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8, "spp": 3}), rack("r1", 2))
    step(cluster, 100)
    (wait, *_) = cluster.status["waits"]
    assert wait["reason"] == "Unschedulable" and "finds no node" in wait["message"]
    assert (wait["times"], wait["attempt"]) == (1, 1)
    assert cluster.now_s - unix_s(wait["at"]) < 60
    msgspec.json.encode(cluster.status)
