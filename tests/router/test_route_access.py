"""Every route of the served document, with every kind of credential that opens nothing."""

from __future__ import annotations

import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

MINE = [{"role": "user", "content": "say mine"}]
BODIES: dict[str, dict[str, Any] | None] = {
    "/v1/chat/completions": {"messages": MINE},
    "/v1/completions": {"prompt": "say mine", "max_tokens": 8},
    "/v1/responses": {"input": "say mine"},
    "/v1/messages": {"messages": MINE, "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": MINE},
    "/v1/models": None,
    "/v1/models/{name}": None,
    "/tokenize": {"prompt": "say mine"},
    "/detokenize": {"tokens": [65, 66]},
    "/health": None,
    "/ping": None,
    "/version": None,
}
"""A body that each route accepts, but for its model; None for routes without a body."""
REFUSED = {
    "no key": ({}, "missing_api_key"),
    "an empty key": ({"authorization": "Bearer"}, "missing_api_key"),
    "another scheme": ({"authorization": "Basic alice"}, "missing_api_key"),
    "a wrong key": ({"authorization": "Bearer nobody"}, "invalid_api_key"),
    "a wrong key of Anthropic's clients": ({"x-api-key": "nobody"}, "invalid_api_key"),
    "a revoked key": ({"authorization": "Bearer carol"}, "invalid_api_key"),
    "a revoked key of Anthropic's clients": ({"x-api-key": "carol"}, "invalid_api_key"),
    "a wrong key and a valid one": (
        {"authorization": "Bearer nobody", "x-api-key": "alice"},
        "invalid_api_key",
    ),
}


def lines(*names: str) -> str:
    """Return a file of keys; the key of a tenant is its name."""
    return "".join(f"{name}:{hashlib.sha256(name.encode()).hexdigest()}\n" for name in names)


@pytest.fixture(scope="module")
def guarded(tokens: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A router with the keys of alice and bob; that of carol was valid before."""
    from tests.router.conftest import Running, wait_until

    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(lines("alice", "bob", "carol"))
    running = Running(tokens, api_keys=str(keys))
    try:
        running.open()
        carol = {"authorization": "Bearer carol"}
        assert running.http.get("/v1/models", headers=carol).status_code == 200
        fresh = pathlib.Path(f"{keys}.fresh")
        fresh.write_text(lines("alice", "bob"))
        fresh.replace(keys)
        wait_until(
            lambda: running.http.get("/v1/models", headers=carol).status_code == 401, within_s=30.0
        )
        yield running
    finally:
        running.close()


def routes(running: Any) -> list[tuple[str, str]]:
    """Return method and path of each operation of the served document."""
    document = running.http.get("/openapi.json", headers={"x-api-key": "alice"}).json()
    return [
        (method.upper(), path)
        for path, operations in document["paths"].items()
        for method in operations
    ]


def call(
    running: Any, method: str, path: str, headers: dict[str, str], name: str = "tiny"
) -> httpx.Response:
    body = BODIES[path]
    sent = None if body is None else {"model": name, **body}
    answer: httpx.Response = running.http.request(
        method, path.replace("{name}", name), headers=headers, json=sent
    )
    return answer


def test_each_route_of_the_document_has_a_body_here(guarded: Any) -> None:
    assert {path for _, path in routes(guarded)} == set(BODIES)


@pytest.mark.parametrize("credential", REFUSED)
def test_no_route_is_open_to(guarded: Any, credential: str) -> None:
    headers, code = REFUSED[credential]
    seen = len(guarded.controllers[0].seen)
    for method, path in [*routes(guarded), ("GET", "/openapi.json"), ("DELETE", "/nowhere")]:
        if path in BODIES:
            answer = call(guarded, method, path, headers)
        else:
            answer = guarded.http.request(method, path, headers=headers)
        assert answer.status_code == 401, (method, path)
        assert answer.json()["error"]["code"] == code, (method, path)
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert len(guarded.controllers[0].seen) == seen


@pytest.mark.parametrize("slash", ["/", "%2F", "%2f"])
def test_a_name_with_a_slash_is_looked_up_with_a_key_alone(guarded: Any, slash: str) -> None:
    path, alice = f"/v1/models/org{slash}model", {"x-api-key": "alice"}
    assert guarded.http.get(path).status_code == 401
    unknown = guarded.http.get(path, headers=alice)
    assert unknown.status_code == 404 and "`org/model`" in unknown.json()["error"]["message"]
    for encoded in (f"/v1{slash}models", "/v1/%6Dodels", f"/v1/models/..{slash}..{slash}health"):
        assert guarded.http.get(encoded).status_code == 401


def test_no_route_reads_a_key_of_endless_length(guarded: Any) -> None:
    for method, path in routes(guarded):
        answer = call(guarded, method, path, {"authorization": "Bearer " + "alice" * 20_000})
        assert answer.status_code == 431, (method, path)


@pytest.mark.parametrize(
    "headers", [{"authorization": "Bearer alice"}, {"x-api-key": "alice"}], ids=str
)
def test_every_route_is_open_to_a_valid_key(guarded: Any, headers: dict[str, str]) -> None:
    for method, path in routes(guarded):
        answer = call(guarded, method, path, headers)
        assert answer.status_code == 200, (method, path, answer.text)
    tenants = {submit.tenant for submit in guarded.controllers[0].seen}
    assert tenants == {"alice"}


def test_the_id_of_another_tenants_request_opens_and_stops_nothing(
    guarded: Any, eventually: Callable[..., None]
) -> None:
    controller = guarded.controllers[0]
    controller.burst = 1
    bob, alice = {"authorization": "Bearer bob"}, {"authorization": "Bearer alice"}
    body = {"model": "tiny", "prompt": "say " + "s" * 600, "max_tokens": 800, "stream": True}
    with guarded.http.stream("POST", "/v1/completions", headers=bob, json=body) as stream:
        parts = stream.iter_text()
        text = next(parts)
        theirs = stream.headers["x-medha-request-id"]
        assert theirs in text
        controller.emitting.clear()
        ids = (theirs, f"{theirs}.0", f"cmpl-{theirs}", f"resp_{theirs}", f"msg_{theirs}")
        for method, path in routes(guarded):
            accepted = BODIES[path]
            if accepted is None:
                continue
            for field, name in itertools.product(("id", "request_id", "previous_response_id"), ids):
                controller.emitting.set()
                answer = guarded.http.request(
                    method,
                    path,
                    headers={**alice, "x-request-id": theirs, "x-medha-request-id": theirs},
                    json={"model": "tiny", **accepted, field: name},
                )
                controller.emitting.clear()
                assert answer.headers["x-medha-request-id"] != theirs
                assert "sss" not in answer.text
                own = (path, field) == ("/v1/responses", "previous_response_id")
                assert answer.status_code == (400 if own else 200), (path, field, answer.text)
        for prefix, name in itertools.product(
            ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"), ids
        ):
            for method, end in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
                answer = guarded.http.request(method, f"{prefix}/{name}{end}", headers=alice)
                assert answer.status_code == 404
        for name in ids:
            answer = call(guarded, "GET", "/v1/models/{name}", alice, name)
            assert answer.status_code == 404
        controller.emitting.set()
        text += "".join(parts)
    *chunks, done = [event for event in text.split("\n\n") if event.startswith("data: ")]
    texts = [json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] for chunk in chunks]
    assert done == "data: [DONE]" and "".join(texts) == "s" * 600
    assert not any(name.startswith(theirs) for name in controller.aborted)
