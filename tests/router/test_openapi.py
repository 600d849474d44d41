"""Routes that describe the server itself: health, version and document; ids of requests."""

from __future__ import annotations

import importlib.metadata
import logging
from typing import Any

import pytest

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "say a"}]}


def test_health_and_version_answer(served: Any) -> None:
    assert served.http.get("/health").status_code == 200
    assert served.http.get("/version").json() == {"version": importlib.metadata.version("medha")}


def test_health_fails_while_the_router_drains(alone: Any) -> None:
    alone.router.router.service.drain()
    assert alone.http.get("/health").status_code == 503


def references(value: object) -> set[str]:
    """Return every `$ref` in a JSON value."""
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(entry) for entry in value.values()))
    if isinstance(value, list):
        return set().union(*(references(entry) for entry in value))
    return set()


def test_the_document_describes_every_route_and_body(served: Any) -> None:
    document = served.http.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/models/{name}",
        "/tokenize",
        "/detokenize",
        "/health",
        "/version",
    }
    schemas = document["components"]["schemas"]
    assert references(document) <= {f"#/components/schemas/{name}" for name in schemas}
    assert schemas["ChatBody"]["properties"]["messages"]["type"] == "array"
    assert set(schemas["ChatBody"]["required"]) == {"model", "messages"}


@pytest.mark.parametrize("given", ["abc-123", "x" * 128])
def test_the_clients_request_id_is_echoed_and_logged(
    served: Any, given: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "medha.router")
    answer = served.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": given})
    assert answer.headers["x-request-id"] == given
    own = answer.headers["x-medha-request-id"]
    fields = [getattr(record, "fields", {}) for record in caplog.records]
    assert {"request": own, "client_request": given} in fields


@pytest.mark.parametrize("given", [None, "x" * 129, "with\ttab", "é"])
def test_a_request_without_a_usable_id_gets_the_routers(served: Any, given: str | None) -> None:
    headers = {} if given is None else {"x-request-id": given.encode()}
    answer = served.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == answer.headers["x-medha-request-id"]


@pytest.mark.parametrize("path", ["/nowhere", "/v1/models", "/v1/models/huge", "/health"])
def test_every_response_carries_both_ids(served: Any, path: str) -> None:
    headers = served.http.get(path, headers={"x-request-id": "mine"}).headers
    assert headers["x-request-id"] == "mine" and len(headers["x-medha-request-id"]) == 24
