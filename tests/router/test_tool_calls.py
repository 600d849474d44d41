"""Calls of tools in the text of each family, cut into pieces in every way."""

from __future__ import annotations

import itertools
import json
import sys
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha_router.structured.tool_calls import (
    BEGINS,
    CALL,
    ENDS,
    SEPARATOR,
    Format,
    TextPart,
    ToolCallParser,
    format_of,
)
from medha_router.structured.tools import Tools

CALLS, (CALL_ENDS, CALLS_END) = BEGINS["deepseek"][0], ENDS["deepseek"]
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "points": {"type": ["array", "null"]},
        "warm": {"type": "boolean"},
        "place": {"$ref": "#/$defs/Place"},
        "level": {"enum": [1, 2]},
        "odd": {"type": [{}, ["string"]], "anyOf": [{"allOf": [{"properties": {}}]}]},
        "loop": {"$ref": "#/$defs/Loop"},
    },
    "$defs": {"Place": {"type": "object"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]}},
}
OFFERED = [
    {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get_weather"}},
]
TOOLS = Tools(raw=json.dumps(OFFERED).encode(), names=frozenset({"f", "get_weather"}), named="f")
CASES: list[tuple[Format, str, str, list[tuple[str, str]]]] = [
    (
        "hermes",
        'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "}<\\"é"}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"b": [1, {"c": 2}]}, "name": "get_weather"}</tool_call>',
        "Sure.\n",
        [("f", '{"a": "}<\\"é"}'), ("get_weather", '{"b": [1, {"c": 2}]}')],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}[TOOL_CALLS]get_weather[ARGS]{}',
        "",
        [("f", '{"a": 1}'), ("get_weather", "{}")],
    ),
    (
        "qwen3_coder",
        'Sure.\n<tool_call>\n<function=f>\n<parameter=city>\nPa"ris\n</par\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_weather>\n</function>\n</tool_call> bye",
        "Sure.\n bye",
        [("f", '{"city": "Pa\\"ris\\n</par", "days": 3}'), ("get_weather", "{}")],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=points>[1, {}]</parameter><parameter=note>null"
        "</parameter><parameter=warm>True</parameter><parameter=city>\nnull\n</parameter>"
        "<parameter=city>twice</parameter><parameter=days>two</parameter><parameter=other>7"
        "</parameter></function></tool_call>",
        "",
        [
            (
                "f",
                '{"points": [1, {}], "note": null, "warm": true, "city": "null", "days": "two", '
                '"other": "7"}',
            )
        ],
    ),
    ("qwen3_coder", "<tool_call><function=unknown>x", "<tool_call><function=unknown>x", []),
    ("qwen3_coder", '<tool_call>{"name": "f"}', '<tool_call>{"name": "f"}', []),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=city>\n\n a\n\n</parameter> and so on",
        "and so on",
        [("f", '{"city": "\\n a\\n"}')],
    ),
    (  # no mark around a function, and no end of a value or of a function
        "qwen3_coder",
        "I look.\n<function=f>\n<parameter=city>\nKöln\n<parameter=days>\n3\n</function>\n"
        "</tool_call>\n<function=get_weather></function>",
        "I look.\n",
        [("f", '{"city": "Köln", "days": 3}'), ("get_weather", "{}")],
    ),
    (  # two functions in a mark
        "qwen3_coder",
        "<tool_call>\n<function=f>\n</function>\n<function=get_weather>\n</function>\n</tool_call>",
        "",
        [("f", "{}"), ("get_weather", "{}")],
    ),
    (  # the output ends in a value
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=days>\n3\n</parameter>\n<parameter=city>\nKö <b",
        "",
        [("f", '{"days": 3, "city": "Kö <b"}')],
    ),
    (
        "qwen3_coder",
        "<function=f><parameter=days>\n3\n</function>\n",
        "",
        [("f", '{"days": 3}')],
    ),
    ("qwen3_coder", "<tool_call><function=f>\n<param", "", [("f", "{}")]),
    (  # tags in a value: of no argument, of one that was given, in a line, of a function in a text
        "qwen3_coder",
        "<function=f><parameter=days>1</parameter><parameter=city>\n<parameter=x>\n"
        "<parameter=days> <parameter=note> </function> <\n<parameter=city>\n</parameter>"
        "</function>",
        "",
        [
            (
                "f",
                '{"days": 1, "city": "<parameter=x>\\n<parameter=days> <parameter=note> '
                '</function> <\\n<parameter=city>"}',
            )
        ],
    ),
    ("qwen3_coder", "Use <function=f> for it", "Use <function=f> for it", []),
    ("qwen3_coder", "<function=x></function> <func", "<function=x></function> <func", []),
    (  # a brace too few
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": {"b": "<"}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"a": [1]}, "name": "f"\n</tool_call> bye',
        " bye",
        [("f", '{"a": {"b": "<"}}'), ("f", '{"a": [1]}')],
    ),
    (  # a brace too many
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}}\n</tool_call>\n'
        '<tool_call>{"name": "f", "arguments": {}}}</tool_call>',
        "",
        [("f", '{"a": 1}'), ("f", "{}")],
    ),
    (
        "deepseek",
        f"I look.\n{CALLS}{CALL}f{SEPARATOR}" + '{"a": "}<｜\\"é"}' + f"{CALL_ENDS}{CALL}"
        f"get_weather{SEPARATOR}" + "{}" + f"{CALL_ENDS}{CALLS_END}",
        "I look.\n",
        [("f", '{"a": "}<｜\\"é"}'), ("get_weather", "{}")],
    ),
    (
        "deepseek",
        f"{CALLS}{CALL}function{SEPARATOR}f\n```json\n" + '{"b": [1, {}]}' + f"\n```{CALL_ENDS}\n"
        f"{CALL}function{SEPARATOR}get_weather\n```json\n" + "{}" + f"\n```{CALL_ENDS}{CALLS_END}",
        "",
        [("f", '{"b": [1, {}]}'), ("get_weather", "{}")],
    ),
    (  # no mark around the calls
        "deepseek",
        f"{CALL}f{SEPARATOR}" + '{"a": 1}' + f"{CALL_ENDS} bye",
        "bye",
        [("f", '{"a": 1}')],
    ),
    (
        "deepseek",
        f"{CALLS}{CALL}unknown{SEPARATOR}" + "{}" + CALL_ENDS,
        f"{CALLS}{CALL}unknown{SEPARATOR}" + "{}" + CALL_ENDS,
        [],
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
        "hermes",
        'a <tool_call>{"name": "f"}</tool_call> b <tool_call>{"name": "f"}</tool_call> c\n',
        "a  b c",
        [("f", "{}"), ("f", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}, "name": "unknown"}</tool_call>',
        "",
        [("f", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}, "name": "get_weather"}</tool_call>',
        "",
        [("f", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "unknown", "arguments": {}, "name": "f"}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {}, "name": "f"}</tool_call>',
        [],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "parameters": {}, "name": "f", "arguments": 2}',
        "",
        [("f", '{"a": 1}')],
    ),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
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
    ("llama3", ' {"age": 3}\n', ' {"age": 3}\n', []),
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
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"name": "\\u0067", "a": 1}',
        "",
        [("f", '{"name": "\\u0067", "a": 1}')],
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


def parsed(
    form: Format, parts: list[str], finish: str = "stop"
) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(form, TOOLS)
    pieces = [piece for part in parts for piece in parser.push(part)]
    content, calls = gather(pieces + parser.end(finish))
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


def events(
    form: Format, parts: list[str], finish: str = "stop"
) -> list[tuple[int | None, str | None, str]]:
    """Return the parser's events in order, with the parts of a text joined."""
    parser = ToolCallParser(form, TOOLS)
    joined: list[tuple[int | None, str | None, str]] = []
    for piece in [piece for part in parts for piece in parser.push(part)] + parser.end(finish):
        if piece.name is None and joined and joined[-1][0] == piece.call:
            call, name, text = joined[-1]
            joined[-1] = call, name, text + piece.text
        else:
            joined.append((piece.call, piece.name, piece.text))
    return joined


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from(["f", "}"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "arguments", "é", "]"]), inner, max_size=3)
    ),
    max_leaves=5,
)
SPACES = st.sampled_from(["", "", " ", "\n", " \t"])
MEMBERS = st.tuples(
    st.sampled_from(["name", "name", "arguments", "parameters", "type", "né"]),
    st.sampled_from(['"f"', '"get_weather"', '"unknown"', '"\\u0066"', '"\\x"', "{}"])
    | VALUES.map(json.dumps)
    | VALUES.map(lambda value: json.dumps(value, ensure_ascii=False)),
)
JUNK = st.sampled_from(["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]"])
JUNK |= st.sampled_from(
    ["{", "}", "[", "]", ",", ";", ":", '"', "\\", " ", "f", '"name":"f"', "é😀"]
)
JUNK |= st.sampled_from(["<function=f>", "<parameter=city>", "</parameter>", "</function>", "\n"])
JUNK |= st.text(max_size=4)


@st.composite
def outputs(draw: st.DrawFn, form: Format) -> str:
    """Draw calls of a family with repeated and nested keys, text around them, and faults."""
    text = draw(JUNK) + draw(SPACES)
    for _ in range(draw(st.integers(1, 3))):
        pairs = draw(st.lists(MEMBERS, max_size=4))
        if draw(st.booleans()):
            pairs.insert(0, ("name", '"f"'))
        members = [f'"{key}":{draw(SPACES)}{value}' for key, value in pairs]
        call = "{" + draw(SPACES) + f",{draw(SPACES)}".join(members) + "}"
        opening, closing = draw(
            st.sampled_from(
                {
                    "hermes": [("<tool_call>", "</tool_call>")],
                    "llama3": [("<|python_tag|>", ""), ("", "; ")],
                    "mistral": [("[TOOL_CALLS][", "]"), ("[TOOL_CALLS]f[ARGS]", ""), (",", "")],
                    "array": [("[", "]"), (",", "")],
                    "named": [("", "")],
                    "deepseek": [
                        (f"{CALLS}{CALL}f{SEPARATOR}", CALL_ENDS),
                        (f"{CALL}function{SEPARATOR}f\n```json\n", f"\n```{CALL_ENDS}{CALLS_END}"),
                        (f"{CALL}{SEPARATOR}", CALLS_END),
                    ],
                    "qwen3_coder": [
                        ("<tool_call><function=f><parameter=days>", "</parameter></function>"),
                        ("<function=f>", "</function></tool_call>"),
                        ("<parameter=city>", "\n</parameter>"),
                    ],
                }[form]
            )
        )
        text += opening + draw(SPACES) + call + draw(SPACES) + closing
        text += draw(SPACES) + draw(JUNK) + draw(SPACES)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(JUNK) + text[at + draw(st.integers(0, 3)) :]
    return text


@pytest.mark.parametrize("form", typing.get_args(Format))
@given(data=st.data())
@settings(max_examples=100)
def test_any_output_gives_the_same_events_however_it_is_cut(
    form: Format, data: st.DataObject
) -> None:
    text = data.draw(outputs(form))
    cuts = data.draw(st.sets(st.integers(0, len(text)), max_size=12))
    parts = [text[a:b] for a, b in itertools.pairwise([0, *sorted(cuts), len(text)])]
    assert events(form, [text]) == events(form, parts) == events(form, list(text))


PIECES = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"name": "f"', "}", "{"]
PIECES += ["<function=f>", "<parameter=city>", "<parameter=days>", "</parameter>", "</function>"]
PIECES += [CALLS, CALL, SEPARATOR, CALL_ENDS, CALLS_END, "```json"]
PIECES += [', "arguments": {', "[", "]", ",", ";", '"', "\\", "f", "[ARGS]", " ", "text", "é"]


@given(
    parts=st.lists(st.sampled_from(PIECES), max_size=12),
    form=st.sampled_from(typing.get_args(Format)),
)
def test_any_text_gives_the_same_whole_or_letter_by_letter(parts: list[str], form: Format) -> None:
    text = "".join(parts)
    assert parsed(form, [text]) == parsed(form, list(text)) == parsed(form, parts)


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "llama3", "mistral", "deepseek"])
@given(text=st.text(alphabet="ab <>|[]{}\":,'\n", max_size=40))
def test_text_without_a_tools_name_stays_as_it_is(form: Format, text: str) -> None:
    assert parsed(form, [text]) == (text, [])


def test_a_call_that_the_limit_of_tokens_cut_stays_open() -> None:
    text = "<function=f><parameter=days>\n3\n</parameter><parameter=city>\nKöl"
    cut = [("f", '{"days": 3, "city": "Köl')]
    assert parsed("qwen3_coder", [text], "length") == ("", cut)
    assert parsed("qwen3_coder", list(text), "length") == ("", cut)


def test_the_form_of_calls_is_that_of_the_template() -> None:
    assert format_of("{%- if tools %}<tool_call>") == "hermes"
    assert format_of("<tool_call>\n<function=example>") == "qwen3_coder"
    assert format_of("[AVAILABLE_TOOLS] [TOOL_CALLS]") == "mistral"
    assert format_of("{{ tools }} <|start_header_id|>ipython") == "llama3"
    assert format_of("{{ tools }} " + CALL) == "deepseek"
    assert format_of("{{ messages }}") is None


@given(
    arguments=st.dictionaries(
        st.sampled_from(["city", "note", "more"]), st.text(max_size=20).map("v{}".format)
    )
    | st.dictionaries(st.sampled_from(["days"]), st.integers())
    | st.dictionaries(st.sampled_from(["points"]), st.lists(VALUES)),
)
def test_arguments_between_tags_are_read_as_they_were_meant(arguments: dict[str, object]) -> None:
    text = "<tool_call>\n<function=f>\n"
    for key, value in arguments.items():
        shown = value if isinstance(value, str) else json.dumps(value)
        text += f"<parameter={key}>\n{shown}\n</parameter>\n"
    content, calls = parsed("qwen3_coder", list(text + "</function>\n</tool_call>"))
    assert content == "" and json.loads(calls[0][1]) == arguments


@given(data=st.data())
def test_end_tags_that_a_model_leaves_out_change_no_argument(data: st.DataObject) -> None:
    values: dict[str, st.SearchStrategy[Any]] = {
        "city": st.text(max_size=20).map("v{}".format),
        "points": st.lists(VALUES),
        "days": st.integers(),
        "warm": st.booleans(),
    }
    keys = data.draw(st.permutations(sorted(values)))
    arguments = {key: data.draw(values[key]) for key in keys[data.draw(st.integers(0, 3)) :]}
    text = data.draw(st.sampled_from(["", "<tool_call>\n"])) + "<function=f>\n"
    for key, value in arguments.items():
        shown = value if isinstance(value, str) else json.dumps(value)
        text += f"<parameter={key}>\n{shown}\n" + data.draw(st.sampled_from(["", "</parameter>\n"]))
    text += data.draw(st.sampled_from(["", "</function>", "</function>\n</tool_call>"]))
    content, calls = parsed("qwen3_coder", list(text))
    assert content == "" and [json.loads(call[1]) for call in calls] == [arguments]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("place", '{"x": [1]}', {"x": [1]}),
        ("level", "2", 2),
        ("odd", "{}", {}),
        ("loop", "1", "1"),
        ("points", "[" * 9000, "[" * 9000),
        ("days", "1 2", "1 2"),
        ("points", "[" + "0," * 200_000 + "0]", "[" + "0," * 200_000 + "0]"),
    ],
)
def test_a_value_between_tags_is_of_a_type_that_its_schema_allows(
    key: str, text: str, value: object
) -> None:
    call = f"<tool_call><function=f><parameter={key}>{text}</parameter></function></tool_call>"
    _, calls = parsed("qwen3_coder", [call])
    assert json.loads(calls[0][1]) == {key: value}


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "llama3", "mistral", "deepseek"])
def test_endless_space_before_a_call_is_content(form: Format) -> None:
    text = {"llama3": ""}.get(form, BEGINS[form][0]) + " " * 5000
    assert parsed(form, [text]) == parsed(form, list(text)) == (text, [])
    calls = {"qwen3_coder": "<function=f>", "deepseek": f"f{SEPARATOR}" + "{}"}
    call = calls.get(form, '{"name": "f"}')
    assert parsed(form, [text + call]) == parsed(form, list(text + call)) == (text + call, [])


@pytest.mark.parametrize(
    ("form", "begin"), [("mistral", "[TOOL_CALLS]["), ("llama3", "<|python_tag|>")]
)
def test_endless_space_after_the_mark_of_a_call_is_content(form: Format, begin: str) -> None:
    text = begin + " " * 5000
    for after in ("", '{"name": "f"}', "text"):
        expected = (text + after, list[tuple[str, str]]())
        assert parsed(form, [text + after]) == parsed(form, list(text + after)) == expected


@pytest.mark.parametrize("begin", ["", '<tool_call>{"name": "f"}</tool_call>'])
def test_white_space_is_searched_a_few_times_and_no_more(begin: str) -> None:
    """The event loop stands still meanwhile."""
    parser, searched = ToolCallParser("hermes", TOOLS), 0

    def count(frame: object, event: str, function: Any) -> None:
        nonlocal searched
        text = getattr(function, "__self__", None) if event == "c_call" else None
        searched += len(text) if isinstance(text, str) else 0

    parser.push(begin)
    sys.setprofile(count)
    for _ in range(10_000):
        parser.push("\n")
    sys.setprofile(None)
    pieces = parser.push("end")
    assert "".join(piece.text for piece in pieces).endswith("end")
    assert searched < 10_000 * 10
