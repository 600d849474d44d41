"""OpenAPI document of the public port: FastAPI's routes, msgspec's schemas of their bodies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI

from medha_router.api_errors import ErrorObject
from medha_router.dialects import messages_body, responses_body
from medha_router.dialects.conversation import ROLES, TEXT_PARTS
from medha_router.dialects.messages_body import CountTokensBody, MessagesBody
from medha_router.dialects.responses_body import ResponsesBody
from medha_router.protocol import (
    CHAT_UNSUPPORTED,
    COMPLETION_UNSUPPORTED,
    NEUTRAL,
    OF_COMPLETIONS,
    TOKENIZE_UNSUPPORTED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from medha_router.structured.sources import ResponseFormat, StructuredOutputs
from medha_router.structured.tools import TOOL_NAME, NamedChoice, Tool

BODIES = (
    ChatBody,
    CompletionBody,
    ResponsesBody,
    MessagesBody,
    CountTokensBody,
    TokenizeBody,
    DetokenizeBody,
)
REFERENCE = "#/components/schemas/{name}"

# Fields that `protocol` leaves as raw JSON for a tokenizer process.
_TEXTS = {"type": "array", "minItems": 1, "items": {"type": "string"}}
_MAYBE_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TOKENS = _MAYBE_TOKENS | {"minItems": 1}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        _TEXTS,
        _TOKENS,
        {"type": "array", "minItems": 1, "items": _TOKENS},
    ]
}
_TOKENIZED = {
    "anyOf": [*_PROMPT["anyOf"], {"type": "array", "minItems": 1, "items": _MAYBE_TOKENS}]
}
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": [*TEXT_PARTS]}, "text": {"type": "string"}},
}
_REFUSAL_PART = {
    "type": "object",
    "required": ["type", "refusal"],
    "properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}},
}
_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {"anyOf": [{"type": "string"}, _TEXT_PART, _REFUSAL_PART]},
        },
    ]
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            {
                "type": "object",
                "required": ["role", "content"],
                "properties": {"role": {"enum": [*ROLES]}, "content": _CONTENT},
            },
            {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"const": "assistant"},
                    "content": {"anyOf": [*_CONTENT["anyOf"], {"type": "null"}]},
                },
            },
        ]
    },
}
_ITEM_PARTS = {"type": "array", "items": {"anyOf": [_TEXT_PART, _REFUSAL_PART]}}
_ITEM_TEXT = {"anyOf": [{"type": "string"}, _ITEM_PARTS]}
_ITEMS = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "type": {"enum": ["message", "", None]},
                    "role": {"enum": ["system", "developer", "user", "assistant"]},
                    "content": _ITEM_TEXT,
                },
            },
            {
                "type": "object",
                "required": ["type", "call_id", "name"],
                "properties": {
                    "type": {"const": "function_call"},
                    "call_id": {"type": "string"},
                    "name": {"type": "string"},
                    "arguments": {"type": ["string", "null"]},
                },
            },
            {
                "type": "object",
                "required": ["type", "call_id", "output"],
                "properties": {
                    "type": {"const": "function_call_output"},
                    "call_id": {"type": "string"},
                    "output": _ITEM_TEXT,
                },
            },
        ]
    },
}
_RESULT_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    },
}
_BLOCKS = {
    "type": "array",
    "items": {
        "anyOf": [
            {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
            {
                "type": "object",
                "required": ["type", "id", "name", "input"],
                "properties": {
                    "type": {"const": "tool_use"},
                    "id": {"type": "string"},
                    "name": {"type": "string"},
                    "input": {"type": "object"},
                },
            },
            {
                "type": "object",
                "required": ["type", "tool_use_id"],
                "properties": {
                    "type": {"const": "tool_result"},
                    "tool_use_id": {"type": "string"},
                    "content": {"anyOf": [{"type": "string"}, _RESULT_PARTS, {"type": "null"}]},
                    "is_error": {"type": ["boolean", "null"]},
                },
            },
        ]
    },
}
_TURNS = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["user", "assistant", "system"]},
            "content": {"anyOf": [{"type": "string"}, _BLOCKS]},
        },
    },
}
RAW: dict[type[msgspec.Struct], dict[str, dict[str, Any]]] = {
    ChatBody: {"messages": _MESSAGES},
    CompletionBody: {"prompt": _PROMPT},
    ResponsesBody: {"input": {"anyOf": [{"type": "string"}, _ITEMS]}},
    MessagesBody: {"messages": _TURNS},
    CountTokensBody: {"messages": _TURNS},
    TokenizeBody: {"messages": _MESSAGES, "prompt": _TOKENIZED},
}

# Fields that are decoded after the body that holds them.
_TEXT = Annotated[str, msgspec.Meta(min_length=1)]
_GRAMMARS: dict[str, Any] = {
    "response_format": ResponseFormat | None,
    "structured_outputs": StructuredOutputs | None,
    "guided_json": str | dict[str, Any] | None,
    "guided_regex": str | None,
    "guided_choice": Annotated[list[_TEXT], msgspec.Meta(min_length=1)] | None,
    "guided_grammar": str | None,
}
_ALWAYS = Literal["none", "auto", "required"]
_TEMPLATE: dict[str, Any] = {"chat_template_kwargs": dict[str, Any] | None}
DECODED_LATER: dict[type[msgspec.Struct], dict[str, Any]] = {
    TokenizeBody: _TEMPLATE | {"tools": list[Tool] | None},
    ChatBody: _GRAMMARS
    | _TEMPLATE
    | {"tools": list[Tool] | None, "tool_choice": _ALWAYS | NamedChoice | None},
    CompletionBody: _GRAMMARS,
    ResponsesBody: _GRAMMARS
    | _TEMPLATE
    | {
        "tools": list[responses_body.FunctionTool] | None,
        "tool_choice": _ALWAYS | responses_body.NamedFunction | None,
    },
    MessagesBody: _GRAMMARS
    | _TEMPLATE
    | {
        "tools": list[messages_body.CustomTool] | None,
        "tool_choice": messages_body.ToolChoice | None,
    },
    CountTokensBody: _TEMPLATE
    | {
        "tools": list[messages_body.CustomTool] | None,
        "tool_choice": messages_body.ToolChoice | None,
    },
    responses_body.TextConfig: {"format": responses_body.TextFormat | None},
}


def _of_others(kind: type[msgspec.Struct], names: Iterable[str]) -> dict[str, tuple[object, ...]]:
    """Return the value, if any, that changes nothing of fields that only other APIs have."""
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    values: dict[str, tuple[object, ...]] = {}
    for name in names:
        value = NEUTRAL.get(name, False)
        try:
            msgspec.convert(value, types[name])
        except msgspec.ValidationError:
            values[name] = ()
        else:
            values[name] = (value,)
    return values


ALLOWED: dict[type[msgspec.Struct], dict[str, tuple[object, ...]]] = {
    ChatBody: CHAT_UNSUPPORTED | OF_COMPLETIONS,
    CompletionBody: COMPLETION_UNSUPPORTED | {"best_of": OF_COMPLETIONS["best_of"]},
    TokenizeBody: TOKENIZE_UNSUPPORTED,
    ResponsesBody: CHAT_UNSUPPORTED
    | responses_body.UNSUPPORTED
    | _of_others(ResponsesBody, responses_body.INSTEAD),
    MessagesBody: CHAT_UNSUPPORTED
    | messages_body.UNSUPPORTED
    | _of_others(MessagesBody, messages_body.INSTEAD),
    CountTokensBody: {name: messages_body.UNSUPPORTED[name] for name in messages_body.COUNTED},
    responses_body.ResponseStreamOptions: {"include_obfuscation": (False,)},
    messages_body.CustomTool: {"type": ("custom",)},
    StructuredOutputs: {
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
    },
}
"""The values of a field besides null; all others are refused."""
_TOOL_NAME = {"type": "string", "pattern": TOOL_NAME}
DEMANDED: dict[type[msgspec.Struct], dict[str, dict[str, Any]]] = {
    responses_body.NamedFunction: {"type": {"const": "function"}, "name": _TOOL_NAME},
    messages_body.CustomTool: {"name": _TOOL_NAME, "input_schema": {"type": "object"}},
}
"""Fields that must be given, though a missing one has an error of its own."""


def body_of(kind: type[msgspec.Struct], *, streams: bool = False) -> dict[str, Any]:
    """Return the `openapi_extra` of a route with a body of this kind."""
    schema = {"$ref": REFERENCE.format(name=kind.__name__)}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    if not streams:
        return {"requestBody": body}
    events: dict[str, Any] = {
        "content": {"text/event-stream": {}}
    }  # a schema would be of each event
    return {"requestBody": body, "responses": {"200": events}}


def complete(app: FastAPI) -> None:
    """Add the schemas of bodies and errors to the document that FastAPI has made of the routes."""
    later = [kind for fields in DECODED_LATER.values() for kind in fields.values()]
    shown, schemas = msgspec.json.schema_components(
        (*later, *BODIES, ErrorObject), ref_template=REFERENCE
    )
    decoded = iter(shown)
    for kind, names in DECODED_LATER.items():
        schemas[kind.__name__]["properties"].update({name: next(decoded) for name in names})
    for kind, raw in RAW.items():
        schemas[kind.__name__]["properties"].update(
            {name: schema if kind is not TokenizeBody else {} for name, schema in raw.items()}
        )
    for kind, values in ALLOWED.items():
        enums = {name: {"enum": [None, *allowed]} for name, allowed in values.items()}
        schemas[kind.__name__]["properties"].update(enums)
    for kind, demanded in DEMANDED.items():
        schemas[kind.__name__]["properties"].update(demanded)
        schemas[kind.__name__]["required"] = [*demanded]
    schemas[TokenizeBody.__name__]["oneOf"] = [
        {
            "required": [given],
            "properties": {given: RAW[TokenizeBody][given], other: {"type": "null"}},
        }
        for given, other in (("prompt", "messages"), ("messages", "prompt"))
    ]
    document = app.openapi()
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)


def errors() -> dict[int | str, dict[str, Any]]:
    """Return the error responses that every route may give."""
    schema = {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"$ref": REFERENCE.format(name="ErrorObject")}},
    }
    response = {"description": "error", "content": {"application/json": {"schema": schema}}}
    return {"4XX": response, "5XX": response}
