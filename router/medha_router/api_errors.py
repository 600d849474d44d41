"""Failures as clients see them: HTTP status, OpenAI's error object, headers.

Decided from the exception alone. A message never shows internals (addresses, paths, traces): an
unexpected exception becomes a plain 500.
"""

from __future__ import annotations

import math

import msgspec
from starlette.responses import Response

from medha.errors import CheckpointError, EngineError, Refusal, RequestError
from medha.fleet.admission import TPOT_HEADER, least_tpot_ms
from medha_router.protocol import INTERNAL_ERROR

REFUSAL_STATUS = {
    "deadline_infeasible": 429,
    "rate_limit_exceeded": 429,
    "context_length_exceeded": 400,
    "tpot_infeasible": 400,
    "overloaded": 503,
    "no_replica": 503,
    "draining": 503,
}
RETRY_AFTER_S = (1, 30)
REQUEST_ID = "x-medha-request-id"
MEMORY = "memory"
"""Reason of a refusal for lack of memory."""


class ErrorObject(msgspec.Struct, frozen=True):
    """OpenAI's error object. `earliest_ttft_ms`, `least_tpot_ms`: set if the refusal has them."""

    message: str
    type: str
    param: str | None
    code: str | None
    earliest_ttft_ms: int | msgspec.UnsetType = msgspec.UNSET
    least_tpot_ms: float | msgspec.UnsetType = msgspec.UNSET


class ApiError(msgspec.Struct, frozen=True):
    """A failure as an HTTP response: status, error object, headers."""

    status: int
    error: ErrorObject
    headers: dict[str, str] = {}

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.error})


class StreamBroken(EngineError):
    """A stream that cannot continue; `code` and message go to the client."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


def of_exception(error: BaseException) -> ApiError:
    """Make the error that a client gets for an exception."""
    if isinstance(error, RequestError):
        return of_status(error.status, str(error), code=error.code, param=error.param)
    if isinstance(error, Refusal):
        return _refused(error)
    if isinstance(error, StreamBroken):
        return of_status(500, str(error), code=error.code)
    if isinstance(error, CheckpointError):
        return of_status(500, "the model's tokenizer does not load", code="model_error")
    if isinstance(error, EngineError):
        return of_status(500, str(error), code="engine_error")
    return of_status(500, INTERNAL_ERROR, code="internal_error")


def of_shutdown() -> ApiError:
    """Make the error that a client gets because the router ends."""
    return _refused(Refusal("draining", "this router is shutting down: retry", retry_after_s=1.0))


def of_memory() -> ApiError:
    """Make the error of a request that is refused because the router's memory is nearly used up."""
    error = _refused(
        Refusal("overloaded", "this router's memory is nearly used up: retry", retry_after_s=1.0)
    )
    return msgspec.structs.replace(
        error, headers={**error.headers, "x-medha-dropped-reason": MEMORY}
    )


def of_status(
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> ApiError:
    """Make an error with the type that OpenAI uses for its status."""
    return ApiError(status, ErrorObject(message, _type(status, code), param, code), headers or {})


def response(error: ApiError) -> Response:
    """Make an HTTP response from the error."""
    return Response(error.body(), error.status, error.headers, "application/json")


def _refused(refusal: Refusal) -> ApiError:
    status = REFUSAL_STATUS.get(refusal.code, 503)
    headers = {"x-medha-dropped-reason": refusal.code}
    if refusal.retry_after_s is not None or status == 503:
        shortest, longest = RETRY_AFTER_S
        wait_s = math.ceil(refusal.retry_after_s or shortest)
        headers["retry-after"] = str(min(longest, max(shortest, wait_s)))
    if refusal.code == "draining":
        headers["connection"] = "close"  # a retry on the same connection would meet this router
    if refusal.code == "deadline_infeasible":
        headers["x-should-retry"] = "false"
        headers.pop("retry-after", None)
    earliest: int | msgspec.UnsetType = msgspec.UNSET
    if refusal.earliest_ttft_s is not None and math.isfinite(refusal.earliest_ttft_s):
        earliest = math.ceil(refusal.earliest_ttft_s * 1000)
        headers["x-medha-earliest-ttft-ms"] = str(earliest)
    least: float | msgspec.UnsetType = msgspec.UNSET
    if refusal.least_tpot_s is not None:
        least = least_tpot_ms(refusal.least_tpot_s)
        headers["x-medha-least-tpot-ms"] = f"{least:g}"
    error = ErrorObject(
        message=str(refusal),
        type=_type(status, refusal.code),
        param=TPOT_HEADER if refusal.code == "tpot_infeasible" else None,
        code=refusal.code,
        earliest_ttft_ms=earliest,
        least_tpot_ms=least,
    )
    return ApiError(status, error, headers)


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
