"""Leader election: of several operators one writes, and another takes over within `lease_s`.

A Lease object names the leader, which renews it. An operator that sees no renewal for longer than
the Lease lasts takes it; clocks of different machines are never compared. Times below are parts of
`lease_s`, so that its whole suffices for a takeover:

    0 ──────────── 0.5 ──────────────── 0.8 ──── + 0.1
    renewed        a leader that        the others may take it; they look every 0.1
                   could not renew
                   stops writing
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from medha.errors import MedhaError
from medha_operator.kube.client import LEASES, ClusterError, KubeClient, decoded
from medha_operator.resources.labels import OWNED_BY

log = logging.getLogger("medha.operator.lease")

NAME = "medha-operator"
NAMESPACES, ALL_NAMESPACES = "medha.dev/namespaces", "*"
"""Annotation of the Lease: the namespaces that its holder serves, separated by commas."""
LASTS, WRITES, RENEWS, LOOKS = 0.8, 0.5, 0.2, 0.1


class NotLeading(MedhaError):
    """Another operator may be writing by now, so this one must not."""


class _Spec(msgspec.Struct, rename="camel", omit_defaults=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int = 0


class _Meta(msgspec.Struct, rename="camel", omit_defaults=True):
    name: str
    namespace: str
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[dict[str, Any]] = []


class _Lease(msgspec.Struct, rename="camel"):
    metadata: _Meta
    spec: _Spec
    api_version: str = LEASES.api_version
    kind: str = LEASES.kind


class Lease:
    """Competes for the Lease; calls `gained` each time this process starts to lead.

    The Lease names the namespaces that its holder `serves` (none: all), for other releases.
    """

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        identity: str,
        lease_s: float,
        gained: Callable[[], None] = lambda: None,
        serves: Iterable[str] = (),
    ) -> None:
        self._client, self._namespace, self._identity = client, namespace, identity
        self._serves = ",".join(serves) or ALL_NAMESPACES
        self._lease_s, self._gained = lease_s, gained
        self._held: _Lease | None = None
        self._until = 0.0
        self._other: tuple[_Lease, float] | None = None
        self.answered_s = time.monotonic()
        """When the API server last answered (monotonic clock)."""

    def left_s(self) -> float:
        """Seconds for which this process may still write; raises NotLeading if there are none."""
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise NotLeading("this operator does not hold the Lease, so it writes nothing")
        return left_s

    @property
    def leading(self) -> bool:
        return self._until > time.monotonic()

    async def run(self) -> None:
        """Lead or stand by until cancelled."""
        while True:
            led = self.leading
            try:
                await self._step()
                self.answered_s = time.monotonic()
            except ClusterError as error:
                if error.status == 409:
                    self._held = None  # another operator wrote it: read it at once
                    await asyncio.sleep(0.01)
                    continue
                log.warning("lease: %s", error)
            if self.leading and not led:
                log.info("leading", extra={"fields": {"identity": self._identity}})
                self._gained()
            elif led and not self.leading:
                log.warning("no longer leading")
            await asyncio.sleep(self._lease_s * (RENEWS if self._held else LOOKS))

    async def release(self) -> None:
        """Give up the Lease, so that another operator leads at once."""
        self._until = 0.0
        if self._held is not None:
            spec = msgspec.structs.replace(self._held.spec, holder_identity="")
            held, self._held = self._held, None
            await self._put(msgspec.structs.replace(held, spec=spec))

    async def _step(self) -> None:
        if self._held is None:
            lease = await self._read()
            if lease is None or not self._may_take(lease):
                return
            self._held = lease
        mine = self._held.spec.holder_identity == self._identity
        now, sent_s = _now(), time.monotonic()
        spec = _Spec(
            holder_identity=self._identity,
            lease_duration_seconds=max(1, round(LASTS * self._lease_s)),
            acquire_time=self._held.spec.acquire_time if mine else now,
            renew_time=now,
            lease_transitions=self._held.spec.lease_transitions + (not mine),
        )
        notes = self._held.metadata.annotations | {NAMESPACES: self._serves}
        meta = msgspec.structs.replace(self._held.metadata, annotations=notes)
        wanted = msgspec.structs.replace(self._held, spec=spec, metadata=meta)
        self._held = None if not mine else self._held
        self._held = await self._put(wanted)
        self._until = sent_s + WRITES * self._lease_s

    async def _read(self) -> _Lease | None:
        """Read the Lease; create it, without a holder, if there is none."""
        try:
            body = await self._client.get(LEASES, self._namespace, NAME)
        except ClusterError as error:
            if error.status != 404:
                raise
            meta = _Meta(name=NAME, namespace=self._namespace, labels=OWNED_BY)
            fresh = _Lease(metadata=meta, spec=_Spec())
            body = await self._client.create(LEASES, self._namespace, msgspec.json.encode(fresh))
        return decoded(_LEASE, body)

    def _may_take(self, lease: _Lease) -> bool:
        """True if the Lease is ours, free, or unchanged for as long as it lasts."""
        if lease.spec.holder_identity in (self._identity, "", None):
            return True
        now_s = time.monotonic()
        if self._other is None or self._other[0] != lease:
            self._other = (lease, now_s)
        lasts_s = lease.spec.lease_duration_seconds or LASTS * self._lease_s
        return now_s - self._other[1] >= lasts_s

    async def _put(self, wanted: _Lease) -> _Lease:
        left_s = max(0.5, self._until - time.monotonic())
        body = await self._client.replace(
            LEASES, self._namespace, NAME, msgspec.json.encode(wanted), timeout_s=left_s
        )
        return decoded(_LEASE, body)


_LEASE = msgspec.json.Decoder(_Lease)


def _now() -> str:
    return (
        datetime.datetime.now(datetime.UTC)
        .isoformat(timespec="microseconds")
        .replace("+00:00", "Z")
    )
