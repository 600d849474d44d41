"""The operator with a real kube-scheduler: plans are followed where they can be, and corrected
where the scheduler knows more."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tests.api.fleet import Fleet, Operator, until
from tests.api.server import ApiServer
from tests.conftest import program

from medha.cli.local_fleet.child_process import killed_with_parent

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(1800)

RACK = "topology.kubernetes.io/rack"
SPEED = 5.0
"""Seconds of the operator's own time in one: what it waits for comes sooner."""


@pytest.fixture(scope="module")
def scheduler(
    api_server: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a kube-scheduler with its defaults."""
    log = tmp_path_factory.mktemp("scheduler") / "log"
    flags = [f"--{kind}kubeconfig={api_server.kubeconfig}" for kind in ("", "authorization-")]
    flags += [f"--authentication-kubeconfig={api_server.kubeconfig}", "--leader-elect=false"]
    flags += ["--bind-address=127.0.0.1", "--secure-port=0", "--v=2"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            killed_with_parent(str(program("kube-scheduler")), *flags), stdout=file, stderr=file
        )
        yield process
        process.terminate()
        process.wait(20)


@pytest.fixture
def cluster(
    api: httpx.Client, namespace: str, crd: None, scheduler: subprocess.Popen[bytes]
) -> Iterator[Fleet]:
    """A namespace without nodes, whose pods the scheduler binds."""
    assert scheduler.poll() is None
    fleet = Fleet(api, namespace, nodes=0)
    fleet.scheduled = True
    yield fleet
    fleet.close()


def racks(cluster: Fleet, *sizes: int) -> None:
    """Add racks `r1`, … of nodes with eight devices."""
    for number, size in enumerate(sizes, 1):
        for _ in range(size):
            cluster.add_node(f"r{number}")


def replica(cluster: Fleet, name: str = "llama", **spec: Any) -> None:
    """Create a MedhaReplica whose pods take a whole node, unless the spec differs."""
    cluster.create(name, **{"parallelism": {"tp": 8, "spp": 2}, **spec})


def bound(cluster: Fleet) -> dict[str, str]:
    """The node of each bound pod."""
    return {
        name: pod["spec"]["nodeName"]
        for name, pod in sorted(cluster.pods().items())
        if "nodeName" in pod["spec"]
    }


def planned(cluster: Fleet) -> dict[str, str]:
    """The node that each pod prefers."""
    return {
        name: pod["metadata"].get("annotations", {}).get("medha.dev/node", "")
        for name, pod in sorted(cluster.pods().items())
    }


def refused(cluster: Fleet) -> dict[str, str]:
    """The scheduler's message about each pod that it found no node for."""
    return {
        name: condition["message"]
        for name, pod in sorted(cluster.pods().items())
        for condition in pod["status"].get("conditions", ())
        if condition.get("reason") == "Unschedulable" and not pod["spec"].get("schedulingGates")
    }


def where(cluster: Fleet) -> set[str]:
    """The racks of all bound pods."""
    labels = {
        node["metadata"]["name"]: node["metadata"]["labels"][RACK]
        for node in cluster.api.get("/api/v1/nodes").json()["items"]
        if node["metadata"]["name"] in cluster.nodes
    }
    return {labels[node] for node in bound(cluster).values()}


# --- plans that are followed ----------------------------------------------------------------------

PACKED = {"packLevel": RACK}
LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "stages fill a node": ((2,), {"parallelism": {"tp": 2, "spp": 4}}),
    "a gang inside the rack with room": (
        (1, 3, 1),
        {"parallelism": {"tp": 8, "spp": 3}} | {"placement": PACKED},
    ),
    "two groups in one rack": (
        (3, 4),
        {"parallelism": {"tp": 8, "spp": 2, "kvp": {"min": 2, "max": 2}}, "placement": PACKED},
    ),
    "replicas keep apart": ((2, 2), {"replicas": 2, "parallelism": {"tp": 2, "spp": 2}}),
    "more replicas than nodes": ((2,), {"replicas": 5, "parallelism": {"tp": 1, "spp": 1}}),
    "the rack that can grow": (
        (1, 3),
        {"parallelism": {"tp": 8, "spp": 1, "kvp": {"min": 1, "max": 3}}, "placement": PACKED},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_scheduler_follows_a_plan_that_has_room(
    cluster: Fleet, start_operator: Start, layout: str
) -> None:
    sizes, spec = LAYOUTS[layout]
    racks(cluster, *sizes)
    start_operator()
    placement = {"nodeSelector": cluster.selector, **spec.get("placement", {})}
    replica(cluster, **{**spec, "placement": placement})
    cluster.played(lambda: cluster.is_ready("llama"))
    assert bound(cluster) == planned(cluster) and len(bound(cluster)) >= 1


def test_the_fullest_node_is_preferred_though_the_scheduler_would_take_an_empty_one(
    cluster: Fleet, start_operator: Start
) -> None:
    racks(cluster, 3)
    start_operator()
    replica(cluster, "one", parallelism={"tp": 4, "spp": 1})
    cluster.played(lambda: cluster.is_ready("one"))
    replica(cluster, "two", parallelism={"tp": 2, "spp": 2})
    cluster.played(lambda: cluster.is_ready("two"))
    assert len(set(bound(cluster).values())) == 1


# --- pods that wait for a node --------------------------------------------------------------------


def test_pods_without_room_wait_unschedulable_and_take_nodes_of_a_new_rack(
    cluster: Fleet, start_operator: Start
) -> None:
    racks(cluster, 1, 1)
    start_operator()
    replica(
        cluster,
        placement={"nodeSelector": cluster.selector, "packLevel": RACK},
        parallelism={"tp": 8, "spp": 3},
    )
    until(lambda: len(refused(cluster)) + len(bound(cluster)) == 3, "the scheduler answers")
    for pod in cluster.pods().values():
        affinity = pod["spec"]["affinity"]
        assert "nodeAffinity" not in affinity and "matchFields" not in str(affinity)
        assert not pod["spec"].get("schedulingGates")
    until(lambda: cluster.condition("llama", "Placed").get("reason") == "TooFewFree")
    assert cluster.status("llama").get("restarts", []) == []


def test_a_replica_larger_than_any_node_gets_the_node_that_is_made_for_it(
    cluster: Fleet, start_operator: Start
) -> None:
    racks(cluster, 1)
    start_operator()
    selector = {**cluster.selector, "pool": "large"}
    replica(cluster, parallelism={"tp": 8, "spp": 1}, placement={"nodeSelector": selector})
    until(lambda: refused(cluster), "the scheduler answers")
    large = cluster.add_node("r9", pool="large")
    cluster.played(lambda: cluster.is_ready("llama"))
    assert bound(cluster) == {"llama-0-g0-s0": large}


@pytest.mark.parametrize(("new", "nodes"), [("r9", 3), ("r1", 1)])
def test_a_gang_that_held_a_part_of_a_rack_takes_a_new_rack_or_what_the_old_one_grows_by(
    cluster: Fleet, start_operator: Start, new: str, nodes: int
) -> None:
    racks(cluster, 2, 1)
    start_operator(speed=SPEED)
    packed = {"nodeSelector": cluster.selector, "packLevel": RACK}
    replica(cluster, placement=packed, parallelism={"tp": 8, "spp": 3})
    until(lambda: bound(cluster) and refused(cluster), "it holds a part of a rack")
    cluster.played(lambda: len(refused(cluster)) == 3, "all of it would fit a new rack")
    for _ in range(nodes):
        cluster.add_node(new)
    cluster.played(lambda: cluster.is_ready("llama"))
    assert where(cluster) == {new}
    assert cluster.status("llama").get("restarts", []) == []


# --- what the operator does not see ---------------------------------------------------------------


def test_a_gpu_pod_of_another_namespace_moves_the_replica_to_another_rack(
    cluster: Fleet, start_operator: Start, api: httpx.Client
) -> None:
    """Two racks could take the gang; in the one that the plan chooses, a node is in use."""
    racks(cluster, 2, 2)
    taken = {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"}}
    pod = {
        "metadata": {"name": f"foreign-{cluster.namespace}"},
        "spec": {
            "nodeName": cluster.nodes[0],
            "containers": [{"name": "c", "image": "i", "resources": taken}],
        },
    }
    api.post("/api/v1/namespaces/default/pods", json=pod).raise_for_status()
    start_operator(speed=SPEED)
    replica(cluster, placement={"nodeSelector": cluster.selector, "packLevel": RACK})
    cluster.played(lambda: cluster.is_ready("llama"))
    assert where(cluster) == {"r2"}
    assert cluster.status("llama").get("restarts", []) == []


def test_a_local_volume_brings_the_replica_to_its_node(
    cluster: Fleet, start_operator: Start, api: httpx.Client
) -> None:
    racks(cluster, 1, 1)
    _local_volume(api, cluster.namespace, cluster.nodes[1])
    start_operator(speed=SPEED)
    model = {"name": "m", "source": {"pvc": {"claimName": "weights"}}, "maxContextTokens": 4096}
    replica(
        cluster,
        model=model,
        parallelism={"tp": 2, "spp": 2},
        placement={"nodeSelector": cluster.selector, "packLevel": RACK},
    )
    cluster.played(lambda: cluster.is_ready("llama"))
    assert set(bound(cluster).values()) == {cluster.nodes[1]}
    assert cluster.status("llama").get("restarts", []) == []


def _local_volume(api: httpx.Client, namespace: str, node: str) -> None:
    """Make the claim `weights`, bound to a volume that only this node has."""
    name, room = f"weights-{namespace}", {"storage": "1Gi"}
    rule = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    volume = {
        "metadata": {"name": name},
        "spec": {
            "capacity": room,
            "accessModes": ["ReadOnlyMany"],
            "local": {"path": "/weights"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}},
            "claimRef": {"namespace": namespace, "name": "weights"},
        },
    }
    api.post("/api/v1/persistentvolumes", json=volume).raise_for_status()
    claim = {
        "metadata": {
            "name": "weights",
            "annotations": {"pv.kubernetes.io/bind-completed": "yes"},
        },
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "storageClassName": "",
            "volumeName": name,
            "resources": {"requests": room},
        },
    }
    path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    api.post(path, json=claim).raise_for_status()
    merge = {"Content-Type": "application/merge-patch+json"}
    bound_claim = {"status": {"phase": "Bound", "capacity": room, "accessModes": ["ReadOnlyMany"]}}
    api.patch(f"{path}/weights/status", json=bound_claim, headers=merge).raise_for_status()


# --- gangs that compete ---------------------------------------------------------------------------


def test_two_gangs_of_three_under_a_quota_of_three_pods_run_one_after_the_other(
    cluster: Fleet, start_operator: Start, api: httpx.Client
) -> None:
    racks(cluster, 2)
    path = f"/api/v1/namespaces/{cluster.namespace}/resourcequotas"
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "3"}}}
    api.post(path, json=quota).raise_for_status()

    def count() -> None:
        """Count as the quota controller does, which does not run here; not if a pod is admitted
        meanwhile."""
        at = {"resourceVersion": api.get(f"{path}/q").json()["metadata"]["resourceVersion"]}
        used = {"hard": {"pods": "3"}, "used": {"pods": str(len(cluster.list("pods")))}}
        merge = {"Content-Type": "application/merge-patch+json"}
        body = {"metadata": at, "status": used}
        reply = api.patch(f"{path}/q/status", json=body, headers=merge)
        assert reply.status_code in (200, 409), reply.text

    count()
    start_operator(speed=SPEED)
    for name in ("one", "two"):
        replica(cluster, name, parallelism={"tp": 1, "spp": 3})

    def served() -> list[str]:
        cluster.play()
        count()
        return [name for name in ("one", "two") if cluster.is_ready(name)]

    (first,) = until(served)
    (second,) = {"one", "two"} - {first}
    until(lambda: served() and cluster.condition(second).get("reason") == "QuotaExceeded")
    until(lambda: served() and {re.sub("-.*", "", name) for name in cluster.pods()} == {first})
    cluster.change(first, {"replicas": 0})
    until(lambda: second in served())
    assert cluster.status(second).get("restarts", []) == []


def test_two_gangs_that_need_the_same_nodes_do_not_share_them_for_ever(
    cluster: Fleet, start_operator: Start
) -> None:
    """Nodes appear one by one, so that each gang may get some."""
    start_operator(speed=SPEED)
    for name in ("one", "two"):
        replica(cluster, name, parallelism={"tp": 8, "spp": 3})
    until(lambda: len(refused(cluster)) == 6)
    for _ in range(3):
        cluster.add_node()
    cluster.played(lambda: [name for name in ("one", "two") if cluster.is_ready(name)])
    assert not [name for name in ("one", "two") if cluster.status(name).get("restarts")]


# --- devices by claim -----------------------------------------------------------------------------


def test_claims_of_devices_reach_the_pod_in_place_of_counted_devices(
    cluster: Fleet, start_operator: Start
) -> None:
    start_operator()
    claims = [{"name": "gpus", "resourceClaimTemplateName": "one-gpu"}]
    template = {"resources": {"claims": [{"name": "gpus"}]}, "resourceClaims": claims}
    replica(cluster, parallelism={"tp": 1, "spp": 1}, template=template)
    (pod,) = until(cluster.pods).values()
    assert pod["spec"]["resourceClaims"] == claims
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["claims"] == [{"name": "gpus"}]
    assert "nvidia.com/gpu" not in container["resources"]["requests"]


@pytest.mark.parametrize(
    ("template", "kind", "sentence"),
    [
        ({"resources": {"requests": {"memory": "900Ti"}}}, "PlacementUnsatisfiable", "memory"),
        ({"schedulerName": "nobody"}, "Placed", "by spec.template.schedulerName, nobody"),
    ],
)
def test_a_request_that_nothing_can_serve_is_told_within_forty_seconds(
    cluster: Fleet, start_operator: Start, template: dict[str, Any], kind: str, sentence: str
) -> None:
    racks(cluster, 1)
    until(start_operator().leads)
    replica(cluster, template=template, parallelism={"tp": 1})
    until(lambda: sentence in cluster.condition("llama", kind).get("message", ""), within_s=40.0)
    assert cluster.condition("llama")["status"] == "False"
    assert bound(cluster) == {}
