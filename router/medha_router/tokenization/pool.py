"""Tokenizer processes, each driven by a thread, so that encoding never blocks the event loop.

Short and long jobs have separate lanes: a short prompt never waits for a long one. If a job exceeds
its time (an endless loop in a template, a pathological text), its process is killed, and the next
job starts a new one.
"""

from __future__ import annotations

import asyncio
import collections
import os
import socket
import subprocess
import sys
import threading

import msgspec

from medha.errors import CheckpointError, EngineError, RequestError
from medha_router.tokenization import wire

SHORT_BYTES = 64 << 10
JOB_S = 15.0
SLOWEST_BYTES_PER_S = 100_000


class TokenizerPool:
    """Encodes prompts for one event loop: `workers` lanes for short jobs and one for long jobs.

    `job_s` limits a short job; long jobs get one second more per 100 kB.
    """

    def __init__(self, workers: int = 1, *, job_s: float = JOB_S) -> None:
        self._files: dict[str, wire.TokenizerFiles] = {}
        self._short = _Queue()
        self._long = _Queue()
        queues = [self._short] * workers + [self._long]
        self._lanes = [_Lane(queue, self._files, job_s) for queue in queues]
        for lane in self._lanes:
            lane.start()

    def add(self, files: wire.TokenizerFiles) -> None:
        """Add the files of a checkpoint; each process loads them before their first use."""
        self._files[files.key] = files

    async def encode(self, job: wire.Encode) -> tuple[wire.Prompt, ...]:
        """Return tokens and page names of the job's prompts.

        Raises RequestError (the client's fault), CheckpointError (the files do not load) or
        EngineError (the process died).
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[wire.Prompt, ...]] = loop.create_future()
        queue = self._short if len(job.raw) <= SHORT_BYTES else self._long
        queue.put(_Ticket(job, loop, future))
        return await future

    async def warm(self, key: str) -> None:
        """Load the files in a process now; raises CheckpointError if they do not load."""
        await self.encode(
            wire.Encode(
                key=key, chat=False, raw=b'""', page_tokens=1, salt=b"", add_special_tokens=False
            )
        )

    def close(self) -> None:
        """End every process and thread; waiting jobs fail."""
        for lane in self._lanes:
            lane.stop()
        for queue in (self._short, self._long):
            queue.close()
        for lane in self._lanes:
            lane.join()


class _Ticket:
    """A job with the future that its caller awaits."""

    def __init__(
        self,
        job: wire.Encode,
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[tuple[wire.Prompt, ...]],
    ) -> None:
        self.job, self._loop, self._future = job, loop, future

    @property
    def abandoned(self) -> bool:
        return self._future.cancelled()

    def settle(self, result: tuple[wire.Prompt, ...] | Exception) -> None:
        """Set the result, from a lane's thread."""
        try:
            self._loop.call_soon_threadsafe(self._settle, result)
        except RuntimeError:  # the loop has closed
            return

    def _settle(self, result: tuple[wire.Prompt, ...] | Exception) -> None:
        if self._future.done():
            return
        if isinstance(result, Exception):
            self._future.set_exception(result)
        else:
            self._future.set_result(result)


class _Queue:
    """Tickets in order of arrival. `take` blocks; it returns None once the queue is closed."""

    def __init__(self) -> None:
        self._tickets: collections.deque[_Ticket] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, ticket: _Ticket) -> None:
        with self._changed:
            self._tickets.append(ticket)
            self._changed.notify()

    def take(self) -> _Ticket | None:
        with self._changed:
            while not self._tickets and not self._closed:
                self._changed.wait()
            return None if self._closed else self._tickets.popleft()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for ticket in self._tickets:
                ticket.settle(EngineError("the router is shutting down"))
            self._tickets.clear()
            self._changed.notify_all()


class _Lane(threading.Thread):
    """A thread and its process, which it starts with the first job and after a kill."""

    def __init__(self, queue: _Queue, files: dict[str, wire.TokenizerFiles], job_s: float) -> None:
        super().__init__(name="tokenizer-lane", daemon=True)
        self._queue, self._files, self._job_s = queue, files, job_s
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._loaded: set[str] = set()
        self._decoder = msgspec.msgpack.Decoder(wire.Outcome)
        self._stopping = False

    def run(self) -> None:
        while (ticket := self._queue.take()) is not None:
            if ticket.abandoned:
                continue
            try:
                ticket.settle(self._encode(ticket.job))
            except Exception as error:
                ticket.settle(error)
        self._end_process()

    def stop(self) -> None:
        """Kill the running job; called from another thread."""
        self._stopping = True
        if self._process is not None:
            self._process.kill()

    def _encode(self, job: wire.Encode) -> tuple[wire.Prompt, ...]:
        limit_s = self._job_s + len(job.raw) / SLOWEST_BYTES_PER_S
        try:
            if job.key not in self._loaded:
                loaded = self._request(wire.LoadFiles(self._files[job.key]), limit_s + JOB_S)
                if isinstance(loaded, wire.Loaded) and loaded.error:
                    raise CheckpointError(loaded.error)
                self._loaded.add(job.key)
            outcome = self._request(job, limit_s)
        except TimeoutError:
            self._end_process()
            raise RequestError(
                f"the prompt could not be tokenized within {limit_s:.0f} s; shorten it",
                code="tokenizer_timeout",
            ) from None
        except OSError:
            self._end_process()
            raise EngineError(
                "the tokenizer process ended; the request may be tried again"
            ) from None
        if isinstance(outcome, wire.Encoded):
            return outcome.prompts
        if isinstance(outcome, wire.Declined):
            raise RequestError(
                outcome.message, status=outcome.status, code=outcome.code, param=outcome.param
            )
        raise EngineError(f"the tokenizer process sent {type(outcome).__name__}")

    def _request(self, job: wire.Job, limit_s: float) -> wire.Outcome:
        link = self._link or self._start_process()
        link.settimeout(limit_s)
        wire.send_frame(link, msgspec.msgpack.encode(job))
        outcome: wire.Outcome = self._decoder.decode(wire.receive_frame(link))
        return outcome

    def _start_process(self) -> socket.socket:
        if self._stopping:
            raise ConnectionResetError("the router is shutting down")
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "medha_router.tokenization.encoder", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
        self._link = ours
        return ours

    def _end_process(self) -> None:
        self._loaded.clear()
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
