"""The work queue hands out each key once at a time, in the order in which they fall due."""

from __future__ import annotations

import asyncio
import random

from medha_operator.queue import FIRST_RETRY_S, LONGEST_RETRY_S, WorkQueue


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def queue(clock: Clock) -> WorkQueue[str]:
    return WorkQueue(clock, random.Random(1))


def test_keys_come_in_the_order_in_which_they_are_due() -> None:
    clock = Clock()
    line = queue(clock)
    line.add("late", 5.0)
    line.add("soon", 1.0)
    line.add("now")
    assert line.take() == "now"
    assert line.take() is None
    clock.now += 5.0
    assert [line.take(), line.take(), line.take()] == ["soon", "late", None]


def test_a_key_that_is_added_twice_is_looked_at_once_and_at_the_earlier_time() -> None:
    clock = Clock()
    line = queue(clock)
    line.add("a", 9.0)
    line.add("a", 2.0)
    line.add("a", 5.0)
    clock.now += 2.0
    assert line.take() == "a"
    line.done("a")
    clock.now += 20.0
    assert line.take() is None


def test_a_key_that_is_added_while_it_is_looked_at_comes_again_and_not_before_it_is_done() -> None:
    clock = Clock()
    line = queue(clock)
    line.add("a")
    assert line.take() == "a"
    line.add("a")
    assert line.take() is None
    line.done("a")
    assert line.take() == "a"


def test_failures_in_a_row_make_longer_pauses_up_to_a_bound_and_success_ends_them() -> None:
    line = queue(Clock())
    pauses = [line.retry("a") for _ in range(12)]
    ideal = [min(LONGEST_RETRY_S, FIRST_RETRY_S * 2**n) for n in range(12)]
    assert all(whole / 2 <= pause <= whole for pause, whole in zip(pauses, ideal, strict=True))
    line.succeeded("a")
    assert line.retry("a") <= FIRST_RETRY_S


def test_a_pause_that_the_server_asked_for_is_kept() -> None:
    assert queue(Clock()).retry("a", at_least_s=7.0) == 7.0


def test_the_queue_says_how_far_it_is_behind() -> None:
    clock = Clock()
    line = queue(clock)
    line.add("later", 60.0)
    assert line.behind_s == 0.0
    line.add("now")
    clock.now += 3.0
    assert line.behind_s == 3.0


def test_who_waits_is_woken_by_the_next_key() -> None:
    async def wait() -> list[str]:
        line: WorkQueue[str] = WorkQueue(asyncio.get_running_loop().time, random.Random(1))
        waiting = [asyncio.create_task(line.get()) for _ in range(2)]
        await asyncio.sleep(0)
        line.add("b", 0.02)
        line.add("a")
        return await asyncio.gather(*waiting)

    assert sorted(asyncio.run(wait())) == ["a", "b"]
