"""The operator dies before and after every write of a fleet's life, without a trace in the outcome.

The API server is real; the proxy between the two kills the operator's process (SIGKILL). However it
dies, each phase must end as without deaths: the same objects, created and deleted equally often.
`make crash-points` walks every course and prints the sums; otherwise one short course is walked.
"""

from __future__ import annotations

import os
import time

import pytest
from tests.api.courses import CALM, COURSES, Scenes, Trouble, divergences, walk_all
from tests.api.life import Phase

pytestmark = pytest.mark.timeout(3000)

WHOLE = os.environ.get("MEDHA_CRASH_POINTS") == "whole"
CONVERGED_S = 10.0
"""Time to converge after a death, beyond what the phase takes without deaths on the same machine at
the same time."""
CHOSEN = ("small", "staged", "wide", "deep", "lossy", "scaled") if WHOLE else ("short",)
BEFORE = Trouble("before", spared=1)
AFTER = Trouble("after", spared=0, answered=True)


@pytest.mark.parametrize("course", CHOSEN)
def test_wherever_the_operator_dies_the_outcome_is_the_same(
    course: str,
    scenes: Scenes,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    if "hand_to_keda" in COURSES[course][0]:
        request.getfixturevalue("keda")
    began_s = time.monotonic()
    calm, before, after = walk_all(scenes, course, (CALM, BEFORE, AFTER))
    assert sum(phase.deaths for phase in calm) == 0
    faults = [line for died in (before, after) for line in divergences(calm, died)]
    summary = f"{report(course, calm, before, after, faults)}\n  {time.monotonic() - began_s:.0f} s"
    with capsys.disabled():
        print(summary)  # noqa: T201
    assert faults == [], summary
    for died in (before, after):
        for plain, phase in zip(calm, died, strict=True):
            assert phase.late_s <= CONVERGED_S + plain.took_s, summary


def report(
    course: str, calm: list[Phase], before: list[Phase], after: list[Phase], faults: list[str]
) -> str:
    lines = [f"\ncourse {course}: phase, writes, deaths before and after, longest to converge"]
    for plain, first, other in zip(calm, before, after, strict=True):
        late_s = max(first.late_s, other.late_s)
        lines.append(
            f"  {plain.name:<11}{plain.writes:>4}{first.deaths:>5}{other.deaths:>5}{late_s:>6.1f} s"
        )
        if late_s > CONVERGED_S:
            lines += [
                f"    {write}" for write in max(first, other, key=lambda died: died.late_s).late
            ]
    points = sum(phase.deaths for phase in (*before, *after))
    return "\n".join([*lines, f"  {points} points, {len(faults)} divergences", *faults])
