"""A reverse proxy before a real API server, through which a test may tamper with calls.

Nothing of the API is imitated: without tampering, the client gets the server's own answers. Calls
are made as the account that the proxy was given, and everything is recorded:

    calls         every request, as it was sent
    done          every answer of the server, with its body if it was a write; and, marked as such,
                  every answer that a test gave in the server's place
    watch_lines   every event of a watch, and how many times it was passed on

    drop          `before` or `after` returns Answer(0): not executed, or executed but not answered
    refuse        any other Answer, in the server's place
    delay         `delay` returns seconds
    duplicate     `twice`: the server gets the call twice, the client one answer; so may `events`
    go back       `older`: a GET gets the answer of that many answers ago
    kill          whatever `before` and `after` do to the client, see tests/api/life.py
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import aiohttp
import msgspec
from aiohttp import web

DROPPED = ("Host", "Authorization", "Content-Length", "Transfer-Encoding", "Connection")
OLD = 50


class Call(msgspec.Struct, frozen=True):
    """A request; `writes` is true if it may change anything."""

    verb: str
    path: str
    query: dict[str, str]
    agent: str
    body: bytes = b""

    @property
    def writes(self) -> bool:
        return self.verb not in ("GET", "HEAD")

    @property
    def watches(self) -> bool:
        return "watch" in self.query

    @property
    def own(self) -> bool:
        """True for a write of the operator's own, other than to the Lease."""
        return self.writes and "/leases" not in self.path


class Answer(msgspec.Struct, frozen=True):
    """An answer in the server's place; status 0 cuts the connection."""

    status: int
    reason: str = ""
    page: bytes = b""
    """A body to send instead of a reason in the API's own form."""

    @property
    def body(self) -> bytes:
        if self.page:
            return self.page
        header = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        details = {"code": self.status, "reason": self.reason, "message": "said by the test"}
        return msgspec.json.encode(header | details)


class Done(msgspec.Struct, frozen=True):
    """A call with its answer: the server's, or a test's in its place (`placed`).

    A call that was executed but not answered has both. `answer` is the body of a write; former
    answers to reads are kept for `older`.
    """

    call: Call
    status: int
    answer: bytes
    at_s: float
    placed: bool = False

    @property
    def own(self) -> bool:
        """True for the server's answer to a write of the operator's own."""
        return self.call.own and not self.placed


class WatchLine(msgspec.Struct, frozen=True):
    """An event of a watch, and the number of lines that the client got for it."""

    path: str
    agent: str
    type: str
    name: str
    times: int


class Proxy:
    """Runs in a thread of its own.

    `before` answers instead of the server, `after` once the server has executed the call; `events`
    changes the lines of a watch.
    """

    def __init__(self, url: str, token: str, authority: str, account: str = "") -> None:
        self._url, self._token, self.account = url, token, account
        self._ssl = ssl.create_default_context(cafile=authority)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._old: dict[str, collections.deque[bytes]] = {}
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self.calls: list[Call] = []
        self.done: list[Done] = []
        self.watch_lines: list[WatchLine] = []
        self.url = ""
        self.trust()

    def trust(self) -> None:
        """Stop tampering."""
        self.before: Callable[[Call], Answer | None] = lambda call: None
        self.after: Callable[[Call], Answer | None] = lambda call: None
        self.delay: Callable[[Call], float] = lambda call: 0.0
        self.twice: Callable[[Call], bool] = lambda call: False
        self.older: Callable[[Call], int] = lambda call: 0
        self.events: Callable[[Call, bytes], list[bytes]] = lambda call, line: [line]

    def last_write_s(self) -> float:
        """Time of the last answer to a write, without those to the Lease (monotonic clock)."""
        return next((reply.at_s for reply in reversed(self.done) if reply.own), 0.0)

    @contextlib.contextmanager
    def running(self) -> Iterator[Proxy]:
        self._thread.start()
        self._do(self._start())
        try:
            yield self
        finally:
            self._do(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(20)
            self._loop.close()

    def _do(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)  # type: ignore[arg-type]

    async def _start(self) -> None:
        # Watches of killed operators stay open until the next event, so there is no limit.
        connector = aiohttp.TCPConnector(ssl=self._ssl, limit=0, socket_factory=self._new_socket)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        app = web.Application(client_max_size=16 << 20)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _end(self) -> None:
        await self._runner.cleanup()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()
        while any(connection.fileno() >= 0 for connection in self._sockets):
            await asyncio.sleep(0.01)  # TLS closes only after the server's answer

    def _new_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, *_ = address
        self._sockets.add(connection := socket.socket(family, kind, protocol))
        return connection

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """Answer a request; if the server is gone, cut the connection."""
        try:
            return await self._answered(request)
        except aiohttp.ClientError:
            return self._instead(request, Answer(0))

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        agent, body = request.headers.get("User-Agent", ""), await request.read()
        call = Call(request.method, request.path, dict(request.query), agent, body)
        self.calls.append(call)
        if (pause_s := self.delay(call)) > 0.0:
            await asyncio.sleep(pause_s)
        if (answer := self.before(call)) is not None:
            return self._placed(request, call, answer)
        if self.twice(call):
            async with self._asked(request, body) as first:
                self._note(call, first.status, await first.read())
        async with self._asked(request, body) as got:
            if call.watches and got.status == 200:
                self._note(call, got.status, b"")
                return await self._stream(request, call, got)
            content = await got.read()
            self._note(call, got.status, content)
            if (answer := self.after(call)) is not None:
                return self._placed(request, call, answer)
            kept = {"Content-Type": got.headers.get("Content-Type", "application/json")}
            if not call.writes and (back := self.older(call)):
                known = self._old[_where(call)]
                content = known[max(0, len(known) - 1 - back)]
            return web.Response(body=content, status=got.status, headers=kept)

    def _asked(
        self, request: web.Request, body: bytes
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send the same call to the server."""
        headers = {k: v for k, v in request.headers.items() if k not in DROPPED}
        headers["Authorization"] = f"Bearer {self._token}"
        if self.account:
            headers["Impersonate-User"] = self.account
        return self._session.request(
            request.method,
            self._url + request.path_qs,
            data=body or None,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None),
        )

    def _note(self, call: Call, status: int, content: bytes) -> None:
        self.done.append(Done(call, status, content if call.writes else b"", time.monotonic()))
        if status == 200 and not (call.writes or call.watches):
            self._old.setdefault(_where(call), collections.deque(maxlen=OLD)).append(content)

    async def _stream(
        self, request: web.Request, call: Call, got: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        rest = b""
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            async for piece in got.content.iter_any():
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    passed = self.events(call, line)
                    self.watch_lines.append(_watch_line(call, line, len(passed)))
                    for copy in passed:
                        await answer.write(copy + b"\n")
        return answer

    def _placed(self, request: web.Request, call: Call, answer: Answer) -> web.Response:
        kept = answer.body if call.writes else b""
        self.done.append(Done(call, answer.status, kept, time.monotonic(), placed=True))
        return self._instead(request, answer)

    @staticmethod
    def _instead(request: web.Request, answer: Answer) -> web.Response:
        if not answer.status and request.transport is not None:
            request.transport.abort()
        status = answer.status or 500
        return web.Response(body=answer.body, status=status, content_type="application/json")


class _Event(msgspec.Struct):
    class Object(msgspec.Struct, frozen=True):
        class Meta(msgspec.Struct, frozen=True):
            name: str = ""

        metadata: Meta = Meta()

    type: str
    object: Object


_EVENT = msgspec.json.Decoder(_Event)


def event(line: bytes) -> tuple[str, str]:
    """The type of a watch event, and the name of its object (none of a bookmark)."""
    change = _EVENT.decode(line)
    return change.type, change.object.metadata.name


def _watch_line(call: Call, line: bytes, times: int) -> WatchLine:
    return WatchLine(call.path, call.agent, *event(line), times)


def _where(call: Call) -> str:
    """The key of a call, under which former answers to the same call are kept."""
    query = {name: value for name, value in call.query.items() if name != "continue"}
    return f"{call.path} {sorted(query.items())}"
