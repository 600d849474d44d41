"""Times, quantities and memory in the API's own words."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.errors import SpecError
from medha_operator.memory import recall
from medha_operator.moments import rfc3339, unix_s
from medha_operator.quantities import integer


@given(
    st.datetimes(min_value=datetime.datetime(1970, 1, 1), max_value=datetime.datetime(2400, 1, 1))
)
def test_moments_are_written_as_the_calendar_has_them(when: datetime.datetime) -> None:
    at_s = when.replace(tzinfo=datetime.UTC).timestamp()
    text = when.replace(microsecond=0).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert rfc3339(at_s) == text
    assert unix_s(text) == int(at_s)


def test_a_text_that_is_no_moment_is_long_ago() -> None:
    assert unix_s("yesterday") == unix_s("") == 0.0
    assert unix_s("1970-01-01T00:01:00.25Z") == 60.0


@pytest.mark.parametrize(
    "resource, text, expected",
    [
        ("cpu", "500m", 500), ("cpu", "2", 2000), ("cpu", 2, 2000), ("cpu", "0.1", 100),
        ("cpu", "1.0001", 1001), ("memory", "1Gi", 1 << 30), ("memory", "1.5Ki", 1536),
        ("memory", "1k", 1000), ("memory", "1e3", 1000), ("memory", "128974848000m", 128974848),
        ("nvidia.com/gpu", "8", 8), ("pods", "110", 110), ("memory", "1Ti", 1 << 40),
    ],
)  # fmt: skip
def test_quantities_are_read_as_kubernetes_writes_them(
    resource: str, text: str, expected: int
) -> None:
    assert integer(resource, text) == expected


@pytest.mark.parametrize("text", ["", "lots", "-1", "1 Gi", "1Zi", "0x10"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="must be a quantity"):
        integer("cpu", text)


def test_a_memory_that_cannot_be_read_is_empty() -> None:
    assert recall({"restarts": "none"}).restarts == ()
    assert recall({"observedGeneration": 3, "unknown": 1}).conditions == ()
    line = {"replica": 1, "group": 0, "attempt": 2, "failedAt": ["1970-01-01T00:00:09Z"]}
    found = recall({"restarts": [line]}).restart(1, 0)
    assert found is not None
    assert found.failed_s == (9.0,)
