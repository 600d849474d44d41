"""Tools through OpenAI's client: offered, called by the model, answered, and demanded."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import msgspec
import openai
import pydantic
import pytest
from openai.lib._parsing._completions import type_to_response_format_param
from tests.router.conftest import HERMES, SHAPE, byte_level_tokenizer

from medha.errors import RequestError
from medha.grammar_limits import MAX_SCHEMA_DEPTH
from medha_router.dialects.readers import READERS
from medha_router.structured.checker import grammar_of
from medha_router.structured.tools import Tools, read_tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>'


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": f"say {text}"}]


def gathered(chunks: Any) -> tuple[str, list[dict[str, str]], str]:
    """Join the deltas of a stream as OpenAI's documentation does."""
    content, finish = "", ""
    calls: list[dict[str, str]] = []
    for chunk in chunks:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or []:
            if part.index == len(calls):
                assert part.type == "function"
                calls.append({"id": part.id, "name": part.function.name, "arguments": ""})
            calls[part.index]["arguments"] += part.function.arguments or ""
        finish = choice.finish_reason or finish
    return content, calls, finish


@pytest.mark.parametrize("special", [False, True])
def test_an_answer_follows_its_format_unless_it_calls_tools(
    running_with: Any, special: bool
) -> None:
    """Agents send both with each request: the tools, and the format of their last answer."""
    running = running_with()
    tokenizer = byte_level_tokenizer(*(("<tool_call>",) if special else ()))
    shape = msgspec.structs.replace(SHAPE, vocab=260)
    running.open(template=HERMES, tokenizer=tokenizer, shape=shape)
    create, answer = running.client.chat.completions.create, '{"ok": true}'
    fields: dict[str, Any] = {
        "tools": [WEATHER],
        "response_format": pydantic_format(),
    }
    for text, name in ((CALL, "get_weather"), (answer, None)):
        choice = create(model="tiny", messages=ask(text), **fields).choices[0]
        called = [call.function.name for call in choice.message.tool_calls or ()]
        assert called == ([name] if name else []) and choice.message.content == (
            None if name else answer
        )
    library = llguidance.LLTokenizer(tokenizer.decode())
    grammar = running.controllers[0].seen[-1].sampling.grammar
    for text, fits in ((answer, True), (CALL, True), ("Let me see. " + CALL, False)):
        matcher = llguidance.LLMatcher(library, grammar, log_level=0)
        tokens = library.tokenize_str(text)
        assert (matcher.try_consume_tokens(tokens) == len(tokens)) is fits
    create(model="tiny", messages=ask("x"), **fields, tool_choice="required")
    demanded = running.controllers[0].seen[-1].sampling.grammar
    del fields["response_format"]
    create(model="tiny", messages=ask("x"), **fields, tool_choice="required")
    assert running.controllers[0].seen[-1].sampling.grammar == demanded != grammar


def test_llama_3_may_call_without_a_mark_beside_a_format(running_with: Any) -> None:
    running = running_with()
    tokenizer = byte_level_tokenizer("<|python_tag|>")
    template = HERMES.replace(b"<tool_call>", b"ipython")
    shape = msgspec.structs.replace(SHAPE, vocab=260)
    running.open(template=template, tokenizer=tokenizer, shape=shape)
    call = '{"name": "get_weather", "parameters": {"city": "Rome"}}'
    fields: dict[str, Any] = {"tools": [WEATHER], "response_format": pydantic_format()}
    choice = running.client.chat.completions.create(model="tiny", messages=ask(call), **fields)
    (called,) = choice.choices[0].message.tool_calls
    assert (called.function.name, called.function.arguments) == ("get_weather", '{"city": "Rome"}')
    library = llguidance.LLTokenizer(tokenizer.decode())
    grammar = running.controllers[0].seen[-1].sampling.grammar
    for text, fits in (
        (call, True),
        ('{"ok": true}', True),
        ("<|python_tag|>" + call + "; " + call, True),
        ('{"type": "function", ' + call[1:], True),
        (call.replace("weather", "time"), False),
        ("Let me see.", False),
    ):
        matcher = llguidance.LLMatcher(library, grammar, log_level=0)
        tokens = library.tokenize_str(text)
        assert (matcher.try_consume_tokens(tokens) == len(tokens)) is fits, text


def pydantic_format() -> Any:
    class Answer(pydantic.BaseModel):
        ok: bool

    return type_to_response_format_param(Answer)


def test_a_call_goes_round(hermes: Any) -> None:
    create = hermes.client.chat.completions.create
    answer = create(model="tiny", messages=ask(f"Let me see. {CALL}"), tools=[WEATHER, TIME])
    message, finish = answer.choices[0].message, answer.choices[0].finish_reason
    assert finish == "tool_calls" and message.content == "Let me see. "
    (call,) = message.tool_calls
    assert call.function.name == "get_weather" and len(call.id) == 9 and call.id.isalnum()
    assert json.loads(call.function.arguments) == {"city": "Zürich"}
    assert '"description": "Weather of a city"' in hermes.prompt()
    result = {"role": "tool", "tool_call_id": call.id, "content": "say 21 degrees"}
    messages = [*ask("x"), message.to_dict(), result]
    final = create(model="tiny", messages=messages, tools=[WEATHER, TIME])
    assert final.choices[0].message.content == "21 degrees"
    assert final.choices[0].message.tool_calls is None and final.choices[0].finish_reason == "stop"
    assert f"assistant: Let me see. \n{CALL}".replace(" \n", " ") in hermes.prompt()
    assert "tool: say 21 degrees" in hermes.prompt()


@pytest.mark.parametrize(
    "text", [f"Let me see. {CALL}", f"{CALL}\n{CALL}", "nothing < to call", "<tool_call>broken"]
)
def test_a_stream_of_calls_is_the_whole_answer_in_parts(hermes: Any, text: str) -> None:
    create = hermes.client.chat.completions.create
    request = {"model": "tiny", "messages": ask(text), "tools": [WEATHER]}
    choice = create(**request).choices[0]
    content, calls, finish = gathered(create(**request, stream=True))
    assert content == (choice.message.content or "") and finish == choice.finish_reason
    expected = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
    assert [(call["name"], call["arguments"]) for call in calls] == expected


@pytest.mark.parametrize("call", [CALL, f"{CALL} {CALL}\n{CALL}"])
def test_without_parallel_calls_the_first_counts(hermes: Any, call: str) -> None:
    request: dict[str, Any] = {"model": "tiny", "messages": ask(f"Hm. {call}"), "tools": [WEATHER]}
    request["parallel_tool_calls"] = False
    create = hermes.client.chat.completions.create
    choice = create(**request).choices[0]
    assert len(choice.message.tool_calls) == 1 and choice.finish_reason == "tool_calls"
    content, calls, finish = gathered(create(**request, stream=True))
    assert content == choice.message.content == "Hm. " and finish == "tool_calls"
    arguments = choice.message.tool_calls[0].function.arguments
    assert [call["arguments"] for call in calls] == [arguments]
    tool: Any = {"type": "function", "name": "get_weather"}
    answer = hermes.client.responses.create(
        model="tiny", input=f"say {call}", tools=[tool], parallel_tool_calls=False
    )
    assert [item.type for item in answer.output] == ["function_call"]


def test_arguments_are_streamed_as_they_are_written(hermes: Any) -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "' + "x" * 60 + '"}}'
    stream = hermes.client.chat.completions.create(
        model="tiny", messages=ask(text), tools=[WEATHER], stream=True
    )
    parts = [part for chunk in stream for part in chunk.choices[0].delta.tool_calls or []]
    assert len(parts) > 5 and all(len(part.function.arguments) <= 16 for part in parts)


def test_a_demanded_call_follows_a_grammar(hermes: Any) -> None:
    create = hermes.client.chat.completions.create
    demanded = '[{"name":"get_time","parameters":{}}]'
    answer = create(
        model="tiny", messages=ask(demanded), tools=[WEATHER, TIME], tool_choice="required"
    ).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    assert answer.message.tool_calls[0].function.name == "get_time"
    grammar = hermes.controllers[0].seen[-1].sampling.grammar
    assert '"const":"get_weather"' in grammar and '"maxItems":32' in grammar
    create(
        model="tiny",
        messages=ask(demanded),
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    assert '"maxItems":1,' in hermes.controllers[0].seen[-1].sampling.grammar


def an_object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a schema of an object with exactly these properties."""
    required = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


def demand(*parameters: dict[str, Any]) -> Tools | None:
    """Read a demand of a call of the tools f, g, … with these parameters."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in zip("fgh", parameters, strict=False)
    ]
    raw = msgspec.Raw(json.dumps(tools).encode())
    return read_tools(raw, msgspec.Raw(b'"required"'), None)


def accepts(tokenizer: bytes, kind: str, schema: str, output: Any) -> bool:
    """Return true if the grammar of a schema accepts a whole output."""
    tokens = llguidance.LLTokenizer(tokenizer.decode())
    matcher = llguidance.LLMatcher(tokens, grammar_of(kind, schema), log_level=0)
    text = json.dumps(output, separators=(",", ":"))
    return matcher.consume_tokens(tokens.tokenize_str(text)) and matcher.is_accepting()


def calls_accepted(tokenizer: bytes, demanded: Tools | None, name: str, arguments: Any) -> bool:
    assert demanded is not None and demanded.grammar is not None
    call = {"name": name, "parameters": arguments}
    return accepts(tokenizer, demanded.grammar.kind, demanded.grammar.text, [call])


REF_A = {"a": {"$ref": "#/$defs/A"}}
NULLABLE = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
DRAFT = "http://json-schema.org/draft-{}/schema#"
REFERENCES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "defs": (an_object(REF_A, **{"$defs": {"A": {"const": 1}}}), {"a": 1}, {"a": 2}),
    "root": (an_object({"n": NULLABLE}), {"n": {"n": None}}, {"n": []}),
    "draft 4": (
        an_object(
            {"a": {"$ref": "#/definitions/A"}},
            **{"$schema": DRAFT.format("04"), "definitions": {"A": {"enum": [1]}}},
        ),
        {"a": 1},
        {"a": 2},
    ),
    "draft 7, reference at the root": (
        {
            "$schema": DRAFT.format("07"),
            "$ref": "#/definitions/F",
            "definitions": {"F": an_object({"n": NULLABLE})},
        },
        {"n": {"n": None}},
        {"n": {"n": 1}},
    ),
    "reference beside allOf": (
        {
            "$ref": "#/allOf/0/$defs/A",
            "allOf": [{"required": ["a"], "$defs": {"A": {"type": "object"}}}],
        },
        {"a": 1},
        {},
    ),
    "escapes": (
        an_object({"a": {"$ref": "#/$defs/A~1B%25"}}, **{"$defs": {"A/B%": {"const": 1}}}),
        {"a": 1},
        {"a": 2},
    ),
    "anchor": (
        an_object({"a": {"$ref": "#k"}}, **{"$defs": {"A": {"$anchor": "k", "const": 1}}}),
        {"a": 1},
        {"a": 2},
    ),
    "own id": (
        an_object(
            {"a": {"$ref": "https://x.y/z.json#/$defs/A"}},
            **{"$id": "https://x.y/z.json", "$defs": {"A": {"const": 1}}},
        ),
        {"a": 1},
        {"a": 2},
    ),
    "own relative id": (
        an_object(REF_A, **{"$id": "z.json", "$defs": {"A": {"const": 1}}}),
        {"a": 1},
        {"a": 2},
    ),
    "id without a base": (
        an_object(
            REF_A, **{"$schema": DRAFT.format("07"), "$id": "#f", "$defs": {"A": {"const": 1}}}
        ),
        {"a": 1},
        {"a": 2},
    ),
    "schema with an id inside": (
        an_object({"a": {"$ref": "in"}}, **{"$defs": {"A": {"$id": "in", "const": 1}}}),
        {"a": 1},
        {"a": 2},
    ),
    "property $ref": (
        an_object({"$ref": {"enum": ["#/$defs/A"]}, "$id": {"type": "string"}}),
        {"$ref": "#/$defs/A", "$id": "x"},
        {"$ref": "#/properties", "$id": "x"},
    ),
    "reference as a value": (
        an_object({"a": {"const": {"$ref": "#/b"}, "default": {"$ref": "#/c"}}}),
        {"a": {"$ref": "#/b"}},
        {"a": {"$ref": "#/items"}},
    ),
}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"), list(REFERENCES.values()), ids=list(REFERENCES)
)
def test_references_in_parameters_mean_the_same_in_a_demanded_call(
    byte_level_json: bytes, schema: dict[str, Any], right: Any, wrong: Any
) -> None:
    alone = json.dumps(schema)
    assert accepts(byte_level_json, "json_schema", alone, right)
    assert not accepts(byte_level_json, "json_schema", alone, wrong)
    demanded = demand({"type": "null"}, schema)
    assert calls_accepted(byte_level_json, demanded, "g", right)
    assert not calls_accepted(byte_level_json, demanded, "g", wrong)


@pytest.mark.parametrize("key", ["$anchor", "$id"])
def test_each_tool_of_a_demand_has_references_of_its_own(byte_level_json: bytes, key: str) -> None:
    target = "#k" if key == "$anchor" else "k"
    first, second = (
        an_object(
            {"a": REF_A["a"], "b": {"$ref": target}}, **{"$defs": {"A": {"const": value, key: "k"}}}
        )
        for value in (1, 2)
    )
    demanded = demand(first, second)
    for name, value in (("f", 1), ("f", 2), ("g", 1), ("g", 2)):
        arguments = {"a": value, "b": value}
        expected = (name, value) in (("f", 1), ("g", 2))
        assert calls_accepted(byte_level_json, demanded, name, arguments) is expected


def test_two_schemas_with_one_id_are_refused_unless_they_are_the_same() -> None:
    schema = an_object(REF_A, **{"$id": "https://x.y/z", "$defs": {"A": {"const": 1}}})
    other = schema | {"$defs": {"A": {"const": True}}}
    inside = an_object({"$id": {"const": other}}, **{"$defs": {"B": other}})
    assert demand(schema, schema)
    assert demand(schema, an_object({"$id": {"const": other}}))
    for second in (other, inside):
        with pytest.raises(RequestError, match=r"two schemas with the \$id 'https://x.y/z'"):
            demand(schema, second)


class Item(pydantic.BaseModel):
    """An item of an order."""

    number: int


class Order(pydantic.BaseModel):
    """Parameters with a schema of another model."""

    items: list[Item]


def test_a_model_of_pydantic_is_demanded_in_every_api(hermes: Any) -> None:
    tool = openai.pydantic_function_tool(Order, name="order")
    schema, text = Order.model_json_schema(), "say []"
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            "messages": ask("[]"),
            "tools": [tool],
            "tool_choice": "required",
        },
        "/v1/responses": {
            "input": text,
            "tools": [{"type": "function", "name": "order", "parameters": schema}],
            "tool_choice": "required",
        },
        "/v1/messages": {
            "max_tokens": 20,
            "messages": ask("[]"),
            "tools": [{"name": "order", "input_schema": schema}],
            "tool_choice": {"type": "any"},
        },
    }
    for path, body in bodies.items():
        response = hermes.http.post(path, json={"model": "tiny", **body})
        assert response.status_code == 200, response.text


DEEP: dict[str, tuple[str, str]] = {
    "chat": (
        '{"model":"tiny","messages":[],"tool_choice":"required","tools":[{"type":"function",'
        '"function":{"name":"f","parameters":%s}}]}',
        "tools[0].function.parameters",
    ),
    "responses": (
        '{"model":"tiny","input":"a","tool_choice":"required","tools":[{"type":"function",'
        '"name":"f","parameters":%s}]}',
        "tools[0].parameters",
    ),
    "messages": (
        '{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"a"}],'
        '"tool_choice":{"type":"any"},"tools":[{"name":"f","input_schema":%s}]}',
        "tools[0].input_schema",
    ),
}


@pytest.mark.parametrize("kind", list(DEEP))
def test_parameters_are_nested_up_to_a_limit(byte_level_json: bytes, kind: str) -> None:
    body, param = DEEP[kind]

    def read(depth: int) -> Any:
        return READERS[kind]((body % ('{"a":' * (depth - 1) + "{}" + "}" * (depth - 1))).encode())

    grammar = read(MAX_SCHEMA_DEPTH).tools.grammar
    tokenizer = llguidance.LLTokenizer(byte_level_json.decode())
    assert not llguidance.LLMatcher(tokenizer, grammar_of(grammar.kind, grammar.text)).is_error()
    with pytest.raises(RequestError, match=f"more than {MAX_SCHEMA_DEPTH} deep") as refused:
        read(MAX_SCHEMA_DEPTH + 1)
    assert refused.value.param == param
    for depth in range(500, 1100):
        with pytest.raises(RequestError):
            read(depth)


def test_a_named_tool_gets_its_arguments(hermes: Any) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    request = {"model": "tiny", "messages": ask('{"city":"Ulm"}'), "tools": [WEATHER, TIME]}
    create = hermes.client.chat.completions.create
    choice = create(**request, tool_choice=named).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city":"Ulm"}')
    assert choice.finish_reason == "stop"
    parameters = json.dumps(WEATHER["function"]["parameters"], separators=(",", ":"))  # type: ignore[index]
    assert hermes.controllers[0].seen[-1].sampling.grammar == grammar_of("json_schema", parameters)
    _, calls, _ = gathered(create(**request, tool_choice=named, stream=True))
    assert [call["arguments"] for call in calls] == ['{"city":"Ulm"}']


def test_the_tokens_of_a_chat_count_its_tools(hermes: Any) -> None:
    body = {"model": "tiny", "messages": ask("hello"), "tools": [WEATHER]}
    hermes.client.chat.completions.create(**body)
    counted = hermes.http.post("/tokenize", json=body).json()
    shown = {"model": "tiny", "tokens": counted["tokens"]}
    text = hermes.http.post("/detokenize", json=shown).json()["prompt"]
    assert "tools:" in text and text.replace("<|start|>", "") == hermes.prompt()


def test_with_the_choice_none_the_output_is_text(hermes: Any) -> None:
    answer = hermes.client.chat.completions.create(
        model="tiny", messages=ask(CALL), tools=[WEATHER], tool_choice="none"
    )
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].message.tool_calls is None and "tools:" in hermes.prompt()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "magic", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "ab\n"}}]}, "tools[0].function.name"),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"tools": [TIME], "tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        (
            {
                "tools": [TIME],
                "tool_choice": "required",
                "extra_body": {"guided_json": {"type": "object"}},
            },
            "tool_choice",
        ),
    ],
)
def test_wrong_tools_are_refused_by_their_field(
    hermes: Any, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        hermes.client.chat.completions.create(model="tiny", messages=ask("x"), **fields)
    assert refused.value.param == param


def test_a_model_whose_template_takes_no_tools_refuses_them(served: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        served.client.chat.completions.create(model="tiny", messages=ask("x"), tools=[TIME])
    assert refused.value.param == "tools"
