"""HTTP/1.1 on the public port: httptools under uvicorn, with limits and OpenAI's error objects.

A request that cannot be parsed, or that exceeds `HttpLimits`, never reaches the application and is
answered here: 431 if the headers are too long, else 400. The head of a response leaves with the
first part of its body, in one write. A long read is parsed in slices, so that no turn of the event
loop takes long, and only while few requests of the connection wait.

The application finds `Disconnects` and `Exchange.whole_body` in the scope's extensions, and may set
headers that every response has, by name, as `response_headers` of the scope's state.
"""

from __future__ import annotations

import asyncio
import collections
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import httptools
import msgspec
from starlette.types import Message
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from medha_router import api_errors
from medha_router.turns import TURN_S

DISCONNECTS = "medha.disconnects"
WHOLE_BODY = "medha.whole_body"
RESPONSE_HEADERS = "response_headers"
SLICE_BYTES = 4 << 10
"""Time of one turn of the event loop after which no further slice is parsed."""
WAITING_REQUESTS = 16
"""If more requests of a connection wait, no further slice is parsed."""


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a connection, and of their number: those beyond `connections` are closed.

    `head_s`: seconds for the request line and the headers of each request, and for the rest of a
    body after its response. `stall_s`: seconds in which the client must take what was sent.
    """

    header_bytes: int = 64 << 10
    headers: int = 100
    head_s: float = 20.0
    stall_s: float = 30.0
    connections: int = 1 << 30


class InvalidHttp(Exception):
    """A request that is refused before the application, with the error for its client."""

    def __init__(self, error: api_errors.ApiError) -> None:
        super().__init__(error.error.message)
        self.error = error


class Disconnects:
    """Callbacks for the end of a connection, called once. A task per request would cost more."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], object]] = []
        self.ended = False

    def add(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the client disconnects; at once if it has."""
        if self.ended:
            callback()
        else:
            self._callbacks.append(callback)

    def remove(self, callback: Callable[[], object]) -> None:
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    def end(self) -> None:
        self.ended = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Flow(FlowControl):
    """Flow control that reads only if nothing that was read is still unparsed.

    `serving`: the request of the connection that is being served, while others may be parsed.
    `ended`: the connection has ended.
    """

    def __init__(self, transport: asyncio.Transport, unparsed: collections.deque[bytes]) -> None:
        super().__init__(transport)
        self._unparsed = unparsed
        self.written_bytes = 0
        self.serving: Exchange | None = None
        self.ended = False

    def end(self) -> None:
        """Note the end of the connection: the request that is being served has no client."""
        self.ended = True
        if self.serving is not None and not self.serving.response_complete:
            self.serving.disconnected = True
        self.serving = None

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            if not self._unparsed:
                self._transport.resume_reading()

    def write(self, data: bytes) -> None:
        self.written_bytes += len(data)
        self._transport.write(data)


class Exchange(RequestResponseCycle):
    """uvicorn's cycle of one request and its response, with fewer writes."""

    flow: Flow
    _head = b""

    async def run_asgi(self, app: Any) -> None:
        """Serve the request, then drop the scope's extensions, which refer to the exchange."""
        self.disconnected = self.disconnected or self.flow.ended
        try:
            await super().run_asgi(app)
        finally:
            if self.flow.serving is self:
                self.flow.serving = None
            self.scope["extensions"] = {}

    def whole_body(self) -> bytes | None:
        """Return the body if it was received with the head, as short ones are; else None.

        To receive it message by message, within a limit of time, takes ten times as long.
        """
        if self.more_body or self.disconnected or self.response_started:
            return None
        self.flow.resume_reading()
        body, self.body = bytes(self.body), bytearray()
        return body

    async def send(self, message: Message) -> None:  # type: ignore[override]
        """Send a part of the response, once the client has taken most of what was sent."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self.response_started:
            self._start(message["status"], message.get("headers", ()))
        elif kind == "http.response.body" and self.response_started and not self.response_complete:
            self._send_body(message.get("body", b""), message.get("more_body", False))
        else:
            raise RuntimeError(f"{kind} is out of order")

    def _start(self, status: int, headers: Any) -> None:
        self.response_started, self.waiting_for_100_continue = True, False
        lines = [STATUS_LINE[status]]
        sized = closing = False
        common: dict[bytes, bytes] = self.scope["state"].get(RESPONSE_HEADERS, {})
        pairs = [*common.items(), *headers] if common else headers
        for place, (name, value) in enumerate(pairs):
            if place >= len(common) and name in common:
                continue
            lower = name.lower()
            if lower == b"content-length":
                sized, self.expected_content_length = True, int(value)
            elif lower == b"connection" and value.lower() == b"close":
                closing, self.keep_alive = True, False
            line = b"%b: %b\r\n" % (lower, value)
            if line.count(b"\n") != 1 or line.count(b"\r") != 1:
                raise RuntimeError(f"the header {name!r} holds a line break")
            lines.append(line)
        if not (self.keep_alive or closing):
            lines.append(b"connection: close\r\n")
        bodiless = self.scope["method"] == "HEAD" or status in (204, 304)
        self.chunked_encoding = not (sized or bodiless) and self.scope["http_version"] != "1.0"
        if self.chunked_encoding:
            lines.append(b"transfer-encoding: chunked\r\n")
        elif not (sized or bodiless):
            self.keep_alive = False  # the end of the connection ends the body
        lines.append(b"\r\n")
        self._sized = sized and not bodiless
        self._bodiless = bodiless
        self._head = b"".join(lines)

    def _send_body(self, body: bytes, more: bool) -> None:
        head, self._head = self._head, b""
        if self._bodiless:
            data = head
        elif self.chunked_encoding:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            data = head + chunk if more else b"%b%b0\r\n\r\n" % (head, chunk)
        else:
            if self._sized:
                self.expected_content_length -= len(body)
                short = not more and self.expected_content_length > 0
                if short or self.expected_content_length < 0:
                    raise RuntimeError("the body does not have the length of its header")
            data = head + body
        if data:
            self.flow.write(data)
        if not more:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()


class HttpProtocol(HttpToolsProtocol):
    """Connection of a client."""

    flow: Flow

    def __init__(self, *args: Any, limits: HttpLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._disconnects = Disconnects()
        self._head_due: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._in_head = self._broken = self._stray = False
        self._barren_bytes = 0  # of a body since its last content; negative: content came just now
        self._head_bytes = self._line_bytes = 0
        self._refusal: InvalidHttp | None = None
        self._unparsed: collections.deque[bytes] = collections.deque()
        self._next_turn: asyncio.Handle | None = None

    # --- connection -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.flow = Flow(self.transport, self._unparsed)
        if len(self.connections) > self._limits.connections:
            self.transport.abort()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unparsed.clear()
        for handle in (self._head_due, self._stalled, self._next_turn):
            if handle is not None:
                handle.cancel()
        self.flow.end()  # uvicorn notes it for the latest request alone
        super().connection_lost(exc)
        self._disconnects.end()

    def data_received(self, data: bytes) -> None:
        if self._broken:
            return
        if len(data) <= SLICE_BYTES and not self._unparsed and self._has_room:
            self._parse(data)
            return
        for start in range(0, len(data), SLICE_BYTES):
            self._unparsed.append(data[start : start + SLICE_BYTES])
        if self._next_turn is None:
            self._parse_slices()

    def _parse_slices(self) -> None:
        """Parse what this turn of the event loop has time for. Pause reading if slices are left."""
        self._next_turn = None
        if self.transport.is_closing():
            self._unparsed.clear()
        until_s = time.perf_counter() + TURN_S
        while self._unparsed and self._has_room and time.perf_counter() < until_s:
            self._parse(self._unparsed.popleft())
        if self._unparsed:
            self.transport.pause_reading()
            self._parse_later()
        elif not (self.flow.read_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def _parse_later(self) -> None:
        if self._has_room and self._next_turn is None:
            self._next_turn = self.loop.call_soon(self._parse_slices)

    @property
    def _has_room(self) -> bool:
        return len(self.pipeline) <= WAITING_REQUESTS

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
            self._count_barren(len(data))
            if self._in_head:
                line = data.rfind(b"\n") + 1  # the parser reports whole headers only
                self._line_bytes = len(data) - line + (0 if line else self._line_bytes)
                header_bytes = self._head_bytes - len(self.url)  # the line may hold the URL
                if header_bytes + self._line_bytes > self._limits.header_bytes:
                    raise self._refused(_too_long(self._limits))
        except (httptools.HttpParserError, InvalidHttp):
            self.send_400_response("")
            return
        cycle = self._exchange
        is_over = cycle is not None and cycle.response_complete and not cycle.more_body
        self._stray = is_over and not self._in_head
        if self._in_head or self._stray or self._head_due is not None:
            self._watch()

    def _count_barren(self, size: int) -> None:
        """Limit what a body has besides its content: extensions of chunks, and trailers."""
        cycle = self._exchange
        if self._in_head or cycle is None or not cycle.more_body:
            return
        self._barren_bytes = 0 if self._barren_bytes < 0 else self._barren_bytes + size
        if self._barren_bytes > self._limits.header_bytes:
            raise self._refused(_too_long(self._limits))

    def _feed(self, data: bytes) -> None:
        """Parse data. A request to change the protocol is served in this one (RFC 9110, 7.8)."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = data[upgrade.args[0] :]
            if self.parser.get_method() == b"CONNECT":
                raise _invalid()
            head = [self.parser.get_method(), b" ", self.url, b" HTTP/1.1\r\n"]
            for name, value in self.headers:
                if name != b"upgrade":
                    head += [name, b": ", value, b"\r\n"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            data = b"".join([*head, b"\r\n", rest])

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def _watch_writing(self, earlier_bytes: int | None = None) -> None:
        """Disconnect a client that took no more than `earlier_bytes` by now; else check later."""
        taken_bytes = self.flow.written_bytes - self.transport.get_write_buffer_size()
        if earlier_bytes is None or taken_bytes > earlier_bytes:
            check = self._watch_writing
            self._stalled = self.loop.call_later(self._limits.stall_s, check, taken_bytes)
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        super().resume_writing()

    def _watch(self) -> None:
        """Limit the time of a head, and of a body after its response."""
        cycle = self._exchange
        owes_head = cycle is None or self._in_head or self._stray
        owes_body = cycle is not None and cycle.response_complete and cycle.more_body
        if not (owes_head or owes_body):
            if self._head_due is not None:
                self._head_due.cancel()
                self._head_due = None
        elif self._head_due is None:
            self._head_due = self.loop.call_later(self._limits.head_s, self._end_late)

    def _end_late(self) -> None:
        """Close the connection, unless the client waits for this side to read."""
        self._head_due = None
        if self._unparsed or self.flow.read_paused:
            self._watch()
        else:
            self.transport.close()

    @property
    def _exchange(self) -> Exchange | None:
        """The latest request, if there was any."""
        cycle: Exchange | None = self.cycle  # type: ignore[assignment]
        return cycle

    # --- requests ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes, self._line_bytes = True, 0, 0
        self._barren_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer
        self._count(len(name) + len(value) + 4)
        if len(self.headers) >= self._limits.headers:
            raise self._refused(_too_long(self._limits))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limits.header_bytes:
            raise self._refused(_too_long(self._limits))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # `_feed` parses the head again
        self._in_head = False
        version = self.parser.get_http_version()
        if not _is_framed(version, self.headers):
            raise self._refused(_invalid())
        scope = self.scope
        try:
            url = httptools.parse_url(self.url)
        except httptools.HttpParserInvalidURLError:
            raise self._refused(_invalid()) from None
        raw_path: bytes = url.path or b"/"
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["http_version"] = version
        scope["raw_path"], scope["query_string"] = raw_path, url.query or b""
        scope["path"] = _decoded(raw_path)
        earlier = self._exchange
        self.cycle = Exchange(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=[],
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        scope["extensions"] = {
            DISCONNECTS: {"disconnects": self._disconnects},
            WHOLE_BODY: {"take": self.cycle.whole_body},
        }
        if earlier is None or earlier.response_complete:
            self.flow.serving = self.cycle
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        self._barren_bytes = -1
        cycle = self.cycle
        if self._in_head or cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._in_head:
            return  # of a request to change the protocol
        self.cycle.more_body = False
        self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self.flow.serving = self.pipeline[-1][0]  # type: ignore[assignment]
        super().on_response_complete()
        if self._unparsed:
            self._parse_later()
        if self.cycle.more_body:
            self._watch()

    # --- refusals ---------------------------------------------------------------------------------

    def _refused(self, refusal: InvalidHttp) -> InvalidHttp:
        """Keep the refusal: the parser reports an error of its own."""
        self._refusal = refusal
        return refusal

    def send_400_response(self, msg: str) -> None:
        """Answer an unparsable request, and close the connection."""
        self._broken = True
        self._unparsed.clear()
        cycle = self._exchange
        if cycle is not None and self.pipeline and cycle.more_body:
            self.pipeline.popleft()  # the requests before it are answered first
            ahead: Any = self.pipeline[0][0] if self.pipeline else self.flow.serving
            cycle = ahead
        if cycle is not None and not (cycle.response_complete or cycle.more_body):
            cycle.keep_alive = False  # the connection ends with the last response that is owed
            return
        if cycle is None or cycle.response_complete or not cycle.response_started:
            error = (self._refusal or _invalid()).error
            body = error.body()
            self.flow.write(
                b"%bcontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b" % (STATUS_LINE[error.status], len(body), body)
            )
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        self._disconnects.end()
        self.transport.close()


def _is_framed(version: str, headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether the head names one host and no coding of the body but `chunked` (RFC 9112)."""
    hosts = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding" and (version != "1.1" or value.lower() != b"chunked"):
            return False
    return hosts == 1 or (version == "1.0" and not hosts)


def _decoded(raw_path: bytes) -> str:
    if b"%" not in raw_path:
        return raw_path.decode("latin-1")
    return urllib.parse.unquote(raw_path.decode("latin-1"))


def _too_long(limits: HttpLimits) -> InvalidHttp:
    return InvalidHttp(
        api_errors.of_status(
            431,
            f"the request has more than {limits.headers} headers or {limits.header_bytes} bytes of "
            "them: send fewer",
            code="headers_too_large",
        )
    )


def _invalid() -> InvalidHttp:
    return InvalidHttp(
        api_errors.of_status(400, "the request is not valid HTTP/1.1", code="invalid_http")
    )
