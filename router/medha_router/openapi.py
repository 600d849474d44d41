"""OpenAPI document of the public port: FastAPI's routes, msgspec's schemas of their bodies."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from medha_router.api_errors import ErrorObject
from medha_router.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
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
RAW: dict[str, dict[str, Any]] = {"messages": _MESSAGES, "prompt": _PROMPT}


def body_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route with a body of this kind."""
    schema = {"$ref": REFERENCE.format(name=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def complete(app: FastAPI) -> None:
    """Add the schemas of bodies and errors to the document that FastAPI has made of the routes."""
    _, schemas = msgspec.json.schema_components((*BODIES, ErrorObject), ref_template=REFERENCE)
    for kind in BODIES:
        fields = schemas[kind.__name__]["properties"]
        fields.update({name: schema for name, schema in RAW.items() if name in fields})
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
