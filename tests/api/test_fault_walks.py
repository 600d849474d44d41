"""A fleet's whole life while each write is refused once, or each watch event is lost once.

Whatever is refused or lost, each phase must end as without trouble: the same objects, created and
deleted equally often. All walks of a test run at the same time. `make crash-points` uses the
course with two stages and every phase; otherwise a shorter one is walked.
"""

from __future__ import annotations

import collections
import os
import re
import zlib
from collections.abc import Callable

import msgspec
import pytest
from tests.api.courses import Scenes, Trouble, divergences, walk_all
from tests.api.proxy import Answer, Call, Proxy, event

pytestmark = pytest.mark.timeout(3000)

WHOLE = os.environ.get("MEDHA_CRASH_POINTS") == "whole"
COURSE = "staged" if WHOLE else "short"
GONE = "kopf/ medhareplicas DELETED llama 1"
SURPLUS = 10
"""Share of events, as one in N, that may occur only in the walk without trouble."""
HASH = re.compile(r"(?<=-)[0-9a-f]{10}$")
REFUSALS = (400, 403, 409, 422, 500) if WHOLE else (403, 409, 500)
"""The short form has one status of those that the operator handles alike."""
PARTS = 8 if WHOLE else 4


class Refusing:
    """Refuses each write with this status the first time it is tried, without executing it."""

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
            self._refused.remove(write)  # it is executed; the next one of this kind is another
            return None
        self._refused.add(write)
        self.count += 1
        return Answer(self._status, "SaidByTheTest")


class Losing:
    """Loses each event once, by subject and occurrence; events of other fleets do not count."""

    def __init__(self, chosen: Callable[[str], bool]) -> None:
        self._chosen = chosen
        self._about: collections.Counter[str] = collections.Counter()
        self._account: Callable[[], str] = lambda: ""
        self.met: set[str] = set()
        self.lost: set[str] = set()

    def __call__(self, proxy: Proxy) -> None:
        self._account = lambda: proxy.account
        proxy.events = self._events

    def _events(self, call: Call, line: bytes) -> list[bytes]:
        kind, name = event(line)
        namespace = self._account().removeprefix("operator-of-")
        foreign = name.startswith("test-") and not name.startswith(f"{namespace}-")
        if kind == "BOOKMARK" or foreign:
            return [line]
        plain_name = HASH.sub("HASH", name.replace(namespace, "NAMESPACE"))
        about = f"{call.agent[:5]} {call.path.rpartition('/')[2]} {kind} {plain_name}"
        self._about[about] += 1
        key = f"{about} {self._about[about]}"
        self.met.add(key)
        if not self._chosen(key):
            return [line]
        self.lost.add(key)
        return []


def in_part(part: int) -> Callable[[str], bool]:
    """Choose two of the parts for each event, so that it is lost even if one part never has it."""

    def chosen(key: str) -> bool:
        drawn = zlib.crc32(key.encode())
        first = drawn % PARTS
        return part in (first, (first + 1 + drawn // PARTS % (PARTS - 1)) % PARTS)

    return chosen


def walked(
    scenes: Scenes,
    tampers: dict[str, Callable[[Proxy], None]],
    calmly: Callable[[Proxy], None] = lambda proxy: None,
) -> dict[str, list[str]]:
    """List, per tamper, the differences from a walk without trouble."""
    calm = Trouble("calm", tamper=calmly)
    troubles = [Trouble(name, tamper=tamper) for name, tamper in tampers.items()]
    plain, *others = walk_all(scenes, COURSE, (calm, *troubles))
    return {name: divergences(plain, other) for name, other in zip(tampers, others, strict=True)}


def test_each_write_may_be_refused_once_with_any_status(
    scenes: Scenes, capsys: pytest.CaptureFixture[str]
) -> None:
    tampers = {str(status): Refusing(status) for status in REFUSALS}
    faults = lines(walked(scenes, dict(tampers)))
    counts = {name: tamper.count for name, tamper in tampers.items()}
    with capsys.disabled():
        print(f"\nwrites refused once: {counts}, {len(faults)} divergences", *faults, sep="\n  ")  # noqa: T201
    assert faults == []
    assert min(counts.values()) >= 15


def test_each_event_of_a_watch_may_be_lost(
    scenes: Scenes, capsys: pytest.CaptureFixture[str]
) -> None:
    calm = Losing(lambda key: False)
    tampers = {f"part {part}": Losing(in_part(part)) for part in range(PARTS)}
    differ = walked(scenes, dict(tampers), calm)
    for name, tamper in tampers.items():
        if GONE in tamper.lost:  # without it the operator creates objects that are then collected
            differ[name] = [line for line in differ[name] if not line.startswith("delete: created")]
    lost = set[str]().union(*(tamper.lost for tamper in tampers.values()))
    left = calm.met - lost
    faults = lines(differ)
    counts = {name: f"{len(tamper.lost)} of {len(tamper.met)}" for name, tamper in tampers.items()}
    with capsys.disabled():
        print(f"\nevents lost: {counts}, {len(faults)} divergences", *faults, sep="\n  ")  # noqa: T201
        print(f"  {len(calm.met)} when calm, of which came to nobody else:", *left, sep="\n    ")  # noqa: T201
    assert faults == []
    assert GONE in lost
    # How often a status or a pod changes depends on the machine's load: a last event may be one
    # more than elsewhere.
    assert not [key for key in left if key.endswith(" 1")]
    assert len(left) <= len(calm.met) / SURPLUS


def lines(differ: dict[str, list[str]]) -> list[str]:
    return [f"{name}: {line}" for name, rows in differ.items() for line in rows]
