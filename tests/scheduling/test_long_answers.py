"""The answers of long prompts begin when the promises fit alongside them, not before.

On this machine a decode behind 100,000 tokens takes 8 ms of each batch of 50 ms.
"""

from __future__ import annotations

import functools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from medha.config import Scheduling
from medha.scheduling.scheduler import Scheduler
from medha.testing import Driven, leftovers, request, scheduler, topology

NEVER_S = 1e5


def reading(spp: int = 1) -> Scheduler:
    return scheduler(topology(spp=spp), Scheduling(max_batch_s=0.05), batch_s=0.003, read_s=8e-8)


@functools.cache
def alone_s(tokens: int, spp: int = 1) -> float:
    """Seconds to the first token of a prompt that is alone."""
    driven = Driven(reading(spp))
    driven.submit([request("alone", tokens, within_s=NEVER_S)])
    driven.run()
    return driven.first_s["alone"]


def overtaken(
    long: int, urgent: int, left_s: float, slack: float, within_s: float, spp: int
) -> tuple[Driven, Scheduler]:
    """Serve a long prompt with a long answer, which an urgent one meets `left_s` before its end.

    The urgent one has `slack` times what it takes alone, and short ones come while it waits.
    """
    plan = reading(spp)
    driven = Driven(plan)
    at_s, urgent_s = alone_s(long, spp) - left_s, alone_s(urgent, spp) * slack
    driven.submit([request("long", long, within_s=within_s, output_tokens=2000, tpot_s=0.05)])
    driven.submit([request("urgent", urgent, at_s, within_s=urgent_s)])
    for n in range(int(urgent_s / 0.2)):
        short_s = at_s + left_s + 0.1 + 0.2 * n
        driven.submit([request(f"s{n}", 300, short_s, output_tokens=20, tpot_s=0.05)])
    driven.run()
    return driven, plan


@pytest.mark.parametrize("spp", [1, 2])
@given(
    long=st.sampled_from([100_000, 150_000]),
    urgent=st.sampled_from([20_000, 30_000]),
    left_s=st.floats(-0.01, 0.8),
    slack=st.floats(1.2, 1.6),
    extra=st.one_of(st.none(), st.floats(0.02, 0.15)),
)
@example(long=150_000, urgent=30_000, left_s=0.3, slack=1.3, extra=0.09)  # it would end first
@example(long=150_000, urgent=20_000, left_s=0.02, slack=1.22, extra=0.08)  # its last chunk runs
@example(long=150_000, urgent=20_000, left_s=0.26, slack=1.41, extra=None)  # it is late anyway
@example(long=100_000, urgent=30_000, left_s=0.047, slack=1.523, extra=None)  # a short last batch
@settings(max_examples=8)
def test_no_promise_is_broken_by_the_answer_of_a_long_prompt(
    spp: int, long: int, urgent: int, left_s: float, slack: float, extra: float | None
) -> None:
    within_s = 0.5 * alone_s(long, spp)
    if extra is not None:  # it is due after the urgent one, with little slack for its length
        within_s = (1.0 + extra) * alone_s(long, spp) + slack * alone_s(urgent, spp)
    driven, plan = overtaken(long, urgent, left_s, slack, within_s, spp)
    promised = [name for name, admitted in driven.admitted.items() if admitted.promised]
    assert [name for name in promised if not driven.in_time(name)] == []
    assert plan._promises.broken_count == 0
    assert set(driven.finished) == set(driven.requests)
    assert leftovers(plan) == {}


def test_a_promised_prompt_with_time_to_spare_leaves_room_for_short_ones() -> None:
    # If it ends as soon as it can, ten of the fourteen short ones are late.
    alone = alone_s(100_000)
    within_s = 1.08 * alone + 1.57 * alone_s(20_000)
    driven, _ = overtaken(100_000, 20_000, 0.5, 1.57, within_s, 1)
    assert driven.in_time("long") and driven.in_time("urgent")
    assert len([name for name in driven.requests if not driven.in_time(name)]) <= 1


def test_a_prompt_that_is_held_ends_though_promises_go_on_and_on() -> None:
    # Each of these fits alone, and there is always another: those that come while the prompt is
    # held count its answer, too, and do not fit.
    plan = reading()
    driven = Driven(plan)
    at_s, apart_s = alone_s(150_000) - 0.2, 1.3 * alone_s(10_000)
    driven.submit([request("late", 150_000, within_s=1.0, output_tokens=500, tpot_s=0.05)])
    for n in range(40):
        begin_s = at_s + apart_s * n
        driven.submit([request(f"p{n}", 10_000, begin_s, within_s=1.4 * alone_s(10_000))])
    driven.run()
    promised = [name for name, admitted in driven.admitted.items() if admitted.promised]
    assert [name for name in promised if not driven.in_time(name)] == []
    assert len(promised) > 10
    assert driven.first_s["late"] < at_s + 4 * apart_s


def test_two_long_prompts_end_at_once_only_if_both_answers_fit() -> None:
    # The urgent prompt takes 2.2 s and has 3.5: enough for one answer of 8 ms a batch.
    plan = reading()
    account, by_id = plan._account, plan._state.by_id
    answers = [
        request(f"x{n}", 100_000, within_s=60.0 + n, output_tokens=2000, tpot_s=0.05, promised=True)
        for n in range(2)
    ]
    for answer in answers:
        plan.submit(answer, 0.0)
    plan.submit(request("urgent", 20_000, within_s=3.5, promised=True), 0.0)
    account.refresh(0.0)
    assert account.may_end(by_id["x0"], 0.0, guaranteed=True)
    assert account.may_end(by_id["x0"], 0.0, guaranteed=True)
    assert not account.may_end(by_id["x1"], 0.0, guaranteed=True)
    account.refresh(0.0)
    assert account.may_end(by_id["x1"], 0.0, guaranteed=True)
