"""ZeroMQ behind one door: typed, bounded and, over TCP, authenticated links between processes.

    Listener   binds a ROUTER; peers are named by their socket identity
    Dialer     connects a DEALER to one Listener, and goes on trying for ever

Both carry one `Codec` per direction, so what a caller gets has the right type, and what does not
decode is counted and dropped, never raised. Bounds: message size, high-water marks (a full queue
makes `send` say False), heartbeats, handshake time. A link belongs to one thread, which polls it
with `receive` and `wait`, or to one event loop, which awaits `next`; `post` and `wake` are the two
calls that other threads may make.

CURVE alone authenticates nobody, so a Listener with keys always asks an allow-list (ZAP), read
again at every handshake so that keys rotate without a restart. No message is ever pickled.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import math
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from medha.adapters.curve import serve_curve, use_curve
from medha.adapters.keys import write_secret
from medha.config import Curve
from medha.errors import ProtocolError, SetupError
from medha.messages import MAX_MESSAGE_BYTES, Codec

S = TypeVar("S")
R = TypeVar("R")

QUEUE_MESSAGES = 4096
SILENCE_MS = 3000
IPC_PATH_BYTES = 107

BOUNDS: dict[int, int] = {
    zmq.LINGER: 0, zmq.SNDHWM: QUEUE_MESSAGES, zmq.RCVHWM: QUEUE_MESSAGES,
    zmq.HEARTBEAT_IVL: 500, zmq.HEARTBEAT_TIMEOUT: SILENCE_MS, zmq.HEARTBEAT_TTL: SILENCE_MS,
    zmq.HANDSHAKE_IVL: 3000, zmq.RECONNECT_IVL: 50, zmq.RECONNECT_IVL_MAX: 500, zmq.BACKLOG: 1024,
}  # fmt: skip


def write_keys(secret: pathlib.Path) -> str:
    """Make a CURVE pair: the secret key goes to a new file (0600), the public one is returned."""
    public, private = make_keys()
    write_secret(secret, private)
    return public.decode()


def make_keys() -> tuple[bytes, bytes]:
    """A new CURVE pair in Z85: the public key, and the secret one."""
    return zmq.curve_keypair()


class _Link(Generic[S, R]):
    """What Listener and Dialer share: socket, bounds, codecs, the outbox of other threads.

    `rejected` counts messages that did not decode, `unsent` those that found a full queue or no
    peer. A context of its own gives each link its own authenticator and a clean end.
    """

    def __init__(self, kind: int, sends: Codec[S], receives: Codec[R], max_bytes: int) -> None:
        self._sends, self._receives = sends, receives
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind, socket_class=zmq.Socket)
        self._outbox: collections.deque[tuple[bytes, S]] = collections.deque()
        self._wakes, self._waker = os.pipe()
        os.set_blocking(self._wakes, False)
        os.set_blocking(self._waker, False)
        self._ready: asyncio.Future[None] | None = None
        self._named = kind == zmq.ROUTER
        self.rejected = self.unsent = 0
        for option, value in {**BOUNDS, zmq.MAXMSGSIZE: max_bytes}.items():
            self._socket.setsockopt(option, value)

    def wake(self) -> None:
        """From any thread: `receive` or `wait` returns early, once."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._waker, b"w")

    def close(self) -> None:
        """Give back socket, files and threads at once; what is queued is lost. Twice is once."""
        if self._socket.closed:
            return
        self._socket.close(linger=0)
        self._context.term()
        os.close(self._wakes)
        os.close(self._waker)

    @contextlib.contextmanager
    def _opening(self, address: str) -> Iterator[None]:
        """Turns what goes wrong while `address` is opened into SetupError, leaving nothing open."""
        try:
            path = address.removeprefix("ipc://").encode()
            if address.startswith("ipc://") and len(path) > IPC_PATH_BYTES:
                raise SetupError(
                    f"{address} is {len(path)} bytes: Unix sockets take at most {IPC_PATH_BYTES}; "
                    "choose a shorter run directory"
                )
            yield
        except zmq.ZMQError as error:
            self.close()
            raise SetupError(
                f"{address} cannot be opened ({error.strerror}): free it or choose another"
            ) from None
        except SetupError:
            self.close()
            raise

    def _post(self, to: bytes, message: S) -> bool:
        if len(self._outbox) >= QUEUE_MESSAGES:
            return False
        self._outbox.append((to, message))
        self.wake()
        return True

    def _flush(self) -> bool:
        """Take note of wakes and send what other threads posted; says whether there was a wake."""
        try:
            woken = bool(os.read(self._wakes, 4096))
        except BlockingIOError:
            woken = False
        while self._outbox:
            to, message = self._outbox.popleft()
            self._put(to, self._sends.encode(message))
        return woken

    def _put(self, to: bytes, data: bytes) -> bool:
        try:
            self._socket.send_multipart([to, data] if self._named else [data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.unsent += 1
            return False
        finally:
            if self._ready is not None:  # sending takes the socket's signals: tell the reader here
                self._signal()
        return True

    def _take(self) -> tuple[bytes, R] | None:
        """The next (peer, message) that decodes, or None when nothing more has arrived."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            peer = self._peer(frames.pop(0)) if self._named else b""
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"message has {len(frames)} parts: must have 1")
                return peer, self._receives.decode(frames[0].bytes)
            except ProtocolError as error:
                self.rejected += 1
                if self.rejected & (self.rejected - 1) == 0:  # 1st, 2nd, 4th …: logs stay bounded
                    log = logging.getLogger("medha.sockets")
                    log.warning("dropped from %r: %.300s", peer[:64], str(error))

    def _peer(self, frame: zmq.Frame) -> bytes:
        """Who sent it, by the first part of what came."""
        return frame.bytes

    def _receive(self, timeout_s: float) -> tuple[bytes, R] | None:
        until = time.monotonic() + timeout_s
        woken = self._flush()
        while True:
            self._count_handshakes()
            if taken := self._take():
                return taken
            left = until - time.monotonic()
            if woken or left <= 0:
                return None
            poller = zmq.Poller()
            self._register(poller)
            poller.poll(math.ceil(left * 1000))
            woken = self._flush()

    async def _next(self) -> tuple[bytes, R]:
        while True:
            if taken := self._take():
                return taken
            await self._readable()

    async def _readable(self) -> None:
        """Wait until the socket may hold a message."""
        loop = asyncio.get_running_loop()
        files = (self._socket.fileno(), self._wakes)
        self._ready = loop.create_future()
        self._signal()  # asks the socket first: its descriptor signals only what is new
        for file in files:
            loop.add_reader(file, self._signal)
        try:
            await self._ready
        finally:
            self._ready = None
            for file in files:
                loop.remove_reader(file)

    def _signal(self) -> None:
        """End `_readable` when a message is there; the descriptor alone proves nothing."""
        self._flush()
        if self._socket.poll(0) and self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def _register(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakes, zmq.POLLIN)

    def _count_handshakes(self) -> None:
        """Listeners have none to count."""


def wait(links: Sequence[_Link[Any, Any]], timeout_s: float) -> bool:
    """Block until one of the links has something to receive, was woken, or the time is over.

    Sends what other threads posted. Says False when nothing happened in `timeout_s`.
    """
    poller = zmq.Poller()
    woken = [link._flush() for link in links]
    for link in links:
        link._register(poller)
    happened = poller.poll(0 if any(woken) else math.ceil(max(0.0, timeout_s) * 1000))
    for link in links:
        link._count_handshakes()  # seen once, an event does not end the next wait too
    return any([*woken, *(link._flush() for link in links), *happened])


class Listener(_Link[S, R]):
    """Binds `bind` (`tcp://host:port`, port 0 for any, or `ipc://path`) for many Dialers.

    A Dialer that comes back under its old identity takes that identity's place. With `curve`
    (secret, allowed) only peers whose public key is listed get through. Raises SetupError when the
    address cannot be bound.
    """

    def __init__(
        self,
        bind: str,
        *,
        sends: Codec[S],
        receives: Codec[R],
        curve: Curve | None = None,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        super().__init__(zmq.ROUTER, sends, receives, max_bytes)
        self._guard: ThreadAuthenticator | None = None
        self._heard_on: dict[bytes, int] = {}  # peer -> file of its latest connection
        self._events: zmq.Socket[bytes] | None = None
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        with self._opening(bind):
            if curve is not None:
                self._guard = serve_curve(self._context, self._socket, curve)
            self._context.setsockopt(zmq.RCVHWM, 0)  # the next socket's: no event is in the way
            self._events = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._socket.bind(bind)

    @property
    def address(self) -> str:
        """Where Dialers connect, with the port that was really bound."""
        return self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def send(self, peer: bytes, message: S) -> bool:
        """Queue a message for a peer; False when it is gone or its queue is full."""
        return self._put(peer, self._sends.encode(message))

    def closed(self) -> tuple[bytes, ...]:
        """Peers whose connection has ended since the last call, once all they said is received.

        A process that dies is here at once. One that lives dials again, and soon says something:
        rarely is it here for no more than a number that a newer connection took over.
        """
        ended: set[int] = set()
        while self._events is not None and not self._socket.poll(0):
            try:
                told = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            ended.add(told["value"])
        if self._ready is not None:  # asking takes the socket's signals, as sending does
            self._signal()
        found = tuple(peer for peer, file in self._heard_on.items() if file in ended)
        for peer in found:
            del self._heard_on[peer]
        return found

    def send_all(self, peers: Sequence[bytes], message: S) -> tuple[bytes, ...]:
        """`send` to several peers, encoded once; returns those that are gone or full."""
        data = self._sends.encode(message)
        return tuple(peer for peer in peers if not self._put(peer, data))

    def post(self, peer: bytes, message: S) -> bool:
        """`send` from another thread, done by whoever waits next; False when too many wait."""
        return self._post(peer, message)

    def receive(self, timeout_s: float = 0.0) -> tuple[bytes, R] | None:
        """The next (peer, message), or None when time is over or another thread woke us."""
        return self._receive(timeout_s)

    async def next(self) -> tuple[bytes, R]:
        """The next (peer, message), awaited; for one task at a time."""
        return await self._next()

    def close(self) -> None:
        if self._guard is not None:
            self._guard.stop()
            self._guard = None
        if self._events is not None:
            self._socket.disable_monitor()
            self._events.close(linger=0)
            self._events = None
        super().close()

    def _peer(self, frame: zmq.Frame) -> bytes:
        peer: bytes = frame.bytes
        with contextlib.suppress(zmq.ZMQError):  # what comes from our own process has none
            self._heard_on[peer] = int(frame.get(zmq.SRCFD))
        return peer


class Dialer(_Link[S, R]):
    """Connects to a Listener under `identity` and re-dials for ever when the link breaks.

    What is sent before the first connection waits for it. `handshakes` counts connections, so a
    change says that the other end may be new and wants an introduction. With `curve` (secret,
    server_public) the Listener must hold that key, and ours must be on its list.
    """

    def __init__(
        self,
        address: str,
        identity: bytes,
        *,
        sends: Codec[S],
        receives: Codec[R],
        curve: Curve | None = None,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        super().__init__(zmq.DEALER, sends, receives, max_bytes)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._handshakes = 0
        self._events: zmq.Socket[bytes] | None = None
        with self._opening(address):
            if curve is not None:
                use_curve(self._socket, curve)
            self._events = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            self._socket.connect(address)

    @property
    def handshakes(self) -> int:
        """How many times the link has been established so far."""
        self._count_handshakes()
        return self._handshakes

    def send(self, message: S) -> bool:
        """Queue a message; False when the queue is full."""
        return self._put(b"", self._sends.encode(message))

    def post(self, message: S) -> bool:
        """`send` from another thread, done by whoever waits next; False when too many wait."""
        return self._post(b"", message)

    def receive(self, timeout_s: float = 0.0) -> R | None:
        """The next message, or None when time is over or another thread woke us."""
        taken = self._receive(timeout_s)
        return taken[1] if taken else None

    async def next(self) -> R:
        """The next message, awaited; for one task at a time."""
        return (await self._next())[1]

    def close(self) -> None:
        if self._events is not None:
            self._socket.disable_monitor()
            self._events.close(linger=0)
            self._events = None
        super().close()

    def _register(self, poller: zmq.Poller) -> None:
        super()._register(poller)
        if self._events is not None:
            poller.register(self._events, zmq.POLLIN)

    def _count_handshakes(self) -> None:
        while self._events is not None:
            try:
                self._events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._handshakes += 1
