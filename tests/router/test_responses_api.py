"""OpenAI's Responses API through OpenAI's client: texts, items, tools, events and refusals."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from medha.messages import Failed

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
    "strict": True,
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>'
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "name": "numbers", "schema": NUMBERS}


def validated(response: Response) -> Response:
    """Return the response after a check of every field against the client's types."""
    return Response.model_validate_json(response.to_json())


def test_a_text_becomes_a_message(served: Any) -> None:
    response = validated(
        served.client.responses.create(
            model="tiny", input="say héllo 🙂", instructions="Be brief.", metadata={"a": "b"}
        )
    )
    assert response.output_text == "héllo 🙂" and response.status == "completed"
    assert served.prompt() == "system: Be brief.\nuser: say héllo 🙂\n"
    assert response.instructions == "Be brief." and response.metadata == {"a": "b"}
    assert response.usage is not None
    assert response.usage.output_tokens == len("héllo 🙂".encode()) + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_items_become_the_messages_of_a_chat(served: Any) -> None:
    served.client.responses.create(
        model="tiny",
        input=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "one "}]},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "two", "annotations": []}],
            },
            {"role": "user", "content": "say three"},
        ],
    )
    assert served.prompt() == "developer: Be kind.\nuser: one \nassistant: two\nuser: say three\n"


def test_an_output_cut_by_its_limit_is_incomplete(served: Any) -> None:
    request: dict[str, Any] = {"model": "tiny", "input": "say abcdef", "max_output_tokens": 3}
    response = validated(served.client.responses.create(**request))
    assert (response.status, response.output_text) == ("incomplete", "abc")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    events = list(served.client.responses.create(**request, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output[-1].status == "incomplete"


@pytest.mark.parametrize("text", [f"Let me see. {CALL}", f"{CALL}\n{CALL}", "no call", "é🙂"])
def test_events_build_what_a_whole_response_holds(hermes: Any, text: str) -> None:
    request: dict[str, Any] = {"model": "tiny", "input": f"say {text}", "tools": [WEATHER]}
    whole = hermes.client.responses.create(**request)
    events = list(hermes.client.responses.create(**request, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    with hermes.client.responses.stream(**request) as stream:  # the client builds it from events
        built = stream.get_final_response()

    def shapes(response: Any) -> list[Any]:
        return [
            (item.type, item.content[0].text)
            if item.type == "message"
            else (item.type, item.name, item.arguments)
            for item in response.output
        ]

    assert shapes(built) == shapes(whole) == shapes(events[-1].response)
    assert validated(events[-1].response).usage == whole.usage


def test_every_item_begins_before_its_parts_and_ends_after_them(hermes: Any) -> None:
    events = hermes.client.responses.create(
        model="tiny", input=f"say Yes. {CALL}", tools=[WEATHER], stream=True
    )
    kinds = [event.type.removeprefix("response.") for event in events]
    steps = [kind for kind, last in zip(kinds, ["", *kinds], strict=False) if kind != last]
    assert steps == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_a_call_goes_round(hermes: Any) -> None:
    create = hermes.client.responses.create
    question = {"role": "user", "content": f"say {CALL}"}
    response = validated(create(model="tiny", input=[question], tools=[WEATHER]))
    (call,) = response.output
    assert call.type == "function_call" and call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Zürich"}
    assert '"description": "Weather of a city"' in hermes.prompt()
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": "say 21 degrees",
    }
    final = create(model="tiny", input=[question, call.to_dict(), result], tools=[WEATHER])
    assert final.output_text == "21 degrees"
    assert f"assistant: {CALL}" in hermes.prompt() and "tool: say 21 degrees" in hermes.prompt()


def test_a_function_in_a_namespace_goes_round(hermes: Any) -> None:
    """As Codex offers the tools of its MCP servers."""
    space = {"type": "namespace", "name": "maps", "description": "Maps", "tools": [WEATHER]}
    named = CALL.replace("get_weather", "maps__get_weather")
    request: dict[str, Any] = {
        "model": "tiny",
        "input": [{"role": "user", "content": f"say {named}"}],
        "tools": [space, {"type": "web_search", "external_web_access": False}],
    }
    response = validated(hermes.client.responses.create(**request))
    (call,) = json.loads(response.to_json())["output"]
    assert (call["namespace"], call["name"]) == ("maps", "get_weather")
    assert [tool.type for tool in response.tools] == ["namespace"]
    assert '"maps__get_weather"' in hermes.prompt() and "web_search" not in hermes.prompt()
    events = list(hermes.client.responses.create(**request, stream=True))
    (done,) = (event for event in events if event.type == "response.output_item.done")
    assert (done.item.namespace, done.item.name) == ("maps", "get_weather")
    (done,) = (event for event in events if event.type.endswith("arguments.done"))
    assert done.name == "get_weather"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "say 21"}
    request["input"] += [call, result]
    assert hermes.client.responses.create(**request).output_text == "21"
    assert f"assistant: {named}" in hermes.prompt()


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"service_tier": "flex"},
        {"text": {"verbosity": "low"}},
        {"reasoning": {"effort": "low", "summary": "detailed"}},
        {"max_tool_calls": 3},
        {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]},
        {"tools": [{"type": "web_search"}, {"type": "mcp", "server_label": "a"}]},
        {"tools": [{**WEATHER, "defer_loading": True, "output_schema": {"type": "object"}}]},
    ],
    ids=str,
)
def test_wishes_that_no_text_model_can_fulfil_change_nothing(
    hermes: Any, fields: dict[str, Any]
) -> None:
    response = validated(hermes.client.responses.create(model="tiny", input="say a", **fields))
    assert response.output_text == "a" and response.to_dict()["store"] is False


def test_log_probabilities_stand_in_the_parts_of_a_text(hermes: Any) -> None:
    request: dict[str, Any] = {
        "model": "tiny",
        "input": f"say hé! {CALL}",
        "tools": [WEATHER],
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    response = validated(hermes.client.responses.create(**request))
    shown = json.loads(response.to_json())["output"][0]["content"][0]["logprobs"]
    assert bytes(byte for entry in shown for byte in entry["bytes"]).startswith("hé!".encode())
    assert all(len(entry["top_logprobs"]) == 2 for entry in shown)
    events = list(hermes.client.responses.create(**request, stream=True))
    parts = [event for event in events if event.type == "response.output_text.delta"]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    streamed = [entry.logprob for part in parts for entry in part.logprobs]
    assert streamed == [entry.logprob for entry in done.logprobs] and len(streamed) == len(shown)
    plain = hermes.client.responses.create(model="tiny", input="say a", top_logprobs=2)
    assert "logprobs" not in plain.output[0].content[0].to_dict()


def test_a_conversation_beyond_the_context_is_cut_if_its_client_says_so(served: Any) -> None:
    request: dict[str, Any] = {"model": "tiny", "input": "a" * 5000 + "say b"}
    with pytest.raises(openai.BadRequestError):
        served.client.responses.create(**request, max_output_tokens=8)
    response = served.client.responses.create(**request, max_output_tokens=8, truncation="auto")
    assert response.output_text == "b" and response.truncation == "auto"


def test_a_named_tool_gets_its_arguments(hermes: Any) -> None:
    response = validated(
        hermes.client.responses.create(
            model="tiny",
            input='say {"city":"Ulm"}',
            tools=[WEATHER],
            tool_choice={"type": "function", "name": "get_weather"},
        )
    )
    (call,) = response.output
    assert call.type == "function_call" and call.arguments == '{"city":"Ulm"}'
    assert '"city"' in hermes.controllers[0].seen[-1].sampling.grammar


def test_a_format_is_the_grammar_of_the_output(served: Any) -> None:
    response = served.client.responses.create(
        model="tiny", input='say {"a":1}', text={"format": FORMAT}
    )
    assert '"integer"' in served.controllers[0].seen[-1].sampling.grammar
    assert json.loads(response.to_json())["text"]["format"]["type"] == "json_schema"
    validated(response)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["everything"]}, "include"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"truncation": "some"}, "truncation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.incl"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}},
            "text.format.schema",
        ),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        (
            {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]},
            "tools[0].tools[0].name",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}},
            "tool_choice.name",
        ),
        ({"input": []}, "input"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(
    hermes: Any, fields: dict[str, Any], param: str
) -> None:
    given: dict[str, Any] = {"input": "x", **fields}
    with pytest.raises(openai.BadRequestError) as refused:
        hermes.client.responses.create(model="tiny", extra_body=given, input="")
    assert str(refused.value.param).startswith(param) and refused.value.code
    assert param in refused.value.message


def test_null_is_the_default_of_every_field(served: Any) -> None:
    names = served.http.get("/openapi.json").json()["components"]["schemas"]["ResponsesBody"]
    fields = {name: None for name in names["properties"] if name not in ("model", "input")}
    answer = served.http.post(
        "/v1/responses",
        json={**fields, "model": "tiny", "input": "say a", "text": {"format": None}},
    )
    assert answer.status_code == 200, answer.text


def test_a_refusal_of_state_says_what_to_do_instead(served: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="send the whole conversation as input"):
        served.client.responses.create(model="tiny", input="x", previous_response_id="resp_1")


def test_a_stream_that_breaks_says_so(running_with: Any) -> None:
    running = running_with()
    controller = running.open()
    controller.burst = 1
    stream = running.client.responses.create(
        model="tiny", input="say " + "x" * 200, max_output_tokens=500, stream=True
    )
    next(stream)
    controller.emitting.clear()
    for name in controller.running:
        controller.tell(Failed(name, "broken", "the engine is broken"))
    with pytest.raises(openai.APIError, match="could not finish"):
        list(stream)


def test_a_long_body_is_read_off_the_loop_with_the_same_result(served: Any) -> None:
    text = "word " * 300
    body = {"model": "tiny", "input": text + "say yes", "metadata": {"k": "v"}}
    padded = {**body, "user": "u", "padding": "x" * (80 << 10)}
    short, long = (
        served.http.post("/v1/responses", json=sent).json()["output"][0]["content"]
        for sent in (body, padded)
    )
    assert short == long == [{"type": "output_text", "text": "yes", "annotations": []}]
