"""Nodes that are emptied, and the budgets that keep pods on them until their replica is drained."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from medha_operator.resources import objects
from medha_operator.resources.actions import ApplyObject, DeleteObject, DeletePod
from medha_operator.resources.views import NodeView
from medha_operator.testing import Cluster, node, resource

KIND = "PodDisruptionBudget"


def tainted(key: str, effect: str, value: str = "") -> NodeView:
    """A node with a taint, as the API server returns it."""
    spec = {"taints": [{"key": key, "effect": effect, "value": value}]}
    body = {
        "metadata": {"name": "a", "uid": "u", "resourceVersion": "7"},
        "spec": spec,
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
    return objects.node(msgspec.json.encode(body)).value


@pytest.mark.parametrize(
    ("key", "effect", "value"),
    [
        ("karpenter.sh/disrupted", "NoSchedule", ""),
        ("karpenter.sh/disruption", "NoSchedule", "disrupting"),
        ("ToBeDeletedByClusterAutoscaler", "NoSchedule", "1800000000"),
    ],
)
def test_the_taint_of_an_autoscaler_that_removes_a_node_is_a_cordon(
    key: str, effect: str, value: str
) -> None:
    view = tainted(key, effect, value)
    assert not view.schedulable
    cluster = Cluster(resource(), [node("a"), node("b")])
    cluster.settle()
    (pod,) = cluster.pods.values()
    tolerant = {"schedulable": view.schedulable, "taints": view.taints}
    cluster.change_node(pod.node, **tolerant)
    for _ in range(30):
        assert any(pod.ready for pod in cluster.pods.values())
        cluster.reconcile()
        cluster.turn()
    cluster.settle()
    (moved,) = cluster.pods.values()
    assert moved.node != pod.node


def test_a_wish_of_the_cluster_autoscaler_is_no_cordon() -> None:
    assert tainted("DeletionCandidateOfClusterAutoscaler", "PreferNoSchedule").schedulable
    assert tainted("example.com/other", "NoSchedule").schedulable


def budgets(cluster: Cluster) -> dict[str, int]:
    """Pods that each budget keeps, by its name."""
    last: dict[str, Any] = {}
    for action in cluster.done:
        if isinstance(action, ApplyObject) and action.manifest["kind"] == KIND:
            last[action.manifest["metadata"]["name"]] = action.manifest["spec"]
    there = {name for kind, name in cluster.objects if kind == KIND}
    return {name: spec["minAvailable"] for name, spec in last.items() if name in there}


def test_a_budget_equals_the_pods_of_its_replica_and_grows_with_them() -> None:
    spec = {"spp": 2, "kvp": {"min": 1, "max": 3}}
    cluster = Cluster(resource(replicas=2, parallelism=spec), [node("a"), node("b")])
    cluster.reconcile()
    assert budgets(cluster) == {}  # an alert would fire for a model that loads for long
    cluster.settle()
    assert budgets(cluster) == {"tiny-0": 2, "tiny-1": 2}
    cluster.wanted = {1: 3}
    cluster.settle()
    assert budgets(cluster) == {"tiny-0": 2, "tiny-1": 6}
    cluster.release(1, 2)
    cluster.settle()
    assert budgets(cluster) == {"tiny-0": 2, "tiny-1": 4}


def test_a_budget_stays_as_it_is_while_a_group_is_repaired() -> None:
    cluster = Cluster(resource(parallelism={"spp": 2}), [node("a")])
    cluster.settle()
    cluster.done.clear()
    cluster.change("tiny-0-g0-s1", phase="Failed", ready=False)
    cluster.settle()
    touched = [
        action
        for action in cluster.done
        if (isinstance(action, ApplyObject) and action.manifest["kind"] == KIND)
        or (isinstance(action, DeleteObject) and action.kind == KIND)
    ]
    assert touched == []


def test_a_drained_replica_has_no_budget_when_its_pods_are_deleted() -> None:
    cluster = Cluster(resource(replicas=2), [node("a"), node("b")])
    cluster.settle()
    cluster.load = {0: 9, 1: 5}
    cluster.update(replicas=1)
    cluster.done.clear()
    for _ in range(4):
        cluster.reconcile()
        cluster.turn()
    assert set(budgets(cluster) | {name: 0 for kind, name in cluster.objects if kind == KIND}) == {
        "tiny-0",
        "tiny-1",
    }
    cluster.settle()
    assert {name for kind, name in cluster.objects if kind == KIND} == {"tiny-0"}
    last = [
        type(action)
        for action in cluster.done
        if isinstance(action, DeletePod)
        or (isinstance(action, DeleteObject) and action.kind == KIND)
    ]
    assert last == [DeleteObject, DeletePod]


def test_an_operator_that_starts_during_a_drain_makes_no_budget_again() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.settle()
    cluster.update(replicas=0)
    cluster.reconcile()
    cluster.turn()
    del cluster.objects[KIND, "tiny-0"]  # its predecessor died before it deleted the pods
    cluster.reports_since_s = cluster.now_s
    cluster.reconcile()
    assert cluster.pods and (KIND, "tiny-0") not in cluster.objects


def test_replicas_of_a_former_spec_are_kept_from_evictions_until_they_are_drained() -> None:
    cluster = Cluster(resource(parallelism={"spp": 2}), [node("a")])
    cluster.settle()
    cluster.load = {0: 12}
    cluster.update(parallelism={"spp": 3})
    for _ in range(6):
        cluster.reconcile()
        cluster.turn()
        if "tiny-0-g0-s0" in cluster.pods:
            assert (KIND, "tiny-0") in cluster.objects
    cluster.settle()
    assert budgets(cluster) == {"tiny-1": 3}


def test_the_budget_of_a_whole_resource_that_earlier_versions_made_is_removed() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.settle()
    cluster.objects[KIND, "tiny"] = "0123456789"
    cluster.settle()
    assert {name for kind, name in cluster.objects if kind == KIND} == {"tiny-0"}


def test_nothing_is_left_for_a_resource_without_replicas() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.settle()
    cluster.update(replicas=0)
    cluster.settle()
    assert not any(kind == KIND for kind, _ in cluster.objects)
