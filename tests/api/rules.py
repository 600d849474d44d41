"""Rules for every call of an operator to the API server, in every test.

`broken` checks a proxy's calls and returns a sentence for each that breaks a rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from tests.api.proxy import Call, Done

COLLECTION = re.compile(r"/(?:api/v1|apis/[^/]+/[^/]+)(?:/namespaces/[^/]+)?/([a-z]+)")
LABEL = ("app.kubernetes.io/managed-by", "medha-operator")


def broken(calls: Iterable[Call], done: Iterable[Done]) -> list[str]:
    """List the calls that break a rule, and the statuses that are out of step."""
    faults = [f"{call.verb} {call.path}: {why}" for call in calls for why in _wrong(call)]
    return faults + list(_out_of_step(done))


def behind(resources: Iterable[dict[str, Any]]) -> list[str]:
    """List the resources at rest whose status is not of their latest generation."""
    return [
        f"{meta['name']}: generation {observed} is told of {meta['generation']}"
        for resource in resources
        if "deletionTimestamp" not in (meta := resource["metadata"])
        and (observed := resource.get("status", {}).get("observedGeneration", 0))
        != meta["generation"]
    ]


def _wrong(call: Call) -> Iterator[str]:
    body = _document(call)
    meta = body.get("metadata") or {}
    listed = COLLECTION.fullmatch(call.path)
    match call.verb:
        case "DELETE":
            if not (body.get("preconditions") or {}).get("uid"):
                yield "a deletion without a UID"
        case "PUT":
            if not meta.get("resourceVersion"):
                yield "an update without a resourceVersion"
        case "PATCH":
            if not (meta.get("resourceVersion") or call.query.get("fieldManager")):
                yield "an update without a resourceVersion or a field manager"
        case "GET" if listed:
            if listed.group(1) == "secrets":
                yield "Secrets are listed or watched"
            elif not call.watches and "limit" not in call.query:
                yield "a LIST without a limit"
    makes = call.verb == "POST"
    applies = call.verb == "PATCH" and "kind" in body and call.query.get("force") == "true"
    if makes or applies:
        labels = meta.get("labels") or {}
        if not meta.get("ownerReferences") and labels.get(LABEL[0]) != LABEL[1]:
            yield "an object without an owner or our label"


def _document(call: Call) -> dict[str, Any]:
    if not call.writes or not call.body:
        return {}
    document: dict[str, Any] = msgspec.json.decode(call.body)
    return document


def _out_of_step(done: Iterable[Done]) -> Iterator[str]:
    """A status must name an existing generation, and never an earlier one than before."""
    last: dict[str, int] = {}
    for reply in done:
        if (
            reply.placed
            or reply.call.verb != "PUT"
            or not reply.call.path.endswith("/status")
            or reply.status != 200
        ):
            continue
        document = msgspec.json.decode(reply.answer)
        meta, status = document["metadata"], document.get("status") or {}
        observed = status.get("observedGeneration", 0)
        every = [
            observed,
            *(condition.get("observedGeneration", 0) for condition in status.get("conditions", ())),
        ]
        if max(every) > meta["generation"]:
            yield f"{reply.call.path}: generation {max(every)} of {meta['generation']} is told"
        if observed < last.get(meta["uid"], 0):
            yield f"{reply.call.path}: generation {observed} after {last[meta['uid']]}"
        last[meta["uid"]] = observed
