"""Start-up times of replicas, measured from their pods."""

from __future__ import annotations

import msgspec

from medha_operator.planning.scaling_signals import start_times
from medha_operator.resources.views import PodView
from medha_operator.testing import NOW_S

DAYS_S = 3 * 86_400.0


def leader(uid: str, created_s: float, ready_since_s: float | None, group: int = 0) -> PodView:
    return PodView(
        name=f"m-{uid}",
        uid=uid,
        ordinal=0,
        group=group,
        stage=0,
        attempt=1,
        spec_hash="a",
        created_s=created_s,
        ready_since_s=ready_since_s,
        ready=ready_since_s is not None,
    )


def test_a_start_ends_when_the_leader_is_first_ready() -> None:
    pod = leader("a", NOW_S - 100.0, None)
    assert start_times([pod], {}) == {}
    ready = msgspec.structs.replace(pod, ready=True, ready_since_s=NOW_S - 60.0)
    known = start_times([ready, leader("b", 0.0, 9.0, group=1)], {})
    assert known == {"a": 40.0}
    again = msgspec.structs.replace(ready, ready_since_s=NOW_S)  # it was not ready for a moment
    assert start_times([again], known) == known
    unready = msgspec.structs.replace(ready, ready=False, ready_since_s=None)
    assert start_times([unready], known) == known
    assert start_times([], known) == {}


def test_a_moment_of_unreadiness_after_three_days_is_no_start() -> None:
    old = leader("old", NOW_S - DAYS_S, NOW_S - 60.0)
    assert start_times([old, leader("new", NOW_S - 90.0, NOW_S)], {}) == {"new": 90.0}
