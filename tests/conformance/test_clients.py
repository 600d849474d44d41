"""OpenAI's, Anthropic's and litellm's clients: every way to ask the fleet, streamed and whole."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import anthropic
import openai
import pytest

CALL = r'<tool_call>\{"name": "add", "arguments": \{"a": [1-9], "b": [1-9]\}\}</tool_call>'
CALLS = {"structured_outputs": {"regex": CALL}}
"""Makes the model of the fleet, which knows no tools, write a call in its form."""
NUMBERS = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD: Any = {
    "type": "function",
    "function": {"name": "add", "description": "Add two numbers", "parameters": NUMBERS},
}
WORDS = "the old river and a new stone"
SAMPLED = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "top_p": 0.8, "seed": 1, "presence_penalty": 0.5},
    {"temperature": 0, "frequency_penalty": 1.0, "max_tokens": 5},
    {"temperature": 0, "stop": ["new"]},
    {"temperature": 1.5, "seed": 3, "n": 3},
    {"temperature": 0, "logprobs": True, "top_logprobs": 3},
    {"temperature": 0, "logit_bias": {"300": -100}},
    {"temperature": 0, "response_format": {"type": "json_object"}},
    {"temperature": 1.0, "seed": 5, "extra_body": {"top_k": 5, "min_p": 0.05, "min_tokens": 4}},
    {"temperature": 1.0, "seed": 2, "extra_body": {"guided_choice": ["yes", "no"]}},
]


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def is_numbers(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"a", "b"} and all(
        type(number) is int and 0 <= number <= 99 for number in value.values()
    )


@pytest.mark.parametrize("fields", SAMPLED, ids=str)
def test_a_streamed_chat_is_the_whole_one(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    request: dict[str, Any] = {"model": "tiny", "messages": ask(WORDS), "max_tokens": 40, **fields}
    whole = client.chat.completions.create(**request)
    count = fields.get("n", 1)
    texts, finishes, tokens = [""] * count, [""] * count, 0
    usage = None
    for chunk in client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
            tokens += len((choice.logprobs and choice.logprobs.content) or [])
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert whole.usage is not None and usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    logprobs = whole.choices[0].logprobs
    assert tokens == len((logprobs and logprobs.content) or [])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"echo": True, "logprobs": 2},
        {"n": 2, "temperature": 1.0, "seed": 4},
        {"prompt": [WORDS, "good day"]},
        {"prompt": [300, 301, 302]},
        {"stop": " a"},
        {"max_tokens": 0, "echo": True, "logprobs": 1},
    ],
    ids=str,
)
def test_a_streamed_completion_is_the_whole_one(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    request: dict[str, Any] = {
        "model": "tiny",
        "prompt": WORDS,
        "max_tokens": 20,
        "temperature": 0,
        **fields,
    }
    whole = client.completions.create(**request)
    texts = [""] * len(whole.choices)
    logprobs: list[list[float | None]] = [[] for _ in whole.choices]
    for chunk in client.completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs:
                logprobs[choice.index] += choice.logprobs.token_logprobs or []
    assert texts == [choice.text for choice in whole.choices]
    for choice, streamed in zip(whole.choices, logprobs, strict=True):
        assert streamed == (choice.logprobs.token_logprobs if choice.logprobs else [])


@pytest.mark.parametrize(
    ("choice", "extra", "reason"),
    [
        ("auto", CALLS, "tool_calls"),
        ("required", {}, "tool_calls"),
        ({"type": "function", "function": {"name": "add"}}, {}, "stop"),
    ],
)
def test_a_tool_call_goes_round_with_openais_client(
    client: openai.OpenAI, choice: Any, extra: dict[str, Any], reason: str
) -> None:
    request: dict[str, Any] = {
        "model": "tiny",
        "messages": ask("Add them."),
        "tools": [ADD],
        "tool_choice": choice,
        "extra_body": extra,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 200,
    }
    whole = client.chat.completions.create(**request)
    answer = whole.choices[0]
    (call,) = answer.message.tool_calls or []
    assert call.type == "function" and call.function.name == "add"
    assert is_numbers(call.function.arguments) and answer.finish_reason == reason
    with client.chat.completions.stream(**request) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls or []
    assert [part.function.arguments for part in streamed] == [call.function.arguments]
    result = {"role": "tool", "tool_call_id": call.id, "content": "it is 5"}
    turns = [*ask("Add them."), answer.message.to_dict(), result]
    final = client.chat.completions.create(
        model="tiny", messages=turns, tools=[ADD], max_tokens=8, temperature=0
    )
    assert final.choices[0].message.content and not final.choices[0].message.tool_calls
    assert final.usage is not None and whole.usage is not None
    assert final.usage.prompt_tokens > whole.usage.prompt_tokens


def test_a_response_goes_round_with_openais_client(client: openai.OpenAI) -> None:
    tool = {"type": "function", "strict": True, **ADD["function"]}
    common: dict[str, Any] = {"model": "tiny", "tools": [tool], "temperature": 0}
    request = {**common, "input": "Add them.", "extra_body": CALLS}
    (call,) = client.responses.create(**request).output
    assert call.type == "function_call" and is_numbers(call.arguments)
    with client.responses.stream(**request) as stream:
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call" and streamed.arguments == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "it is 5"}
    turns: list[Any] = [*ask("Add them."), call.to_dict(), result]
    final = client.responses.create(**common, input=turns, max_output_tokens=8)
    assert final.output_text and final.output[0].type == "message"


def test_a_message_goes_round_with_anthropics_client(messages: anthropic.Anthropic) -> None:
    tool: Any = {"name": "add", "description": "Add two numbers", "input_schema": NUMBERS}
    request: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "tools": [tool]}
    forced: dict[str, Any] = {"tool_choice": {"type": "tool", "name": "add"}}
    answer = messages.messages.create(**request, **forced, messages=ask("Add them."))
    (call,) = answer.content
    assert call.type == "tool_use" and is_numbers(json.dumps(call.input))
    with messages.messages.stream(**request, messages=ask("Add them."), extra_body=CALLS) as stream:
        streamed = stream.get_final_message()
    (streamed_call,) = streamed.content
    assert streamed.stop_reason == "tool_use" and is_numbers(json.dumps(streamed_call.input))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "it is 5"}
    turns = [
        *ask("Add them."),
        {"role": "assistant", "content": [call.to_dict()]},
        {"role": "user", "content": [result]},
    ]
    final = messages.messages.create(**{**request, "max_tokens": 8}, messages=turns)
    assert final.content[0].type == "text" and final.content[0].text
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) > (
        answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    )


def test_a_tool_call_goes_round_with_litellms_client(fleet: Any) -> None:
    script = pathlib.Path(__file__).with_name("litellm_round_trip.py")
    printed = fleet.run(
        "python", str(script), fleet.url, timeout_s=300.0, LITELLM_LOCAL_MODEL_COST_MAP="True"
    )
    assert printed.rstrip().endswith("litellm: 5 of 5")
