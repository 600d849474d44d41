"""Tokens made off the event loop: a few processes that can be killed, each behind a thread.

Short jobs and long ones have lanes of their own, so that a greeting never waits for a book. A job
that overruns its time (a template in an endless loop, a pathological text) costs its process, not
the router: the process is killed and the next job starts a new one.
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
from medha_router import encoding

SHORT_BYTES = 64 << 10
JOB_S = 15.0
SLOWEST_BYTES_PER_S = 100_000


class TokenizerPool:
    """Makes tokens on behalf of one event loop; `workers` lanes for short jobs, one for long ones.

    `job_s` bounds a short job; long ones get a second more per 100 kB.
    """

    def __init__(self, workers: int = 1, *, job_s: float = JOB_S) -> None:
        self._files: dict[str, encoding.TokenizerFiles] = {}
        self._short = _Queue()
        self._long = _Queue()
        queues = [self._short] * workers + [self._long]
        self._lanes = [_Lane(queue, self._files, job_s) for queue in queues]
        for lane in self._lanes:
            lane.start()

    def add(self, files: encoding.TokenizerFiles) -> None:
        """Make a checkpoint's files known; each process loads them before their first use."""
        self._files[files.key] = files

    async def encode(self, job: encoding.Encode) -> tuple[encoding.Prompt, ...]:
        """Tokens and page names of the job's prompts.

        Raises RequestError (the client can mend it), CheckpointError (the files do not load) or
        EngineError (the process died).
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[encoding.Prompt, ...]] = loop.create_future()
        queue = self._short if len(job.raw) <= SHORT_BYTES else self._long
        queue.put(_Ticket(job, loop, future))
        return await future

    async def warm(self, key: str) -> None:
        """Have a process load the files now; raises CheckpointError when they do not load."""
        await self.encode(
            encoding.Encode(
                key=key, chat=False, raw=b'""', page_tokens=1, salt=b"", add_special_tokens=False
            )
        )

    def close(self) -> None:
        """End every process and thread; jobs that wait fail."""
        for lane in self._lanes:
            lane.stop()
        for queue in (self._short, self._long):
            queue.close()
        for lane in self._lanes:
            lane.join()


class _Ticket:
    """A job and whoever awaits it."""

    def __init__(
        self,
        job: encoding.Encode,
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[tuple[encoding.Prompt, ...]],
    ) -> None:
        self.job, self._loop, self._future = job, loop, future

    @property
    def abandoned(self) -> bool:
        return self._future.cancelled()

    def settle(self, result: tuple[encoding.Prompt, ...] | Exception) -> None:
        """Hand over the outcome from a lane's thread."""
        try:
            self._loop.call_soon_threadsafe(self._settle, result)
        except RuntimeError:  # the loop closed meanwhile: nobody waits
            return

    def _settle(self, result: tuple[encoding.Prompt, ...] | Exception) -> None:
        if self._future.done():
            return
        if isinstance(result, Exception):
            self._future.set_exception(result)
        else:
            self._future.set_result(result)


class _Queue:
    """Tickets in order of arrival; `take` blocks, and says None once closed."""

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
    """One thread and its process; starts the process with the first job and after a kill."""

    def __init__(
        self, queue: _Queue, files: dict[str, encoding.TokenizerFiles], job_s: float
    ) -> None:
        super().__init__(name="tokenizer-lane", daemon=True)
        self._queue, self._files, self._job_s = queue, files, job_s
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._loaded: set[str] = set()
        self._decoder = msgspec.msgpack.Decoder(encoding.Outcome)
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
        """From another thread: what runs is cut short."""
        self._stopping = True
        if self._process is not None:
            self._process.kill()

    def _encode(self, job: encoding.Encode) -> tuple[encoding.Prompt, ...]:
        limit_s = self._job_s + len(job.raw) / SLOWEST_BYTES_PER_S
        try:
            if job.key not in self._loaded:
                loaded = self._ask(encoding.LoadFiles(self._files[job.key]), limit_s + JOB_S)
                if isinstance(loaded, encoding.Loaded) and loaded.error:
                    raise CheckpointError(loaded.error)
                self._loaded.add(job.key)
            outcome = self._ask(job, limit_s)
        except TimeoutError:
            self._end_process()
            raise RequestError(
                f"the prompt could not be made into tokens within {limit_s:.0f} s; shorten it",
                code="tokenizer_timeout",
            ) from None
        except OSError:
            self._end_process()
            raise EngineError(
                "the tokenizer process ended; the request may be tried again"
            ) from None
        if isinstance(outcome, encoding.Encoded):
            return outcome.prompts
        if isinstance(outcome, encoding.Declined):
            raise RequestError(
                outcome.message, status=outcome.status, code=outcome.code, param=outcome.param
            )
        raise EngineError(f"the tokenizer process answered {type(outcome).__name__}")

    def _ask(self, job: encoding.Job, limit_s: float) -> encoding.Outcome:
        link = self._link or self._start_process()
        link.settimeout(limit_s)
        encoding.send_frame(link, msgspec.msgpack.encode(job))
        outcome: encoding.Outcome = self._decoder.decode(encoding.receive_frame(link))
        return outcome

    def _start_process(self) -> socket.socket:
        if self._stopping:
            raise ConnectionResetError("the router is shutting down")
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "medha_router.tokenizer_process", str(theirs.fileno())],
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
