"""Whose word about demand counts, and whose silence."""

from __future__ import annotations

from medha.messages import ModelDemand, RouterDemand
from medha_operator.routers import GIVEN_UP_S, Routers
from medha_operator.signals import STALE_S


def said(held: int) -> RouterDemand:
    return RouterDemand(window_s=30.0, models=(ModelDemand(model="m", held=held),))


def told(routers: Routers, now_s: float) -> tuple[bool, int]:
    demand = routers.demand("m", now_s)
    return demand.fresh, sum(each.held for each in demand.models)


def test_all_routers_that_there_are_must_have_answered_lately() -> None:
    routers = Routers()
    assert told(routers, 0.0) == (False, 0)
    routers.found(["a", "b", "b"], 0.0)
    routers.said("a", said(1), 0.0)
    assert told(routers, 1.0) == (False, 1)
    routers.said("b", said(2), 1.0)
    assert told(routers, 2.0) == (True, 3)
    assert told(routers, STALE_S + 0.5) == (False, 2)
    routers.found(["b"], 10.0)
    assert told(routers, STALE_S + 0.5) == (True, 2)


def test_one_that_never_answers_is_given_up_after_a_while_until_it_answers() -> None:
    routers = Routers()
    routers.found(["a", "b"], 0.0)
    fresh = []
    for now in range(int(GIVEN_UP_S) + 11):
        routers.said("a", said(1), float(now))
        fresh.append(told(routers, now)[0])
    assert fresh.index(True) == GIVEN_UP_S + 1 and all(fresh[int(GIVEN_UP_S) + 1 :])
    now_s = GIVEN_UP_S + 20.0
    routers.said("b", said(2), now_s)
    routers.said("a", said(1), now_s)
    assert told(routers, now_s) == (True, 3)
    routers.said("a", said(1), now_s + GIVEN_UP_S)
    assert told(routers, now_s + GIVEN_UP_S) == (False, 1)
    routers.found(["a", "b", "c"], now_s + GIVEN_UP_S)  # the new one has its time, too
    routers.said("a", said(1), now_s + GIVEN_UP_S + 1.0)
    assert told(routers, now_s + GIVEN_UP_S + 1.0) == (False, 1)


def test_nobody_is_given_up_for_a_time_when_nobody_was_heard() -> None:
    """The operator was cut off: the first that answers again says but a part."""
    routers = Routers()
    routers.found(["a", "b"], 0.0)
    for each in ("a", "b"):
        routers.said(each, said(1), 0.0)
    now_s = 10.0 * GIVEN_UP_S
    assert told(routers, now_s) == (False, 0)
    routers.said("a", said(1), now_s)
    assert told(routers, now_s) == (False, 1)
