"""CURVE keys as Secrets: made once, read by name, never listed.

    medha-keys          in our own namespace: every pair of the fleet; the routers mount it
    medha-worker-keys   in each namespace with MedhaReplicas: the keys of controllers and ranks

All MedhaReplicas of a namespace own its medha-worker-keys together, so it goes with the last one.
Keys in `medha-keys` are used as they are, several lines included (that is how keys are rotated); a
pair that is missing altogether is added. Pods that outlived a former release keep the keys with
which they started, so its controllers' and ranks' pairs are taken over.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from medha.errors import MedhaError, SetupError
from medha_operator.kube.client import (
    REPLICAS,
    SECRETS,
    ClusterError,
    Kind,
    KubeClient,
    NameTaken,
    decoded,
)
from medha_operator.resources.labels import OWNED_BY, WORKER_KEYS
from medha_operator.resources.objects import Meta

log = logging.getLogger("medha.operator.keys")

FLEET_KEYS = "medha-keys"
PAIRS = ("router", "controller", "rank")
FOR_WORKERS = (
    "controller.secret",
    "controller.public",
    "rank.secret",
    "rank.public",
    "router.public",
)

Pair = tuple[bytes, bytes]


class _Secret(msgspec.Struct):
    metadata: Meta
    data: dict[str, str] | None = None


_SECRET = msgspec.json.Decoder(_Secret)


class KeySecrets:
    """Creates and updates the Secrets that pods mount. `make_pair`: (public, secret) in Z85;
    `served`: the namespaces with MedhaReplicas."""

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        fresh_s: float,
        make_pair: Callable[[], Pair],
        served: Callable[[], Iterable[str]],
    ) -> None:
        self._client, self._namespace = client, namespace
        self._fresh_s, self._make_pair, self._served = fresh_s, make_pair, served
        self._known: dict[str, tuple[float, frozenset[str]]] = {}
        self._lock = asyncio.Lock()

    async def ensure(
        self, owner: Meta, others: Callable[[], Iterable[Meta]], timeout_s: float
    ) -> None:
        """Give the namespace of `owner` its keys; `others` lists all of its MedhaReplicas, which
        may come and go while this waits."""
        if self._fresh(owner):
            return
        async with self._lock:
            if not self._fresh(owner):
                owners = {meta.uid: meta for meta in (owner, *others())}
                wanted = await self._fleet(timeout_s)
                data = {name: wanted[name] for name in FOR_WORKERS}
                await self._workers(owner.namespace, data, owners, timeout_s)
                self._known[owner.namespace] = (time.monotonic(), frozenset(owners))

    async def prepare(self, left_s: Callable[[], float]) -> None:
        """Make the fleet's keys before there is a MedhaReplica: routers wait for them."""
        try:
            async with self._lock:
                await self._fleet(left_s())
        except MedhaError as error:
            log.warning("keys: %s", error)

    def forget(self, namespace: str) -> None:
        """Check a namespace again: its Secret may go with a MedhaReplica that left."""
        self._known.pop(namespace, None)

    def _fresh(self, owner: Meta) -> bool:
        checked_s, owners = self._known.get(owner.namespace, (-self._fresh_s, frozenset()))
        return owner.uid in owners and time.monotonic() - checked_s < self._fresh_s

    async def _fleet(self, timeout_s: float) -> dict[str, str]:
        """Return every key of the fleet, in base64 as the API has it."""
        current = await self._get(self._namespace, FLEET_KEYS)
        data = dict((current.data or {}) if current else {})
        absent = []
        for pair in PAIRS:
            public, secret = f"{pair}.public", f"{pair}.secret"
            if public not in data and secret not in data:
                absent.append((public, secret))
            elif public not in data or secret not in data:
                raise SetupError(
                    f"Secret {FLEET_KEYS} of namespace {self._namespace} has only one of {public} "
                    f"and {secret}: add the other, or remove it to have both made"
                )
        former = await self._former() if absent else {}
        missing: dict[str, str] = {}
        for public, secret in absent:
            if public in former and secret in former:
                missing |= {public: former[public], secret: former[secret]}
            else:
                keys = self._make_pair()
                missing[public], missing[secret] = (_base64(key + b"\n") for key in keys)
        if current is None:
            await self._create(self._namespace, FLEET_KEYS, missing, {}, timeout_s)
        elif missing:
            await self._merge(self._namespace, FLEET_KEYS, {"data": missing}, timeout_s)
        return data | missing

    async def _former(self) -> dict[str, str]:
        """Return the keys that a former release gave to pods; empty if namespaces differ in them,
        as tenants may change those of their own."""
        keys: list[dict[str, str]] = []
        for namespace in sorted(set(self._served())):
            current = await self._get(namespace, WORKER_KEYS)
            if current is not None and _is_ours(current):
                keys.append(current.data or {})
        return keys[0] if keys and all(other == keys[0] for other in keys) else {}

    async def _workers(
        self, namespace: str, data: dict[str, str], owners: dict[str, Meta], timeout_s: float
    ) -> None:
        current = await self._get(namespace, WORKER_KEYS)
        references = {
            "ownerReferences": [
                _reference(self._client.replicas, owner) for owner in owners.values()
            ]
        }
        if current is None:
            await self._create(namespace, WORKER_KEYS, data, references, timeout_s)
            return
        if not _is_ours(current):
            raise NameTaken(SECRETS.kind, WORKER_KEYS, current.metadata.owner_text)
        named = {owner.uid for owner in current.metadata.owner_references or ()}
        change: dict[str, Any] = {} if owners.keys() <= named else {"metadata": references}
        if any((current.data or {}).get(name) != value for name, value in data.items()):
            change["data"] = data
        if change:
            await self._merge(namespace, WORKER_KEYS, change, timeout_s)

    async def _get(self, namespace: str, name: str) -> _Secret | None:
        try:
            return decoded(_SECRET, await self._client.get(SECRETS, namespace, name))
        except ClusterError as error:
            if error.status != 404:
                raise
            return None

    async def _create(
        self,
        namespace: str,
        name: str,
        data: dict[str, str],
        meta: dict[str, Any],
        timeout_s: float,
    ) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": namespace, "labels": OWNED_BY, **meta},
            "type": "Opaque",
            "data": data,
        }
        await self._client.create(SECRETS, namespace, msgspec.json.encode(body), timeout_s)
        log.info("keys made", extra={"fields": {"namespace": namespace, "secret": name}})

    async def _merge(
        self, namespace: str, name: str, change: dict[str, Any], timeout_s: float
    ) -> None:
        body = msgspec.json.encode(change)
        await self._client.merge(SECRETS, namespace, name, body, timeout_s)


def _is_ours(secret: _Secret) -> bool:
    owners = secret.metadata.owner_references or ()
    return any(owner.kind == REPLICAS.kind for owner in owners)


def _reference(kind: Kind, owner: Meta) -> dict[str, object]:
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "name": owner.name,
        "uid": owner.uid,
    }


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()
