"""A lane: a thread and the tokenizer process that it drives, one step at a time.

    ticket   waiting ── sent, done at once ──────────────────> settled
                └────── planned ──> open on the lane ── steps ──┘

If a step exceeds its time (an endless loop in a template, a pathological text), or its client has
left and it does not end, the process is killed. The other jobs that were open there start again.
"""

from __future__ import annotations

import asyncio
import os
import socket
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
ABANDONED_S = 1.0
"""A step whose client has left may take so long before its process is killed."""
POLL_S = 0.2

Result = tuple[wire.Prompt, ...] | tuple[wire.BodyRead, memoryview] | memoryview | None
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
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Result] = self._loop.create_future()
        self.restart()

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
        try:
            self._loop.call_soon_threadsafe(self._settle, result)
        except RuntimeError:  # the loop has closed
            return

    def _settle(self, result: Result | Exception) -> None:
        if self.future.done():
            return
        if isinstance(result, Exception):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


class Dispatch(Protocol):
    """Gives a lane its next ticket."""

    files: dict[str, wire.TokenizerFiles]
    prefixes: PrefixTokens

    def take(self, lane: Lane) -> Ticket | None:
        """Wait for the next ticket, open ones of the lane included; None at the end."""
        ...

    def put_back(self, tickets: list[Ticket]) -> None:
        """Queue tickets that another process has to start again."""
        ...

    def charge(self, tenant: bytes, served_bytes: int) -> None:
        """Count what a tenant was served."""
        ...


class Lane(threading.Thread):
    """A thread and its process, which it starts with the first job and after a kill.

    Takes jobs of at most `most_bytes`. `open` holds the tickets that its process has planned.
    """

    def __init__(self, dispatch: Dispatch, job_s: float, most_bytes: int) -> None:
        super().__init__(name="tokenizer-lane", daemon=True)
        self._dispatch, self._job_s = dispatch, job_s
        self.most_bytes = most_bytes
        self.open: list[Ticket] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._frames: wire.FrameReader[memoryview] | None = None
        self._loaded: set[str] = set()
        self._decoder = msgspec.msgpack.Decoder(wire.Outcome)
        self._numbers = 0
        self._stopping = False

    def run(self) -> None:
        while (ticket := self._dispatch.take(self)) is not None:
            try:
                settled = self._advance(ticket)
            except Exception as error:
                ticket.settle(error)
                settled = True
            if settled and ticket in self.open:
                self._close(ticket)
        self._end_process()

    def stop(self) -> None:
        """Kill the running job; called from another thread."""
        self._stopping = True
        if self._process is not None:
            self._process.kill()

    def _advance(self, ticket: Ticket) -> bool:
        """Run a ticket or its next step; return True if it is settled."""
        if ticket.abandoned:
            return True
        limit_s = self._job_s + ticket.size_bytes / SLOWEST_BYTES_PER_S
        try:
            if ticket.key and ticket.key not in self._loaded:
                self._load(ticket, limit_s)
            if ticket.job is None:
                ticket.settle(None)
                return True
            if ticket.planned is not None:
                return self._step(ticket, ticket.planned, limit_s)
            return self._start(ticket, ticket.job, limit_s)
        except TimeoutError:
            self._restart_others(ticket)
            raise RequestError(
                f"the prompt could not be tokenized within {limit_s:.0f} s; shorten it",
                code="tokenizer_timeout",
            ) from None
        except OSError:
            self._restart_others(ticket)
            raise EngineError(
                "the tokenizer process ended; the request may be tried again"
            ) from None

    def _load(self, ticket: Ticket, limit_s: float) -> None:
        files = wire.LoadFiles(self._dispatch.files[ticket.key])
        loaded, _ = self._request(files, (), ticket, limit_s + JOB_S)
        if isinstance(loaded, wire.Loaded) and loaded.error:
            raise CheckpointError(loaded.error)
        self._loaded.add(ticket.key)

    def _start(self, ticket: Ticket, job: wire.Job, limit_s: float) -> bool:
        self._numbers += 1
        ticket.number = self._numbers
        if isinstance(job, wire.Encode):
            job = msgspec.structs.replace(job, raw=b"", number=ticket.number)
        elif isinstance(job, wire.Detokenize):
            job = msgspec.structs.replace(job, number=ticket.number)
        outcome, payload = self._request(job, ticket.payload, ticket, limit_s)
        match outcome:
            case wire.Planned():
                ticket.planned = outcome
                ticket.tokens = [[] for _ in outcome.keys]
                ticket.hashes = [[] for _ in outcome.keys]
                self.open.append(ticket)
                return False
            case wire.Encoded():
                ticket.settle(outcome.prompts)
            case wire.BodyRead():
                ticket.settle((outcome, payload))
            case _:
                self._settle(ticket, outcome, payload)
        self._dispatch.charge(ticket.tenant, ticket.size_bytes)
        return True

    def _step(self, ticket: Ticket, planned: wire.Planned, limit_s: float) -> bool:
        known = () if ticket.stepped else self._known(ticket, planned)
        ticket.stepped = True
        outcome, payload = self._request(wire.Advance(ticket.number, known), (), ticket, limit_s)
        if not isinstance(outcome, wire.Part):
            self._settle(ticket, outcome, payload)
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

    def _settle(self, ticket: Ticket, outcome: wire.Outcome, payload: memoryview) -> None:
        if isinstance(outcome, wire.Answer):
            ticket.settle(payload)
        elif isinstance(outcome, wire.Declined):
            ticket.settle(
                RequestError(
                    outcome.message, status=outcome.status, code=outcome.code, param=outcome.param
                )
            )
        else:
            ticket.settle(EngineError(f"the tokenizer process sent {type(outcome).__name__}"))

    def _close(self, ticket: Ticket) -> None:
        """Drop a ticket that was planned."""
        self.open.remove(ticket)
        if self._link is not None:
            try:
                wire.send_frame(self._link, msgspec.msgpack.encode(wire.Close(ticket.number)))
            except OSError:
                self._restart_others(ticket)

    def _request(
        self, job: wire.Job, payload: Sequence[wire.Bytes], ticket: Ticket, limit_s: float
    ) -> tuple[wire.Outcome, memoryview]:
        if self._link is None or self._frames is None:
            self._link = self._start_process()
            self._frames = wire.FrameReader(self._link, _buffer)
        link, frames = self._link, self._frames
        message = msgspec.msgpack.encode(job)
        # A link has room for a small frame. Without a limit, it is sent in one call of the kernel.
        small = len(message) + sum(map(len, payload)) <= wire.READ_BYTES
        link.settimeout(None if small else limit_s)
        wire.send_frame(link, message, payload)
        self._wait(link, frames, ticket, limit_s)
        received, answer = frames.receive()
        outcome: wire.Outcome = self._decoder.decode(received)
        return outcome, answer

    def _wait(
        self,
        link: socket.socket,
        frames: wire.FrameReader[memoryview],
        ticket: Ticket,
        limit_s: float,
    ) -> None:
        """Wait for the outcome; raises TimeoutError if it does not come or the client has left."""
        started_s = time.monotonic()
        while True:
            link.settimeout(POLL_S)
            try:
                frames.wait()
            except TimeoutError:
                spent_s = time.monotonic() - started_s
                if spent_s > limit_s or (ticket.abandoned and spent_s > ABANDONED_S):
                    raise
            else:
                link.settimeout(limit_s)
                return

    def _start_process(self) -> socket.socket:
        if self._stopping:
            raise ConnectionResetError("the router is shutting down")
        ours, theirs = socket.socketpair()
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


def _buffer(size: int) -> memoryview:
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
