"""What holds of everything that an operator says to the API server, whatever a test is about.

`broken` looks at a proxy's calls and gives a sentence for each that should not have been made.
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
    """Calls against the rules, and statuses that are out of step."""
    found = [f"{call.verb} {call.path}: {why}" for call in calls for why in _wrong(call)]
    return found + list(_out_of_step(done))


def behind(resources: Iterable[dict[str, Any]]) -> list[str]:
    """Resources at rest whose status is not of what they ask for now."""
    return [
        f"{meta['name']}: generation {told} is told of {meta['generation']}"
        for each in resources
        if "deletionTimestamp" not in (meta := each["metadata"])
        and (told := each.get("status", {}).get("observedGeneration", 0)) != meta["generation"]
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
    found: dict[str, Any] = msgspec.json.decode(call.body)
    return found


def _out_of_step(done: Iterable[Done]) -> Iterator[str]:
    """A status speaks of a generation that is there, and never of an earlier one than before."""
    last: dict[str, int] = {}
    for each in done:
        if (
            each.placed
            or each.call.verb != "PUT"
            or not each.call.path.endswith("/status")
            or each.status != 200
        ):
            continue
        found = msgspec.json.decode(each.answer)
        meta, status = found["metadata"], found.get("status") or {}
        told = status.get("observedGeneration", 0)
        every = [told, *(one.get("observedGeneration", 0) for one in status.get("conditions", ()))]
        if max(every) > meta["generation"]:
            yield f"{each.call.path}: generation {max(every)} of {meta['generation']} is told"
        if told < last.get(meta["uid"], 0):
            yield f"{each.call.path}: generation {told} after {last[meta['uid']]}"
        last[meta["uid"]] = told
