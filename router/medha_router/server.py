"""The server of the public port: uvicorn with a drain before it ends.

SIGTERM and SIGINT start a drain: new requests get 503 until `drained` returns True. A second
signal, or the end of the drain's time, ends the requests that still run: streams with an `error`
event, others with 503.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from medha.adapters.memory import MemoryGate
from medha_router import api_errors
from medha_router.http_protocol import HttpLimits, HttpProtocol

SEND_BUFFER_BYTES = 128 << 10  # the kernel doubles it


class CancelledRequests:
    """ASGI middleware that answers requests cancelled by the end of the server with 503."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            await api_errors.response(api_errors.of_shutdown())(scope, receive, send)


class MemoryLimited:
    """ASGI middleware that refuses requests with a body, unread, while memory is short.

    `refused`: called for each.
    """

    def __init__(self, app: ASGIApp, gate: MemoryGate, refused: Callable[[], None]) -> None:
        self._app, self._gate, self._refused = app, gate, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._gate.refuses and scope["method"] == "POST":
            self._refused()
            await api_errors.response(api_errors.of_memory())(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains on a signal: calls `drain`, ends once `drained` is True.

    After `drain_s` seconds, or at a second signal, it cancels the requests that still run.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Callable[[], None],
        drained: Callable[[], bool],
        *,
        drain_s: float,
        stall_s: float,
    ) -> None:
        super().__init__(config)
        self._drain, self._drained = drain, drained
        self._drain_s, self._stall_s = drain_s, stall_s
        self._drains_until_s: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second."""
        if self._drains_until_s is None:
            self.finish()
        else:
            self.should_exit = self.force_exit = True

    def finish(self) -> None:
        """Drain, then end."""
        if self._drains_until_s is None:
            self._drains_until_s = time.monotonic() + self._drain_s
            self._drain()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve. A client that takes nothing is given up by the kernel, too."""
        for listening in sockets or []:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            listening.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._stall_s * 1000)
            )
        await super().startup(sockets)

    @property
    def busy(self) -> bool:
        """True if a request is under way."""
        return bool(self.server_state.tasks)

    async def on_tick(self, counter: int) -> bool:
        if self._drains_until_s is not None:
            if self._drained():
                self.should_exit = True
            elif time.monotonic() >= self._drains_until_s:
                self.should_exit = self.force_exit = True
        return await super().on_tick(counter)

    async def end_requests(self) -> None:
        """Cancel the requests that still run, and wait until they have answered."""
        for task in (tasks := list(self.server_state.tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def server_of(
    app: ASGIApp,
    drain: Callable[[], None],
    drained: Callable[[], bool],
    *,
    drain_s: float,
    limits: HttpLimits,
) -> DrainingServer:
    """Make the server of the public port; it serves on sockets that its caller has bound."""
    config = uvicorn.Config(
        CancelledRequests(app),
        http=functools.partial(HttpProtocol, limits=limits),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )
    return DrainingServer(config, drain, drained, drain_s=drain_s, stall_s=limits.stall_s)
