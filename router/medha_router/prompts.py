"""The heavy part of a request as typed values: chat messages and prompts, from their raw JSON.

Decides what a message may hold: text, alone or as text parts; everything else is a RequestError.
Runs where tokens are made, off the event loop.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from medha.errors import RequestError
from medha_router.openai import MAX_PROMPTS, TokenId, read_body

MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Part(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class _Messages(msgspec.Struct, frozen=True):
    """Wrapped in an object, so that an error's path reads `messages[0].role`."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]


class _Prompt(msgspec.Struct, frozen=True):
    prompt: str | list[Any]


def read_messages(raw: bytes) -> list[dict[str, str]]:
    """Messages as a chat template takes them: role, content as one string, and names if given."""
    messages = read_body(b'{"messages":' + raw + b"}", _Messages).messages
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: Message, where: str) -> dict[str, str]:
    if message.role not in ROLES:
        raise RequestError(
            f"{where}.role is {message.role!r}: must be one of {', '.join(ROLES)}",
            code="invalid_value", param=f"{where}.role",
        )  # fmt: skip
    for field in ("tool_calls", "function_call"):
        if getattr(message, field) not in (None, []):
            raise RequestError(
                f"{where}.{field}: calling tools is not supported by this server; leave it out",
                code="unsupported_parameter", param=f"{where}.{field}",
            )  # fmt: skip
    plain = {"role": message.role, "content": _text(message.content, f"{where}.content")}
    if message.content is None and message.role != "assistant":
        raise RequestError(
            f"{where}.content is missing: a {message.role} message needs text",
            code="invalid_value", param=f"{where}.content",
        )  # fmt: skip
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _text(content: str | list[Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise RequestError(
                f"{where}[{index}] has the type {part.type!r}: only text parts are supported",
                code="unsupported_content", param=f"{where}[{index}]",
            )  # fmt: skip
        texts.append(part.text)
    return "".join(texts)


def read_prompts(raw: bytes) -> list[str | list[int]]:
    """One entry per prompt: a string, or token ids.

    Accepts OpenAI's four shapes: a string, a list of strings, token ids, a list of token id lists.
    """
    prompt = read_body(b'{"prompt":' + raw + b"}", _Prompt).prompt
    if isinstance(prompt, str):
        prompts: list[str | list[int]] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        prompts = [_ids(prompt, "prompt")]
    else:
        if not 1 <= len(prompt) <= MAX_PROMPTS:
            raise RequestError(
                f"prompt is a list of {len(prompt)}: must hold 1 to {MAX_PROMPTS} prompts",
                code="invalid_value", param="prompt",
            )  # fmt: skip
        prompts = [
            entry if isinstance(entry, str) else _ids(entry, f"prompt[{index}]")
            for index, entry in enumerate(prompt)
        ]
    return prompts


def _ids(entry: object, where: str) -> list[int]:
    """Token ids; their range is checked against the vocabulary where it is known."""
    try:
        return msgspec.convert(entry, list[TokenId])
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        at = where + path.rstrip("`")
        raise RequestError(
            f"{at}: {message[:1].lower()}{message[1:]}; give the ids of tokens",
            code="invalid_value", param=at,
        ) from None  # fmt: skip
