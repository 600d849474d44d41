"""The operator dies before and after every write of a fleet's life, and nobody sees it afterwards.

The API server is real, and the operator a process that is killed (SIGKILL) by the proxy between the
two. However it dies, each phase must end as it does when nobody dies: the same objects, the same
pods made and deleted, each as often. `make crash-points` walks every course; without it one short
course is walked. Its sums are printed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.api.fleet import Fleet, Operator
from tests.api.lives import Course, Dying, Phase
from tests.api.nursery import Nursery
from tests.api.played import Leaders
from tests.api.proxy import Proxy

pytestmark = pytest.mark.timeout(3000)

WHOLE = os.environ.get("MEDHA_CRASH_POINTS") == "whole"
CONVERGED_S = 10.0
EVERY = ("create", "scale_up", "grow", "update", "roll_back", "scale_down", "delete")
COURSES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "short": (("create", "scale_down", "delete"), {"parallelism": {"spp": 1}}),
    "small": (EVERY, {"parallelism": {"spp": 1, "kvp": {"min": 1, "max": 2}}}),
    "staged": (EVERY, {"parallelism": {"spp": 2, "kvp": {"min": 1, "max": 2}}}),
    "deep": (
        ("create", "scale_up", "grow", "scale_down", "delete"),
        {"parallelism": {"spp": 4, "kvp": {"min": 1, "max": 2}}},
    ),
    "wide": (EVERY, {"replicas": 2, "parallelism": {"spp": 2, "kvp": {"min": 1, "max": 2}}}),
}
CHOSEN = ("small", "staged", "wide", "deep") if WHOLE else ("short",)

Walk = Callable[..., list[Phase]]


@pytest.fixture
def walk(
    api: httpx.Client, api_server: Any, crd: None, proxy: Proxy, namespace: str,
    start_operator: Callable[..., Operator], fleet: Fleet, tmp_path: Path,
) -> Walk:  # fmt: skip
    """Walks a course in the test's namespace, which is empty again afterwards."""

    def run(course: str, spared: int | None, told: bool) -> list[Phase]:
        phases, spec = COURSES[course]
        with contextlib.closing(Leaders()) as leaders:
            fleet.address = leaders.address
            leaders.least = spec["parallelism"].get("kvp", {}).get("min", 1)
            with contextlib.closing(Nursery()) as nursery:
                dying = Dying(lambda: start_operator(nursery=nursery), proxy, spared, told)
                walked = list(Course(api, fleet, leaders, proxy, dying, **spec).walk(phases))
                dying.end()
        proxy.trust()
        return walked

    return run


@pytest.mark.parametrize("course", CHOSEN)
def test_wherever_the_operator_dies_the_fleet_ends_as_if_it_had_not(
    course: str, walk: Walk, capsys: pytest.CaptureFixture[str]
) -> None:
    calm = walk(course, None, False)
    assert sum(each.deaths for each in calm) == 0
    before = walk(course, 1, False)
    after = walk(course, 0, True)
    found = [line for died in (before, after) for line in divergences(calm, died)]
    with capsys.disabled():
        print(report(course, calm, before, after, found))  # noqa: T201
    assert found == []
    assert max(each.late_s for each in (*before, *after)) <= CONVERGED_S


def divergences(calm: list[Phase], died: list[Phase]) -> list[str]:
    """What is not as it is when nobody dies, a line each."""
    return [
        f"{one.name}{line}"
        for plain, one in zip(calm, died, strict=True)
        for line in (
            *differences(plain.made, one.made, ": made"),
            *differences(plain.deleted, one.deleted, ": deleted"),
            *differences(plain.end, one.end, ": "),
        )
    ]


def report(
    course: str, calm: list[Phase], before: list[Phase], after: list[Phase], found: list[str]
) -> str:
    lines = [f"\ncourse {course}: phase, writes, deaths before and after, longest to converge"]
    for plain, one, other in zip(calm, before, after, strict=True):
        late_s = max(one.late_s, other.late_s)
        lines.append(
            f"  {plain.name:<11}{plain.writes:>4}{one.deaths:>5}{other.deaths:>5}{late_s:>6.1f} s"
        )
    points = sum(each.deaths for each in (*before, *after))
    return "\n".join([*lines, f"  {points} points, {len(found)} divergences", *found])


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two documents differ, for a person."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            line
            for key in sorted({*one, *other})
            for line in differences(one.get(key), other.get(key), f"{where}.{key}")
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            line
            for place, (a, b) in enumerate(zip(one, other, strict=True))
            for line in differences(a, b, f"{where}[{place}]")
        ]
    if one == other:
        return []
    shown = [msgspec.json.encode(each).decode()[:200] for each in (one, other)]
    return [f"{where}: {shown[0]} and {shown[1]}"]
