"""Objects of another owner: recognised by their owner, left alone, and reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from medha.topology import Coordinate
from medha_operator.resources import objects
from medha_operator.resources.actions import ApplyObject, CreatePod
from medha_operator.resources.manifests import PodAssignment, key, pod_manifest, shared_objects
from medha_operator.testing import SETTINGS, Cluster, node, resource

WORKERS, BUDGET = ("Service", "tiny-workers"), ("PodDisruptionBudget", "tiny-0")


def served(manifest: Any) -> dict[str, Any]:
    """The manifest as the API server returns it."""
    document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(manifest))
    document["metadata"] |= {"uid": "u", "resourceVersion": "7"}
    return document


def raw(document: dict[str, Any]) -> bytes:
    return msgspec.json.encode(document)


def pod(**status: Any) -> dict[str, Any]:
    start = PodAssignment(ordinal=0, at=Coordinate(0, 0, 0), spec_hash="abc")
    return served(pod_manifest(resource(), start, SETTINGS)) | {"status": status}


def without_owner(metadata: dict[str, Any]) -> None:
    del metadata["ownerReferences"]


def with_another_owner(metadata: dict[str, Any]) -> None:
    metadata["ownerReferences"][0]["kind"] = "Deployment"


def with_another_name(metadata: dict[str, Any]) -> None:
    metadata["ownerReferences"][0]["name"] = "large"


@pytest.mark.parametrize("change", [without_owner, with_another_owner, with_another_name])
def test_an_object_with_our_labels_and_another_owner_is_not_ours(
    change: Callable[[dict[str, Any]], None],
) -> None:
    service, worker = served(shared_objects(resource())[0]), pod(phase="Running")
    assert objects.owned_object("Service", raw(service)).value.resource == ("team", "tiny")
    assert objects.pod(raw(worker)).value.resource == ("team", "tiny")
    for document in (service, worker):
        change(document["metadata"])
    with pytest.raises(ValueError, match="label medha"):
        objects.owned_object("Service", raw(service))
    with pytest.raises(ValueError, match="label medha"):
        objects.pod(raw(worker))


def test_an_object_made_under_another_version_of_the_api_is_ours() -> None:
    service = served(shared_objects(resource())[0])
    service["metadata"]["ownerReferences"][0]["apiVersion"] = "medha.dev/v1beta1"
    assert objects.owned_object("Service", raw(service)).value.resource == ("team", "tiny")


@pytest.mark.parametrize(("code", "phase"), [(137, "Failed"), (0, "Succeeded")])
def test_a_dead_worker_with_a_live_sidecar_is_a_dead_pod(code: int, phase: str) -> None:
    running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    sidecar = {"name": "proxy", "state": running}
    end = {"terminated": {"exitCode": code, "reason": "Error", "message": "out of memory"}}
    both = pod(phase="Running", containerStatuses=[sidecar, {"name": "worker", "state": running}])
    assert objects.pod(raw(both)).value.view.phase == "Running"
    dead = pod(phase="Running", containerStatuses=[sidecar, {"name": "worker", "state": end}])
    view = objects.pod(raw(dead)).value.view
    assert (view.phase, view.why, view.message) == (phase, "Error", "out of memory")


def test_while_a_name_that_pods_need_is_taken_no_pod_is_created_and_the_status_says_why() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.taken = {WORKERS: "Service tiny-workers exists and belongs to Deployment web"}
    for _ in range(3):
        actions = cluster.reconcile().actions
        assert not any(isinstance(action, CreatePod) for action in actions)
        applied = [key(action.manifest) for action in actions if isinstance(action, ApplyObject)]
        assert WORKERS not in applied
        cluster.turn()
    assert cluster.condition("NamesAccepted")["status"] == "False"
    ready = cluster.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NameTaken")
    assert ready["message"] == cluster.taken[WORKERS]
    cluster.taken = {}
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.condition("NamesAccepted")["status"] == "True"


def test_a_budget_of_another_owner_is_reported_and_keeps_no_model_from_serving() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.taken = {BUDGET: "PodDisruptionBudget tiny-0 exists and belongs to nothing of Medha"}
    for _ in range(8):
        cluster.reconcile()
        cluster.turn()
    assert BUDGET not in cluster.objects
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.condition("NamesAccepted")["reason"] == "NameTaken"


def test_a_model_that_runs_goes_on_while_a_name_is_taken() -> None:
    cluster = Cluster(resource(replicas=2), [node("a")])
    cluster.settle()
    before = dict(cluster.pods)
    del cluster.objects[WORKERS]
    cluster.taken = {WORKERS: "Service tiny-workers exists and belongs to Deployment web"}
    for _ in range(5):
        cluster.reconcile()
        cluster.turn()
    assert cluster.pods == before
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.condition("NamesAccepted")["status"] == "False"
