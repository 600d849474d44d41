"""OpenAI's responses over HTTP: whole, or as a stream of server-sent events.

Headers are sent with the first text or the first keep-alive, so that an earlier failure has its own
status code. A later failure is sent as an `error` event, which ends the stream. A client that
disconnects cancels its request.

The field `x_medha` holds what OpenAI has no field for (request id, promised, predicted and measured
TTFT). It stands in whole responses and in the last chunk of a stream.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from medha.errors import MedhaError
from medha.messages import Logprob, from_bytes
from medha_router import api_errors
from medha_router.bodies import SENT_BYTES, send_body
from medha_router.generation import ClientRequest, Generation
from medha_router.http_protocol import DISCONNECTS, Disconnects
from medha_router.protocol import GenerationParams
from medha_router.structured.tool_calls import TextPart, ToolCallParser
from medha_router.tokenization.detokenizer import Delta, TokenLogprob, scored

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"
LAST_EVENT_S = 1.0
TURN_S = 0.001  # of the event loop, after which others are served
SLICE = 64  # deltas or tokens with log probabilities, which take about a millisecond
T = TypeVar("T")
Deltas = Sequence[tuple[int, Delta]]
"""New output by choice."""
StopReason = str | int | None
TEXT_CHUNK_END = b',"logprobs":null,"finish_reason":null}]}\n\n'


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
        opening, headers, ended = self._opening(request), _event_headers(request), False
        while not ended:
            deltas = await request.next(self._keepalive_s)
            echoed = await self._echo(request, deltas)
            for place, some in enumerate(_turns([*echoed, *deltas])):
                events, ended = self._events(request, some)
                if not deltas:
                    events = KEEPALIVE
                else:
                    events = opening + events
                    if not events:
                        continue
                    opening = b""
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
    def _opening(self, request: ClientRequest) -> bytes:
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
                logprobs[generation.index][:0] = await _in_turns(_scored(generation))
        prompts: list[Iterator[bytes]] = []
        if self._params.prompt_logprobs is not None:
            most = self._params.prompt_logprobs
            prompts = [_prompt_logprobs(generation, most) for generation in request.generations]
        parts = self._make_builder(request).whole(
            [
                ("".join(texts[i]), logprobs[i], finishes[i], _stop_reason(request, i))
                for i in range(count)
            ],
            _usage(request),
            timing(request),
            logprobs=wanted,
            prompts=prompts,
        )
        return await _in_turns(parts)

    def _opening(self, request: ClientRequest) -> bytes:
        """Return the first events: the role of chat choices."""
        builder = self._builder = self._make_builder(request)
        self._open_generations = len(request.generations)
        if not self._params.chat:
            return b""
        usage = self._usage_so_far(request)
        return b"".join(builder.opening(choice.index, usage) for choice in request.generations)

    def _usage_so_far(self, request: ClientRequest) -> dict[str, Any]:
        """Return the field `usage` of a chunk with choices, if it has one."""
        if self._params.continuous_usage:
            return {"usage": _usage(request).shape()}
        return {"usage": None} if self._params.include_usage else {}

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
            block.append(
                builder.chunk(index, delta, logprobs=logprobs, extra=extra, stop_reason=reason)
            )
        ended = not self._open_generations
        if ended:
            if params.include_usage:
                block.append(builder.usage(_usage(request), {"x_medha": timing(request)}))
            block.append(DONE)
        return b"".join(block), ended

    async def _echo(self, request: ClientRequest, deltas: Deltas) -> Deltas:
        echoes: list[tuple[int, Delta]] = []
        for index in dict.fromkeys(index for index, _ in deltas) if self._params.echo else ():
            if index in self._echoed:
                continue
            self._echoed.add(index)
            generation, scores = request.generations[index], list[TokenLogprob]()
            if self._params.sampling.logprobs is not None:
                scores = await _in_turns(_scored(generation))
            echoes.append((index, Delta(generation.prompt.text or "", tuple(scores))))
        return echoes


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


async def _in_turns(parts: Iterable[T]) -> list[T]:
    """Make the parts, with turns of the event loop for others in between."""
    results, turn_s = list[T](), time.perf_counter() + TURN_S
    for part in parts:
        results.append(part)
        if time.perf_counter() > turn_s:
            await asyncio.sleep(0)
            turn_s = time.perf_counter() + TURN_S
    return results


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _send_last(send: Send, body: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": body, "more_body": False})


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
    return TokenUsage(request.prompt_tokens, request.output_tokens, request.cached_tokens)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"


class TokenUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def shape(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """`x_medha`: TTFT as promised, predicted and measured, in milliseconds after arrival."""

    request_id: str
    slo_class: str
    promise_ttft_ms: float | None
    predicted_ttft_ms: float | None
    ttft_ms: float | None


class ResponseBuilder:
    """Builds the JSON objects of one response, each with its id, model and creation time.

    `parsers` find the calls of tools in each choice of a chat that has tools.
    """

    def __init__(
        self,
        *,
        chat: bool,
        id: str,
        model: str,
        created: int,
        parsers: Sequence[ToolCallParser] = (),
    ) -> None:
        self._chat, self._request_id, self._parsers = chat, id, parsers
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{id}"
        self._model, self._created = model, created
        self._writes_text = chat and not parsers
        # Each chunk begins with the same fields.
        head = self._head("chat.completion.chunk" if chat else "text_completion")
        self._chunk_head = b"data: " + msgspec.json.encode(head)[:-1] + b","

    def opening(self, index: int, extra: dict[str, Any]) -> bytes:
        """Return the first chunk of a chat choice, with its role. `extra`: as for `chunk`."""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}}
        return self._chunk([choice | {"logprobs": None, "finish_reason": None}], extra)

    def chunk(
        self,
        index: int,
        delta: Delta,
        *,
        logprobs: bool,
        extra: dict[str, Any],
        stop_reason: StopReason = None,
    ) -> bytes:
        """Return a chunk of text, or nothing if none is decided. `extra`: more top-level fields."""
        finish = delta.finish
        if finish is None and delta.text and not (logprobs or extra) and self._writes_text:
            return self._text_chunk(index, delta.text)
        choice: dict[str, Any] = {"index": index}
        if self._parsers:
            choice["delta"] = self._delta_with_calls(index, delta)
            finish = self._finish_with_calls(index, finish)
            if not (choice["delta"] or finish or delta.logprobs):
                return b""
        elif self._chat:
            choice["delta"] = {"content": delta.text} if delta.text or delta.logprobs else {}
        else:
            choice["text"] = delta.text
        choice["logprobs"] = self._logprobs(delta.logprobs) if logprobs else None
        choice["finish_reason"] = finish
        if finish is not None:
            choice["stop_reason"] = stop_reason
        return self._chunk([choice], extra)

    def _text_chunk(self, index: int, text: str) -> bytes:
        """Return the chunk of a chat that has text alone, as nearly all have."""
        return b'%b"choices":[{"index":%d,"delta":{"content":%b}%b' % (
            self._chunk_head,
            index,
            msgspec.json.encode(text),
            TEXT_CHUNK_END,
        )

    def _delta_with_calls(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return the content and the parts of calls that a text completes."""
        parser = self._parsers[index]
        pieces = parser.push(delta.text)
        if delta.finish is not None:
            pieces += parser.end()
        content = "".join(piece.text for piece in pieces if piece.call is None)
        fields: dict[str, Any] = {"content": content} if content else {}
        if calls := self._calls(index, pieces):
            fields["tool_calls"] = [
                {"index": number} | call for number, call in sorted(calls.items())
            ]
        return fields

    def _calls(self, index: int, pieces: Sequence[TextPart]) -> dict[int, dict[str, Any]]:
        """Return new parts of calls by number: id, type and name with the first part."""
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if piece.call is None:
                continue
            call = calls.setdefault(piece.call, {"function": {"arguments": ""}})
            if piece.name is not None:
                call["id"] = call_id(self._request_id, index, piece.call)
                call["type"] = "function"
                call["function"]["name"] = piece.name
            call["function"]["arguments"] += piece.text
        return calls

    def _finish_with_calls(self, index: int, finish: str | None) -> str | None:
        parser = self._parsers[index]
        return "tool_calls" if finish == "stop" and parser.calls and parser.chosen else finish

    def usage(self, usage: TokenUsage, extra: dict[str, Any]) -> bytes:
        """Return the chunk without choices that `include_usage` requests."""
        return self._chunk([], {"usage": usage.shape()} | extra)

    def whole(
        self,
        outputs: Sequence[tuple[str, list[TokenLogprob], str, StopReason]],
        usage: TokenUsage,
        timing: Timing,
        *,
        logprobs: bool,
        prompts: Sequence[Iterator[bytes]] = (),
    ) -> Iterator[bytes]:
        """Yield the parts of a response from text, log probabilities, finish and stop reason of
        each choice.

        `prompts`: JSON of vLLM's `prompt_logprobs` of each choice, if requested.
        """
        head = self._head("chat.completion" if self._chat else "text_completion")
        yield msgspec.json.encode(head)[:-1] + b',"choices":['
        for index, (text, entries, finish, stop_reason) in enumerate(outputs):
            choice: dict[str, Any] = {"index": index}
            if self._parsers:
                whole = self._delta_with_calls(index, Delta(text, finish=finish))
                finish = self._finish_with_calls(index, finish) or finish
                message = {"role": "assistant", "content": whole.get("content"), "refusal": None}
                if "tool_calls" in whole:
                    for call in whole["tool_calls"]:
                        del call["index"]
                    message["tool_calls"] = whole["tool_calls"]
                elif message["content"] is None:
                    message["content"] = ""
                choice["message"] = message
            elif self._chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            yield (b"," if index else b"") + msgspec.json.encode(choice)[:-1] + b',"logprobs":'
            yield from self._logprob_parts(entries) if logprobs else (b"null",)
            ending = {"finish_reason": finish, "stop_reason": stop_reason}
            yield b"," + msgspec.json.encode(ending)[1:-1]
            if prompts and not self._chat:
                yield b',"prompt_logprobs":'
                yield from prompts[index]
            yield b"}"
        fields = {"usage": usage.shape(), "x_medha": timing}
        yield b"]," + msgspec.json.encode(fields)[1:-1]
        if prompts and self._chat:
            yield b',"prompt_logprobs":'
            yield from prompts[0]
        yield b"}"

    def _logprob_parts(self, entries: list[TokenLogprob]) -> Iterator[bytes]:
        """Yield the JSON of many log probabilities and drop them; empty parts are turns of work."""
        lists: dict[str, list[bytes]] = {}
        for some in _taken(entries):
            for field, values in self._logprobs(some).items():
                if values is not None:
                    lists.setdefault(field, []).append(msgspec.json.encode(values)[1:-1])
            yield b""
        for place, (field, parts) in enumerate(lists.items()):
            yield b'%b"%b":[' % (b"," if place else b"{", field.encode())
            yield from _joined(parts)
            yield b"]"
        yield b',"refusal":null}' if self._chat else b"}"

    def _chunk(self, choices: list[dict[str, Any]], extra: dict[str, Any] | None = None) -> bytes:
        rest = msgspec.json.encode({"choices": choices, **extra} if extra else {"choices": choices})
        return b"%b%b\n\n" % (self._chunk_head, rest[1:])

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self._id, "object": name, "created": self._created, "model": self._model}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self._chat:
            return {"content": [self._chat_logprob(entry) for entry in entries], "refusal": None}
        spellings = [_completion_spellings(entry) for entry in entries]
        return {
            "tokens": [texts[entry.token] for entry, texts in zip(entries, spellings, strict=True)],
            "token_logprobs": [
                None if entry.logprob is None else entry.logprob.chosen for entry in entries
            ],
            "top_logprobs": [
                None
                if entry.logprob is None
                else {texts[token]: value for token, value in entry.logprob.top}
                | {texts[entry.token]: entry.logprob.chosen}
                for entry, texts in zip(entries, spellings, strict=True)
            ],
            "text_offset": [entry.offset for entry in entries],
        }

    def _chat_logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        logprob = entry.logprob or Logprob(0.0)
        top = [_spelling(entry, token) | {"logprob": value} for token, value in logprob.top]
        chosen = _spelling(entry, entry.token) | {"logprob": logprob.chosen}
        return chosen | {"top_logprobs": top}


def _stop_reason(request: ClientRequest, index: int) -> StopReason:
    """Return vLLM's `stop_reason`: the stop string or the client's stop token of an ended output.

    None if something else ended it.
    """
    output, wanted = request.generations[index].output, request.params.sampling.stop_tokens
    if output.stop is None and output.finish == "stop" and output.tokens[-1:]:
        return output.tokens[-1] if output.tokens[-1] in wanted else None
    return output.stop


def _scored(generation: Generation) -> Iterator[TokenLogprob]:
    """Yield the log probabilities of the prompt's tokens."""
    tokens = from_bytes(generation.prompt.tokens).tolist()
    return scored(generation.output.vocabulary, tokens, generation.prompt_logprobs)


def _taken(entries: list[T]) -> Iterator[list[T]]:
    """Take a list apart from its beginning; at least one slice.

    To free a million objects at once, after the answer, would stop the loop.
    """
    entries.reverse()
    while True:
        some = entries[: -SLICE - 1 : -1]
        del entries[-SLICE:]
        yield some
        if not entries:
            break


def _joined(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the elements of a JSON list, given in parts."""
    for place, part in enumerate(parts):
        yield b"," + part if place else part


def _prompt_logprobs(generation: Generation, most: int) -> Iterator[bytes]:
    """Yield the JSON of vLLM's `prompt_logprobs`, and drop them.

    Each token has a map of id to log probability and rank.
    """
    vocabulary = generation.output.vocabulary

    def shown(token: int, logprob: float, rank: int | None) -> dict[str, object]:
        text = vocabulary.bytes_of(token).decode("utf-8", errors="replace")
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    def entry(token: int, logprob: Logprob) -> bytes:
        ranks = {other: rank for rank, (other, _) in enumerate(logprob.top, 1)}
        kept = {token: logprob.chosen} | dict(logprob.top[:most])
        return msgspec.json.encode(
            {str(other): shown(other, value, ranks.get(other)) for other, value in kept.items()}
        )

    tokens = iter(from_bytes(generation.prompt.tokens)[1:].tolist())
    yield b"[null"
    for some in _taken(generation.prompt_logprobs):
        yield b"".join([b"," + entry(next(tokens), logprob) for logprob in some])
    yield b"]"


def call_id(request_id: str, index: int, number: int) -> str:
    """Return the id of a call: nine letters and digits, which Mistral's templates demand."""
    name = f"{request_id}.{index}.{number}".encode()
    return hashlib.blake2b(name, digest_size=5).hexdigest()[:9]


def _spelling(entry: TokenLogprob, token: int) -> dict[str, Any]:
    spelling = entry.vocabulary.bytes_of(token)
    return {"token": spelling.decode("utf-8", errors="replace"), "bytes": list(spelling)}


def _completion_spellings(entry: TokenLogprob) -> dict[int, str]:
    """Return a distinct text for each token id of the entry, as completions key them by text.

    Bytes that are no text of their own are spelled `bytes:\\xe2`, as OpenAI does. Of several tokens
    with the same text, the sampled one keeps it and the others are `token_id:ID`, as in vLLM.
    """
    texts: dict[int, str] = {}
    used: set[str] = set()
    top = entry.logprob.top if entry.logprob is not None else ()
    for token in (entry.token, *(token for token, _ in top)):
        if token in texts:
            continue
        spelling = entry.vocabulary.bytes_of(token)
        try:
            text = spelling.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)
        texts[token] = f"token_id:{token}" if text in used else text
        used.add(texts[token])
    return texts


def error_event(body: bytes) -> bytes:
    """Return the last event of a stream that failed; `body` is the JSON of an error object."""
    return b"event: error\ndata: " + body + b"\n\n"


def model_shape(
    name: str, created: int, max_context_tokens: int, parent: str | None
) -> dict[str, Any]:
    """Return an entry of `/v1/models`; as in vLLM, `max_model_len` is the context limit, and
    `parent` the model of an adapter."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "medha",
        "root": parent or name,
        "max_model_len": max_context_tokens,
        "parent": parent,
    }
