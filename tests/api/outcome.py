"""The outcome of a fleet's life, for comparison: objects created, deleted and left over.

Two equal fleets differ in identities, times, addresses, node names and key material. The number
of a replica does not matter either: it is the first free one, which depends on whether an old
replica had gone by then; replicas are numbered by their order instead. The hashes of specs, which
may differ, are numbered in the order of the pods; the hashes of the ConfigMaps that they mount,
which contain namespace and number, are left out. All else must be the same.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from tests.api.proxy import Done

KINDS = (
    ("pods", "api/v1"),
    ("services", "api/v1"),
    ("configmaps", "api/v1"),
    ("secrets", "api/v1"),
    ("poddisruptionbudgets", "apis/policy/v1"),
    ("networkpolicies", "apis/networking.k8s.io/v1"),
)
OF_A_REPLICA = ("networkpolicies", "configmaps", "poddisruptionbudgets")
"""Kinds of which each replica has an object, named by its number."""
ORDINAL = "medha.dev/ordinal"
OBJECT = re.compile(r"/(?:api/v1|apis/[^/]+/[^/]+)/namespaces/[^/]+/([a-z]+)(?:/([^/]+))?")
DIFFER = {
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "managedFields",
    "lastTransitionTime",
    "podIP",
    "podIPs",
    "hostIP",
    "hostIPs",
    "startTime",
    "nodeName",
    "affinity",
    "failedAt",
    "since",
    "medha.dev/node",
    "medha.dev/content-hash",
}
NUMBERED = (ORDINAL, "replica")
DELETED = re.compile(r"pod \S+ is being deleted|the pod of stage \d+ is gone")
"""Reasons of a restart after a deletion, which depend on when the operator looks."""

Objects = dict[str, list[dict[str, Any]]]


def created(done: Iterable[Done]) -> dict[str, int]:
    """Count the objects created per kind, and pods per position, without Events."""
    return _counted(reply for reply in done if reply.status == 201)


def deleted(done: Iterable[Done]) -> dict[str, int]:
    """Count the deletions; a pod with a grace period counts at each request."""
    return _counted(reply for reply in done if reply.call.verb == "DELETE" and reply.status == 200)


def _counted(done: Iterable[Done]) -> dict[str, int]:
    counts: collections.Counter[str] = collections.Counter()
    for reply in done:
        place = OBJECT.fullmatch(reply.call.path)
        if place is None or place[1] == "events":
            continue
        kind, name = place[1], place[2] or _name(reply.answer)
        counts[f"{kind} {name.partition('-g')[2]}" if kind == "pods" else kind] += 1
    return dict(sorted(counts.items()))


def _name(document: bytes) -> str:
    return str(msgspec.json.decode(document)["metadata"]["name"])


def plain(objects_by_kind: Objects, namespace: str) -> dict[str, Any]:
    """The objects by kind and name, reduced to what two equal fleets share."""
    text = msgspec.json.encode(objects_by_kind).decode().replace(namespace, "NAMESPACE")
    objects: Objects = msgspec.json.decode(text)
    for secret in objects["secrets"]:
        secret["data"] = sorted(secret.get("data", ()))
    for budget in objects["poddisruptionbudgets"]:
        budget["metadata"].pop(
            "generation", None
        )  # counts the changes of a former replica's budget
    for resource in objects["medhareplicas"]:
        _quieten(resource.get("status", {}))
    pods = sorted(objects["pods"], key=lambda pod: str(pod["metadata"]["name"]))
    names = _Names(pods)
    return {
        kind: {names.word(document["metadata"]["name"]): names.same(document) for document in items}
        for kind, items in objects.items()
    }


def _quieten(status: dict[str, Any]) -> None:
    """Drop messages and counts: they are written with a delay, so they depend on the moment."""
    for condition in status.get("conditions", ()):
        condition.pop("message", None)
    status.pop("slo", None)
    for restart in status.get("restarts", ()):
        restart["reason"] = DELETED.sub("a pod is deleted", restart["reason"])
    for group in status.get("groups", ()):
        del group["wanted"], group["generation"]


class _Names:
    """Replaces the names of replicas and spec hashes by their order."""

    def __init__(self, pods: Iterable[dict[str, Any]]) -> None:
        self._hashes: dict[str, str] = {}
        ordinals: set[int] = set()
        specs = itertools.count()
        for pod in pods:
            labels = pod["metadata"]["labels"]
            if labels["medha.dev/spec-hash"] not in self._hashes:
                self._hashes[labels["medha.dev/spec-hash"]] = f"SPEC-{next(specs)}"
            ordinals.add(int(labels["medha.dev/ordinal"]))
            for volume in pod["spec"].get("volumes", ()):
                if volume["name"] == "config":
                    config_hash = volume["configMap"]["name"].rpartition("-")[2]
                    self._hashes[config_hash] = "CONFIG"
        self._places = {ordinal: place for place, ordinal in enumerate(sorted(ordinals))}

    def ordinal(self, number: str | int) -> str:
        return str(self._places.get(int(number), f"gone-{number}"))

    def word(self, word: str) -> str:
        for spec_hash, alias in self._hashes.items():
            word = word.replace(spec_hash, alias)
        return re.sub(r"\bllama-(\d+)", lambda match: f"llama-{self.ordinal(match[1])}", word)

    def same(self, value: Any) -> Any:
        """Drop from a document what may differ."""
        match value:
            case {"key": key, "values": [number]} if key == ORDINAL:  # of a label selector
                return {**value, "values": [self.ordinal(number)]}
            case dict():
                return {
                    self.word(key): self.ordinal(part) if key in NUMBERED else self.same(part)
                    for key, part in value.items()
                    if key not in DIFFER
                }
            case list():
                return [self.same(part) for part in value]
            case str():
                return self.word(value)
        return value
