"""The controller's parts by themselves: groups, moves and router names."""

from __future__ import annotations

import pytest

from medha import PROTOCOL
from medha import messages as m
from medha.batch import Move
from medha.topology import Coordinate, Topology
from medha_worker.controller.groups import LOST, STARTING, RankGroups
from medha_worker.controller.kv_moves import LEASE_S, KvMoves, MoveResult
from medha_worker.controller.outbox import Outbox, ToRanks
from medha_worker.controller.resolver import RouterResolver, is_literal

A, B = Coordinate(0, 0, 0), Coordinate(0, 0, 1)
MOVE = Move(7, 1, 0, 1, (0, 1), (5, 6), (8, 9))


def sent(outbox: Outbox) -> list[tuple[tuple[Coordinate, ...], object]]:
    return [(item.ranks, item.message) for item in outbox.take() if isinstance(item, ToRanks)]


def hello(
    at: Coordinate, incarnation: str, controller: str = "", protocol: int = PROTOCOL
) -> m.RankHello:
    return m.RankHello(
        group=at.group,
        stage=at.stage,
        shard=at.shard,
        incarnation=incarnation,
        pid=1,
        controller=controller,
        store=f"{incarnation}:1" if at == A else "",
        protocol=protocol,
    )


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest.fixture
def groups(outbox: Outbox) -> RankGroups:
    return RankGroups(Topology(tp=2), outbox, 5.0, 30.0, "this")


def test_a_group_is_wired_after_every_hello_and_again_at_another_path(
    groups: RankGroups, outbox: Outbox
) -> None:
    groups.hello(A, hello(A, "a1"), 0.0)
    assert sent(outbox) == []
    groups.hello(B, hello(B, "b1"), 0.0)
    ((ranks, first),) = sent(outbox)
    assert isinstance(first, m.Form) and first.generation == 0 and set(ranks) == {A, B}
    groups.hello(B, hello(B, "b1"), 0.1)
    assert sent(outbox) == [], "a link that came back is no new rank"
    groups.hello(A, hello(A, "a2"), 1.0)
    groups.hello(B, hello(B, "b2"), 1.0)
    again = sent(outbox)[-1][1]
    assert isinstance(again, m.Form)
    assert (first.store, again.store) == ("a1:1/this/g0-1", "a2:1/this/g0-2")
    assert first.controller == again.controller == "this"


def test_ranks_of_an_earlier_controller_must_rejoin(groups: RankGroups, outbox: Outbox) -> None:
    assert not groups.accept(B, 0.0), "its reports are of another controller's batches"
    groups.hello(B, hello(B, "b1", controller="former"), 0.0)
    ((ranks, former),) = sent(outbox)
    assert ranks == (B,) and isinstance(former, m.Leave) and former.rejoin
    assert groups.all_ranks() == []
    groups.hello(A, hello(A, "a2"), 1.0)
    groups.hello(B, hello(B, "b2"), 1.0)
    assert isinstance(sent(outbox)[-1][1], m.Form)
    groups.hello(B, hello(B, "b2", controller="this"), 2.0)
    assert sent(outbox) == [], "a link that came back is no new rank"


def test_a_rank_that_still_loads_stays_although_its_beats_come_before_its_hello(
    groups: RankGroups, outbox: Outbox
) -> None:
    """Beats were queued while no controller ran; an order to leave would end the load."""
    for at, incarnation in ((A, "a1"), (B, "b1")):
        assert not groups.accept(at, 0.0)
        groups.hello(at, hello(at, incarnation), 0.0)
        assert groups.accept(at, 0.1)
    ((_, message),) = sent(outbox)
    assert isinstance(message, m.Form)


def test_a_rank_that_comes_back_stays_but_its_old_peer_must_leave(
    groups: RankGroups, outbox: Outbox
) -> None:
    groups.hello(A, hello(A, "a1"), 0.0)
    groups.hello(B, hello(B, "b1"), 0.0)
    outbox.take()
    lost = groups.hello(A, hello(A, "a2"), 1.0)
    assert lost is not None and groups.state(0) == STARTING
    assert not any(isinstance(message, m.Leave) for _, message in sent(outbox))
    assert not groups.accept(B, 1.1)
    ((ranks, message),) = sent(outbox)
    assert ranks == (B,) and isinstance(message, m.Leave) and message.rejoin
    groups.hello(B, hello(B, "b1"), 1.2)
    ((ranks, message),) = sent(outbox)
    assert ranks == (B,) and isinstance(message, m.Leave), "given up means given up"


def test_a_rank_of_another_version_leaves_with_both_versions_named(
    groups: RankGroups, outbox: Outbox
) -> None:
    groups.hello(A, hello(A, "a1", protocol=PROTOCOL + 1), 0.0)
    ((_, message),) = sent(outbox)
    assert isinstance(message, m.Leave)
    assert f"protocol {PROTOCOL + 1}, this controller {PROTOCOL}" in message.reason
    assert "protocol" in groups.reasons[0]


def test_a_silent_rank_loses_its_group(groups: RankGroups) -> None:
    groups.hello(A, hello(A, "a1"), 0.0)
    groups.hello(B, hello(B, "b1"), 0.0)
    groups.accept(A, 4.0)
    assert groups.silent(5.0) == []
    assert groups.silent(5.1) == [(0, "rank g0-s0-t1: silent for 5.1 s")]
    groups.lose(0, "silent")
    assert groups.state(0) == LOST and groups.lost == (0,)


def test_a_rank_whose_connection_has_ended_has_a_second_to_return(groups: RankGroups) -> None:
    groups.hello(A, hello(A, "a1"), 0.0)
    groups.hello(B, hello(B, "b1"), 0.0)
    groups.disconnected(Coordinate(7, 0, 0), 1.0)  # no such rank
    groups.disconnected(B, 1.0)
    assert groups.silent(2.0) == []
    assert groups.silent(2.1) == [(0, f"rank {B}: its connection has ended")]
    groups.hello(B, hello(B, "b1"), 1.5)  # as every new connection begins
    assert groups.silent(2.1) == []
    groups.disconnected(B, 3.0)
    groups.excuse_pause(2.0)
    assert groups.silent(5.9) == []


def started(outbox: Outbox, stages: int = 1) -> KvMoves:
    moves = KvMoves(Topology(spp=stages, kvp_max=2), outbox)
    moves.start(MOVE, 0.0)
    return moves


def test_pages_are_offered_read_and_withdrawn_on_every_stage_before_a_copy_counts(
    outbox: Outbox,
) -> None:
    moves = started(outbox, stages=2)
    sources = (Coordinate(0, 0, 0), Coordinate(0, 1, 0))
    targets = (Coordinate(1, 0, 0), Coordinate(1, 1, 0))
    assert sent(outbox) == [(sources, m.OfferPages(MOVE, LEASE_S))]
    assert moves.offered(sources[0], m.Offered(7, (1, 1), b"d"), 1.0) is None
    assert sent(outbox) == [((targets[0],), m.FetchPages(MOVE, (1, 1), b"d", LEASE_S - 1.0))]
    assert moves.fetched(targets[0], m.Fetched(7, True, 100), 2.0) is None
    assert moves.offered(sources[1], m.Offered(7, (2, 2)), 3.0) is None
    outbox.take()
    assert moves.fetched(targets[1], m.Fetched(7, True, 50), 4.0) is None
    assert sent(outbox) == [(sources, m.Withdraw(7))]
    assert moves.withdrawn(sources[1], m.Withdrawn(7, True), 5.0) is None
    done = moves.withdrawn(sources[0], m.Withdrawn(7, True), 6.0)
    assert done == MoveResult(MOVE, True, moved_bytes=150, elapsed_s=6.0)
    assert moves.switch(7) == MOVE and not len(moves)


def test_a_cancelled_move_waits_until_every_reader_has_stopped(outbox: Outbox) -> None:
    moves = started(outbox, stages=2)
    moves.offered(Coordinate(0, 0, 0), m.Offered(7, (1, 1)), 1.0)
    assert moves.offered(Coordinate(0, 1, 0), m.Offered(7, (), error="not here"), 2.0) is None
    assert isinstance(sent(outbox)[-1][1], m.Withdraw)
    over = moves.fetched(Coordinate(1, 0, 0), m.Fetched(7, True), 3.0)
    assert over is not None and not over.ok and over.reason == "offer"


def test_a_reader_that_never_answers_is_lost_after_two_leases(outbox: Outbox) -> None:
    moves = started(outbox)
    moves.offered(A, m.Offered(7, (1, 1)), 0.0)
    assert moves.overdue(LEASE_S) == ([], set())
    assert moves.overdue(2 * LEASE_S) == ([], {1})
    (over,) = moves.lose(1, 2 * LEASE_S)
    assert not over.ok and over.reason == "lease" and not len(moves)


def test_a_grant_of_another_number_of_pages_cancels_the_move(outbox: Outbox) -> None:
    over = started(outbox).offered(A, m.Offered(7, (1,)), 1.0)
    assert over is not None and over.reason == "offer"


@pytest.mark.parametrize(
    "router, expected",
    [
        ("tcp://127.0.0.1:7800", True),
        ("tcp://[::1]:7800", True),
        ("ipc:///run/router", True),
        ("tcp://routers:7800", False),
    ],
)
def test_only_names_are_resolved(router: str, expected: bool) -> None:
    assert is_literal(router) is expected


def test_a_name_resolves_to_all_addresses_and_keeps_them_while_dns_fails() -> None:
    answers: list[list[str]] = [["10.0.0.1", "10.0.0.2"], [], ["10.0.0.2"]]

    def look_up(host: str, port: int) -> list[str]:
        assert (host, port) == ("routers", 7800)
        if not (addresses := answers.pop(0)):
            raise OSError("no answer")
        return addresses

    names = RouterResolver(("tcp://127.0.0.1:1", "tcp://routers:7800"), look_up)
    both = ("tcp://127.0.0.1:1", "tcp://10.0.0.1:7800", "tcp://10.0.0.2:7800")
    assert names.resolve() == both
    assert names.resolve() == both
    assert names.resolve() == ("tcp://127.0.0.1:1", "tcp://10.0.0.2:7800")


def test_every_process_of_a_router_is_dialed_while_its_address_is_known() -> None:
    answers = [["10.0.0.1", "10.0.0.2"], ["10.0.0.2"], ["10.0.0.2"]]
    names = RouterResolver(("tcp://routers:7800",), lambda host, port: answers.pop(0))
    assert names.take() is None

    def resolved() -> tuple[str, ...] | None:
        names.refresh()
        return names.take()

    assert resolved() == ("tcp://10.0.0.1:7800", "tcp://10.0.0.2:7800")
    names.learn("tcp://10.0.0.1:7800", (7800, 7801))
    assert names.take() == ("tcp://10.0.0.1:7800", "tcp://10.0.0.2:7800", "tcp://10.0.0.1:7801")
    names.learn("tcp://10.0.0.1:7801", (7800, 7801))  # any of its processes reports them
    assert names.take() is None
    names.learn("tcp://10.0.0.2:7800", (7800, 7801))
    assert resolved() == ("tcp://10.0.0.2:7800", "tcp://10.0.0.2:7801")
    names.learn("tcp://10.0.0.1:7801", (7800, 7801))  # it is no longer listed
    names.learn("tcp://10.0.0.2:7801", (7800,))  # it was restarted with one process
    assert resolved() == ("tcp://10.0.0.2:7800",)


def test_routers_of_one_machine_are_told_apart_by_their_first_port() -> None:
    routers = ("tcp://127.0.0.1:7800", "tcp://127.0.0.1:7900")
    names = RouterResolver(routers)
    names.learn(routers[1], (7900, 7901))
    assert names.take() == (*routers, "tcp://127.0.0.1:7901")
    names.learn(routers[0], (7800, 7801))
    names.learn("tcp://127.0.0.1:7901", (7900, 7901, 7902))
    assert names.take() == (
        *routers,
        "tcp://127.0.0.1:7801",
        "tcp://127.0.0.1:7901",
        "tcp://127.0.0.1:7902",
    )


def test_a_pause_of_the_controller_does_not_count_as_silence(groups: RankGroups) -> None:
    groups.hello(A, hello(A, "a1"), 0.0)
    groups.excuse_pause(4.0)
    assert groups.silent(9.0) == []
    groups.excuse_pause(0.9)  # an ordinary pause excuses nothing
    assert groups.silent(9.1) == [(0, f"rank {A}: silent for 5.1 s")]
