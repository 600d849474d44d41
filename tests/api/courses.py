"""Courses through a fleet's life, each under one kind of trouble, and their comparison.

Several run at once, each in a thread with a scene of its own: they wait more than they work.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from tests.api.life import SCALED_OBJECTS, Course, Dying, Phase
from tests.api.outcome import KINDS, OF_A_REPLICA
from tests.api.proxy import Proxy
from tests.api.stage import Scene
from tests.api.stand_ins import Router

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
"""Phases in which replicas replace others.

A new one may get the number of an old one, and with it the old one's objects, if it is free by
then.
"""

PROMETHEUS = "http://prometheus.monitoring:9090"

Scenes = Callable[..., contextlib.AbstractContextManager[Scene]]


class Trouble(msgspec.Struct, frozen=True):
    """The trouble of a walk: deaths, as `Dying` defines them, or what `tamper` does to the
    proxy."""

    name: str
    spared: int | None = None
    answered: bool = False
    tamper: Callable[[Proxy], None] = lambda proxy: None


CALM = Trouble("calm")


def walk(scenes: Scenes, course: str, trouble: Trouble) -> list[Phase]:
    """Walk one course from beginning to end."""
    phases, spec = COURSES[course]
    kinds = (*KINDS, SCALED_OBJECTS) if "hand_to_keda" in phases else KINDS
    with scenes() as scene, contextlib.closing(Router()) as router:
        least = spec["parallelism"].get("kvp", {}).get("min", 1)
        scene.leaders.least = lambda pod: int(least)
        start = functools.partial(scene.start, **router.settings, MEDHA_PROMETHEUS=PROMETHEUS)
        dying = Dying(start, scene.proxy, trouble.spared, trouble.answered)
        trouble.tamper(scene.proxy)
        life = Course(
            scene.api, scene.fleet, scene.leaders, router, scene.proxy, dying, kinds, **spec
        )
        return list(life.walk(phases))


def walk_all(scenes: Scenes, course: str, troubles: Sequence[Trouble]) -> list[list[Phase]]:
    """Walk the course under each kind of trouble, at the same time."""
    with ThreadPoolExecutor(len(troubles)) as pool:
        walks = [pool.submit(walk, scenes, course, trouble) for trouble in troubles]
        return [walk.result() for walk in walks]


def divergences(calm: list[Phase], troubled: list[Phase]) -> list[str]:
    """List, line by line, how a walk differs from one without trouble."""
    return [
        f"{troubled_phase.name}{line}"
        for plain, troubled_phase in zip(calm, troubled, strict=True)
        for line in (
            *_miscounted(plain, troubled_phase),
            *differences(plain.end, troubled_phase.end, ": "),
        )
    ]


def _miscounted(plain: Phase, troubled: Phase) -> list[str]:
    """List what was created or deleted more often or less.

    How many objects of a replica are new depends on which numbers of replicas were free: no more
    of a kind may be created than replicas were, and the same surplus must be deleted as created.
    """
    created, deleted = (
        (dict(troubled.created), dict(plain.created)),
        (dict(troubled.deleted), dict(plain.deleted)),
    )
    faults = []
    for kind in OF_A_REPLICA if troubled.name in REPLACING else ():
        extra = [counts[0].pop(kind, 0) - counts[1].pop(kind, 0) for counts in (created, deleted)]
        most = troubled.created.get("pods 0-s0", 0)
        if extra[0] != extra[1] or troubled.created.get(kind, 0) > most:
            faults.append(f": {kind}: {troubled.created} created, {troubled.deleted} deleted")
    return [
        *faults,
        *differences(created[1], created[0], ": created"),
        *differences(deleted[1], deleted[0], ": deleted"),
    ]


def differences(first: Any, other: Any, where: str = "") -> list[str]:
    """List the differences of two documents as text."""
    if isinstance(first, dict) and isinstance(other, dict):
        return [
            line
            for key in sorted({*first, *other})
            for line in differences(first.get(key), other.get(key), f"{where}.{key}")
        ]
    if isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        return [
            line
            for place, (a, b) in enumerate(zip(first, other, strict=True))
            for line in differences(a, b, f"{where}[{place}]")
        ]
    if first == other:
        return []
    shown = [msgspec.json.encode(document).decode()[:200] for document in (first, other)]
    return [f"{where}: {shown[0]} and {shown[1]}"]
