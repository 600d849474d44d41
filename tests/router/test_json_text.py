"""Large JSON: values are counted without being made, and token ids are read in parts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from medha.errors import RequestError
from medha_router.tokenization import json_text
from medha_router.tokenization.encoder import read_large
from medha_router.tokenization.json_text import check_body, check_values, count_values, read_ids

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('",[{\\\n é', max_size=9),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text('",\\[', max_size=4), inner)
    ),
    max_leaves=30,
)
PART_SIZES = st.integers(1, 9)
PATCHED = [HealthCheck.function_scoped_fixture]


def values_of(value: Any) -> int:
    """Opened objects and lists, and commas, as the oracle."""
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + sum(map(values_of, value.values()))
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(values_of, value))
    return 0


@settings(suppress_health_check=PATCHED, deadline=None)
@given(JSON, PART_SIZES)
@example(['\\\\"', ",", "\\", '[["'], 1)
def test_values_are_counted_outside_strings_only(
    monkeypatch: pytest.MonkeyPatch, value: Any, part: int
) -> None:
    monkeypatch.setattr(json_text, "PART_BYTES", part)
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert count_values(text.encode()) == values_of(value)
        assert min(3, count_values(text.encode(), 2)) == min(3, values_of(value))


@settings(suppress_health_check=PATCHED, deadline=None)
@given(st.lists(st.integers(0, (1 << 31) - 1)), PART_SIZES, st.sampled_from(["", " ", "\n\t"]))
def test_a_list_of_token_ids_is_read_in_parts(
    monkeypatch: pytest.MonkeyPatch, ids: list[int], part: int, space: str
) -> None:
    monkeypatch.setattr(json_text, "PART_BYTES", part)
    text = f"{space}[{space}" + f"{space},{space}".join(map(str, ids)) + f"{space}]{space}"
    tokens = read_ids(text.encode(), "prompt")
    assert tokens is not None and tokens.tolist() == ids and tokens.dtype == "<i4"


@pytest.mark.parametrize(
    "text",
    [
        *("", "1", '"a"', "[1", "[1,]", "[,1]", "[1,,2]", "[1 2]", "[01]", "[-1]", "[1.5]", "{}"),
        *("[[1]]", "[2147483648]", '["a"]', "[null]", "[1]]", "[1,2,]", "[1]x", "[,]", "[ ,1]"),
    ],
)
@pytest.mark.parametrize("part", [1, 2, 100])
def test_anything_else_is_no_list_of_token_ids(
    monkeypatch: pytest.MonkeyPatch, text: str, part: int
) -> None:
    monkeypatch.setattr(json_text, "PART_BYTES", part)
    assert read_ids(text.encode(), "prompt") is None


def test_too_many_token_ids_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_text, "MAX_IDS", 3)
    assert read_ids(b"[1,2,3]", "prompt") is not None
    with pytest.raises(RequestError, match="prompt holds more than 3 token ids"):
        read_ids(b"[1,2,3,4]", "prompt")


def test_too_many_values_are_refused_in_every_field_but_the_ids() -> None:
    many = b"[" + b"[]," * json_text.MAX_VALUES + b"[]]"
    ids = b"[" + b"1," * json_text.MAX_VALUES + b"1]"
    text = b'"' + b"[{," * json_text.MAX_VALUES + b'"'
    check_values(text, "prompt")
    with pytest.raises(RequestError, match="messages holds more than 262144 JSON values"):
        check_values(many, "messages")
    for field in (b"tools", b"unheard_of", b"model"):
        with pytest.raises(RequestError, match="the body holds more than"):
            check_body(b'{"model":"m","prompt":"a","' + field + b'":' + many + b"}")
    with pytest.raises(RequestError, match="the body holds"):
        check_body(b'{"prompt":' + many + b',"prompt":' + ids + b"}")  # the last one counts
    check_body(b'{"prompt":' + ids + b',"messages":' + text + b"}")


def test_a_large_body_is_read_but_for_its_raw_json() -> None:
    text = json.dumps("x" * 100_000)
    body = f'{{"model":"m","prompt":{text},"max_tokens":7,"logit_bias":{{"5":-1}}}}'.encode()
    read, raw = read_large("completion", bytearray(body))
    params = json.loads(read.params)
    assert raw == text.encode() and params["raw"] == ""
    assert (params["max_output_tokens"], params["sampling"]["logit_bias"]) == (7, {"5": -1.0})
