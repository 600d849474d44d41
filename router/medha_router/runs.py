"""A client's request while it lives: one Answer, and a Run for each of its outputs.

A Run is what a replica serves: prompt, sampling, deadline, and the tokens so far, kept so that it
can be resumed elsewhere. An Answer is what a client reads: the deltas of its runs in the order they
came, or the one error that ended it. Neither decides anything; the service does.

    waiting ──placed, granted──> sent ──tokens──> done
       ^                          │
       └─ its replica gave up ────┘   MAX_MOVES times, POISON_DEATHS deaths are too many
"""

from __future__ import annotations

import asyncio
import collections

from medha.messages import Sampling, Submit
from medha.request import Request, SloClass
from medha_router.encoding import Prompt
from medha_router.openai import Ask
from medha_router.streams import Delta, Output

MAX_MOVES = 2
POISON_DEATHS = 2


class Run:
    """One output of an answer, from admission to its last token. Times are the service's clock."""

    def __init__(
        self, *, answer: Answer, index: int, prompt: Prompt, request: Request, sampling: Sampling,
        output: Output, salt: bytes, edition: str, idle_tpot_s: float,
    ) -> None:  # fmt: skip
        self.answer, self.index, self.prompt, self.request = answer, index, prompt, request
        self.edition = edition  # replicas of no other may read its tokens
        self.idle_tpot_s = idle_tpot_s  # of the best of them, if it were alone there
        self.sampling, self.output, self.salt = sampling, output, salt
        self.peer: bytes | None = None
        self.waiting_since_s = request.arrival_s
        self.cached_tokens = 0
        self.moves = 0
        self.deaths = 0
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.promise_given = False
        self.done = False

    @property
    def id(self) -> str:
        return self.request.id

    def submit(self, now: float) -> Submit:
        """What a replica needs to serve this run, or to go on with it after its first tokens."""
        request, emitted = self.request, self.output.tokens
        tokens = self.prompt.tokens
        if emitted:
            tokens += b"".join(token.to_bytes(4, "little", signed=True) for token in emitted)
        return Submit(
            id=request.id,
            tokens=tokens,
            hashes=self.prompt.hashes,
            age_s=max(0.0, now - request.arrival_s),
            emitted=len(emitted),
            max_output_tokens=request.max_output_tokens,
            sampling=self.sampling,
            ttft_deadline_s=request.ttft_deadline_s,
            tpot_s=request.tpot_s,
            work_s=request.work_s,
            slo_class=request.slo_class,
            tenant=request.tenant,
            salt=self.salt,
            weight=request.weight,
            promised=request.promised,
        )


class Answer:
    """What one client reads; `promise_s` and `predicted_s` are TTFTs after arrival, if known."""

    def __init__(
        self, *, id: str, ask: Ask, slo_class: SloClass, tenant: str, arrival_s: float,
        created: int,
    ) -> None:  # fmt: skip
        self.id, self.ask, self.slo_class, self.tenant = id, ask, slo_class, tenant
        self.arrival_s, self.created = arrival_s, created
        self.runs: list[Run] = []
        self.promise_s: float | None = None
        self.predicted_s: float | None = None
        self.held = False  # no replica was there when it came, or while it waited
        self._deltas: collections.deque[tuple[int, Delta]] = collections.deque()
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        """Every run is over, or one failed and took the others with it."""
        return self._failure is not None or all(run.done for run in self.runs)

    @property
    def ttft_s(self) -> float | None:
        """When the first token of any run came, after arrival."""
        firsts = [run.first_token_s for run in self.runs if run.first_token_s is not None]
        return min(firsts) - self.arrival_s if firsts else None

    @property
    def output_tokens(self) -> int:
        return sum(len(run.output.tokens) for run in self.runs)

    @property
    def prompt_tokens(self) -> int:
        """Of every prompt once, however many outputs it has."""
        return sum(run.prompt.length for run in self.runs[:: self.ask.n])

    @property
    def cached_tokens(self) -> int:
        return sum(run.cached_tokens for run in self.runs[:: self.ask.n])

    def push(self, index: int, delta: Delta) -> None:
        """A run has something to show."""
        self._deltas.append((index, delta))
        self._wake()

    def fail(self, error: Exception) -> None:
        """The answer ends with `error`, after what came before it."""
        if self._failure is None:
            self._failure = error
            self._wake()

    async def next(self, timeout_s: float) -> list[tuple[int, Delta]]:
        """What came since the last call, waiting for something; empty when the time is over.

        Raises the error that ended the answer, once everything before it was read.
        """
        if not self._deltas and self._failure is None:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        if self._deltas:
            deltas = list(self._deltas)
            self._deltas.clear()
            return deltas
        if self._failure is not None:
            raise self._failure
        return []

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
