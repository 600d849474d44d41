"""Chat templates as checkpoints bring them, and messages in the form that each prints."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tests.router.conftest import HERMES
from transformers.utils.chat_template_utils import render_jinja_template

from medha.errors import RequestError
from medha_router.tokenization.chat_template import ChatTemplate
from medha_router.tokenization.encoder import read_messages

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
USER = {"role": "user", "content": "hi"}
CALL = {"name": "get_weather", "arguments": '{"city": "Köln"}'}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "abc123def", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "abc123def", "content": "rain"},
]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
WITH_TOOLS = "{{ tools | tojson }} in <tool_call>s " + PLAIN
# As Qwen's: roles that it does not know are left out.
KNOWN_ROLES = "{% for m in messages if m.role in ('system', 'user') %}" + PLAIN.partition("%}")[2]
# As DeepSeek-R1's: calls stand where there is no content, and arguments are text.
NULL_CONTENT = """{% for m in messages -%}
{% if m.content is none %}{% for call in m.tool_calls %}{{ '<call>' + call['function']['name'] \
+ call['function']['arguments'] }}{% endfor %}{% else %}{{ '<' + m.role + '>' + m.content }}
{%- endif %}{% endfor %}"""


def render(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    read = read_messages(json.dumps(messages).encode())
    return ChatTemplate(template.encode(), b"").render(read, ending="bare", **options)


def config(*templates: tuple[str, str]) -> bytes:
    named = [{"name": name, "template": template} for name, template in templates]
    return json.dumps({"chat_template": named}).encode()


def test_a_prompt_with_tools_has_the_template_for_them() -> None:
    template = ChatTemplate(
        b"", config(("default", PLAIN), ("tool_use", WITH_TOOLS), ("rag", "{%"))
    )
    tools = json.dumps(TOOLS).encode()
    shown = template.render([USER], tools=tools)
    assert shown == json.dumps(TOOLS) + " in <tool_call>s <user>hi"
    assert template.render([USER]) == "<user>hi"
    assert template.tool_calls == "hermes"


@pytest.mark.parametrize(
    ("source", "settings", "form"),
    [
        (HERMES, b"", "hermes"),
        (PLAIN.encode(), b'{"added_tokens_decoder": {"5": {"content": "[TOOL_CALLS]"}}}', None),
        (b"", json.dumps({"chat_template": PLAIN, "more": "<tool_call>"}).encode(), None),
        (b"<tool_call> {{ raise_exception('no') }}", b"", "hermes"),
        (b"{{ tools }} {{ messages }}", b"", None),
        (b"{{ tools }} <tool_call> <function=x>", b"", "qwen3_coder"),
        (b"<tool_call> {{ tools[0].function.description }}", b"", "hermes"),
        (b"<tool_call> {{ tools | length }}", b"", None),
        (b"", b"", None),
    ],
)
def test_a_model_takes_tools_if_its_template_prints_them(
    source: bytes, settings: bytes, form: str | None
) -> None:
    assert ChatTemplate(source, settings).tool_calls == form


@pytest.mark.parametrize(
    "fault",
    [
        "{{ '{x}'.format(y=1) }}",
        "{{ 1 // (messages | length - 1) }}",
        "{{ range(10 ** 7) }}",
        "{{ 2.0 ** 100000 }}",
        "{{ messages[0].content.encode('zz') }}",
        "{{ messages[0].content.nothing.at_all }}",
    ],
)
def test_a_template_that_raises_refuses_the_messages_and_loads(fault: str) -> None:
    template = ChatTemplate(("<tool_call>" + fault).encode(), b"")
    assert template.tool_calls == "hermes"
    with pytest.raises(RequestError, match="refuses these messages"):
        template.render([USER])


def test_tools_that_no_template_prints_are_refused_for_the_model(served: Any) -> None:
    body = {"model": "tiny", "messages": [USER], "tools": TOOLS}
    response = served.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "tools"


def test_a_developer_is_the_system_where_the_template_leaves_that_role_out() -> None:
    messages = [{"role": "developer", "content": "RULES"}, USER]
    assert render(KNOWN_ROLES, messages) == "<system>RULES<user>hi"
    assert render(PLAIN, messages) == "<developer>RULES<user>hi"


@pytest.mark.parametrize("left_out", ["{{ raise_exception('Not at the start') }}", ""])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_later_system_messages_join_the_first_where_a_template_takes_one(
    left_out: str, role: str
) -> None:
    """As Claude Code sends them in the course of a conversation, and Codex at its start."""
    first = "{% if m.role == 'system' and not loop.first %}" + left_out + "{% else %}"
    template = KNOWN_ROLES.replace("<{{", first + "<{{").replace(
        "{% endfor", "{% endif %}{% endfor"
    )
    system, later = {"role": "system", "content": "one"}, {"role": role, "content": ["two", "3"]}
    messages: list[dict[str, Any]] = [USER, system, later]
    assert render(template, messages) == "<system>one\n\ntwo\n3<user>hi"
    assert render(PLAIN, messages[:2]) == "<user>hi<system>one"


@pytest.mark.parametrize("template", [NULL_CONTENT, HERMES.decode()])
def test_a_call_in_an_earlier_message_reaches_the_prompt(template: str) -> None:
    assert "get_weather" in render(template, CALLED) and "Köln" in render(template, CALLED)


@pytest.mark.parametrize("template", [NULL_CONTENT, HERMES.decode()])
def test_a_call_beside_a_content_reaches_the_prompt(template: str) -> None:
    messages = [CALLED[0], CALLED[1] | {"content": "I look."}, CALLED[2]]
    shown = render(template, messages)
    assert shown.index("I look.") < shown.index("get_weather") < shown.index("Köln")
    assert shown.count("I look.") == shown.count("get_weather") == 1 and "rain" in shown


def test_a_message_is_not_split_where_roles_must_alternate() -> None:
    template = (
        "{% for m in messages if m.role != 'tool' %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}"
        "{% endif %}<{{ m.role }}>{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    messages = [CALLED[0], CALLED[1] | {"content": "I look."}]
    assert render(template, messages) == "<user>weather?<assistant>get_weather"


# As Mistral's: calls leave no room for a content, and other roles alternate.
ALTERNATING = """{%- set ns = namespace(index=0) -%}
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}
{%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('order') }}{% endif -%}
{%- set ns.index = ns.index + 1 -%}{%- endif -%}
{%- for id in [m.tool_call_id] + m.tool_calls | default([]) | map(attribute='id') | list -%}
{%- if id and id | length != 9 %}{{ raise_exception('length 9') }}{% endif -%}
{%- endfor -%}
<{{ m.role }}>{% for c in m.tool_calls %}{{ c.id }} {{ c.function.name, c.function.arguments }}
{%- else %}{{ m.tool_call_id }} {{ m.content }}{% endfor -%}
{%- endfor %}"""


def test_a_message_stays_whole_where_its_parts_would_end_the_conversation() -> None:
    messages = [CALLED[0], CALLED[1] | {"content": "I look."}, CALLED[2]]
    messages += [{"role": "assistant", "content": "Rain."}, USER]
    shown = render(ALTERNATING, messages)
    assert "get_weather" in shown and "rain<assistant> Rain.<user> hi" in shown


def test_ids_that_a_template_refuses_are_replaced_alike_in_call_and_result() -> None:
    text = json.dumps(CALLED).replace("abc123def", "call_of_another_server")
    shown = render(ALTERNATING, json.loads(text))
    ids = re.findall(r"<assistant>(\w{9}) .*<tool>(\w{9}) rain", shown)
    assert len(ids) == 1 and ids[0][0] == ids[0][1]
    assert "<assistant>abc123def" in render(ALTERNATING, CALLED)
    assert "call_of_another_server" in render(
        "{% for m in messages %}{{ m | tojson }}{% endfor %}", json.loads(text)
    )


def test_a_template_for_tools_is_probed_with_tools() -> None:
    template = "{% for t in tools %}{{ t.function.name }}{% endfor %}" + NULL_CONTENT
    messages = [CALLED[0], CALLED[1] | {"content": "I look."}, CALLED[2]]
    shown = render(template, messages, tools=json.dumps(TOOLS).encode())
    assert "I look." in shown and "<call>get_weather" in shown


def test_arguments_are_text_where_the_template_joins_them() -> None:
    template = """{% for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}
{%- endfor %}"""
    shown = render(template, CALLED)
    assert "<assistant>get_weather{" in shown and "None" not in shown


def test_calls_are_rendered_as_transformers_does_for_a_template_that_wants_no_content() -> None:
    (expected,), _ = render_jinja_template([CALLED], chat_template=NULL_CONTENT)
    assert render(NULL_CONTENT, CALLED) == expected


@pytest.mark.parametrize(
    "options",
    ["", "indent=2", "ensure_ascii=true", "separators=(',', ':')", "sort_keys=true", "false, 1"],
)
def test_the_filter_for_json_takes_the_options_of_transformers(options: str) -> None:
    template = "{{ messages | tojson(" + options + ") }}"
    (expected,), _ = render_jinja_template([[USER | {"content": "é"}]], chat_template=template)
    assert render(template, [USER | {"content": "é"}]) == expected
