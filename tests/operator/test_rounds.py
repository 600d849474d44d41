"""A round over all resources, of which some fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from medha.adapters.prometheus import Metrics
from medha_operator.autoscale import KEPT_OF_ALL, kept
from medha_operator.client import ClusterError
from medha_operator.lease import NotLeading
from medha_operator.projections import Key
from medha_operator.rounds import each_in_turn

KEYS: list[Key] = [("team", name) for name in "abcde"]


def round_of(
    faults: Mapping[str, Exception | None], limit_s: float = 60.0
) -> tuple[list[str], str]:
    """Who was looked at, and the metrics after it; a fault of None never ends."""
    metrics, done = Metrics("operator"), []

    async def look(key: Key) -> None:
        if key[1] in faults:
            fault = faults[key[1]]
            if fault is not None:
                raise fault
            await asyncio.Event().wait()
        done.append(key[1])

    asyncio.run(each_in_turn(KEYS, look, limit_s, metrics))
    return done, metrics.text().decode()


def test_one_that_fails_in_whatever_way_is_counted_and_the_others_have_their_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = {"a": KeyError("surprise"), "c": ClusterError(500, "Oops", "the server said so")}
    done, shown = round_of(faults)
    assert done == ["b", "d", "e"]
    assert 'medha_operator_errors_total{kind="unexpected"} 1' in shown
    assert "team/a: not scaled: unexpected" in caplog.text
    assert "team/c: not scaled: the server said so" in caplog.text


def test_one_that_takes_for_ever_is_left_and_the_others_have_their_turn() -> None:
    assert round_of({"a": None, "b": None}, limit_s=0.05)[0] == ["c", "d", "e"]


def test_who_does_not_lead_any_more_looks_at_nobody_else() -> None:
    with pytest.raises(NotLeading):
        round_of({"b": NotLeading("another one leads")})


def test_the_more_journals_there_are_the_shorter_each() -> None:
    assert [kept(each) for each in (0, 1, 40, 100, 1000)] == [500, 500, 500, 200, 60]
    assert all(each * kept(each) <= KEPT_OF_ALL for each in range(1, 334))
