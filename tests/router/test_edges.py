"""The edges of the public port, by hand over sockets: framing, limits, slow clients, the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.router.conftest import PATIENT_S
from uvicorn.server import ServerState

from medha.config import RouterConfig, RouterModel, render
from medha_router.http_protocol import HttpLimits, HttpProtocol
from medha_router.server import server_of

Running = Any
Eventually = Callable[..., None]
LIMITS = HttpLimits(head_s=1.0)
DRIP_S = 0.1
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"
LONG = {"model": "tiny", "prompt": "say " + "a" * 900, "max_tokens": 1000, "stream": True}


def connect(running: Running) -> socket.socket:
    return socket.create_connection(running.router.public.getsockname(), timeout=PATIENT_S)


def rest(link: socket.socket) -> bytes:
    """Return everything until the server closes the connection."""
    received = b""
    while part := link.recv(1 << 16):
        received += part
    return received


def post(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


# --- framing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "framing",
    [
        b"HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1\r\nhost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1\r\ncontent-length: 5\r\n\r\n",
        b"HTTP/1.1\r\nhost: x\r\nhost: y\r\ncontent-length: 5\r\n\r\n",
    ],
)
def test_a_body_with_two_lengths_smuggles_no_second_request(
    served: Running, framing: bytes
) -> None:
    with connect(served) as link:
        link.sendall(b"POST /v1/models " + framing + b"0\r\n\r\n" + GET + b"\r\n")
        answer = rest(link)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer.lower() and b'"code":"invalid_http"' in answer


def test_a_client_that_offers_http2_is_served_in_this_protocol(served: Running) -> None:
    body = json.dumps({"model": "tiny", "prompt": "say hi", "max_tokens": 2}).encode()
    with connect(served) as link:
        link.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\n"
            b"upgrade: h2c\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        answer = link.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 200 ") and b'"text":"hi"' in answer


def test_pipelined_requests_are_answered_in_order_before_garbage_ends_them(served: Running) -> None:
    slow = post("/v1/completions", {"model": "tiny", "prompt": "say abc", "max_tokens": 3})
    with connect(served) as link:
        link.sendall(slow + GET + b"\r\n" + slow + b"\x00garbage\r\n\r\n")
        answer = rest(link)
    first, listed, second = answer.split(b"HTTP/1.1 200 ")[1:]
    assert b'"text":"abc"' in first and b'"data":' in listed and b'"text":"abc"' in second
    assert b"HTTP/1.1 400" not in answer and b"connection: close" in second


# --- limits of heads ------------------------------------------------------------------------------


def long_headers() -> bytes:
    return GET + b"".join(b"x-%d: %s\r\n" % (i, b"y" * 1000) for i in range(80)) + b"\r\n"


def many_headers() -> bytes:
    return GET + b"".join(b"x-%d: y\r\n" % i for i in range(150)) + b"\r\n"


@pytest.mark.parametrize("segment", [500, 30_000, 1 << 20])
@pytest.mark.parametrize("head", [long_headers(), many_headers()], ids=["long", "many"])
def test_heads_are_limited_in_any_segmentation(served: Running, head: bytes, segment: int) -> None:
    with connect(served) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError):  # refused before its end
            for start in range(0, len(head), segment):
                link.sendall(head[start : start + segment])
        answer = link.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 431 ") and b'"code":"headers_too_large"' in answer


def test_heads_within_the_limits_are_served_on_one_connection(served: Running) -> None:
    head = GET + b"".join(b"x-%d: %s\r\n" % (i, b"y" * 600) for i in range(90)) + b"\r\n"
    with connect(served) as link:
        for _ in range(3):
            link.sendall(head)
            assert link.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        link.sendall(GET + b"connection: close\r\n\r\n" + b"")
        assert rest(link).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("segment", [500, 30_000, 1 << 20])
def test_a_url_within_the_limits_is_served_in_any_segmentation(
    served: Running, segment: int
) -> None:
    head = b"GET /" + b"x" * 60_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"
    with connect(served) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(head), segment):
            link.sendall(head[start : start + segment])
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 404 ")


def test_trailers_are_limited(served: Running) -> None:
    with connect(served) as link:
        link.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        link.sendall(b"2\r\n{}\r\n0\r\nx: ")
        with contextlib.suppress(ConnectionError):  # refused before its end
            for _ in range(100):
                link.sendall(b"y" * 10_000)
        answer = link.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 431 ")


# --- slow clients ---------------------------------------------------------------------------------


async def empty_answers(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


@contextlib.contextmanager
def hasty_server() -> Iterator[tuple[str, int]]:
    """Serve an application that ignores bodies, with short time limits."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = server_of(empty_answers, lambda: None, lambda: True, drain_s=1.0, limits=LIMITS)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    try:
        yield listening.getsockname()
    finally:
        server.should_exit = True
        thread.join(PATIENT_S)


def drips_until_closed(link: socket.socket, data: bytes) -> bool:
    """Send a byte at a time; return True if the server closes the connection before the end."""
    link.settimeout(DRIP_S)
    for byte in data:
        try:
            link.sendall(bytes([byte]))
            if link.recv(1 << 16) == b"":
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


@pytest.mark.parametrize("kept", [False, True])
def test_a_head_must_arrive_in_time_on_new_and_on_kept_connections(kept: bool) -> None:
    with hasty_server() as address, socket.create_connection(address, timeout=PATIENT_S) as link:
        if kept:
            link.sendall(GET + b"\r\n")
            assert link.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert drips_until_closed(link, GET)


def test_empty_lines_do_not_hold_a_kept_connection() -> None:
    with hasty_server() as address, socket.create_connection(address, timeout=PATIENT_S) as link:
        link.sendall(GET + b"\r\n")
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert drips_until_closed(link, b"\r\n" * 20)


def test_a_connection_without_a_request_is_closed() -> None:
    with hasty_server() as address, socket.create_connection(address, timeout=PATIENT_S) as link:
        assert link.recv(1) == b""


def test_the_rest_of_a_body_must_arrive_in_time_after_its_response() -> None:
    with hasty_server() as address, socket.create_connection(address, timeout=PATIENT_S) as link:
        link.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert drips_until_closed(link, b"x" * 60)


def test_a_kept_connection_may_rest_between_requests() -> None:
    with hasty_server() as address, socket.create_connection(address, timeout=PATIENT_S) as link:
        for _ in range(2):
            link.sendall(GET + b"\r\n")
            assert link.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            link.settimeout(2 * LIMITS.head_s)
            with pytest.raises(TimeoutError):
                link.recv(1)


def test_a_client_that_does_not_read_is_given_up_and_its_work_aborted(
    running_with: Callable[..., Running], eventually: Eventually
) -> None:
    running = running_with(stall_timeout_s=0.3)
    controller = running.open()
    controller.burst = 1
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.connect(running.router.public.getsockname())
    body = {**LONG, "n": 8, "logprobs": 5}
    link.sendall(post("/v1/completions", body))
    eventually(lambda: len(controller.seen) == 8)
    eventually(lambda: running.router.router.service.live == 0)
    eventually(lambda: sorted(controller.aborted) == sorted(sent.id for sent in controller.seen))
    assert not controller.running
    link.close()


# --- turns of the event loop ----------------------------------------------------------------------


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves only if the test advances it."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def turn(self, after_s: float = 0.0) -> None:
        """Advance the clock, and run what is due then and what that makes ready."""
        self.now_s += after_s
        for _ in range(5):
            self.run_until_complete(asyncio.sleep(0))


class Transport(asyncio.Transport):
    """A transport without a socket: `unsent_bytes` of `written` are still in its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.unsent_bytes = 0
        self._reading, self._closing = True, False

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True

    def is_reading(self) -> bool:
        return self._reading

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    abort = close


class GatedApp:
    """An application that answers with the path once its gate is open. `paths`: of all requests."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.paths: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        await self.gate.wait()
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": scope["path"].encode()})


@contextlib.contextmanager
def connection(app: ASGIApp) -> Iterator[tuple[VirtualLoop, Transport, HttpProtocol]]:
    """Connect a client in virtual time."""
    config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None)
    config.load()
    with contextlib.closing(VirtualLoop()) as loop:
        protocol = HttpProtocol(config, ServerState(), {}, loop, limits=LIMITS)
        protocol.connection_made(transport := Transport())
        yield loop, transport, protocol


def numbered(count: int, first: int = 0) -> bytes:
    return b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % (first + i) for i in range(count))


def test_any_number_of_pipelined_offers_of_another_protocol_is_served() -> None:
    offer = GET + b"connection: upgrade\r\nupgrade: x\r\n\r\n"
    with hasty_server() as address, socket.create_connection(address, timeout=PATIENT_S) as link:
        link.sendall(offer * 1500 + GET + b"connection: close\r\n\r\n")
        assert rest(link).count(b"HTTP/1.1 200 ") == 1501


def test_a_long_pipeline_is_parsed_while_its_requests_are_answered_in_order() -> None:
    app, count = GatedApp(), 5000
    with connection(app) as (loop, transport, protocol):
        protocol.data_received(numbered(count // 2))
        protocol.data_received(numbered(count // 2, count // 2))
        loop.turn()
        assert app.paths == ["/0"] and not transport.is_reading()
        app.gate.set()
        longest = 0
        while len(app.paths) < count or not transport.is_reading():
            longest = max(longest, len(protocol.pipeline))
            loop.turn()
        assert app.paths == [f"/{number}" for number in range(count)]
        assert transport.written.count(b"HTTP/1.1 200 ") == count
        assert longest < 200 and not transport.is_closing()


def test_a_long_read_of_short_chunks_is_parsed_in_several_turns() -> None:
    bodies = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        bodies.append(body)
        await empty_answers(scope, receive, send)

    content = b"0123456789" * 4000
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content)
    with connection(app) as (loop, transport, protocol):
        head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        protocol.data_received(head + chunks + b"0\r\n\r\n")
        assert len(protocol.cycle.body) < len(content) and not transport.is_reading()
        while not bodies:
            loop.turn()
        assert bodies == [content] and transport.is_reading()


@pytest.mark.parametrize("chunks", [0, 40_000])
def test_nothing_more_is_parsed_after_a_disconnect(
    monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    app, parsed = GatedApp(), list[bytes]()
    head = b"POST /0 HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    with connection(app) as (loop, transport, protocol):
        protocol.data_received(head + b"1\r\nx\r\n" * chunks if chunks else numbered(1000))
        transport.close()
        protocol.connection_lost(None)
        monkeypatch.setattr(protocol, "_parse", parsed.append)
        app.gate.set()
        loop.turn()
        assert app.paths in (["/0"], []) and not parsed


def test_a_request_has_no_response_once_its_connection_is_lost_with_others_behind_it() -> None:
    app = GatedApp()
    with connection(app) as (loop, transport, protocol):
        protocol.data_received(numbered(3))
        loop.turn()
        transport.close()
        protocol.connection_lost(None)
        app.gate.set()
        loop.turn()
        assert app.paths == ["/0"] and transport.written == b""


def test_garbage_after_a_long_pipeline_ends_it_once_its_requests_are_answered() -> None:
    app = GatedApp()
    app.gate.set()
    with connection(app) as (loop, transport, protocol):
        protocol.data_received(numbered(1000) + b"\x00garbage\r\n\r\n" + numbered(1000))
        while not transport.is_closing():
            loop.turn()
        assert len(app.paths) == 1000 and transport.written.count(b"HTTP/1.1 200 ") == 1000
        assert b"HTTP/1.1 400 " not in transport.written


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("together", [True, False])
def test_a_broken_body_is_not_answered_before_the_requests_ahead_of_it(
    count: int, together: bool
) -> None:
    app = GatedApp()
    broken = b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n"
    with connection(app) as (loop, transport, protocol):
        for data in [numbered(count) + broken] if together else [numbered(count), broken]:
            protocol.data_received(data)
            loop.turn()
        assert transport.written == b"" and not transport.is_closing()
        app.gate.set()
        while not transport.is_closing():
            loop.turn()
        assert app.paths == [f"/{number}" for number in range(count)]
        assert transport.written.count(b"HTTP/1.1 200 ") == count
        assert b"HTTP/1.1 400 " not in transport.written


@pytest.mark.parametrize("count", [2, 1000])
def test_a_head_that_the_server_does_not_read_is_not_late(count: int) -> None:
    app = GatedApp()
    with connection(app) as (loop, transport, protocol):
        protocol.data_received(numbered(count) + GET)
        if count == 1000:  # some are unparsed
            protocol.flow.resume_reading()  # as an application does that takes a body
        for _ in range(3):
            loop.turn(after_s=LIMITS.head_s)
        assert app.paths == ["/0"] and not (transport.is_reading() or transport.is_closing())
        app.gate.set()
        while not transport.is_reading() or len(app.paths) < count:
            loop.turn()
        assert not transport.is_closing()
        for _ in range(2):
            loop.turn(after_s=LIMITS.head_s)
        assert transport.is_closing()


def test_a_client_that_reads_slowly_is_disconnected_only_once_it_reads_nothing() -> None:
    app = GatedApp()
    with connection(app) as (loop, transport, protocol):
        protocol.data_received(numbered(1))
        transport.unsent_bytes = 1000
        protocol.pause_writing()
        for number in range(5):
            loop.turn(after_s=LIMITS.stall_s / 2)
            transport.unsent_bytes -= 10
            if number == 2:
                protocol.flow.write(b"x" * 50)
                transport.unsent_bytes += 50
        loop.turn(after_s=LIMITS.stall_s / 2)
        assert not transport.is_closing()
        loop.turn(after_s=LIMITS.stall_s)
        assert transport.is_closing()
        protocol.connection_lost(None)
        app.gate.set()
        loop.turn()


# --- the end of the process -----------------------------------------------------------------------


@contextlib.contextmanager
def router_process(
    tmp_path: pathlib.Path, **settings: Any
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Start a router that leads its own process group; yield it, its URL and fleet address."""
    config = RouterConfig(
        port=0,
        ops_port=0,
        fleet_bind="tcp://127.0.0.1:0",
        models=(RouterModel(name="tiny", max_context_tokens=2048),),
        **settings,
    )
    path = tmp_path / "router.json"
    path.write_bytes(render(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "medha_router", "--config", str(path)],
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        assert process.stderr is not None
        line = json.loads(process.stderr.readline())
        yield process, line["url"], line["fleet"]
    finally:
        process.kill()
        process.communicate()


def begin_stream(link: socket.socket) -> None:
    """Request a stream and wait for its first event."""
    link.sendall(post("/v1/completions", LONG))
    received = b""
    while b"data: " not in received:
        received += link.recv(1 << 16)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_each_stream_with_an_error_event(
    tmp_path: pathlib.Path, dial: Callable[[str], Any], number: int
) -> None:
    with router_process(tmp_path) as (process, url, fleet), contextlib.ExitStack() as links:
        controller = dial(fleet)
        controller.burst = 1
        *streams, waiting, uploading = [links.enter_context(connect_to(url)) for _ in range(5)]
        for link in streams:
            begin_stream(link)
        controller.emitting.clear()
        controller.granting = False
        waiting.sendall(post("/v1/completions", {**LONG, "prompt": "say b"}))
        uploading.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        os.killpg(process.pid, number)  # as a terminal does, to the tokenizer processes too
        wait_for_drain(url)
        os.killpg(process.pid, number)
        for link in streams:
            ending = rest(link)
            assert b'event: error\ndata: {"error":{"message":"this router is shut' in ending
            assert b"[DONE]" not in ending and ending.endswith(b"\r\n0\r\n\r\n")
        for link in (waiting, uploading):
            answer = rest(link)
            assert answer.startswith(b"HTTP/1.1 503 ") and b'"code":"draining"' in answer
        _, log = process.communicate(timeout=PATIENT_S)
        assert process.returncode == 0
        assert "Traceback" not in log
        assert sorted(set(controller.aborted)) == sorted(s.id for s in controller.seen)


def test_streams_that_outlast_a_drain_end_with_an_error_event(
    tmp_path: pathlib.Path, dial: Callable[[str], Any]
) -> None:
    with router_process(tmp_path, drain_timeout_s=0.5) as (process, url, fleet):
        controller = dial(fleet)
        controller.burst = 1
        with connect_to(url) as link:
            begin_stream(link)
            controller.emitting.clear()
            process.send_signal(signal.SIGTERM)
            ending = rest(link)
        assert b"event: error" in ending and b"[DONE]" not in ending
        assert process.wait(PATIENT_S) == 0


def connect_to(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENT_S)


def wait_for_drain(url: str) -> None:
    """Wait until new requests are refused because the router drains."""
    for _ in range(200):
        with connect_to(url) as link, contextlib.suppress(TimeoutError):
            link.settimeout(1.0)  # before the drain begins, the request waits to be granted
            link.sendall(post("/v1/completions", {**LONG, "stream": False, "max_tokens": 1}))
            if link.recv(1 << 16).startswith(b"HTTP/1.1 503 "):
                return
    raise AssertionError("the router does not drain")
