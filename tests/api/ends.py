"""What is left of a fleet's life, so that two can be compared: objects made, deleted, and left.

Two equal fleets do not share identities, times, addresses, the nodes that they happen to be on, and
key material. Which number a replica has is no matter either: it is the first that is free, and so
depends on whether an old one had gone by then; replicas are numbered by their order instead. The
hashes of their specs, which may hold the namespace, are numbered in the order in which pods name
them. All else must be the same.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from tests.api.proxy import Done

KINDS = (
    ("pods", "api/v1"), ("services", "api/v1"), ("configmaps", "api/v1"), ("secrets", "api/v1"),
    ("poddisruptionbudgets", "apis/policy/v1"), ("networkpolicies", "apis/networking.k8s.io/v1"),
)  # fmt: skip
POLICIES = "networkpolicies"
OBJECT = re.compile(r"/(?:api/v1|apis/[^/]+/[^/]+)/namespaces/[^/]+/([a-z]+)(?:/([^/]+))?")
DIFFER = {
    "uid", "resourceVersion", "creationTimestamp", "managedFields", "lastTransitionTime", "podIP",
    "podIPs", "hostIP", "hostIPs", "startTime", "nodeName", "affinity", "failedAt", "since",
    "medha.dev/node", "medha.dev/content-hash",
}  # fmt: skip
NUMBERED = ("medha.dev/ordinal", "replica")

Objects = dict[str, list[dict[str, Any]]]


def made(done: Iterable[Done]) -> dict[str, int]:
    """How often an object of each kind, and a pod of each place, came to be; Events left out."""
    return _counted(each for each in done if each.status == 201)


def deleted(done: Iterable[Done]) -> dict[str, int]:
    """How often one was deleted: a pod that takes its time counts each time that it is told to."""
    return _counted(each for each in done if each.call.verb == "DELETE" and each.status == 200)


def _counted(done: Iterable[Done]) -> dict[str, int]:
    found: collections.Counter[str] = collections.Counter()
    for each in done:
        place = OBJECT.fullmatch(each.call.path)
        if place is None or place[1] == "events":
            continue
        kind, name = place[1], place[2] or _name(each.answer)
        found[f"{kind} {name.partition('-g')[2]}" if kind == "pods" else kind] += 1
    return dict(sorted(found.items()))


def _name(document: bytes) -> str:
    return str(msgspec.json.decode(document)["metadata"]["name"])


def plain(found: Objects, namespace: str) -> dict[str, Any]:
    """Objects by kind and name, as two equal fleets share them."""
    text = msgspec.json.encode(found).decode().replace(namespace, "NAMESPACE")
    objects: Objects = msgspec.json.decode(text)
    for secret in objects["secrets"]:
        secret["data"] = sorted(secret.get("data", ()))
    for resource in objects["medhareplicas"]:
        _quieten(resource.get("status", {}))
    pods = sorted(objects["pods"], key=lambda each: str(each["metadata"]["name"]))
    names = _Names(each["metadata"]["labels"] for each in pods)
    return {
        kind: {names.word(each["metadata"]["name"]): names.same(each) for each in items}
        for kind, items in objects.items()
    }


def _quieten(status: dict[str, Any]) -> None:
    """Messages, and what controllers and routers count, are told a few seconds late where nothing
    else is new, so that what they are depends on when one looks."""
    for each in status.get("conditions", ()):
        each.pop("message", None)
    status.pop("slo", None)
    for each in status.get("groups", ()):
        del each["wanted"], each["generation"]


class _Names:
    """What is said instead: the replicas' order, and that of their specs."""

    def __init__(self, labels: Iterable[dict[str, str]]) -> None:
        self._hashes: dict[str, str] = {}
        ordinals: set[int] = set()
        for each in labels:
            self._hashes.setdefault(each["medha.dev/spec-hash"], f"SPEC-{len(self._hashes)}")
            ordinals.add(int(each["medha.dev/ordinal"]))
        self._places = {each: place for place, each in enumerate(sorted(ordinals))}

    def ordinal(self, number: str | int) -> str:
        return str(self._places.get(int(number), f"gone-{number}"))

    def word(self, word: str) -> str:
        for each, said in self._hashes.items():
            word = word.replace(each, said)
        return re.sub(r"\bllama-(\d+)", lambda found: f"llama-{self.ordinal(found[1])}", word)

    def same(self, value: Any) -> Any:
        """A document, without what may differ."""
        match value:
            case dict():
                return {
                    self.word(key): self.ordinal(each) if key in NUMBERED else self.same(each)
                    for key, each in value.items()
                    if key not in DIFFER
                }
            case list():
                return [self.same(each) for each in value]
            case str():
                return self.word(value)
        return value
