"""Objects of other people with names that the operator needs: reported, and left as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.api.fleet import Fleet, Operator, until

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(1800)

SERVICE = {"selector": {"app": "web"}, "ports": [{"port": 80}]}
BUDGET = {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "web"}}}
POD = {"containers": [{"name": "web", "image": "web:1"}]}

Place = tuple[str, str, str]
"""Path of the API, kind, name."""


def make(api: httpx.Client, fleet: Fleet, place: Place, content: dict[str, Any]) -> str:
    """Create an object as another owner does; returns its URL."""
    root, kind, name = place
    url = f"/{root}/namespaces/{fleet.namespace}/{kind}"
    labels = {"app.kubernetes.io/managed-by": "medha-operator", "medha.dev/replica": "llama"}
    body = {"metadata": {"name": name, "labels": labels}, **content}
    api.post(url, json=body).raise_for_status()
    return f"{url}/{name}"


def told(fleet: Fleet, name: str) -> bool:
    condition = fleet.condition("llama", "NamesAccepted")
    return condition.get("status") == "False" and f" {name} exists" in condition["message"]


def kept(api: httpx.Client, url: str) -> tuple[Any, ...]:
    """Return the parts that must stay: identity and content."""
    document = api.get(url).raise_for_status().json()
    metadata = document["metadata"]
    parts = (document.get("spec"), document.get("data"), metadata["labels"])
    return metadata["uid"], metadata.get("ownerReferences"), *parts


@pytest.mark.parametrize(
    ("place", "content"),
    [
        (("api/v1", "services", "llama-workers"), {"spec": SERVICE}),
        (("api/v1", "secrets", "medha-worker-keys"), {"data": {"a": "Yg=="}}),
        (("api/v1", "pods", "llama-0-g0-s1"), {"spec": POD}),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_a_name_that_pods_need_is_reported_and_used_once_it_is_free(
    fleet: Fleet, start_operator: Start, api: httpx.Client, place: Place, content: dict[str, Any]
) -> None:
    theirs = make(api, fleet, place, content)
    before = kept(api, theirs)
    start_operator()
    fleet.create("llama")
    until(lambda: told(fleet, place[2]))
    ready = fleet.condition("llama")
    assert (ready["status"], ready["reason"]) == ("False", "NameTaken")
    assert "delete or rename it" in ready["message"]
    assert kept(api, theirs) == before
    fleet.api.request("DELETE", theirs, json={"gracePeriodSeconds": 0}).raise_for_status()
    fleet.played(lambda: fleet.is_ready("llama"))
    assert fleet.condition("llama", "NamesAccepted")["status"] == "True"


def test_a_budget_of_the_same_name_is_reported_and_outlives_the_model(
    fleet: Fleet, start_operator: Start, api: httpx.Client
) -> None:
    place = ("apis/policy/v1", "poddisruptionbudgets", "llama-0")
    theirs = make(api, fleet, place, {"spec": BUDGET})
    before = kept(api, theirs)
    start_operator()
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama") and told(fleet, "llama-0"))
    fleet.change("llama", {"replicas": 0})
    fleet.played(lambda: not fleet.pods())
    assert kept(api, theirs) == before


def test_what_the_operator_made_is_repaired_although_its_labels_are_gone(
    fleet: Fleet, start_operator: Start, api: httpx.Client
) -> None:
    start_operator()
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"))
    url = f"/api/v1/namespaces/{fleet.namespace}/services/llama-workers"
    headers = {"Content-Type": "application/merge-patch+json"}
    api.patch(url, json={"metadata": {"labels": None}}, headers=headers).raise_for_status()
    until(lambda: "medha.dev/replica" in (api.get(url).json()["metadata"].get("labels") or {}))


def test_keys_that_are_deleted_at_rest_are_made_again(
    fleet: Fleet, start_operator: Start, api: httpx.Client
) -> None:
    start_operator()
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"))
    url = f"/api/v1/namespaces/{fleet.namespace}/secrets/medha-worker-keys"
    before = api.get(url).json()
    for _ in range(2):
        api.delete(url).raise_for_status()
        until(lambda: api.get(url).is_success)
    assert api.get(url).json()["data"] == before["data"]


def test_a_worker_that_dies_while_its_sidecar_lives_is_started_again(
    fleet: Fleet, start_operator: Start
) -> None:
    start_operator()
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"))
    before = fleet.pods()["llama-0-g0-s1"]["metadata"]["uid"]
    ended = {"terminated": {"exitCode": 1, "reason": "Error"}}
    shared = {"image": "i", "imageID": "", "ready": False, "restartCount": 0}
    fleet.set_not_ready(
        "llama-0-g0-s1",
        {
            "containerStatuses": [
                shared | {"name": "worker", "state": ended},
                shared | {"name": "proxy", "state": {"running": {}}, "ready": True},
            ]
        },
    )

    def again() -> bool:
        pod = fleet.pods().get("llama-0-g0-s1")
        return pod is not None and pod["metadata"]["uid"] != before

    fleet.played(again)
    fleet.played(lambda: fleet.is_ready("llama"))
