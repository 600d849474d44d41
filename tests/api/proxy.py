"""A reverse proxy before a real API server, at which a test may tamper with what passes.

Nothing of the API is imitated here: what is not tampered with is the server's own answer. Every
call is noted with verb and path, and made as the account that the proxy was given.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator

import aiohttp
import msgspec
from aiohttp import web

DROPPED = ("Host", "Authorization", "Content-Length", "Transfer-Encoding", "Connection")


class Call(msgspec.Struct, frozen=True):
    """One request: `writes` says whether it may change anything."""

    verb: str
    path: str
    query: dict[str, str]
    agent: str

    @property
    def writes(self) -> bool:
        return self.verb not in ("GET", "HEAD")

    @property
    def watches(self) -> bool:
        return "watch" in self.query


class Answer(msgspec.Struct, frozen=True):
    """What the client is told instead; status 0 cuts the connection."""

    status: int
    reason: str = ""

    @property
    def body(self) -> bytes:
        said = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        told = {"code": self.status, "reason": self.reason, "message": "said by the test"}
        return msgspec.json.encode(said | told)


class Proxy:
    """Runs on a thread of its own. `before` answers instead of the server, `after` when the server
    has done what was asked; `events` changes the lines of a watch."""

    def __init__(self, url: str, token: str, authority: str, account: str = "") -> None:
        self._url, self._token, self._account = url, token, account
        self._ssl = ssl.create_default_context(cafile=authority)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.calls: list[Call] = []
        self.before: Callable[[Call], Answer | None] = lambda call: None
        self.after: Callable[[Call], Answer | None] = lambda call: None
        self.events: Callable[[Call, bytes], list[bytes]] = lambda call, line: [line]
        self.url = ""

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
        connector = aiohttp.TCPConnector(ssl=self._ssl, limit=200)
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
        agent = request.headers.get("User-Agent", "")
        call = Call(request.method, request.path, dict(request.query), agent)
        self.calls.append(call)
        if (answer := self.before(call)) is not None:
            return self._told(request, answer)
        headers = {k: v for k, v in request.headers.items() if k not in DROPPED}
        headers["Authorization"] = f"Bearer {self._token}"
        if self._account:
            headers["Impersonate-User"] = self._account
        body = await request.read()
        limit = aiohttp.ClientTimeout(total=None)
        async with self._session.request(
            request.method, self._url + request.path_qs, data=body, headers=headers, timeout=limit
        ) as got:
            if call.watches and got.status == 200:
                return await self._stream(request, call, got)
            found = await got.read()
            if (answer := self.after(call)) is not None:
                return self._told(request, answer)
            kept = {"Content-Type": got.headers.get("Content-Type", "application/json")}
            return web.Response(body=found, status=got.status, headers=kept)

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
                    for passed in self.events(call, line):
                        await answer.write(passed + b"\n")
        return answer

    @staticmethod
    def _told(request: web.Request, answer: Answer) -> web.Response:
        if not answer.status and request.transport is not None:
            request.transport.abort()
        status = answer.status or 500
        return web.Response(body=answer.body, status=status, content_type="application/json")
