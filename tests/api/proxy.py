"""A reverse proxy before a real API server, at which a test may tamper with what passes.

Nothing of the API is imitated here: what is not tampered with is the server's own answer. Calls are
made as the account that the proxy was given, and all that passes is kept:

    calls       every request, as it was sent
    done        every answer of the server's, with its body where something was written; and, marked
                as such, every answer that a test gave in the server's place
    told        every event of a watch, and how many times it was passed on

    drop        `before` or `after` gives Answer(0): not done, or done and not told
    refuse      any other Answer, in the server's place
    delay       `delay` gives seconds
    duplicate   `twice`: the server gets the call twice, the client one answer; `events` may repeat
    go back     `older`: a GET is answered as it was so many answers ago
    kill        whatever `before` and `after` do to the client, see tests/api/lives.py
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator

import aiohttp
import msgspec
from aiohttp import web

DROPPED = ("Host", "Authorization", "Content-Length", "Transfer-Encoding", "Connection")
OLD = 50


class Call(msgspec.Struct, frozen=True):
    """One request: `writes` says whether it may change anything."""

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
        """A write of the operator's that is not the Lease's."""
        return self.writes and "/leases" not in self.path


class Answer(msgspec.Struct, frozen=True):
    """What the client is told instead; status 0 cuts the connection."""

    status: int
    reason: str = ""
    page: bytes = b""
    """Instead of a reason in the API's own form."""

    @property
    def body(self) -> bytes:
        if self.page:
            return self.page
        said = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        told = {"code": self.status, "reason": self.reason, "message": "said by the test"}
        return msgspec.json.encode(said | told)


class Done(msgspec.Struct, frozen=True):
    """A call as the server answered it, or a test in its place (`placed`; what was done and not
    told has both). `answer` is kept of writes, former ones of reads for `older`."""

    call: Call
    status: int
    answer: bytes
    at_s: float
    placed: bool = False

    @property
    def own(self) -> bool:
        """The server's answer to a write of the operator's."""
        return self.call.own and not self.placed


class Told(msgspec.Struct, frozen=True):
    """An event of a watch, and as how many lines the client got it."""

    path: str
    agent: str
    type: str
    name: str
    times: int


class Proxy:
    """Runs on a thread of its own. `before` answers instead of the server, `after` when the server
    has done what was asked; `events` changes the lines of a watch."""

    def __init__(self, url: str, token: str, authority: str, account: str = "") -> None:
        self._url, self._token, self.account = url, token, account
        self._ssl = ssl.create_default_context(cafile=authority)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._old: dict[str, collections.deque[bytes]] = {}
        self.calls: list[Call] = []
        self.done: list[Done] = []
        self.told: list[Told] = []
        self.url = ""
        self.trust()

    def trust(self) -> None:
        """Tamper with nothing (any more)."""
        self.before: Callable[[Call], Answer | None] = lambda call: None
        self.after: Callable[[Call], Answer | None] = lambda call: None
        self.delay: Callable[[Call], float] = lambda call: 0.0
        self.twice: Callable[[Call], bool] = lambda call: False
        self.older: Callable[[Call], int] = lambda call: 0
        self.events: Callable[[Call, bytes], list[bytes]] = lambda call, line: [line]

    def last_write_s(self) -> float:
        """When the last write was answered, those to the Lease left out (monotonic clock)."""
        return next((each.at_s for each in reversed(self.done) if each.own), 0.0)

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
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)  # type: ignore[arg-type]

    async def _start(self) -> None:
        # Watches of operators that were killed stay until something comes for them: no limit.
        connector = aiohttp.TCPConnector(ssl=self._ssl, limit=0)
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
        await asyncio.sleep(0.25)  # connections end in their own time

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """The answer; where the server is gone, the connection is cut."""
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
            found = await got.read()
            self._note(call, got.status, found)
            if (answer := self.after(call)) is not None:
                return self._placed(request, call, answer)
            kept = {"Content-Type": got.headers.get("Content-Type", "application/json")}
            if not call.writes and (back := self.older(call)):
                known = self._old[_where(call)]
                found = known[max(0, len(known) - 1 - back)]
            return web.Response(body=found, status=got.status, headers=kept)

    def _asked(
        self, request: web.Request, body: bytes
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """The same call to the server."""
        headers = {k: v for k, v in request.headers.items() if k not in DROPPED}
        headers["Authorization"] = f"Bearer {self._token}"
        if self.account:
            headers["Impersonate-User"] = self.account
        return self._session.request(
            request.method, self._url + request.path_qs, data=body or None, headers=headers,
            timeout=aiohttp.ClientTimeout(total=None),
        )  # fmt: skip

    def _note(self, call: Call, status: int, found: bytes) -> None:
        self.done.append(Done(call, status, found if call.writes else b"", time.monotonic()))
        if status == 200 and not (call.writes or call.watches):
            self._old.setdefault(_where(call), collections.deque(maxlen=OLD)).append(found)

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
                    self.told.append(_told(call, line, len(passed)))
                    for each in passed:
                        await answer.write(each + b"\n")
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
    """Type of a watch's event, and the name of what it is about (none of a bookmark)."""
    found = _EVENT.decode(line)
    return found.type, found.object.metadata.name


def _told(call: Call, line: bytes, times: int) -> Told:
    return Told(call.path, call.agent, *event(line), times)


def _where(call: Call) -> str:
    """What is asked, so that former answers to the same are found."""
    asked = {name: value for name, value in call.query.items() if name != "continue"}
    return f"{call.path} {sorted(asked.items())}"
