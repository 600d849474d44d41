"""An operator that dies at its writes and is started anew, and a fleet's life it lives through.

Each phase of the life (create, scale, grow, update, ...) begins where the fleet is as asked for and
ends there. Two ways of dying, each of which meets every write of a phase once:

    After    a life ends with its first write: done, and not told
    Before   a life does one write and ends before its second; the first life before its first

so that after W writes there were W deaths. An Event is told anew by each life, as none remembers
that it was told: it is met once, and then goes by without counting.

`Course.walk` gives, per phase, which pods were made and deleted how often and what everything looks
like at its end; a course without deaths is what the others are compared with.
"""

from __future__ import annotations

import collections
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
from tests.api.fleet import Fleet, Operator
from tests.api.played import Leaders
from tests.api.proxy import Answer, Call, Done, Proxy

QUIET_S = 1.5
PATIENCE_S = 240.0
KINDS = (
    ("pods", "api/v1"), ("services", "api/v1"), ("configmaps", "api/v1"), ("secrets", "api/v1"),
    ("poddisruptionbudgets", "apis/policy/v1"), ("networkpolicies", "apis/networking.k8s.io/v1"),
)  # fmt: skip

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
        self.deaths, self.died_s = 0, 0.0
        proxy.before = self._before
        proxy.after = self._after

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

    def end(self) -> None:
        """Nobody works any more."""
        if self._operator is not None:
            self._operator.kill()
            self._operator = None

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
        self.died_s = time.monotonic()
        self.deaths += 1
        return Answer(0)


class Phase(msgspec.Struct, frozen=True):
    """What came of one phase. `late_s`: from the last beginning of leadership to the last write."""

    name: str
    writes: int
    deaths: int
    made: dict[str, int]
    deleted: dict[str, int]
    end: dict[str, Any]
    late_s: float


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

    def walk(self, phases: tuple[str, ...]) -> Iterator[Phase]:
        for name in phases:
            yield self._phase(name, *getattr(self, f"_{name}")())

    # --- phases: what is done, and when it has come about -----------------------------------------

    def _create(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        return lambda: self._fleet.create(self._name, **self._spec), self._as_asked

    def _scale_up(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        more = self._replicas() + 1
        return lambda: self._fleet.change(self._name, {"replicas": more}), self._as_asked

    def _scale_down(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        fewer = self._replicas() - 1
        return lambda: self._fleet.change(self._name, {"replicas": fewer}), self._as_asked

    def _grow(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        pod = next(name for name in sorted(self._fleet.pods()) if name.endswith("-g0-s0"))
        groups = 1 + self._spec["parallelism"]["kvp"]["min"]
        grown = pod.replace("-g0-s0", f"-g{groups - 1}-")

        def wanted() -> None:
            self._leaders.wanted[pod] = groups

        def there() -> bool:
            return self._as_asked() and any(name.startswith(grown) for name in self._fleet.pods())

        return wanted, there

    def _update(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        return self._annotated("new"), self._as_asked

    def _roll_back(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        return self._annotated(None), self._as_asked

    def _delete(self) -> tuple[Callable[[], object], Callable[[], bool]]:
        """Owned objects are collected by hand, as no controller manager does it here."""
        uid = self._api.get(self._fleet.path(self._name)).json()["metadata"]["uid"]

        def delete() -> None:
            self._api.delete(self._fleet.path(self._name)).raise_for_status()
            for kind, group in KINDS:
                for each in self._fleet.list(kind, group):
                    meta = each["metadata"]
                    if any(one["uid"] == uid for one in meta.get("ownerReferences", ())):
                        path = f"/{group}/namespaces/{meta['namespace']}/{kind}/{meta['name']}"
                        self._api.request("DELETE", path, json={"gracePeriodSeconds": 0})

        return delete, lambda: not self._fleet.list("pods")

    def _annotated(self, value: str | None) -> Callable[[], object]:
        return lambda: self._fleet.change(
            self._name, {"template": {"annotations": {"edition": value}}}
        )

    # --- how a phase goes -------------------------------------------------------------------------

    def _phase(self, name: str, begin: Callable[[], object], there: Callable[[], bool]) -> Phase:
        first, deaths = len(self._proxy.done), self._dying.deaths
        begin()
        end = time.monotonic() + PATIENCE_S
        while True:
            self._dying.revive()
            self._fleet.play()
            if there() and self._quiet() and there():
                break
            if time.monotonic() > end:
                raise AssertionError(f"{name} does not come to its end\n{self._fleet._shown()}")
            time.sleep(0.05)
        done = self._proxy.done[first:]
        own = [each for each in done if each.call.own]
        pods = [each for each in own if re.search(r"/pods(/|$)", each.call.path)]
        made = [_name(each.answer) for each in pods
                if each.call.verb == "POST" and each.status == 201]  # fmt: skip
        deleted = [each.call.path.rpartition("/")[2] for each in pods
                   if each.call.verb == "DELETE" and each.status == 200]  # fmt: skip
        return Phase(
            name=name, writes=len(own), deaths=self._dying.deaths - deaths, made=_counted(made),
            deleted=_counted(deleted), end=self._state(), late_s=self._late_s(done),
        )  # fmt: skip

    def _late_s(self, done: list[Done]) -> float:
        """From when the last of its lives led to its last write; 0 where nobody died."""
        after = [each for each in done if each.at_s > self._dying.died_s]
        leads = [each.at_s for each in after if not each.call.own]
        own = [each.at_s for each in after if each.call.own]
        return max(0.0, own[-1] - leads[0]) if own and leads and done[0] not in after else 0.0

    def _quiet(self) -> bool:
        """Nothing is written for a while, though somebody works."""
        count = len([each for each in self._proxy.done if each.call.own])
        end = time.monotonic() + QUIET_S
        deaths = self._dying.deaths
        while time.monotonic() < end:
            self._fleet.play()
            time.sleep(0.05)
        works = self._dying.works()
        same = count == len([each for each in self._proxy.done if each.call.own])
        return works and same and deaths == self._dying.deaths

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
        found: dict[str, Any] = {
            kind: {each["metadata"]["name"]: each for each in self._fleet.list(kind, group)}
            for kind, group in KINDS
        }
        found["resources"] = self._api.get(self._fleet.path()).json()["items"]
        text = msgspec.json.encode(found).decode().replace(self._fleet.namespace, "NAMESPACE")
        ordinals = sorted(int(pod["metadata"]["labels"]["medha.dev/ordinal"])
                          for pod in found["pods"].values())  # fmt: skip
        places = {each: place for place, each in enumerate(sorted(set(ordinals)))}
        return dict(_plain(msgspec.json.decode(text), places))


def _name(document: bytes) -> str:
    return str(msgspec.json.decode(document)["metadata"]["name"])


def _counted(pods: list[str]) -> dict[str, int]:
    """How often a pod of each place in a replica; which number the replica had is no matter: it
    is the first that is free, and so depends on whether an old one had gone by then."""
    places = (each.partition("-g")[2] for each in pods)
    return dict(sorted(collections.Counter(places).items()))


def _ready(pod: dict[str, Any]) -> bool:
    ready = any(each["type"] == "Ready" and each["status"] == "True"
                for each in pod["status"].get("conditions", ()))  # fmt: skip
    return ready and "deletionTimestamp" not in pod["metadata"]


DIFFER = {
    "uid", "resourceVersion", "creationTimestamp", "managedFields", "lastTransitionTime", "podIP",
    "podIPs", "failedAt", "since", "startTime", "nodeName", "clusterIP", "clusterIPs", "data",
    "medha.dev/node", "affinity", "message", "hostIP", "hostIPs", "disruptedPods", "wanted",
    "generation",
}  # fmt: skip


def _plain(value: Any, places: dict[int, int]) -> Any:
    """Without what two equal fleets do not share: identities, times, places, key material, counts
    of a controller that was not asked yet. Replicas are numbered by their order."""

    def text(word: str) -> str:
        word = re.sub(r"[0-9a-f]{8,}", "#", word)
        return re.sub(r"\bllama-(\d+)", lambda found: f"llama-{place(found[1])}", word)

    def place(ordinal: str | int) -> str:
        return str(places.get(int(ordinal), f"gone-{ordinal}"))

    if isinstance(value, dict):
        numbered = {
            key: place(each) if key in ("medha.dev/ordinal", "replica") else each
            for key, each in value.items()
        }
        return {
            text(key): _plain(each, places) for key, each in numbered.items() if key not in DIFFER
        }
    if isinstance(value, list):
        return [_plain(each, places) for each in value]
    return text(value) if isinstance(value, str) else value
