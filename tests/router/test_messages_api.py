"""Anthropic's Messages API through Anthropic's client: blocks, tools, events, counts, refusals."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message

from medha.messages import Failed

CALLED = {"type": "tool_use", "id": "c", "name": "get_weather", "input": {}}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>'


@contextlib.contextmanager
def connected(running: Any, key: str = "none") -> Iterator[anthropic.Anthropic]:
    """Give Anthropic's client of a router."""
    with anthropic.Anthropic(
        base_url=running.router.url, api_key=key, max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture(scope="module")
def client(hermes: Any) -> Iterator[anthropic.Anthropic]:
    with connected(hermes) as connection:
        yield connection


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": f"say {text}"}]


def clearing(edit: str, keep: object = "all") -> dict[str, Any]:
    """Return a `context_management` with one edit."""
    return {"edits": [{"type": edit, "keep": keep}]}


def create(client: anthropic.Anthropic, text: str = "x", **fields: Any) -> Message:
    """Create a message, and check every field of it against the client's types."""
    given = {"model": "tiny", "messages": ask(text), "max_tokens": 400, **fields}
    message: Message = client.messages.create(**given)
    return Message.model_validate_json(message.to_json())


def shapes(message: Message) -> list[Any]:
    return [
        block.text if block.type == "text" else (block.type, block.name, block.input)
        for block in message.content
    ]


def test_a_message_holds_the_text_and_its_tokens(hermes: Any, client: anthropic.Anthropic) -> None:
    message = create(client, "héllo 🙂", system="Be brief.")
    assert shapes(message) == ["héllo 🙂"] and message.stop_reason == "end_turn"
    assert message.usage.output_tokens == len("héllo 🙂".encode()) + 1
    assert "system: Be brief." in hermes.prompt()
    assert message.id.startswith("msg_")


def test_blocks_become_the_messages_of_a_chat(hermes: Any, client: anthropic.Anthropic) -> None:
    create(
        client,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.1c0;"},
            {"type": "text", "text": "Be "},
            {"type": "text", "text": "kind."},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "one"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "two"}]},
            {"role": "user", "content": "say three"},
        ],
        cache_control={"type": "ephemeral"},
        metadata={"user_id": "u"},
    )
    assert hermes.prompt() == "system: Be kind.user: oneassistant: twouser: say three"


@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "abc", "max_tokens", None),
        ({"stop_sequences": ["zz", "de"]}, "abc", "stop_sequence", "de"),
        ({}, "abcdef", "end_turn", None),
        ({"max_tokens": 0}, None, "max_tokens", None),
    ],
)
def test_the_reason_of_a_stop_is_given(
    client: anthropic.Anthropic,
    fields: dict[str, Any],
    text: str | None,
    reason: str,
    sequence: str | None,
) -> None:
    message = create(client, "abcdef", **fields)
    assert shapes(message) == ([] if text is None else [text])
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    events = list(create_stream(client, "abcdef", **fields))
    delta = next(event for event in events if event.type == "message_delta").delta
    assert (delta.stop_reason, delta.stop_sequence) == (reason, sequence)


def create_stream(client: anthropic.Anthropic, text: str, **fields: Any) -> Any:
    given = {"model": "tiny", "messages": ask(text), "max_tokens": 400, **fields}
    return client.messages.create(**given, stream=True)


@pytest.mark.parametrize("text", [f"Let me see. {CALL}", f"{CALL}\n{CALL}", "no call", "é🙂"])
def test_events_build_what_a_whole_message_holds(client: anthropic.Anthropic, text: str) -> None:
    whole = create(client, text, tools=[WEATHER])
    with client.messages.stream(
        model="tiny", messages=ask(text), max_tokens=400, tools=[WEATHER]
    ) as stream:
        built = stream.get_final_message()
    assert shapes(built) == shapes(whole) and built.stop_reason == whole.stop_reason
    assert built.usage.output_tokens == whole.usage.output_tokens
    assert built.usage.input_tokens == whole.usage.input_tokens


def test_every_block_begins_before_its_parts_and_ends_after_them(
    client: anthropic.Anthropic,
) -> None:
    kinds = [event.type for event in create_stream(client, f"Yes. {CALL}", tools=[WEATHER])]
    steps = [kind for kind, last in zip(kinds, ["", *kinds], strict=False) if kind != last]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert steps == ["message_start", *block, *block, "message_delta", "message_stop"]


def test_a_call_goes_round(hermes: Any, client: anthropic.Anthropic) -> None:
    message = create(client, f"Let me see. {CALL}", tools=[WEATHER])
    assert message.stop_reason == "tool_use"
    text, call = message.content
    assert text.type == "text" and call.type == "tool_use" and call.input == {"city": "Zürich"}
    assert '"description": "Weather of a city"' in hermes.prompt()
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "say 21 degrees"}],
    }
    turns = [
        *ask("x"),
        {"role": "assistant", "content": [block.to_dict() for block in message.content]},
        {"role": "user", "content": [result]},
    ]
    final = create(client, messages=turns, tools=[WEATHER])
    assert shapes(final) == ["21 degrees"] and final.stop_reason == "end_turn"
    assert f"assistant: Let me see. {CALL}" in hermes.prompt()
    assert hermes.prompt().endswith("tool: say 21 degrees")
    failed = {**result, "content": "no such city", "is_error": True}
    turns[-1] = {"role": "user", "content": [failed, {"type": "text", "text": "say sorry"}]}
    assert shapes(create(client, messages=turns, tools=[WEATHER])) == ["sorry"]
    assert "tool: Error: no such cityuser: say sorry" in hermes.prompt()


def test_a_demanded_call_follows_a_grammar(hermes: Any, client: anthropic.Anthropic) -> None:
    demanded = '[{"name":"get_weather","parameters":{"city":"Ulm"}}]'
    parallel = {"type": "any", "disable_parallel_tool_use": True}
    message = create(client, demanded, tools=[WEATHER], tool_choice=parallel)
    assert shapes(message) == [("tool_use", "get_weather", {"city": "Ulm"})]
    assert '"maxItems":1,' in hermes.controllers[0].seen[-1].sampling.grammar
    named = {"type": "tool", "name": "get_weather"}
    message = create(client, '{"city":"Ulm"}', tools=[WEATHER], tool_choice=named)
    assert shapes(message) == [("tool_use", "get_weather", {"city": "Ulm"})]
    assert message.stop_reason == "tool_use"
    message = create(client, CALL, tools=[WEATHER], tool_choice={"type": "none"})
    assert shapes(message) == [CALL] and "tools:" in hermes.prompt()


def test_arguments_that_were_cut_are_text(client: anthropic.Anthropic) -> None:
    named = {"type": "tool", "name": "get_weather"}
    message = create(client, '{"city":"Ulm"}', tools=[WEATHER], tool_choice=named, max_tokens=5)
    assert shapes(message) == ['get_weather{"cit'] and message.stop_reason == "max_tokens"


def test_an_output_follows_the_schema_of_its_format(
    hermes: Any, client: anthropic.Anthropic
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    create(client, '{"a":1}', output_config={"format": {"type": "json_schema", "schema": schema}})
    assert '"integer"' in hermes.controllers[0].seen[-1].sampling.grammar


def test_tokens_are_counted_as_a_message_uses_them(client: anthropic.Anthropic) -> None:
    prompt: dict[str, Any] = {"messages": ask("a"), "system": "Be brief.", "tools": [WEATHER]}
    count = client.messages.count_tokens(model="tiny", **prompt).input_tokens
    assert create(client, **prompt).usage.input_tokens == count
    without = client.messages.count_tokens(model="tiny", messages=ask("a")).input_tokens
    assert count > without + len("Be brief.get_weather")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"container": "c"}, "container"),
        ({"context_management": clearing("clear_thinking_20251015", 1)}, "context_management"),
        ({"context_management": clearing("clear_tool_uses_20250919")}, "context_management"),
        ({"diagnostics": {"previous_message_id": "msg_1"}}, "diagnostics"),
        ({"mcp_servers": [{"name": "m"}]}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"n": 2}, "n"),
        ({"stop": ["x"]}, "stop"),
        ({"output_config": {"effort": "much"}}, "output_config.effort"),
        ({"output_format": {"type": "json_schema", "schema": {}}}, "output_format"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}},
            "output_config.format.schema",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**WEATHER, "name": "a" * 257}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*ask("x"), {"role": "assistant", "content": [CALLED]}]}, "messages[1]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(
    hermes: Any, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "tiny", "messages": ask("x"), "max_tokens": 10, **fields}
    answer = hermes.http.post("/v1/messages", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and param in error["message"]


def test_a_search_for_tools_goes_round(hermes: Any) -> None:
    """As Claude Code searches tools of plugins, whose names are long."""
    search = {"name": "ToolSearch", "input_schema": {"type": "object"}}
    long = {**WEATHER, "name": "mcp__plugin_" + "a" * 64, "defer_loading": True}
    reference = {"type": "tool_reference", "tool_name": long["name"]}
    called = {**CALLED, "name": "ToolSearch", "input": {}}
    result = {"type": "tool_result", "tool_use_id": CALLED["id"], "content": [reference]}
    answered = [{"type": "text", "text": "say ok"}, result]
    turns = [*ask("x"), {"role": "assistant", "content": [called]}]
    body = {
        "model": "tiny",
        "max_tokens": 10,
        "tools": [search, long],
        "messages": [*turns, {"role": "user", "content": answered}],
    }
    answer = hermes.http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"] == [{"type": "text", "text": "ok"}]
    assert hermes.prompt().endswith(f"tool: {long['name']}user: say ok")
    assert f'"name": "{long["name"]}"' in hermes.prompt()
    call = f'<tool_call>{{"name": "{long["name"]}", "arguments": {{}}}}</tool_call>'
    answer = hermes.http.post(
        "/v1/messages", json={**body, "max_tokens": 200, "messages": ask(call)}
    )
    assert answer.json()["content"][0]["name"] == long["name"]


@pytest.mark.parametrize("edits", [{}, {"edits": []}, clearing("clear_thinking_20251015")])
def test_a_context_that_stays_whole_may_be_asked_for(hermes: Any, edits: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": ask("x"), "context_management": edits}
    for path, more in (("", {"max_tokens": 10}), ("/count_tokens", {})):
        answer = hermes.http.post(f"/v1/messages{path}", json=body | more)
        assert answer.status_code == 200, answer.text


def test_a_message_without_one_before_it_may_name_none(hermes: Any) -> None:
    none_before = {"diagnostics": {"previous_message_id": None}}
    body = {"model": "tiny", "messages": ask("x"), "max_tokens": 10, **none_before}
    answer = hermes.http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text


def test_null_is_the_default_of_every_field(hermes: Any) -> None:
    names = hermes.http.get("/openapi.json").json()["components"]["schemas"]["MessagesBody"]
    given = {"model": "tiny", "messages": ask("a"), "max_tokens": 8}
    fields = {name: None for name in names["properties"] if name not in given}
    answer = hermes.http.post("/v1/messages", json={**fields, **given})
    assert answer.status_code == 200, answer.text


def test_errors_have_anthropics_form(
    running_with: Any, tmp_path: pathlib.Path, served: Any
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{hashlib.sha256(b'a-key').hexdigest()}\n")
    running = running_with(api_keys=str(keys), no_replica_timeout_s=0.2)
    with connected(running, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as no:
        create(client)
    assert no.value.type == "authentication_error" and no.value.request_id
    body = no.value.body
    assert isinstance(body, dict) and body["type"] == "error"
    assert body["request_id"] == no.value.request_id
    with connected(running, "a-key") as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            create(client, model="huge")
        assert missing.value.type == "not_found_error"
        with pytest.raises(anthropic.InternalServerError) as refused:
            create(client)
        assert refused.value.type == "overloaded_error"
    too_large = served.http.post("/v1/messages", content=b"x" * (2 << 20))
    assert too_large.json()["error"]["type"] == "request_too_large"
    wrong_method = served.http.get("/v1/messages")
    assert wrong_method.status_code == 405 and wrong_method.json()["type"] == "error"
    assert int(wrong_method.headers["content-length"]) == len(wrong_method.content)


def test_a_stream_that_breaks_says_so(running_with: Any) -> None:
    running = running_with()
    controller = running.open()
    with connected(running) as client:
        stream = create_stream(client, "x" * 200)
        assert next(stream).type == "message_start"
        controller.emitting.clear()
        for name in controller.running:
            controller.tell(Failed(name, "broken", "the engine is broken"))
        with pytest.raises(anthropic.APIStatusError) as broken:
            list(stream)
    assert broken.value.type == "api_error" and "could not finish" in broken.value.message


def test_a_long_body_is_read_off_the_loop_with_the_same_result(hermes: Any) -> None:
    body = {"model": "tiny", "messages": ask("yes"), "max_tokens": 10, "tools": [WEATHER]}
    for path, field in (("", "content"), ("/count_tokens", "input_tokens")):
        short, long = (
            hermes.http.post(f"/v1/messages{path}", json=sent).json()[field]
            for sent in (body, {**body, "padding": "x" * (80 << 10)})
        )
        assert short == long


def test_models_are_those_of_either_api(client: anthropic.Anthropic, hermes: Any) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny")
    assert (model.max_input_tokens, model.max_tokens) == (2048, 2048)
    assert client.models.retrieve("tiny") == model
    page = client.models.list()
    assert (page.has_more, page.first_id, page.last_id) == (False, "tiny", "tiny")
    (other,) = hermes.client.models.list()
    assert (other.id, other.object) == ("tiny", "model")
    assert model.created_at.timestamp() == other.created


def test_other_apis_keep_their_errors(hermes: Any) -> None:
    answer: httpx.Response = hermes.http.post("/v1/responses", json={"model": "tiny"})
    assert answer.status_code == 400 and set(json.loads(answer.content)) == {"error"}
    assert "request-id" not in answer.headers
