"""A listener tells whose connection has ended, and is not kept busy by those who never spoke."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.adapters.links import REPORT, Front, dial, exchange, listen, until

from medha.config import Curve


def next_closed(front: Front) -> tuple[bytes, ...]:
    """Whose connections have ended, as soon as one has."""
    end = time.monotonic() + 20.0
    while not (told := front.closed()):
        assert time.monotonic() < end, "no connection has ended"
        time.sleep(0.005)
    return told


@pytest.mark.parametrize("kind", ["tcp", "ipc", "curve"])
def test_the_end_of_a_connection_is_told_once_its_last_words_are_read(
    kind: str, tmp_path: Path, keys: dict[str, Curve]
) -> None:
    bind = f"ipc://{tmp_path}/x.sock" if kind == "ipc" else "tcp://127.0.0.1:0"
    mine, theirs = (keys["router"], keys["friend"]) if kind == "curve" else (None, None)
    with closing(listen(bind, mine)) as front, closing(dial(front.address, b"two", theirs)) as two:
        with closing(dial(front.address, curve=theirs)) as one:
            exchange(front, one)
            assert front.closed() == ()
            assert one.send(REPORT)
            until(lambda: front._socket.poll(0))
        assert two.send(REPORT)
        assert front.closed() == ()  # it has said something that was not received yet
        assert {front.receive(5.0), front.receive(5.0)} == {(b"one", REPORT), (b"two", REPORT)}
        assert next_closed(front) == (b"one",)
        assert front.closed() == ()
        with closing(dial(front.address, curve=theirs)) as again:
            exchange(front, again)
        assert next_closed(front) == (b"one",)


def test_a_thousand_strangers_who_come_and_go_block_nobody(front: Front) -> None:
    host, port = front.address.removeprefix("tcp://").split(":")
    for _ in range(1000):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"junk")
    with closing(dial(front.address)) as back:
        exchange(front, back)
    assert next_closed(front) == (b"one",)
