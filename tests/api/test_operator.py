"""The operator on a real API server: changes to a resource, and the operator's reaction."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import zmq
from tests.api.fleet import LEASE_S, NOW, RESYNC_S, Fleet, Operator, until
from tests.api.proxy import Proxy
from tests.api.stage import FLOWS, SILENT_S

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(1800)


def test_a_resource_becomes_ready_pods_and_is_left_alone_after_that(
    fleet: Fleet, start_operator: Start, proxy: Proxy
) -> None:
    operator = start_operator()
    until(operator.leads)
    fleet.create("llama", replicas=2)
    fleet.played(lambda: fleet.is_ready("llama"))
    assert sorted(fleet.pods()) == [
        "llama-0-g0-s0",
        "llama-0-g0-s1",
        "llama-1-g0-s0",
        "llama-1-g0-s1",
    ]
    status = fleet.status("llama")
    assert status["replicas"] == status["readyReplicas"] == 2

    def placed() -> int:
        events = fleet.list("events", "apis/events.k8s.io/v1")
        return [event["reason"] for event in events].count("Placed")

    until(placed, "the Events follow the status")
    settle(proxy)
    before = operator.writes()
    time.sleep(4.0 * RESYNC_S)
    assert operator.writes() == before
    assert placed() == 2
    until(operator.alive)
    assert operator.end() == 0


def test_no_pod_of_a_gang_is_ungated_before_all_of_them_exist(
    fleet: Fleet, start_operator: Start
) -> None:
    bindings: list[tuple[str, bool]] = []
    start_operator()
    fleet.create("gang", parallelism={"spp": 4})

    def all_ungated() -> bool:
        pods = fleet.pods().values()
        bindings.append(
            (str(len(pods)), all(not pod["spec"].get("schedulingGates") for pod in pods))
        )
        some = any(not pod["spec"].get("schedulingGates") for pod in pods)
        assert len(pods) == 4 or not some
        return len(pods) == 4 and bindings[-1][1]

    until(all_ungated)


def test_pods_get_matching_keys(api: httpx.Client, fleet: Fleet, start_operator: Start) -> None:
    start_operator()
    fleet.create("llama")
    until(lambda: len(fleet.pods()) == 2)
    keys = secret(api, fleet, "medha-worker-keys")
    whole = secret(api, fleet, "medha-keys")
    for pair in ("router", "controller", "rank"):
        private = whole["data"][f"{pair}.secret"]
        public = base64.b64decode(whole["data"][f"{pair}.public"]).strip()
        assert zmq.curve_public(base64.b64decode(private).strip()) == public
    assert "router.secret" not in keys["data"]
    assert keys["data"].items() <= whole["data"].items()
    assert [owner["name"] for owner in keys["metadata"]["ownerReferences"]] == ["llama"]
    assert "ownerReferences" not in whole["metadata"]


def test_a_later_release_keeps_the_keys_of_pods_that_run(
    api: httpx.Client, fleet: Fleet, start_operator: Start
) -> None:
    """Groups that join a running controller need its keys; routers are new with their release."""
    operator = start_operator()
    fleet.create("llama")
    until(lambda: len(fleet.pods()) == 2)
    before = secret(api, fleet, "medha-keys")["data"]
    operator.kill()
    path = f"/api/v1/namespaces/{fleet.namespace}/secrets/medha-keys"
    assert api.delete(path).status_code == 200  # as the former release is uninstalled
    start_operator()
    after = until(lambda: api.get(path).json().get("data"))
    kept = {name for name in before if before[name] == after[name]}
    assert kept == {"controller.public", "controller.secret", "rank.public", "rank.secret"}
    until(lambda: secret(api, fleet, "medha-worker-keys")["data"].items() <= after.items())


def test_replicas_follow_the_scale_subresource_up_and_down(
    api: httpx.Client, fleet: Fleet, start_operator: Start
) -> None:
    start_operator()
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"))

    def settle(count: int) -> None:
        merge = {"Content-Type": "application/merge-patch+json"}
        change = {"spec": {"replicas": count}}
        answer = api.patch(fleet.path("llama", "scale"), json=change, headers=merge)
        assert answer.status_code == 200, answer.text
        fleet.played(lambda: fleet.is_ready("llama"))
        fleet.played(lambda: len(fleet.pods()) == 2 * count)
        fleet.played(lambda: scale(api, fleet).get("replicas") == count)

    settle(3)
    settle(1)
    assert scale(api, fleet)["selector"] == "medha.dev/replica=llama,medha.dev/role=leader"


def test_a_change_is_reconciled_at_once_and_not_with_the_resync(
    fleet: Fleet, start_operator: Start
) -> None:
    until(start_operator(MEDHA_RESYNC_S="60").leads)
    waits = []
    for name in ("a", "b", "c"):
        began = time.monotonic()
        fleet.create(name)
        until(fleet.has_pods(name))
        waits.append(time.monotonic() - began)
    assert min(waits) < 20.0  # 0.2 s on an idle machine; the next resync is a minute away


def test_an_update_creates_the_new_replica_before_the_old_one_is_deleted(
    fleet: Fleet, start_operator: Start, proxy: Proxy
) -> None:
    start_operator()
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"))
    before, done = hashes(fleet), len(proxy.done)
    fleet.change("llama", {"template": {"image": "localhost/other:1"}})

    def updated() -> bool:
        fleet.play()
        pods = fleet.pods().values()
        ready = [pod for pod in pods if is_ready(pod)]
        assert len(ready) >= 2, "the old replica went before the new one was ready"
        return len(pods) == 2 and not before & hashes(fleet)

    until(updated)
    verbs = [
        reply.call.verb
        for reply in proxy.done[done:]
        if reply.call.verb in ("POST", "DELETE")
        and "/pods" in reply.call.path
        and reply.status < 300
    ]
    assert verbs[:2] == ["POST"] * 2 and set(verbs[2:]) == {"DELETE"}
    fleet.played(lambda: fleet.is_ready("llama"))
    images = {pod["spec"]["containers"][0]["image"] for pod in fleet.pods().values()}
    assert images == {"localhost/other:1"}
    configs = [document["metadata"]["name"] for document in fleet.list("configmaps")]
    until(lambda: len([name for name in configs if name.startswith("llama-")]) >= 1)
    until(lambda: len(ours(fleet, "configmaps")) == 1)


def test_a_deleted_pod_is_created_again(fleet: Fleet, start_operator: Start) -> None:
    start_operator()
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"))
    before = {name: pod["metadata"]["uid"] for name, pod in fleet.pods().items()}
    fleet.remove("llama-0-g0-s1")

    def made_again() -> bool:
        after = {name: pod["metadata"]["uid"] for name, pod in fleet.pods().items()}
        other = after.get("llama-0-g0-s1") not in (None, before["llama-0-g0-s1"])
        return other and after.keys() == before.keys() and fleet.is_ready("llama")

    fleet.played(made_again)


def test_every_object_is_owned_by_the_resource_and_none_is_made_for_a_deleted_one(
    api: httpx.Client, fleet: Fleet, start_operator: Start, proxy: Proxy
) -> None:
    operator = start_operator(MEDHA_WORKER_FLOWS=FLOWS)
    uid = fleet.create("llama")["metadata"]["uid"]
    fleet.played(lambda: fleet.is_ready("llama"))
    kinds = (
        ("pods", "api/v1"),
        ("services", "api/v1"),
        ("configmaps", "api/v1"),
        ("poddisruptionbudgets", "apis/policy/v1"),
        ("networkpolicies", "apis/networking.k8s.io/v1"),
    )
    for kind, group in kinds:
        documents = ours(fleet, kind, group)
        assert documents
        for document in documents:
            assert [owner["uid"] for owner in document["metadata"]["ownerReferences"]] == [uid]
    settle(proxy)
    api.delete(fleet.path("llama")).raise_for_status()
    until(lambda: api.get(fleet.path("llama")).status_code == 404)
    # Until the operator has seen the deletion, a removed pod is a loss to repair.
    until(lambda: operator.leads() and not operator.shown("medha_replica_condition"))
    for name in list(fleet.pods()):
        fleet.remove(name)  # the garbage collector's part
    time.sleep(3.0 * RESYNC_S)
    assert fleet.pods() == {}


def test_each_replica_has_a_policy_while_it_has_pods(fleet: Fleet, start_operator: Start) -> None:
    def policies() -> dict[str, dict[str, Any]]:
        policies = fleet.list("networkpolicies", "apis/networking.k8s.io/v1")
        return {policy["metadata"]["name"]: policy["spec"] for policy in policies}

    start_operator(MEDHA_WORKER_FLOWS=FLOWS)
    fleet.create("llama", replicas=2)
    until(lambda: len(fleet.pods()) == 4)
    assert set(policies()) == {"llama-0", "llama-1"}  # it exists before the first pod
    own = {"matchLabels": {"medha.dev/replica": "llama", "medha.dev/ordinal": "1"}}
    assert policies()["llama-1"]["ingress"] == [
        {"from": [{"podSelector": own}]},
        {"ports": [{"port": 8091, "protocol": "TCP"}]},
    ]
    fleet.change("llama", {"replicas": 1})
    fleet.played(lambda: set(policies()) == {"llama-0"})
    assert not any(name.startswith("llama-1") for name in fleet.pods())


def test_a_spec_refused_by_the_operator_alone_leaves_the_fleet_running(
    fleet: Fleet, start_operator: Start
) -> None:
    operator = start_operator()
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"))
    before = hashes(fleet)
    fleet.change("llama", {"template": {"resources": {"requests": {"cpu": "plenty"}}}})
    until(lambda: fleet.condition("llama").get("status") == "False")
    assert "plenty" in fleet.condition("llama")["message"]
    assert hashes(fleet) == before
    until(operator.alive)
    fleet.change("llama", {"template": {"resources": {"requests": None}}})
    fleet.played(lambda: fleet.is_ready("llama"))


def test_a_model_missing_on_the_node_is_reported_from_the_kubelets_event(
    api: httpx.Client, fleet: Fleet, start_operator: Start
) -> None:
    operator = start_operator()
    fleet.create("llama", parallelism={"spp": 1})
    until(lambda: "llama-0-g0-s0" in fleet.pods())
    pod = fleet.pods()["llama-0-g0-s0"]
    fleet.play()  # bound, but not started
    note = 'MountVolume.SetUp failed for volume "model" : hostPath type check failed: /models is '
    about = {"kind": "Pod", "namespace": fleet.namespace, "name": pod["metadata"]["name"]}
    event = {
        "metadata": {"name": "llama-0-g0-s0.1"},
        "type": "Warning",
        "reason": "FailedMount",
        "involvedObject": about | {"uid": pod["metadata"]["uid"]},
        "count": 7,
        "message": note + "not a directory",
        "source": {"component": "kubelet"},
        "firstTimestamp": NOW,
        "lastTimestamp": NOW,
    }
    reply = api.post(f"/api/v1/namespaces/{fleet.namespace}/events", json=event)
    assert reply.status_code == 201, reply.text
    until(lambda: fleet.condition("llama").get("reason") == "ModelMissing")
    message = fleet.condition("llama")["message"]
    assert message.startswith(
        "the directory /models cannot be mounted into pod llama-0-g0-s0 on node"
    )
    assert message.endswith(
        "put the whole checkpoint there on every node, or correct spec.model.source.hostPath.path"
    )
    fleet.played(lambda: fleet.is_ready("llama"))  # another owner created it
    until(operator.alive)


def test_a_refused_pod_is_reported_and_a_better_spec_repairs_it(
    fleet: Fleet, start_operator: Start
) -> None:
    operator = start_operator()
    fleet.create("llama", template={"env": [{"name": "not a name=", "value": "x"}]})
    until(lambda: fleet.condition("llama").get("status") == "False")
    until(lambda: "not a name=" in fleet.condition("llama")["message"])
    until(operator.alive)
    fleet.change("llama", {"template": {"env": []}})
    fleet.played(lambda: fleet.is_ready("llama"))


def test_one_of_two_operators_writes_and_the_other_takes_over(
    fleet: Fleet, start_operator: Start
) -> None:
    first = start_operator("first")
    until(first.leads)
    second = start_operator("second")
    until(second.ready)
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"))
    assert second.writes() == 0
    first.kill()
    fleet.remove("llama-0-g0-s0")
    began = time.monotonic()
    until(second.leads)
    assert time.monotonic() - began < LEASE_S + 60.0
    fleet.played(lambda: "llama-0-g0-s0" in fleet.pods() and fleet.is_ready("llama"))
    third = start_operator("third")
    until(third.ready)
    assert second.end() == 0  # it ends and releases the Lease
    until(third.leads)


def test_only_the_leader_exports_conditions_and_only_of_existing_resources(
    fleet: Fleet, start_operator: Start
) -> None:
    first = start_operator("first")
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"))
    ready = f'condition="Ready",name="llama",namespace="{fleet.namespace}"'
    until(lambda: first.shown("medha_replica_condition").get(ready) == 1.0)
    second = start_operator("second")
    until(second.ready)
    assert second.shown("medha_replica_condition") == {}
    assert first.end() == 0
    until(lambda: second.shown("medha_replica_condition").get(ready) == 1.0)  # nothing has changed
    fleet.api.delete(fleet.path("llama"))
    fleet.played(lambda: second.shown("medha_replica_condition") == {})


def settle(proxy: Proxy) -> None:
    """Wait until nothing is written for longer than the pause between two messages of a status."""
    until(lambda: time.monotonic() - proxy.last_write_s() > SILENT_S)


def secret(api: httpx.Client, fleet: Fleet, name: str) -> dict[str, Any]:
    document: dict[str, Any] = api.get(
        f"/api/v1/namespaces/{fleet.namespace}/secrets/{name}"
    ).json()
    return document


def scale(api: httpx.Client, fleet: Fleet) -> dict[str, Any]:
    status: dict[str, Any] = api.get(fleet.path("llama", "scale")).json()["status"]
    return status


def hashes(fleet: Fleet) -> set[str]:
    return {pod["metadata"]["labels"]["medha.dev/spec-hash"] for pod in fleet.pods().values()}


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions
    )


def ours(fleet: Fleet, kind: str, group: str = "api/v1") -> list[dict[str, Any]]:
    return [
        document
        for document in fleet.list(kind, group)
        if "medha.dev/replica" in document["metadata"].get("labels", {})
    ]
