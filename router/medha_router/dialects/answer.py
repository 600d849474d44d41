"""HTTP response of a further API: its answer, whole or as typed events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from medha_router.api_errors import ApiError
from medha_router.dialects.http_response import Deltas, GenerationResponse, ServedGeneration
from medha_router.generation import ClientRequest
from medha_router.tokenization.detokenizer import Delta


class AnswerWriter(Protocol):
    """Writer of an answer with one output. `whole` and `closing` follow the last `push`."""

    def opening(self) -> bytes:
        """Return the events before the output."""
        ...

    def push(self, delta: Delta) -> bytes:
        """Add output and return its events."""
        ...

    def closing(self) -> bytes:
        """Return the events after the output."""
        ...

    def whole(self) -> bytes:
        """Return the JSON of the whole answer."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that failed."""
        ...


class AnswerResponse(GenerationResponse):
    """Response whose body an AnswerWriter writes."""

    def __init__(
        self, served: ServedGeneration, make_answer: Callable[[ClientRequest], AnswerWriter]
    ) -> None:
        super().__init__(served)
        self._make_answer = make_answer
        self._answer: AnswerWriter | None = None

    async def _whole(self, request: ClientRequest) -> Sequence[bytes]:
        answer, finish = None, None
        while answer is None or finish is None:
            for _, delta in await request.next(self._keepalive_s):
                answer = answer or self._make_answer(request)  # its prompt may change until then
                answer.push(delta)
                finish = delta.finish
        return (answer.whole(),)

    async def _opening(self, request: ClientRequest) -> bytes:
        self._answer = self._make_answer(request)
        return self._answer.opening()

    def _events(self, request: ClientRequest, deltas: Deltas) -> tuple[bytes, bool]:
        answer = self._answer
        assert answer is not None
        block = [answer.push(delta) for _, delta in deltas]
        ended = any(delta.finish is not None for _, delta in deltas)
        if ended:
            block.append(answer.closing())
        return b"".join(block), ended

    def _failure(self, error: ApiError) -> bytes:
        if self._answer is None and self._request is not None:  # nothing but keep-alives was sent
            self._answer = self._make_answer(self._request)
        return super()._failure(error) if self._answer is None else self._answer.failure(error)


def event(kind: str, fields: dict[str, object]) -> bytes:
    """Return a server-sent event of a type that stands in its data too."""
    data = msgspec.json.encode({"type": kind} | fields)
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
