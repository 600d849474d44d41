"""Courses through a fleet's life, walked under one kind of trouble or another, and compared.

Several are walked at once, each on a thread with a scene of its own: they wait more than they work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from tests.api.lives import Course, Dying, Phase
from tests.api.proxy import Proxy
from tests.api.stage import Scene

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
    with scenes() as scene:
        least = spec["parallelism"].get("kvp", {}).get("min", 1)
        scene.leaders.least = lambda pod: int(least)
        dying = Dying(scene.start, scene.proxy, trouble.spared, trouble.told)
        trouble.tamper(scene.proxy)
        made = Course(scene.api, scene.fleet, scene.leaders, scene.proxy, dying, **spec)
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
            *differences(plain.made, one.made, ": made"),
            *differences(plain.deleted, one.deleted, ": deleted"),
            *differences(plain.end, one.end, ": "),
        )
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
