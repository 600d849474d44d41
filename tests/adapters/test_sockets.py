"""Links carry typed messages, and no input to their port can break them."""

from __future__ import annotations

import asyncio
import functools
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from tests.adapters.links import DOWN, REPORT, UP, Back, Front, dial, exchange, listen, until

from medha.adapters.keys import read_keys
from medha.adapters.sockets import UNCOPIED_BYTES, wait, write_keys
from medha.config import Curve
from medha.errors import SetupError
from medha.messages import (
    Abort,
    FilePart,
    RouterBeat,
    Tokens,
)


def test_a_message_arrives_with_its_type_and_its_peers_name(front: Front) -> None:
    with closing(dial(front.address)) as back:
        exchange(front, back)
        assert back.handshakes == 1


def test_links_work_over_a_unix_socket(tmp_path: Path) -> None:
    with (
        closing(listen(f"ipc://{tmp_path}/x.sock")) as front,
        closing(dial(front.address)) as back,
    ):
        exchange(front, back)


def test_a_message_to_an_unknown_peer_is_refused_and_counted(front: Front) -> None:
    assert front.send(b"nobody", RouterBeat()) is False
    assert front.unsent == 1


def test_receiving_ends_when_the_time_is_over(front: Front) -> None:
    begun = time.monotonic()
    assert front.receive(0.02) is None
    assert 0.015 < time.monotonic() - begun < 20.0


def test_a_message_sent_before_the_listener_exists_waits_for_it(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/late.sock"
    with closing(dial(address)) as back:
        assert back.send(REPORT)
        with closing(listen(address)) as front:
            assert front.receive(30.0) == (b"one", REPORT)


def redialled(back: Back, handshakes: int) -> bool:
    return back.receive(0.05) is None and back.handshakes == handshakes


def test_a_restarted_listener_is_dialled_again_within_a_second(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/again.sock"
    front, took_s = listen(address), []
    with closing(dial(address)) as back:
        exchange(front, back)
        for handshakes in (2, 3, 4):
            front.close()
            front, begun = listen(address), time.monotonic()
            until(functools.partial(redialled, back, handshakes))
            took_s.append(time.monotonic() - begun)
            exchange(front, back)
        front.close()
    assert min(took_s) < 1.0  # a busy machine delays some


def test_a_dialer_that_comes_back_takes_its_old_name(front: Front) -> None:
    first = dial(front.address)
    exchange(front, first)
    with closing(dial(front.address)) as second:
        exchange(front, second)
        first.close()
        exchange(front, second)


def test_another_thread_posts_through_the_thread_that_waits(front: Front) -> None:
    with closing(dial(front.address)) as back:
        exchange(front, back)
        poster = threading.Timer(0.05, lambda: front.post(b"one", Abort("r1")))
        poster.start()
        assert wait([front], 30.0) is True
        assert back.receive(30.0) == Abort("r1")
        poster.join()


def test_waking_ends_a_wait_early_and_only_once(front: Front) -> None:
    front.wake()
    assert front.receive(30.0) is None
    assert wait([front], 0.01) is False
    front.wake()
    assert wait([front], 30.0) is True
    assert wait([front], 0.01) is False


def test_posts_to_a_full_outbox_are_refused(front: Front) -> None:
    results = [front.post(b"nobody", RouterBeat()) for _ in range(5000)]
    assert results.count(True) == 4096 and results[-1] is False
    assert wait([front], 30.0) is True
    assert front.unsent == 4096


def test_waiting_over_several_links_returns_when_any_has_something(tmp_path: Path) -> None:
    with (
        closing(listen(f"ipc://{tmp_path}/a")) as a,
        closing(listen(f"ipc://{tmp_path}/b")) as b,
        closing(dial(b.address)) as back,
    ):
        back.send(REPORT)
        until(lambda: wait([a, b], 1.0))
        assert a.receive() is None
        assert b.receive(1.0) == (b"one", REPORT)


def test_a_new_connection_ends_one_wait_and_not_every_later_one(front: Front) -> None:
    with closing(dial(front.address)) as back:
        until(lambda: wait([back], 1.0))
        assert back.handshakes == 1
        assert wait([back], 0.01) is False
        assert back.receive() is None


def test_polling_for_nothing_drains_the_news_of_a_connection(front: Front) -> None:
    with closing(dial(front.address)) as back:
        until(lambda: back.receive() is None and back._handshakes == 1)
        assert wait([back], 0.01) is False


def followed(link: Front | Back) -> asyncio.Queue[tuple[bytes, object]]:
    """Return a queue of the messages that arrive on the running loop."""
    arrived: asyncio.Queue[tuple[bytes, object]] = asyncio.Queue()
    link.follow(lambda peer, message: arrived.put_nowait((peer, message)))
    return arrived


def test_an_event_loop_receives_messages_while_it_sends(front: Front) -> None:
    async def answers(back: Back) -> list[int]:
        requests, replies = followed(front), followed(back)
        got = []
        for index in range(200):
            assert back.send(Tokens(id="r", first=index, tokens=(index,)))
            _, message = await asyncio.wait_for(requests.get(), 30.0)
            assert isinstance(message, Tokens)
            assert front.send(b"one", Abort(str(message.first)))
            _, reply = await asyncio.wait_for(replies.get(), 30.0)
            assert isinstance(reply, Abort)
            got.append(int(reply.id))
        return got

    with closing(dial(front.address)) as back:
        assert asyncio.run(answers(back)) == list(range(200))


def test_a_reader_on_an_event_loop_misses_nothing_while_others_send(front: Front) -> None:
    """Sending consumes the descriptor's signal; the reader must get its message anyway."""

    async def flood(back: Back) -> int:
        arrived = followed(front)
        for index in range(500):
            back.send(REPORT)
            front.send(b"one", RouterBeat())
            if index % 7 == 0:
                await asyncio.sleep(0)
        async with asyncio.timeout(10.0):
            return len([await arrived.get() for _ in range(500)])

    with closing(dial(front.address)) as back:
        exchange(front, back)
        assert asyncio.run(flood(back)) == 500


def test_large_messages_arrive_as_they_were_sent() -> None:
    tokens = [np.arange(at, at + UNCOPIED_BYTES // 4, dtype="<i4") for at in range(3)]
    with closing(listen(limit=1 << 22)) as front, closing(dial(front.address)) as back:
        exchange(front, back)
        for index, ids in enumerate(tokens):
            back.send(FilePart(str(index), 0, ids.nbytes, ids.tobytes()))
        for index, ids in enumerate(tokens):
            assert front.receive(30.0) == (
                b"one",
                FilePart(str(index), 0, ids.nbytes, ids.tobytes()),
            )


def test_a_message_that_fails_its_receiver_delays_none_after_it(front: Front) -> None:
    async def read(back: Back) -> bytes:
        done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        failures: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, error: failures.append(error))

        def receive(peer: bytes, message: object) -> None:
            if not failures:
                raise ValueError("the first message")
            done.set_result(peer)

        for _ in range(2):
            back.send(REPORT)
        await asyncio.sleep(0.1)
        front.follow(receive)
        return await asyncio.wait_for(done, 30.0)

    with closing(dial(front.address)) as back:
        exchange(front, back)
        assert asyncio.run(read(back)) == b"one"


def test_posts_reach_the_peer_of_a_link_that_an_event_loop_follows(front: Front) -> None:
    async def read(back: Back) -> object:
        followed(front)
        replies = followed(back)
        await asyncio.sleep(0.01)
        await asyncio.to_thread(front.post, b"one", Abort("late"))
        _, reply = await asyncio.wait_for(replies.get(), 30.0)
        return reply

    with closing(dial(front.address)) as back:
        exchange(front, back)
        assert asyncio.run(read(back)) == Abort("late")


def raw(address: str, *, name: bytes = b"evil") -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.IDENTITY, name)
    peer.setsockopt(zmq.LINGER, 0)
    peer.connect(address)
    yield peer
    peer.close()
    context.term()


def test_bytes_that_do_not_decode_are_counted_and_dropped(front: Front) -> None:
    junk = [
        b"",
        b"\xc1",
        b"junk",
        b"\x80\x04\x95.",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        DOWN.encode(RouterBeat()),
        UP.encode(REPORT) + b"x",
    ]
    for peer in raw(front.address):
        for data in junk:
            peer.send(data)
        peer.send_multipart([b"two", b"parts"])
        peer.send(UP.encode(REPORT))
        assert front.receive(30.0) == (b"evil", REPORT)
        assert front.rejected == len(junk) + 1


@given(data=st.binary(max_size=200))
def test_no_bytes_ever_raise_out_of_a_link(data: bytes) -> None:
    with closing(listen("inproc://any")) as front:
        peer = front._context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect("inproc://any")
        peer.send(data)
        peer.send(UP.encode(REPORT))
        received = front.receive(30.0)
        peer.close()
        assert received is not None


def test_an_oversized_message_disconnects_only_its_sender(tmp_path: Path) -> None:
    with (
        closing(listen("tcp://127.0.0.1:0", limit=1000)) as front,
        closing(dial(front.address)) as back,
    ):
        for peer in raw(front.address):
            peer.send(b"x" * 2000)
            exchange(front, back)
            assert front.receive(0.1) is None
            assert front.rejected == 0


def test_bytes_that_are_not_zeromq_leave_the_port_serving(front: Front) -> None:
    host, port = front.address.removeprefix("tcp://").split(":")
    blobs = [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\xff\0\0\0\0\0\0\0\1\x7f", b""]
    strangers = [socket.create_connection((host, int(port))) for _ in blobs]
    for stranger, blob in zip(strangers, blobs, strict=True):
        stranger.sendall(blob)
    with closing(dial(front.address)) as back:
        exchange(front, back)
    for stranger in strangers:
        stranger.close()
    assert front.rejected == 0


def test_a_listed_key_gets_through(keys: dict[str, Curve]) -> None:
    with (
        closing(listen(curve=keys["router"])) as front,
        closing(dial(front.address, curve=keys["friend"])) as back,
    ):
        exchange(front, back)


def test_an_unlisted_key_and_no_key_deliver_nothing(keys: dict[str, Curve]) -> None:
    with (
        closing(listen(curve=keys["router"])) as front,
        closing(dial(front.address, b"stranger", keys["stranger"])) as stranger,
        closing(dial(front.address, b"bare")) as bare,
    ):
        stranger.send(REPORT)
        bare.send(REPORT)
        assert front.receive(0.5) is None
        assert (stranger.handshakes, bare.handshakes) == (0, 0)
        with closing(dial(front.address, curve=keys["friend"])) as back:
            exchange(front, back)


def test_a_listener_with_another_key_is_not_trusted(keys: dict[str, Curve], tmp_path: Path) -> None:
    write_keys(tmp_path / "impostor.secret")
    impostor = Curve(secret=str(tmp_path / "impostor.secret"), allowed=keys["router"].allowed)
    with (
        closing(listen(curve=impostor)) as front,
        closing(dial(front.address, curve=keys["friend"])) as back,
    ):
        back.send(REPORT)
        assert front.receive(0.5) is None and back.handshakes == 0


def test_a_key_added_to_the_list_is_admitted_without_a_restart(keys: dict[str, Curve]) -> None:
    allowed = Path(keys["router"].allowed)
    stranger = Path(keys["stranger"].secret).with_suffix(".public").read_text()
    with closing(listen(curve=keys["router"])) as front:
        allowed.write_text(f"{allowed.read_text().strip()}\n{stranger}\n")
        with closing(dial(front.address, curve=keys["stranger"])) as back:
            exchange(front, back)


def test_an_unreadable_list_admits_no_peer(keys: dict[str, Curve]) -> None:
    with closing(listen(curve=keys["router"])) as front:
        Path(keys["router"].allowed).unlink()
        with closing(dial(front.address, curve=keys["friend"])) as back:
            back.send(REPORT)
            assert front.receive(0.3) is None


def test_secret_keys_are_for_their_owner_alone_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.secret"
    public = write_keys(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert zmq.curve_public(read_keys(str(path))[0]).decode() == public
    with pytest.raises(SetupError, match="cannot be created"):
        write_keys(path)


@pytest.mark.parametrize("text", ["short", "x" * 39 + '"', "a" * 41])
def test_a_key_file_that_holds_no_key_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken"
    path.write_text(text)
    with pytest.raises(SetupError, match=r"broken, key 1: must be 40 characters"):
        listen(curve=Curve(secret=str(path), allowed=str(path)))


def test_an_address_in_use_is_a_setup_error_that_names_it(front: Front) -> None:
    with pytest.raises(SetupError, match=r"cannot be opened .*in use"):
        listen(front.address)


def test_a_unix_path_too_long_for_the_system_is_refused_by_length(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="at most 107; choose a shorter run directory"):
        listen(f"ipc:///tmp/{'x' * 120}")
