"""Calls of tools in the text of each family, cut into pieces in every way."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha_router.structured.tool_calls import Format, TextPart, ToolCallParser, format_of
from medha_router.structured.tools import Tools

TOOLS = Tools(raw=b"[]", names=frozenset({"f", "get_weather"}), named="f")
CASES: list[tuple[Format, str, str, list[tuple[str, str]]]] = [
    (
        "hermes",
        'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "}<\\"é"}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"b": [1, {"c": 2}]}, "name": "get_weather"}</tool_call>',
        "Sure.\n",
        [("f", '{"a": "}<\\"é"}'), ("get_weather", '{"b": [1, {"c": 2}]}')],
    ),
    ("hermes", "no call < here <tool", "no call < here <tool", []),
    ("hermes", "<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
    (
        "hermes",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        [],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>done', "done", [("f", "{}")]),
    (
        "llama3",
        '{"name": "f", "parameters": {"x": "1"}}; {"name": "get_weather", "parameters": {}}',
        "",
        [("f", '{"x": "1"}'), ("get_weather", "{}")],
    ),
    (
        "llama3",
        '\n<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": [1, 2]}}',
        "",
        [("f", '{"x": [1, 2]}')],
    ),
    ("llama3", 'It is {"name": "f"}.', 'It is {"name": "f"}.', []),
    ("llama3", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("llama3", "<|python", "<|python", []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]',
        "",
        [("f", '{"a": 1}'), ("f", "{}")],
    ),
    (
        "mistral",
        'Hm. [TOOL_CALLS]get_weather[ARGS]{"a": {"b": 2}}[TOOL_CALLS]f{"c": 3}',
        "Hm. ",
        [("get_weather", '{"a": {"b": 2}}'), ("f", '{"c": 3}')],
    ),
    ("mistral", "[TOOL_CALLS]what is it", "[TOOL_CALLS]what is it", []),
    (
        "array",
        '[{"name": "f", "parameters": {"a": null}},\n {"name":"get_weather","parameters":{}}]',
        "",
        [("f", '{"a": null}'), ("get_weather", "{}")],
    ),
    ("named", '{"a": "x}"}', "", [("f", '{"a": "x}"}')]),
]


def gather(pieces: list[TextPart]) -> tuple[str, list[tuple[str, str]]]:
    """Join pieces as a client does."""
    content = ""
    calls: dict[int, tuple[str, str]] = {}
    for piece in pieces:
        if piece.call is None:
            content += piece.text
        elif piece.name is not None:
            assert piece.call == len(calls)
            calls[piece.call] = (piece.name, piece.text)
        else:
            name, arguments = calls[piece.call]
            calls[piece.call] = (name, arguments + piece.text)
    return content, list(calls.values())


def parsed(form: Format, parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(form, TOOLS)
    pieces = [piece for part in parts for piece in parser.push(part)]
    content, calls = gather(pieces + parser.end())
    assert parser.calls == len(calls)
    return content, calls


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_of_each_family_are_read(
    form: Format, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert parsed(form, [text]) == (content, calls)
    assert parsed(form, list(text)) == (content, calls)
    for _, arguments in calls:
        json.loads(arguments)


@given(case=st.sampled_from(CASES), cuts=st.sets(st.integers(0, 120), max_size=8))
def test_the_cuts_of_the_text_change_nothing(
    case: tuple[Format, str, str, list[tuple[str, str]]], cuts: set[int]
) -> None:
    form, text, content, calls = case
    at = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(at)]
    assert parsed(form, parts) == (content, calls)


PIECES = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"name": "f"', "}", "{"]
PIECES += [', "arguments": {', "[", "]", ",", ";", '"', "\\", "f", "[ARGS]", " ", "text", "é"]


@given(
    parts=st.lists(st.sampled_from(PIECES), max_size=12),
    form=st.sampled_from(["hermes", "llama3", "mistral", "array", "named"]),
)
def test_any_text_gives_the_same_whole_or_letter_by_letter(parts: list[str], form: Format) -> None:
    text = "".join(parts)
    assert parsed(form, [text]) == parsed(form, list(text)) == parsed(form, parts)


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral"])
@given(text=st.text(alphabet="ab <>|[]{}\":,'\n", max_size=40))
def test_text_without_a_tools_name_stays_as_it_is(form: Format, text: str) -> None:
    assert parsed(form, [text]) == (text, [])


def test_the_form_of_calls_is_that_of_the_template() -> None:
    assert format_of(b"{%- if tools %}<tool_call>") == "hermes"
    assert format_of(b"[AVAILABLE_TOOLS] [TOOL_CALLS]") == "mistral"
    assert format_of(b"{{ tools }} <|start_header_id|>ipython") == "llama3"
    assert format_of(b"{{ messages }}") is None
