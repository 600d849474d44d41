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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import msgspec
from tests.api.ends import deleted, made, plain
from tests.api.fleet import Fleet, Operator
from tests.api.played import Leaders, Router
from tests.api.proxy import Answer, Call, Done, Proxy

QUIET_S = 2.5
"""More than a resync: what a life did not hear of it has seen by then."""
PATIENCE_S = 240.0
OFFERED_S = 1.0
"""So often a load that goes on is offered anew."""
OURS = "app.kubernetes.io/managed-by=medha-operator"
SCALED_OBJECTS = ("scaledobjects", "apis/keda.sh/v1alpha1")
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
    """One resource from its creation to its deletion, under an operator that may die. `kinds`: of
    what is made for it."""

    def __init__(
        self, api: httpx.Client, fleet: Fleet, leaders: Leaders, router: Router, proxy: Proxy,
        dying: Dying, kinds: Sequence[tuple[str, str]], **spec: Any,
    ) -> None:  # fmt: skip
        self._api, self._fleet, self._leaders, self._router = api, fleet, leaders, router
        self._proxy, self._dying, self._kinds = proxy, dying, kinds
        self._offered_s: float | None = None
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
            for kind, group in self._kinds:
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
        return self._with_groups(1 + self._least)

    def _shrink(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        """The controller says that the group holds nothing any more."""
        return self._with_groups(self._least)

    def _lose_a_pod(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        """The last one fails."""
        failed = {"phase": "Failed", "reason": "Test", "message": "it fell"}
        return self._without(lambda pod: self._fleet.tell(pod, failed))

    def _take_a_pod(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        """Somebody removes it, and it does not take its time."""
        return self._without(self._fleet.remove)

    def _update(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        return self._annotated("new"), self._as_asked

    def _roll_back(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        return self._annotated(None), self._as_asked

    def _autoscale(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        """Requests come for which one more replica is needed."""
        more = self._replicas() + 1

        def busy() -> None:
            self._offered_s = 0.0
            asked = {"maxReplicas": 3, "scaleDownStabilization": "2s"}
            self._fleet.change(self._name, {"autoscaling": asked})

        return busy, lambda: self._scaled("Scaling", more)

    def _cap(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        """Nobody comes any more, and no more than one may be had."""

        def cap() -> None:
            self._offered_s = None
            self._router.calm()
            self._fleet.change(self._name, {"autoscaling": {"maxReplicas": 1}})

        return cap, lambda: self._scaled("Scaling", 1)

    def _hand_to_keda(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        return self._scaled_by("External"), lambda: self._scaled("Exported", 1, objects=1)

    def _take_back(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        return self._scaled_by("Builtin"), lambda: self._scaled("Scaling", 1)

    def _delete(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        def delete() -> None:
            self._api.delete(self._fleet.path(self._name)).raise_for_status()
            self._collects = True

        return delete, lambda: not self._fleet.list("pods")

    def _play(self) -> None:
        """The part of everybody else: no controller manager collects what is owned here."""
        self._fleet.play()
        if self._offered_s is not None and time.monotonic() - self._offered_s > OFFERED_S:
            self._router.offer(self._name, -1.0, 0.9)
            self._offered_s = time.monotonic()
        if self._collects:
            path = self._fleet.path()
            living = {each["metadata"]["uid"] for each in self._api.get(path).json()["items"]}
            for kind, group in self._kinds:
                for each in self._fleet.list(kind, group):
                    meta = each["metadata"]
                    owners = {one["uid"] for one in meta.get("ownerReferences", ())}
                    if owners and not owners & living:
                        path = f"/{group}/namespaces/{meta['namespace']}/{kind}/{meta['name']}"
                        self._api.request("DELETE", path, json={"gracePeriodSeconds": 0})

    def _with_groups(self, groups: int) -> tuple[Callable[[], object], Callable[[], bool]]:
        """The first replica's controller wants so many."""
        pod = next(name for name in sorted(self._fleet.pods()) if name.endswith("-g0-s0"))
        total = self._least * (self._replicas() - 1) + groups

        def wanted() -> None:
            self._leaders.wanted[pod] = groups
            for each in self._fleet.pods():
                if each.startswith(pod.replace("-g0-s0", f"-g{groups}-")):
                    self._fleet.tell(each, {})  # its ranks have left

        def there() -> bool:
            names = {each.rpartition("-")[0] for each in self._fleet.pods()}
            told = self._fleet.status(self._name).get("kvpGroups")
            return told == len(names) == total and self._as_asked()

        return wanted, there

    def _without(
        self, lose: Callable[[str], object]
    ) -> tuple[Callable[[], object], Callable[[], bool]]:
        """What is done to the last pod; there is another in its place."""
        pods = self._fleet.pods()
        name = max(pods)
        uid = pods[name]["metadata"]["uid"]

        def there() -> bool:
            found = self._fleet.pods()
            other = name in found and found[name]["metadata"]["uid"] != uid
            return other and found.keys() == pods.keys() and self._as_asked()

        return lambda: lose(name), there

    def _scaled_by(self, mode: str) -> Callable[[], object]:
        return lambda: self._fleet.change(self._name, {"autoscaling": {"mode": mode}})

    def _scaled(self, reason: str, replicas: int, objects: int = 0) -> bool:
        """So many replicas are asked for and there, and scaling goes on as it should."""
        return (
            self._replicas() == replicas
            and self._fleet.condition(self._name, "ScalingActive").get("reason") == reason
            and len(self._fleet.list(*SCALED_OBJECTS)) == objects
            and self._as_asked()
        )

    @property
    def _least(self) -> int:
        return int(self._spec["parallelism"].get("kvp", {}).get("min", 1))

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
        late_s, late = self._late(done, deaths, name == "autoscale")
        return Phase(
            name=name, writes=len(own), deaths=self._dying.deaths - deaths, made=made(own),
            deleted=deleted(own), end=self._state(), late_s=late_s, late=late,
        )  # fmt: skip

    def _late(self, done: list[Done], deaths: int, decides: bool) -> tuple[float, tuple[str, ...]]:
        """Of the lives that began in this phase; nothing where nobody died. Where a number of
        replicas is to be decided, which takes as long as without deaths, from its first write."""
        found: tuple[float, tuple[str, ...]] = (0.0, ())
        ends = [*self._dying.died_s[deaths:], float("inf")]
        for death_s, end_s in itertools.pairwise(ends):
            lived = [each for each in done if death_s < each.at_s <= end_s]
            leads = [each.at_s for each in lived if not each.call.own]
            own = [each for each in lived if each.call.own]
            if leads and own:
                from_s = own[0].at_s if decides else leads[0]
                written = tuple(
                    f"{each.at_s - from_s:.1f} s: {each.call.verb} {each.call.path} {each.status}"
                    for each in own
                )
                found = max(found, (own[-1].at_s - from_s, written))
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
        found = {kind: self._fleet.list(kind, group) for kind, group in self._kinds}
        found["medhareplicas"] = self._api.get(self._fleet.path()).json()["items"]
        return plain(found, self._fleet.namespace)


def _ready(pod: dict[str, Any]) -> bool:
    ready = any(each["type"] == "Ready" and each["status"] == "True"
                for each in pod["status"].get("conditions", ()))  # fmt: skip
    return ready and "deletionTimestamp" not in pod["metadata"]
