"""Courses through a fleet's life, walked under one kind of trouble or another, and compared.

Several are walked at once, each on a thread with a scene of its own: they wait more than they work.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from tests.api.ends import KINDS, POLICIES
from tests.api.lives import SCALED_OBJECTS, Course, Dying, Phase
from tests.api.played import Router
from tests.api.proxy import Proxy
from tests.api.stage import Scene

EVERY = ("create", "scale_up", "grow", "update", "roll_back", "scale_down", "delete")
COURSES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "short": (("create", "lose_a_pod", "scale_down", "delete"), {"parallelism": {"spp": 1}}),
    "small": (EVERY, {"parallelism": {"spp": 1, "kvp": {"min": 1, "max": 2}}}),
    "staged": (EVERY, {"parallelism": {"spp": 2, "kvp": {"min": 1, "max": 2}}}),
    "deep": (
        ("create", "scale_up", "grow", "scale_down", "delete"),
        {"parallelism": {"spp": 4, "kvp": {"min": 1, "max": 2}}},
    ),
    "wide": (EVERY, {"replicas": 2, "parallelism": {"spp": 2, "kvp": {"min": 1, "max": 2}}}),
    "lossy": (
        ("create", "grow", "lose_a_pod", "shrink", "take_a_pod", "delete"),
        {
            "parallelism": {"spp": 2, "kvp": {"min": 1, "max": 2}},
            "scheduling": {"releaseCooldown": "1s"},
        },
    ),
    "scaled": (
        ("create", "autoscale", "cap", "hand_to_keda", "take_back", "delete"),
        {"parallelism": {"spp": 1}},
    ),
}
REPLACING = ("update", "roll_back")
"""Phases in which replicas replace others: a new one may get the number of an old one, and with it
the old one's NetworkPolicy, if that is free by then."""

PROMETHEUS = "http://prometheus.monitoring:9090"

Scenes = Callable[..., contextlib.AbstractContextManager[Scene]]


class Trouble(msgspec.Struct, frozen=True):
    """What befalls a walk: deaths, as `Dying` has them, or what `tamper` does to the proxy."""

    name: str
    spared: int | None = None
    told: bool = False
    tamper: Callable[[Proxy], None] = lambda proxy: None


CALM = Trouble("calm")


def walk(scenes: Scenes, course: str, trouble: Trouble) -> list[Phase]:
    """One course from beginning to end."""
    phases, spec = COURSES[course]
    kinds = (*KINDS, SCALED_OBJECTS) if "hand_to_keda" in phases else KINDS
    with scenes() as scene, contextlib.closing(Router()) as router:
        least = spec["parallelism"].get("kvp", {}).get("min", 1)
        scene.leaders.least = lambda pod: int(least)
        start = functools.partial(scene.start, **router.settings, MEDHA_PROMETHEUS=PROMETHEUS)
        dying = Dying(start, scene.proxy, trouble.spared, trouble.told)
        trouble.tamper(scene.proxy)
        made = Course(
            scene.api, scene.fleet, scene.leaders, router, scene.proxy, dying, kinds, **spec
        )
        return list(made.walk(phases))


def walk_all(scenes: Scenes, course: str, troubles: Sequence[Trouble]) -> list[list[Phase]]:
    """The course under each of them, at the same time."""
    with ThreadPoolExecutor(len(troubles)) as pool:
        walks = [pool.submit(walk, scenes, course, each) for each in troubles]
        return [each.result() for each in walks]


def divergences(calm: list[Phase], troubled: list[Phase]) -> list[str]:
    """What is not as it is when nothing goes wrong, a line each."""
    return [
        f"{one.name}{line}"
        for plain, one in zip(calm, troubled, strict=True)
        for line in (
            *_miscounted(plain, one),
            *differences(plain.end, one.end, ": "),
        )
    ]


def _miscounted(plain: Phase, one: Phase) -> list[str]:
    """What was made or deleted more often or less. Of NetworkPolicies, where their number depends
    on which numbers of replicas were free, no more may be made than replicas were, and as many more
    or less are deleted as are made."""
    made, deleted = (dict(one.made), dict(plain.made)), (dict(one.deleted), dict(plain.deleted))
    found = []
    if one.name in REPLACING:
        extra = [each[0].pop(POLICIES, 0) - each[1].pop(POLICIES, 0) for each in (made, deleted)]
        most = one.made.get("pods 0-s0", 0)
        if extra[0] != extra[1] or one.made.get(POLICIES, 0) > most:
            found.append(f": {POLICIES}: {one.made} made, {one.deleted} deleted")
    return [
        *found,
        *differences(made[1], made[0], ": made"),
        *differences(deleted[1], deleted[0], ": deleted"),
    ]


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
