"""Thinking of models such as Qwen3 and DeepSeek-R1, apart from the content of their answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import anthropic
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.conftest import HERMES, Running, byte_level_tokenizer

from medha_router.dialects.answer import AnswerResponse
from medha_router.dialects.conversation import Conversation
from medha_router.dialects.http_response import KEEPALIVE, GenerationResponse
from medha_router.structured.output_parser import (
    OutputParser,
    Thinking,
    ThinkingCount,
    thinking_after,
)
from medha_router.structured.tool_calls import MAX_LATE_CALLS, ToolCallParser
from medha_router.structured.tools import Tools
from medha_router.tokenization.detokenizer import Delta
from medha_router.tokenization.pool import TokenizerPool

CALL = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
F = b'[{"type": "function", "function": {"name": "f"}}]'
THOUGHT = "<think>\nDays, or\n\nhours?\n</think>\n\nTwo days."
STOP: dict[str, Any] = {"stop": ["!"]}
STOPPED: dict[str, Any] = {"model": "tiny", "max_tokens": 99, "stop_sequences": ["!"]}
USAGE: Any = {"include_usage": True}
HIDDEN = {"extra_body": {"include_reasoning": False}}
# As DeepSeek-R1's: the prompt begins the thinking. The mark ! ends what the model says.
BEGUN = (
    HERMES
    + b"""{% if add_generation_prompt %}!<think>
{% endif %}{% for m in messages if m.reasoning_content %}{{ m.reasoning_content }}{% endfor %}"""
)


def parsed(parts: list[str], thinking: Thinking, **options: Any) -> tuple[str, str, int]:
    """Return thinking, content and the number of calls."""
    tools = Tools(raw=b"[]", names=frozenset({"get_time"}))
    parser = OutputParser(thinking, ToolCallParser("hermes", tools), **options)
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.end("stop")
    thought = "".join(piece.text for piece in pieces if piece.thinking)
    texts = [piece.text for piece in pieces if piece.call is None and not piece.thinking]
    return thought, "".join(texts), len({piece.call for piece in pieces} - {None})


@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        ("possible", THOUGHT, ("Days, or\n\nhours?", "Two days.", 0)),
        ("begun", THOUGHT.removeprefix("<think>\n"), ("Days, or\n\nhours?", "Two days.", 0)),
        ("begun", THOUGHT, ("Days, or\n\nhours?", "Two days.", 0)),
        ("none", THOUGHT, ("", THOUGHT, 0)),
        ("possible", "<think>\n\n</think>\n\nHi", ("", "Hi", 0)),
        ("possible", " Hi <think>x</think>", ("", " Hi <think>x</think>", 0)),
        ("possible", "<think>cut </th", ("cut </th", "", 0)),
        ("begun", "cut\n", ("cut", "", 0)),
        ("begun", "cut\n\n</th", ("cut\n\n</th", "", 0)),
        ("begun", "", ("", "", 0)),
        ("possible", "<thi", ("", "<thi", 0)),
        ("possible", f"<think>I call {CALL}</think>Now: {CALL}", (f"I call {CALL}", "Now: ", 1)),
        ("begun", f"Or {CALL}? Yes.\n{CALL}\n{CALL}", (f"Or {CALL}? Yes.\n{CALL}\n{CALL}", "", 2)),
        ("begun", f"I may call {CALL}, or not", (f"I may call {CALL}, or not", "", 0)),
    ],
)
def test_thinking_stands_apart(
    thinking: Thinking, text: str, expected: tuple[str, str, int]
) -> None:
    assert parsed([text], thinking) == parsed(list(text), thinking) == expected
    assert parsed(list(text), thinking, shown=False) == ("", *expected[1:])


@pytest.mark.parametrize(
    ("form", "call"),
    [
        ("hermes", '<tool_call>{"name": "f"}'),
        ("qwen3_coder", "<tool_call><function=f></function></tool_call>"),
        ("qwen3_coder", "<function=f></function>"),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        ),
        ("mistral", "[TOOL_CALLS]f{}"),
    ],
)
def test_the_last_calls_of_a_thinking_are_read_once(form: Any, call: str) -> None:
    count = 300

    class Names(frozenset[str]):
        looked_up = 0

        def __contains__(self, name: object) -> bool:
            Names.looked_up += 1
            return super().__contains__(name)

    for parallel in (True, False):
        Names.looked_up = 0
        parser = ToolCallParser(form, Tools(raw=F, names=Names({"f"}), parallel=parallel))
        pieces = parser.end_with("I call\n" + call * count)
        numbers = list(range(MAX_LATE_CALLS if parallel else 1))
        assert [piece.call for piece in pieces if piece.name] == numbers
        assert parser.calls == MAX_LATE_CALLS and Names.looked_up < 4 * MAX_LATE_CALLS


@pytest.mark.parametrize("value", ["x" * 15_000, "1, " * 5_000, "[" * 5_000, '"y", ' * 3_000])
def test_a_long_call_at_the_end_of_a_thinking_takes_few_steps(value: str) -> None:
    """The event loop stands still meanwhile."""
    arguments = json.dumps({"a": value}) if value[0] == "x" else f'{{"a": [{value}'
    parser = ToolCallParser("hermes", Tools(raw=F, names=frozenset({"f"})))
    steps = itertools.count()
    sys.setprofile(lambda frame, event, arg: next(steps))
    pieces = parser.end_with('<tool_call>{"name": "f", "arguments": ' + arguments)
    sys.setprofile(None)
    assert "".join(piece.text for piece in pieces) == arguments
    assert next(steps) < 1000


def test_line_breaks_of_a_thinking_are_not_searched_again_and_again() -> None:
    parser, longest = OutputParser("begun"), 0
    pieces = []
    for part in ("a", *["\n"] * 999, "b"):
        pieces += parser.push(part)
        longest = max(longest, len(parser._text))
    assert "".join(piece.text for piece in pieces) == "a" + "\n" * 999 + "b" and longest == 0


PIECES = ["<think>", "</think>", "\n", " ", "a", "<", "</th", "é", "<tool_call>"]


@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=10),
    thinking=st.sampled_from(["begun", "possible"]),
    cuts=st.sets(st.integers(0, 40)),
)
def test_thinking_is_what_a_search_in_the_whole_text_finds(
    pieces: list[str], thinking: Thinking, cuts: set[int]
) -> None:
    text = "".join(pieces)
    parts = [text[a:b] for a, b in itertools.pairwise([0, *sorted(cuts), len(text)])]
    opening = r"\s*<think>" if thinking == "possible" else r"(?:\s*<think>)?"
    match = re.fullmatch(rf"{opening}(?P<thought>.*?)(?:</think>(?P<rest>.*))?", text, re.S)
    expected = ("", text)
    if match is not None:
        expected = match["thought"].strip("\n"), (match["rest"] or "").lstrip("\n")
    assert parsed(parts, thinking)[:2] == expected


def test_a_prompt_may_begin_the_thinking() -> None:
    assert thinking_after([b"\n", b"<think>", b"<|assistant|>"]) == "begun"
    assert thinking_after([b"\n\n", b"</think>", b"\n\n", b"<think>"]) == "possible"
    assert thinking_after([]) == "possible"


@given(st.lists(st.sampled_from(["", " ", "\n", "<", "<th", "ink>", "<think>", "</think>", "a"])))
def test_the_last_pieces_of_a_prompt_decide_its_thinking(pieces: list[str]) -> None:
    begun = "".join(pieces).rstrip().endswith("<think>")
    last_first = [piece.encode() for piece in reversed(pieces)]
    assert thinking_after(last_first) == ("begun" if begun else "possible")


def test_pieces_of_a_prompt_before_those_that_decide_are_not_read() -> None:
    pieces = iter([b"\n", b"a long answer", b"before"])
    assert thinking_after(pieces) == "possible" and next(pieces) == b"before"


@pytest.mark.parametrize(
    ("content", "text", "expected"),
    [
        ("<think>A or", " B?</think>\nB.", (" B?", "B.")),
        ([{"type": "text", "text": "<think>A"}], "\nor", ("\nor", "")),
        ("<think>A or B?</think>", "B.", ("", "B.")),
        ("What is <think>?", "A mark.", ("", "A mark.")),
    ],
)
def test_a_continued_message_may_end_in_its_thinking(
    hermes: Running, content: Any, text: str, expected: tuple[str, str]
) -> None:
    body = request(f"{text}!")
    body["messages"].append({"role": "assistant", "content": content})
    whole, streamed = answers(hermes, body | {"extra_body": {"continue_final_message": True}})
    assert whole == streamed == (*expected, [], "stop")
    del body["stop"]
    message = hermes.http.post(
        "/v1/messages", json={**body, "max_tokens": 99, "stop_sequences": ["!"]}
    ).json()
    blocks = [block.get("thinking", block.get("text")) for block in message["content"]]
    assert blocks == [part for part in expected if part]


@pytest.fixture(scope="module")
def begun(tokens: TokenizerPool) -> Iterator[Running]:
    """A router with a model whose template begins the thinking."""
    with contextlib.closing(Running(tokens)) as running:
        running.open(template=BEGUN)
        yield running


def request(text: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"say {text}"}]
    return {"model": "tiny", "messages": messages, "stop": ["!"], **options}


def answers(running: Running, body: dict[str, Any]) -> list[tuple[str, str, list[str], str]]:
    """Return thinking, content, names of calls and the finish, of a whole and a streamed answer."""
    create = running.client.chat.completions.create
    whole, parts = create(**body).choices[0], list(create(**body, stream=True))
    message, deltas = whole.message, [chunk.choices[0].delta for chunk in parts]
    for shown in (message, *deltas):
        assert getattr(shown, "reasoning", None) == getattr(shown, "reasoning_content", None)
    return [
        (
            getattr(message, "reasoning", ""),
            message.content or "",
            [call.function.name for call in message.tool_calls or []],
            whole.finish_reason,
        ),
        (
            "".join(getattr(delta, "reasoning", "") for delta in deltas),
            "".join(delta.content or "" for delta in deltas),
            [
                call.function.name
                for delta in deltas
                for call in delta.tool_calls or []
                if call.function.name
            ],
            parts[-1].choices[0].finish_reason,
        ),
    ]


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("A or B?</think>\nB.", {}, ("A or B?", "B.", [], "stop")),
        ("A or B?</think>B.", {"max_tokens": 5}, ("A or ", "", [], "length")),
        ("A or B?</think>B.", HIDDEN, ("", "B.", [], "stop")),
        (
            f"{CALL}?</think>\n{CALL}",
            {"tools": [TIME]},
            (f"{CALL}?", "", ["get_time"], "tool_calls"),
        ),
        (
            '[{"name": "get_time", "parameters": {}}]',
            {"tools": [TIME], "tool_choice": "required"},
            ("", "", ["get_time"], "tool_calls"),
        ),
        ('{"a": 1}', {"response_format": {"type": "json_object"}}, ("", '{"a": 1}', [], "stop")),
    ],
)
def test_a_chat_has_fields_for_the_thinking(
    begun: Running, text: str, options: dict[str, Any], expected: tuple[str, str, list[str], str]
) -> None:
    whole, streamed = answers(begun, request(text, **options))
    assert whole == streamed == expected


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("A or B?</think>\nB.", len("A or B?</think>")),
        ("<think>A</think>B.", len("<think>A</think>")),
        ("A or B?", len("A or B?!")),  # with the mark that ends it
    ],
)
def test_a_usage_counts_the_tokens_of_the_thinking(begun: Running, text: str, count: int) -> None:
    body = request(text)
    chats = begun.client.chat.completions
    usages: list[Any] = [chats.create(**body).usage]
    usages.append(list(chats.create(**body, stream=True, stream_options=USAGE))[-1].usage)
    shown = [usage.completion_tokens_details.reasoning_tokens for usage in usages]
    shown.append(chats.create(**body, n=2).usage.completion_tokens_details.reasoning_tokens / 2)
    message = begun.http.post("/v1/messages", json=dict(STOPPED, messages=body["messages"])).json()
    shown.append(message["usage"]["output_tokens_details"]["thinking_tokens"])
    assert shown == [count] * 4
    answer = begun.client.responses.create(model="tiny", input=f"say {text}", extra_body=STOP)
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == count


@pytest.mark.parametrize(("spaces", "count"), [(4095, 4096), (4096, 0)])
def test_a_mark_after_endless_space_begins_no_thinking(spaces: int, count: int) -> None:
    text = " " * spaces + "<think>"
    parser, thinking = OutputParser("possible"), ThinkingCount("possible")
    parts = [part for letter in text for part in parser.push(letter)]
    thinking.read(range(spaces + 1), [*[b" "] * spaces, b"<think>"].__getitem__)
    assert thinking.tokens == count and (not parts) == (count > 0)
    begun = ThinkingCount("begun")
    begun.read(range(2 * spaces), lambda token: b" ")
    assert begun.tokens == 2 * spaces


def test_outputs_without_a_thinking_count_none(hermes: Running) -> None:
    for options in ({}, {"response_format": {"type": "json_object"}}):
        usage = hermes.client.chat.completions.create(**request("{}", **options)).usage
        assert usage.completion_tokens_details.reasoning_tokens == 0


@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=10),
    thinking=st.sampled_from(["begun", "possible"]),
    cuts=st.lists(st.integers(1, 3), min_size=40),
)
def test_the_count_is_that_of_the_tokens_up_to_the_mark(
    pieces: list[str], thinking: Thinking, cuts: list[int]
) -> None:
    text, ends = "".join(pieces).encode(), itertools.accumulate(cuts, initial=0)
    tokens = [text[a:b] for a, b in itertools.pairwise(ends) if a < len(text)]
    opening = rb"\s*<think>" if thinking == "possible" else rb"(?:\s*<think>)?"
    match = re.match(rb"(%s.*?)(</think>|\Z)" % opening, text, re.DOTALL)
    chars = match.end() if match is not None else 0
    expected = sum(at < chars for at in itertools.accumulate(map(len, tokens[:-1]), initial=0))
    for sizes in (1, len(tokens) or 1):
        count = ThinkingCount(thinking)
        for end in range(sizes, len(tokens) + 1, sizes):
            count.read(range(end), tokens.__getitem__)
        assert count.tokens == (expected if tokens else 0)


def test_a_model_that_writes_both_marks_is_read_too(hermes: Running) -> None:
    whole, streamed = answers(hermes, request(THOUGHT))
    assert whole == streamed == ("Days, or\n\nhours?", "Two days.", [], "stop")


def test_a_router_may_leave_thinking_in_the_content(running_with: Any) -> None:
    running = running_with(split_thinking=False)
    running.open()
    whole, streamed = answers(running, request(THOUGHT))
    assert whole == streamed == ("", THOUGHT, [], "stop")


class Unshown(GenerationResponse):
    """A stream whose deltas show nothing but the last."""

    _whole: Any = None

    async def _opening(self, request: Any) -> bytes:
        return b"opening;"

    def _events(self, request: Any, deltas: Any) -> tuple[bytes, bool]:
        ended = deltas[-1][1].finish is not None
        return (b"end" if ended else b""), ended


@pytest.mark.parametrize(("keepalive_s", "count"), [(0.0, 3), (60.0, 0)])
def test_a_stream_that_shows_no_thinking_is_kept_alive(keepalive_s: float, count: int) -> None:
    deltas = iter([Delta("a")] * 4 + [Delta("", finish="stop")])

    async def next_deltas(_: float) -> list[tuple[int, Delta]]:
        return [(0, next(deltas))]

    request: Any = types.SimpleNamespace(
        next=next_deltas, slo_class=types.SimpleNamespace(name="x"), promise_s=None, predicted_s=0.0
    )
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    served: Any = types.SimpleNamespace(
        id="1", params=None, begin=None, cancel=None, held=None, keepalive_s=keepalive_s
    )
    asyncio.run(Unshown(served)._stream(request, send))
    assert [part for part in sent if part] == [b"opening;", *[KEEPALIVE] * count, b"end"]


def test_an_answer_is_read_by_the_prompt_of_its_first_token() -> None:
    begun_with: list[int] = []

    def make(_: Any) -> Any:
        begun_with.append(len(rounds))
        return types.SimpleNamespace(push=lambda delta: b"", whole=lambda: b"answer")

    rounds: list[list[tuple[int, Delta]]] = [[], [(0, Delta("a"))], [(0, Delta("", finish="stop"))]]

    async def next_deltas(_: float) -> list[tuple[int, Delta]]:
        return rounds.pop(0)

    request: Any = types.SimpleNamespace(next=next_deltas)
    served: Any = types.SimpleNamespace(
        id="1", params=None, begin=None, cancel=None, held=None, keepalive_s=1.0
    )
    assert asyncio.run(AnswerResponse(served, make)._whole(request)) == (b"answer",)
    assert begun_with == [1]


def test_the_ids_of_a_thinking_that_is_not_shown_come_with_the_next_chunk(begun: Running) -> None:
    body = request("A or B?</think>B.", return_token_ids=True, include_reasoning=False)
    whole = begun.http.post("/v1/chat/completions", json=body).json()["choices"][0]["token_ids"]
    streamed = begun.http.post("/v1/chat/completions", json=body | {"stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line[6:7] == "{"]
    choices = [choice for event in events for choice in event["choices"]]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == whole
    assert len(whole) > len("A or B?")


def test_reasoning_before_a_call_stays_with_its_message() -> None:
    conversation = Conversation()
    conversation.add("assistant", "Wait.")
    conversation.think("A clock helps.")
    conversation.call("1", "get_time", "{}")
    conversation.result("1", "9")
    conversation.add("assistant", "Nine.")
    first, _, last = json.loads(conversation.raw())
    assert first["reasoning"] == "A clock helps." and "reasoning" not in last


def test_thinking_goes_round_in_a_chat(begun: Running) -> None:
    create = begun.client.chat.completions.create
    message = create(**request("A or B?</think>B.")).choices[0].message
    again = request("x</think>y")
    create(**again | {"messages": [*again["messages"], message.to_dict(), *again["messages"]]})
    assert begun.prompt().endswith("<think>\nA or B?") and "assistant: B." in begun.prompt()


def test_marks_of_thinking_count_where_they_are_special_tokens(
    running_with: Any, make_hello: Any
) -> None:
    tokenizer = byte_level_tokenizer("<think>", "</think>")
    running: Running = running_with()
    shape = msgspec.structs.replace(make_hello().shape, vocab=261)
    running.open(tokenizer=tokenizer, template=HERMES, shape=shape)
    assert (
        answers(running, request(THOUGHT)) == [("Days, or\n\nhours?", "Two days.", [], "stop")] * 2
    )


def test_thinking_is_a_block_of_a_message(begun: Running) -> None:
    client = anthropic.Anthropic(base_url=begun.router.url, api_key="none", max_retries=0)
    with contextlib.closing(client):
        body: dict[str, Any] = request("A or B?</think>B.", max_tokens=99)
        body["stop_sequences"] = body.pop("stop")
        message = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            streamed = stream.get_final_message()
        for content in (message.content, streamed.content):
            shown = [(block.type, getattr(block, "thinking", "")) for block in content]
            assert shown == [("thinking", "A or B?"), ("text", "")]
        turns = [*body["messages"], {"role": "assistant", "content": message.content}]
        client.messages.create(**body | {"messages": [*turns, *body["messages"]]})
    assert begun.prompt().endswith("<think>\nA or B?") and "assistant: B." in begun.prompt()


@pytest.mark.parametrize(
    ("thinking", "kinds", "printed"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, ["thinking", "text"], False),
        ({"type": "adaptive"}, ["thinking", "text"], False),
        ({"type": "adaptive", "display": "omitted"}, ["text"], False),
        ({"type": "disabled"}, ["text"], True),
    ],
)
def test_a_message_may_leave_thinking_out(
    hermes: Running, thinking: Any, kinds: list[str], printed: bool
) -> None:
    client = anthropic.Anthropic(base_url=hermes.router.url, api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": f"say {THOUGHT}"}]
    with contextlib.closing(client):
        message = client.messages.create(
            model="tiny", max_tokens=99, messages=messages, thinking=thinking
        )
        counted = client.messages.count_tokens(
            model="tiny", messages=messages, thinking=thinking
        ).input_tokens
    assert [block.type for block in message.content] == kinds
    assert hermes.prompt().endswith("<think></think>") == printed
    assert counted == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_thinking_is_an_item_of_a_response(begun: Running) -> None:
    responses = begun.client.responses
    body: dict[str, Any] = {"model": "tiny", "input": f"say A or B?</think>{CALL}"}
    tool: Any = {"type": "function", "name": "get_time"}
    answer = responses.create(**body, tools=[tool])
    with responses.stream(**body, tools=[tool]) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_response()
    assert {"response.reasoning_text.delta", "response.reasoning_text.done"} <= kinds
    for output in (answer.output, streamed.output):
        assert [item.type for item in output][:2] == ["reasoning", "function_call"]
        assert output[0].content[0].text == "A or B?"  # type: ignore[union-attr,index]
    call_id = answer.output[1].call_id
    result = {"type": "function_call_output", "call_id": call_id, "output": "say 9"}
    items: list[Any] = [{"role": "user", "content": "when?"}, *answer.output[:2], result]
    responses.create(model="tiny", input=items)
    assert begun.prompt().endswith("<think>\nA or B?") and "get_time" in begun.prompt()
