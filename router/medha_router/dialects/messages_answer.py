"""Answers of Anthropic's Messages API: messages, their events, and the shape of its errors."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medha_router.api_errors import ApiError, ErrorObject
from medha_router.dialects.answer import event
from medha_router.dialects.blocks import BlockBuilder, Change, OutputBlock
from medha_router.dialects.http_response import timing
from medha_router.generation import ClientRequest
from medha_router.tokenization.detokenizer import Delta

PATH = "/v1/messages"
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's type of an error by its status; of others it is that of 400, or `api_error`."""


class MessageAnswer:
    """A message, with a content block for its thinking, each text and each call."""

    def __init__(self, request: ClientRequest) -> None:
        self._request = request
        self._blocks = BlockBuilder(request)

    def opening(self) -> bytes:
        return event("message_start", {"message": self._message([])})

    def push(self, delta: Delta) -> bytes:
        changes = self._blocks.push(delta)
        return b"".join(map(_block_event, changes)) if self._request.params.stream else b""

    def closing(self) -> bytes:
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
        fields = {"delta": delta, "usage": self._usage(), "x_medha": timing(self._request)}
        return event("message_delta", fields) + event("message_stop", {})

    def whole(self) -> bytes:
        message = self._message([_whole_block(block) for block in self._blocks.blocks])
        return msgspec.json.encode(message | {"x_medha": timing(self._request)})

    def failure(self, error: ApiError) -> bytes:
        return event("error", {"error": error_object(error.status, error.error)})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._request.id}",
            "type": "message",
            "role": "assistant",
            "model": self._request.params.model,
            "content": content,
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._stop_sequence(),
            "usage": self._usage(),
        }

    def _stop_reason(self) -> str | None:
        finish = self._blocks.finish
        if finish is None:
            return None
        if finish == "length":
            return "max_tokens"
        if self._stop_sequence() is not None:
            return "stop_sequence"
        return "tool_use" if self._blocks.calls else "end_turn"

    def _stop_sequence(self) -> str | None:
        return self._request.generations[0].output.stop

    def _usage(self) -> dict[str, Any]:
        """Return the usage; tokens that were read from a cache are no part of `input_tokens`."""
        request = self._request
        return {
            "input_tokens": request.prompt_tokens - request.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": request.cached_tokens,
            "output_tokens": request.output_tokens,
            "output_tokens_details": {"thinking_tokens": request.reasoning_tokens},
        }


def _block_event(change: Change) -> bytes:
    block = change.block
    fields: dict[str, object] = {"index": block.index}
    if change.kind == "begin":
        empty: dict[str, object] = {"type": "text", "text": ""}
        if block.thinking:
            empty = _thinking_block("")
        if block.name is not None:
            empty = {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
        return event("content_block_start", fields | {"content_block": empty})
    if change.kind == "end":
        return event("content_block_stop", fields)
    delta = {"type": "text_delta", "text": change.text}
    if block.thinking:
        delta = {"type": "thinking_delta", "thinking": change.text}
    if block.name is not None:
        delta = {"type": "input_json_delta", "partial_json": change.text}
    return event("content_block_delta", fields | {"delta": delta})


def _whole_block(block: OutputBlock) -> dict[str, Any]:
    """Return a content block; arguments that are no JSON object, as after a cut, become text."""
    text = block.text
    if block.thinking:
        return _thinking_block(text)
    if block.name is None:
        return {"type": "text", "text": text}
    try:
        arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"type": "text", "text": block.name + text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def _thinking_block(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def error_object(status: int, error: ErrorObject) -> dict[str, Any]:
    """Return the error in Anthropic's form, with the fields of OpenAI's after it."""
    kind = TYPES.get(status, TYPES[400] if status < 500 else "api_error")
    fields: dict[str, Any] = msgspec.to_builtins(error)
    return fields | {"type": kind}


class MessagesErrors:
    """ASGI middleware that gives errors of the Messages API their form.

    All its responses also name the request in `request-id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http" and scope["path"].startswith(PATH):
            return self._serve(scope, receive, send)
        return self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id: str = scope["state"]["request_id"]
        started: Message = {}
        parts: list[bytes] = []

        async def send_shaped(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                headers = [*message["headers"], (b"request-id", request_id.encode())]
                started = {**message, "headers": headers}
                if started["status"] < 400:
                    await send(started)
                return
            if started["status"] < 400:
                await send(message)
                return
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                body = _shaped(started["status"], b"".join(parts), request_id)
                headers = _with_length(started["headers"], len(body))
                await send({**started, "headers": headers})
                await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, send_shaped)


class _ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorObject


def _shaped(status: int, body: bytes, request_id: str) -> bytes:
    if not body:  # no client is there to read it
        return body
    error = msgspec.json.decode(body, type=_ErrorBody).error
    return msgspec.json.encode(
        {"type": "error", "error": error_object(status, error), "request_id": request_id}
    )


def _with_length(headers: list[tuple[bytes, bytes]], size: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(size).encode())]
