"""Liveness detects silent sources, neglected resources and a hanging event loop."""

from __future__ import annotations

from medha_operator.controllers.liveness import SILENCE_S, STALLED_S, Liveness

KEY, OTHER = ("ns", "a"), ("ns", "b")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_new_process_is_alive_and_a_silent_api_server_is_a_fault() -> None:
    clock = Clock()
    liveness = Liveness(30.0, clock)
    liveness.check([0.0], False, [], 0.0)
    assert liveness.alive()
    clock.now += SILENCE_S + 1.0
    liveness.check([1000.0, clock.now], False, [], 0.0)
    assert not liveness.alive() and "has sent nothing" in liveness.fault
    liveness.check([clock.now], False, [], 0.0)
    assert liveness.alive()


def test_only_the_leader_reports_a_resource_that_is_not_reconciled() -> None:
    clock = Clock()
    liveness = Liveness(30.0, clock)
    liveness.check([clock.now], True, [KEY, OTHER], 0.0)
    for _ in range(5):
        clock.now += 19.0
        liveness.reconciled(OTHER)
        liveness.check([clock.now], True, [KEY, OTHER], 0.0)
    assert not liveness.alive() and "ns/a" in liveness.fault
    liveness.check([clock.now], False, [KEY, OTHER], 0.0)
    assert liveness.alive()


def test_a_long_queue_is_no_fault_while_keys_are_finished() -> None:
    clock = Clock()
    liveness = Liveness(30.0, clock)
    liveness.check([clock.now], True, [KEY, OTHER], 0.0)
    for _ in range(6):
        clock.now += 19.0
        liveness.reconciled(OTHER)
        liveness.check([clock.now], True, [KEY, OTHER], 50.0)
    assert liveness.alive()
    clock.now += 31.0
    liveness.check([clock.now], True, [KEY, OTHER], 81.0)
    assert not liveness.alive() and "none is finished" in liveness.fault


def test_a_hanging_event_loop_is_not_alive() -> None:
    clock = Clock()
    liveness = Liveness(30.0, clock)
    clock.now += STALLED_S + 1.0
    assert not liveness.alive()
