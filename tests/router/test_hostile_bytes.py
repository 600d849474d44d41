"""Hostile bytes on every port of a router: nothing executes, crashes, leaks or is delivered."""

from __future__ import annotations

import contextlib
import pathlib
import random
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import zmq
from tests.router.conftest import PATIENT_S

from medha import messages as m

LONG = {"model": "tiny", "prompt": "say " + "a" * 600, "max_tokens": 700, "stream": True}
SECRET = "a" * 20
UP: m.Codec[m.ReplicaMessage] = m.Codec(m.ReplicaMessage)
DOWN: m.Codec[m.RouterMessage] = m.Codec(m.RouterMessage)


def blobs(proof: pathlib.Path) -> list[bytes]:
    chance = random.Random(5)
    payload = f"cos\nmkdir\n(V{proof}\ntR.".encode()  # a pickle that makes this folder
    return [
        payload,
        b"\x00" * 5000,
        b"\xff" * 5000,
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL" + b"\0" * 48 + payload,  # ZMTP's greeting
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01PLAIN" + b"\0" * 47 + b"\x04\xff" * 40,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),  # a TLS hello
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /drain HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"f" * 40
        + b"\r\n",
        b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v1/models\x00 HTTP/1.1\r\nhost: x\r\nx: \x00\r\n\r\n",
        *(chance.randbytes(chance.randrange(1, 3000)) for _ in range(40)),
    ]


def ports(running: Any) -> dict[str, tuple[str, int]]:
    host, port = running.router.fleet_address.removeprefix("tcp://").split(":")
    return {
        "public": running.router.public.getsockname(),
        "ops": ("127.0.0.1", running.router.ops_port),
        "fleet": (host, int(port)),
    }


class Stream(threading.Thread):
    """A stream of a client; `text` is all that it received."""

    def __init__(self, running: Any) -> None:
        super().__init__(daemon=True)
        self._running, self.text = running, ""
        self.start()

    def run(self) -> None:
        with self._running.http.stream("POST", "/v1/completions", json=LONG) as response:
            for piece in response.iter_text():
                self.text += piece

    def check(self, eventually: Callable[..., None]) -> None:
        """Fail unless the stream ends as if nothing had happened."""
        eventually(lambda: not self.is_alive())
        assert self.text.count('"text":"') >= 1 and self.text.endswith("data: [DONE]\n\n")
        assert "event: error" not in self.text and "evil" not in self.text


@pytest.fixture
def streaming(alone: Any, eventually: Callable[..., None]) -> Any:
    """A router whose controller has stopped in the middle of a stream."""
    controller = alone.open()
    controller.burst = 1
    alone.stream = Stream(alone)
    eventually(lambda: alone.stream.text)
    controller.emitting.clear()
    return alone


@pytest.mark.parametrize("port", ["public", "ops", "fleet"])
def test_bytes_of_no_protocol_harm_no_stream(
    streaming: Any, tmp_path: pathlib.Path, eventually: Callable[..., None], port: str
) -> None:
    proof = tmp_path / "executed"
    for blob in blobs(proof):
        link = socket.create_connection(ports(streaming)[port], timeout=PATIENT_S)
        with link, contextlib.suppress(OSError):  # closed by the router, or without an answer
            link.sendall(blob)
            link.shutdown(socket.SHUT_WR)
            link.settimeout(0.05)
            answer = link.recv(1 << 16)
            assert SECRET.encode() not in answer and b"Traceback" not in answer
            assert not answer.startswith(b"HTTP/1.1 5")
    assert not proof.exists()
    assert streaming.ops.get("/healthz").status_code == 200
    assert streaming.http.get("/v1/models").status_code == 200
    controller = streaming.controllers[0]
    controller.burst = 50
    controller.emitting.set()
    streaming.stream.check(eventually)
    assert len(controller.seen) == 1 and not controller.aborted


def forged(id: str) -> list[m.ReplicaMessage]:
    """Messages that would change a request, if they were taken from anybody."""
    evil = tuple(b" evil")
    return [
        m.Accepted(id, 5),
        *(m.Tokens(id, first, evil) for first in range(3)),
        m.Finished(id, "stop", 1, 1, 0),
        m.Failed(id, "internal", "evil"),
        m.Failed(id, "lost", "evil", True),
        m.Grant((id,)),
        m.TenantCounts("evil", (m.TenantCount("", 1e15, 1e15, 1e15, 1e15),)),
        m.KvEvents(1, b"x" * 16),
    ]


def test_messages_of_a_peer_without_hello_are_not_delivered(
    streaming: Any, tmp_path: pathlib.Path, eventually: Callable[..., None]
) -> None:
    controller = streaming.controllers[0]
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.setsockopt(zmq.RCVTIMEO, 60_000)
    peer.connect(streaming.router.fleet_address)
    proof = tmp_path / "executed"
    for data in [*blobs(proof), *(UP.encode(message) for message in forged(controller.seen[0].id))]:
        peer.send(data)
    answers = [DOWN.decode(peer.recv()) for _ in forged("")]
    assert {type(answer) for answer in answers} == {m.Rejected}
    peer.close()
    context.term()
    assert not proof.exists()
    controller.burst = 50
    controller.emitting.set()
    streaming.stream.check(eventually)


def test_a_replica_cannot_touch_requests_of_another(
    streaming: Any, eventually: Callable[..., None]
) -> None:
    controller = streaming.controllers[0]
    other = streaming.open("r1")
    other.granting = False
    for message in forged(controller.seen[0].id):
        other.tell(message)
    eventually(lambda: controller.seen[0].id in other.aborted)
    assert other.seen == [] and other.heads == ()
    controller.burst = 50
    controller.emitting.set()
    streaming.stream.check(eventually)
