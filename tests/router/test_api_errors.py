"""Every failure is sent as OpenAI's error object."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.conftest import PATIENT_S

from medha.errors import EngineError, Refusal, RequestError
from medha_router import protocol as api
from medha_router.api_errors import of_exception

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "say a"}]}


def wrong(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a failure, checked for its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert isinstance(error["message"], str) and error["message"]
    return dict(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 65),
        ("n", 1.5),
        ("temperature", -0.1),
        ("temperature", 10.5),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("max_tokens", -1),
        ("max_completion_tokens", -1),
        ("presence_penalty", 3),
        ("frequency_penalty", -2.1),
        ("stop", ["a"] * 17),
        ("stop", ""),
        ("stop", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"100000": 1}),
        ("logprobs", 3),
        ("seed", 1.5),
        ("seed", 2**70),
        ("top_logprobs", 21),
        ("top_logprobs", 2),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("min_p", 2),
        ("top_k", -2),
        ("repetition_penalty", 0),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "yaml"}),
        ("modalities", ["audio"]),
        ("audio", {"voice": "x"}),
        ("chat_template", "{{ 1 }}"),
        ("messages", []),
        ("messages", "say a"),
        ("messages", None),
        ("model", 5),
        ("logit_bias", {str(i): 0 for i in range(1025)}),
    ],
)
def test_a_field_out_of_bounds_is_named(served: Any, field: str, value: Any) -> None:
    error = wrong(served.http.post("/v1/chat/completions", json={**CHAT, field: value}), 400)
    assert error["type"] == "invalid_request_error"
    assert field in str(error["param"]) and field in error["message"]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("max_tokens", -1, "max_tokens is -1: expected `int` >= 0; correct it or leave it out"),
        ("stop", ["a", 7], "stop[1] is 7: expected `str`, got `int`; correct it or leave it out"),
        (
            "stop_token_ids",
            [-5],
            "stop_token_ids[0] is -5: expected `int` >= 0; correct it or leave it out",
        ),
        ("user", "u" * 2000, "user is '" + "u" * 59 + "…"),
    ],
)
def test_a_wrong_value_is_quoted_with_the_expected_type(
    served: Any, field: str, value: Any, expected: str
) -> None:
    error = wrong(served.http.post("/v1/chat/completions", json={**CHAT, field: value}), 400)
    assert error["message"].startswith(expected)


def test_a_missing_field_is_named(served: Any) -> None:
    error = wrong(served.http.post("/v1/chat/completions", json={"model": "tiny"}), 400)
    assert error["message"] == "messages is missing: must be given; add it"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 3),
        ("suffix", "x"),
        ("logprobs", 21),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ""),
        ("prompt", [1, "a"]),
        ("prompt", [-1]),
        ("prompt", [300]),
        ("prompt", 5),
        ("prompt", [2**31]),
        ("prompt", [True]),
        ("prompt", ["a"] * 65),
        ("prompt", [["a"]]),
    ],
)
def test_a_completions_field_out_of_bounds_is_named(served: Any, field: str, value: Any) -> None:
    body = {"model": "tiny", "prompt": "say a", field: value}
    error = wrong(served.http.post("/v1/completions", json=body), 400)
    assert field in str(error["param"])


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0]",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            "messages[0].content[0]",
        ),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_a_message_without_text_is_refused_by_its_position(
    served: Any, message: dict[str, Any], param: str
) -> None:
    body = {**CHAT, "messages": [message]}
    error = wrong(served.http.post("/v1/chat/completions", json=body), 400)
    assert error["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "tiny"}',
        b'{"a":' * 5000,
        b'{"model":"tiny","messages":[{"role":"user","content":"\xff"}]}',
        b'{"model":"tiny","messages":' + b"[" * 20000 + b"]" * 20000 + b"}",
        b'{"model":"tiny","temperature":NaN,"messages":[]}',
        b'{"model":"tiny","temperature":1e999,"messages":[]}',
        b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}',
    ],
)
def test_an_invalid_body_is_a_400(served: Any, body: bytes) -> None:
    wrong(served.http.post("/v1/chat/completions", content=body), 400)


def test_an_unknown_model_is_a_404_that_lists_the_models(served: Any) -> None:
    error = wrong(served.http.post("/v1/chat/completions", json={**CHAT, "model": "huge"}), 404)
    assert error["code"] == "model_not_found" and "tiny" in error["message"]
    wrong(served.http.get("/v1/models/huge"), 404)
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("huge")


def test_unknown_paths_and_methods_have_the_same_shape(served: Any) -> None:
    assert wrong(served.http.get("/nowhere"), 404)["code"] == "not_found"
    assert wrong(served.http.get("/"), 404)["code"] == "not_found"
    response = served.http.get("/v1/chat/completions")
    assert wrong(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    wrong(served.http.delete("/v1/models"), 405)


def test_a_path_with_a_slash_at_its_end_is_unknown(served: Any) -> None:
    """A redirect would send the client to the URL of its Host header, without TLS."""
    for method, path in (("POST", "/v1/chat/completions/"), ("GET", "/health/")):
        response = served.http.request(method, path, json=CHAT, headers={"host": "evil"})
        assert wrong(response, 404)["code"] == "not_found"
        assert "location" not in response.headers


def test_context_overflow_reports_both_numbers(served: Any) -> None:
    for prompt, most in ("x" * 2048, 1), ("x", 2049):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": most}
        error = wrong(served.http.post("/v1/completions", json=body), 400)
        assert error["code"] == "context_length_exceeded"
        assert "2048" in error["message"] and str(len(prompt) + most) in error["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"x-medha-slo-ttft-ms": "soon"},
        {"x-medha-slo-ttft-ms": "-5"},
        {"x-slo-ttft-ms": "nan"},
        {"x-slo-tpot-ms": "inf"},
        {"x-slo-ttft-ms": "0"},
        {"x-medha-class": "royal"},
    ],
)
def test_a_wrong_slo_header_is_named(served: Any, headers: dict[str, str]) -> None:
    error = wrong(served.http.post("/v1/chat/completions", json=CHAT, headers=headers), 400)
    assert error["param"] == next(iter(headers))


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_too_long_is_a_413_with_or_without_a_declared_length(
    served: Any, declared: bool
) -> None:
    limit = 1 << 20
    pieces = [b"x" * 65536] * (limit // 65536 + 2)
    content: Any = b"".join(pieces) if declared else iter(pieces)
    error = wrong(served.http.post("/v1/chat/completions", content=content), 413)
    assert error["code"] == "body_too_large" and str(limit) in error["message"]
    assert served.http.post("/v1/chat/completions", json=CHAT).status_code == 200


def raw_exchange(served: Any, data: bytes) -> tuple[int, dict[str, Any]]:
    """Send raw bytes and return status and JSON body of the response."""
    host, port = served.router.public.getsockname()
    with socket.create_connection((host, port), timeout=PATIENT_S) as link:
        link.sendall(data)
        got = b""
        while piece := link.recv(65536):
            got += piece
    head, _, body = got.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def test_headers_too_long_are_a_431(served: Any) -> None:
    data = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 70000
    status, body = raw_exchange(served, data)
    assert status == 431 and body["error"]["code"] == "headers_too_large"


def test_bytes_that_are_not_http_are_a_400(served: Any) -> None:
    status, body = raw_exchange(served, b"\x16\x03\x01 not http\r\n\r\n")
    assert status == 400 and body["error"]["code"] == "invalid_http"


def test_tokenize_and_detokenize_check_their_input(served: Any) -> None:
    post = served.http.post
    wrong(post("/tokenize", json={"model": "tiny"}), 400)
    wrong(post("/tokenize", json={"model": "tiny", "prompt": "a", "messages": []}), 400)
    wrong(post("/tokenize", json={"model": "tiny", "prompt": ["a", "b"]}), 400)
    wrong(post("/detokenize", json={"model": "tiny", "tokens": [259]}), 400)
    wrong(post("/detokenize", json={"model": "tiny", "tokens": "a"}), 400)
    wrong(post("/detokenize", json={"model": "huge", "tokens": [1]}), 404)


def test_errors_carry_a_request_id(served: Any) -> None:
    post = served.http.post
    for response in (
        served.http.get("/nowhere"),
        post("/v1/chat/completions", json={**CHAT, "n": 0}),
        post("/v1/chat/completions", json={**CHAT, "messages": []}),
    ):
        assert len(response.headers["x-medha-request-id"]) == 24


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"stream_options":{"include_usage":5},"stream_options":null', "stream_options"),
        ('"stop":["a",5],"stop":[]', "stop[1]"),
        ('"stop":["a",5],"stop":3', "stop[1]"),
        ('"stop":["a",5],"stop":"abc"', "stop[1]"),
        ('"logit_bias":{"a":"b"},"logit_bias":3', "logit_bias[...]"),
    ],
)
def test_a_wrong_value_whose_key_stands_twice_is_named_without_the_other_value(
    fields: str, param: str
) -> None:
    with pytest.raises(RequestError, match="expected") as refused:
        api.read_chat(f'{{"model":"m","messages":[],{fields}}}'.encode())
    assert str(refused.value.param).startswith(param) and " is " not in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("suffix", b"1e999"), ("suffix", b'"\xff"'), ("guided_json", b'{"\xff":1}')],
)
def test_raw_json_that_cannot_be_decoded_is_the_clients_error(field: str, value: bytes) -> None:
    with pytest.raises(RequestError, match=field):
        api.read_chat(b'{"model":"m","messages":[],"%b":%b}' % (field.encode(), value))


@pytest.mark.parametrize("field", sorted(api.CHAT_UNSUPPORTED | api.OF_COMPLETIONS))
def test_a_known_field_that_is_not_supported_is_refused_by_its_name(field: str) -> None:
    body = {"model": "m", "messages": [], field: {"asks": "for more"}}
    with pytest.raises(RequestError, match=field) as refused:
        api.read_chat(json.dumps(body).encode())
    assert refused.value.param == field and refused.value.code == "unsupported_parameter"
    for default in (None, *(api.CHAT_UNSUPPORTED | api.OF_COMPLETIONS)[field]):
        assert api.read_chat(json.dumps({**body, field: default}).encode()).model == "m"


@pytest.mark.parametrize("field", sorted(api.TOKENIZE_UNSUPPORTED))
def test_tokenize_refuses_what_would_change_the_tokens(field: str) -> None:
    body = {"model": "m", "messages": [], field: {"asks": "for more"}}
    with pytest.raises(RequestError, match=field):
        api.read_tokenize(json.dumps(body).encode())


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    body = {"model": "m", "messages": [], "min_tokens": 3, "max_tokens": 2}
    with pytest.raises(
        RequestError, match="min_tokens is 3: must be at most the limit of output tokens, 2"
    ):
        api.read_chat(json.dumps(body).encode())


def test_stop_strings_are_counted_and_measured_together(served: Any) -> None:
    body = {"model": "tiny", "prompt": "say abc", "max_tokens": 4}
    assert served.http.post("/v1/completions", json={**body, "stop": ["x" * 64] * 16}).is_success
    for stops in (["x" * 64] * 15 + ["x" * 65], ["x"] * 17):
        response = served.http.post("/v1/completions", json={**body, "stop": stops})
        assert wrong(response, 400)["param"] == "stop"
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    response = served.http.post("/v1/messages", json={**chat, "stop_sequences": ["x" * 256] * 5})
    assert response.json()["error"]["message"].startswith("stop_sequences has 1280 characters")


def test_a_compressed_body_is_refused_by_its_coding(served: Any) -> None:
    headers = {"content-encoding": "gzip"}
    error = wrong(served.http.post("/v1/completions", content=b"x", headers=headers), 415)
    assert error["param"] == "content-encoding"


@pytest.mark.parametrize(
    ("field", "value"),
    [("watermarking", 0), ("priority", False), ("length_penalty", True)],
)
def test_a_number_is_no_default_of_a_boolean_nor_a_boolean_of_a_number(
    field: str, value: object
) -> None:
    body = {"model": "m", "messages": [], field: value}
    with pytest.raises(RequestError, match=field):
        api.read_chat(json.dumps(body).encode())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = sorted({*api.ChatBody.__struct_fields__, *api.CompletionBody.__struct_fields__})


@given(body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6), chat=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_body_is_read_or_refused(body: dict[str, Any], chat: bool) -> None:
    read = api.read_chat if chat else api.read_completion
    try:
        params = read(json.dumps(body).encode())
    except RequestError as error:
        status = error.status
    else:
        status = 200
        assert 1 <= params.n <= 8 and len(params.stops) <= 4
    assert status in (200, 400)


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (
            Refusal("deadline_infeasible", "x", earliest_ttft_s=1.2345),
            429,
            {
                "x-should-retry": "false",
                "x-medha-earliest-ttft-ms": "1235",
                "x-medha-dropped-reason": "deadline_infeasible",
            },
        ),
        (Refusal("overloaded", "x", retry_after_s=400.0), 503, {"retry-after": "30"}),
        (Refusal("overloaded", "x", retry_after_s=2.1), 503, {"retry-after": "3"}),
        (Refusal("no_replica", "x"), 503, {"retry-after": "1"}),
        (Refusal("rate_limit_exceeded", "x", retry_after_s=2.0), 429, {"retry-after": "2"}),
        (Refusal("context_length_exceeded", "x"), 400, {}),
        (EngineError("x"), 500, {}),
    ],
)
def test_each_refusal_has_its_status_and_headers(
    error: Exception, status: int, headers: dict[str, str]
) -> None:
    api_error = of_exception(error)
    assert api_error.status == status
    assert headers.items() <= api_error.headers.items()
    assert ("retry-after" in api_error.headers) == ("retry-after" in headers)


def test_an_unexpected_failure_reveals_no_details() -> None:
    api_error = of_exception(ValueError("/secret/path at 10.0.0.1"))
    assert (
        api_error.status == 500
        and b"secret" not in api_error.body()
        and b"10.0" not in api_error.body()
    )


def test_a_large_body_is_checked_like_a_small_one(served: Any) -> None:
    """Large bodies are decoded in a tokenizer process."""
    post, padding = served.http.post, "x" * 100_000
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "say hi"}], "user": padding}
    error = wrong(post("/v1/chat/completions", json=chat), 400)
    assert error["param"] == "user"
    completion = {"model": "tiny", "prompt": "say hi", "unknown": [padding], "max_tokens": 2}
    assert post("/v1/completions", json=completion).status_code == 200
    error = wrong(post("/v1/completions", json={**completion, "model": "huge"}), 404)
    assert error["code"] == "model_not_found"
    error = wrong(post("/v1/completions", content=json.dumps(completion)[:-1]), 400)
    assert error["code"] == "invalid_json"
    many = {**completion, "unknown": [[]] * 260_000}
    body = json.dumps(many, separators=(",", ":"))
    error = wrong(post("/v1/completions", content=body), 400)
    assert "JSON values: send fewer" in error["message"]


def test_a_prompt_beyond_the_context_is_refused_by_its_bytes(served: Any) -> None:
    completion = {"model": "tiny", "prompt": "x" * 1_000_000}
    error = wrong(served.http.post("/v1/completions", json=completion), 400)
    assert error["code"] == "context_length_exceeded"
    assert "your prompt has 1000000 bytes, which are at least" in error["message"]
