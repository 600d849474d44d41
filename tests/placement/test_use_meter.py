"""Limits of tenants hold over all routers, and every request has its turn."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.errors import Refusal
from medha.fleet.use_meter import (
    FORGOTTEN_S,
    REPEAT_S,
    STALE_S,
    UNLIMITED,
    RequestCost,
    TenantLimits,
    UseMeter,
)
from medha.messages import MAX_TENANT_COUNTS, Codec, TenantCounts

MINUTE_S = 60.0


def admits(meter: UseMeter, limits: TenantLimits, now: float, tenant: str = "a") -> bool:
    try:
        meter.arrive(tenant, limits, now)
    except Refusal:
        return False
    return True


def exchange(meters: list[UseMeter], now: float) -> None:
    """Send the reports of each router to the others, as controllers do."""
    codec: Codec[TenantCounts] = Codec(TenantCounts)
    for index, meter in enumerate(meters):
        message = codec.decode(codec.encode(TenantCounts(f"r{index}", meter.report(now))))
        for other in meters:
            if other is not meter:
                other.receive(message.router, message.counts, now)


@pytest.mark.parametrize("routers", [1, 3])
def test_a_flood_gets_its_requests_per_minute_over_all_routers(routers: int) -> None:
    limits = TenantLimits(requests_per_minute=100.0)
    meters = [UseMeter() for _ in range(routers)]
    admitted = 0
    for tick in range(10 * 60 * 4):
        now = tick / 4
        for meter in meters:
            admitted += sum(admits(meter, limits, now) for _ in range(10))
        exchange(meters, now)
    assert admitted / 10 == pytest.approx(100.0, rel=0.12)


def test_a_wait_as_long_as_the_refusal_says_suffices() -> None:
    meter, limits = UseMeter(), TenantLimits(requests_per_minute=10.0)
    while admits(meter, limits, 5.0):
        pass
    with pytest.raises(Refusal, match="tenant a may use 10 requests per minute") as caught:
        meter.arrive("a", limits, 5.0)
    assert caught.value.code == "rate_limit_exceeded"
    wait_s = caught.value.retry_after_s
    assert wait_s is not None and 0.0 < wait_s <= MINUTE_S
    assert not admits(meter, limits, 5.0 + 0.9 * wait_s)
    assert admits(meter, limits, 5.0 + 1.001 * wait_s)


def cost(prompt_tokens: int, work_s: float = 0.0, most_tokens: int = 0) -> RequestCost:
    return RequestCost(prompt_tokens=prompt_tokens, most_tokens=most_tokens, work_s=work_s)


def test_an_output_counts_with_its_limit_until_it_ends() -> None:
    meters, limits = [UseMeter(), UseMeter()], TenantLimits(tokens_per_minute=1000.0)
    long = cost(100, most_tokens=8000)
    meters[0].begin("a", limits, long, 0.0)
    exchange(meters, 0.0)
    for meter in meters:
        with pytest.raises(Refusal, match="has used 98, with up to 8000 to come: retry in 1 s"):
            meter.begin("a", limits, cost(1), 1.0)
    meters[0].end("a", limits, long, 50, 1.0)
    exchange(meters, 1.0)
    for meter in meters:
        meter.begin("a", limits, cost(100), 1.0)


def test_tokens_count_by_prompt_and_output_and_a_longer_prompt_has_its_turn() -> None:
    meter, limits = UseMeter(), TenantLimits(tokens_per_minute=1000.0)
    meter.begin("a", limits, cost(5000, 1.0), 0.0)
    meter.end("a", limits, cost(1, 1.0), 500, 0.0)
    with pytest.raises(Refusal, match="1000 tokens per minute and has used 5500"):
        meter.begin("a", limits, cost(1, 1.0), 0.0)
    meter.begin("b", limits, cost(1000, 1.0), 0.0)
    later_s = MINUTE_S * math.log(5500 / 500) + 0.01
    meter.begin("a", limits, cost(5000, 1.0), later_s)


def test_work_in_flight_is_limited_and_a_lone_request_always_runs() -> None:
    meters, limits = [UseMeter(), UseMeter()], TenantLimits(concurrent_s=10.0)
    meters[0].begin("a", limits, cost(1, 8.0), 0.0)
    exchange(meters, 0.0)
    for meter in meters:
        with pytest.raises(Refusal, match=r"10 s of prompts in flight and has 8.00 s"):
            meter.begin("a", limits, cost(1, 3.0), 0.1)
    meters[1].begin("a", limits, cost(1, 2.0), 0.1)
    meters[0].end("a", limits, cost(1, 8.0), 9, 1.0)
    meters[1].end("a", limits, cost(1, 2.0), 9, 1.0)
    exchange(meters, 1.0)
    meters[1].begin("a", limits, cost(1, 99.0), 1.0)


def test_work_in_flight_is_reported_again_and_that_of_a_dead_router_expires() -> None:
    meters, limits = [UseMeter(), UseMeter()], TenantLimits(concurrent_s=10.0)
    meters[0].begin("a", limits, cost(1, 9.0), 0.0)
    now = 0.0
    for _ in range(20):
        exchange(meters, now)
        now += REPEAT_S / 2
    with pytest.raises(Refusal):
        meters[1].begin("a", limits, cost(1, 2.0), now)
    meters[1].begin("a", limits, cost(1, 2.0), now + STALE_S)


def test_tenants_without_limits_are_neither_counted_nor_reported() -> None:
    meter = UseMeter()
    meter.arrive("a", UNLIMITED, 0.0)
    meter.begin("a", TenantLimits(), cost(10, 1.0), 0.0)
    assert not meter.report(0.0) and not len(meter)


def test_reports_are_bounded_and_complete() -> None:
    meter, limits = UseMeter(), TenantLimits(requests_per_minute=9.0)
    tenants = [f"t{index}" for index in range(2 * MAX_TENANT_COUNTS + 5)]
    for tenant in tenants:
        meter.arrive(tenant, limits, 0.0)
    reports = [meter.report(0.0) for _ in range(4)]
    assert [len(report) for report in reports] == [MAX_TENANT_COUNTS, MAX_TENANT_COUNTS, 5, 0]
    assert [count.tenant for report in reports for count in report] == tenants


def test_idle_tenants_are_forgotten() -> None:
    meters, limits = [UseMeter(), UseMeter()], TenantLimits(requests_per_minute=9.0)
    for index in range(100):
        meters[0].arrive(f"t{index}", limits, 0.0)
    exchange(meters, 0.0)
    exchange(meters, FORGOTTEN_S + 1.0)
    assert [len(meter) for meter in meters] == [0, 0]


def test_a_hundred_thousand_tenants_cost_as_much_as_ten() -> None:
    limits = TenantLimits(requests_per_minute=1e6, tokens_per_minute=1e9, concurrent_s=1e6)

    def cost_s(tenants: int) -> float:
        meter = UseMeter()
        for index in range(tenants):
            meter.arrive(f"t{index}", limits, 0.0)
            meter.receive("r1", (), 0.0)
        best_s = math.inf
        for _ in range(20):
            began_s = time.thread_time()
            for index in range(200):
                meter.arrive(f"t{index * 37 % tenants}", limits, 1.0)
                meter.begin(f"t{index * 37 % tenants}", limits, cost(10, 1.0), 1.0)
                meter.end(f"t{index * 37 % tenants}", limits, cost(10, 1.0), 10, 1.0)
            meter.report(1.0)
            best_s = min(best_s, (time.thread_time() - began_s) / 200)
        return best_s

    assert cost_s(100_000) < max(200e-6, 5 * cost_s(10))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(0.0, 5.0), st.integers(1, 400)),
        min_size=1,
        max_size=120,
    )
)
def test_no_schedule_of_requests_exceeds_its_tokens(arrivals: list[tuple[int, float, int]]) -> None:
    """Within any minute, at most what may be remembered plus what a minute forgets, and a turn.

    Half of the tokens are of outputs, which end with the next arrival.
    """
    limits, meters, now = (
        TenantLimits(tokens_per_minute=1000.0),
        [UseMeter() for _ in range(3)],
        0.0,
    )
    admitted: list[tuple[float, int]] = []
    running: list[tuple[int, RequestCost]] = []
    for router, pause_s, tokens in arrivals:
        now += pause_s
        whole = cost(tokens - tokens // 2, most_tokens=tokens // 2)
        try:
            meters[router].begin("a", limits, whole, now)
        except Refusal:
            pass
        else:
            admitted.append((now, tokens))
            running.append((router, whole))
        if len(running) > 1 or not admitted or admitted[-1][0] != now:
            for earlier, ended in running:
                meters[earlier].end("a", limits, ended, ended.most_tokens, now)
            running.clear()
        exchange(meters, now)
    for start, _ in admitted:
        within = sum(tokens for at, tokens in admitted if start <= at < start + MINUTE_S)
        assert within <= 2 * 1000 + 400
