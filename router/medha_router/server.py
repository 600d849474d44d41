"""The public port: uvicorn with OpenAI's error objects, limits, and a drain before it ends.

A request that cannot be parsed, or that exceeds `HttpLimits`, never reaches the application and is
answered here: 431 if the headers are too long, else 400. SIGTERM and SIGINT start a drain: new
requests get 503 until `drained` returns True. A second signal, or the end of the drain's time, ends
the requests that still run: streams with an `error` event, others with 503.
"""

from __future__ import annotations

import asyncio
import functools
import re
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import msgspec
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from medha_router import api_errors

SEND_BUFFER_BYTES = 128 << 10  # the kernel doubles it
_HEAD_END = re.compile(rb"\n\r?\n")


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a connection.

    `head_s`: seconds for the request line and the headers of each request, and for the rest of a
    body after its response. `stall_s`: seconds in which the client must take what was sent.
    """

    header_bytes: int = 64 << 10
    headers: int = 100
    head_s: float = 20.0
    stall_s: float = 30.0


class InvalidHttp(h11.RemoteProtocolError):
    """A request that is refused before the application, with the error for its client."""

    def __init__(self, error: api_errors.ApiError) -> None:
        super().__init__(error.error.message, error_status_hint=error.status)
        self.error = error


class BoundedConnection(h11.Connection):
    """h11's connection of a server; raises InvalidHttp for heads beyond the limits.

    h11 limits only heads that are incomplete; here the size of the segments makes no difference.
    """

    def __init__(self, limits: HttpLimits) -> None:
        super().__init__(h11.SERVER, limits.header_bytes)
        self._limits = limits

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is not h11.IDLE:
            return super().next_event()
        self._check_size(self.trailing_data[0])
        event = super().next_event()
        if isinstance(event, h11.Request):
            _check_framing(event)
        return event

    def _check_size(self, held: bytes) -> None:
        blank_line = _HEAD_END.search(held)
        size = blank_line.end() if blank_line else len(held)
        limits = self._limits
        if size > limits.header_bytes or held.count(b"\n", 0, size) > limits.headers + 2:
            raise InvalidHttp(
                api_errors.of_status(
                    431,
                    f"the request has more than {limits.headers} headers or "
                    f"{limits.header_bytes} bytes of them: send fewer",
                    code="headers_too_large",
                )
            )


def _check_framing(request: h11.Request) -> None:
    """Refuse a body whose length a proxy in front could read differently (RFC 9112, 6.1)."""
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and (
        b"content-length" in names or request.http_version < b"1.1"
    ):
        raise InvalidHttp(
            api_errors.of_status(
                400,
                "the request has Transfer-Encoding with Content-Length or with HTTP/1.0: send "
                "only Content-Length",
                code="invalid_http",
            )
        )


class HttpProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, with limits and with OpenAI's error objects."""

    def __init__(self, *args: Any, limits: HttpLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = BoundedConnection(limits)
        self._limits = limits
        self._head_due: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_due, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self._limits.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        super().resume_writing()

    def _watch(self) -> None:
        """Limit the time of a head, and of a body after its response."""
        theirs = self.conn.their_state
        cycle: RequestResponseCycle | None = self.cycle  # None until the first request
        owes_head = theirs is h11.IDLE and (cycle is None or bool(self.conn.trailing_data[0]))
        owes_body = theirs is h11.SEND_BODY and cycle is not None and cycle.response_complete
        if not (owes_head or owes_body):
            if self._head_due is not None:
                self._head_due.cancel()
                self._head_due = None
        elif self._head_due is None:
            self._head_due = self.loop.call_later(self._limits.head_s, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Answer an unparsable request. uvicorn calls this while it handles the parser's error."""
        error = sys.exception()
        api_error = (
            error.error
            if isinstance(error, InvalidHttp)
            else api_errors.of_status(400, "the request is not valid HTTP/1.1", code="invalid_http")
        )
        body = api_error.body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reason = (
                b"Request Header Fields Too Large" if api_error.status == 431 else b"Bad Request"
            )
            events = (
                h11.Response(status_code=api_error.status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class CancelledRequests:
    """ASGI middleware that answers requests cancelled by the end of the server with 503."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            await api_errors.response(api_errors.of_shutdown())(scope, receive, send)


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
