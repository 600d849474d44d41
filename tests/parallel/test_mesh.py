"""Communicators and generations: members that may join, members that may not, and the end."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from medha.errors import EngineError, SetupError
from medha.messages import Form
from medha.topology import Coordinate, Topology
from medha_worker.parallel.collectives import PeerLost
from medha_worker.parallel.communicator import Communicator, ShardGroup, join
from medha_worker.parallel.mesh import Mesh, dial_store, serve_store

T = TypeVar("T")
IN_TIME_S = 20.0  # less than the 30 s after which a member gives up on its own


def together(*calls: Callable[[], T]) -> list[T]:
    """Run each call in a thread of its own; results in order, or the first error."""
    results: dict[int, T] = {}
    errors: list[Exception] = []

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(calls))]


def joined(address: str, name: str, size: int, timeout_s: float = 60.0) -> list[Communicator]:
    def member(rank: int) -> Callable[[], Communicator]:
        return lambda: join(
            dial_store(address, 5.0),
            name,
            rank,
            size,
            incarnation=f"i{rank}",
            interface="lo",
            timeout_s=timeout_s,
        )

    return together(*(member(rank) for rank in range(size)))


@pytest.fixture(scope="module")
def address() -> str:
    store, where = serve_store("127.0.0.1:0")
    SERVED.append(store)
    return where


SERVED: list[object] = []  # a store serves as long as a reference exists


def mesh(group: int, incarnation: str = "a", timeout_s: float = 60.0) -> Mesh:
    return Mesh(
        Coordinate(group, 0, 0),
        Topology(kvp_max=3),
        incarnation=incarnation,
        interface="lo",
        timeout_s=timeout_s,
    )


def form(address: str, generation: int, members: tuple[int, ...], timeout_s: float = 60.0) -> Form:
    return Form(
        generation=generation,
        members=members,
        store=address,
        controller="c",
        timeout_s=timeout_s,
    )


def formed(meshes: dict[int, Mesh], order: Form) -> dict[int, str]:
    """Let all meshes form the generation; group -> error, empty if it joined."""
    answers: dict[int, str] = {}
    all_in = threading.Event()

    def answer(group: int) -> Callable[[int, str], None]:
        def note(generation: int, error: str) -> None:
            assert generation == order.generation
            answers[group] = error
            if len(answers) == len(meshes):
                all_in.set()

        return note

    for group, member in meshes.items():
        member.form(order, answer(group))
    assert all_in.wait(120)
    return answers


def gather_ranks(meshes: list[Mesh], generation: int) -> list[list[float]]:
    """Gather every member's rank at each of `meshes`."""

    def gather(member: Mesh) -> list[float]:
        column = member.column(generation).communicator
        assert column is not None
        return [part.item() for part in column.gather(torch.tensor([float(column.rank)]))]

    return together(*(functools.partial(gather, member) for member in meshes))


def test_any_two_members_exchange_messages_in_order(address: str) -> None:
    members = joined(address, "pairs", 3)
    for a in range(3):
        for b in range(3):
            if a == b:
                continue
            into = [torch.empty(2), torch.empty(2)]
            receives = [members[b].receive(tensor, a) for tensor in into]
            sends = [members[a].send(torch.full((2,), 10.0 * a + i), b) for i in range(2)]
            for message in (*receives, *sends):
                message.wait()
            assert [tensor[0].item() for tensor in into] == [10.0 * a, 10.0 * a + 1]


@pytest.mark.parametrize("rows", [37, 20_001])  # in one round; in two, with unequal parts
@pytest.mark.parametrize("shards", [2, 3, 4])
def test_shards_sum_in_their_order_to_the_same_bits(address: str, rows: int, shards: int) -> None:
    members = joined(address, f"sum-{rows}-{shards}", shards)
    rng = torch.Generator().manual_seed(1)
    parts = [torch.randn(rows, 5, generator=rng) for _ in range(shards)]
    expected = functools.reduce(torch.add, parts)
    sums = together(
        *(
            functools.partial(ShardGroup(m).all_reduce, x.clone())
            for m, x in zip(members, parts, strict=True)
        )
    )
    assert all(torch.equal(total, expected) for total in sums)
    columns = [torch.cat([x, x], dim=-1)[:, :5] for x in parts]  # rows are not contiguous
    sums = together(
        *(
            functools.partial(ShardGroup(m).all_reduce, x)
            for m, x in zip(members, columns, strict=True)
        )
    )
    assert all(torch.equal(total, expected) for total in (*sums, *columns))
    wide = together(
        *(
            functools.partial(ShardGroup(m).all_gather, x)
            for m, x in zip(members, parts, strict=True)
        )
    )
    assert all(torch.equal(row, torch.cat(parts, dim=-1)) for row in wide)


def test_a_third_rank_joins_while_the_old_pair_works(address: str) -> None:
    meshes = {group: mesh(group) for group in range(3)}
    two = {group: meshes[group] for group in (0, 1)}
    assert formed(two, form(address, 1, (0, 1))) == {0: "", 1: ""}
    old = [meshes[group].column(1).communicator for group in (0, 1)]
    stop, rounds = threading.Event(), [0, 0]

    def work(rank: int) -> None:
        """Exchange until rank 0 marks a round as the last."""
        while True:
            mine = torch.tensor([float(rounds[rank]), float(stop.is_set())])
            communicator = old[rank]
            assert communicator is not None
            gathered = communicator.gather(mine)
            assert gathered[0][0].item() == gathered[1][0].item() == rounds[rank]
            rounds[rank] += 1
            if gathered[0][1].item():
                return

    def grow() -> None:
        try:
            order = form(address, 2, (0, 1, 2))
            assert formed(meshes, order) == {0: "", 1: "", 2: ""}
        finally:
            stop.set()

    together(lambda: work(0), lambda: work(1), grow)
    assert rounds[0] == rounds[1] > 0
    for ranks in gather_ranks([meshes[group] for group in range(3)], 2):
        assert ranks == [0.0, 1.0, 2.0]


def test_dissolving_frees_blocked_members(address: str) -> None:
    meshes = {group: mesh(group, timeout_s=30.0) for group in (0, 1, 2)}
    formed(meshes, form(address, 11, (0, 1, 2)))
    column = meshes[0].column(11).communicator
    assert column is not None
    blocked = column.receive(torch.empty(1), 2)
    started_s = time.monotonic()
    threading.Timer(0.2, lambda: meshes[0].dissolve(11)).start()
    with pytest.raises(PeerLost, match="aborted"):
        blocked.wait()
    assert time.monotonic() - started_s < IN_TIME_S
    with pytest.raises(PeerLost, match="closed"):
        column.send(torch.ones(1), 1)


def test_members_that_wait_for_one_that_leaves_fail_at_once(address: str) -> None:
    members = joined(address, "leaves", 2, timeout_s=30.0)
    blocked = members[0].receive(torch.empty(1), 1)
    threading.Timer(0.2, members[1].abort).start()
    started_s = time.monotonic()
    with pytest.raises(PeerLost, match="member 1 is lost"):
        blocked.wait()
    assert time.monotonic() - started_s < IN_TIME_S


def test_a_stale_generation_can_neither_be_joined_nor_written_to(address: str) -> None:
    meshes = {group: mesh(group) for group in (0, 1)}
    formed(meshes, form(address, 21, (0, 1)))
    formed(meshes, form(address, 22, (0, 1)))
    for member in meshes.values():
        member.dissolve(21)
    with pytest.raises(PeerLost, match="generation 21"):
        meshes[0].column(21)
    assert "stale" in formed({0: meshes[0]}, form(address, 21, (0, 1)))[0]
    assert "stale" in formed({0: meshes[0]}, form(address, 20, (0, 1)))[0]
    assert meshes[0].column(22).communicator is not None


def test_another_incarnation_cannot_take_a_place(address: str) -> None:
    meshes = {group: mesh(group) for group in (0, 1)}
    formed(meshes, form(address, 31, (0, 1)))
    impostor = mesh(1, incarnation="b")
    assert "belongs to incarnation a" in formed({1: impostor}, form(address, 31, (0, 1)))[1]


def test_a_join_without_peers_gives_up_and_the_old_generation_stays(address: str) -> None:
    meshes = {group: mesh(group) for group in (0, 1)}
    formed(meshes, form(address, 41, (0, 1)))
    started_s = time.monotonic()
    error = formed({0: meshes[0]}, form(address, 42, (0, 1, 2), timeout_s=0.5))[0]
    assert "did not form" in error and time.monotonic() - started_s < IN_TIME_S
    assert gather_ranks([meshes[0], meshes[1]], 41) == [[0.0, 1.0]] * 2


def test_a_generation_dissolved_while_it_forms_is_not_kept(address: str) -> None:
    first, second = mesh(0), mesh(1)
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    first.form(form(address, 51, (0, 1)), lambda _, error: answers.put(error))
    first.dissolve(51)
    formed({1: second}, form(address, 51, (0, 1), timeout_s=5.0))
    error = answers.get(timeout=60)
    assert "dissolved" in error or "stale" in error
    with pytest.raises(PeerLost):
        first.column(51)


def test_a_generation_of_one_needs_no_peer(address: str) -> None:
    alone = mesh(0)
    assert formed({0: alone}, form(address, 61, (0,))) == {0: ""}
    assert alone.column(61).communicator is None


def test_members_must_ascend_and_hold_the_group(address: str) -> None:
    for members in ((1, 0), (1, 2), (0, 0, 1)):
        assert "must ascend" in formed({0: mesh(0)}, form(address, 71, members))[0]


def test_the_store_is_served_at_its_address_only(address: str) -> None:
    host, _, port = address.rpartition(":")
    assert host == "127.0.0.1" and int(port) > 0
    with pytest.raises(SetupError, match="store_bind"):
        serve_store(address)
    with pytest.raises(EngineError, match="host:port"):
        dial_store("nowhere", 1.0)


def test_paths_keep_users_of_one_store_apart(address: str) -> None:
    first, second = dial_store(f"{address}/g0-1", 5.0), dial_store(f"{address}/g0-2", 5.0)
    first.set("key", "1")
    second.set("key", "2")
    assert (first.get("key"), second.get("key")) == (b"1", b"2")
