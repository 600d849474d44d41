"""Answers of OpenAI's Responses API: response objects and their events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from medha_router.api_errors import ApiError
from medha_router.dialects.answer import event
from medha_router.dialects.blocks import BlockBuilder, Change, OutputBlock
from medha_router.dialects.http_response import timing
from medha_router.dialects.openai_answer import chat_logprob
from medha_router.dialects.responses_body import ResponsesParams
from medha_router.generation import ClientRequest
from medha_router.tokenization.detokenizer import Delta, TokenLogprob

FIXED: dict[str, Any] = {
    "background": False,
    "error": None,
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
}


class ResponseAnswer:
    """A response, with an item for its thinking, a message for each text and a function call for
    each call."""

    def __init__(self, request: ClientRequest, params: ResponsesParams) -> None:
        self._request = request
        self._echoed: dict[str, Any] = msgspec.json.decode(params.echoed)
        self._namespaced = params.namespaced
        self._shows_logprobs = params.sampling.logprobs is not None
        self._blocks = BlockBuilder(request)
        self._number = 0

    def opening(self) -> bytes:
        response = {"response": self._response("in_progress", [])}
        return self._event("response.created", response) + self._event(
            "response.in_progress", response
        )

    def push(self, delta: Delta) -> bytes:
        changes = self._blocks.push(delta)
        if not self._request.params.stream:
            return b""
        return b"".join(
            self._thinking_events(change)
            if change.block.thinking
            else self._text_events(change)
            if change.block.name is None
            else self._call_events(change)
            for change in changes
        )

    def closing(self) -> bytes:
        response = self._finished() | {"x_medha": timing(self._request)}
        return self._event(f"response.{self._status()}", {"response": response})

    def whole(self) -> bytes:
        return msgspec.json.encode(self._finished() | {"x_medha": timing(self._request)})

    def failure(self, error: ApiError) -> bytes:
        """Return the error's event. Clients of chats expect the field `error`."""
        shown = error.error
        fields = {"code": shown.code, "message": shown.message, "param": shown.param}
        return self._event("error", fields | {"error": shown})

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return event(kind, {"sequence_number": number} | fields)

    def _status(self) -> str:
        return "incomplete" if self._blocks.finish == "length" else "completed"

    def _finished(self) -> dict[str, Any]:
        return self._response(self._status(), [self._item(block) for block in self._blocks.blocks])

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        request, finished = self._request, status != "in_progress"
        usage = {
            "input_tokens": request.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": request.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": request.output_tokens,
            "output_tokens_details": {"reasoning_tokens": request.reasoning_tokens},
            "total_tokens": request.prompt_tokens + request.output_tokens,
        }
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{request.id}",
            "object": "response",
            "created_at": request.created,
            "status": status,
            "incomplete_details": cut,
            "model": request.params.model,
            "output": output,
            "usage": usage if finished else None,
            **FIXED,
            **self._echoed,
        }

    def _item(self, block: OutputBlock, status: str | None = None) -> dict[str, Any]:
        """Return an output item; the last one is incomplete if the output was cut."""
        began = status == "in_progress"
        if status is None:
            last = block is self._blocks.blocks[-1]
            status = self._status() if last else "completed"
        if block.name is not None:
            return {
                "type": "function_call",
                "id": self._item_id(block),
                "call_id": block.call_id,
                **self._names(block),
                "arguments": "" if began else block.text,
                "status": status,
            }
        if block.thinking:
            return {
                "type": "reasoning",
                "id": self._item_id(block),
                "status": status,
                "summary": [],
                "content": [] if began else [_thinking_part(block.text)],
            }
        return {
            "type": "message",
            "id": self._item_id(block),
            "role": "assistant",
            "status": status,
            "content": [] if began else [self._text_part(block)],
        }

    def _names(self, block: OutputBlock) -> dict[str, str]:
        """Return the name of a call, and its namespace if it has one."""
        namespace, name = self._namespaced.get(block.name or "", ("", block.name or ""))
        return {"namespace": namespace, "name": name} if namespace else {"name": name}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return [chat_logprob(entry) for entry in entries] if self._shows_logprobs else []

    def _text_part(self, block: OutputBlock) -> dict[str, Any]:
        part = _text_part(block.text)
        return part | {"logprobs": self._logprobs(block.logprobs)} if self._shows_logprobs else part

    def _item_id(self, block: OutputBlock) -> str:
        kind = "rs" if block.thinking else "msg" if block.name is None else "fc"
        return f"{kind}_{self._request.id}{block.index}"

    def _text_events(self, change: Change) -> bytes:
        block = change.block
        at: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        at["content_index"] = 0
        if change.kind == "begin":
            return self._item_event("added", block, "in_progress") + self._event(
                "response.content_part.added", at | {"part": _text_part("")}
            )
        if change.kind == "text":
            return self._event(
                "response.output_text.delta",
                at | {"delta": change.text, "logprobs": self._logprobs(change.logprobs)},
            )
        done = {"text": block.text, "logprobs": self._logprobs(block.logprobs)}
        return (
            self._event("response.output_text.done", at | done)
            + self._event("response.content_part.done", at | {"part": self._text_part(block)})
            + self._item_event("done", block)
        )

    def _thinking_events(self, change: Change) -> bytes:
        block = change.block
        at: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        at["content_index"] = 0
        if change.kind == "begin":
            return self._item_event("added", block, "in_progress")
        if change.kind == "text":
            return self._event("response.reasoning_text.delta", at | {"delta": change.text})
        return self._event(
            "response.reasoning_text.done", at | {"text": block.text}
        ) + self._item_event("done", block)

    def _call_events(self, change: Change) -> bytes:
        block, name = change.block, "response.function_call_arguments"
        at: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        if change.kind == "begin":
            return self._item_event("added", block, "in_progress")
        if change.kind == "text":
            return self._event(f"{name}.delta", at | {"delta": change.text})
        return self._event(
            f"{name}.done", at | {"name": self._names(block)["name"], "arguments": block.text}
        ) + self._item_event("done", block)

    def _item_event(self, what: str, block: OutputBlock, status: str | None = None) -> bytes:
        fields = {"output_index": block.index, "item": self._item(block, status)}
        return self._event(f"response.output_item.{what}", fields)


def _thinking_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}
