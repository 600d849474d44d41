"""What is taken of each node, by whom, as the next decision sees it."""

from __future__ import annotations

from medha_operator.observed import NodeView
from medha_operator.usage import Load, Usage

MINE, OTHERS = ("ns", "mine"), ("ns", "others")
GPU = "nvidia.com/gpu"


def node(name: str) -> NodeView:
    return NodeView(name=name, allocatable={GPU: 8})


def used(usage: Usage, own: list[tuple[str, str]]) -> dict[str, int]:
    return {view.name: view.used.get(GPU, 0) for view in usage.nodes(MINE, own)}


def test_a_resource_sees_what_all_others_take_but_not_its_own_share() -> None:
    usage = Usage()
    usage.put_node("a", node("a"))
    usage.put_node("b", node("b"))
    usage.put_foreign({"a": {GPU: 1}})
    usage.put(("ns", "m-0"), Load("a", MINE, {GPU: 2}))
    usage.put(("ns", "o-0"), Load("a", OTHERS, {GPU: 4}))
    usage.put(("ns", "o-1"), Load("b", OTHERS, {GPU: 3}))
    assert used(usage, [("ns", "m-0")]) == {"a": 5, "b": 3}
    assert {view.name: view.used[GPU] for view in usage.nodes(OTHERS, [])} == {"a": 7, "b": 3}


def test_shares_move_with_their_pods_and_go_with_them() -> None:
    usage = Usage()
    for name in ("a", "b"):
        usage.put_node(name, node(name))
    usage.put(("ns", "o-0"), Load("a", OTHERS, {GPU: 4}))
    assert used(usage, []) == {"a": 4, "b": 0}
    usage.put(("ns", "o-0"), Load("b", OTHERS, {GPU: 4}))
    assert used(usage, []) == {"a": 0, "b": 4}
    assert usage.owners("b") == {OTHERS} and usage.owners("a") == set()
    usage.put(("ns", "o-0"), None)
    assert used(usage, []) == {"a": 0, "b": 0}


def test_nodes_come_and_go_and_stand_in_order() -> None:
    usage = Usage()
    for name in ("b", "a", "c"):
        usage.put_node(name, node(name))
    usage.put_node("c", None)
    assert [view.name for view in usage.nodes(MINE, [])] == ["a", "b"]


def test_room_that_foreign_pods_leave_is_noticed() -> None:
    usage = Usage()
    usage.put_node("a", node("a"))
    assert not usage.put_foreign({"a": {GPU: 2}})
    assert not usage.put_foreign({"a": {GPU: 3}})
    assert usage.put_foreign({"a": {GPU: 1}})
    assert usage.put_foreign({})
    assert used(usage, []) == {"a": 0}
