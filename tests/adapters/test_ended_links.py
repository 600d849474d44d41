"""A listener reports ended connections, and silent strangers do not keep it busy."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.adapters.links import REPORT, Front, dial, exchange, listen, until

from medha.config import Curve


def next_closed(front: Front) -> tuple[bytes, ...]:
    """Wait until a connection has ended; return the peers."""
    end = time.monotonic() + 60.0
    while not (peers := front.closed()):
        assert time.monotonic() < end, "no connection has ended"
        time.sleep(0.005)
    return peers


@pytest.mark.parametrize("kind", ["tcp", "ipc", "curve"])
def test_an_ended_connection_is_reported_once_its_messages_are_read(
    kind: str, tmp_path: Path, keys: dict[str, Curve]
) -> None:
    bind = f"ipc://{tmp_path}/x.sock" if kind == "ipc" else "tcp://127.0.0.1:0"
    mine, theirs = (keys["router"], keys["friend"]) if kind == "curve" else (None, None)
    with (
        closing(listen(bind, mine)) as front,
        closing(dial(front.address, b"two", theirs)) as second,
    ):
        with closing(dial(front.address, curve=theirs)) as first:
            exchange(front, first)
            assert front.closed() == ()
            assert first.send(REPORT)
            until(lambda: front._socket.poll(0))
        assert second.send(REPORT)
        assert front.closed() == ()  # a message of the peer was not received yet
        assert {front.receive(30.0), front.receive(30.0)} == {(b"one", REPORT), (b"two", REPORT)}
        assert next_closed(front) == (b"one",)
        assert front.closed() == ()
        with closing(dial(front.address, curve=theirs)) as again:
            exchange(front, again)
        assert next_closed(front) == (b"one",)


def test_the_end_of_a_second_connection_of_a_peer_is_reported_too(front: Front) -> None:
    with closing(dial(front.address)) as first:
        exchange(front, first)
    with closing(dial(front.address)) as again:
        exchange(front, again)
        assert next_closed(front) == (b"one",)  # of the first one
        exchange(front, again)
        assert front.closed() == ()
    assert next_closed(front) == (b"one",)


def test_a_thousand_strangers_that_disconnect_block_no_peer(front: Front) -> None:
    host, port = front.address.removeprefix("tcp://").split(":")
    for _ in range(1000):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"junk")
    with closing(dial(front.address)) as back:
        exchange(front, back)
    assert next_closed(front) == (b"one",)
