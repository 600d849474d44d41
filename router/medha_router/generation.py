"""A client request while it lives, with one generation per output.

A generation is what a replica serves: prompt, sampling, deadline, and the tokens so far, so that
another replica can resume it. The client request collects the deltas of its generations in order of
arrival, or the error that ended it. The service and the request table decide.

    waiting ── placed, granted ──> sent ── tokens ──> done
       ^                             │
       └── replica lost or failed ───┘   at most MAX_MOVES times and POISON_DEATHS - 1 deaths
                                         without PROGRESS_TOKENS in between
"""

from __future__ import annotations

import asyncio
import collections
from typing import Literal

import msgspec

from medha.fleet.use_meter import RequestCost
from medha.messages import Logprob, Sampling, Submit, from_bytes
from medha.request import Request, SloClass
from medha_router.auth import Client
from medha_router.protocol import GenerationParams
from medha_router.structured.output_parser import (
    TAIL_TOKENS,
    OutputParser,
    Thinking,
    ThinkingCount,
    thinking_after,
)
from medha_router.structured.tool_calls import Format, ToolCallParser
from medha_router.tokenization.detokenizer import Delta, OutputStream
from medha_router.tokenization.wire import Prompt

MAX_MOVES = 2
POISON_DEATHS = 2


class Generation:
    """An output of a client request. Times are of the service's clock."""

    def __init__(
        self,
        *,
        client_request: ClientRequest,
        index: int,
        prompt: Prompt,
        request: Request,
        sampling: Sampling,
        output: OutputStream,
        salt: bytes,
        version: str,
        least_tpot_s: float,
        tool_calls: Format | None = None,
    ) -> None:
        self.client_request, self.index, self.prompt, self.request = (
            client_request,
            index,
            prompt,
            request,
        )
        self.version = version  # only replicas of this version can read its tokens
        self.least_tpot_s = least_tpot_s  # that the best of these replicas can keep
        self.sampling, self.output, self.salt = sampling, output, salt
        self.tool_calls = tool_calls  # how its version writes calls, if it has tools
        self.peer: bytes | None = None
        self.waiting_since_s = request.arrival_s
        self.cached_tokens = 0
        self.thinking: ThinkingCount | None = None  # of its tokens
        self.thinking_begins: Thinking | None = None  # once it is known
        self.prompt_logprobs: list[Logprob] = []
        self.moves = 0
        self.deaths = 0
        self.tokens_at_failure = 0
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.labels = ("", "", "")  # of its tokens' metrics, as of the first of them
        self.promise_given = False
        self.done = False

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def hashes(self) -> bytes:
        return self.prompt.hashes

    @property
    def output_tokens(self) -> int:
        return len(self.output.tokens)

    @property
    def complete_for(self) -> Literal["stop", "length"] | None:
        """Reason for which its tokens so far are all it gets; None if more are to come."""
        tokens = self.output.tokens
        if tokens and self.sampling.stops_at(tokens[-1], len(tokens)):
            return "stop"
        return "length" if len(tokens) >= self.request.max_output_tokens else None

    @property
    def prompt_scored(self) -> bool:
        """True unless log probabilities of the prompt are missing; its first token has none."""
        wanted = self.sampling.prompt_logprobs is not None
        return not wanted or len(self.prompt_logprobs) >= self.prompt.length - 1

    def submit(self, now: float) -> Submit:
        """Return the message with which a replica serves the generation, or resumes it."""
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
            adapter=self.client_request.adapter,
            weight=request.weight,
            promised=bool(request.promised),
            beyond_share=request.beyond_share,
        )


class ClientRequest:
    """A request as its client sees it. `promise_s` and `predicted_s` are TTFTs, if known.

    `params.model` is what the client named: `model`, or `model:adapter`.
    """

    def __init__(
        self,
        *,
        id: str,
        params: GenerationParams,
        model: str,
        adapter: str = "",
        slo_class: SloClass,
        client: Client,
        arrival_s: float,
        created: int,
    ) -> None:
        self.model, self.adapter = model, adapter
        self.id, self.params, self.slo_class, self.client = id, params, slo_class, client
        self.arrival_s, self.created = arrival_s, created
        self.generations: list[Generation] = []
        self.counted: RequestCost | None = None  # towards the limits of its tenant
        self.promise_s: float | None = None
        self.predicted_s: float | None = None
        self.splits_thinking = False  # from the content
        self.bad_words: dict[str, tuple[tuple[int, ...], ...]] = {}  # as tokens, by version
        self.held = False  # the model had no replica at arrival or while it waited
        self._deltas: collections.deque[tuple[int, Delta]] = collections.deque()
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waits_until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def tenant(self) -> str:
        return self.client.tenant

    @property
    def cost(self) -> RequestCost:
        """Cost of all its generations, each on an idle replica and of its full length."""
        most_tokens, work_s = 0, 0.0
        for generation in self.generations:
            most_tokens += generation.request.max_output_tokens
            work_s += generation.request.work_s
        return RequestCost(prompt_tokens=self.prompt_tokens, most_tokens=most_tokens, work_s=work_s)

    @property
    def done(self) -> bool:
        """True if every generation is done, or one has failed and ended the others."""
        return self._failure is not None or all(generation.done for generation in self.generations)

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of a log line about the request."""
        fields = {"request": self.id}
        return (
            fields | {"client_request": self.params.client_id} if self.params.client_id else fields
        )

    @property
    def ttft_s(self) -> float | None:
        """Time from arrival to the first token of any generation."""
        first_s = [
            generation.first_token_s
            for generation in self.generations
            if generation.first_token_s is not None
        ]
        return min(first_s) - self.arrival_s if first_s else None

    @property
    def last_token_s(self) -> float:
        """Time of the last token of any generation; of the arrival before the first."""
        last_s = (generation.last_token_s or 0.0 for generation in self.generations)
        return max(self.arrival_s, *last_s)

    @property
    def output_tokens(self) -> int:
        return sum([len(generation.output.tokens) for generation in self.generations])

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; each counts once, even with several outputs."""
        return sum([generation.prompt.length for generation in self.generations[:: self.params.n]])

    @property
    def cached_tokens(self) -> int:
        return sum([generation.cached_tokens for generation in self.generations[:: self.params.n]])

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the thinking of all outputs."""
        return sum(
            generation.thinking.tokens
            for generation in self.generations
            if generation.thinking is not None
        )

    def parser(self, index: int) -> OutputParser:
        """Return a parser for the output of a chat with the index."""
        tools, form = self.params.tools, self.generations[index].tool_calls
        calls = ToolCallParser(form, tools) if tools is not None and form is not None else None
        return OutputParser(self._thinking_of(index), calls, shown=self.params.shows_thinking)

    def _thinking_of(self, index: int) -> Thinking:
        """Return where the thinking of an output is."""
        if not self.splits_thinking:
            return "none"
        if self.params.thinks:
            return "continued"
        generation = self.generations[index]
        if generation.thinking_begins is None:
            tail = from_bytes(generation.prompt.tokens[-4 * TAIL_TOKENS :]).tolist()
            pieces = map(generation.output.vocabulary.bytes_of, reversed(tail))
            generation.thinking_begins = thinking_after(pieces)
        return generation.thinking_begins

    def push(self, index: int, delta: Delta) -> None:
        """Add a delta of one generation.

        With the first tokens of all of them, the prompt's JSON is released: it serves to encode
        requests without output again.
        """
        if self.params.raw and all(generation.output.tokens for generation in self.generations):
            self.params = msgspec.structs.replace(self.params, raw=b"")
        if self.splits_thinking:
            self._count_thinking(index)
        self._deltas.append((index, delta))
        self._wake()

    def _count_thinking(self, index: int) -> None:
        generation = self.generations[index]
        if generation.thinking is None:
            if not generation.output.tokens:
                return  # another version may begin it
            generation.thinking = ThinkingCount(self._thinking_of(index))
        output = generation.output
        generation.thinking.read(output.tokens, output.vocabulary.bytes_of)

    def fail(self, error: Exception) -> None:
        """End with `error`, after the deltas before it."""
        if self._failure is None:
            self._failure = error
            self._wake()

    async def next(self, timeout_s: float) -> list[tuple[int, Delta]]:
        """Wait for deltas and return them; empty after `timeout_s`.

        Raises the error that ended the request, once all deltas before it were returned.
        """
        if not self._deltas and self._failure is None:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            self._waits_until_s = loop.time() + timeout_s
            if self._timer is None:  # a timer for each wait would cost more than the wait
                self._timer = loop.call_at(self._waits_until_s, self._time_out, loop)
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._deltas:
            deltas = list(self._deltas)
            self._deltas.clear()
            return deltas
        if self._failure is not None:
            raise self._failure
        return []

    def close(self) -> None:
        """End the timer of `next`: nothing waits for deltas any more.

        Drops the generations too, which refer to the client request: without that circle all of it
        is freed at once, and not by the garbage collector, which stops the loop.
        """
        self.generations = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if loop.time() >= self._waits_until_s:
            self._wake()
        else:
            self._timer = loop.call_at(self._waits_until_s, self._time_out, loop)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
