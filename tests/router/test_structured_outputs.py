"""Grammars as clients ask for them: which reach the replica, and which are refused by name."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.errors import Refusal, RequestError
from medha.grammar_limits import MAX_SOURCE_BYTES
from medha_router import protocol
from medha_router.structured.check_messages import Check
from medha_router.structured.checker import check, grammar_of
from medha_router.structured.checker_process import MAX_TOKENIZERS, GrammarChecker
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
        (
            {"structured_outputs": {"regex": "a"}, "guided_regex": "b"},  # as guidance sends both
            "regex",
            "a",
        ),
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


SLOW = {"type": "integer", "multipleOf": 62615533}


def regex(text: str) -> GrammarSource:
    return GrammarSource("regex", text, "guided_regex")


def schema(value: object) -> GrammarSource:
    return GrammarSource("json_schema", json.dumps(value), "guided_json")


def checked(check: Callable[[GrammarChecker], Awaitable[object]], **limits: float) -> None:
    """Run checks with a checker, and close it."""

    async def run() -> None:
        checker = GrammarChecker(**limits)
        try:
            await check(checker)
        finally:
            await checker.close()

    asyncio.run(run())


def test_a_check_that_takes_too_long_is_refused_and_leaves_the_process(
    byte_level_json: bytes,
) -> None:
    async def check(checker: GrammarChecker) -> None:
        await checker.check("k", byte_level_json, regex("a"), "a")
        with pytest.raises(RequestError, match=r"more than 0\.2 s of CPU time"):
            await checker.check("k", byte_level_json, schema(SLOW), "a")
        # The process still holds the tokenizer, which is not sent again.
        assert await checker.check("k", b"", regex("b"), "a")

    checked(check)


def test_a_grammar_that_took_too_long_is_refused_at_once_when_it_comes_again(
    byte_level_json: bytes,
) -> None:
    async def check(checker: GrammarChecker) -> None:
        with pytest.raises(RequestError) as first:
            await checker.check("k", byte_level_json, schema(SLOW), "a")
        with pytest.raises(RequestError) as again:
            async with asyncio.timeout(0):  # it does not wait for anything
                await checker.check("k", byte_level_json, schema(SLOW), "b")
        assert str(again.value) == str(first.value)

    checked(check)


def test_the_grammars_of_one_client_do_not_make_another_wait_for_all_of_them(
    byte_level_json: bytes,
) -> None:
    async def check(checker: GrammarChecker) -> None:
        ended: list[str] = []

        async def one(tenant: str, source: GrammarSource) -> None:
            with contextlib.suppress(RequestError):
                await checker.check("k", byte_level_json, source, tenant)
            ended.append(tenant)

        many = [schema({"type": "integer", "multipleOf": 62615533 + i}) for i in range(6)]
        await asyncio.gather(*(one("evil", source) for source in many), one("honest", regex("a")))
        assert ended.index("honest") <= 1, ended

    checked(check)


def test_a_grammar_waits_a_bounded_time_for_its_check(byte_level_json: bytes) -> None:
    async def check(checker: GrammarChecker) -> None:
        with pytest.raises(Refusal, match="retry later"):
            await checker.check("k", byte_level_json, regex("a"), "a")

    checked(check, wait_s=0.0)


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


USUAL = [
    schema(optional(170)),
    schema({**optional(600), "required": list(optional(600)["properties"])}),
    schema({"type": "object", "properties": {f"g{i}": optional(12) for i in range(40)}}),
    schema({"enum": [f"label_{i}" for i in range(4000)]}),
    GrammarSource("choice", json.dumps([f"label_{i}" for i in range(1000)]), "guided_choice"),
    GrammarSource("choice", json.dumps([f"{i * i:x}" for i in range(6000)]), "guided_choice"),
]
EXCESSIVE = [
    (schema(optional(171)), "171 properties that may be left out: at most 170"),
    (schema({"type": "array", "items": [{"anyOf": [optional(500)]}]}), "500 properties"),
    (schema({"anyOf": [optional(100 + i) for i in range(3)]}), "row has"),
    (schema({"type": "object", "properties": {f"g{i}": optional(20) for i in range(50)}}), "big"),
    (
        schema(
            {"type": "object", "patternProperties": {f"^p{i}_[a-z]*$": {} for i in range(1000)}}
        ),
        "CPU time|too big",
    ),
    (GrammarSource("json_schema", '{"not":' * 5000 + "{" + "}" * 5001, "guided_json"), "recursion"),
    (regex("(a|aa){500}(b|bb){500}"), "too many expressions"),
]


@pytest.mark.parametrize("source", USUAL, ids=lambda source: source.kind)
def test_what_clients_usually_ask_for_passes_the_check(
    byte_level_json: bytes, source: GrammarSource
) -> None:
    async def check(checker: GrammarChecker) -> None:
        assert await checker.check("k", byte_level_json, source, "a")

    checked(check)


@pytest.mark.parametrize(("source", "reason"), EXCESSIVE)
def test_a_grammar_whose_compiling_or_masks_cost_too_much_is_refused(
    byte_level_json: bytes, source: GrammarSource, reason: str
) -> None:
    async def check(checker: GrammarChecker) -> None:
        with pytest.raises(RequestError, match=reason):
            await checker.check("k", byte_level_json, source, "a")

    checked(check)


@pytest.mark.parametrize(("mask_s", "error"), [(0.0009, ""), (0.003, "takes 3 ms of CPU time")])
def test_a_grammar_whose_masks_take_too_long_is_refused(
    byte_level_json: bytes, monkeypatch: pytest.MonkeyPatch, mask_s: float, error: str
) -> None:
    clock = itertools.count(0.0, mask_s)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    tokenizer = llguidance.LLTokenizer(byte_level_json.decode())
    try:
        checked = check(tokenizer, Check("k", b"", "regex", "[a-z]{40}", (), compile_s=1000.0))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    assert error in checked.error and bool(error) == bool(checked.error)


def test_a_tokenizer_that_the_library_cannot_read_refuses_only_grammars() -> None:
    async def check(checker: GrammarChecker) -> None:
        with pytest.raises(RequestError, match="tokenizer") as refused:
            await checker.check("k", b"{}", regex("a"), "a")
        assert refused.value.code == "unsupported_parameter"

    checked(check)


def test_the_tokenizer_used_longest_ago_makes_room_for_a_new_one(byte_level_json: bytes) -> None:
    async def check(checker: GrammarChecker) -> None:
        for number in range(MAX_TOKENIZERS):
            await checker.check(f"k{number}", byte_level_json, regex("a"), "a")
        assert await checker.check("k0", b"", regex("b"), "a")
        await checker.check("new", byte_level_json, regex("a"), "a")
        for held in ("k0", "k2", f"k{MAX_TOKENIZERS - 1}", "new"):
            assert await checker.check(held, b"", regex("c"), "a")
        with pytest.raises(RequestError, match="tokenizer"):
            await checker.check("k1", b"", regex("c"), "a")

    checked(check)


def test_a_cancelled_check_leaves_the_next_one_its_own_answer(byte_level_json: bytes) -> None:
    async def check(checker: GrammarChecker) -> None:
        task = asyncio.create_task(checker.check("k", byte_level_json, regex("a"), "a"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        expected = grammar_of("regex", "b")
        assert await checker.check("k", byte_level_json, regex("b"), "a") == expected

    checked(check)
