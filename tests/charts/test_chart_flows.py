"""Network policies allow the flows of docs/kubernetes.md, and no others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from medha_operator.resources.manifests import network_policies
from medha_operator.settings import from_environment
from medha_operator.testing import resource

PAGE = (Path(__file__).resolve().parents[2] / "docs/kubernetes.md").read_text()
Objects = list[dict[str, Any]]

PORTS = (53, 80, 443, 6443, 7800, 7801, 7803, 7804, 7900, 7901, 8000, 8001, 8081, 8090, 8091, 40000)


class Actor(NamedTuple):
    """A pod, or (without a namespace) an address outside the cluster."""

    namespace: str
    labels: dict[str, str]


def component(name: str) -> Actor:
    labels = {"app.kubernetes.io/name": f"medha-{name}", "app.kubernetes.io/instance": "medha"}
    return Actor("medha-system", labels)


def replica(role: str, namespace: str, ordinal: int = 0) -> Actor:
    labels = {"medha.dev/replica": "tiny", "medha.dev/ordinal": str(ordinal)}
    return Actor(namespace, {**labels, "medha.dev/role": role})


ACTORS = {
    "operator": component("operator"),
    "router": component("router"),
    "test": component("test"),
    "leader": replica("leader", "models"),
    "worker": replica("worker", "models"),
    "monitoring": Actor("monitoring", {"app": "prometheus"}),
    "anybody": Actor("", {}),
}
OTHERS = {"monitoring", "anybody"}
VALUES = {
    "networkPolicy.monitoring": [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ],
}


def policies_of(objects: Objects) -> Objects:
    """The policies of the chart, and those that its operator makes for two replicas."""
    (operator,) = [
        document
        for document in objects
        if document["kind"] == "Deployment" and document["metadata"]["name"] == "medha-operator"
    ]
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    environment = {
        variable["name"]: variable.get("value", "given") for variable in container["env"]
    }
    settings = from_environment(
        {name: environment[name] for name in environment if name != "MEDHA_REPORT_S"}
    )
    tiny = msgspec.structs.replace(resource("tiny"), namespace="models")
    return [
        *(document for document in objects if document["kind"] == "NetworkPolicy"),
        *network_policies(tiny, (0, 1), settings),
    ]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "Exists"
        if expression["key"] not in labels:
            return False
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


def matches(peer: dict[str, Any], actor: Actor, own: str) -> bool:
    """Return true if a NetworkPolicyPeer of a policy in namespace `own` means this pod."""
    assert peer.keys() <= {"namespaceSelector", "podSelector"}
    place = {"kubernetes.io/metadata.name": actor.namespace}
    inside = (
        selects(peer["namespaceSelector"], place)
        if "namespaceSelector" in peer
        else actor.namespace == own
    )
    return actor.namespace != "" and inside and selects(peer.get("podSelector", {}), actor.labels)


def lets(policies: Objects, actor: Actor, other: Actor, port: int, way: str) -> bool:
    """Return true if `actor` may send to the other (Egress) or receive from it (Ingress)."""
    peers = "from" if way == "Ingress" else "to"
    bound = False
    for policy in policies:
        own = policy["metadata"].get("namespace", "medha-system")
        spec = policy["spec"]
        if actor.namespace != own or not selects(spec["podSelector"], actor.labels):
            continue
        bound |= way in spec["policyTypes"]
        for rule in spec[way.lower()]:
            at = {
                number
                for port in rule.get("ports", ())
                for number in range(port["port"], port.get("endPort", port["port"]) + 1)
            }
            whom = rule.get(peers)
            known = whom is None or any(matches(peer, other, own) for peer in whom)
            if known and (not at or port in at):
                return True
    return not bound


def flows(objects: Objects) -> Iterator[tuple[str, str, int]]:
    """The flows that the policies allow between actors, at least one of them ours."""
    policies = policies_of(objects)
    for (source, sends), (target, receiver_policies) in itertools.product(ACTORS.items(), repeat=2):
        for port in PORTS if {source, target} - OTHERS else ():
            if lets(policies, sends, receiver_policies, port, "Egress") and lets(
                policies, receiver_policies, sends, port, "Ingress"
            ):
                yield source, target, port


def documented() -> set[tuple[str, str, int]]:
    """The flows in the page's table."""
    flows_listed: set[tuple[str, str, int]] = set()
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].split(", ")[0] in ACTORS:
            ports = PORTS if cells[2] == "all" else [int(port) for port in cells[2].split(", ")]
            flows_listed |= set(itertools.product(named(cells[0]), named(cells[1]), ports))
    return flows_listed


def named(cell: str) -> set[str]:
    """The actors of a cell; "anybody" is every actor that is not ours."""
    return set(cell.split(", ")) | (OTHERS if "anybody" in cell else set())


def test_the_policies_allow_the_documented_flows_and_no_others(
    render: Callable[..., Objects],
) -> None:
    assert set(flows(render(VALUES))) == documented()


def test_a_controller_of_another_namespace_reaches_only_the_router(
    render: Callable[..., Objects],
) -> None:
    policies = policies_of(render(VALUES))
    stranger = replica("leader", "elsewhere")
    reached = {
        (name, port)
        for name, actor in ACTORS.items()
        for port in PORTS
        if actor.namespace not in ("", "monitoring")
        and lets(policies, actor, stranger, port, "Ingress")
    }
    assert reached == {("router", 8000), ("router", 7800)}


def test_replicas_of_a_namespace_cannot_reach_each_other(render: Callable[..., Objects]) -> None:
    policies = policies_of(render(VALUES))
    for role, other in itertools.product(("leader", "worker"), repeat=2):
        first, sibling = replica(role, "models"), replica(other, "models", ordinal=1)
        for port in (7900, 7901, 40000):
            assert lets(policies, first, replica(other, "models"), port, "Ingress")
            assert not lets(policies, first, sibling, port, "Ingress")
            assert not lets(policies, first, sibling, port, "Egress")


def test_controllers_reach_every_process_of_a_router_and_no_further_port(
    render: Callable[..., Objects],
) -> None:
    added = set(flows(render(VALUES | {"router.processes": 4}))) - set(flows(render(VALUES)))
    assert added == {("leader", "router", 7801), ("leader", "router", 7803)}


def test_model_egress_opens_only_the_given_ports(render: Callable[..., Objects]) -> None:
    values = VALUES | {"networkPolicy.modelEgress": [{"ports": [{"port": 443}]}]}
    added = set(flows(render(values))) - set(flows(render(VALUES)))
    assert added == set(itertools.product(("leader", "worker"), OTHERS, (443,)))


def test_every_pod_is_under_a_policy_in_both_directions(render: Callable[..., Objects]) -> None:
    policies = policies_of(render(VALUES))
    for name in ("operator", "router", "test", "leader", "worker"):
        assert not lets(policies, ACTORS[name], ACTORS["anybody"], 40000, "Ingress")
        assert not lets(policies, ACTORS[name], ACTORS["anybody"], 40000, "Egress")


@pytest.mark.parametrize("name", ["clients", "apiServer"])
def test_a_flow_to_anybody_can_be_narrowed(name: str, render: Callable[..., Objects]) -> None:
    peer = {"podSelector": {"matchLabels": {"app": "gateway"}}}
    allowed = set(flows(render(VALUES | {f"networkPolicy.{name}": [peer]})))
    flow = ("anybody", "router", 8000) if name == "clients" else ("operator", "anybody", 6443)
    assert flow in set(flows(render(VALUES))) and flow not in allowed


def test_policies_can_be_left_out(render: Callable[..., Objects]) -> None:
    assert policies_of(render({"networkPolicy.enabled": False})) == []
