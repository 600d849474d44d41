"""`chat_template_kwargs`: further values for a model's chat template."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.router.conftest import Running

from medha.errors import RequestError
from medha_router.tokenization.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "2 + 2?"}]
TEMPLATE = b"{{ messages | length }} {{ mode | default('usual') }} {{ depth | default(0) + 1 }}"


def render(values: Any) -> str:
    raw = values if isinstance(values, bytes) else json.dumps(values).encode()
    return ChatTemplate(TEMPLATE, b'{"bos_token": "<s>"}').render(MESSAGES, values=raw)


def text_of(router: Running, **fields: Any) -> str:
    body = {"model": "tiny", "messages": MESSAGES, **fields}
    tokens = router.http.post("/tokenize", json=body).json()["tokens"]
    text: str = router.http.post("/detokenize", json={"model": "tiny", "tokens": tokens}).json()[
        "prompt"
    ]
    return text


def test_a_template_reads_the_values_that_a_request_gives() -> None:
    assert render({"mode": "terse", "depth": 2}) == "1 terse 3"


@pytest.mark.parametrize("values", [{}, b"null", {"unread": [1]}])
def test_values_that_a_template_does_not_read_change_nothing(values: Any) -> None:
    assert render(values) == "1 usual 1"


@pytest.mark.parametrize(
    "name", ["messages", "tools", "documents", "add_generation_prompt", "bos_token"]
)
def test_a_value_cannot_replace_what_the_server_sets(name: str) -> None:
    with pytest.raises(RequestError, match="is set by the server") as caught:
        render({name: "x"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("raw", [b"[]", b"7", b'"enable_thinking"', b"[" * 5_000])
def test_values_are_an_object(raw: bytes) -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        render(raw)


def test_a_value_that_the_template_cannot_use_is_the_clients_error() -> None:
    with pytest.raises(RequestError, match="refuses these messages"):
        render({"depth": "deep"})


def test_a_chat_without_thinking_has_another_prompt(hermes: Running) -> None:
    usual, without = (
        text_of(hermes, **fields)
        for fields in ({}, {"chat_template_kwargs": {"enable_thinking": False}})
    )
    assert without == usual + "<think></think>"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("chat/completions", lambda effort: {"reasoning_effort": effort}),
        ("responses", lambda effort: {"reasoning": {"effort": effort, "summary": "auto"}}),
        ("messages", lambda effort: {"output_config": {"effort": effort}}),
    ],
)
def test_a_template_reads_the_effort_of_a_request(running_with: Any, path: str, field: Any) -> None:
    router: Running = running_with()
    template = b"{{ reasoning_effort }},{{ enable_thinking }},{{ messages[0].content }}"
    router.open(template=template)
    prompt = {"input": "say a"} if path == "responses" else {"messages": MESSAGES}
    body = {"model": "tiny", **prompt} | ({"max_tokens": 4} if path == "messages" else {})
    for effort, values, thinks in (
        ("low", {}, True),
        ("none", {}, False),
        ("high", {"enable_thinking": False}, False),
    ):
        fields = body | field(effort) | {"chat_template_kwargs": values}
        response = router.http.post(f"/v1/{path}", json=fields)
        assert response.status_code == 200
        shown = "" if path == "messages" and not values else str(thinks)
        assert router.prompt().startswith(f"{effort},{shown},")
        if path == "responses":
            assert response.json()["reasoning"] == {"effort": effort, "summary": "auto"}
    response = router.http.post(f"/v1/{path}", json=body | field("much"))
    assert response.status_code == 400 and "effort" in response.json()["error"]["param"]
    response = router.http.post("/v1/completions", json={"prompt": "a", "reasoning_effort": "low"})
    assert response.json()["error"]["param"] == "reasoning_effort"


@pytest.mark.parametrize(
    ("path", "fields", "count"),
    [
        ("/v1/chat/completions", {}, "prompt_tokens"),
        ("/v1/messages", {"max_tokens": 4}, "input_tokens"),
    ],
)
def test_the_prompt_of_an_answer_has_the_values(
    hermes: Running, path: str, fields: dict[str, Any], count: str
) -> None:
    body = {"model": "tiny", "messages": MESSAGES, **fields}
    without = body | {"chat_template_kwargs": {"enable_thinking": False}}
    usual, other = (hermes.http.post(path, json=sent).json() for sent in (body, without))
    assert other["usage"][count] == usual["usage"][count] + len("<think></think>")


def test_counted_tokens_are_those_of_the_message(hermes: Running) -> None:
    body = {
        "model": "tiny",
        "messages": MESSAGES,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    counted = hermes.http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    answered = hermes.http.post("/v1/messages", json=body | {"max_tokens": 4}).json()
    assert counted == answered["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"messages": []}, "chat_template_kwargs.messages"),
        ([1], "chat_template_kwargs"),
        ({"mode": "x" * 20_000}, "chat_template_kwargs"),
    ],
)
def test_wrong_values_get_400(hermes: Running, values: Any, param: str) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "chat_template_kwargs": values}
    reply = hermes.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_a_completion_has_no_template_for_values(hermes: Running) -> None:
    body = {"model": "tiny", "prompt": "x", "chat_template_kwargs": {"enable_thinking": False}}
    reply = hermes.http.post("/v1/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "unsupported_parameter"
