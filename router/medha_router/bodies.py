"""Bodies: received within limits, decoded off the event loop if they are large, sent in parts.

    body <= INLINE_BYTES    decoded here, which takes less than a millisecond
    larger                  decoded by a tokenizer process; its parameters come back, and the JSON
                            of messages, prompt or token ids

A request costs the router one copy of its body, and one of that JSON while both are held. Large
answers count likewise until the client has taken them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from medha.errors import Refusal, RequestError
from medha.fleet.shared_room import SharedRoom
from medha_router.auth import Client
from medha_router.dialects.readers import READERS, Params
from medha_router.http_protocol import WHOLE_BODY
from medha_router.tokenization.pool import TokenizerPool

BODY_TIMEOUT_S = 60.0
MAX_BODIES_AT_ONCE = 8
INLINE_BYTES = 64 << 10
SENT_BYTES = 256 << 10

P = TypeVar("P", bound=Params)


class BodyReader:
    """Reads request bodies of at most `max_bytes` each.

    All bodies that are being read, tokenized or admitted, and large answers that are being sent,
    share a room of MAX_BODIES_AT_ONCE times `max_bytes`; what is beyond is refused.
    """

    def __init__(
        self, max_bytes: int, tokens: TokenizerPool | None = None, timeout_s: float = BODY_TIMEOUT_S
    ) -> None:
        self._max_bytes, self._tokens, self._timeout_s = max_bytes, tokens, timeout_s
        self._room = SharedRoom(MAX_BODIES_AT_ONCE * max_bytes)

    async def params(self, request: Request, kind: str, params: type[P]) -> P:
        """Read and decode a body of a kind of `dialects.readers.READERS`; raises as `read` does.

        `raw` of the result is a memoryview if the body is large.
        """
        parts = await self.read(request)
        size_bytes = sum(map(len, parts))
        if size_bytes <= INLINE_BYTES or self._tokens is None:
            inline = READERS[kind](b"".join(parts))
            assert isinstance(inline, params)
            return inline
        owner = owner_of(request)
        with self.held(size_bytes, owner):
            small, raw = await self._tokens.read_body(kind, parts, params, owner)
        return msgspec.structs.replace(small, raw=raw)

    async def read(self, request: Request) -> list[bytes]:
        """Read one body in parts; a declared length that is too large is refused at once.

        The parts are not joined: copying a large body would stop the loop. Raises RequestError
        (413 too long, 408 too slow, 415 compressed) or Refusal (too many at once).
        """
        coding = request.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise RequestError(
                f"content-encoding is {coding[:60]!r}: send the body as it is",
                status=415,
                code="unsupported_value",
                param="content-encoding",
            )
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise self._too_long()
        owner = owner_of(request)
        extension = request.scope.get("extensions", {}).get(WHOLE_BODY)
        if extension is not None and (body := extension["take"]()) is not None:
            self._check(len(body), len(body), owner)
            return [body]
        parts: list[bytes] = []
        size_bytes = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                async for chunk in request.stream():
                    parts.append(chunk)
                    size_bytes += len(chunk)
                    self._room.hold(owner, len(chunk))
                    self._check(size_bytes, 0, owner)
        except TimeoutError:
            raise RequestError(
                f"the body was not received within {self._timeout_s:.0f} s: send it faster",
                status=408,
                code="body_timeout",
            ) from None
        finally:
            self._room.hold(owner, -size_bytes)
        return parts

    def answer(self, request: Request, *parts: bytes | memoryview) -> JsonResponse:
        """Return a response of JSON; raises Refusal if its client takes too many at once."""
        size_bytes, owner = sum(map(len, parts)), owner_of(request)
        if size_bytes <= SENT_BYTES:
            return JsonResponse(parts)
        self._check_room(size_bytes, owner)
        return JsonResponse(parts, functools.partial(self.held, size_bytes, owner))

    @contextlib.contextmanager
    def sending(self, size_bytes: int, owner: str) -> Iterator[None]:
        """Count the bytes of a large answer; raises Refusal if its client takes too many."""
        self._check_room(size_bytes, owner)
        with self.held(size_bytes, owner):
            yield

    @contextlib.contextmanager
    def held(self, size_bytes: int, owner: str) -> Iterator[None]:
        """Count the bytes of a body that is processed, or of an answer that is sent."""
        self._room.hold(owner, size_bytes)
        try:
            yield
        finally:
            self._room.hold(owner, -size_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes of all bodies that are held."""
        return self._room.held

    def _check(self, size_bytes: int, more_bytes: int, owner: str) -> None:
        if size_bytes > self._max_bytes:
            raise self._too_long()
        self._check_room(more_bytes, owner)

    def _check_room(self, more_bytes: int, owner: str) -> None:
        if not self._room.fits(owner, more_bytes):
            raise Refusal("overloaded", "too many long requests at once: retry later")

    def _too_long(self) -> RequestError:
        return RequestError(
            f"the body is longer than {self._max_bytes} bytes: shorten it",
            status=413,
            code="body_too_large",
        )


class JsonResponse(Response):
    """JSON in parts; a large one is sent bit by bit. `held` counts its bytes meanwhile."""

    media_type = "application/json"

    def __init__(
        self,
        parts: Sequence[bytes | memoryview],
        held: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._parts, self._held = parts, held
        super().__init__(headers={"content-length": str(sum(map(len, parts)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        with self._held():
            await send(start)
            await send_body(send, self._parts)


async def send_body(send: Send, parts: Iterable[bytes | memoryview]) -> None:
    """Send the body of a response, at most SENT_BYTES at a time: others are served meanwhile."""
    waiting: list[bytes | memoryview] = []
    size_bytes = 0
    for part in parts:
        for at in range(0, len(part), SENT_BYTES):
            some = part[at : at + SENT_BYTES]
            if size_bytes + len(some) > SENT_BYTES:
                body = b"".join(waiting)
                await send({"type": "http.response.body", "body": body, "more_body": True})
                waiting, size_bytes = [], 0
            waiting.append(some)
            size_bytes += len(some)
    body = b"".join(waiting)
    await send({"type": "http.response.body", "body": body, "more_body": False})


def owner_of(request: Request) -> str:
    """Return whose share of memory a request takes: of a tenant or an address."""
    client: Client | None = request.scope.get("state", {}).get("client")
    return client.owner if client is not None else ""
