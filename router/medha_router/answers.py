"""An answer on its way out over HTTP: whole, or as a stream of server-sent events.

Headers go out with the first text, or with the first keep-alive when that takes longer, so that a
failure before then has its own status code. After the first byte a failure is an `error` event and
then the end. A client that leaves, at any point, cancels its request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from medha.errors import MedhaError
from medha_router import faults
from medha_router.faults import REQUEST_ID
from medha_router.openai import Ask
from medha_router.replies import DONE, KEEPALIVE, Shapes, Timing, Usage, error_event
from medha_router.runs import Answer
from medha_router.streams import Delta, TokenLogprob


class AnswerResponse(Response):
    """Serves one generation: `begin` makes the answer, `cancel` gives it up when the client left.

    `shapes` makes the response objects once the answer is known.
    """

    def __init__(
        self, id: str, ask: Ask, begin: Callable[[], Awaitable[Answer]],
        cancel: Callable[[Answer], None], shapes: Callable[[Answer], Shapes], keepalive_s: float,
    ) -> None:  # fmt: skip
        self._id, self._ask, self._begin, self._cancel = id, ask, begin, cancel
        self._make_shapes, self._keepalive_s = shapes, keepalive_s
        self._answer: Answer | None = None
        self._started = False
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve until the answer is over or the client is gone, whichever comes first."""
        serving = asyncio.ensure_future(self._serve(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            serving.cancel()
            await asyncio.wait({serving, leaving})
            if self._answer is not None:
                self._cancel(self._answer)
        if not serving.cancelled() and (error := serving.exception()) is not None:
            raise error

    async def _serve(self, send: Send) -> None:
        try:
            self._answer = await self._begin()
            if self._ask.stream:
                await self._stream(self._answer, send)
            else:
                await self._whole(self._answer, send)
        except Exception as error:
            if not isinstance(error, MedhaError):
                logging.getLogger("medha.router").exception(
                    "a request failed", extra={"fields": {"request": self._id}}
                )
            fault = faults.fault_of(error)
            if self._started:
                await _more(send, error_event(fault.body()))
                await _end(send)
            else:
                await self._plain(send, fault.status, fault.headers, fault.body())

    async def _whole(self, answer: Answer, send: Send) -> None:
        count = len(answer.runs)
        texts: list[list[str]] = [[] for _ in range(count)]
        logprobs: list[list[TokenLogprob]] = [[] for _ in range(count)]
        finishes = ["" for _ in range(count)]
        if self._ask.echo:
            for run in answer.runs:
                texts[run.index].append(run.prompt.text or "")
        while not all(finishes):
            for index, delta in await answer.next(self._keepalive_s):
                texts[index].append(delta.text)
                logprobs[index].extend(delta.logprobs)
                finishes[index] = delta.finish or finishes[index]
        body = self._make_shapes(answer).whole(
            [("".join(texts[i]), logprobs[i], finishes[i]) for i in range(count)],
            _usage(answer), _timing(answer), logprobs=self._ask.sampling.logprobs is not None,
        )  # fmt: skip
        headers = _headers(answer)
        if answer.ttft_s is not None:
            headers["x-medha-ttft-ms"] = _ms(answer.ttft_s)
        await self._plain(send, 200, headers, body)

    async def _stream(self, answer: Answer, send: Send) -> None:
        shapes = self._make_shapes(answer)
        async for events in self._events(answer, shapes):
            if not self._started:
                await self._start(send, 200, _headers(answer) | {
                    "content-type": "text/event-stream; charset=utf-8",
                    "cache-control": "no-cache",
                    "x-accel-buffering": "no",
                })  # fmt: skip
            await _more(send, events)
        await _end(send)

    async def _events(self, answer: Answer, shapes: Shapes) -> AsyncIterator[bytes]:
        """Blocks of server-sent events, each ready to be sent."""
        ask = self._ask
        open_runs = len(answer.runs)
        logprobs = ask.sampling.logprobs is not None
        opening = [self._opening(answer, shapes)]
        while open_runs:
            block: list[bytes] = []
            for index, delta in await answer.next(self._keepalive_s):
                open_runs -= delta.finish is not None
                last = open_runs == 0 and not ask.include_usage
                more: dict[str, Any] = {"x_medha": _timing(answer)} if last else {}
                if ask.include_usage:
                    more["usage"] = None
                block.append(shapes.piece(index, delta, logprobs=logprobs, more=more))
            yield b"".join(opening + block) if block else KEEPALIVE
            if block:
                opening = []
        tail = [DONE]
        if ask.include_usage:
            tail.insert(0, shapes.usage(_usage(answer), {"x_medha": _timing(answer)}))
        yield b"".join(tail)

    def _opening(self, answer: Answer, shapes: Shapes) -> bytes:
        """The role of each chat choice; the prompt of each completion that echoes it."""
        if self._ask.chat:
            return b"".join(shapes.opening(run.index) for run in answer.runs)
        if self._ask.echo:
            return b"".join(
                shapes.piece(run.index, Delta(run.prompt.text or ""), logprobs=False, more={})
                for run in answer.runs
            )
        return b""

    async def _plain(self, send: Send, status: int, more: dict[str, str], body: bytes) -> None:
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(send, status, headers | more)
        await _end(send, body)

    async def _start(self, send: Send, status: int, headers: dict[str, str]) -> None:
        self._started = True
        pairs = [(name.encode(), value.encode("latin-1", "replace"))
                 for name, value in {REQUEST_ID: self._id, **headers}.items()]  # fmt: skip
        await send({"type": "http.response.start", "status": status, "headers": pairs})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _more(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _end(send: Send, body: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _headers(answer: Answer) -> dict[str, str]:
    headers = {"x-medha-class": answer.slo_class.name}
    if answer.promise_s is not None:
        headers["x-medha-promise-ttft-ms"] = _ms(answer.promise_s)
    if answer.predicted_s is not None:
        headers["x-medha-predicted-ttft-ms"] = _ms(answer.predicted_s)
    return headers


def _timing(answer: Answer) -> Timing:
    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1000, 3)

    return Timing(
        request_id=answer.id,
        slo_class=answer.slo_class.name,
        promise_ttft_ms=ms(answer.promise_s),
        predicted_ttft_ms=ms(answer.predicted_s),
        ttft_ms=ms(answer.ttft_s),
    )


def _usage(answer: Answer) -> Usage:
    return Usage(answer.prompt_tokens, answer.output_tokens, answer.cached_tokens)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"
