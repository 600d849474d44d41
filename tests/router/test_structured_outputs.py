"""Grammars as clients ask for them: which reach the replica, and which are refused by name."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.errors import RequestError
from medha.grammar_limits import MAX_SOURCE_BYTES
from medha_router import protocol
from medha_router.structured.checker import grammar_of
from medha_router.structured.checker_process import GrammarChecker
from medha_router.structured.sources import GrammarSource

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
OBJECT = '{"type":"object"}'
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "say a"}]}


def json_schema(schema: object = SCHEMA) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", OBJECT),
        ({"response_format": json_schema()}, "json_schema", TEXT),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "json_schema",
            OBJECT,
        ),
        ({"guided_json": SCHEMA}, "json_schema", TEXT),
        ({"guided_json": TEXT}, "json_schema", TEXT),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["yes", "no"]}, "choice", '["yes","no"]'),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["é"]}}, "choice", '["é"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", OBJECT),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, "regex", "a"),
    ],
)
def test_each_way_to_ask_for_a_grammar_reaches_the_replica(
    served: Any, fields: dict[str, Any], kind: str, text: str
) -> None:
    body = json.dumps({**CHAT, **fields}, separators=(",", ":"), ensure_ascii=False)
    response = served.http.post("/v1/chat/completions", content=body.encode())
    assert response.status_code == 200, response.text
    assert served.controllers[0].seen[-1].sampling.grammar == grammar_of(kind, text)


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"guided_json": None}],
)
def test_a_request_without_a_grammar_carries_none(served: Any, fields: dict[str, Any]) -> None:
    assert served.http.post("/v1/chat/completions", json={**CHAT, **fields}).status_code == 200
    assert served.controllers[0].seen[-1].sampling.grammar == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_schema([])}, "response_format.json_schema.schema"),
        ({"response_format": json_schema({"type": "wat"})}, "response_format.json_schema.schema"),
        (
            {"response_format": json_schema({"$ref": "http://x/y"})},
            "response_format.json_schema.schema",
        ),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a(?=b)"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_json": SCHEMA}, "guided_json"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"guided_json": {"enum": ["x" * MAX_SOURCE_BYTES]}}, "guided_json"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_a_grammar_that_no_output_can_follow_is_refused_by_its_field(
    served: Any, fields: dict[str, Any], param: str
) -> None:
    response = served.http.post("/v1/chat/completions", json={**CHAT, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error


@given(
    grammar=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
        max_leaves=6,
    ),
    field=st.sampled_from(["response_format", "structured_outputs", "guided_json"]),
)
@settings(max_examples=200, deadline=None)
def test_any_value_is_read_or_refused_by_its_field(grammar: object, field: str) -> None:
    status, param = 400, field
    try:
        protocol.read_chat(json.dumps({**CHAT, field: grammar}).encode())
    except RequestError as error:
        status, param = error.status, error.param or ""
    assert status == 400 and param.startswith(field)


def test_a_check_that_takes_too_long_ends_its_process(byte_level_json: bytes) -> None:
    async def check() -> None:
        checker = GrammarChecker(check_s=0.0)
        slow = GrammarSource("regex", "(" + "a?" * 2000 + "){30}", "guided_regex")
        try:
            await checker.check("k", byte_level_json, GrammarSource("regex", "a", "guided_regex"))
            began_s = time.monotonic()
            with pytest.raises(RequestError, match="too complex"):
                await checker.check("k", byte_level_json, slow)
            assert time.monotonic() - began_s < 30.0  # the check itself takes minutes
            again = GrammarSource("regex", "b", "guided_regex")
            assert await checker.check("k", byte_level_json, again)
        finally:
            await checker.close()

    asyncio.run(check())


def test_a_tokenizer_that_the_library_cannot_read_refuses_only_grammars() -> None:
    async def check() -> None:
        checker = GrammarChecker()
        try:
            with pytest.raises(RequestError, match="tokenizer") as refused:
                await checker.check("k", b"{}", GrammarSource("regex", "a", "guided_regex"))
            assert refused.value.code == "unsupported_parameter"
        finally:
            await checker.close()

    asyncio.run(check())


def test_a_cancelled_check_leaves_the_next_one_its_own_answer(byte_level_json: bytes) -> None:
    async def check() -> None:
        checker = GrammarChecker()
        first, second = (GrammarSource("regex", text, "guided_regex") for text in ("a", "b"))
        try:
            task = asyncio.create_task(checker.check("k", byte_level_json, first))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            expected = grammar_of("regex", "b")
            assert await checker.check("k", byte_level_json, second) == expected
        finally:
            await checker.close()

    asyncio.run(check())
