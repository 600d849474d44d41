"""A conversation of a further API, on its way to the messages and tools of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from medha.errors import RequestError
from medha_router.structured.sources import RawJson

Names = Sequence[tuple[str, str]]
"""Names of a chat's fields, and what another API calls them."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")
BILLING = "x-anthropic-billing-header"
"""Start of a line of Claude Code that differs in each session: with it no prefix is cached."""


class Conversation:
    """Messages of a chat, in the order in which they are added."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._thinking = ""

    def add(self, role: str, content: str | Sequence[str]) -> None:
        """Add a message of a text, or of several."""
        message: dict[str, Any] = {"role": role, "content": content}
        if self._thinking and role == "assistant":
            message["reasoning"] = self._thinking
        self._messages.append(message)
        self._thinking = ""

    def think(self, text: str) -> None:
        """Add what the assistant thought before its next message."""
        self._thinking += text

    def call(self, id: str, name: str, arguments: str) -> None:
        """Add a call of a tool to the assistant's message, or begin one."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self.add("assistant", "")
        message = self._messages[-1]
        if self._thinking:  # after the text of the message
            message["reasoning"] = message.get("reasoning", "") + self._thinking
            self._thinking = ""
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        message.setdefault("tool_calls", []).append(call)

    def result(self, id: str, content: str | Sequence[str]) -> None:
        """Add the result of a call."""
        self._messages.append({"role": "tool", "tool_call_id": id, "content": content})

    @property
    def calls_last(self) -> bool:
        """True if the last message calls tools."""
        return bool(self._messages) and "tool_calls" in self._messages[-1]

    def raw(self) -> bytes:
        """Return the JSON of the messages."""
        return msgspec.json.encode(self._messages)


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None
) -> dict[str, Any]:
    """Return an entry of a chat's `tools`."""
    fields = {"name": name, "description": description, "parameters": parameters}
    function = {field: value for field, value in fields.items() if value is not None}
    return {"type": "function", "function": function}


def tool_fields(tools: RawJson, tool_choice: RawJson) -> bytes:
    """Return an object of both fields, so that the path of an error begins with their names."""
    parts = [
        name + bytes(raw)
        for name, raw in ((b'"tools":', tools), (b'"tool_choice":', tool_choice))
        if not isinstance(raw, msgspec.UnsetType)
    ]
    return b"{" + b",".join(parts) + b"}"


def part_text(kind: str, text: str | None, refusal: str | None) -> str | None:
    """Return the text of a content part of a chat or a response; None if it is no text."""
    if kind == "refusal":
        return refusal
    return text if kind in TEXT_PARTS else None


def without_billing(text: str) -> str:
    """Return a text of the system without a line for Anthropic's bills at its start."""
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def raw_json(value: object) -> msgspec.Raw:
    """Return a value as raw JSON."""
    return msgspec.Raw(msgspec.json.encode(value))


def renamed(error: RequestError, names: Names) -> RequestError:
    """Return the error of a chat with the field's name as the client gave it."""
    message, param = str(error), error.param
    for chat, own in names:
        if param is not None and param.startswith(chat):
            what, colon, rest = message.partition(": ")  # the rest may be the client's own text
            message = what.replace(chat, own) + colon + rest
            param = own + param.removeprefix(chat)
            break
    return RequestError(message, status=error.status, code=error.code, param=param)


def content_error(where: str, message: str) -> RequestError:
    """Return the error for a part of the conversation that a chat cannot hold."""
    return RequestError(f"{where} {message}", code="unsupported_content", param=where)


def value_error(where: str, message: str) -> RequestError:
    """Return the error for a field with a wrong value."""
    return RequestError(f"{where} {message}", code="invalid_value", param=where)
