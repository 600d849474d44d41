"""Kubernetes Events on a MedhaReplica: the story of a fleet, each sentence told once.

The name of an Event follows from what it says of which object, so that an operator that was started
anew does not tell the same twice: the API server knows the name, and the repetition is counted.
"""

from __future__ import annotations

import datetime
import hashlib
import time
from collections import OrderedDict

import msgspec

from medha_operator.actions import Tell
from medha_operator.client import EVENTS, REPLICAS, Client, ClusterError
from medha_operator.names import FIELD_MANAGER, OWNED_BY
from medha_operator.projections import Meta

SILENT_S = 600.0
"""A sentence that is told again and again is written again only after a pause of so long."""
_REMEMBERED = 4096


class Events:
    """Tells, through the API, what happened to which resource."""

    def __init__(self, client: Client, identity: str) -> None:
        self._client, self._identity = client, identity
        self._told: OrderedDict[str, float] = OrderedDict()

    async def tell(self, about: Meta, what: Tell, timeout_s: float) -> None:
        """Write the Event, unless the same was told a short while ago."""
        said = f"{about.uid}|{what.reason}|{what.message}"
        name = f"{about.name[:40]}.{hashlib.sha256(said.encode()).hexdigest()[:16]}"
        now_s = time.monotonic()
        before = self._told.get(name)
        self._told[name] = now_s
        self._told.move_to_end(name)
        if len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)
        if before is not None and now_s - before < SILENT_S:
            return
        try:
            await self._write(name, about, what, timeout_s)
        except ClusterError:
            del self._told[name]
            raise

    async def _write(self, name: str, about: Meta, what: Tell, timeout_s: float) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
        now = now.replace("+00:00", "Z")
        event = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": name, "namespace": about.namespace, "labels": OWNED_BY},
            "eventTime": now,
            "reportingController": f"medha.dev/{FIELD_MANAGER}",
            "reportingInstance": self._identity,
            "action": "Reconcile",
            "type": "Warning" if what.warning else "Normal",
            "reason": what.reason,
            "note": what.message[:1000],
            "regarding": {
                "apiVersion": REPLICAS.api_version,
                "kind": REPLICAS.kind,
                "name": about.name,
                "namespace": about.namespace,
                "uid": about.uid,
            },
        }
        body = msgspec.json.encode(event)
        try:
            await self._client.create(EVENTS, about.namespace, body, timeout_s)
        except ClusterError as error:
            if error.status != 409:
                raise
            series = {"series": {"count": 2, "lastObservedTime": now}}
            body = msgspec.json.encode(series)
            await self._client.merge(EVENTS, about.namespace, name, body, timeout_s)
