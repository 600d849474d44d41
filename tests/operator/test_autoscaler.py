"""A scaling round over all resources, some failing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from medha.adapters.prometheus import Metrics
from medha_operator.controllers.autoscaler import MAX_RECORDS_IN_ALL, in_turn, max_records
from medha_operator.kube.client import ClusterError
from medha_operator.kube.lease import NotLeading
from medha_operator.resources.objects import Key

KEYS: list[Key] = [("team", name) for name in "abcde"]


def round_of(
    errors: Mapping[str, Exception | None], limit_s: float = 60.0
) -> tuple[list[str], str]:
    """Return the resources scaled and the metrics. `errors`: what scaling raises, None to hang."""
    metrics, done = Metrics("operator"), []

    async def scale(key: Key) -> None:
        if key[1] in errors:
            error = errors[key[1]]
            if error is not None:
                raise error
            await asyncio.Event().wait()
        done.append(key[1])

    asyncio.run(in_turn(KEYS, scale, limit_s, metrics))
    return done, metrics.text().decode()


def test_an_unexpected_error_is_counted_and_the_other_resources_are_scaled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = {"a": KeyError("surprise"), "c": ClusterError(500, "Oops", "the server said so")}
    done, metrics = round_of(errors)
    assert done == ["b", "d", "e"]
    assert 'medha_operator_errors_total{kind="unexpected"} 1' in metrics
    assert "team/a: not scaled: unexpected error" in caplog.text
    assert "team/c: not scaled: the server said so" in caplog.text


def test_a_resource_that_takes_too_long_does_not_hold_up_the_others() -> None:
    assert round_of({"a": None, "b": None}, limit_s=0.05)[0] == ["c", "d", "e"]


def test_a_round_ends_when_the_operator_no_longer_leads() -> None:
    with pytest.raises(NotLeading):
        round_of({"b": NotLeading("another operator leads")})


def test_journals_get_shorter_the_more_there_are() -> None:
    assert [max_records(journals) for journals in (0, 1, 40, 100, 1000)] == [500, 500, 500, 200, 60]
    assert all(count * max_records(count) <= MAX_RECORDS_IN_ALL for count in range(1, 334))
