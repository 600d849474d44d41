"""Virtual time: order at one instant is by rank, then by creation; every run is the same."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest

from medha.sim.loop import ARRIVE, DECIDE, DONE, Loop


def play(order: tuple[int, ...]) -> list[str]:
    loop, seen = Loop(), list[str]()

    def say(word: str) -> Callable[[], None]:
        return lambda: seen.append(word)

    events = [(1.0, DECIDE, say("decide")), (1.0, DONE, say("done")), (1.0, ARRIVE, say("arrive"))]
    for index in order:
        loop.at(*events[index])
    loop.run()
    return seen


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_events_of_one_instant_run_by_rank_however_they_were_made(order: tuple[int, ...]) -> None:
    assert play(order) == ["done", "arrive", "decide"]


def test_two_events_of_one_rank_swap_when_they_are_made_the_other_way_round() -> None:
    for words in (["a", "b"], ["b", "a"]):
        loop, seen = Loop(), list[str]()
        for word in words:
            loop.at(1.0, DONE, functools.partial(seen.append, word))
        loop.run()
        assert seen == words


def test_time_jumps_and_never_goes_back() -> None:
    loop, times = Loop(), list[float]()

    def later() -> None:
        times.append(loop.now)
        if len(times) < 3:
            loop.at(loop.now - 5.0, DONE, later)  # in the past: at once

    loop.at(2.0, DONE, later)
    loop.at(7.0, DONE, lambda: times.append(loop.now))
    loop.run()
    assert times == [2.0, 2.0, 2.0, 7.0] and loop.idle


def test_a_run_stops_at_its_horizon_and_goes_on_from_there() -> None:
    loop, seen = Loop(), list[float]()
    for time_s in (1.0, 2.0, 3.0):
        loop.at(time_s, DONE, lambda: seen.append(loop.now))
    loop.run(until_s=2.0)
    assert seen == [1.0, 2.0] and loop.now == 2.0 and not loop.idle
    loop.run(until_s=10.0)
    assert seen == [1.0, 2.0, 3.0] and loop.now == 10.0


def test_a_run_that_does_not_end_is_told() -> None:
    loop = Loop()

    def again() -> None:
        loop.at(loop.now, DONE, again)

    again()
    with pytest.raises(RuntimeError, match="100 events"):
        loop.run(most_events=100)
