"""The proxy does to a call what a test orders, once, and records everything.

Behind it stands a server that only counts its calls.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import msgspec
import pytest
from tests.api.fleet import until
from tests.api.life import Dying
from tests.api.proxy import Answer, Proxy

EVENTS = [
    json.dumps({"type": kind, "object": {"metadata": {"name": name}}}).encode()
    for kind, name in (("ADDED", "a"), ("MODIFIED", "b"), ("DELETED", "a"))
]
POSTS = """
import sys, urllib.request
for each in range(4):
    urllib.request.urlopen(urllib.request.Request(sys.argv[1], b"{}", method="POST")).read()
"""


class Counting(ThreadingHTTPServer):
    """Counts the writes it gets; a watch gets three events and ends."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Asked)
        self.writes = 0
        self.accounts: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Asked(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Counting)
        self.server.accounts.append(self.headers.get("Impersonate-User", ""))
        counted = json.dumps({"writes": self.server.writes}).encode()
        self._reply(200, b"\n".join([*EVENTS, b""]) if "watch" in self.path else counted)

    def do_POST(self) -> None:
        assert isinstance(self.server, Counting)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.writes += 1
        self._reply(201, json.dumps({"writes": self.server.writes}).encode())

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *words: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[Counting]:
    with Counting() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join(20)


@pytest.fixture
def proxy(server: Counting) -> Iterator[Proxy]:
    with Proxy(server.url, "token", "", "somebody").running() as proxy:
        yield proxy


@pytest.fixture
def client(proxy: Proxy) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=proxy.url, trust_env=False, timeout=30) as client:
        yield client


def recorded(proxy: Proxy) -> list[tuple[str, int, bool]]:
    """Verb, status, and whether a test placed it, of every answer."""
    return [(reply.call.verb, reply.status, reply.placed) for reply in proxy.done]


def test_without_tampering_every_answer_is_the_servers_and_recorded(
    server: Counting, proxy: Proxy, client: httpx.Client
) -> None:
    assert client.post("/pods?a=1", content=b"body").json() == {"writes": 1}
    assert client.get("/pods").json() == {"writes": 1}
    assert client.get("/pods?watch=1").content.splitlines() == EVENTS
    post, get, watch = proxy.calls
    assert (post.verb, post.path, post.query, post.body) == ("POST", "/pods", {"a": "1"}, b"body")
    assert post.writes and post.own and not get.writes and watch.watches and not get.watches
    assert recorded(proxy) == [("POST", 201, False), ("GET", 200, False), ("GET", 200, False)]
    assert proxy.done[0].own and msgspec.json.decode(proxy.done[0].answer) == {"writes": 1}
    assert proxy.last_write_s() == proxy.done[0].at_s
    events = [(event.type, event.name, event.times) for event in proxy.watch_lines]
    assert events == [("ADDED", "a", 1), ("MODIFIED", "b", 1), ("DELETED", "a", 1)]
    assert server.accounts == ["somebody", "somebody"]


def test_a_call_is_dropped_before_or_after_its_execution(
    server: Counting, proxy: Proxy, client: httpx.Client
) -> None:
    proxy.before = lambda call: Answer(0)
    with pytest.raises(httpx.TransportError):
        client.post("/pods")
    assert server.writes == 0 and recorded(proxy) == [("POST", 0, True)]
    assert proxy.last_write_s() == 0.0
    proxy.trust()
    proxy.after = lambda call: Answer(0)
    with pytest.raises(httpx.TransportError):
        client.post("/pods")
    assert server.writes == 1 and recorded(proxy)[1:] == [("POST", 201, False), ("POST", 0, True)]
    proxy.trust()
    assert client.post("/pods").json() == {"writes": 2}


def test_an_answer_in_the_servers_place_is_recorded_as_such(
    server: Counting, proxy: Proxy, client: httpx.Client
) -> None:
    proxy.before = lambda call: Answer(409, "Conflict") if call.writes else None
    answer = client.post("/pods")
    assert (answer.status_code, answer.json()["reason"]) == (409, "Conflict")
    assert answer.json()["kind"] == "Status" and server.writes == 0
    assert recorded(proxy) == [("POST", 409, True)] and not proxy.done[0].own
    assert msgspec.json.decode(proxy.done[0].answer) == answer.json()
    assert client.get("/pods").status_code == 200
    proxy.before = lambda call: Answer(502, page=b"<html>")
    assert client.get("/pods").content == b"<html>"


def test_a_duplicated_call_is_answered_once(
    server: Counting, proxy: Proxy, client: httpx.Client
) -> None:
    proxy.twice = lambda call: call.own
    assert client.post("/pods").json() == {"writes": 2}
    assert server.writes == 2 and len(proxy.calls) == 1
    assert recorded(proxy) == [("POST", 201, False)] * 2


def test_a_read_gets_a_former_answer(server: Counting, proxy: Proxy, client: httpx.Client) -> None:
    for _ in range(3):
        client.get("/pods?limit=5&continue=x")
        client.post("/pods")
    proxy.older = lambda call: 2 if call.path == "/pods" else 0
    assert client.get("/pods?limit=5").json() == {"writes": 1}
    proxy.older = lambda call: 9
    assert client.get("/pods?limit=5").json() == {"writes": 0}, "the first that there was"
    assert client.get("/nodes").json() == {"writes": 3}, "another question"
    proxy.trust()
    assert client.get("/pods?limit=5").json() == {"writes": 3}


def test_an_event_is_lost_duplicated_or_delayed(proxy: Proxy, client: httpx.Client) -> None:
    times = {"ADDED": 0, "MODIFIED": 2, "DELETED": 1}
    proxy.events = lambda call, line: [line] * times[json.loads(line)["type"]]
    first, second, third = EVENTS
    assert client.get("/pods?watch=1").content.splitlines() == [second, second, third]
    assert [event.times for event in proxy.watch_lines] == [0, 2, 1] and first not in (
        second,
        third,
    )


def test_a_call_waits_and_others_do_not(
    server: Counting, proxy: Proxy, client: httpx.Client
) -> None:
    held = threading.Event()
    proxy.delay = lambda call: 3600.0 if call.path == "/slow" else 0.0

    def ask() -> None:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/slow", timeout=httpx.Timeout(30.0, read=1.0))
        held.set()

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: proxy.calls)
    assert client.post("/pods").json() == {"writes": 1}
    assert held.wait(20) and server.writes == 1
    thread.join(20)
    proxy.delay = lambda call: 0.3
    began_s = time.monotonic()
    assert client.post("/pods").json() == {"writes": 2}
    assert time.monotonic() - began_s >= 0.3


class Writer:
    """A process that writes four times, with the part of an operator that `Dying` uses."""

    def __init__(self, url: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", POSTS, f"{url}/pods"])


@pytest.mark.parametrize("answered, spared, written", [(False, 1, (0, 1, 2)), (True, 0, (1, 2, 3))])
def test_a_process_is_killed_before_or_after_its_next_write(
    server: Counting, proxy: Proxy, answered: bool, spared: int, written: tuple[int, ...]
) -> None:
    lives: list[Writer] = []

    def start() -> Writer:
        lives.append(Writer(proxy.url))
        return lives[-1]

    dying = Dying(start, proxy, spared, answered)  # type: ignore[arg-type]
    for done in written:
        dying.restart()
        until(lambda: dying.deaths == len(lives))
        assert lives[-1].process.wait(20) == -9
        assert server.writes == done
    assert len(lives) == len(written)
    assert [reply.status for reply in proxy.done if reply.own] == [201] * written[-1]
    assert [reply.status for reply in proxy.done if reply.placed] == [0] * len(written)


def test_calls_of_a_dead_process_are_not_executed(
    server: Counting, proxy: Proxy, client: httpx.Client
) -> None:
    writer = Writer(proxy.url)
    dying = Dying(lambda: writer, proxy, 0, True)  # type: ignore[arg-type, return-value]
    dying.restart()
    until(lambda: dying.deaths)
    with pytest.raises(httpx.TransportError):
        client.post("/pods")
    assert writer.process.wait(20) == -9 and server.writes == 1
