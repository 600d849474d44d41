"""HTTP/1.1 clients of little cost: raw requests over kept connections, on one event loop.

closed loop   `saturate`: each connection sends its next request after the last answer
open loop     `arrive`: requests at Poisson times, each on a free connection
"""

from __future__ import annotations

import asyncio
import collections
import random
import time
from collections.abc import Callable, Iterator

import msgspec

Body = Callable[[int], bytes]


class Reply(msgspec.Struct, frozen=True):
    """A response: seconds from sending to the first byte of content and to the end."""

    status: int
    first_s: float
    total_s: float
    head: bytes
    body: bytes

    def header(self, name: bytes) -> bytes:
        """Return the value of a header, empty without it; `name` is in lower case."""
        at = self.head.find(b"\r\n" + name + b":")
        if at < 0:
            return b""
        start = at + len(name) + 3
        return self.head[start:].split(b"\r\n", 1)[0].strip()


def request_of(path: str, body: bytes) -> bytes:
    """Return a POST request as bytes."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nUser-Agent: load\r\nAccept: */*\r\n"
        "Authorization: Bearer none\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection(asyncio.Protocol):
    """Kept connection with at most one request under way."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[Reply] | None = None
        self._data = bytearray()
        self._sent_s = self._first_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(exc or ConnectionError("the server closed"))

    def send(self, request: bytes) -> asyncio.Future[Reply]:
        """Send a request; returns the future of its reply."""
        assert self._transport is not None
        self._answered = asyncio.get_running_loop().create_future()
        self._data.clear()
        self._first_s, self._sent_s = 0.0, time.monotonic()
        self._transport.write(request)
        return self._answered

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._data += data
        head = self._data.find(b"\r\n\r\n")
        if head < 0 or self._answered is None:
            return
        if not self._first_s and len(self._data) > head + 4:
            self._first_s = time.monotonic()
        top = bytes(self._data[:head]).lower()
        at = top.find(b"content-length:")
        if at >= 0:
            size = int(top[at + 15 :].split(b"\r\n", 1)[0])
            ended = len(self._data) >= head + 4 + size
        else:
            ended = self._data.endswith(b"0\r\n\r\n")
        if ended and not self._answered.done():
            now = time.monotonic()
            self._answered.set_result(
                Reply(
                    int(top[9:12]),
                    self._first_s - self._sent_s,
                    now - self._sent_s,
                    top,
                    bytes(self._data[head + 4 :]),
                )
            )


async def connect(host: str, port: int, count: int) -> list[Connection]:
    """Open `count` connections."""
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Connection, host, port))[1] for _ in range(count)]


async def saturate(
    connections: list[Connection], path: str, body: Body, requests: int
) -> list[Reply]:
    """Send `requests` requests, one after the other on each connection."""
    numbers = iter(range(requests))
    replies: list[Reply] = []

    async def work(connection: Connection, numbers: Iterator[int]) -> None:
        replies.extend([await connection.send(request_of(path, body(n))) for n in numbers])

    await asyncio.gather(*(work(connection, numbers) for connection in connections))
    return replies


async def arrive(
    connections: list[Connection], path: str, body: Body, requests: int, rate: float, seed: int
) -> list[Reply]:
    """Send `requests` requests at Poisson times, `rate` a second; waits for all replies.

    Time that a request waits for a free connection counts in its reply.
    """
    random_ = random.Random(seed)
    free = collections.deque(connections)
    waiting: collections.deque[tuple[int, float]] = collections.deque()
    replies: list[Reply] = []
    ended = asyncio.get_running_loop().create_future()

    def start(number: int, due_s: float) -> None:
        connection = free.popleft()
        late_s = time.monotonic() - due_s
        connection.send(request_of(path, body(number))).add_done_callback(
            lambda future: finish(connection, future, late_s)
        )

    def finish(connection: Connection, future: asyncio.Future[Reply], late_s: float) -> None:
        reply = future.result()
        replies.append(
            msgspec.structs.replace(
                reply, first_s=reply.first_s + late_s, total_s=reply.total_s + late_s
            )
        )
        free.append(connection)
        if waiting:
            start(*waiting.popleft())
        if len(replies) == requests:
            ended.set_result(None)

    due_s = time.monotonic()
    for number in range(requests):
        due_s += random_.expovariate(rate)
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        if free:
            start(number, due_s)
        else:
            waiting.append((number, due_s))
    await ended
    return replies
