"""A fleet's whole life while the API server refuses each write once, or each event is lost once.

Whatever is refused or lost, each phase must end as it does when nothing goes wrong: the same
objects, the same made and deleted, each as often. All walks of a test go on at the same time. With
`make crash-points` the life is the one with two stages and every phase; without it a shorter one.
"""

from __future__ import annotations

import collections
import os
import zlib
from collections.abc import Callable

import msgspec
import pytest
from tests.api.proxy import Answer, Call, Proxy, event
from tests.api.walks import CALM, Scenes, Trouble, divergences, walk_all

pytestmark = pytest.mark.timeout(3000)

WHOLE = os.environ.get("MEDHA_CRASH_POINTS") == "whole"
COURSE = "staged" if WHOLE else "short"
REFUSALS = (400, 403, 409, 422, 500)
PARTS = 8 if WHOLE else 4


class Refusing:
    """Each write is refused with this status the first time that it is tried, and not done."""

    def __init__(self, status: int) -> None:
        self._status = status
        self._refused: set[tuple[str, str, str]] = set()
        self.count = 0

    def __call__(self, proxy: Proxy) -> None:
        proxy.before = self._before

    def _before(self, call: Call) -> Answer | None:
        if not call.own:
            return None
        meta = msgspec.json.decode(call.body).get("metadata") or {}
        write = call.verb, call.path, meta.get("name", "")
        if write in self._refused:
            self._refused.remove(write)  # it is done; the next one of this kind is another
            return None
        self._refused.add(write)
        self.count += 1
        return Answer(self._status, "SaidByTheTest")


class Losing:
    """One in so many of the events never comes: by what it is about, and which of those it is."""

    def __init__(self, part: int) -> None:
        self._part = part
        self._met: collections.Counter[str] = collections.Counter()
        self.count, self.of = 0, 0

    def __call__(self, proxy: Proxy) -> None:
        proxy.events = self._events

    def _events(self, call: Call, line: bytes) -> list[bytes]:
        kind, name = event(line)
        if kind == "BOOKMARK":
            return [line]
        about = f"{call.agent[:5]} {call.path.rpartition('/')[2]} {kind} {name}"
        self._met[about] += 1
        self.of += 1
        if zlib.crc32(f"{about} {self._met[about]}".encode()) % PARTS != self._part:
            return [line]
        self.count += 1
        return []


def walked(scenes: Scenes, tampers: dict[str, Callable[[Proxy], None]]) -> list[str]:
    """Where they differ from a walk in which nothing goes wrong. An operator that was not told of
    the resource's deletion makes things for it until the next resync, which are collected."""
    troubles = [Trouble(name, tamper=each) for name, each in tampers.items()]
    calm, *others = walk_all(scenes, COURSE, (CALM, *troubles))
    return [
        f"{name}: {line}"
        for name, other in zip(tampers, others, strict=True)
        for line in divergences(calm, other)
        if not line.startswith("delete: made")
    ]


def test_each_write_may_be_refused_once_with_any_status(
    scenes: Scenes, capsys: pytest.CaptureFixture[str]
) -> None:
    tampers = {str(status): Refusing(status) for status in REFUSALS}
    found = walked(scenes, dict(tampers))
    counts = {name: each.count for name, each in tampers.items()}
    with capsys.disabled():
        print(f"\nwrites refused once: {counts}, {len(found)} divergences", *found, sep="\n  ")  # noqa: T201
    assert found == []
    assert min(counts.values()) >= 15


def test_each_event_of_a_watch_may_be_lost(
    scenes: Scenes, capsys: pytest.CaptureFixture[str]
) -> None:
    tampers = {f"part {part}": Losing(part) for part in range(PARTS)}
    found = walked(scenes, dict(tampers))
    counts = {name: f"{each.count} of {each.of}" for name, each in tampers.items()}
    with capsys.disabled():
        print(f"\nevents lost: {counts}, {len(found)} divergences", *found, sep="\n  ")  # noqa: T201
    assert found == []
    assert all(each.count for each in tampers.values())
