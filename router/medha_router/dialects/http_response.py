"""OpenAI's responses over HTTP: whole, or as a stream of server-sent events.

Headers are sent with the first text or the first keep-alive, so that an earlier failure has its own
status code. A later failure is sent as an `error` event, which ends the stream. A client that
disconnects cancels its request.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from medha.errors import MedhaError
from medha.messages import from_bytes
from medha_router import api_errors
from medha_router.bodies import SENT_BYTES, send_body
from medha_router.dialects.openai_answer import (
    NO_FIELDS,
    ResponseBuilder,
    StopReason,
    Timing,
    TokenIds,
    TokenUsage,
    error_event,
    json_ids,
    prompt_logprobs,
)
from medha_router.generation import ClientRequest, Generation
from medha_router.http_protocol import DISCONNECTS, Disconnects
from medha_router.protocol import GenerationParams
from medha_router.tokenization.detokenizer import Delta, TokenLogprob, scored
from medha_router.turns import SLICE, in_turns

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"
LAST_EVENT_S = 1.0
Deltas = Sequence[tuple[int, Delta]]
"""New output by choice."""


class ServedGeneration(msgspec.Struct, frozen=True):
    """A generation request to respond to.

    `begin` admits it, and `cancel` ends it when the client disconnects. `held` counts the bytes of
    a large answer that is being sent, or raises Refusal.
    """

    id: str
    params: GenerationParams
    begin: Callable[[], Awaitable[ClientRequest]]
    cancel: Callable[[ClientRequest], None]
    held: Callable[[int], contextlib.AbstractContextManager[None]]
    keepalive_s: float


class GenerationResponse(Response, abc.ABC):
    """Response to one generation request; subclasses give its body a form."""

    def __init__(self, served: ServedGeneration) -> None:
        self._id, self._params = served.id, served.params
        self._begin, self._cancel = served.begin, served.cancel
        self._held, self._keepalive_s = served.held, served.keepalive_s
        self._request: ClientRequest | None = None
        self._started = self._ended = False
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve until the request ends or the client disconnects."""
        task, left = asyncio.current_task(), False

        def leave() -> None:
            nonlocal left
            left = True
            if task is not None:
                task.cancel()

        disconnects: Disconnects = scope["extensions"][DISCONNECTS]["disconnects"]
        disconnects.add(leave)
        try:
            await self._serve(send)
        except asyncio.CancelledError:
            if left and task is not None:
                task.uncancel()
            elif not self._started:
                raise
            elif self._params.stream and not self._ended:
                await self._break_off(send)
        finally:
            disconnects.remove(leave)
            if self._request is not None:
                self._cancel(self._request)
                self._request.close()

    async def _serve(self, send: Send) -> None:
        try:
            self._request = await self._begin()
            if self._params.stream:
                await self._stream(self._request, send)
            else:
                body = await self._whole(self._request)
                headers = _headers(self._request)
                if self._request.ttft_s is not None:
                    headers["x-medha-ttft-ms"] = _ms(self._request.ttft_s)
                await self._respond(send, 200, headers, *body)
        except Exception as error:
            if not isinstance(error, MedhaError):
                logging.getLogger("medha.router").exception(
                    "a request failed", extra={"fields": {"request": self._id}}
                )
            api_error = api_errors.of_exception(error)
            if self._started:
                self._ended = True
                await _send_part(send, self._failure(api_error))
                await _send_last(send)
            else:
                await self._respond(send, api_error.status, api_error.headers, api_error.body())

    async def _break_off(self, send: Send) -> None:
        """End a stream because the router ends; a client that does not read is not waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_EVENT_S):
                await _send_part(send, self._failure(api_errors.of_shutdown()))
                await _send_last(send)

    async def _stream(self, request: ClientRequest, send: Send) -> None:
        await asyncio.sleep(0)  # the request is published first
        opening, headers, ended = None, _event_headers(request), False
        clock = asyncio.get_running_loop().time
        sent_s = clock()
        while not ended:
            deltas = await request.next(self._keepalive_s)
            if deltas and opening is None:
                opening = await self._opening(request)
            echoed = await self._echo(request, deltas)
            for place, some in enumerate(_turns([*echoed, *deltas])):
                events = KEEPALIVE
                if opening is not None and deltas:
                    events, ended = self._events(request, some)
                    events = opening + events
                    opening = b""
                if not events:  # a thinking that is not shown may take minutes
                    if clock() - sent_s < self._keepalive_s:
                        continue
                    events = KEEPALIVE
                sent_s = clock()
                if place:
                    await asyncio.sleep(0)
                if not self._started:
                    await self._start(send, 200, headers)
                if ended:
                    self._ended = True
                    await _send_last(send, events)
                else:
                    await _send_part(send, events)

    @abc.abstractmethod
    async def _whole(self, request: ClientRequest) -> Sequence[bytes]:
        """Return the body of a whole answer, in parts."""

    @abc.abstractmethod
    async def _opening(self, request: ClientRequest) -> bytes:
        """Return the events before the output."""

    async def _echo(self, request: ClientRequest, deltas: Deltas) -> Deltas:
        """Return what stands before the first of these deltas: prompts that are repeated."""
        return ()

    @abc.abstractmethod
    def _events(self, request: ClientRequest, deltas: Deltas) -> tuple[bytes, bool]:
        """Return the events of further output, and whether they end the stream."""

    def _failure(self, error: api_errors.ApiError) -> bytes:
        """Return the last event of a stream that failed."""
        return error_event(error.body())

    async def _respond(self, send: Send, status: int, extra: dict[str, str], *body: bytes) -> None:
        size_bytes = sum(map(len, body))
        headers = {"content-type": "application/json", "content-length": str(size_bytes)}
        if size_bytes <= SENT_BYTES:
            await self._start(send, status, headers | extra)
            await _send_last(send, b"".join(body))
            return
        with self._held(size_bytes):
            await self._start(send, status, headers | extra)
            await send_body(send, body)

    async def _start(self, send: Send, status: int, headers: dict[str, str]) -> None:
        self._started = True
        pairs = [
            (name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()
        ]
        await send({"type": "http.response.start", "status": status, "headers": pairs})


class OpenAiResponse(GenerationResponse):
    """Chat completion or completion; `make_builder` makes the builder of its objects."""

    def __init__(
        self, served: ServedGeneration, make_builder: Callable[[ClientRequest], ResponseBuilder]
    ) -> None:
        super().__init__(served)
        self._make_builder = make_builder
        self._builder: ResponseBuilder | None = None
        self._open_generations = 0
        self._echoed: set[int] = set()
        self._prompt_ids: dict[tuple[int, str], msgspec.Raw] = {}  # by place and version
        self._taken_ids: dict[int, int] = {}
        self._held_ids: dict[int, list[int]] = {}

    async def _whole(self, request: ClientRequest) -> Sequence[bytes]:
        count = len(request.generations)
        texts: list[list[str]] = [[] for _ in range(count)]
        logprobs: list[list[TokenLogprob]] = [[] for _ in range(count)]
        finishes = ["" for _ in range(count)]
        if self._params.echo:
            for generation in request.generations:
                texts[generation.index].append(generation.prompt.text or "")
        wanted = self._params.sampling.logprobs is not None
        while not all(finishes):
            for index, delta in await request.next(self._keepalive_s):
                texts[index].append(delta.text)
                logprobs[index].extend(delta.logprobs)
                finishes[index] = delta.finish or finishes[index]
        if self._params.echo and wanted:
            for generation in request.generations:
                logprobs[generation.index][:0] = await in_turns(_scored(generation))
        prompts: list[Iterator[bytes]] = []
        if self._params.prompt_logprobs is not None:
            most = self._params.prompt_logprobs
            prompts = [prompt_logprobs(generation, most) for generation in request.generations]
        parts = self._make_builder(request).whole(
            [
                ("".join(texts[i]), logprobs[i], finishes[i], _stop_reason(request, i))
                for i in range(count)
            ],
            _usage(request),
            timing(request),
            logprobs=wanted,
            prompts=prompts,
            ids=_token_ids(request) if self._params.token_ids else (),
        )
        return await in_turns(parts)

    async def _opening(self, request: ClientRequest) -> bytes:
        """Return the first events: the role of chat choices."""
        builder = self._builder = self._make_builder(request)
        self._open_generations = len(request.generations)
        ids: dict[str, Any] = {}
        if not self._params.chat:
            return b""
        if self._params.token_ids:
            ids = {"prompt_token_ids": await self._write_prompt_ids(request, 0)}
        usage = self._usage_so_far(request, begun=False)
        first, *others = request.generations
        return b"".join(
            [
                builder.opening(first.index, ids | usage),
                *(builder.opening(choice.index, usage) for choice in others),
            ]
        )

    def _usage_so_far(self, request: ClientRequest, *, begun: bool = True) -> dict[str, Any]:
        """Return the field `usage` of a chunk with choices, if it has one: a sum over all outputs,
        which have no tokens unless `begun`."""
        if not self._params.continuous_usage:
            return {"usage": None} if self._params.include_usage else {}
        before = TokenUsage(request.prompt_tokens, 0, request.cached_tokens)
        return {"usage": (_usage(request) if begun else before).shape()}

    def _events(self, request: ClientRequest, deltas: Deltas) -> tuple[bytes, bool]:
        params, builder = self._params, self._builder
        assert builder is not None
        logprobs = params.sampling.logprobs is not None
        block: list[bytes] = []
        for index, delta in deltas:
            self._open_generations -= delta.finish is not None
            last = self._open_generations == 0 and not params.include_usage
            extra: dict[str, Any] = {"x_medha": timing(request)} if last else {}
            extra |= self._usage_so_far(request)
            reason = _stop_reason(request, index) if delta.finish else None
            ids = self._new_ids(request, index) if params.token_ids else NO_FIELDS
            event = builder.chunk(
                index, delta, logprobs=logprobs, extra=extra, fields=ids, stop_reason=reason
            )
            if event and ids:
                self._held_ids[index] = []
            block.append(event)
        ended = not self._open_generations
        if ended:
            if params.include_usage:
                block.append(builder.usage(_usage(request), {"x_medha": timing(request)}))
            block.append(DONE)
        return b"".join(block), ended

    def _new_ids(self, request: ClientRequest, index: int) -> dict[str, Any]:
        """Return the fields of a choice with the tokens since its last chunk."""
        begun, held = index in self._taken_ids, self._held_ids.setdefault(index, [])
        held += request.generations[index].output.tokens[self._taken_ids.get(index, 0) :]
        self._taken_ids[index] = len(request.generations[index].output.tokens)
        fields: dict[str, Any] = {"token_ids": held}
        if not (begun or self._params.chat):
            fields["prompt_token_ids"] = self._prompt_ids[self._prompt_key(request, index)]
        return fields

    def _prompt_key(self, request: ClientRequest, index: int) -> tuple[int, str]:
        return index // self._params.n, request.generations[index].version

    async def _write_prompt_ids(self, request: ClientRequest, index: int) -> msgspec.Raw:
        """Return the JSON of the prompt's tokens, which are those of the output's version."""
        key = self._prompt_key(request, index)
        if key not in self._prompt_ids:
            tokens = from_bytes(request.generations[index].prompt.tokens)
            self._prompt_ids[key] = msgspec.Raw(b"".join(await in_turns(json_ids(tokens))))
        return self._prompt_ids[key]

    async def _echo(self, request: ClientRequest, deltas: Deltas) -> Deltas:
        echoes: list[tuple[int, Delta]] = []
        if self._params.token_ids and not self._params.chat:
            for index in {index for index, _ in deltas} - self._taken_ids.keys():
                await self._write_prompt_ids(request, index)
        for index in dict.fromkeys(index for index, _ in deltas) if self._params.echo else ():
            if index in self._echoed:
                continue
            self._echoed.add(index)
            generation, scores = request.generations[index], list[TokenLogprob]()
            if self._params.sampling.logprobs is not None:
                scores = await in_turns(_scored(generation))
            echoes.append((index, Delta(generation.prompt.text or "", tuple(scores))))
        return echoes


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _send_last(send: Send, body: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _turns(deltas: Deltas) -> Iterator[Deltas]:
    """Yield deltas in groups that take about a millisecond to encode; at least one group."""
    group: list[tuple[int, Delta]] = []
    size = 0
    for index, delta in deltas:
        scores = delta.logprobs
        for start in range(0, len(scores) - SLICE, SLICE):
            yield [*group, (index, Delta(delta.text, scores[start : start + SLICE]))]
            group, size = [], 0
            delta = Delta("", scores[start + SLICE :], delta.finish)
        group.append((index, delta))
        size += 1 + len(delta.logprobs)
        if size >= SLICE:
            yield group
            group, size = [], 0
    if group or not deltas:
        yield group


def _headers(request: ClientRequest) -> dict[str, str]:
    headers = {"x-medha-class": request.slo_class.name}
    if request.promise_s is not None:
        headers["x-medha-promise-ttft-ms"] = _ms(request.promise_s)
    if request.predicted_s is not None:
        headers["x-medha-predicted-ttft-ms"] = _ms(request.predicted_s)
    return headers


def _event_headers(request: ClientRequest) -> dict[str, str]:
    return _headers(request) | {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
    }


def timing(request: ClientRequest) -> Timing:
    """Return the field `x_medha` of an answer."""

    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1000, 3)

    return Timing(
        request_id=request.id,
        slo_class=request.slo_class.name,
        promise_ttft_ms=ms(request.promise_s),
        predicted_ttft_ms=ms(request.predicted_s),
        ttft_ms=ms(request.ttft_s),
    )


def _usage(request: ClientRequest) -> TokenUsage:
    return TokenUsage(
        request.prompt_tokens,
        request.output_tokens,
        request.cached_tokens,
        request.reasoning_tokens,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"


def _stop_reason(request: ClientRequest, index: int) -> StopReason:
    """Return vLLM's `stop_reason`: the stop string or the client's stop token of an ended output.

    None if something else ended it.
    """
    output, wanted = request.generations[index].output, request.params.sampling.stop_tokens
    if output.stop is None and output.finish == "stop" and output.tokens[-1:]:
        return output.tokens[-1] if output.tokens[-1] in wanted else None
    return output.stop


def _token_ids(request: ClientRequest) -> list[TokenIds]:
    return [
        TokenIds(from_bytes(generation.prompt.tokens), np.array(generation.output.tokens, np.int32))
        for generation in request.generations
    ]


def _scored(generation: Generation) -> Iterator[TokenLogprob]:
    """Yield the log probabilities of the prompt's tokens."""
    tokens = from_bytes(generation.prompt.tokens).tolist()
    return scored(generation.output.vocabulary, tokens, generation.prompt_logprobs)
