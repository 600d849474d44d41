"""A fleet's life under an operator that is killed at its writes and started again.

Each phase of the life (create, scale, grow, update, ...) starts and ends with the fleet in its
desired state. There are two ways to die; each meets every write of a phase once:

    After    an operator dies with its first write: executed, but not answered
    Before   an operator does one write and dies before its second; the first one before its first

so that W writes bring W deaths. Each operator sends an Event again, as none has a record of it:
the first such write counts, repetitions pass without counting.

`Course.walk` yields, per phase, the number of objects created and deleted, and the final state
(see tests/api/outcome.py), which other tests compare with a course without deaths.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import msgspec
from tests.api.fleet import POLL_S, Fleet, Operator
from tests.api.outcome import created, deleted, plain
from tests.api.proxy import Answer, Call, Done, Proxy
from tests.api.stand_ins import Leaders, Router

QUIET_S = 2.5
SETTLED_S = 1.0
"""Time after a resync by which the operator has acted on what a watch has lost."""
PATIENCE_S = 600.0
OFFERED_S = 1.0
"""Interval at which a continuous load is offered again."""
OURS = "app.kubernetes.io/managed-by=medha-operator"
SCALED_OBJECTS = ("scaledobjects", "apis/keda.sh/v1alpha1")
Start = Callable[..., Operator]


class Dying:
    """Starts an operator, kills it at a write, and starts the next.

    `spared`: the number of writes that an operator may do; None: it is not killed. `answered`: the
    write at which it dies is executed first.
    """

    def __init__(self, start: Start, proxy: Proxy, spared: int | None, answered: bool) -> None:
        self._start, self._proxy, self._answered = start, proxy, answered
        self._later = spared
        self._left: int | None = 0 if spared and not answered else spared
        self._operator: Operator | None = None
        self._dead = False
        self._events: set[tuple[str, str, str | None]] = set()
        self.died_s: list[float] = []
        proxy.before = self._before
        proxy.after = self._after

    @property
    def deaths(self) -> int:
        return len(self.died_s)

    def restart(self) -> None:
        """Start the next operator if the last one is dead."""
        if self._dead and self._operator is not None:
            self._operator.process.wait(20)
            self._operator = None
            self._left = self._later
        if self._operator is None:
            self._dead = False
            self._operator = self._start()

    def is_working(self) -> bool:
        """Return true if an operator is alive and leads."""
        try:
            return not self._dead and self._operator is not None and self._operator.leads()
        except httpx.HTTPError:
            return False  # killed meanwhile

    def _before(self, call: Call) -> Answer | None:
        if self._dead and call.writes:
            return Answer(0)  # a dead operator's write is not executed
        if call.own and self._left == 0 and not self._answered and self._new(call):
            return self._die()
        return None

    def _after(self, call: Call) -> Answer | None:
        if self._dead:
            return Answer(0)
        if not call.own or self._left is None:
            return None
        if not self._answered and self._left > 0:
            self._left -= self._new(call)
        elif self._answered and self._new(call):
            return self._die()
        return None

    def _new(self, call: Call) -> bool:
        """Return true if the call counts: it is no Event that was sent before."""
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
    """The result of one phase, which took `took_s`.

    `late_s`: the longest time from an operator's start to lead after a death to its next death, or
    to its last write; `late`: what it wrote, and when.
    """

    name: str
    writes: int
    deaths: int
    created: dict[str, int]
    deleted: dict[str, int]
    end: dict[str, Any]
    took_s: float
    late_s: float
    late: tuple[str, ...]


class Course:
    """A resource from creation to deletion, under an operator that may die; `kinds` are made for
    it."""

    def __init__(
        self,
        api: httpx.Client,
        fleet: Fleet,
        leaders: Leaders,
        router: Router,
        proxy: Proxy,
        dying: Dying,
        kinds: Sequence[tuple[str, str]],
        **spec: Any,
    ) -> None:
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
        """Start without leftovers: the keys and the ConfigMap of models are created again too."""

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
        return self._with_groups(1 + self._min_groups)

    def _shrink(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        """The controller reports that the group no longer holds anything."""
        return self._with_groups(self._min_groups)

    def _lose_a_pod(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        """The last pod fails."""
        failed = {"phase": "Failed", "reason": "Test", "message": "it fell"}
        return self._without(lambda pod: self._fleet.set_not_ready(pod, failed))

    def _take_a_pod(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        """The last pod is deleted by force."""
        return self._without(self._fleet.remove)

    def _update(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        return self._annotated("new"), self._as_asked

    def _roll_back(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        return self._annotated(None), self._as_asked

    def _autoscale(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        """Requests arrive that need one more replica."""
        more = self._replicas() + 1

        def busy() -> None:
            self._offered_s = 0.0
            autoscaling = {"maxReplicas": 3, "scaleDownStabilization": "2s"}
            self._fleet.change(self._name, {"autoscaling": autoscaling})

        return busy, lambda: self._scaled("Scaling", more)

    def _cap(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        """No more requests arrive, and maxReplicas becomes 1."""

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
        """Play everything but the operator; here no controller manager collects owned objects."""
        self._fleet.play()
        if self._offered_s is not None and time.monotonic() - self._offered_s > OFFERED_S:
            self._router.offer(self._name, -1.0, 0.9)
            self._offered_s = time.monotonic()
        if self._collects:
            leases = f"/apis/coordination.k8s.io/v1/namespaces/{self._fleet.namespace}/leases"
            living = {
                owner["metadata"]["uid"]
                for path in (self._fleet.path(), leases)
                for owner in self._api.get(path).json()["items"]
            }
            for kind, group in self._kinds:
                for document in self._fleet.list(kind, group):
                    meta = document["metadata"]
                    owners = {owner["uid"] for owner in meta.get("ownerReferences", ())}
                    if owners and not owners & living:
                        path = f"/{group}/namespaces/{meta['namespace']}/{kind}/{meta['name']}"
                        self._api.request("DELETE", path, json={"gracePeriodSeconds": 0})

    def _with_groups(self, groups: int) -> tuple[Callable[[], object], Callable[[], bool]]:
        """The first replica's controller wants this number of groups."""
        pod = next(name for name in sorted(self._fleet.pods()) if name.endswith("-g0-s0"))
        total = self._min_groups * (self._replicas() - 1) + groups

        def wanted() -> None:
            self._leaders.wanted[pod] = groups
            for member in self._fleet.pods():
                if member.startswith(pod.replace("-g0-s0", f"-g{groups}-")):
                    self._fleet.set_not_ready(member, {})  # its ranks have left

        def done_when() -> bool:
            names = {member.rpartition("-")[0] for member in self._fleet.pods()}
            groups_reported = self._fleet.status(self._name).get("kvpGroups")
            return groups_reported == len(names) == total and self._as_asked()

        return wanted, done_when

    def _without(
        self, lose: Callable[[str], object]
    ) -> tuple[Callable[[], object], Callable[[], bool]]:
        """The last pod is lost; a new one must take its place."""
        pods = self._fleet.pods()
        name = max(pods)
        uid = pods[name]["metadata"]["uid"]

        def done_when() -> bool:
            present = self._fleet.pods()
            other = name in present and present[name]["metadata"]["uid"] != uid
            return other and present.keys() == pods.keys() and self._as_asked()

        return lambda: lose(name), done_when

    def _scaled_by(self, mode: str) -> Callable[[], object]:
        return lambda: self._fleet.change(self._name, {"autoscaling": {"mode": mode}})

    def _scaled(self, reason: str, replicas: int, objects: int = 0) -> bool:
        """Return true if spec.replicas and the fleet match, and ScalingActive has this reason."""
        return (
            self._replicas() == replicas
            and self._fleet.condition(self._name, "ScalingActive").get("reason") == reason
            and len(self._fleet.list(*SCALED_OBJECTS)) == objects
            and self._as_asked()
        )

    @property
    def _min_groups(self) -> int:
        return int(self._spec["parallelism"].get("kvp", {}).get("min", 1))

    def _annotated(self, value: str | None) -> Callable[[], object]:
        return lambda: self._fleet.change(
            self._name, {"template": {"annotations": {"edition": value}}}
        )

    # --- how a phase goes -------------------------------------------------------------------------

    def _phase(
        self, name: str, begin: Callable[[], object], done_when: Callable[[], bool]
    ) -> Phase:
        self._begin = first = len(self._proxy.done)
        deaths = self._dying.deaths
        begin()
        began_s = time.monotonic()
        while True:
            self._dying.restart()
            self._play()
            if done_when() and self._quiet() and done_when():
                break
            if time.monotonic() - max([began_s, *self._dying.died_s[-1:]]) > PATIENCE_S:
                raise AssertionError(f"{name} does not come to its end\n{self._fleet.shown()}")
            time.sleep(POLL_S)
        done = [
            reply for reply in self._proxy.done[first:] if reply.call.writes and not reply.placed
        ]
        own = [reply for reply in done if reply.own]
        late_s, late = self._late(done, deaths, name == "autoscale")
        return Phase(
            name=name,
            writes=len(own),
            deaths=self._dying.deaths - deaths,
            created=created(own),
            deleted=deleted(own),
            end=self._state(),
            took_s=time.monotonic() - began_s,
            late_s=late_s,
            late=late,
        )

    def _late(self, done: list[Done], deaths: int, decides: bool) -> tuple[float, tuple[str, ...]]:
        """Measure the operators that started in this phase, from their start to lead.

        Where a number of replicas is decided (`decides`), which takes as long without deaths,
        measure from the first write.
        """
        longest: tuple[float, tuple[str, ...]] = (0.0, ())
        ends = [*self._dying.died_s[deaths:], float("inf")]
        for death_s, end_s in itertools.pairwise(ends):
            lived = [reply for reply in done if death_s < reply.at_s <= end_s]
            leads = [reply.at_s for reply in lived if not reply.call.own]
            own = [reply for reply in lived if reply.call.own]
            if leads and own:
                from_s = own[0].at_s if decides else leads[0]
                written = tuple(
                    f"{reply.at_s - from_s:.1f} s: {reply.call.verb} {reply.call.path} "
                    f"{reply.status}"
                    for reply in own
                )
                longest = max(longest, (own[-1].at_s - from_s, written))
        return longest

    def _quiet(self) -> bool:
        """Return true if nothing is written for QUIET_S, with a resync in that time, although an
        operator works."""
        before, seen = (self._writes(), self._dying.deaths), len(self._proxy.done)
        end = time.monotonic() + QUIET_S
        while (early := time.monotonic() < end) or not self._resynced(seen):
            self._play()
            time.sleep(POLL_S)
            if (self._writes(), self._dying.deaths) != before:
                return False
            if not early and not self._dying.is_working():
                return False  # it is starting, so the next resync is far
        return self._dying.is_working()

    def _resynced(self, seen: int) -> bool:
        """Return true if the operator has listed the nodes since the answer `seen`, and has had the
        time to act."""
        return any(
            reply.call.path.endswith("/nodes")
            and not reply.call.watches
            and reply.at_s < time.monotonic() - SETTLED_S
            for reply in self._proxy.done[seen:]
        )

    def _writes(self) -> int:
        return sum(reply.own for reply in self._proxy.done[self._begin :])

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
        """Every object, without the fields in which two equal fleets differ."""
        objects = {kind: self._fleet.list(kind, group) for kind, group in self._kinds}
        objects["medhareplicas"] = self._api.get(self._fleet.path()).json()["items"]
        return plain(objects, self._fleet.namespace)


def _ready(pod: dict[str, Any]) -> bool:
    ready = any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in pod["status"].get("conditions", ())
    )
    return ready and "deletionTimestamp" not in pod["metadata"]
