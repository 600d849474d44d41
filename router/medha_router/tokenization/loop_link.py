"""Short texts go from the event loop to a tokenizer process directly, while its lane is idle.

    waiting ── the window has room ──> sent ── in order ──> settled

What comes while the process is idle is sent at once, all else in one write per turn.

A text of 1 KB takes a process 0.2 ms. Each change between threads takes as long, and while the loop
is busy a thread waits up to 5 ms for the interpreter. So the short lane lends its process to the
loop whenever its thread has nothing to do, and gets it back as soon as a job needs the thread:
another kind of job, a tokenizer to load. If the process ends or takes too long, its jobs start
again in the lanes, each alone and with a limit of its own.
"""

from __future__ import annotations

import asyncio
import collections
import socket
import threading
import time
from typing import Protocol

import msgspec

from medha_router.tokenization import wire
from medha_router.tokenization.lane import BATCH_S, POLL_S, Lane, Ticket, buffer, result_of

WINDOW_BYTES = 32 << 10
WINDOW_JOBS = 32
"""Most that is sent without an outcome. The link has room for it, so that no write blocks."""


class Lending(Protocol):
    """The side of the lanes: their waiting tickets, and to whom the lane is lent."""

    def take_for_loop(self, lane: Lane, jobs: int, size_bytes: int, drained: bool) -> list[Ticket]:
        """Return waiting tickets that the loop sends; the lane is lent if there are any.

        `drained`: all that was sent has its outcome, so that the thread may have its lane back.
        """
        ...

    def give_back(self, lane: Lane, tickets: list[Ticket], *, failed: bool) -> None:
        """Return a lane, and queue tickets again for a thread. `failed`: its process is ended."""
        ...

    def put_back(self, tickets: list[Ticket]) -> None: ...

    def put_on(self, lane: Lane, ticket: Ticket) -> None: ...

    def charge(self, tenant: bytes, served_bytes: int) -> None: ...


class LoopLink:
    """The loop's use of one lane. All methods but `close` run on the loop."""

    def __init__(self, lane: Lane, lending: Lending) -> None:
        self._lane, self._lending = lane, lending
        self._decoder = msgspec.msgpack.Decoder(wire.Outcome)
        self._sent: collections.deque[Ticket] = collections.deque()
        self._closed = False
        self._key = ""  # of the last ticket
        self._sent_bytes = 0
        self._sent_s = 0.0  # when the oldest one became the oldest
        self._spent: tuple[int, float] | None = None  # the oldest at a check, CPU time of then
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._link: socket.socket | None = None  # a second descriptor of the lane's link
        self._frames: wire.FrameReader[memoryview] | None = None
        self._due: asyncio.Handle | None = None
        self._check_due: asyncio.Handle | None = None

    def wake(self) -> None:
        """Send what waits: at once if the process is idle, else once the loop's turn is over."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._move(loop)
        if self._due is None and self._sent:
            self._due = loop.call_soon(self._pull)
        elif self._due is None:
            self._pull()

    def close(self) -> None:
        """Stop to use the lane; callable from any thread. The process is about to end."""
        self._closed = True
        loop = self._loop
        if loop is None or loop.is_closed():
            self._unlink()
        elif threading.get_ident() == self._thread:
            self._fail()
        else:
            loop.call_soon_threadsafe(self._fail)

    def _move(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use another loop; the former one has ended."""
        self._loop, self._due, self._check_due = loop, None, None
        self._thread = threading.get_ident()
        if self._link is not None:
            loop.add_reader(self._link, self._read)

    def _pull(self) -> None:
        self._due = None
        jobs, size_bytes = WINDOW_JOBS - len(self._sent), WINDOW_BYTES - self._sent_bytes
        tickets = self._lending.take_for_loop(self._lane, jobs, size_bytes, not self._sent)
        if not self._lane.lent:
            self._unlink()
        if not tickets or self._loop is None:
            return
        if self._link is None:
            try:
                self._link = self._lane.second_link()
            except OSError:  # no descriptor is left, and the thread needs none
                self._lending.give_back(self._lane, tickets, failed=False)
                return
            self._frames = wire.FrameReader(self._link, buffer, memoryview)
            self._loop.add_reader(self._link, self._read)
        if not self._sent:
            self._sent_s = time.monotonic()
        frames = [wire.frame_of(self._lane.message(ticket), ticket.payload) for ticket in tickets]
        self._sent.extend(tickets)
        self._key = tickets[-1].key
        self._sent_bytes += sum(ticket.sent_bytes for ticket in tickets)
        if self._check_due is None:
            self._check_due = self._loop.call_later(POLL_S, self._check)
        try:
            self._link.sendall(b"".join(frames))
        except OSError:
            self._fail()

    def _read(self) -> None:
        """Settle the jobs whose outcomes have arrived, and send more."""
        frames = self._frames
        if frames is None:
            return
        try:
            frames.poll()
            while self._sent and frames.ready:
                message, payload = frames.receive()
                self._settle(self._decoder.decode(message), payload)
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError):
            self._fail()
            return
        self._pull()

    def _settle(self, outcome: wire.Outcome, payload: memoryview) -> None:
        """Settle the oldest job."""
        ticket = self._sent.popleft()
        self._sent_s = time.monotonic()
        self._sent_bytes -= ticket.sent_bytes
        if isinstance(outcome, wire.Planned):  # its template made a long prompt of it
            ticket.alone = True
            self._lending.put_back([ticket])
            assert self._link is not None
            wire.send_frame(self._link, msgspec.msgpack.encode(wire.Close(ticket.number)))
            return
        self._lending.charge(ticket.tenant, ticket.size_bytes)
        ticket.set(result_of(outcome, payload))

    def _check(self) -> None:
        """Give up a process that has ended, or that takes too long for the oldest job."""
        self._check_due = None
        if not self._sent or self._loop is None:
            return
        oldest = self._sent[0]
        try:
            cpu_s = self._lane.cpu_s()
        except OSError:
            self._fail()
            return
        if self._spent is None or self._spent[0] != oldest.number:
            self._spent = oldest.number, cpu_s
        late = time.monotonic() - self._sent_s > self._lane.limit_s(oldest)
        if late or cpu_s - self._spent[1] > BATCH_S:
            self._fail()
            return
        self._check_due = self._loop.call_later(POLL_S, self._check)

    def _fail(self) -> None:
        """End the process; what it was sent starts again in the lanes."""
        tickets = list(self._sent)
        self._sent.clear()
        self._sent_bytes = 0
        if self._link is None:
            return
        self._unlink()
        self._lane.kill()
        for ticket in tickets:
            ticket.alone = True
        self._lending.give_back(self._lane, tickets, failed=True)
        if not self._closed:
            self._load_again()

    def _load_again(self) -> None:
        """Make the lane's thread start another process, with the tokenizer used last."""
        ticket = Ticket(None, (), tenant=b"", key=self._key, arrival_s=0.0)
        ticket.future.add_done_callback(asyncio.Future.exception)
        self._lending.put_on(self._lane, ticket)

    def _unlink(self) -> None:
        link, self._link, self._frames = self._link, None, None
        if link is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(link)
        link.close()
