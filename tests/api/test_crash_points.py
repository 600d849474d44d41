"""The operator dies before and after every write of a fleet's life, and nobody sees it afterwards.

The API server is real, and the operator a process that is killed (SIGKILL) by the proxy between the
two. However it dies, each phase must end as it does when nobody dies: the same objects, the same
made and deleted, each as often. `make crash-points` walks every course; without it one short course
is walked. Its sums are printed.
"""

from __future__ import annotations

import os
import time

import pytest
from tests.api.lives import Phase
from tests.api.walks import CALM, COURSES, Scenes, Trouble, divergences, walk_all

pytestmark = pytest.mark.timeout(3000)

WHOLE = os.environ.get("MEDHA_CRASH_POINTS") == "whole"
CONVERGED_S = 10.0
CHOSEN = ("small", "staged", "wide", "deep", "lossy", "scaled") if WHOLE else ("short",)
BEFORE = Trouble("before", spared=1)
AFTER = Trouble("after", spared=0, told=True)


@pytest.mark.parametrize("course", CHOSEN)
def test_wherever_the_operator_dies_the_fleet_ends_as_if_it_had_not(
    course: str, scenes: Scenes, capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if "hand_to_keda" in COURSES[course][0]:
        request.getfixturevalue("keda")
    began_s = time.monotonic()
    calm, before, after = walk_all(scenes, course, (CALM, BEFORE, AFTER))
    assert sum(each.deaths for each in calm) == 0
    found = [line for died in (before, after) for line in divergences(calm, died)]
    told = f"{report(course, calm, before, after, found)}\n  {time.monotonic() - began_s:.0f} s"
    with capsys.disabled():
        print(told)  # noqa: T201
    assert found == [], told
    assert max(each.late_s for each in (*before, *after)) <= CONVERGED_S, told


def report(
    course: str, calm: list[Phase], before: list[Phase], after: list[Phase], found: list[str]
) -> str:
    lines = [f"\ncourse {course}: phase, writes, deaths before and after, longest to converge"]
    for plain, one, other in zip(calm, before, after, strict=True):
        late_s = max(one.late_s, other.late_s)
        lines.append(
            f"  {plain.name:<11}{plain.writes:>4}{one.deaths:>5}{other.deaths:>5}{late_s:>6.1f} s"
        )
        if late_s > CONVERGED_S:
            lines += [f"    {each}" for each in max(one, other, key=lambda died: died.late_s).late]
    points = sum(each.deaths for each in (*before, *after))
    return "\n".join([*lines, f"  {points} points, {len(found)} divergences", *found])
