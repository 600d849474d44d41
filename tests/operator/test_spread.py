"""Golden cases: replicas of one resource keep apart unless a rule of higher rank forbids it."""

from __future__ import annotations

from typing import Any

from medha_operator.planning.node_placement import Placer, Unschedulable, pod_requirements
from medha_operator.resources.views import NodeView
from medha_operator.testing import Cluster, node, rack, resource

RACK, CLIQUE = "topology.kubernetes.io/rack", "nvidia.com/gpu.clique"


def replicas(
    nodes: list[NodeView], count: int, tp: int = 2, spp: int = 1, most: int = 1, **placement: Any
) -> list[str]:
    """Place replicas one after another; returns the nodes of each."""
    want = pod_requirements(resource(parallelism={"tp": tp, "spp": spp}, placement=placement))
    room = Placer(want, nodes)
    node_sets: list[list[str]] = []
    for _ in range(count):
        placed = room.place_base(1, most, avoid=node_sets)
        assert not isinstance(placed, Unschedulable), placed.message
        node_sets.append(list(placed[0]))
    return [" ".join(nodes) for nodes in node_sets]


def busy(name: str, gpus: int, **labels: str) -> NodeView:
    return NodeView(
        name=name, labels=labels, allocatable=node(name).allocatable, used={"nvidia.com/gpu": gpus}
    )


def test_two_replicas_that_fit_on_one_node_take_two() -> None:
    assert replicas([node("a"), node("b")], 2) == ["a", "b"]


def test_more_replicas_than_nodes_are_spread_evenly() -> None:
    assert replicas([node("a"), node("b")], 5) == ["a", "b", "a", "b", "a"]


def test_one_node_takes_all_where_there_is_no_other() -> None:
    assert replicas([node("a"), busy("b", 7)], 3) == ["a", "a", "a"]


def test_among_nodes_without_a_sibling_the_fullest_is_taken() -> None:
    nodes = [node("a"), node("b"), busy("c", 4), busy("d", 6)]
    assert replicas(nodes, 4) == ["d", "c", "a", "b"]


def test_two_racks_are_used_and_then_the_fullest() -> None:
    nodes = [*rack("r1", 4), *rack("r2", 4), *rack("r3", 4)]
    assert replicas(nodes, 2, tp=8, packLevel=RACK) == ["r1-0", "r2-0"]
    # A third rack stays whole: with two, a rack's death does not take all of them.
    assert replicas(nodes, 5, tp=8, packLevel=RACK) == ["r1-0", "r2-0", "r1-1", "r1-2", "r1-3"]


def test_another_node_matters_more_than_another_rack() -> None:
    nodes = [*rack("r1", 2), busy("r2-0", 4, **{RACK: "r2"})]
    assert replicas(nodes, 3, packLevel=RACK) == ["r2-0", "r1-0", "r1-1"]
    assert replicas(nodes, 4, packLevel=RACK) == ["r2-0", "r1-0", "r1-1", "r2-0"]


def test_stages_stand_together_before_replicas_keep_apart() -> None:
    whole = [node(name, labels={RACK: "r1", CLIQUE: "a"}) for name in ("a0", "a1")]
    halves = [busy(name, 6, **{RACK: "r1", CLIQUE: name[0]}) for name in ("b0", "c0")]
    # b0 and c0 have room for one stage each and no sibling: no group is torn apart for that.
    assert replicas([*whole, *halves], 3, spp=2) == ["a0 a0", "a1 a1", "a0 a0"]


def test_room_to_grow_counts_more_than_keeping_apart() -> None:
    nodes = [*rack("r1", 1), *rack("r2", 2)]
    node_sets = replicas(nodes, 2, tp=4, most=3, packLevel=RACK)
    assert node_sets == [
        "r2-0",
        "r2-1",
    ]  # of r1's two pods' room a replica that grows has too little
    assert replicas(nodes, 3, tp=2, most=3, packLevel=RACK) == ["r1-0", "r2-0", "r2-1"]


def test_a_scaled_out_resource_survives_its_node_and_comes_back_elsewhere() -> None:
    cluster = Cluster(resource(replicas=2, parallelism={"tp": 2}), [node("a"), node("b")])
    cluster.settle()
    assert cluster.places == {"tiny-0-g0-s0": "a", "tiny-1-g0-s0": "b"}
    cluster.nodes["c"] = node("c")
    cluster.power("a", on=False)
    cluster.settle()
    assert cluster.places == {"tiny-0-g0-s0": "c", "tiny-1-g0-s0": "b"}


def test_a_rolling_update_keeps_replicas_apart() -> None:
    cluster = Cluster(resource(replicas=2, parallelism={"tp": 2}), [node("a"), node("b")])
    cluster.settle()
    cluster.update(replicas=2, parallelism={"tp": 2}, template={"image": "worker:2"})
    cluster.settle(200)
    assert sorted(cluster.places.values()) == ["a", "b"]
    assert cluster.condition("Updated")["status"] == "True"


def test_groups_of_one_replica_stand_together_though_its_siblings_keep_away() -> None:
    kvp = {"min": 2, "max": 2, "tokensPerGroup": 4096}
    cluster = Cluster(
        resource(replicas=2, parallelism={"tp": 2, "kvp": kvp}), [node("a"), node("b")]
    )
    cluster.settle()
    assert sorted(cluster.places.items()) == [
        ("tiny-0-g0-s0", "a"),
        ("tiny-0-g1-s0", "a"),
        ("tiny-1-g0-s0", "b"),
        ("tiny-1-g1-s0", "b"),
    ]
