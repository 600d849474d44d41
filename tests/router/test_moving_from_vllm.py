"""Habits of clients of vLLM's server, beyond OpenAI's API."""

from __future__ import annotations

import hashlib
import json
import pathlib
from typing import Any

import pytest
from tests.router.conftest import Running

from medha.config import RouterModel
from medha.errors import RequestError
from medha_router.dialects.conversation import renamed
from medha_router.dialects.messages_body import read_messages_body
from medha_router.dialects.responses_body import INPUT_NAMES
from medha_router.protocol import read_chat, read_completion
from medha_router.tokenization.chat_template import ChatTemplate
from medha_router.tokenization.detokenizer import OutputStream, StopMatcher, Vocabulary
from medha_router.tokenization.encoder import read_messages

WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}
LINES = b"{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
PARTS = b"""{%- for m in messages -%}{{ m.role }}:
{%- if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %};{% endfor -%}"""


def chat(served: Running, text: str = "say abcdef", **fields: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
    return served.http.post("/v1/chat/completions", json=body).json()


def completion(served: Running, text: str = "say abcdef", **fields: Any) -> Any:
    body = {"model": "tiny", "prompt": text, **fields}
    return served.http.post("/v1/completions", json=body).json()


def prompt(template: bytes, *messages: dict[str, Any]) -> str:
    plain = read_messages(json.dumps(messages).encode())
    return ChatTemplate(template, b"").render(plain)


# --- the output -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("least", "text"), [(0, "ab"), (3, "ab"), (4, "abcd"), (20, "abcdcdef")])
def test_a_stop_string_counts_after_the_least_tokens_only(
    served: Running, least: int, text: str
) -> None:
    answer = completion(served, "say abcdcdef", stop="cd", min_tokens=least, max_tokens=20)
    assert answer["choices"][0]["text"] == text


@pytest.mark.parametrize("together", [False, True])
def test_a_stop_string_may_begin_before_the_least_tokens(
    byte_level_json: bytes, together: bool
) -> None:
    vocabulary = Vocabulary(byte_level_json)
    tokens = vocabulary.tokenizer.encode("xxSTOPyySTOPz", add_special_tokens=False).ids
    for least, text in ((5, "xx"), (6, "xxSTOPyy"), (12, "xxSTOPyySTOPz")):
        stream = OutputStream(vocabulary, ["STOP"], min_tokens=least)
        groups = [tokens] if together else [[token] for token in tokens]
        shown = "".join(stream.push(group).text for group in groups)
        assert shown + stream.end("length").text == text


@pytest.mark.parametrize("stops", [["\n", "\nObs:"], ["\nObs:", "\n"], ["ba", "obar", "\n"]])
def test_a_stop_string_that_ended_too_early_never_counts(stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push("foo\n", may_match=False) + matcher.push("b") + matcher.push("xyz")
    assert shown + matcher.end() == "foo\nbxyz" and matcher.matched is None
    assert matcher.push("q\nw") in ("q", "") and matcher.matched == "\n"


def test_a_choice_says_which_stop_ended_it(served: Running) -> None:
    (letter,) = served.http.post("/tokenize", json={"prompt": "c"}).json()["tokens"][-1:]
    for fields, reason in (
        ({"stop": ["zz", "cd"]}, "cd"),
        ({"stop_token_ids": [letter]}, letter),
        ({}, None),
        ({"max_tokens": 2}, None),
    ):
        for ask in (chat, completion):
            assert ask(served, **fields)["choices"][0]["stop_reason"] == reason
        body = {"model": "tiny", "prompt": "say abcdef", "stream": True, **fields}
        lines = served.http.post("/v1/completions", json=body).text.split("\n\n")
        chunks = [json.loads(line[6:])["choices"][0] for line in lines if line[6:7] == "{"]
        assert chunks[-1]["stop_reason"] == reason
        assert all("stop_reason" not in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("most", [1, 8, 9, 2048])
def test_an_output_ends_with_the_context(served: Running, most: int) -> None:
    """Agents ask for 32,000 tokens in each turn, however long the conversation is."""
    answer = completion(served, "x" * 2030 + "say " + "y" * 6, max_tokens=most, ignore_eos=True)
    room = min(most, 8)
    assert served.controllers[0].seen[-1].max_output_tokens == room
    assert answer["usage"]["completion_tokens"] == min(room, 7)
    assert answer["choices"][0]["text"] == "y" * min(room, 6)


def test_more_tokens_than_the_context_holds_cannot_be_demanded(served: Running) -> None:
    error = chat(served, min_tokens=3000)["error"]
    assert (
        error["param"] == "min_tokens" and "min_tokens is 3000: must be at most" in error["message"]
    )


@pytest.mark.parametrize(("seed", "fixed"), [(-1, False), (0, True), (-2, True)])
def test_the_seed_of_minus_one_is_none(served: Running, seed: int, fixed: bool) -> None:
    for _ in range(2):
        completion(served, seed=seed)
    first, second = (submit.sampling.seed for submit in served.controllers[0].seen[-2:])
    assert (first == second) is fixed


def test_the_prompts_own_token_stands_first_in_its_log_probabilities(served: Running) -> None:
    answer = completion(served, "say abc", prompt_logprobs=2)
    shown = served.http.post("/tokenize", json={"prompt": "say abc"}).json()["tokens"]
    entries = answer["choices"][0]["prompt_logprobs"]
    assert [next(iter(entry)) for entry in entries[1:]] == [str(token) for token in shown[1:]]


# --- the prompt -----------------------------------------------------------------------------------


def test_parts_are_lines_of_a_template_that_takes_text() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]
    message = {"role": "user", "content": parts}
    assert prompt(LINES, message) == "user: a\nb\nc;"
    result = {"role": "tool", "content": parts}
    assert prompt(PARTS, message, result) == "user:[a][b][c];tool:a\nb\nc;"
    assert prompt(PARTS, {"role": "user", "content": "a"}) == "user:a;"


def test_only_users_have_parts_in_a_template() -> None:
    """Templates of some families read the first part alone of other roles."""
    template = b"""{%- for m in messages -%}{% if m.content is string %}{{ m.content }}
{%- elif m.role == 'user' %}{% for part in m.content %}[{{ part.text }}]{% endfor %}
{%- else %}{{ m.content[0].text }}{% endif %};{% endfor -%}"""
    system, user = ({"role": role, "content": ["a", "b"]} for role in ("system", "user"))
    call = {"id": "1", "type": "function", "function": {"name": "f"}}
    called = {"role": "assistant", "content": [], "tool_calls": [call]}
    assert prompt(template, system, user, called) == "a\nb;[a][b];;"
    assert prompt(b"{{ messages[0].content | indent }}", user) == "a\n    b"


def test_a_template_that_prints_lists_gets_none() -> None:
    message = {"role": "user", "content": ["a", "b"]}
    assert prompt(b"{{ messages[0].content | tojson }}", message) == '"a\\nb"'
    assert prompt(b"{{ messages[0].content + '!' }}", message) == "a\nb!"


def test_earlier_reasoning_reaches_templates_that_read_either_name() -> None:
    template = b"{% for m in messages %}{{ m.reasoning }}|{{ m.reasoning_content }};{% endfor %}"
    for field in ("reasoning", "reasoning_content"):
        message = {"role": "assistant", "content": "x", field: "why"}
        assert prompt(template, message, {"role": "user", "content": "y"}) == "why|why;|;"


def test_a_refusal_is_what_the_assistant_said() -> None:
    for message in (
        {"role": "assistant", "refusal": "no"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ):
        assert prompt(LINES, message) == "assistant: no;"
    with pytest.raises(RequestError, match=r"messages\[0\].audio is not supported"):
        read_messages(b'[{"role": "assistant", "audio": {"id": "a"}}]')


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ('{"a":', {}),
        ("[1]", {}),
        ("", {}),
        (None, {}),
    ],
)
def test_calls_with_broken_arguments_do_not_end_a_conversation(arguments: Any, read: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = read_messages(json.dumps([{"role": "assistant", "tool_calls": [call]}]).encode())
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": read}


def test_tools_stand_in_the_prompt_though_none_may_be_called(hermes: Running) -> None:
    tools = [{"function": WEATHER}]
    call = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    counts = []
    for choice in ("auto", "none"):
        answer = chat(hermes, f"say {call}", tools=tools, tool_choice=choice)
        counts.append(answer["usage"]["prompt_tokens"])
        message = answer["choices"][0]["message"]
        assert ("tool_calls" in message) is (choice == "auto")
    assert counts[0] == counts[1] and message["content"] == "{}".join(call.split("{}"))
    assert '"type":"function"' in hermes.prompt().replace(" ", "")


def test_an_agent_offers_the_tools_of_many_servers() -> None:
    offered = [{"function": {"name": f"mcp__server__tool{number}"}} for number in range(513)]
    body = {"messages": [], "tools": offered[:512]}
    tools = read_chat(json.dumps(body).encode()).tools
    assert tools is not None and len(tools.names) == 512
    with pytest.raises(RequestError, match="tools is wrong"):
        read_chat(json.dumps({**body, "tools": offered}).encode())


@pytest.mark.parametrize("result", [{}, {"content": None}, {"content": ""}])
def test_a_tool_may_return_nothing(result: dict[str, Any]) -> None:
    assert prompt(LINES, {"role": "tool", "tool_call_id": "a", **result}) == "tool: ;"


def test_a_gateway_hands_on_no_line_for_bills() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch=1f2;"
    for content in (f"{line}\nBe kind.", [line, {"type": "text", "text": "Be kind."}], "Be kind."):
        assert prompt(LINES, {"role": "system", "content": content}) == "system: Be kind.;"
    assert prompt(LINES, {"role": "user", "content": line}) == f"user: {line};"


def test_a_template_without_tools_serves_chats_that_may_call_none(served: Running) -> None:
    answer = chat(served, tools=[{"function": WEATHER}], tool_choice="none")
    assert answer["choices"][0]["message"]["content"] == "abcdef"


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"max_tokens": 5.0}, {"max_tokens": 5}),
        ({"stop_token_ids": [1.0, 2], "seed": 3.0}, {"stop_token_ids": [1, 2], "seed": 3}),
        ({"stream": False, "stream_options": {}}, {"stream": False}),
        ({"cache_salt": "x" * 1024}, {"cache_salt": "x" * 1024}),
        ({"temperature": 4}, {"temperature": 4.0}),
    ],
)
def test_numbers_may_be_written_as_clients_of_vllm_write_them(
    fields: dict[str, Any], meant: dict[str, Any]
) -> None:
    for read, prompt_fields in ((read_chat, {"messages": []}), (read_completion, {"prompt": "a"})):
        given, expected = (
            read(json.dumps({**prompt_fields, **body}).encode()) for body in (fields, meant)
        )
        assert given == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 5.5), ("max_tokens", "5"), ("max_tokens", True), ("stream", 1), ("stop", 5)],
)
def test_a_value_that_stands_for_no_other_is_refused(field: str, value: Any) -> None:
    body = {"messages": [], field: value}
    with pytest.raises(RequestError) as refused:
        read_chat(json.dumps(body).encode())
    assert refused.value.param == field and f"{field} is {value!r}: " in str(refused.value)


# --- names and errors -----------------------------------------------------------------------------


def test_the_only_model_needs_no_name(served: Running) -> None:
    models: list[dict[str, Any]] = [{}, {"model": None}, {"model": ""}]
    for model in models:
        body = {"messages": [{"role": "user", "content": "say a"}], **model}
        answer = served.http.post("/v1/chat/completions", json=body).json()
        assert answer["model"] == "tiny" and answer["choices"][0]["message"]["content"] == "a"
        tokens = served.http.post("/tokenize", json={"prompt": "ab", **model}).json()
        assert tokens["token_strs"] is None
        shown = served.http.post("/detokenize", json={"tokens": tokens["tokens"], **model}).json()
        assert shown["prompt"].endswith("ab")
    assert served.http.get("/v1/models").json()["data"][0]["root"] == "tiny"
    assert served.http.get("/v1/models/").status_code == 404


def test_one_of_several_models_must_be_named(running_with: Any) -> None:
    models = tuple(RouterModel(name=name, max_context_tokens=64) for name in ("tiny", "other"))
    error = completion(running_with(models=models), model="")["error"]
    assert error["param"] == "model" and "this server has other, tiny; name one" in error["message"]


def test_token_ids_print_the_special_tokens_among_them(served: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    tokens = served.http.post("/tokenize", json=body).json()["tokens"]
    text = served.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == "<|start|>user: hi\n<|start|>"


@pytest.mark.parametrize(
    ("path", "fields", "instead"),
    [
        ("/v1/responses", {"max_completion_tokens": 1}, "max_output_tokens"),
        ("/v1/responses", {"messages": []}, "input"),
        ("/v1/responses", {"logprobs": True}, ""),
        ("/v1/responses", {"echo": True}, ""),
        ("/v1/responses", {"best_of": 2}, ""),
        ("/v1/responses", {"previous_input_messages": [{"role": "user"}]}, ""),
        ("/v1/responses", {"enable_response_messages": True}, ""),
        ("/v1/messages", {"max_completion_tokens": 1}, "max_tokens"),
        ("/v1/messages", {"logprobs": True}, ""),
        ("/v1/completions", {"max_completion_tokens": 1}, "max_tokens"),
        ("/v1/completions", {"top_logprobs": 2}, "logprobs"),
    ],
)
def test_fields_of_other_apis_are_refused(
    served: Running, path: str, fields: dict[str, Any], instead: str
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": "say a"},
        "/v1/messages": {"messages": [{"role": "user", "content": "say a"}], "max_tokens": 4},
        "/v1/completions": {"prompt": "say a"},
    }
    (field,), body = fields, bodies[path]
    response = served.http.post(path, json={"model": "tiny", **body, **fields})
    assert response.status_code == 400 and field in response.text
    assert (f"give {instead}" if instead else "not supported by this server") in response.text
    default = {"logprobs": False, "echo": False, "best_of": 1, "previous_input_messages": []}
    if path == "/v1/responses" and field in default:
        body = {"model": "tiny", **body, field: default[field]}
        assert served.http.post(path, json=body).status_code == 200


def test_a_refusal_names_the_value_and_those_that_are_accepted() -> None:
    body = {"model": "tiny", "messages": [], "guided_decoding_backend": "outlines"}
    with pytest.raises(RequestError) as refused:
        read_chat(json.dumps(body).encode())
    assert str(refused.value) == (
        'guided_decoding_backend is "outlines", which is not supported by this server; leave it '
        'out, or give "auto" or "guidance"'
    )
    with pytest.raises(RequestError, match=r"best_of is 3, which is not supported"):
        read_completion(b'{"prompt": "a", "best_of": 3}')
    with pytest.raises(RequestError, match=r"suffix is \"x{59}…, which"):
        read_completion(b'{"prompt": "a", "suffix": "' + b"x" * 5000 + b'"}')


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True, "metadata": {"a": "b"}},
        {"service_tier": "flex"},
        {"verbosity": "low"},
        {"prediction": {"type": "content", "content": "abcdef"}},
    ],
    ids=str,
)
def test_hints_for_other_servers_are_ignored(served: Running, fields: dict[str, Any]) -> None:
    for ask in (chat, completion):
        choice = ask(served, **fields)["choices"][0]
        assert choice.get("text") == "abcdef" or choice["message"]["content"] == "abcdef"


@pytest.mark.parametrize(
    ("field", "value", "default"),
    [("tools", [{"function": WEATHER}], []), ("chat_template_kwargs", {"a": 1}, {})],
)
def test_what_only_a_template_reads_is_refused_with_a_prompt(
    served: Running, field: str, value: Any, default: Any
) -> None:
    for given, status in ((value, 400), ("wrong", 400), (default, 200), (None, 200)):
        response = served.http.post("/tokenize", json={"prompt": "a", field: given})
        assert response.status_code == status and (status == 200 or field in response.text)


def test_errors_name_what_the_client_sent(served: Running) -> None:
    body = {"model": "tiny", "input": "say " + "a" * 5000}
    error = served.http.post("/v1/responses", json=body).json()["error"]
    assert error["param"] == "input" and "messages" not in error["message"]
    lost = RequestError("messages[0] is wrong: messages of yours", param="messages[0]")
    assert str(renamed(lost, INPUT_NAMES)) == "input[0] is wrong: messages of yours"
    short = {"model": "tiny", "input": "a", "max_output_tokens": 2, "min_tokens": 5}
    error = served.http.post("/v1/responses", json=short).json()["error"]
    assert error["message"] == "min_tokens is 5: must be at most the limit of output tokens, 2"


def test_a_thinking_budget_of_minus_one_is_none() -> None:
    body = b'{"messages": [], "thinking_token_budget": %d}'
    read_chat(body % -1)
    with pytest.raises(RequestError, match="thinking_token_budget is 5"):
        read_chat(body % 5)


def test_a_field_that_must_be_given_is_not_to_be_left_out() -> None:
    body = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": %b, "n": %b}'
    for given, left_out in (((b"null", b"1"), False), ((b"1", b"0"), True)):
        with pytest.raises(RequestError) as refused:
            read_messages_body(body % given)
        assert ("leave it out" in str(refused.value)) is left_out


# --- other routes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/metrics", "the ops port has it"),
        ("/v1/chat/completions/", "use /v1/chat/completions"),
        ("/chat/completions", "use /v1/chat/completions"),
        ("/v1/v1/models", "use /v1/models"),
        ("/v1/tokenize", "use /tokenize"),
        ("/v1/embeddings", None),
        ("/", None),
    ],
)
def test_a_wrong_path_is_answered_with_the_right_one(
    served: Running, path: str, hint: str | None
) -> None:
    response = served.http.get(path)
    error = response.json()["error"]
    shown = f"this server has no {path}" + (f": {hint}" if hint else "")
    assert (response.status_code, error["code"], error["message"]) == (404, "not_found", shown)


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_a_load_balancer_sees_that_the_server_takes_requests(served: Running, path: str) -> None:
    assert served.http.get(path).status_code == 200


PAGE = "https://chat.example.com"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-medha-class",
}


@pytest.mark.parametrize("origins", [(PAGE,), ("*",), ("https://other.example.com",), ()])
def test_a_web_page_may_send_requests_if_its_origin_is_allowed(
    running_with: Any, tmp_path: pathlib.Path, origins: tuple[str, ...]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{hashlib.sha256(b'a-key').hexdigest()}\n")
    running = running_with(allowed_origins=origins, api_keys=str(keys))
    running.open()
    allowed = PAGE if PAGE in origins else "*" if "*" in origins else None
    body = {"model": "tiny", "messages": [{"role": "user", "content": "say abc"}]}
    for path in ("/v1/chat/completions", "/v1/messages"):
        before = running.http.options(path, headers=PREFLIGHT)
        assert (before.status_code == 200) is (allowed is not None)
        assert before.headers.get("access-control-allow-origin") == allowed
        assert before.headers["x-medha-request-id"]
    for key, stream, status in (("a-key", False, 200), ("a-key", True, 200), ("wrong", False, 401)):
        headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
        response = running.http.post(
            "/v1/chat/completions", json={**body, "stream": stream}, headers=headers
        )
        assert response.status_code == status
        assert response.headers.get("access-control-allow-origin") == allowed
        exposed = response.headers.get("access-control-expose-headers")
        assert exposed == ("*" if origins else None)
