"""How long replicas take to start, as far as pods tell."""

from __future__ import annotations

import msgspec

from medha_operator.observed import PodView
from medha_operator.starts import starts_of
from medha_operator.testing import NOW_S

DAYS_S = 3 * 86_400.0


def leader(uid: str, created_s: float, ready_since_s: float | None, group: int = 0) -> PodView:
    return PodView(
        name=f"m-{uid}", uid=uid, ordinal=0, group=group, stage=0, attempt=1, spec_hash="a",
        created_s=created_s, ready_since_s=ready_since_s, ready=ready_since_s is not None,
    )  # fmt: skip


def test_a_leader_took_as_long_to_start_as_until_it_was_ready_first() -> None:
    pod = leader("a", NOW_S - 100.0, None)
    assert starts_of([pod], {}) == {}
    ready = msgspec.structs.replace(pod, ready=True, ready_since_s=NOW_S - 60.0)
    known = starts_of([ready, leader("b", 0.0, 9.0, group=1)], {})
    assert known == {"a": 40.0}
    again = msgspec.structs.replace(ready, ready_since_s=NOW_S)  # it was not ready for a moment
    assert starts_of([again], known) == known
    unready = msgspec.structs.replace(ready, ready=False, ready_since_s=None)
    assert starts_of([unready], known) == known
    assert starts_of([], known) == {}


def test_a_pod_of_three_days_that_was_not_ready_for_a_moment_did_not_take_so_long() -> None:
    old = leader("old", NOW_S - DAYS_S, NOW_S - 60.0)
    assert starts_of([old, leader("new", NOW_S - 90.0, NOW_S)], {}) == {"new": 90.0}
