"""Tokenizer processes, so that neither prompts nor large bodies block the event loop.

    short lane        jobs of at most SHORT_BYTES; lent to the event loop while it is idle
    `workers` lanes   all jobs, the short ones first; long ones in steps

A job waits for at most one step of another tenant's job. See `fair_queue` for the order of jobs,
`lane` for their processes, `loop_link` for what the loop sends itself, `jobs` for the steps,
`prefix_tokens` for what is remembered.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import TypeVar, cast

import msgspec

from medha.errors import EngineError
from medha_router.tokenization import wire
from medha_router.tokenization.fair_queue import FairQueue, Shares
from medha_router.tokenization.lane import JOB_S, Lane, Ticket, TicketJob
from medha_router.tokenization.loop_link import LoopLink
from medha_router.tokenization.prefix_tokens import PrefixTokens

SHORT_BYTES = 64 << 10
CACHE_BYTES = 64 << 20
BATCH_BYTES = 12 << 10
BATCH_JOBS = 12
"""Most jobs of a batch besides the first, and bytes of all: the link has room for a batch."""
MAX_OPEN = 4
"""Most jobs that a process has planned; it holds the texts of all of them."""

P = TypeVar("P")


class TokenizerPool:
    """Tokenizes for one event loop in `workers` + 1 processes.

    `job_s` limits a step of a job; the first step gets one second more per 100 kB.
    """

    def __init__(
        self, workers: int = 1, *, job_s: float = JOB_S, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._dispatch = _Dispatch(PrefixTokens(cache_bytes))
        limits = [SHORT_BYTES] + [wire.MAX_FRAME_BYTES] * workers
        self._lanes = [Lane(self._dispatch, job_s, most_bytes) for most_bytes in limits]
        self._loop_link = LoopLink(self._lanes[0], self._dispatch)
        for lane in self._lanes:
            lane.start()

    def add(self, files: wire.TokenizerFiles) -> None:
        """Add the files of a checkpoint; each process loads them before their first use."""
        self._dispatch.files[files.key] = files

    async def encode(self, job: wire.Encode, tenant: str = "") -> tuple[wire.Prompt, ...]:
        """Return tokens and page names of the job's prompts. Tenants are served fairly.

        Raises RequestError (the client's fault), CheckpointError (the files do not load) or
        EngineError (the process died).
        """
        result = await self._run(job, [job.raw], tenant.encode(), job.key)
        return cast(tuple[wire.Prompt, ...], result)

    async def detokenize(self, key: str, raw: wire.Bytes, tenant: str) -> memoryview:
        """Return the JSON answer of `/detokenize` for raw JSON; raises as `encode` does."""
        job = wire.Detokenize(key=key)
        return cast(memoryview, await self._run(job, [raw], tenant.encode(), key))

    async def read_body(
        self, kind: str, body: Sequence[bytes], params: type[P], tenant: str
    ) -> tuple[P, memoryview]:
        """Read a body, given in parts, of a kind of `dialects.readers.READERS`.

        Returns its parameters and their `raw`; raises as `encode` does.
        """
        result = await self._run(wire.ReadBody(kind=kind), body, tenant.encode(), "")
        read, raw = cast(tuple[wire.BodyRead, memoryview], result)
        return msgspec.json.decode(read.params, type=params), raw

    async def format_tokens(self, tokens: bytes, tenant: str) -> memoryview:
        """Return int32 tokens as a JSON list."""
        return cast(memoryview, await self._run(wire.FormatTokens(), [tokens], tenant.encode(), ""))

    async def warm(self, key: str) -> wire.Loaded:
        """Load the files in every process and return the first outcome.

        Raises CheckpointError if they do not load.
        """
        tickets = [Ticket(None, (), tenant=b"", key=key, arrival_s=0.0) for _ in self._lanes]
        for lane, ticket in zip(self._lanes, tickets, strict=True):
            ticket.future.add_done_callback(asyncio.Future.exception)  # of a later one
            self._dispatch.put_on(lane, ticket)
        self._loop_link.wake()
        loaded, _ = await asyncio.wait(
            [ticket.future for ticket in tickets], return_when=asyncio.FIRST_COMPLETED
        )
        return cast(wire.Loaded, next(future.result() for future in loaded))

    async def _run(
        self, job: TicketJob, payload: Sequence[wire.Bytes], tenant: bytes, key: str
    ) -> object:
        ticket = Ticket(job, payload, tenant=tenant, key=key, arrival_s=time.monotonic())
        self._dispatch.put(ticket, notify=False)
        self._loop_link.wake()
        return await ticket.future

    def close(self) -> None:
        """End every process and thread; waiting jobs fail."""
        self._dispatch.close()
        self._loop_link.close()
        for lane in self._lanes:
            lane.stop()
        for lane in self._lanes:
            lane.join()
        self._dispatch.fail_all(self._lanes)


class _Dispatch:
    """The waiting tickets of all lanes. `take` blocks; it returns None once this is closed."""

    def __init__(self, prefixes: PrefixTokens) -> None:
        self.files: dict[str, wire.TokenizerFiles] = {}
        self.prefixes = prefixes
        self._shares = Shares()
        self._short: FairQueue[Ticket] = FairQueue(self._shares)
        self._long: FairQueue[Ticket] = FairQueue(self._shares)
        self._own: dict[Lane, list[Ticket]] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, ticket: Ticket, notify: bool = True) -> None:
        """Queue a ticket for any lane that takes its size.

        Without `notify`, the loop link looks at short ones first.
        """
        with self._changed:
            queue = self._queue_of(ticket)
            queue.put(ticket)
            if notify or queue is not self._short:
                self._changed.notify_all()

    def put_back(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self.put(ticket)

    def put_on(self, lane: Lane, ticket: Ticket) -> None:
        """Queue a ticket for one lane."""
        with self._changed:
            self._own.setdefault(lane, []).append(ticket)
            self._changed.notify_all()

    def take(self, lane: Lane) -> list[Ticket]:
        with self._changed:
            while not self._closed:
                if not lane.lent:
                    if own := self._own.get(lane):
                        return [own.pop()]
                    ticket = self._choose(lane)
                    if ticket is not None:
                        self._shares.start(ticket.tenant)
                        return [ticket, *self._more(ticket)]
                lane.idle = True
                self._changed.wait()
                lane.idle = False
            return []

    def take_for_loop(self, lane: Lane, jobs: int, size_bytes: int, drained: bool) -> list[Ticket]:
        tickets: list[Ticket] = []

        def fits(ticket: Ticket) -> bool:
            return lane.takes(ticket) and ticket.sent_bytes <= size_bytes

        with self._changed:
            wanted = self._closed or bool(self._own.get(lane))
            while not wanted and len(tickets) < jobs:
                ticket = self._short.take(fits)
                if ticket is None:
                    break
                self._shares.start(ticket.tenant)
                tickets.append(ticket)
                size_bytes -= ticket.sent_bytes
            wanted = wanted or self._short.peek() is not None
            lane.lent = bool(tickets) or (lane.lent and not (drained and wanted))
            if wanted:
                self._changed.notify_all()
        return tickets

    def give_back(self, lane: Lane, tickets: list[Ticket], *, failed: bool) -> None:
        with self._changed:
            lane.lent, lane.failed = False, failed
            closed = self._closed
        if not closed:
            self.put_back(tickets)
            return
        for ticket in tickets:
            ticket.set(EngineError("the router is shutting down"))

    def _more(self, first: Ticket) -> list[Ticket]:
        """Take the short tickets that go with a short one, in their order."""
        more: list[Ticket] = []
        room_bytes = BATCH_BYTES - first.sent_bytes
        if first.planned is not None or not first.key or first.alone:
            return more

        def fits(ticket: Ticket) -> bool:
            return ticket.key == first.key and not ticket.alone and ticket.sent_bytes <= room_bytes

        while len(more) < BATCH_JOBS and (ticket := self._short.take(fits)) is not None:
            self._shares.start(ticket.tenant)
            more.append(ticket)
            room_bytes -= ticket.sent_bytes
        return more

    def charge(self, tenant: bytes, served_bytes: int) -> None:
        with self._changed:
            self._shares.charge(tenant, served_bytes)

    def _choose(self, lane: Lane) -> Ticket | None:
        """Choose the next ticket of a lane.

        Of short and long ones the one that is due first, and of the long ones, open or waiting,
        that of the tenant that was served least.
        """
        abandoned = next((ticket for ticket in lane.open if ticket.abandoned), None)
        if abandoned is not None:
            return abandoned
        short = self._short.peek()
        candidates = list(lane.open)
        if lane.most_bytes > SHORT_BYTES and len(lane.open) < MAX_OPEN:
            waiting = self._long.peek()
            candidates += [waiting] if waiting is not None else []
        if candidates:
            long = min(
                candidates, key=lambda ticket: (self._shares.of(ticket.tenant), ticket.due_s)
            )
            if short is None or long.due_s <= short.due_s:
                return long if long in lane.open else self._long.take()
        return self._short.take() if short is not None else None

    def _queue_of(self, ticket: Ticket) -> FairQueue[Ticket]:
        return self._short if ticket.size_bytes <= SHORT_BYTES else self._long

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail_all(self, lanes: list[Lane]) -> None:
        """Fail every ticket that no lane will settle any more."""
        tickets = self._short.drain() + self._long.drain()
        tickets += [ticket for lane in lanes for ticket in lane.open]
        tickets += [ticket for own in self._own.values() for ticket in own]
        for ticket in tickets:
            ticket.settle(EngineError("the router is shutting down"))
