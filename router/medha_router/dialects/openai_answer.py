"""JSON of OpenAI's chat completions and completions: whole answers, chunks, log probabilities.

The field `x_medha` holds what OpenAI has no field for (request id, promised, predicted and measured
TTFT). It stands in whole answers and in the last chunk of a stream.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from medha.messages import Logprob, from_bytes
from medha_router.generation import Generation
from medha_router.structured.output_parser import OutputParser
from medha_router.structured.tool_calls import TextPart
from medha_router.tokenization.detokenizer import Delta, TokenLogprob
from medha_router.turns import taken

StopReason = str | int | None
TOKEN_ID = "token_id:%d"
"""Name of a token by its id, as vLLM spells it."""
NO_FIELDS: Mapping[str, Any] = {}
PARSED_CHARS = 2048
"""Text of a whole answer that is searched for calls in one turn."""
IDS_PART = 8192
"""Token ids that become JSON in one turn."""
THINKING_FIELDS = ("reasoning", "reasoning_content")
"""Names of the thinking in vLLM; the second is that of DeepSeek, and of older clients."""
TEXT_CHUNK_END = b',"logprobs":null,"finish_reason":null}]}\n\n'


class TokenUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def shape(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """`x_medha`: TTFT as promised, predicted and measured, in milliseconds after arrival."""

    request_id: str
    slo_class: str
    promise_ttft_ms: float | None
    predicted_ttft_ms: float | None
    ttft_ms: float | None


class TokenIds(msgspec.Struct, frozen=True):
    """Tokens of a choice and of its prompt, int32."""

    prompt: npt.NDArray[np.int32]
    output: npt.NDArray[np.int32]


class ResponseBuilder:
    """Builds the JSON objects of one response, each with its id, model and creation time.

    `shown_id` stands in them, if the client gives one. `make_parser` makes the parser that splits a
    choice of a chat, when its output begins: until then, its model's version may change. If
    `names_ids`, log probabilities name tokens by id, as vLLM's `return_tokens_as_token_ids` asks.
    """

    def __init__(
        self,
        *,
        chat: bool,
        id: str,
        model: str,
        created: int,
        make_parser: Callable[[int], OutputParser] | None = None,
        names_ids: bool = False,
        shown_id: str = "",
    ) -> None:
        self._chat, self._request_id = chat, id
        self._make_parser, self._parsers = make_parser, dict[int, OutputParser]()
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{shown_id or id}"
        self._model, self._created = model, created
        self._names_ids = names_ids
        # Each chunk begins with the same fields.
        head = self._head("chat.completion.chunk" if chat else "text_completion")
        self._chunk_head = b"data: " + msgspec.json.encode(head)[:-1] + b","

    def opening(self, index: int, extra: dict[str, Any]) -> bytes:
        """Return the first chunk of a chat choice, with its role. `extra`: as for `chunk`."""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}}
        return self._chunk([choice | {"logprobs": None, "finish_reason": None}], extra)

    def chunk(
        self,
        index: int,
        delta: Delta,
        *,
        logprobs: bool,
        extra: dict[str, Any],
        fields: Mapping[str, Any] = NO_FIELDS,
        stop_reason: StopReason = None,
    ) -> bytes:
        """Return a chunk of text, or nothing if none is decided. `extra`: more top-level fields,
        `fields`: more of the choice."""
        finish = delta.finish
        plain = self._chat and (self._make_parser is None or self._parser(index).plain)
        further = logprobs or extra or fields
        if finish is None and delta.text and not further and plain:
            return self._text_chunk(index, delta.text)
        choice: dict[str, Any] = {"index": index, **fields}
        if plain:
            choice["delta"] = {"content": delta.text} if delta.text or delta.logprobs else {}
        elif self._chat:
            choice["delta"] = self._delta_of_parts(index, delta)
            finish = self._finish_with_calls(index, finish)
            if not (choice["delta"] or finish or delta.logprobs):
                return b""
        else:
            choice["text"] = delta.text
        choice["logprobs"] = self._logprobs(delta.logprobs) if logprobs else None
        choice["finish_reason"] = finish
        if finish is not None:
            choice["stop_reason"] = stop_reason
        return self._chunk([choice], extra)

    def _text_chunk(self, index: int, text: str) -> bytes:
        """Return the chunk of a chat that has text alone, as nearly all have."""
        return b'%b"choices":[{"index":%d,"delta":{"content":%b}%b' % (
            self._chunk_head,
            index,
            msgspec.json.encode(text),
            TEXT_CHUNK_END,
        )

    def _parser(self, index: int) -> OutputParser:
        parser = self._parsers.get(index)
        if parser is None:
            assert self._make_parser is not None
            parser = self._parsers[index] = self._make_parser(index)
        return parser

    def _delta_of_parts(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return the thinking, the content and the parts of calls that a text completes."""
        parser = self._parser(index)
        pieces = parser.push(delta.text)
        if delta.finish is not None:
            pieces += parser.end(delta.finish)
        return self._fields_of(index, pieces)

    def _fields_of(self, index: int, pieces: Sequence[TextPart]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if thinking := "".join(piece.text for piece in pieces if piece.thinking):
            fields |= dict.fromkeys(THINKING_FIELDS, thinking)
        texts = [piece.text for piece in pieces if piece.call is None and not piece.thinking]
        if content := "".join(texts):
            fields["content"] = content
        if calls := self._calls(index, pieces):
            fields["tool_calls"] = [
                {"index": number} | call for number, call in sorted(calls.items())
            ]
        return fields

    def _calls(self, index: int, pieces: Sequence[TextPart]) -> dict[int, dict[str, Any]]:
        """Return new parts of calls by number: id, type and name with the first part."""
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if piece.call is None:
                continue
            call = calls.setdefault(piece.call, {"function": {"arguments": []}})
            if piece.name is not None:
                call["id"] = call_id(self._request_id, index, piece.call)
                call["type"] = "function"
                call["function"]["name"] = piece.name
            call["function"]["arguments"].append(piece.text)
        for call in calls.values():
            call["function"]["arguments"] = "".join(call["function"]["arguments"])
        return calls

    def _finish_with_calls(self, index: int, finish: str | None) -> str | None:
        return "tool_calls" if finish == "stop" and self._parser(index).called else finish

    def usage(self, usage: TokenUsage, extra: dict[str, Any]) -> bytes:
        """Return the chunk without choices that `include_usage` requests."""
        return self._chunk([], {"usage": usage.shape()} | extra)

    def whole(
        self,
        outputs: Sequence[tuple[str, list[TokenLogprob], str, StopReason]],
        usage: TokenUsage,
        timing: Timing,
        *,
        logprobs: bool,
        prompts: Sequence[Iterator[bytes]] = (),
        ids: Sequence[TokenIds] = (),
    ) -> Iterator[bytes]:
        """Yield the parts of a response from text, log probabilities, finish and stop reason of
        each choice.

        `prompts`: JSON of vLLM's `prompt_logprobs` of each choice, if requested; `ids`: the tokens
        of each.
        """
        head = self._head("chat.completion" if self._chat else "text_completion")
        yield msgspec.json.encode(head)[:-1] + b',"choices":['
        for index, (text, entries, finish, stop_reason) in enumerate(outputs):
            choice: dict[str, Any] = {"index": index}
            if self._make_parser is not None:
                pieces: list[TextPart] = []
                for start in range(0, len(text), PARSED_CHARS):
                    pieces += self._parser(index).push(text[start : start + PARSED_CHARS])
                    yield b""
                whole = self._fields_of(index, pieces + self._parser(index).end(finish))
                finish = self._finish_with_calls(index, finish) or finish
                message = {"role": "assistant", "content": whole.pop("content", None)}
                message |= {"refusal": None} | whole
                if "tool_calls" in whole:
                    for call in whole["tool_calls"]:
                        del call["index"]
                elif message["content"] is None:
                    message["content"] = ""
                choice["message"] = message
            elif self._chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            yield (b"," if index else b"") + msgspec.json.encode(choice)[:-1] + b',"logprobs":'
            yield from self._logprob_parts(entries) if logprobs else (b"null",)
            ending = {"finish_reason": finish, "stop_reason": stop_reason}
            yield b"," + msgspec.json.encode(ending)[1:-1]
            if prompts and not self._chat:
                yield b',"prompt_logprobs":'
                yield from prompts[index]
            if ids:
                yield b',"token_ids":'
                yield from json_ids(ids[index].output)
            if ids and not self._chat:
                yield b',"prompt_token_ids":'
                yield from json_ids(ids[index].prompt)
            yield b"}"
        fields = {"usage": usage.shape(), "x_medha": timing}
        yield b"]," + msgspec.json.encode(fields)[1:-1]
        if prompts and self._chat:
            yield b',"prompt_logprobs":'
            yield from prompts[0]
        if ids and self._chat:
            yield b',"prompt_token_ids":'
            yield from json_ids(ids[0].prompt)
        yield b"}"

    def _logprob_parts(self, entries: list[TokenLogprob]) -> Iterator[bytes]:
        """Yield the JSON of many log probabilities and drop them; empty parts are turns of work."""
        lists: dict[str, list[bytes]] = {}
        for some in taken(entries):
            for field, values in self._logprobs(some).items():
                if values is not None:
                    lists.setdefault(field, []).append(msgspec.json.encode(values)[1:-1])
            yield b""
        for place, (field, parts) in enumerate(lists.items()):
            yield b'%b"%b":[' % (b"," if place else b"{", field.encode())
            yield from _joined(parts)
            yield b"]"
        yield b',"refusal":null}' if self._chat else b"}"

    def _chunk(self, choices: list[dict[str, Any]], extra: dict[str, Any] | None = None) -> bytes:
        rest = msgspec.json.encode({"choices": choices, **extra} if extra else {"choices": choices})
        return b"%b%b\n\n" % (self._chunk_head, rest[1:])

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self._id, "object": name, "created": self._created, "model": self._model}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self._chat:
            return {
                "content": [chat_logprob(entry, self._names_ids) for entry in entries],
                "refusal": None,
            }
        spellings = [
            _ids_of(entry) if self._names_ids else _completion_spellings(entry) for entry in entries
        ]
        return {
            "tokens": [texts[entry.token] for entry, texts in zip(entries, spellings, strict=True)],
            "token_logprobs": [
                None if entry.logprob is None else entry.logprob.chosen for entry in entries
            ],
            "top_logprobs": [
                None
                if entry.logprob is None
                else {texts[token]: value for token, value in entry.logprob.top}
                | {texts[entry.token]: entry.logprob.chosen}
                for entry, texts in zip(entries, spellings, strict=True)
            ],
            "text_offset": [entry.offset for entry in entries],
        }


def chat_logprob(entry: TokenLogprob, names_ids: bool = False) -> dict[str, Any]:
    """Return the log probability of a token, and of those that are likeliest in its place.

    If `names_ids`, tokens are named by id.
    """

    def spelling(token: int) -> dict[str, Any]:
        spelled = entry.vocabulary.bytes_of(token)
        text = TOKEN_ID % token if names_ids else spelled.decode("utf-8", errors="replace")
        return {"token": text, "bytes": list(spelled)}

    logprob = entry.logprob or Logprob(0.0)
    top = [spelling(token) | {"logprob": value} for token, value in logprob.top]
    return spelling(entry.token) | {"logprob": logprob.chosen, "top_logprobs": top}


def _joined(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the elements of a JSON list, given in parts."""
    for place, part in enumerate(parts):
        yield b"," + part if place else part


def prompt_logprobs(generation: Generation, most: int) -> Iterator[bytes]:
    """Yield the JSON of vLLM's `prompt_logprobs`, and drop them.

    Each token has a map of id to log probability and rank.
    """
    vocabulary = generation.output.vocabulary

    def shown(token: int, logprob: float, rank: int | None) -> dict[str, object]:
        text = vocabulary.bytes_of(token).decode("utf-8", errors="replace")
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    def entry(token: int, logprob: Logprob) -> bytes:
        ranks = {other: rank for rank, (other, _) in enumerate(logprob.top, 1)}
        kept = {token: logprob.chosen} | dict(logprob.top[:most])
        return msgspec.json.encode(
            {str(other): shown(other, value, ranks.get(other)) for other, value in kept.items()}
        )

    tokens = iter(from_bytes(generation.prompt.tokens)[1:].tolist())
    yield b"[null"
    for some in taken(generation.prompt_logprobs):
        yield b"".join([b"," + entry(next(tokens), logprob) for logprob in some])
    yield b"]"


def json_ids(tokens: npt.NDArray[np.int32]) -> Iterator[bytes]:
    """Yield the JSON list of token ids, in parts."""
    starts = range(0, len(tokens), IDS_PART)
    parts = (msgspec.json.encode(tokens[at : at + IDS_PART].tolist())[1:-1] for at in starts)
    yield b"["
    yield from _joined(parts)
    yield b"]"


def call_id(request_id: str, index: int, number: int) -> str:
    """Return the id of a call: nine letters and digits, which Mistral's templates demand."""
    name = f"{request_id}.{index}.{number}".encode()
    return hashlib.blake2b(name, digest_size=5).hexdigest()[:9]


def _ids_of(entry: TokenLogprob) -> dict[int, str]:
    """Return the name of each token of the entry by its id."""
    top = entry.logprob.top if entry.logprob is not None else ()
    return {token: TOKEN_ID % token for token in (entry.token, *(token for token, _ in top))}


def _completion_spellings(entry: TokenLogprob) -> dict[int, str]:
    """Return a distinct text for each token id of the entry, as completions key them by text.

    Bytes that are no text of their own are spelled `bytes:\\xe2`, as OpenAI does. Of several tokens
    with the same text, the sampled one keeps it and the others are `token_id:ID`, as in vLLM.
    """
    texts: dict[int, str] = {}
    used: set[str] = set()
    top = entry.logprob.top if entry.logprob is not None else ()
    for token in (entry.token, *(token for token, _ in top)):
        if token in texts:
            continue
        spelling = entry.vocabulary.bytes_of(token)
        try:
            text = spelling.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)
        texts[token] = TOKEN_ID % token if text in used else text
        used.add(texts[token])
    return texts


def error_event(body: bytes) -> bytes:
    """Return the last event of a stream that failed; `body` is the JSON of an error object."""
    return b"event: error\ndata: " + body + b"\n\n"


def model_shape(
    name: str, created: int, max_context_tokens: int, parent: str | None
) -> dict[str, Any]:
    """Return an entry of `/v1/models`; as in vLLM, `max_model_len` is the context limit, and
    `parent` the model of an adapter. `type` and the last fields are those of Anthropic's API."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": created,
        "owned_by": "medha",
        "root": parent or name,
        "max_model_len": max_context_tokens,
        "parent": parent,
        "display_name": name,
        "created_at": datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat(),
        "max_input_tokens": max_context_tokens,
        "max_tokens": max_context_tokens,
    }


def models_page(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer of `/v1/models`: for clients of Anthropic's API, its only page."""
    ids = [model["id"] for model in models] or [None]
    return {
        "object": "list",
        "data": models,
        "has_more": False,
        "first_id": ids[0],
        "last_id": ids[-1],
    }
