"""Routes that describe the server itself: health, version and document; ids of requests."""

from __future__ import annotations

import importlib.metadata
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from medha.errors import RequestError
from medha_router.dialects.messages_body import read_messages_body
from medha_router.dialects.responses_body import read_responses
from medha_router.protocol import read_chat, read_completion

OTHERS: tuple[object, ...] = (False, True, 0, 1, "", "none", "x", [], [1], {}, {"x": 1})
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
        "/ping",
        "/version",
    }
    schemas = document["components"]["schemas"]
    assert references(document) <= {f"#/components/schemas/{name}" for name in schemas}
    assert schemas["ChatBody"]["properties"]["messages"]["type"] == "array"
    assert set(schemas["ChatBody"]["required"]) == {"messages"}


def test_the_document_names_what_is_refused_and_what_is_sent(served: Any) -> None:
    document = served.http.get("/openapi.json").json()
    schemas, paths = document["components"]["schemas"], document["paths"]
    assert schemas["ChatBody"]["properties"]["watermarking"] == {"enum": [None, False]}
    assert schemas["ResponsesBody"]["properties"]["n"] == {"enum": [None, 1]}
    assert schemas["MessagesBody"]["properties"]["response_format"] == {"enum": [None]}
    assert schemas["CustomTool"]["required"] == ["name", "input_schema"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        kinds = paths[path]["post"]["responses"]["200"]["content"]
        assert set(kinds) == {"application/json", "text/event-stream"}
    assert "content" not in paths["/health"]["get"]["responses"]["200"]


READERS: tuple[tuple[str, Callable[[bytes], Any], dict[str, Any]], ...] = (
    ("ChatBody", read_chat, CHAT),
    ("CompletionBody", read_completion, {"model": "tiny", "prompt": "a"}),
    ("ResponsesBody", read_responses, {"model": "tiny", "input": "a"}),
    ("MessagesBody", read_messages_body, CHAT | {"max_tokens": 4}),
)


@pytest.mark.parametrize(("kind", "read", "body"), READERS)
def test_the_document_lists_the_values_of_a_field_that_are_taken(
    served: Any, kind: str, read: Callable[[bytes], Any], body: dict[str, Any]
) -> None:
    schema = served.http.get("/openapi.json").json()["components"]["schemas"][kind]
    listed = {name: own["enum"] for name, own in schema["properties"].items() if "enum" in own}
    assert len(listed) > 20

    def taken(name: str, value: object) -> bool:
        try:
            read(json.dumps(body | {name: value}).encode())
        except RequestError:
            return False
        return True

    for name, values in listed.items():
        known = [json.dumps(value) for value in values]
        for value in (*values, *OTHERS):
            assert taken(name, value) == (json.dumps(value) in known), (name, value)


def test_a_field_that_is_null_is_absent_for_tokenize(served: Any) -> None:
    body = {"model": "tiny", "prompt": "abc", "messages": None}
    assert served.http.post("/tokenize", json=body).json()["count"] == 3
    both = served.http.post("/tokenize", json={**body, "messages": CHAT["messages"]})
    neither = served.http.post("/tokenize", json={**body, "prompt": None})
    assert both.status_code == neither.status_code == 400


@pytest.mark.parametrize("given", ["abc-123", "x" * 128])
def test_the_clients_request_id_is_echoed_and_logged(
    served: Any, given: str, caplog: pytest.LogCaptureFixture, eventually: Callable[..., None]
) -> None:
    caplog.set_level(logging.INFO, "medha.router")
    answer = served.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": given})
    assert answer.headers["x-request-id"] == given
    own = answer.headers["x-medha-request-id"]
    logged = {"request": own, "client_request": given}
    eventually(lambda: logged in [getattr(record, "fields", {}) for record in caplog.records], 30.0)


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
