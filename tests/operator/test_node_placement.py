"""Golden cases: pods of a replica on nodes, or the sentence that says what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from medha_operator.planning.node_placement import (
    Placer,
    PodRequirements,
    Unschedulable,
    pod_requirements,
)
from medha_operator.resources.views import NodeView, PodView, Taint
from medha_operator.testing import node, rack, resource

ZONE, RACK = "topology.kubernetes.io/zone", "topology.kubernetes.io/rack"
CLIQUE = "nvidia.com/gpu.clique"


def want(tp: int = 8, spp: int = 1, **placement: Any) -> PodRequirements:
    return pod_requirements(resource(parallelism={"tp": tp, "spp": spp}, placement=placement))


def busy(view: NodeView, gpus: int) -> NodeView:
    return NodeView(
        name=view.name,
        labels=view.labels,
        allocatable=view.allocatable,
        used={"nvidia.com/gpu": gpus},
    )


def placed(room: Placer, groups: int = 1, most: int = 1, promised: Any = {}) -> list[list[str]]:  # noqa: B006
    result = room.place_base(groups, most, promised)
    assert not isinstance(result, Unschedulable), result.message
    return [list(group) for group in result]


def missing(room: Placer, groups: int = 1) -> str:
    result = room.place_base(groups, groups)
    assert isinstance(result, Unschedulable)
    return f"{result.reason}: {result.message}"


# --- where pods go ----------------------------------------------------------------------------


def test_stages_fill_one_node_before_the_next() -> None:
    room = Placer(want(tp=2, spp=4), [node("a"), node("b")])
    assert placed(room) == [["a", "a", "a", "a"]]
    assert placed(room) == [["b", "b", "b", "b"]]


def test_the_fullest_node_that_will_do_is_taken() -> None:
    room = Placer(want(tp=2), [node("a"), busy(node("b"), 4), busy(node("c"), 7)])
    assert placed(room) == [["b"]]


def test_stages_of_a_group_stay_in_one_clique_and_a_rack_is_left_only_when_it_must_be() -> None:
    nodes = [
        node(
            f"{zone}{rack_}{clique}{index}",
            labels={ZONE: zone, RACK: zone + rack_, CLIQUE: zone + rack_ + clique},
        )
        for zone in "xy"
        for rack_ in "12"
        for clique in "ab"
        for index in "01"
    ]
    room = Placer(want(tp=8, spp=2), nodes)
    assert placed(room) == [["x1a0", "x1a1"]]
    room = Placer(want(tp=8, spp=3), nodes)
    assert placed(room) == [["x1a0", "x1a1", "x1b0"]]
    room = Placer(want(tp=8, spp=6), nodes)
    assert placed(room) == [["x1a0", "x1a1", "x1b0", "x1b1", "x2a0", "x2a1"]]


def test_all_groups_of_a_replica_stay_in_one_rack() -> None:
    room = Placer(want(spp=2, packLevel=RACK), [*rack("r1", 3), *rack("r2", 4)])
    assert placed(room, groups=2) == [["r2-0", "r2-1"], ["r2-2", "r2-3"]]


def test_fragments_of_many_racks_are_not_a_rack() -> None:
    nodes = [node for name in ("r1", "r2", "r3", "r4") for node in rack(name, 1)]
    assert missing(Placer(want(spp=2, packLevel=RACK), nodes)) == (
        "TooFewFree: 2 pods with 8 nvidia.com/gpu each are needed inside one "
        "topology.kubernetes.io/rack and the best, r4, has room for 1; add nodes, free some or "
        "lower spec.parallelism"
    )
    assert placed(Placer(want(spp=2), nodes)) == [["r1-0", "r2-0"]]


def test_racks_of_one_name_in_two_zones_are_two_racks() -> None:
    nodes = [
        node(f"{zone}-{index}", labels={ZONE: zone, RACK: "r1"})
        for zone in ("x", "y")
        for index in range(2)
    ]
    room = Placer(want(spp=2, packLevel=RACK), nodes)
    assert placed(room) == [["x-0", "x-1"]]
    assert missing(Placer(want(spp=3, packLevel=RACK), nodes)).startswith("TooFewFree")


def test_a_rack_with_room_to_grow_is_preferred_and_of_those_the_fullest() -> None:
    racks = [*rack("r1", 1), *rack("r2", 4), *rack("r3", 6)]
    room = Placer(want(packLevel=RACK), racks)
    assert placed(room, groups=1, most=4) == [["r2-0"]]
    assert placed(Placer(want(packLevel=RACK), racks), groups=1, most=9) == [["r3-0"]]


def test_room_that_a_sibling_may_grow_into_is_left_alone_while_there_is_other_room() -> None:
    racks = [*rack("r1", 2), *rack("r2", 3)]
    room = Placer(want(packLevel=RACK), racks)
    assert placed(room, most=2) == [["r1-0"]]
    assert placed(room, most=2, promised={"r1-0": 1}) == [["r2-0"]]
    assert placed(room, most=2, promised={"r1-0": 1, "r2-0": 1}) == [["r2-1"]]


def test_an_extra_group_stays_in_the_rack_of_its_replica() -> None:
    room = Placer(want(packLevel=RACK), [*rack("r1", 2), *rack("r2", 8)])
    assert room.place_group(["r1-0"]) == ("r1-0",)
    assert room.place_group(["r1-0"]) == ("r1-1",)
    result = room.place_group(["r1-0"])
    assert isinstance(result, Unschedulable)
    assert "the best, r1, has room for 0" in result.message or "no node has room" in result.message


def test_an_extra_group_prefers_the_clique_of_its_replica() -> None:
    nodes = [node(name, labels={RACK: "r1", CLIQUE: name[0]}) for name in ("a0", "a1", "b0", "b1")]
    room = Placer(want(packLevel=RACK), [busy(nodes[0], 8), *nodes[1:]])
    assert room.place_group(["a0"]) == ("a1",)
    assert room.place_group(["b1"]) == ("b1",)


def test_own_pods_and_those_of_others_are_counted() -> None:
    own = PodView(
        name="p", uid="u", ordinal=0, group=0, stage=0, attempt=1, spec_hash="", target="a"
    )
    room = Placer(want(tp=4), [busy(node("a"), 4), node("b", 4)], [own])
    assert placed(room) == [["b"]]
    assert missing(room).startswith("TooFewFree")


def test_a_pod_of_a_former_spec_counts_with_what_it_really_takes() -> None:
    own = PodView(
        name="p",
        uid="u",
        ordinal=0,
        group=0,
        stage=0,
        attempt=1,
        spec_hash="",
        node="a",
        requests={"nvidia.com/gpu": 2, "pods": 1},
    )
    assert placed(Placer(want(tp=6), [node("a")], [own])) == [["a"]]


def test_pods_that_have_ended_take_nothing() -> None:
    own = PodView(
        name="p",
        uid="u",
        ordinal=0,
        group=0,
        stage=0,
        attempt=1,
        spec_hash="",
        node="a",
        phase="Failed",
    )
    assert placed(Placer(want(tp=8), [node("a")], [own])) == [["a"]]


def test_processors_and_pod_counts_bound_replicas_without_devices() -> None:
    spec = resource(device={"kind": "Cpu"}, template={"resources": {"requests": {"cpu": "3"}}})
    small = NodeView(name="a", allocatable={"cpu": 8000, "memory": 1 << 40, "pods": 110})
    room = Placer(pod_requirements(spec), [small])
    assert placed(room, groups=2) == [["a"], ["a"]]
    assert missing(room) == (
        "TooFewFree: a pod with 3000m of cpu is needed and no node has room for one; add "
        "nodes, free some or lower spec.parallelism"
    )
    few = NodeView(name="a", allocatable={"cpu": 8000, "memory": 1 << 40, "pods": 1})
    assert missing(Placer(pod_requirements(spec), [few]), groups=2).startswith("TooFewFree")


@pytest.mark.parametrize(
    "toleration",
    [
        {"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"},
        {"key": "gpu", "operator": "Exists"},
        {"operator": "Exists"},
    ],
)
def test_a_tainted_node_is_used_only_with_a_toleration(toleration: dict[str, str]) -> None:
    nodes = [node("a", taints=(Taint("gpu", "yes"),))]
    assert placed(Placer(want(tolerations=[toleration]), nodes)) == [["a"]]
    assert missing(Placer(want(), nodes)) == (
        "TooFewFree: a pod with 8 nvidia.com/gpu is needed and no node has room for one "
        "(of 1 nodes 1 tainted with gpu=yes:NoSchedule, which is not tolerated); add nodes, free "
        "some or lower spec.parallelism"
    )


def test_a_preference_against_a_node_does_not_forbid_it() -> None:
    nodes = [node("a", taints=(Taint("gpu", "yes", "PreferNoSchedule"),))]
    assert placed(Placer(want(), nodes)) == [["a"]]


# --- what is missing ----------------------------------------------------------------------------


def test_a_cluster_without_nodes_is_named() -> None:
    assert missing(Placer(want(), [])) == "NoNodes: the cluster has no node; add one"


def test_a_pack_label_that_no_node_has_is_named() -> None:
    assert missing(Placer(want(packLevel=RACK), [node("a")])) == (
        "NoNodeHasLabel: no node has the label topology.kubernetes.io/rack of "
        "spec.placement.packLevel; label the nodes or leave packLevel out"
    )


def test_a_selector_that_no_node_matches_is_named() -> None:
    assert missing(Placer(want(nodeSelector={"pool": "h100"}), [node("a")])) == (
        "NoNodeHasLabel: no node has the label pool=h100 of spec.placement.nodeSelector; label "
        "nodes so or correct the selector"
    )


def test_a_device_that_no_node_offers_is_named() -> None:
    cpu_only = NodeView(name="a", allocatable={"cpu": 8000, "memory": 1 << 40, "pods": 110})
    assert missing(Placer(want(), [cpu_only])) == (
        "NoNodeIsLargeEnough: a pod needs 8 nvidia.com/gpu on one node and none offers any; "
        "install its device plugin, correct spec.device.resource, or set spec.device.kind to Cpu"
    )


def test_more_devices_than_any_node_has_are_named() -> None:
    assert missing(Placer(want(tp=16), [node("a"), node("b", 4)])) == (
        "NoNodeIsLargeEnough: a pod needs 16 nvidia.com/gpu on one node and the largest has 8 "
        "nvidia.com/gpu; lower spec.parallelism.tp or add a larger node"
    )


def test_unusable_nodes_are_counted_by_state() -> None:
    nodes = [node("a", schedulable=False), node("b", ready=False), busy(node("c"), 1)]
    assert missing(Placer(want(), nodes)) == (
        "TooFewFree: a pod with 8 nvidia.com/gpu is needed and no node has room for one "
        "(of 3 nodes 1 cordoned, 1 not ready); add nodes, free some or lower spec.parallelism"
    )
