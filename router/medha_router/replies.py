"""OpenAI's response objects: whole answers, stream chunks, usage, log probabilities, models.

Pure shapes: from deltas and counts to bytes. The field `x_medha` carries what OpenAI has no place
for (request id, promise, predicted and actual time to first token); it is on whole answers and on
the last chunk of a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from medha_router.streams import Delta, TokenLogprob

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"


class Usage(msgspec.Struct, frozen=True):
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
    """`x_medha`: what was promised, predicted and reached, in milliseconds after arrival."""

    request_id: str
    slo_class: str
    promise_ttft_ms: float | None
    predicted_ttft_ms: float | None
    ttft_ms: float | None


class Shapes:
    """One response's objects: its id, model and birth time stand in each of them."""

    def __init__(self, *, chat: bool, id: str, model: str, created: int) -> None:
        self._chat = chat
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{id}"
        self._model, self._created = model, created

    def opening(self, index: int) -> bytes:
        """The first chunk of a chat choice: its role."""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}}
        return self._chunk([choice | {"logprobs": None, "finish_reason": None}])

    def piece(self, index: int, delta: Delta, *, logprobs: bool, more: dict[str, Any]) -> bytes:
        """A chunk of text; `more` stands beside the choices."""
        choice: dict[str, Any] = {"index": index}
        if self._chat:
            choice["delta"] = {"content": delta.text} if delta.text or delta.logprobs else {}
        else:
            choice["text"] = delta.text
        choice["logprobs"] = self._logprobs(delta.logprobs) if logprobs else None
        choice["finish_reason"] = delta.finish
        return self._chunk([choice], more)

    def usage(self, usage: Usage, more: dict[str, Any]) -> bytes:
        """The chunk without choices that `include_usage` asks for."""
        return self._chunk([], {"usage": usage.shape()} | more)

    def whole(
        self, texts: Sequence[tuple[str, Sequence[TokenLogprob], str]], usage: Usage,
        timing: Timing, *, logprobs: bool,
    ) -> bytes:  # fmt: skip
        """A whole answer from each choice's (text, log probabilities, finish reason)."""
        choices: list[dict[str, Any]] = []
        for index, (text, entries, finish) in enumerate(texts):
            choice: dict[str, Any] = {"index": index}
            if self._chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            choice["logprobs"] = self._logprobs(entries) if logprobs else None
            choice["finish_reason"] = finish
            choices.append(choice)
        name = "chat.completion" if self._chat else "text_completion"
        return msgspec.json.encode(
            self._head(name) | {"choices": choices, "usage": usage.shape(), "x_medha": timing}
        )

    def _chunk(self, choices: list[dict[str, Any]], more: dict[str, Any] | None = None) -> bytes:
        name = "chat.completion.chunk" if self._chat else "text_completion"
        body = self._head(name) | {"choices": choices} | (more or {})
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self._id, "object": name, "created": self._created, "model": self._model}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self._chat:
            return {"content": [self._chat_logprob(entry) for entry in entries], "refusal": None}
        return {
            "tokens": [_named(entry, entry.token)["token"] for entry in entries],
            "token_logprobs": [entry.logprob.chosen for entry in entries],
            "top_logprobs": [
                {_named(entry, token)["token"]: value for token, value in entry.logprob.top}
                for entry in entries
            ],
            "text_offset": [entry.offset for entry in entries],
        }

    def _chat_logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [_named(entry, token) | {"logprob": value} for token, value in entry.logprob.top]
        chosen = _named(entry, entry.token) | {"logprob": entry.logprob.chosen}
        return chosen | {"top_logprobs": top}


def _named(entry: TokenLogprob, token: int) -> dict[str, Any]:
    spelt = entry.vocabulary.bytes_of(token)
    return {"token": spelt.decode("utf-8", errors="replace"), "bytes": list(spelt)}


def error_event(body: bytes) -> bytes:
    """The last event of a stream that broke; `body` is the JSON of an error object."""
    return b"event: error\ndata: " + body + b"\n\n"


def model_shape(name: str, created: int, max_context_tokens: int) -> dict[str, Any]:
    """An entry of `/v1/models`; `max_model_len` is vLLM's name for the context limit."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "medha",
        "max_model_len": max_context_tokens,
    }
