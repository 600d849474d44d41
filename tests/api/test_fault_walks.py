"""A fleet's whole life while the API server refuses each write once, or each event is lost once.

Whatever is refused or lost, each phase must end as it does when nothing goes wrong: the same
objects, the same made and deleted, each as often. All walks of a test go on at the same time. With
`make crash-points` the life is the one with two stages and every phase; without it a shorter one.
"""

from __future__ import annotations

import collections
import os
import re
import zlib
from collections.abc import Callable

import msgspec
import pytest
from tests.api.proxy import Answer, Call, Proxy, event
from tests.api.walks import Scenes, Trouble, divergences, walk_all

pytestmark = pytest.mark.timeout(3000)

WHOLE = os.environ.get("MEDHA_CRASH_POINTS") == "whole"
COURSE = "staged" if WHOLE else "short"
GONE = "kopf/ medhareplicas DELETED llama 1"
SURPLUS = 20
"""One in so many events may have come when nothing went wrong, and to nobody else."""
HASH = re.compile(r"(?<=-)[0-9a-f]{10}$")
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
    """Events never come, each of these once: by what it is about, and which of those it is. All
    that came are known by then; those about what belongs to other fleets do not count."""

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
        said = HASH.sub("HASH", name.replace(namespace, "NAMESPACE"))
        about = f"{call.agent[:5]} {call.path.rpartition('/')[2]} {kind} {said}"
        self._about[about] += 1
        key = f"{about} {self._about[about]}"
        self.met.add(key)
        if not self._chosen(key):
            return [line]
        self.lost.add(key)
        return []


def in_part(part: int) -> Callable[[str], bool]:
    """Two of the parts have each event, so that it is lost even where it does not come in one."""

    def chosen(key: str) -> bool:
        drawn = zlib.crc32(key.encode())
        first = drawn % PARTS
        return part in (first, (first + 1 + drawn // PARTS % (PARTS - 1)) % PARTS)

    return chosen


def walked(
    scenes: Scenes, tampers: dict[str, Callable[[Proxy], None]],
    calmly: Callable[[Proxy], None] = lambda proxy: None,
) -> dict[str, list[str]]:  # fmt: skip
    """Where each of them differs from a walk in which nothing goes wrong."""
    calm = Trouble("calm", tamper=calmly)
    troubles = [Trouble(name, tamper=each) for name, each in tampers.items()]
    plain, *others = walk_all(scenes, COURSE, (calm, *troubles))
    return {name: divergences(plain, other) for name, other in zip(tampers, others, strict=True)}


def test_each_write_may_be_refused_once_with_any_status(
    scenes: Scenes, capsys: pytest.CaptureFixture[str]
) -> None:
    tampers = {str(status): Refusing(status) for status in REFUSALS}
    found = lines(walked(scenes, dict(tampers)))
    counts = {name: each.count for name, each in tampers.items()}
    with capsys.disabled():
        print(f"\nwrites refused once: {counts}, {len(found)} divergences", *found, sep="\n  ")  # noqa: T201
    assert found == []
    assert min(counts.values()) >= 15


def test_each_event_of_a_watch_may_be_lost(
    scenes: Scenes, capsys: pytest.CaptureFixture[str]
) -> None:
    calm = Losing(lambda key: False)
    tampers = {f"part {part}": Losing(in_part(part)) for part in range(PARTS)}
    differ = walked(scenes, dict(tampers), calm)
    for name, each in tampers.items():
        if GONE in each.lost:  # it keeps up what it does not know to be gone; that is collected
            differ[name] = [line for line in differ[name] if not line.startswith("delete: made")]
    lost = set[str]().union(*(each.lost for each in tampers.values()))
    left = calm.met - lost
    found = lines(differ)
    counts = {name: f"{len(each.lost)} of {len(each.met)}" for name, each in tampers.items()}
    with capsys.disabled():
        print(f"\nevents lost: {counts}, {len(found)} divergences", *found, sep="\n  ")  # noqa: T201
        print(f"  {len(calm.met)} when calm, of which came to nobody else:", *left, sep="\n    ")  # noqa: T201
    assert found == []
    assert GONE in lost
    # How often a status or a pod changes depends on how busy the machine is: a last one may be one
    # more than elsewhere.
    assert not [key for key in left if key.endswith(" 1")]
    assert len(left) <= len(calm.met) / SURPLUS


def lines(differ: dict[str, list[str]]) -> list[str]:
    return [f"{name}: {line}" for name, each in differ.items() for line in each]
