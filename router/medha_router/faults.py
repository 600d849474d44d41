"""Every failure as a client sees it: HTTP status, OpenAI's error object, headers.

Decides from the exception alone. What is not meant for clients (addresses, paths, traces) never
gets into a message: an unexpected exception becomes a plain 500.
"""

from __future__ import annotations

import math
import secrets

import msgspec
from starlette.responses import Response

from medha.errors import CheckpointError, EngineError, Refusal, RequestError

REFUSAL_STATUS = {
    "deadline_infeasible": 429,
    "rate_limit_exceeded": 429,
    "context_length_exceeded": 400,
    "overloaded": 503,
    "no_replica": 503,
    "draining": 503,
}
RETRY_AFTER_S = (1, 30)
REQUEST_ID = "x-medha-request-id"


class ErrorObject(msgspec.Struct, frozen=True):
    """OpenAI's error object; `earliest_ttft_ms` is there when a refusal knows it."""

    message: str
    type: str
    param: str | None
    code: str | None
    earliest_ttft_ms: int | msgspec.UnsetType = msgspec.UNSET


class Fault(msgspec.Struct, frozen=True):
    """A failure ready to be sent."""

    status: int
    error: ErrorObject
    headers: dict[str, str] = {}

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.error})


class StreamBroken(EngineError):
    """What a stream that cannot go on tells its client; `code` is for the error object."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


def fault_of(error: BaseException) -> Fault:
    """The fault that tells a client about `error`."""
    if isinstance(error, RequestError):
        return plain(error.status, str(error), code=error.code, param=error.param)
    if isinstance(error, Refusal):
        return _refused(error)
    if isinstance(error, StreamBroken):
        return plain(500, str(error), code=error.code)
    if isinstance(error, CheckpointError):
        return plain(500, "the model's tokenizer does not load", code="model_error")
    if isinstance(error, EngineError):
        return plain(500, str(error), code="engine_error")
    return plain(500, "internal error; the request may be tried again", code="internal_error")


def plain(
    status: int, message: str, *, code: str | None = None, param: str | None = None,
    headers: dict[str, str] | None = None,
) -> Fault:  # fmt: skip
    """A fault with the type that OpenAI gives to its status."""
    return Fault(status, ErrorObject(message, _type(status, code), param, code), headers or {})


def response(fault: Fault) -> Response:
    """The fault as a whole answer."""
    headers = {REQUEST_ID: secrets.token_hex(12), **fault.headers}
    return Response(fault.body(), fault.status, headers, "application/json")


def _refused(refusal: Refusal) -> Fault:
    status = REFUSAL_STATUS.get(refusal.code, 503)
    headers = {"x-medha-dropped-reason": refusal.code}
    if refusal.retry_after_s is not None or status == 503:
        least, most = RETRY_AFTER_S
        wait_s = math.ceil(refusal.retry_after_s or least)
        headers["retry-after"] = str(min(most, max(least, wait_s)))
    if refusal.code == "deadline_infeasible":
        headers["x-should-retry"] = "false"
        headers.pop("retry-after", None)
    earliest: int | msgspec.UnsetType = msgspec.UNSET
    if refusal.earliest_ttft_s is not None and math.isfinite(refusal.earliest_ttft_s):
        earliest = math.ceil(refusal.earliest_ttft_s * 1000)
        headers["x-medha-earliest-ttft-ms"] = str(earliest)
    kind = _type(status, refusal.code)
    return Fault(status, ErrorObject(str(refusal), kind, None, refusal.code, earliest), headers)


def _type(status: int, code: str | None) -> str:
    if status == 429:
        return "rate_limit_error" if code == "rate_limit_exceeded" else "deadline_error"
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 404:
        return "not_found_error"
    if status == 503:
        return "overloaded_error"
    return "invalid_request_error" if status < 500 else "server_error"
