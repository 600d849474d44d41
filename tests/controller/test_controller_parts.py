"""The controller's parts by themselves: membership, moves and router names."""

from __future__ import annotations

import pytest

from medha import PROTOCOL
from medha import messages as m
from medha.batch import Move
from medha.topology import Coordinate, Topology
from medha_worker.controller.membership import LOST, STARTING, Membership
from medha_worker.controller.moves import LEASE_S, Moves, Outcome
from medha_worker.controller.names import Names, literal
from medha_worker.controller.outbox import Outbox, ToRanks

A, B = Coordinate(0, 0, 0), Coordinate(0, 0, 1)
MOVE = Move(7, 1, 0, 1, (0, 1), (5, 6), (8, 9))


def sent(outbox: Outbox) -> list[tuple[tuple[Coordinate, ...], object]]:
    return [(item.ranks, item.message) for item in outbox.take() if isinstance(item, ToRanks)]


def hello(at: Coordinate, incarnation: str, protocol: int = PROTOCOL) -> m.RankHello:
    return m.RankHello(
        group=at.group,
        stage=at.stage,
        shard=at.shard,
        incarnation=incarnation,
        pid=1,
        protocol=protocol,
    )


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest.fixture
def membership(outbox: Outbox) -> Membership:
    return Membership(Topology(tp=2), outbox, "store:1", 5.0, 30.0)


def test_a_group_is_wired_once_all_its_ranks_said_hello_and_anew_by_another_path(
    membership: Membership, outbox: Outbox
) -> None:
    membership.hello(A, hello(A, "a1"), 0.0)
    assert sent(outbox) == []
    membership.hello(B, hello(B, "b1"), 0.0)
    ((ranks, first),) = sent(outbox)
    assert isinstance(first, m.Form) and first.generation == 0 and set(ranks) == {A, B}
    membership.hello(B, hello(B, "b1"), 0.1)
    assert sent(outbox) == [], "a link that came back is no new rank"
    membership.hello(A, hello(A, "a2"), 1.0)
    membership.hello(B, hello(B, "b2"), 1.0)
    again = sent(outbox)[-1][1]
    assert isinstance(again, m.Form) and again.store != first.store


def test_a_rank_that_comes_back_is_not_told_to_leave_but_its_old_peer_is(
    membership: Membership, outbox: Outbox
) -> None:
    membership.hello(A, hello(A, "a1"), 0.0)
    membership.hello(B, hello(B, "b1"), 0.0)
    outbox.take()
    lost = membership.hello(A, hello(A, "a2"), 1.0)
    assert lost is not None and membership.state(0) == STARTING
    assert not any(isinstance(message, m.Leave) for _, message in sent(outbox))
    assert not membership.heard(B, 1.1)
    ((ranks, message),) = sent(outbox)
    assert ranks == (B,) and isinstance(message, m.Leave)
    membership.hello(B, hello(B, "b1"), 1.2)
    ((ranks, message),) = sent(outbox)
    assert ranks == (B,) and isinstance(message, m.Leave), "given up means given up"


def test_a_rank_of_another_version_leaves_with_both_versions_named(
    membership: Membership, outbox: Outbox
) -> None:
    membership.hello(A, hello(A, "a1", PROTOCOL + 1), 0.0)
    ((_, message),) = sent(outbox)
    assert isinstance(message, m.Leave)
    assert f"protocol {PROTOCOL + 1}, this controller {PROTOCOL}" in message.reason
    assert "protocol" in membership.why[0]


def test_a_silent_rank_loses_its_group(membership: Membership) -> None:
    membership.hello(A, hello(A, "a1"), 0.0)
    membership.hello(B, hello(B, "b1"), 0.0)
    membership.heard(A, 4.0)
    assert membership.silent(5.0) == []
    assert membership.silent(5.1) == [(0, "rank g0-s0-t1 is silent for 5.1 s")]
    membership.lose(0, "silent")
    assert membership.state(0) == LOST and membership.restart == (0,)


def test_a_rank_whose_connection_has_ended_has_a_second_to_speak(membership: Membership) -> None:
    membership.hello(A, hello(A, "a1"), 0.0)
    membership.hello(B, hello(B, "b1"), 0.0)
    membership.hung_up(Coordinate(7, 0, 0), 1.0)  # nobody's
    membership.hung_up(B, 1.0)
    assert membership.silent(2.0) == []
    assert membership.silent(2.1) == [(0, f"rank {B} is gone: its connection has ended")]
    membership.hello(B, hello(B, "b1"), 1.5)  # as every new connection begins
    assert membership.silent(2.1) == []
    membership.hung_up(B, 3.0)
    membership.excuse(2.0)
    assert membership.silent(5.9) == []


def begun(outbox: Outbox, stages: int = 1) -> Moves:
    moves = Moves(Topology(spp=stages, kvp_max=2), outbox)
    moves.begin(MOVE, 0.0)
    return moves


def test_pages_are_offered_read_and_withdrawn_on_every_stage_before_a_copy_counts(
    outbox: Outbox,
) -> None:
    moves = begun(outbox, stages=2)
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
    assert done == Outcome(MOVE, True, moved_bytes=150, elapsed_s=6.0)
    assert moves.switch(7) == MOVE and not len(moves)


def test_a_move_called_off_waits_until_every_reader_is_terminal(outbox: Outbox) -> None:
    moves = begun(outbox, stages=2)
    moves.offered(Coordinate(0, 0, 0), m.Offered(7, (1, 1)), 1.0)
    assert moves.offered(Coordinate(0, 1, 0), m.Offered(7, (), error="not here"), 2.0) is None
    assert isinstance(sent(outbox)[-1][1], m.Withdraw)
    over = moves.fetched(Coordinate(1, 0, 0), m.Fetched(7, True), 3.0)
    assert over is not None and not over.ok and over.reason == "offer"


def test_a_reader_that_never_answers_is_taken_for_lost_after_two_leases(outbox: Outbox) -> None:
    moves = begun(outbox)
    moves.offered(A, m.Offered(7, (1, 1)), 0.0)
    assert moves.overdue(LEASE_S) == ([], set())
    assert moves.overdue(2 * LEASE_S) == ([], {1})
    (over,) = moves.lose(1, 2 * LEASE_S)
    assert not over.ok and over.reason == "lease" and not len(moves)


def test_a_grant_of_another_number_of_pages_calls_the_move_off(outbox: Outbox) -> None:
    over = begun(outbox).offered(A, m.Offered(7, (1,)), 1.0)
    assert over is not None and over.reason == "offer"


@pytest.mark.parametrize(
    "router, is_literal",
    [
        ("tcp://127.0.0.1:7800", True),
        ("tcp://[::1]:7800", True),
        ("ipc:///run/router", True),
        ("tcp://routers:7800", False),
    ],
)
def test_only_names_are_resolved(router: str, is_literal: bool) -> None:
    assert literal(router) is is_literal


def test_a_name_stands_for_all_its_addresses_and_keeps_them_while_dns_fails() -> None:
    answers: list[list[str]] = [["10.0.0.1", "10.0.0.2"], [], ["10.0.0.2"]]

    def look(host: str, port: int) -> list[str]:
        assert (host, port) == ("routers", 7800)
        if not (found := answers.pop(0)):
            raise OSError("no answer")
        return found

    names = Names(("tcp://127.0.0.1:1", "tcp://routers:7800"), look)
    both = ("tcp://127.0.0.1:1", "tcp://10.0.0.1:7800", "tcp://10.0.0.2:7800")
    assert names.resolve() == both
    assert names.resolve() == both
    assert names.resolve() == ("tcp://127.0.0.1:1", "tcp://10.0.0.2:7800")


def test_time_that_we_slept_through_is_nobodys_silence(membership: Membership) -> None:
    membership.hello(A, hello(A, "a1"), 0.0)
    membership.excuse(4.0)
    assert membership.silent(9.0) == []
    membership.excuse(0.9)  # an ordinary pause excuses nothing
    assert membership.silent(9.1) == [(0, f"rank {A} is silent for 5.1 s")]
