"""Reconciling and Stalled: what kstatus and Argo CD conclude from every state of a resource."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.resource_health import argo_health, kstatus

from medha_operator.planning.resource_status import refused_status
from medha_operator.testing import Cluster, node, resource

IN_ARGO = {"Current": "Healthy", "InProgress": "Progressing", "Failed": "Degraded"}


def body(cluster: Cluster, status: dict[str, Any] | None = None) -> dict[str, Any]:
    """The object that a client reads."""
    generation = cluster.resource.generation
    return {"metadata": {"generation": generation}, "status": status or cluster.status}


def verdict(cluster: Cluster) -> tuple[str, str]:
    """The conclusion of kstatus, with its message; Argo CD's is the same."""
    conclusion, message = kstatus(body(cluster))
    health, words = argo_health(body(cluster))
    assert health == IN_ARGO[conclusion]
    if (
        conclusion != "Current"
        and cluster.status["observedGeneration"] == cluster.resource.generation
    ):
        assert words == message != ""
    return conclusion, message


def serving(**spec: Any) -> Cluster:
    cluster = Cluster(resource(**spec), [node("a"), node("b")])
    cluster.settle()
    return cluster


def test_a_resource_is_in_progress_until_it_serves_and_current_from_then_on() -> None:
    cluster = Cluster(resource(replicas=2), [node("a")])
    seen = []
    for _ in range(20):
        cluster.reconcile()
        seen.append((verdict(cluster)[0], cluster.condition("Ready")["status"]))
        cluster.turn()
    assert seen[0] == ("InProgress", "False") and seen[-1] == ("Current", "True")
    assert set(seen) == {("InProgress", "False"), ("Current", "True")}


def test_a_resource_without_room_is_in_progress_because_a_node_may_come() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8}), [node("a", gpus=4)])
    cluster.settle()
    conclusion, message = verdict(cluster)
    assert conclusion == "InProgress" and "8 nvidia.com/gpu" in message
    cluster.nodes["b"] = node("b")
    cluster.settle()
    assert verdict(cluster)[0] == "Current"


def test_an_image_that_cannot_be_pulled_is_failed_and_serving_heals_it() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.reconcile()
    cluster.turn()
    cluster.change("tiny-0-g0-s0", why="ImagePullBackOff", message="no such image")
    cluster.reconcile()
    conclusion, message = verdict(cluster)
    assert conclusion == "Failed" and "cannot be pulled" in message
    cluster.change("tiny-0-g0-s0", why="", message="")
    cluster.settle()
    assert verdict(cluster)[0] == "Current"


def test_an_update_whose_image_is_missing_is_failed_while_the_former_replica_serves() -> None:
    cluster = serving()
    cluster.resource = resource(generation=2, template={"image": "own:9"})
    assert verdict(cluster)[0] == "InProgress"  # the operator has not seen the change
    cluster.reconcile()
    cluster.reconcile()
    assert verdict(cluster)[0] == "InProgress"
    cluster.change(
        "tiny-1-g0-s0", node="b", gated=False, why="ImagePullBackOff", message="no such image"
    )
    cluster.reconcile()
    assert cluster.condition("Ready")["status"] == "True"
    assert verdict(cluster)[0] == "Failed"


def test_a_scale_down_is_in_progress_until_the_drained_replica_is_gone() -> None:
    cluster = serving(replicas=2)
    cluster.load = {0: 5, 1: 5}
    cluster.resource = resource(generation=2, replicas=1)
    cluster.reconcile()
    cluster.reconcile()
    assert verdict(cluster)[0] == "InProgress"
    cluster.load = {}
    cluster.settle()
    assert verdict(cluster)[0] == "Current"


def test_a_replica_that_fails_again_and_again_is_failed() -> None:
    cluster = serving()
    seen = []
    for _ in range(400):
        for name, pod in list(cluster.pods.items()):
            if not pod.deleting and pod.node:
                cluster.change(name, phase="Failed", ready=False, why="Error", message="out of it")
        cluster.reconcile()
        cluster.turn()
        seen.append(verdict(cluster)[0])
        if seen[-1] == "Failed":
            break
    assert seen[-1] == "Failed" and "InProgress" in seen
    assert "failed more than" in verdict(cluster)[1]


def test_a_refused_spec_is_failed_with_the_sentence_and_a_valid_one_heals_it() -> None:
    cluster = serving()
    sentence = "spec.parallelism.tp is 0: must be a whole number from 1 to 64; use 1"
    refused = refused_status(cluster.observed(), sentence, generation=1)
    assert kstatus(body(cluster, refused)) == ("Failed", sentence)
    assert argo_health(body(cluster, refused)) == ("Degraded", sentence)
    types = [condition["type"] for condition in refused["conditions"]]
    assert len(types) == len(set(types)) and {"Placed", "Reconciling"} < set(types)
    cluster.status = refused
    cluster.settle()
    assert verdict(cluster)[0] == "Current"


def test_a_resource_that_asks_for_no_replica_is_current() -> None:
    cluster = serving(replicas=0)
    assert verdict(cluster)[0] == "Current"


def test_a_growing_or_grown_replica_is_current() -> None:
    cluster = serving(parallelism={"kvp": {"max": 2}})
    cluster.wanted = {0: 2}
    cluster.reconcile()
    cluster.reconcile()
    assert cluster.condition("KvpGrowing")["status"] == "True"
    assert verdict(cluster)[0] == "Current"


@pytest.mark.parametrize("status", [None, {"observedGeneration": -1}])
def test_a_resource_that_no_operator_has_seen_is_not_healthy_in_argo_cd(status: object) -> None:
    unseen = {"metadata": {"generation": 1}, **({"status": status} if status else {})}
    assert argo_health(unseen)[0] == "Progressing"


def test_a_deleted_resource_is_terminating() -> None:
    deleted = {"metadata": {"generation": 1, "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert kstatus(deleted)[0] == "Terminating"


STEPS = st.lists(
    st.sampled_from(("turn", "fail", "image", "cordon", "node", "scale", "update", "lose")),
    max_size=14,
)


@given(steps=STEPS)
def test_no_history_makes_a_resource_both_reconciling_and_stalled(steps: list[str]) -> None:
    cluster = Cluster(resource(), [node("a")])
    generation = 1
    for step in steps:
        pods = sorted(cluster.pods)
        match step:
            case "fail" if pods:
                cluster.change(pods[0], phase="Failed", ready=False, why="Error", message="x")
            case "image" if pods and not cluster.pods[pods[0]].ready:
                cluster.change(pods[0], why="ErrImagePull", message="x")
            case "node":
                cluster.nodes["b"] = node("b")
            case "lose":
                cluster.power("a", False)
            case "scale" | "update":
                generation += 1
                spec = {"replicas": 2} if step == "scale" else {"template": {"image": "o:2"}}
                cluster.resource = resource(generation=generation, **spec)
        cluster.reconcile()
        states = {name: cluster.condition(name)["status"] for name in ("Reconciling", "Stalled")}
        assert [*states.values()] != ["True", "True"]
        done = all(cluster.condition(name)["status"] == "True" for name in ("Ready", "Updated"))
        if verdict(cluster)[0] == "Current":
            assert done and cluster.condition("Draining")["status"] == "False"
        cluster.turn()
