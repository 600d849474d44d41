"""A lane: a thread and the tokenizer process that it drives, one step or batch at a time.

    ticket   waiting ── sent, done at once ──────────────────> settled
                └────── planned ──> open on the lane ── steps ──┘

Short jobs for the same tokenizer are sent as one batch: each change between threads and processes
costs as much as a short text. If a step exceeds its time (an endless loop in a template, a
pathological text), or its client has left and it does not end, the process is killed. The other
jobs that were open or sent there start again.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from medha.cli.local_fleet.child_process import killed_with_parent
from medha.errors import CheckpointError, EngineError, RequestError
from medha_router.tokenization import wire
from medha_router.tokenization.fair_queue import due_s
from medha_router.tokenization.prefix_tokens import PrefixTokens

JOB_S = 15.0
SLOWEST_BYTES_PER_S = 100_000
BATCH_S = 0.5
"""CPU time of the process for a job of a batch; after it, all that are left start again alone.

Time of a clock would end a process that only waits for a CPU.
"""
ABANDONED_S = 1.0
"""A step whose client has left may take so long before its process is killed."""
POLL_S = 0.2
"""Time between two looks at the client and the limit."""
POLL_TIME = struct.pack("@ll", 0, round(1e6 * POLL_S))  # as the kernel's `timeval`
MOST_LENT_BYTES = 12 << 10
"""Longest text that the loop sends itself."""

Result = tuple[wire.Prompt, ...] | tuple[wire.BodyRead, memoryview] | memoryview | wire.Loaded
TicketJob = wire.Encode | wire.Detokenize | wire.ReadBody | wire.FormatTokens | None


class Ticket:
    """A job with the future that its caller awaits; without a job it loads `key` in the lane.

    `payload` is what the job works on, in parts.
    """

    def __init__(
        self,
        job: TicketJob,
        payload: Sequence[wire.Bytes],
        *,
        tenant: bytes,
        key: str,
        arrival_s: float,
    ) -> None:
        self.job, self.payload, self.tenant, self.key = job, payload, tenant, key
        self.size_bytes = sum(map(len, payload))
        self.due_s = due_s(arrival_s, self.size_bytes)
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Result] = self.loop.create_future()
        self.alone = False  # it was in a batch that failed
        self.restart()

    @property
    def sent_bytes(self) -> int:
        """Bytes that the process is sent, apart from a few for their framing."""
        if not isinstance(self.job, wire.Encode):
            return self.size_bytes
        return self.size_bytes + len(self.job.tools) + len(self.job.template_values)

    def restart(self) -> None:
        """Forget what was planned and encoded."""
        self.number = 0
        self.planned: wire.Planned | None = None
        self.stepped = False
        self.tokens: list[list[bytes]] = []
        self.hashes: list[list[bytes]] = []

    @property
    def abandoned(self) -> bool:
        return self.future.cancelled()

    def settle(self, result: Result | Exception) -> None:
        """Set the result, from a lane's thread."""
        settle_all([(self, result)])

    def set(self, result: Result | Exception) -> None:
        """Set the result, on the loop."""
        if self.future.done():
            return
        if isinstance(result, Exception):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


Results = list[tuple[Ticket, Result | Exception]]


def settle_all(results: Results) -> None:
    """Set results from a lane's thread; each loop is woken once."""
    for loop, group in itertools.groupby(results, key=lambda entry: entry[0].loop):
        try:
            loop.call_soon_threadsafe(_set_all, list(group))
        except RuntimeError:  # the loop has closed
            continue


def _set_all(results: Results) -> None:
    for ticket, result in results:
        ticket.set(result)


class Dispatch(Protocol):
    """Gives a lane its next tickets."""

    files: dict[str, wire.TokenizerFiles]
    prefixes: PrefixTokens

    def take(self, lane: Lane) -> list[Ticket]:
        """Wait for the next ticket, open ones of the lane included; empty at the end.

        Several tickets are short jobs with the same key.
        """
        ...

    def put_back(self, tickets: list[Ticket]) -> None:
        """Queue tickets that another process has to start again."""
        ...

    def charge(self, tenant: bytes, served_bytes: int) -> None:
        """Count what a tenant was served."""
        ...


class Lane(threading.Thread):
    """A thread and its process, which it starts with the first job and after a kill.

    Takes jobs of at most `most_bytes`. `open` holds the tickets that its process has planned. While
    the thread is `idle`, the loop may use the process: then the lane is `lent` (see `loop_link`).
    `failed`: the loop gave up the process. The dispatch sets all three under its lock; the thread
    resets `failed` once it has ended the process.
    """

    def __init__(self, dispatch: Dispatch, job_s: float, most_bytes: int) -> None:
        super().__init__(name="tokenizer-lane", daemon=True)
        self._dispatch, self._job_s = dispatch, job_s
        self.most_bytes = most_bytes
        self.open: list[Ticket] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._frames: wire.FrameReader[memoryview] | None = None
        self._loaded: dict[str, wire.Loaded] = {}
        self._sent: collections.deque[Ticket] = collections.deque()  # without an outcome yet
        self._decoder = msgspec.msgpack.Decoder(wire.Outcome)
        self._numbers = 0
        self._stopping = False
        self.idle = self.lent = self.failed = False

    def run(self) -> None:
        while tickets := self._dispatch.take(self):
            if self.failed:
                self._end_process()
                self.failed = False
            self._sent.extend(tickets)
            try:
                settled = self._advance(tickets)
            except CheckpointError as error:
                settle_all([(ticket, error) for ticket in self._sent])
                settled = True
            except Exception as error:
                self._sent[0].settle(error)
                self._dispatch.put_back(list(self._sent)[1:])
                settled = True
            self._sent.clear()
            if settled and tickets[0] in self.open:
                self._close(tickets[0])
        self._end_process()

    def stop(self) -> None:
        """End with the running job; called from another thread."""
        self._stopping = True
        self.kill()

    def kill(self) -> None:
        """Kill the process; called from another thread."""
        if self._process is not None:
            self._process.kill()

    # --- what the loop does with a lane that is lent ----------------------------------------------

    def takes(self, ticket: Ticket) -> bool:
        """Return whether the loop may send the ticket: a short text for a loaded tokenizer."""
        return (
            (self.lent or (self.idle and self._link is not None and not self.failed))
            and ticket.key in self._loaded
            and isinstance(ticket.job, wire.Encode)
            and ticket.sent_bytes <= MOST_LENT_BYTES
            and not ticket.alone
        )

    def second_link(self) -> socket.socket:
        """Return another descriptor of the link to the process."""
        return self._link_of()[0].dup()

    def _advance(self, tickets: list[Ticket]) -> bool:
        """Run a ticket or its next step, or several short ones; return True if they are settled.

        An error is that of the first ticket without an outcome.
        """
        ticket = tickets[0]
        if ticket.abandoned and len(tickets) == 1:
            return True
        try:
            if ticket.key and ticket.key not in self._loaded:
                self._load(ticket)
            if ticket.job is None:
                ticket.settle(self._loaded[ticket.key])
                return True
            if ticket.planned is not None:
                return self._step(ticket, ticket.planned)
            return self._start(tickets)
        except (TimeoutError, OSError) as error:
            late = self._sent[0]
            self._restart_others(late)
            if len(self._sent) > 1:  # any of them may be the cause
                for ticket in self._sent:
                    ticket.alone = True
                self._dispatch.put_back(list(self._sent))
                return True
            if isinstance(error, TimeoutError):
                raise RequestError(
                    f"the prompt could not be tokenized within {self.limit_s(late):.0f} s; "
                    "shorten it",
                    code="tokenizer_timeout",
                ) from None
            raise EngineError(
                "the tokenizer process ended; the request may be tried again"
            ) from None

    def limit_s(self, ticket: Ticket) -> float:
        return self._job_s + ticket.size_bytes / SLOWEST_BYTES_PER_S

    def _load(self, ticket: Ticket) -> None:
        files = wire.LoadFiles(self._dispatch.files[ticket.key])
        self._send(msgspec.msgpack.encode(files), (), JOB_S)
        loaded, _ = self._receive(ticket, self.limit_s(ticket) + JOB_S)
        if not isinstance(loaded, wire.Loaded):
            raise EngineError(f"a tokenizer process answered {type(loaded).__name__} to its files")
        if loaded.error:
            raise CheckpointError(loaded.error)
        self._loaded[ticket.key] = loaded

    def _start(self, tickets: list[Ticket]) -> bool:
        """Send jobs and take their outcomes; return False if the first one was planned."""
        messages = [self.message(ticket) for ticket in tickets]
        if len(tickets) == 1:
            self._send(messages[0], tickets[0].payload, self.limit_s(tickets[0]))
        else:
            pairs = zip(messages, tickets, strict=True)
            self._link_of()[0].sendall(
                b"".join(wire.frame_of(message, ticket.payload) for message, ticket in pairs)
            )
        results: Results = []
        try:
            for ticket in tickets:
                if results and not self._link_of()[1].ready:
                    settle_all(results)
                    results = []
                outcome, payload = self._receive(ticket, self.limit_s(ticket))
                self._sent.popleft()
                if isinstance(outcome, wire.Planned):
                    ticket.planned = outcome
                    ticket.tokens = [[] for _ in outcome.keys]
                    ticket.hashes = [[] for _ in outcome.keys]
                    self.open.append(ticket)
                else:
                    results.append((ticket, result_of(outcome, payload)))
                    self._dispatch.charge(ticket.tenant, ticket.size_bytes)
        finally:
            settle_all(results)
        return tickets[0].planned is None

    def message(self, ticket: Ticket) -> bytes:
        """Return the message of a job, with the number by which its process knows it."""
        self._numbers += 1
        ticket.number = self._numbers
        job = ticket.job
        if isinstance(job, wire.Encode):
            job = msgspec.structs.replace(job, raw=b"", number=ticket.number)
        elif isinstance(job, wire.Detokenize):
            job = msgspec.structs.replace(job, number=ticket.number)
        return msgspec.msgpack.encode(job)

    def _step(self, ticket: Ticket, planned: wire.Planned) -> bool:
        known = () if ticket.stepped else self._known(ticket, planned)
        ticket.stepped = True
        limit_s = self.limit_s(ticket)
        self._send(msgspec.msgpack.encode(wire.Advance(ticket.number, known)), (), limit_s)
        outcome, payload = self._receive(ticket, limit_s)
        if not isinstance(outcome, wire.Part):
            ticket.settle(result_of(outcome, payload))
            return True
        self._dispatch.charge(ticket.tenant, outcome.served_bytes)
        prefixes = self._dispatch.prefixes
        for piece in outcome.pieces:
            tokens, hashes = ticket.tokens[piece.prompt], ticket.hashes[piece.prompt]
            prefixes.put(planned.keys[piece.prompt], len(tokens), piece.tokens, piece.hashes)
            tokens.append(piece.tokens)
            hashes.append(piece.hashes)
        if outcome.done:
            texts = outcome.texts or (None,) * len(planned.keys)
            ticket.settle(
                tuple(
                    wire.Prompt(b"".join(tokens), b"".join(hashes), text)
                    for tokens, hashes, text in zip(
                        ticket.tokens, ticket.hashes, texts, strict=True
                    )
                )
            )
        return outcome.done

    def _known(self, ticket: Ticket, planned: wire.Planned) -> tuple[wire.Known, ...]:
        """Return what is known of each prompt, and take over its tokens."""
        known: list[wire.Known] = []
        page_tokens = ticket.job.page_tokens if isinstance(ticket.job, wire.Encode) else 0
        for index, keys in enumerate(planned.keys):
            pieces = self._dispatch.prefixes.match(keys)
            ticket.tokens[index] += [tokens for tokens, _ in pieces]
            ticket.hashes[index] += [hashes for _, hashes in pieces]
            known.append(_beginning(pieces, 4 * page_tokens))
        return tuple(known)

    def _close(self, ticket: Ticket) -> None:
        """Drop a ticket that was planned."""
        self.open.remove(ticket)
        if self._link is not None:
            try:
                wire.send_frame(self._link, msgspec.msgpack.encode(wire.Close(ticket.number)))
            except OSError:
                self._restart_others(ticket)

    def _link_of(self) -> tuple[socket.socket, wire.FrameReader[memoryview]]:
        """Return the link to the process and its frames; start the process if there is none."""
        if self._link is None or self._frames is None:
            self._link = self._start_process()
            self._frames = wire.FrameReader(self._link, buffer, memoryview)
        return self._link, self._frames

    def _send(self, message: bytes, payload: Sequence[wire.Bytes], limit_s: float) -> None:
        """Send a frame; a link has room for a small one, which needs no limit."""
        link, _ = self._link_of()
        large = len(message) + sum(map(len, payload)) > wire.READ_BYTES
        if large:
            link.settimeout(limit_s)
        wire.send_frame(link, message, payload)
        if large:
            link.settimeout(None)

    def _receive(self, ticket: Ticket, limit_s: float) -> tuple[wire.Outcome, memoryview]:
        """Wait for an outcome; raises TimeoutError if it is late or if the client has left.

        An outcome of a batch is late too if the process computes for BATCH_S meanwhile.
        """
        link, frames = self._link_of()
        started_s = time.monotonic()
        first_cpu_s: float | None = None
        while not frames.ready:
            try:
                frames.wait()
                break
            except BlockingIOError:  # nothing came within POLL_S
                spent_s = time.monotonic() - started_s
                if spent_s > limit_s or (ticket.abandoned and spent_s > ABANDONED_S):
                    raise TimeoutError from None
                if len(self._sent) > 1:
                    cpu_s = self.cpu_s()
                    first_cpu_s = cpu_s if first_cpu_s is None else first_cpu_s
                    if cpu_s - first_cpu_s > BATCH_S:
                        raise TimeoutError from None
        if frames.ready:
            received, payload = frames.receive()
        else:
            link.settimeout(limit_s)
            received, payload = frames.receive()
            link.settimeout(None)
        outcome: wire.Outcome = self._decoder.decode(received)
        return outcome, payload

    def cpu_s(self) -> float:
        """Return the CPU time of the process; raises OSError if it has ended."""
        assert self._process is not None
        # The kernel's number of another process's clock, as clock_getcpuclockid makes it.
        return time.clock_gettime(~self._process.pid << 3 | 2)

    def _start_process(self) -> socket.socket:
        if self._stopping:
            raise ConnectionResetError("the router is shutting down")
        ours, theirs = socket.socketpair()
        # The kernel's own limit costs no further calls of it.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, POLL_TIME)
        with theirs:
            self._process = subprocess.Popen(
                killed_with_parent(
                    sys.executable,
                    "-m",
                    "medha_router.tokenization.encoder",
                    str(theirs.fileno()),
                ),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                process_group=0,  # Ctrl-C reaches the router alone
            )
        return ours

    def _restart_others(self, ticket: Ticket) -> None:
        """End the process; its other tickets start again, in any lane."""
        others = [other for other in self.open if other is not ticket]
        self.open.clear()
        self._end_process()
        for other in others:
            other.restart()
        self._dispatch.put_back(others)

    def _end_process(self) -> None:
        self._loaded.clear()
        if self._link is not None:
            self._link.close()
            self._link = self._frames = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def result_of(outcome: wire.Outcome, payload: memoryview) -> Result | Exception:
    """Return what the caller of a job gets for its outcome."""
    match outcome:
        case wire.Encoded():
            return outcome.prompts
        case wire.BodyRead():
            return outcome, payload
        case wire.Answer():
            return payload
        case wire.Declined():
            return RequestError(
                outcome.message, status=outcome.status, code=outcome.code, param=outcome.param
            )
    return EngineError(f"the tokenizer process sent {type(outcome).__name__}")


def buffer(size: int) -> memoryview:
    """Return a buffer without writing to it: a bytearray's zeros would take the GIL's time."""
    return np.empty(size, np.uint8).data


def _beginning(pieces: list[tuple[bytes, bytes]], page_bytes: int) -> wire.Known:
    """Return the beginning of a prompt that these pieces make up."""
    size_bytes = sum(len(tokens) for tokens, _ in pieces)
    if not page_bytes or not pieces:
        return wire.Known(len(pieces), size_bytes // 4)
    links = [hashes[-wire.KEY_BYTES :] for _, hashes in pieces if hashes]
    missing, tail = size_bytes % page_bytes, b""
    for tokens, _ in reversed(pieces):
        if len(tail) >= missing:
            break
        tail = tokens + tail
    rest = tail[len(tail) - missing :]
    return wire.Known(len(pieces), size_bytes // 4, links[-1] if links else b"", rest)
