"""HTTP/1.1 clients of little cost: raw requests over kept connections.

closed loop   `saturate`: each connection sends its next request after the last answer; asyncio
open loop     `arrive`: requests at Poisson times, each on a free connection; system calls only
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

OPEN_CONNECTIONS = 256
LAST_REPLY_S = 60.0
SO_TIMESTAMPNS = 35
TIMESPEC = struct.Struct("@ll")

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
        if _ended(top, self._data, head) and not self._answered.done():
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


@contextlib.contextmanager
def kept_open(address: tuple[str, int]) -> Iterator[list[Exchange]]:
    """Open OPEN_CONNECTIONS connections, which the server accepts while nothing else is asked."""
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(_opened(address)) for _ in range(OPEN_CONNECTIONS)]
        yield [Exchange(link) for link in links]


def arrive(
    exchanges: Iterable[Exchange], path: str, bodies: Sequence[bytes], rate: float, seed: int
) -> list[Reply]:
    """Send each body at a Poisson time, `rate` a second; waits for all replies.

    Blocks its thread. `first_s` ends when the kernel receives the first byte of content, so that a
    client that waits for a CPU adds nothing. Time that a request waits for a free connection counts
    in its reply.
    """
    requests, random_ = [request_of(path, body) for body in bodies], random.Random(seed)
    free = list(exchanges)
    busy: dict[socket.socket, Exchange] = {}
    replies: list[Reply] = []
    due: collections.deque[tuple[float, bytes]] = collections.deque()
    due_s = time.monotonic()
    for request in requests:
        due_s += random_.expovariate(rate)
        due.append((due_s, request))
    waits = False
    until_s = due_s + LAST_REPLY_S
    while len(replies) < len(requests):
        while due and due[0][0] <= time.monotonic() and free:
            due_s, request = due.popleft()
            exchange = free.pop()
            exchange.send(request, time.monotonic() - due_s if waits else 0.0)
            busy[exchange.link] = exchange
            waits = False
        waits = not free
        next_s = due[0][0] if due and free else until_s
        ready, _, _ = select.select(list(busy), (), (), max(0.0, next_s - time.monotonic()))
        if not ready and time.monotonic() > until_s:
            raise TimeoutError(f"{len(requests) - len(replies)} requests have no reply")
        for link in ready:
            reply = busy[link].receive()
            if reply is not None:
                replies.append(reply)
                free.append(busy.pop(link))
    return replies


def _opened(address: tuple[str, int]) -> socket.socket:
    link = socket.create_connection(address)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    return link


class Exchange:
    """Kept connection of `arrive`, with at most one request under way. Times are Unix times."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self._data = bytearray()
        self._sent_s = self._first_s = 0.0

    def send(self, request: bytes, late_s: float) -> None:
        self._data.clear()
        self._first_s, self._sent_s = 0.0, time.time() - late_s
        self.link.sendall(request)

    def receive(self) -> Reply | None:
        """Receive what has arrived; return the reply once it is whole."""
        data, control, _, _ = self.link.recvmsg(1 << 18, socket.CMSG_SPACE(TIMESPEC.size))
        if not data:
            raise ConnectionError("the server closed")
        self._data += data
        head = self._data.find(b"\r\n\r\n")
        if head < 0 or len(self._data) == head + 4:
            return None
        arrived_s = time.time()
        for _, _, stamp in control:  # absent from a packet that came before the option was set
            seconds, nanoseconds = TIMESPEC.unpack(stamp)
            arrived_s = seconds + nanoseconds / 1e9
        self._first_s = self._first_s or arrived_s
        top = bytes(self._data[:head]).lower()
        if not _ended(top, self._data, head):
            return None
        return Reply(
            int(top[9:12]),
            self._first_s - self._sent_s,
            arrived_s - self._sent_s,
            top,
            bytes(self._data[head + 4 :]),
        )


def _ended(top: bytes, data: bytearray, head: int) -> bool:
    """Return True if a response is whole; its head `top` has `head` bytes."""
    at = top.find(b"content-length:")
    if at < 0:
        return data.endswith(b"0\r\n\r\n")
    return len(data) >= head + 4 + int(top[at + 15 :].split(b"\r\n", 1)[0])
