"""Requests summed up by node, as the next decision sees them."""

from __future__ import annotations

from medha_operator.cluster.cluster_state import NodeUsage, PodUsage
from medha_operator.resources.views import NodeView

MINE, OTHERS = ("ns", "mine"), ("ns", "others")
GPU = "nvidia.com/gpu"


def node(name: str) -> NodeView:
    return NodeView(name=name, allocatable={GPU: 8})


def used(usage: NodeUsage, own: list[tuple[str, str]]) -> dict[str, int]:
    return {view.name: view.used.get(GPU, 0) for view in usage.nodes(MINE, own)}


def test_a_resource_sees_what_all_others_take_but_not_its_own_share() -> None:
    usage = NodeUsage()
    usage.set_node("a", node("a"))
    usage.set_node("b", node("b"))
    usage.set_foreign({"a": {GPU: 1}})
    usage.set_pod(("ns", "m-0"), PodUsage("a", MINE, {GPU: 2}))
    usage.set_pod(("ns", "o-0"), PodUsage("a", OTHERS, {GPU: 4}))
    usage.set_pod(("ns", "o-1"), PodUsage("b", OTHERS, {GPU: 3}))
    assert used(usage, [("ns", "m-0")]) == {"a": 5, "b": 3}
    assert {view.name: view.used[GPU] for view in usage.nodes(OTHERS, [])} == {"a": 7, "b": 3}


def test_requests_move_and_vanish_with_their_pods() -> None:
    usage = NodeUsage()
    for name in ("a", "b"):
        usage.set_node(name, node(name))
    usage.set_pod(("ns", "o-0"), PodUsage("a", OTHERS, {GPU: 4}))
    assert used(usage, []) == {"a": 4, "b": 0}
    usage.set_pod(("ns", "o-0"), PodUsage("b", OTHERS, {GPU: 4}))
    assert used(usage, []) == {"a": 0, "b": 4}
    assert usage.owners("b") == {OTHERS} and usage.owners("a") == set()
    usage.set_pod(("ns", "o-0"), None)
    assert used(usage, []) == {"a": 0, "b": 0}


def test_nodes_come_and_go_in_sorted_order() -> None:
    usage = NodeUsage()
    for name in ("b", "a", "c"):
        usage.set_node(name, node(name))
    usage.set_node("c", None)
    assert [view.name for view in usage.nodes(MINE, [])] == ["a", "b"]


def test_room_that_other_pods_free_is_noticed() -> None:
    usage = NodeUsage()
    usage.set_node("a", node("a"))
    assert not usage.set_foreign({"a": {GPU: 2}})
    assert not usage.set_foreign({"a": {GPU: 3}})
    assert usage.set_foreign({"a": {GPU: 1}})
    assert usage.set_foreign({})
    assert used(usage, []) == {"a": 0}
