"""The work queue hands out each key once at a time, in the order of their due times."""

from __future__ import annotations

import asyncio
import random

from medha_operator.controllers.reconciler import FIRST_RETRY_S, LONGEST_RETRY_S, WorkQueue


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def queue(clock: Clock) -> WorkQueue[str]:
    return WorkQueue(clock, random.Random(1))


def test_keys_are_taken_in_the_order_of_their_due_times() -> None:
    clock = Clock()
    work = queue(clock)
    work.add("late", 5.0)
    work.add("soon", 1.0)
    work.add("now")
    assert work.take() == "now"
    assert work.take() is None
    clock.now += 5.0
    assert [work.take(), work.take(), work.take()] == ["soon", "late", None]


def test_a_key_added_twice_is_taken_once_and_at_the_earlier_time() -> None:
    clock = Clock()
    work = queue(clock)
    work.add("a", 9.0)
    work.add("a", 2.0)
    work.add("a", 5.0)
    clock.now += 2.0
    assert work.take() == "a"
    work.done("a")
    clock.now += 20.0
    assert work.take() is None


def test_a_key_added_while_in_work_is_taken_again_once_it_is_done() -> None:
    clock = Clock()
    work = queue(clock)
    work.add("a")
    assert work.take() == "a"
    work.add("a")
    assert work.take() is None
    work.done("a")
    assert work.take() == "a"


def test_delays_double_with_each_failure_up_to_a_bound_and_success_resets_them() -> None:
    work = queue(Clock())
    delays = [work.retry("a") for _ in range(12)]
    ideal = [min(LONGEST_RETRY_S, FIRST_RETRY_S * 2**n) for n in range(12)]
    assert all(whole / 2 <= delay <= whole for delay, whole in zip(delays, ideal, strict=True))
    work.succeeded("a")
    assert work.retry("a") <= FIRST_RETRY_S


def test_a_delay_requested_by_the_server_is_kept() -> None:
    assert queue(Clock()).retry("a", at_least_s=7.0) == 7.0


def test_the_queue_reports_how_far_it_is_behind() -> None:
    clock = Clock()
    work = queue(clock)
    work.add("later", 60.0)
    assert work.behind_s == 0.0
    work.add("now")
    clock.now += 3.0
    assert work.behind_s == 3.0


def test_the_next_key_wakes_a_waiting_worker() -> None:
    async def wait() -> list[str]:
        work: WorkQueue[str] = WorkQueue(asyncio.get_running_loop().time, random.Random(1))
        waiting = [asyncio.create_task(work.get()) for _ in range(2)]
        await asyncio.sleep(0)
        work.add("b", 0.02)
        work.add("a")
        return await asyncio.gather(*waiting)

    assert sorted(asyncio.run(wait())) == ["a", "b"]
