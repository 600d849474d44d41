"""Polls of controllers: frequent while they answer, rare while not, at once when ready."""

from __future__ import annotations

import msgspec

from medha_operator.planning.poll_schedule import LONGEST_PAUSE_S, PollSchedule
from medha_operator.resources.objects import Key
from medha_operator.resources.views import PodView

KEY: Key = ("team", "llama")
LEADER = PodView(
    name="llama-0-g0-s0",
    uid="one",
    ordinal=0,
    group=0,
    stage=0,
    attempt=1,
    spec_hash="a",
    node="n",
    phase="Running",
    ip="10.0.0.1",
)


class Turns:
    """A leader that is checked every quarter of a second, in virtual time."""

    def __init__(self) -> None:
        self.asking, self.now_s, self.answers = PollSchedule(1.0), 0.0, False

    def times(self, leader: PodView, for_s: float) -> list[float]:
        """Return the times of its polls within this time."""
        polls, end_s = [], self.now_s + for_s
        while self.now_s < end_s:
            due, _ = self.asking.due([(KEY, leader)], self.now_s)
            for key, pod in due:
                polls.append(self.now_s)
                self.asking.answered((key, pod.ordinal), pod.uid, self.answers, self.now_s, 1.0)
            self.now_s += 0.25
        return polls


def test_an_answering_controller_is_polled_each_time_and_a_silent_one_less_and_less() -> None:
    turns = Turns()
    assert turns.times(LEADER, 100.0) == [0.0, 2.0, 6.0, 14.0, 30.0, 60.0, 90.0]
    turns.answers = True
    assert turns.times(LEADER, 25.0) == [120.0, 121.0, 122.0, 123.0, 124.0]
    assert LONGEST_PAUSE_S == 30.0


def test_a_silent_controller_is_polled_at_once_when_its_pod_is_ready() -> None:
    turns = Turns()
    assert turns.times(LEADER, 31.0) == [0.0, 2.0, 6.0, 14.0, 30.0]
    ready = msgspec.structs.replace(LEADER, ready=True)
    turns.answers = True
    assert turns.times(ready, 2.0) == [31.0, 32.0]


def test_only_running_leaders_are_polled() -> None:
    turns = Turns()
    for changed in ({"group": 1}, {"stage": 1}, {"ip": ""}, {"phase": "Pending"}):
        assert turns.times(msgspec.structs.replace(LEADER, **changed), 2.0) == []


def test_the_report_of_a_former_leader_is_forgotten() -> None:
    asking = PollSchedule(1.0)
    assert asking.due([(KEY, LEADER)], 0.0) == ([(KEY, LEADER)], [(KEY, 0)])
    assert asking.due([(KEY, LEADER)], 0.1) == ([], [])
    other = msgspec.structs.replace(LEADER, uid="two")
    assert asking.due([(KEY, other)], 0.2) == ([(KEY, other)], [(KEY, 0)])
    assert not asking.answered((KEY, 0), LEADER.uid, True, 0.3, 1.0)
    assert asking.answered((KEY, 0), other.uid, True, 0.3, 1.0)
    assert asking.due([], 0.4) == ([], [(KEY, 0)])
    assert not asking.answered((KEY, 0), other.uid, True, 0.5, 1.0)
