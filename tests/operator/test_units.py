"""Timestamps, quantities and records of the status, as the API writes them."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.errors import SpecError
from medha_operator.planning.restarts import is_recent
from medha_operator.resources.objects import integer, rfc3339, unix_s
from medha_operator.resources.views import load_status


@given(
    st.datetimes(min_value=datetime.datetime(1970, 1, 1), max_value=datetime.datetime(2400, 1, 1))
)
def test_timestamps_follow_the_calendar(when: datetime.datetime) -> None:
    at_s = when.replace(tzinfo=datetime.UTC).timestamp()
    text = when.replace(microsecond=0).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert rfc3339(at_s) == text
    assert unix_s(text) == int(at_s)


def test_a_text_that_is_no_timestamp_reads_as_zero() -> None:
    assert unix_s("yesterday") == unix_s("") == 0.0
    assert unix_s("1970-01-01T00:01:00.25Z") == 60.0


@pytest.mark.parametrize(
    "resource, text, expected",
    [
        ("cpu", "500m", 500),
        ("cpu", "2", 2000),
        ("cpu", 2, 2000),
        ("cpu", "0.1", 100),
        ("cpu", "1.0001", 1001),
        ("memory", "1Gi", 1 << 30),
        ("memory", "1.5Ki", 1536),
        ("memory", "1k", 1000),
        ("memory", "1e3", 1000),
        ("memory", "128974848000m", 128974848),
        ("nvidia.com/gpu", "8", 8),
        ("pods", "110", 110),
        ("memory", "1Ti", 1 << 40),
    ],
)
def test_quantities_are_read_as_kubernetes_writes_them(
    resource: str, text: str, expected: int
) -> None:
    assert integer(resource, text) == expected


@pytest.mark.parametrize("text", ["", "lots", "-1", "1 Gi", "1Zi", "0x10"])
def test_a_text_that_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="must be a quantity"):
        integer("cpu", text)


def test_an_unreadable_status_reads_as_empty() -> None:
    assert load_status({"restarts": "none"}).restarts == ()
    assert load_status({"observedGeneration": 3, "unknown": 1}).conditions == ()
    line = {"replica": 1, "group": 0, "attempt": 2, "failedAt": ["1970-01-01T00:00:09Z"]}
    record = load_status({"restarts": [line]}).restart(1, 0)
    assert record is not None
    assert is_recent(record, now_s=600.0)
    assert not is_recent(record, now_s=610.0)
