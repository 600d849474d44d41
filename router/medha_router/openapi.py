"""OpenAPI document of the public port: FastAPI's routes, msgspec's schemas of their bodies."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from medha_router.api_errors import ErrorObject
from medha_router.dialects.messages_body import CountTokensBody, MessagesBody
from medha_router.dialects.responses_body import ResponsesBody
from medha_router.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

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
_TOKENS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        _TEXTS,
        _TOKENS,
        {"type": "array", "minItems": 1, "items": _TOKENS},
    ]
}
_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
        },
    ]
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": _CONTENT,
        },
    },
}
_ITEM_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {
            "type": {"enum": ["input_text", "output_text"]},
            "text": {"type": "string"},
        },
    },
}
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
                    "type": {"const": "message"},
                    "role": {"enum": ["system", "developer", "user", "assistant"]},
                    "content": _ITEM_TEXT,
                },
            },
            {
                "type": "object",
                "required": ["type", "call_id", "name", "arguments"],
                "properties": {
                    "type": {"const": "function_call"},
                    "call_id": {"type": "string"},
                    "name": {"type": "string"},
                    "arguments": {"type": "string"},
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
                    "content": _CONTENT,
                    "is_error": {"type": "boolean"},
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
    TokenizeBody: {"messages": _MESSAGES, "prompt": _PROMPT},
}


def body_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route with a body of this kind."""
    schema = {"$ref": REFERENCE.format(name=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def complete(app: FastAPI) -> None:
    """Add the schemas of bodies and errors to the document that FastAPI has made of the routes."""
    _, schemas = msgspec.json.schema_components((*BODIES, ErrorObject), ref_template=REFERENCE)
    for kind, fields in RAW.items():
        schemas[kind.__name__]["properties"].update(fields)
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
