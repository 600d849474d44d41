"""Links between processes over ZeroMQ: typed, bounded and, over TCP, authenticated.

    Listener   binds a ROUTER; the socket identity names a peer
    Dialer     connects a DEALER to one Listener, and retries forever

A link has one `Codec` per direction; a message that does not decode is counted and dropped. Bounds:
message size, high-water marks (`send` returns False if the queue is full), heartbeats, handshake
time. A link belongs to one thread, which calls `receive` and `wait`, or to one event loop, which
calls what `follow` was given. Other threads may call only `post` and `wake`. CURVE alone
authenticates no peer: a Listener with keys always checks an allow-list (ZAP), read at every
handshake, so keys rotate without a restart. No message is ever pickled.
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
from collections.abc import Callable, Iterator, Sequence
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

# Plain integers: the library's flags are enumerations, which cost more than a call.
NOW, NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
QUEUE_MESSAGES = 4096
UNCOPIED_BYTES = 1 << 20
"""From this size on, the library sends a message from the memory where it was encoded."""
BURST, BURST_S = 64, 0.002
"""Messages that a loop takes from a link in one turn, and the time after which it takes no more."""
SILENCE_MS = 3000
IPC_PATH_BYTES = 107

BOUNDS: dict[int, int] = {
    zmq.LINGER: 0,
    zmq.SNDHWM: QUEUE_MESSAGES,
    zmq.RCVHWM: QUEUE_MESSAGES,
    zmq.HEARTBEAT_IVL: 500,
    zmq.HEARTBEAT_TIMEOUT: SILENCE_MS,
    zmq.HEARTBEAT_TTL: SILENCE_MS,
    zmq.HANDSHAKE_IVL: 3000,
    zmq.RECONNECT_IVL: 50,
    zmq.RECONNECT_IVL_MAX: 500,
    zmq.BACKLOG: 1024,
}


def write_keys(secret: pathlib.Path) -> str:
    """Make a CURVE key pair: write the secret key to a new file (0600), return the public key."""
    public, private = make_keys()
    write_secret(secret, private)
    return public.decode()


def make_keys() -> tuple[bytes, bytes]:
    """Make a CURVE key pair in Z85: public key, secret key."""
    return zmq.curve_keypair()


class _Link(Generic[S, R]):
    """Common parts of Listener and Dialer: socket, bounds, codecs, outbox of other threads.

    `rejected` counts messages that did not decode, `unsent` those dropped for a full queue or an
    unknown peer. A separate context gives each link its own authenticator and a clean end.
    """

    def __init__(self, kind: int, sends: Codec[S], receives: Codec[R], max_bytes: int) -> None:
        self._sends, self._receives = sends, receives
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind, socket_class=zmq.Socket)
        self._outbox: collections.deque[tuple[bytes, S]] = collections.deque()
        self._wakes, self._waker = os.pipe()
        os.set_blocking(self._wakes, False)
        os.set_blocking(self._waker, False)
        self._loop: asyncio.AbstractEventLoop | None = None  # of `follow`
        self._receiver: Callable[[bytes, R], None] | None = None
        self._reads = False  # now, or soon
        self._named = kind == zmq.ROUTER
        self.rejected = self.unsent = 0
        for option, value in {**BOUNDS, zmq.MAXMSGSIZE: max_bytes}.items():
            self._socket.setsockopt(option, value)

    def wake(self) -> None:
        """Make `receive` or `wait` return early, once; callable from any thread."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes too
            os.write(self._waker, b"w")

    def close(self) -> None:
        """Close socket, files and threads at once; queued messages are lost. Idempotent."""
        if self._socket.closed:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_reader(self._wakes)
        self._loop = self._receiver = None
        self._socket.close(linger=0)
        self._context.term()
        os.close(self._wakes)
        os.close(self._waker)

    @contextlib.contextmanager
    def _opening(self, address: str) -> Iterator[None]:
        """Turn errors while `address` is opened into SetupError, and close everything."""
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
        """Send messages that other threads posted; return True if there was a wake."""
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
            if self._named:
                self._socket.send(to, NOW_AND_MORE)
            self._socket.send(data, NOW, copy=len(data) < UNCOPIED_BYTES)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.unsent += 1
            return False
        finally:
            self._read_soon()
        return True

    def _take(self) -> tuple[bytes, R] | None:
        """Return the next (peer, message) that decodes, or None if no message has arrived."""
        while True:
            try:
                parts = self._receive_parts()
            except zmq.Again:
                return None
            peer, data = parts[0], parts[-1]
            try:
                if len(parts) != 2:
                    raise ProtocolError(f"message has {len(parts) - 1} parts: must have 1")
                return peer, self._receives.decode(data)
            except ProtocolError as error:
                self.rejected += 1
                if self.rejected & (self.rejected - 1) == 0:  # 1st, 2nd, 4th …: logs stay bounded
                    log = logging.getLogger("medha.sockets")
                    log.warning("dropped from %r: %.300s", peer[:64], str(error))

    def _receive_parts(self) -> list[bytes]:
        """Return the peer's name, empty without one, and the parts of the next message."""
        peer = self._socket.recv(NOW) if self._named else b""
        frame = self._socket.recv(NOW, copy=False)  # it holds whether another part follows
        if self._named:
            self._note(peer, frame)
        parts = [peer, frame.bytes]
        while frame.more:
            frame = self._socket.recv(NOW, copy=False)
            parts.append(frame.bytes)
        return parts

    def _note(self, peer: bytes, frame: zmq.Frame) -> None:
        """Note by which connection a message came; a Dialer has one."""

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

    def follow(self, receive: Callable[[bytes, R], None]) -> None:
        """Call `receive` with each (peer, message) that arrives, on the running loop."""
        self._loop, self._receiver = asyncio.get_running_loop(), receive
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._loop.add_reader(self._wakes, self._woken)
        self._read_soon()  # the descriptor signals only new messages

    def _woken(self) -> None:
        self._flush()
        self._read_soon()

    def _read_soon(self) -> None:
        """Read once the loop's turn is over.

        Sending and polling consume the signals of the socket's descriptor.
        """
        if self._loop is not None and not self._reads:
            self._reads = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Pass on messages until there are none, which arms the socket's descriptor again."""
        self._reads, more = True, True
        try:
            until_s = time.perf_counter() + BURST_S
            for _ in range(BURST):
                if self._receiver is None or (taken := self._take()) is None:
                    more = False
                    return
                self._receiver(*taken)
                if time.perf_counter() > until_s:
                    return
        finally:
            self._reads = False
            if more:
                self._read_soon()

    def _register(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakes, zmq.POLLIN)

    def _count_handshakes(self) -> None:
        """Count completed handshakes; a Listener has none."""


def wait(links: Sequence[_Link[Any, Any]], timeout_s: float) -> bool:
    """Block until a link can receive or was woken, or until `timeout_s` has passed.

    Sends messages that other threads posted. Returns False after a timeout.
    """
    poller = zmq.Poller()
    woken = [link._flush() for link in links]
    for link in links:
        link._register(poller)
    happened = poller.poll(0 if any(woken) else math.ceil(max(0.0, timeout_s) * 1000))
    for link in links:
        link._count_handshakes()  # a consumed event does not end the next wait
    return any([*woken, *(link._flush() for link in links), *happened])


class Listener(_Link[S, R]):
    """Binds `bind` (`tcp://host:port`, port 0 for any, or `ipc://path`) for many Dialers.

    A Dialer that reconnects replaces the connection with the same identity. With `curve` (secret,
    allowed) only peers with a listed public key can connect. Raises SetupError if the address
    cannot be bound.
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
        # Peer -> file descriptor of its connection, looked up after each end of one.
        self._connections: dict[bytes, int] = {}
        self._events: zmq.Socket[bytes] | None = None
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        with self._opening(bind):
            if curve is not None:
                self._guard = serve_curve(self._context, self._socket, curve)
            self._context.setsockopt(zmq.RCVHWM, 0)  # of the monitor socket: no event is dropped
            self._events = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._socket.bind(bind)

    @property
    def address(self) -> str:
        """The address for Dialers, with the actual port."""
        return self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def send(self, peer: bytes, message: S) -> bool:
        """Queue a message for a peer; False if it is gone or its queue is full."""
        return self._put(peer, self._sends.encode(message))

    def closed(self) -> tuple[bytes, ...]:
        """Return peers whose connection has ended since the last call.

        A peer is returned only after all its messages were received. A dead process is returned at
        once. A live process that dialed again is returned too, and soon sends a message; rarely, a
        peer is returned only because a newer connection reused its file descriptor.
        """
        ended: set[int] = set()
        while self._events is not None and not self._socket.poll(0):
            try:
                event = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            ended.add(event["value"])
        self._read_soon()
        closed = tuple(peer for peer, file in self._connections.items() if file in ended)
        for peer in closed:
            del self._connections[peer]
        return closed

    def send_all(self, peers: Sequence[bytes], message: S) -> tuple[bytes, ...]:
        """Send to several peers, encoded once; return the peers that are gone or full."""
        data = self._sends.encode(message)
        return tuple(peer for peer in peers if not self._put(peer, data))

    def post(self, peer: bytes, message: S) -> bool:
        """Send from another thread; the link's owner sends it. False if the outbox is full."""
        return self._post(peer, message)

    def receive(self, timeout_s: float = 0.0) -> tuple[bytes, R] | None:
        """Return the next (peer, message), or None after `timeout_s` or a wake."""
        return self._receive(timeout_s)

    def close(self) -> None:
        if self._guard is not None:
            self._guard.stop()
            self._guard = None
        if self._events is not None:
            self._socket.disable_monitor()
            self._events.close(linger=0)
            self._events = None
        super().close()

    def _note(self, peer: bytes, frame: zmq.Frame) -> None:
        if peer not in self._connections:  # or until `closed` reports it
            with contextlib.suppress(zmq.ZMQError):  # a message from the same process has none
                self._connections[peer] = int(frame.get(zmq.SRCFD))


class Dialer(_Link[S, R]):
    """Connects to a Listener under `identity` and reconnects forever.

    Messages sent before the first connection wait for it. `handshakes` counts connections: after a
    change, the other end may be a new process. With `curve` (secret, server_public) the Listener
    must hold that key, and this link's key must be on its list.
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
        """Number of times that the link was established."""
        self._count_handshakes()
        return self._handshakes

    def send(self, message: S) -> bool:
        """Queue a message; False if the queue is full."""
        return self._put(b"", self._sends.encode(message))

    def post(self, message: S) -> bool:
        """Send from another thread; the link's owner sends it. False if the outbox is full."""
        return self._post(b"", message)

    def receive(self, timeout_s: float = 0.0) -> R | None:
        """Return the next message, or None after `timeout_s` or a wake."""
        taken = self._receive(timeout_s)
        return taken[1] if taken else None

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
