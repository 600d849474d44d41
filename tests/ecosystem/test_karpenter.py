"""The operator with Karpenter, which makes nodes for pods that wait and empties nodes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from demos.testbed import Testbed
from tests.api.fleet import Operator
from tests.ecosystem.addons import BUILD_S, Addon, built, install_crds
from tests.ecosystem.conftest import Played

from medha.cli.local_fleet.preflight import free_ports

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(BUILD_S)

ZONE = "topology.kubernetes.io/zone"
SIZE = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "600Gi", "pods": "110"}


def instance_types() -> list[dict[str, Any]]:
    """Type of instance that each of two zones offers."""
    offerings = [
        {
            "Price": 10.0,
            "Available": True,
            "Requirements": [
                {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]},
                {"key": ZONE, "operator": "In", "values": [zone]},
            ],
        }
        for zone in ("zone-a", "zone-b")
    ]
    return [
        {
            "name": "gpu8",
            "architecture": "amd64",
            "operatingSystems": ["linux"],
            "resources": {**SIZE, "nvidia.com/gpu": "8"},
            "offerings": offerings,
        }
    ]


def node_pool(fleet: Played) -> dict[str, Any]:
    """A pool whose nodes only this fleet's pods select."""
    requirements = [
        {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]},
        {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]},
    ]
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": fleet.namespace},
        "spec": {
            "template": {
                "metadata": {"labels": fleet.selector},
                "spec": {
                    "nodeClassRef": {
                        "group": "karpenter.kwok.sh",
                        "kind": "KWOKNodeClass",
                        "name": "default",
                    },
                    "requirements": requirements,
                    "expireAfter": "Never",
                    "terminationGracePeriod": "1h",
                },
            },
            "disruption": {
                "consolidationPolicy": "WhenEmptyOrUnderutilized",
                "consolidateAfter": "5s",
                "budgets": [{"nodes": "100%"}],
            },
        },
    }


@pytest.fixture(scope="module")
def karpenter(
    bed: Testbed, kwok: Addon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Addon]:
    """Karpenter, which asks KWOK for nodes."""
    program = built("karpenter")
    install_crds(bed, "karpenter")
    bed.kubectl("create", "namespace", "karpenter")
    node_class = {"apiVersion": "karpenter.kwok.sh/v1alpha1", "kind": "KWOKNodeClass"}
    bed.kubectl("apply", "-f", "-", text=json.dumps(node_class | {"metadata": {"name": "default"}}))
    folder = tmp_path_factory.mktemp("karpenter")
    types = folder / "instance-types.json"
    types.write_text(json.dumps(instance_types()))
    metrics, health = free_ports("127.0.0.1", 2)
    settings = {
        "INSTANCE_TYPES_FILE_PATH": str(types),
        "SYSTEM_NAMESPACE": "karpenter",
        "KARPENTER_SERVICE": "karpenter",
        "DISABLE_LEADER_ELECTION": "true",
        "METRICS_PORT": str(metrics),
        "HEALTH_PROBE_PORT": str(health),
        "CPU_REQUESTS": "1000",
        "FEATURE_GATES": "",
        "KUBERNETES_MIN_VERSION": "1.19.0-0",
    }
    with contextlib.closing(Addon(bed, folder / "log", [str(program)], **settings)) as addon:
        yield addon


@pytest.fixture
def pool(bed: Testbed, fleet: Played, karpenter: Addon, kwok: Addon) -> Iterator[dict[str, Any]]:
    """The fleet's pool of nodes."""
    karpenter.check()
    kwok.check()
    pool = node_pool(fleet)
    bed.kubectl("apply", "-f", "-", text=json.dumps(pool))
    yield pool
    namespace = ("--namespace", fleet.namespace)
    bed.kubectl("delete", "medhareplicas", "--all", *namespace)
    bed.kubectl("delete", "pods", "--all", "--force", *namespace)
    bed.kubectl("delete", "nodepool", fleet.namespace)


def replica(fleet: Played, **spec: Any) -> None:
    """Create a MedhaReplica whose pods take a whole node, inside one zone."""
    placement = {"nodeSelector": fleet.selector, "packLevel": ZONE}
    wide = {"parallelism": {"tp": 8, "spp": 2}, "placement": placement, "drainTimeout": "1h"}
    fleet.create("llama", **{**wide, **spec})


def test_karpenter_makes_nodes_in_one_zone_for_a_replica_that_fits_on_none(
    fleet: Played, pool: dict[str, Any], start_operator: Start
) -> None:
    start_operator()
    replica(fleet)
    fleet.played(lambda: fleet.is_ready("llama"), "Ready on new nodes")
    bound, labels = set(fleet.bound().values()), fleet.made()
    assert len(bound) == 2 and len({labels[node][ZONE] for node in bound}) == 1
    # Karpenter sometimes begins with a node in each zone; it removes the one that stays empty.
    fleet.played(lambda: set(fleet.made()) == bound, "two nodes are left")
    assert fleet.status("llama").get("restarts", []) == []


def test_karpenter_makes_a_node_for_a_group_that_a_controller_wants(
    fleet: Played, pool: dict[str, Any], start_operator: Start
) -> None:
    start_operator()
    replica(fleet, parallelism={"tp": 8, "spp": 1, "kvp": {"min": 1, "max": 2}})
    fleet.played(lambda: fleet.is_ready("llama"), "Ready on a new node")
    first = fleet.bound()
    fleet.leaders.wanted["llama-0-g0-s0"] = 2
    fleet.played(lambda: "llama-0-g1-s0" in fleet.bound(), "the group has a node")
    fleet.played(lambda: fleet.status("llama")["groups"][0]["kvpGroups"] == 2, "it runs")
    assert first.items() <= fleet.bound().items()
    labels = fleet.made()
    assert len({labels[node][ZONE] for node in fleet.bound().values()}) == 1


def test_nodes_of_a_replica_that_a_scale_down_retired_are_removed(
    fleet: Played, pool: dict[str, Any], start_operator: Start
) -> None:
    start_operator()
    replica(fleet, replicas=2, parallelism={"tp": 8, "spp": 1})
    fleet.played(lambda: fleet.is_ready("llama"), "Ready on new nodes")
    assert len(set(fleet.bound().values())) == 2
    fleet.change("llama", {"replicas": 1})
    fleet.played(lambda: len(fleet.made()) == 1, "Karpenter removes the empty node")
    assert set(fleet.bound().values()) == set(fleet.made())
    fleet.played(lambda: fleet.is_ready("llama"))
    assert [idle for _, idle in fleet.gone] == [True]


def test_replicas_on_nodes_that_karpenter_replaces_move_once_their_requests_have_ended(
    bed: Testbed, fleet: Played, pool: dict[str, Any], start_operator: Start
) -> None:
    start_operator()
    replica(fleet, replicas=2, parallelism={"tp": 8, "spp": 1})
    fleet.played(lambda: fleet.is_ready("llama"), "Ready on new nodes")
    former, leaders = set(fleet.made()), [*fleet.bound()]
    for leader in leaders:
        fleet.leaders.load[leader] = 3
        fleet.leaders.busy.add(leader)
    template = pool["spec"]["template"]
    template["metadata"]["labels"]["image"] = "newer"  # every node has drifted from its pool
    bed.kubectl("apply", "-f", "-", text=json.dumps(pool))
    fleet.played(lambda: fleet.leaders.draining, "a replica drains")
    assert set(leaders) <= set(fleet.bound()), "a pod with requests was evicted"
    fleet.leaders.load.clear()
    fleet.leaders.busy.clear()
    fleet.played(lambda: former.isdisjoint(fleet.made()), "Karpenter empties the nodes", 300)
    fleet.played(lambda: fleet.is_ready("llama"))
    assert [idle for _, idle in fleet.gone] == [True, True]
    assert fleet.status("llama").get("restarts", []) == []
