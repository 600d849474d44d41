"""Clients leave at any moment: pages come back once, pending work returns to exactly zero."""

from __future__ import annotations

import functools
import random

import pytest

from medha.batch import BatchResult, Sampled
from medha.config import Scheduling
from medha.testing import Driven, leftovers, request, scheduler, topology


@pytest.mark.parametrize("kvp, spp", [(1, 1), (1, 3), (2, 2)])
def test_a_thousand_requests_of_which_a_third_leave(kvp: int, spp: int) -> None:
    dice = random.Random(17)
    layout = topology(spp=spp, kvp=kvp, tokens_per_group=2000)
    plan = scheduler(layout, Scheduling(max_running=64), pages=1200)
    driven = Driven(plan, stops=lambda name, count: count == 7 and name.endswith("3"))
    for number in range(1000):
        tokens = 6000 if dice.random() < 0.03 else dice.randint(1, 600)
        arriving = request(
            f"r{number}",
            tokens,
            dice.uniform(0.0, 40.0),
            within_s=0.5 + 2e-4 * tokens,
            output_tokens=dice.randint(1, 12),
        )
        driven.submit([arriving], hashes=[bytes([n, number % 5] * 8) for n in range(tokens // 64)])
        if dice.random() < 0.3:
            leaves_s = arriving.arrival_s + dice.expovariate(4.0)
            driven.at(leaves_s, functools.partial(leave, driven, arriving.id))
    driven.run()
    assert leftovers(plan) == {}
    assert len(driven.finished) > 650
    assert plan.take_failed() == ()


def leave(driven: Driven, name: str) -> None:
    driven.plan.abort(name, driven.now)


def test_pages_stay_until_the_batch_in_flight_is_back() -> None:
    plan = scheduler(pages=100)
    plan.submit(request("a", 640), 0.0)
    batch = plan.next_batch(0.0, frozenset({0}))
    assert batch is not None
    plan.abort("a", 0.01)
    assert plan.load(0.01).free_pages == (90,)
    assert plan.load(0.01).pending_s == 0.0
    plan.stage_done(batch.number, 0, 0.06)
    assert plan.complete(batch.number, BatchResult(), 0.06) == ()
    assert plan.load(0.06).free_pages == (100,)
    assert leftovers(plan) == {}


def test_the_next_batch_says_who_ended() -> None:
    plan = scheduler(pages=100)
    first = plan.submit(request("a", 64, output_tokens=5), 0.0)
    batch = plan.next_batch(0.0, frozenset({0}))
    assert batch is not None and batch.ended == ()
    plan.complete(batch.number, BatchResult((Sampled(first.seq, False),)), 0.1)
    plan.abort("a", 0.1)
    plan.submit(request("b", 64, 0.1), 0.1)
    after = plan.next_batch(0.1, frozenset({0}))
    assert after is not None and after.ended == (first.seq,)


def test_an_unknown_or_finished_id_is_ignored() -> None:
    plan = scheduler()
    plan.abort("nobody", 0.0)
    driven = Driven(plan)
    driven.submit([request("a", 10)])
    driven.run()
    plan.abort("a", driven.now)
    assert leftovers(plan) == {}


def test_the_same_id_may_come_again_after_it_left() -> None:
    plan = scheduler()
    plan.submit(request("a", 640), 0.0)
    batch = plan.next_batch(0.0, frozenset({0}))
    assert batch is not None
    plan.abort("a", 0.01)
    again = plan.submit(request("a", 64, 0.02), 0.02)
    plan.complete(batch.number, BatchResult(), 0.06)
    second = plan.next_batch(0.06, frozenset({0}))
    assert second is not None and [chunk.seq for chunk in second.chunks] == [again.seq]


@pytest.mark.parametrize("lost", [False, True])
def test_who_has_left_takes_no_part_in_a_group_that_joins(lost: bool) -> None:
    # It claims pages of groups to come, and its batch is still on its way when one comes.
    plan = scheduler(topology(spp=2, kvp=2, kvp_max=3, tokens_per_group=640), pages=10)
    plan.submit(request("long", 1800, within_s=30.0), 0.0)
    batch = plan.next_batch(0.0, frozenset({0, 1}))
    assert batch is not None and batch.groups == (0,)
    plan.stage_done(batch.number, 0, 0.05)
    if lost:
        plan.group_lost(1, 2, 0.06)
    else:
        plan.abort("long", 0.06)
    plan.group_joined(2, 3, 0.07)
    for waiting in plan._state.queues.by_group.values():
        assert len(waiting) == 0
    assert plan.next_batch(0.08, frozenset({0, 1, 2})) is None
    plan.complete(batch.number, BatchResult(()), 0.1)
    if lost:
        rows = [group for group, queue in plan._state.queues.by_group.items() if len(queue)]
        assert rows == sorted(plan._state.by_id["long"].assigned_groups)
        plan.abort("long", 0.2)
    assert plan.take_failed() == ()
    assert leftovers(plan) == {}
