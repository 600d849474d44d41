"""Request bodies: received within limits, decoded off the event loop if they are large.

    body <= INLINE_BYTES    decoded here, which takes less than a millisecond
    larger                  decoded by a tokenizer process; its parameters come back, and the JSON
                            of messages, prompt or token ids

A request costs the router one copy of its body, and one of that JSON while both are held.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from medha.errors import Refusal, RequestError
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

    All bodies that are being read, tokenized or admitted hold at most MAX_BODIES_AT_ONCE times
    `max_bytes`; beyond that, reading refuses.
    """

    def __init__(
        self, max_bytes: int, tokens: TokenizerPool | None = None, timeout_s: float = BODY_TIMEOUT_S
    ) -> None:
        self._max_bytes, self._tokens, self._timeout_s = max_bytes, tokens, timeout_s
        self._held_bytes = 0

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
        client: Client = request.state.client
        with self.held(size_bytes):
            small, raw = await self._tokens.read_body(kind, parts, params, client.cache_owner)
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
        extension = request.scope.get("extensions", {}).get(WHOLE_BODY)
        if extension is not None and (body := extension["take"]()) is not None:
            self._check(len(body), self._held_bytes + len(body))
            return [body]
        parts: list[bytes] = []
        size_bytes = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                async for chunk in request.stream():
                    parts.append(chunk)
                    size_bytes += len(chunk)
                    self._held_bytes += len(chunk)
                    self._check(size_bytes, self._held_bytes)
        except TimeoutError:
            raise RequestError(
                f"the body was not received within {self._timeout_s:.0f} s: send it faster",
                status=408,
                code="body_timeout",
            ) from None
        finally:
            self._held_bytes -= size_bytes
        return parts

    @contextlib.contextmanager
    def held(self, size_bytes: int) -> Iterator[None]:
        """Count the bytes of a body that is processed."""
        self._held_bytes += size_bytes
        try:
            yield
        finally:
            self._held_bytes -= size_bytes

    def _check(self, size_bytes: int, held_bytes: int) -> None:
        if size_bytes > self._max_bytes:
            raise self._too_long()
        if held_bytes > MAX_BODIES_AT_ONCE * self._max_bytes:
            raise Refusal("overloaded", "too many long requests at once: retry later")

    def _too_long(self) -> RequestError:
        return RequestError(
            f"the body is longer than {self._max_bytes} bytes: shorten it",
            status=413,
            code="body_too_large",
        )


class JsonResponse(Response):
    """A JSON answer, sent in parts if it is large, so that other requests are served meanwhile."""

    media_type = "application/json"

    def render(self, content: bytes | memoryview) -> bytes | memoryview:
        return bytes(content) if len(content) <= SENT_BYTES else memoryview(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= SENT_BYTES:
            await super().__call__(scope, receive, send)
            return
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        for start in range(0, len(self.body), SENT_BYTES):
            part = bytes(self.body[start : start + SENT_BYTES])
            more = start + SENT_BYTES < len(self.body)
            await send({"type": "http.response.body", "body": part, "more_body": more})
