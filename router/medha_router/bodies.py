"""Request bodies: read once, bounded in size, in time and in what all of them hold together."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from medha.errors import Refusal, RequestError

BODY_S = 60.0
AT_ONCE = 8


class Bodies:
    """Reads the bodies of one application: at most `most_bytes` each, and AT_ONCE times that of
    all that are being read."""

    def __init__(self, most_bytes: int, within_s: float = BODY_S) -> None:
        self._most, self._within_s = most_bytes, within_s
        self._held = 0

    async def read(self, request: Request) -> bytearray:
        """One body, as early refused as its declared length allows.

        Raises RequestError (413 too long, 408 too slow) or Refusal (too much is being read).
        """
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._most:
            raise self._too_long()
        body = bytearray()
        try:
            async with asyncio.timeout(self._within_s):
                async for piece in request.stream():
                    body += piece
                    self._held += len(piece)
                    if len(body) > self._most:
                        raise self._too_long()
                    if self._held > AT_ONCE * self._most:
                        raise Refusal("overloaded", "too many long requests at once: retry later")
        except TimeoutError:
            raise RequestError(
                f"the body did not arrive within {self._within_s:.0f} s: send it faster",
                status=408, code="body_timeout",
            ) from None  # fmt: skip
        finally:
            self._held -= len(body)
        return body

    def _too_long(self) -> RequestError:
        return RequestError(
            f"the body is longer than {self._most} bytes: shorten it",
            status=413, code="body_too_large",
        )  # fmt: skip
