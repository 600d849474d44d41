"""Stories of an operator whose own settings change: models keep running with what they have."""

from __future__ import annotations

from typing import Any

import msgspec

from medha.spec import MedhaReplica
from medha.topology import Coordinate
from medha_operator.planning.adoption import holds_spec
from medha_operator.resources.manifests import PodAssignment, config_map, pod_manifest
from medha_operator.testing import SETTINGS, Cluster, node, resource

UPGRADED = msgspec.structs.replace(
    SETTINGS,
    worker_image="worker:2",
    pull_policy="Always",
    router="tcp://router:1",
    log_level="debug",
)


def configs(cluster: Cluster) -> set[str]:
    return {name for kind, name in cluster.objects if kind == "ConfigMap"}


def mounted(cluster: Cluster) -> set[str]:
    return {pod.config for pod in cluster.pods.values()}


def test_other_settings_of_the_operator_restart_no_pod_and_write_nothing() -> None:
    cluster = Cluster(resource(replicas=2, parallelism={"spp": 2}), [node("a")])
    cluster.settle()
    before = dict(cluster.pods)
    cluster.settings = UPGRADED
    cluster.done.clear()
    cluster.settle()
    assert cluster.pods == before and cluster.done == []
    assert cluster.condition("Updated")["status"] == "True"


def test_pods_of_one_replica_share_the_image_and_configuration_that_it_started_with() -> None:
    cluster = Cluster(resource(parallelism={"kvp": {"min": 1, "max": 3}}), [node("a")])
    cluster.wanted = {0: 2}
    cluster.settle()
    cluster.settings = UPGRADED
    cluster.wanted = {0: 3}
    cluster.change("tiny-0-g1-s0", phase="Failed", ready=False)
    cluster.settle()
    assert len(cluster.pods) == 3 and cluster.pods["tiny-0-g1-s0"].attempt == 2
    assert {pod.image for pod in cluster.pods.values()} == {"worker:1"}
    assert len(mounted(cluster)) == 1


def test_new_replicas_start_with_the_new_settings() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.settle()
    cluster.settings = UPGRADED
    cluster.update(replicas=2)
    cluster.settle()
    assert {pod.ordinal: pod.image for pod in cluster.pods.values()} == {
        0: "worker:1",
        1: "worker:2",
    }
    assert configs(cluster) == mounted(cluster) and len(configs(cluster)) == 2
    cluster.update(replicas=2, template={"annotations": {"rolled": "today"}})
    cluster.settle()
    assert {pod.image for pod in cluster.pods.values()} == {"worker:2"}
    assert configs(cluster) == mounted(cluster)


def test_a_replica_that_starts_from_nothing_takes_the_new_settings() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.settle()
    cluster.settings = UPGRADED
    cluster.change("tiny-0-g0-s0", phase="Failed", ready=False)
    cluster.settle()
    (pod,) = cluster.pods.values()
    assert (pod.attempt, pod.image) == (2, "worker:2")
    assert configs(cluster) == {pod.config}


def test_pods_that_wait_for_a_missing_image_take_the_one_that_replaces_it() -> None:
    wrong = msgspec.structs.replace(SETTINGS, worker_image="worker:typo")
    cluster = Cluster(resource(), [node("a")], wrong)
    for _ in range(3):
        cluster.reconcile()
        cluster.turn()
    (name,) = cluster.pods
    cluster.change(name, phase="Pending", ready=False, why="ImagePullBackOff", message="no such")
    cluster.reconcile()
    assert cluster.condition("Ready")["reason"] == "ImagePull"
    cluster.settings = SETTINGS
    cluster.settle()
    assert {pod.image for pod in cluster.pods.values()} == {"worker:1"}
    assert cluster.condition("Ready")["status"] == "True"


# --- adoption ---------------------------------------------------------------------------------


RICH: dict[str, Any] = {
    "parallelism": {"tp": 2, "spp": 2},
    "placement": {"tolerations": [{"key": "a", "operator": "Exists"}]},
    "template": {
        "env": [{"name": "A", "value": ""}],
        "labels": {"team": "x"},
        "resources": {"limits": {"memory": "1024Mi", "cpu": 0.5}},
        "volumes": [{"name": "data", "emptyDir": {}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    },
}


ADAPTERS: list[dict[str, Any]] = [
    {"name": "legal", "source": {"pvc": {"claimName": "models", "path": "legal"}}},
    {"name": "poems", "source": {"uri": "https://models.example/poems"}},
]


def held(of: MedhaReplica, now: MedhaReplica) -> bool:
    """Return whether pods made for `of`, as a server with webhooks holds them, hold `now`."""
    start = PodAssignment(ordinal=1, at=Coordinate(0, 1, 0), spec_hash="0123456789")
    pod = msgspec.json.decode(msgspec.json.encode(pod_manifest(of, start, SETTINGS)))
    spec = pod["spec"]
    (worker,) = spec["containers"]
    worker["env"] = [
        {key: value for key, value in variable.items() if value} for variable in worker["env"]
    ] + [{"name": "ADDED", "value": "by a webhook"}]
    limits = worker["resources"]["limits"]
    if "memory" in limits:
        limits |= {"memory": "1Gi", "cpu": "500m"}
    spec["tolerations"].append({"key": "node.kubernetes.io/not-ready", "operator": "Exists"})
    spec["containers"].insert(0, {"name": "sidecar", "image": "proxy:1"})
    return holds_spec(now, UPGRADED, pod, config_map(of, 1, SETTINGS))


def test_a_pod_holds_the_spec_that_it_was_made_for_under_any_settings() -> None:
    assert held(resource(), resource())
    assert held(resource(**RICH), resource(**RICH, replicas=5, drainTimeout="3s"))
    image = resource(template={"image": "own:1"})
    assert held(image, image)
    adapted = resource(**RICH, adapters=ADAPTERS)
    assert held(adapted, adapted)


def test_a_pod_does_not_hold_a_spec_that_asks_for_something_else() -> None:
    template = RICH["template"]
    changes: list[dict[str, Any]] = [
        {"parallelism": {"tp": 4, "spp": 2}},
        {"device": {"kind": "Cuda", "resource": "example.com/gpu"}},
        {"scheduling": {"policy": "FCFS"}},
        {"slo": {"default": {"tpot": "31ms"}}},
        {"placement": {"tolerations": [{"key": "b", "operator": "Exists"}]}},
        {"template": template | {"image": "own:2"}},
        {"template": template | {"env": [{"name": "A", "value": "b"}]}},
        {"template": template | {"labels": {"team": "y"}}},
        {"template": template | {"resources": {"limits": {"memory": "2Gi"}}}},
        {"template": template | {"volumes": [{"name": "data", "hostPath": {"path": "/d"}}]}},
        {"template": template | {"priorityClassName": "high"}},
        {
            "model": {
                "name": "m",
                "source": {"pvc": {"claimName": "others"}},
                "maxContextTokens": 4096,
            }
        },
    ]
    changes.append({"adapters": ADAPTERS})
    changes.append({"adapters": [ADAPTERS[0] | {"name": "other"}, ADAPTERS[1]]})
    for change in changes:
        assert not held(resource(**RICH), resource(**(RICH | change))), change
