"""The public port: uvicorn with OpenAI's error objects, and a drain before it ends.

A request that h11 cannot parse never reaches the application and is answered here: 431 if the
headers are too long, else 400. SIGTERM and SIGINT start a drain: new requests get 503 until
`drained` returns True. A second signal ends the server at once.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from medha_router import api_errors

MAX_HEADER_BYTES = 64 << 10


class HttpProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, with OpenAI's error objects for requests it refuses."""

    first_request_s = 20.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._first_request = self.loop.call_later(self.first_request_s, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        self._first_request.cancel()
        super().connection_lost(exc)

    def _expire(self) -> None:
        """Close a connection without a request."""
        cycle: object = self.cycle  # uvicorn's; None until the first request
        if cycle is None:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer an unparsable request. uvicorn calls this while it handles the parser's error."""
        error = sys.exception()
        too_long = isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431
        if too_long:
            api_error = api_errors.of_status(
                431,
                f"the request's headers are longer than {MAX_HEADER_BYTES} bytes: send fewer",
                code="headers_too_large",
            )
        else:
            api_error = api_errors.of_status(
                400, "the request is not valid HTTP/1.1", code="invalid_http"
            )
        body = api_error.body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reason = b"Request Header Fields Too Large" if too_long else b"Bad Request"
            events = (
                h11.Response(status_code=api_error.status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains on a signal: calls `drain`, ends once `drained` is True."""

    def __init__(
        self, config: uvicorn.Config, drain: Callable[[], None], drained: Callable[[], bool]
    ) -> None:
        super().__init__(config)
        self._drain, self._drained = drain, drained
        self._draining = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second."""
        if self._draining:
            self.should_exit = self.force_exit = True
        else:
            self.finish()
        if sig == signal.SIGINT and self.force_exit:
            self._captured_signals.append(sig)

    def finish(self) -> None:
        """Drain, then end."""
        self._draining = True
        self._drain()

    async def on_tick(self, counter: int) -> bool:
        if self._draining and self._drained():
            self.should_exit = True
        return await super().on_tick(counter)


def server_of(app: Any, drain: Callable[[], None], drained: Callable[[], bool]) -> DrainingServer:
    """Make the server of the public port; it serves on sockets that its caller has bound."""
    config = uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )
    return DrainingServer(config, drain, drained)
