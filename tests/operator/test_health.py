"""Liveness tells the truth: silent sources, forgotten resources and hanging loops are found."""

from __future__ import annotations

from medha_operator.health import SILENCE_S, STALLED_S, Health

KEY, OTHER = ("ns", "a"), ("ns", "b")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_process_that_is_fresh_is_alive_and_one_that_hears_nothing_is_not() -> None:
    clock = Clock()
    health = Health(30.0, clock)
    health.judge([0.0], False, [], 0.0)
    assert health.alive()
    clock.now += SILENCE_S + 1.0
    health.judge([1000.0, clock.now], False, [], 0.0)
    assert not health.alive() and "not heard" in health.why
    health.judge([clock.now], False, [], 0.0)
    assert health.alive()


def test_a_resource_that_nobody_looks_at_is_found_by_its_leader_only() -> None:
    clock = Clock()
    health = Health(30.0, clock)
    health.judge([clock.now], True, [KEY, OTHER], 0.0)
    for _ in range(5):
        clock.now += 19.0
        health.looked(OTHER)
        health.judge([clock.now], True, [KEY, OTHER], 0.0)
    assert not health.alive() and "ns/a" in health.why
    health.judge([clock.now], False, [KEY, OTHER], 0.0)
    assert health.alive()


def test_a_queue_that_is_long_but_moves_is_no_fault_and_one_that_stands_is() -> None:
    clock = Clock()
    health = Health(30.0, clock)
    health.judge([clock.now], True, [KEY, OTHER], 0.0)
    for _ in range(6):
        clock.now += 19.0
        health.looked(OTHER)
        health.judge([clock.now], True, [KEY, OTHER], 50.0)
    assert health.alive()
    clock.now += 31.0
    health.judge([clock.now], True, [KEY, OTHER], 81.0)
    assert not health.alive() and "none is finished" in health.why


def test_a_loop_that_hangs_is_not_alive() -> None:
    clock = Clock()
    health = Health(30.0, clock)
    clock.now += STALLED_S + 1.0
    assert not health.alive()
