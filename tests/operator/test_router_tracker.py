"""Routers whose reports of demand count, and whose silence counts."""

from __future__ import annotations

from medha.messages import ModelDemand, RouterDemand
from medha_operator.planning.scaling_signals import ROUTER_GIVEN_UP_S, STALE_S, RouterTracker


def said(held: int) -> RouterDemand:
    return RouterDemand(window_s=30.0, models=(ModelDemand(model="m", held=held),))


def told(routers: RouterTracker, now_s: float) -> tuple[bool, int]:
    demand = routers.demand("m", now_s)
    return demand.fresh, sum(model.held for model in demand.models)


def test_demand_is_fresh_only_if_all_routers_reported_recently() -> None:
    routers = RouterTracker()
    assert told(routers, 0.0) == (False, 0)
    routers.set_addresses(["a", "b", "b"], 0.0)
    routers.record("a", said(1), 0.0)
    assert told(routers, 1.0) == (False, 1)
    routers.record("b", said(2), 1.0)
    assert told(routers, 2.0) == (True, 3)
    assert told(routers, STALE_S + 0.5) == (False, 2)
    routers.set_addresses(["b"], 10.0)
    assert told(routers, STALE_S + 0.5) == (True, 2)


def test_a_router_that_never_answers_is_left_out_after_a_while_until_it_answers() -> None:
    routers = RouterTracker()
    routers.set_addresses(["a", "b"], 0.0)
    fresh = []
    for now in range(int(ROUTER_GIVEN_UP_S) + 11):
        routers.record("a", said(1), float(now))
        fresh.append(told(routers, now)[0])
    assert fresh.index(True) == ROUTER_GIVEN_UP_S + 1 and all(fresh[int(ROUTER_GIVEN_UP_S) + 1 :])
    now_s = ROUTER_GIVEN_UP_S + 20.0
    routers.record("b", said(2), now_s)
    routers.record("a", said(1), now_s)
    assert told(routers, now_s) == (True, 3)
    routers.record("a", said(1), now_s + ROUTER_GIVEN_UP_S)
    assert told(routers, now_s + ROUTER_GIVEN_UP_S) == (False, 1)
    routers.set_addresses(["a", "b", "c"], now_s + ROUTER_GIVEN_UP_S)
    routers.record("a", said(1), now_s + ROUTER_GIVEN_UP_S + 1.0)
    assert told(routers, now_s + ROUTER_GIVEN_UP_S + 1.0) == (False, 1)


def test_no_router_is_left_out_for_a_time_in_which_none_answered() -> None:
    """The operator was cut off: the first router that answers again reports only a part."""
    routers = RouterTracker()
    routers.set_addresses(["a", "b"], 0.0)
    for address in ("a", "b"):
        routers.record(address, said(1), 0.0)
    now_s = 10.0 * ROUTER_GIVEN_UP_S
    assert told(routers, now_s) == (False, 0)
    routers.record("a", said(1), now_s)
    assert told(routers, now_s) == (False, 1)
