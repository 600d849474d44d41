"""Everything that is known, joined by MedhaReplica: what `plan` and `status` are given.

The Stores of the informers call in here on every difference; here it is said whose business that
is, and `wake` is told which resource to look at again, and how soon. Small delays let the events
of one cause arrive together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from medha.errors import SpecError
from medha.spec import MedhaReplica, parse
from medha_operator.authors import Author, authors_of
from medha_operator.informers import Store
from medha_operator.observed import NodeView, Observed, PodView, ReportView
from medha_operator.projections import Key, Meta, Pod, Seen, Thing
from medha_operator.since import Since
from medha_operator.usage import Load, Usage

POD_DELAY_S, ROOM_DELAY_S = 0.15, 1.0
_DONE = ("Succeeded", "Failed")


class Resource(msgspec.Struct, frozen=True):
    """A MedhaReplica as it stands; `replica` is None when its spec is refused."""

    meta: Meta
    generation: int
    replica: MedhaReplica | None
    refused: str
    status: Mapping[str, Any]
    authors: tuple[Author, ...] = ()
    """Who has a say in `spec.replicas`, the latest last."""

    @property
    def deleting(self) -> bool:
        return self.meta.deletion_timestamp is not None


class World:
    """The cluster as far as the operator is concerned."""

    def __init__(self, wake: Callable[[Key, float], None]) -> None:
        self._wake = wake
        self.replicas: Store[Resource] = Store(self._replica_changed)
        self.usage = Usage()
        self.waiting: set[Key] = set()
        """Resources that found no place, or not enough of it."""
        self.homeless: set[Key] = set()
        """Those of them of which a replica found none; the others but lack further groups."""
        self.reports: dict[Key, dict[int, ReportView]] = {}
        self.reports_since_s = 0.0
        self.complaints: dict[str, str] = {}
        """By the UID of a pod that does not start: which volume cannot be mounted, and why."""
        self._since = Since()
        self._pods: dict[Key, dict[str, Pod]] = {}
        self._things: dict[Key, dict[tuple[str, str], str]] = {}
        self._parsed: dict[str, tuple[int, MedhaReplica | None, str]] = {}

    def pod_store(self) -> Store[Pod]:
        """One per namespace that is watched; they all end up here."""
        return Store(self._pod_changed)

    def thing_store(self) -> Store[Thing]:
        return Store(self._thing_changed)

    def node_store(self) -> Store[NodeView]:
        return Store(self._node_changed)

    def resource(self, raw: bytes | msgspec.Raw) -> Seen[Resource]:
        """A MedhaReplica from the API's JSON."""
        return self.resource_from(msgspec.json.decode(raw))

    def resource_from(self, body: Mapping[str, Any]) -> Seen[Resource]:
        """A MedhaReplica from the API's document; a spec is read once per generation."""
        meta = msgspec.convert(body["metadata"], Meta)
        generation = int(body["metadata"].get("generation", 0))
        known = self._parsed.get(meta.uid)
        if known is None or known[0] != generation:
            known = self._parsed[meta.uid] = (generation, *_parsed(body))
        status, authors = body.get("status") or {}, authors_of(body["metadata"])
        value = Resource(meta, generation, known[1], known[2], status, authors)
        return Seen(meta.key, int(meta.resource_version), meta.uid, value)

    def observed(self, resource: Resource, now_s: float) -> Observed:
        """What is to be known for one decision."""
        key = resource.meta.key
        pods = self._pods.get(key, {})
        nodes = self.usage.nodes(key, [(key[0], name) for name in pods])
        return Observed(
            now_s=now_s,
            pods=self._since.told([self._told(pods[name].view) for name in sorted(pods)], now_s),
            objects=self._things.get(key, {}),
            reports=self.reports.get(key, {}),
            reports_since_s=self.reports_since_s,
            nodes=nodes,
            previous=resource.status,
        )

    def _told(self, pod: PodView) -> PodView:
        """With what its kubelet complains of, as long as it has not started."""
        note = self.complaints.get(pod.uid)
        if note is None or pod.why or pod.phase != "Pending":
            return pod
        return msgspec.structs.replace(pod, why="FailedMount", message=note)

    def pods_of(self, key: Key) -> tuple[PodView, ...]:
        return tuple(pod.view for pod in self._pods.get(key, {}).values())

    def all_pods(self) -> Mapping[Key, Mapping[str, Pod]]:
        return self._pods

    def expect(self, pod: Seen[Pod]) -> None:
        """The pod is about to be made: its room is taken from now on."""
        self._take(pod.key, pod.value)

    def unexpect(self, pod: Seen[Pod]) -> None:
        """It was not made after all."""
        if pod.key[1] not in self._pods.get(pod.value.resource, {}):
            self._take(pod.key, None)

    def room_changed(self) -> None:
        """Somebody left: those without a place look again."""
        for key in self.waiting:
            self._wake(key, ROOM_DELAY_S)

    def note_waiting(self, key: Key, *, replicas: bool, groups: bool) -> None:
        """Whether replicas of a resource, or further groups of them, find no place now."""
        for waiting, does in ((self.waiting, replicas or groups), (self.homeless, replicas)):
            if does:
                waiting.add(key)
            else:
                waiting.discard(key)

    def _replica_changed(self, key: Key, old: Resource | None, new: Resource | None) -> None:
        if new is None:
            self.note_waiting(key, replicas=False, groups=False)
            self.reports.pop(key, None)
            if old is not None:
                self._parsed.pop(old.meta.uid, None)
        if old is None or new is None or _wanted(old) != _wanted(new):
            self._wake(key, 0.0)

    def _pod_changed(self, key: Key, old: Pod | None, new: Pod | None) -> None:
        either = new or old
        if either is None:
            return
        family = self._pods.setdefault(either.resource, {})
        if old is not None and (new is None or new.view.uid != old.view.uid):
            self._since.forget(old.view.uid)
        if new is None:
            family.pop(key[1], None)
            if not family:
                del self._pods[either.resource]
        else:
            family[key[1]] = new
        self._take(key, new)
        if old is not None and (new is None or new.view.phase in _DONE):
            self.room_changed()
        self._wake(either.resource, POD_DELAY_S)

    def _take(self, key: Key, pod: Pod | None) -> None:
        view = None if pod is None else pod.view
        place = "" if view is None or view.phase in _DONE else view.node or view.target
        load = None if pod is None or not place else Load(place, pod.resource, pod.requests)
        self.usage.put(key, load)

    def _thing_changed(self, key: Key, old: Thing | None, new: Thing | None) -> None:
        either = new or old
        if either is None:
            return
        things = self._things.setdefault(either.resource, {})
        if new is None:
            things.pop((either.kind, key[1]), None)
            if not things:
                del self._things[either.resource]
        else:
            things[either.kind, key[1]] = new.content
        self._wake(either.resource, POD_DELAY_S)

    def _node_changed(self, key: Key, old: NodeView | None, new: NodeView | None) -> None:
        self.usage.put_node(key[1], new)
        for owner in self.usage.owners(key[1]):
            self._wake(owner, POD_DELAY_S)
        self.room_changed()


def _wanted(resource: Resource) -> tuple[object, ...]:
    return resource.meta.uid, resource.generation, resource.deleting


def _parsed(body: Mapping[str, Any]) -> tuple[MedhaReplica | None, str]:
    """The checked spec, or the sentence that refuses it."""
    try:
        return parse({name: body[name] for name in body if name != "status"}), ""
    except SpecError as error:
        return None, str(error)
