"""An operator that dies at its writes and is started anew, and a fleet's life it lives through.

Each phase of the life (create, scale, grow, update, ...) begins where the fleet is as asked for and
ends there. Two ways of dying, each of which meets every write of a phase once:

    After    a life ends with its first write: done, and not told
    Before   a life does one write and ends before its second; the first life before its first

so that after W writes there were W deaths. An Event is told anew by each life, as none remembers
that it was told: it is met once, and then goes by without counting.

`Course.walk` gives, per phase, which objects were made and deleted how often and what everything
looks like at its end (see tests/api/ends.py); others are compared with a course without deaths.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
from tests.api.ends import KINDS, deleted, made, plain
from tests.api.fleet import Fleet, Operator
from tests.api.played import Leaders
from tests.api.proxy import Answer, Call, Done, Proxy

QUIET_S = 2.5
"""More than a resync: what a life did not hear of it has seen by then."""
PATIENCE_S = 240.0
OURS = "app.kubernetes.io/managed-by=medha-operator"
Start = Callable[..., Operator]


class Dying:
    """Starts an operator, kills it at writes, and starts the next. `spared`: writes that a life may
    do; None: it is not killed. `told`: the write at which it dies is done first."""

    def __init__(self, start: Start, proxy: Proxy, spared: int | None, told: bool) -> None:
        self._start, self._proxy, self._told = start, proxy, told
        self._later = spared
        self._left: int | None = 0 if spared and not told else spared
        self._operator: Operator | None = None
        self._dead = False
        self._events: set[tuple[str, str, str | None]] = set()
        self.died_s: list[float] = []
        proxy.before = self._before
        proxy.after = self._after

    @property
    def deaths(self) -> int:
        return len(self.died_s)

    def revive(self) -> None:
        """Somebody works: the same as before, or the next."""
        if self._dead and self._operator is not None:
            self._operator.process.wait(20)
            self._operator = None
            self._left = self._later
        if self._operator is None:
            self._dead = False
            self._operator = self._start()

    def works(self) -> bool:
        """Somebody lives and leads."""
        try:
            return not self._dead and self._operator is not None and self._operator.leads()
        except httpx.HTTPError:
            return False  # killed meanwhile

    def _before(self, call: Call) -> Answer | None:
        if self._dead and call.writes:
            return Answer(0)  # what a dead one says is not heard
        if call.own and self._left == 0 and not self._told and self._new(call):
            return self._die()
        return None

    def _after(self, call: Call) -> Answer | None:
        if self._dead:
            return Answer(0)
        if not call.own or self._left is None:
            return None
        if not self._told and self._left > 0:
            self._left -= self._new(call)
        elif self._told and self._new(call):
            return self._die()
        return None

    def _new(self, call: Call) -> bool:
        """It counts: no Event that was met before."""
        if "/events" not in call.path:
            return True
        event = call.verb, call.path, msgspec.json.decode(call.body).get("metadata", {}).get("name")
        known = event in self._events
        self._events.add(event)
        return not known

    def _die(self) -> Answer:
        assert self._operator is not None
        self._operator.process.kill()
        self._dead = True
        self.died_s.append(time.monotonic())
        return Answer(0)


class Phase(msgspec.Struct, frozen=True):
    """What came of one phase. `late_s`: the longest time that a life after a death took from its
    leadership to its next death, or to its last write; `late`: what it wrote, and when."""

    name: str
    writes: int
    deaths: int
    made: dict[str, int]
    deleted: dict[str, int]
    end: dict[str, Any]
    late_s: float
    late: tuple[str, ...]


class Course:
    """One resource from its creation to its deletion, under an operator that may die."""

    def __init__(
        self, api: httpx.Client, fleet: Fleet, leaders: Leaders, proxy: Proxy, dying: Dying,
        **spec: Any,
    ) -> None:  # fmt: skip
        self._api, self._fleet, self._leaders = api, fleet, leaders
        self._proxy, self._dying = proxy, dying
        self._spec = spec
        self._name = "llama"
        self._collects = False
        self._begin = 0

    def walk(self, phases: tuple[str, ...]) -> Iterator[Phase]:
        for name in phases:
            yield self._phase(name, *getattr(self, f"_{name}")())

    # --- phases: what is done, and when it has come about -----------------------------------------

    def _create(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        """Nothing is left of earlier courses: keys and the list of models are made anew too."""

        def create() -> None:
            for kind, group in KINDS:
                place = f"/{group}/namespaces/{self._fleet.namespace}/{kind}"
                self._api.delete(place, params={"labelSelector": OURS}).raise_for_status()
            self._fleet.create(self._name, **self._spec)

        return create, self._as_asked

    def _scale_up(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        more = self._replicas() + 1
        return lambda: self._fleet.change(self._name, {"replicas": more}), self._as_asked

    def _scale_down(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        fewer = self._replicas() - 1
        return lambda: self._fleet.change(self._name, {"replicas": fewer}), self._as_asked

    def _grow(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        pod = next(name for name in sorted(self._fleet.pods()) if name.endswith("-g0-s0"))
        groups = 1 + self._spec["parallelism"]["kvp"]["min"]
        replicas = self._replicas()
        grown = pod.replace("-g0-s0", f"-g{groups - 1}-")

        def wanted() -> None:
            self._leaders.wanted[pod] = groups

        def there() -> bool:
            told = self._fleet.status(self._name).get("kvpGroups") == (groups - 1) * replicas + 1
            return (
                told
                and self._as_asked()
                and any(name.startswith(grown) for name in self._fleet.pods())
            )

        return wanted, there

    def _update(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        return self._annotated("new"), self._as_asked

    def _roll_back(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        return self._annotated(None), self._as_asked

    def _delete(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        def delete() -> None:
            self._api.delete(self._fleet.path(self._name)).raise_for_status()
            self._collects = True

        return delete, lambda: not self._fleet.list("pods")

    def _play(self) -> None:
        """The part of everybody else: no controller manager collects what is owned here."""
        self._fleet.play()
        if self._collects:
            path = self._fleet.path()
            living = {each["metadata"]["uid"] for each in self._api.get(path).json()["items"]}
            for kind, group in KINDS:
                for each in self._fleet.list(kind, group):
                    meta = each["metadata"]
                    owners = {one["uid"] for one in meta.get("ownerReferences", ())}
                    if owners and not owners & living:
                        path = f"/{group}/namespaces/{meta['namespace']}/{kind}/{meta['name']}"
                        self._api.request("DELETE", path, json={"gracePeriodSeconds": 0})

    def _annotated(self, value: str | None) -> Callable[[], object]:
        return lambda: self._fleet.change(
            self._name, {"template": {"annotations": {"edition": value}}}
        )

    # --- how a phase goes -------------------------------------------------------------------------

    def _phase(self, name: str, begin: Callable[[], object], there: Callable[[], bool]) -> Phase:
        self._begin = first = len(self._proxy.done)
        deaths = self._dying.deaths
        begin()
        began_s = time.monotonic()
        while True:
            self._dying.revive()
            self._play()
            if there() and self._quiet() and there():
                break
            if time.monotonic() - max([began_s, *self._dying.died_s[-1:]]) > PATIENCE_S:
                raise AssertionError(f"{name} does not come to its end\n{self._fleet.shown()}")
            time.sleep(0.05)
        done = [each for each in self._proxy.done[first:] if each.call.writes and not each.placed]
        own = [each for each in done if each.own]
        late_s, late = self._late(done, deaths)
        return Phase(
            name=name, writes=len(own), deaths=self._dying.deaths - deaths, made=made(own),
            deleted=deleted(own), end=self._state(), late_s=late_s, late=late,
        )  # fmt: skip

    def _late(self, done: list[Done], deaths: int) -> tuple[float, tuple[str, ...]]:
        """Of the lives that began in this phase; nothing where nobody died."""
        found: tuple[float, tuple[str, ...]] = (0.0, ())
        ends = [*self._dying.died_s[deaths:], float("inf")]
        for death_s, end_s in itertools.pairwise(ends):
            lived = [each for each in done if death_s < each.at_s <= end_s]
            leads = [each.at_s for each in lived if not each.call.own]
            own = [each for each in lived if each.call.own]
            if leads and own:
                written = tuple(
                    f"{each.at_s - leads[0]:.1f} s: {each.call.verb} {each.call.path} {each.status}"
                    for each in own
                )
                found = max(found, (own[-1].at_s - leads[0], written))
        return found

    def _quiet(self) -> bool:
        """Nothing is written for a while, though somebody works."""
        before = self._writes(), self._dying.deaths
        end = time.monotonic() + QUIET_S
        while time.monotonic() < end:
            self._play()
            time.sleep(0.05)
            if (self._writes(), self._dying.deaths) != before:
                return False
        return self._dying.works()

    def _writes(self) -> int:
        return sum(each.own for each in self._proxy.done[self._begin :])

    def _replicas(self) -> int:
        return int(self._api.get(self._fleet.path(self._name)).json()["spec"]["replicas"])

    def _as_asked(self) -> bool:
        fleet = self._fleet
        return (
            fleet.is_ready(self._name)
            and fleet.condition(self._name, "Updated").get("status") == "True"
            and fleet.condition(self._name, "Draining").get("status") == "False"
            and all(_ready(pod) for pod in fleet.list("pods"))
        )

    def _state(self) -> dict[str, Any]:
        """Everything there is, without what differs between two equal fleets."""
        found = {kind: self._fleet.list(kind, group) for kind, group in KINDS}
        found["medhareplicas"] = self._api.get(self._fleet.path()).json()["items"]
        return plain(found, self._fleet.namespace)


def _ready(pod: dict[str, Any]) -> bool:
    ready = any(each["type"] == "Ready" and each["status"] == "True"
                for each in pod["status"].get("conditions", ()))  # fmt: skip
    return ready and "deletionTimestamp" not in pod["metadata"]
