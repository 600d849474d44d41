"""Informer and Store: objects are listed, then watched, and a Store never goes back in time.

    Store      objects of one kind by key; versions decide, so that lists, watches and the answers
               to our own writes may arrive in any order and even twice
    Informer   feeds a Store: list, watch, list again if the watch is too old or on demand

The next list repairs a lost event; after an outage the Informer retries with growing pauses and
jitter.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import msgspec

from medha_operator.kube.client import ClusterError, Kind, KubeClient
from medha_operator.resources.objects import Key, Versioned, metadata_of

T = TypeVar("T")
Raw = bytes | msgspec.Raw

log = logging.getLogger("medha.operator.informers")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
SHORT_WATCH_S = 1.0


class Store(Generic[T]):
    """The latest version of each object; calls `changed(key, old, new)` on every difference.

    `at` is the version that the watch and the lists have reached: a watch continues from there.
    Events up to it may have been lost, so an object that is missing here is known to be deleted
    only if its deletion was received or a list lacked it. Such deletions are kept over two lists,
    longer than any message is delayed.
    """

    def __init__(self, changed: Callable[[Key, T | None, T | None], None]) -> None:
        self._changed = changed
        self._seen: dict[Key, Versioned[T]] = {}
        self._gone: dict[Key, int] = {}
        self._listed = 0
        self.at = 0

    def __iter__(self) -> Iterator[Versioned[T]]:
        return iter(self._seen.values())

    def __len__(self) -> int:
        return len(self._seen)

    def get(self, key: Key) -> Versioned[T] | None:
        return self._seen.get(key)

    def learn(self, seen: Versioned[T]) -> None:
        """Store an object from an event or from the answer to a write, unless it is outdated."""
        held = self._seen.get(seen.key)
        known = self._gone.get(seen.key, 0) if held is None else held.version
        if seen.version <= known:
            return
        self._seen[seen.key] = seen
        old = None if held is None else held.value
        if old != seen.value:
            self._changed(seen.key, old, seen.value)

    def forget(self, key: Key, version: int) -> None:
        """Drop an object that was deleted at `version`; a newer one of the same name stays."""
        held = self._seen.get(key)
        if held is None or held.version <= version:
            self._gone[key] = max(version, self._gone.get(key, 0))
            self._seen.pop(key, None)
            if held is not None:
                self._changed(key, held.value, None)

    def forget_uid(self, key: Key, uid: str) -> None:
        """Drop the object of this UID, as our own delete was answered."""
        held = self._seen.get(key)
        if held is not None and held.uid == uid:
            self.forget(key, held.version)

    def passed(self, version: int) -> None:
        """Record that the watch has reached `version`."""
        self.at = max(self.at, version)

    def replace(self, listed: Iterable[Versioned[T]], version: int) -> None:
        """Store a full list at `version`; older objects that it lacks are dropped. A list from
        before `at` adds no object that was unknown by then."""
        present = {seen.key: seen for seen in listed}
        for key in [key for key in self._seen if key not in present]:
            self.forget(key, version)
        for seen in present.values():
            if version >= self.at or seen.version > self.at or seen.key in self._seen:
                self.learn(seen)
        self._gone = {key: at for key, at in self._gone.items() if at > self._listed}
        self._listed = max(self._listed, version)
        self.passed(version)


class Informer(Generic[T]):
    """Keeps a Store equal to one kind of one namespace ("" for all of the cluster)."""

    def __init__(
        self,
        client: KubeClient,
        kind: Kind,
        namespace: str,
        store: Store[T],
        project: Callable[[Raw], Versioned[T]],
        *,
        labels: str = "",
        partial: bool = False,
    ) -> None:
        self._client, self._kind, self._namespace = client, kind, namespace
        self._store, self._project = store, project
        self._labels, self._partial = labels, partial
        self.name = f"{kind.plural} of {namespace}" if namespace else kind.plural
        self.received_s = 0.0
        """When the API server last sent anything about the kind (monotonic clock)."""
        self.listed = asyncio.Event()

    async def run(self) -> None:
        """List and watch until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self.list()
                pause_s = FIRST_PAUSE_S
                while True:
                    began_s = time.monotonic()
                    await self._watch()
                    if time.monotonic() - began_s < SHORT_WATCH_S:
                        await asyncio.sleep(SHORT_WATCH_S)  # the server ends it at once
            except ClusterError as error:
                if error.status != 410:
                    log.warning("%s: %s", self.name, error)
            except Exception:
                log.exception("%s: unexpected error; listing again", self.name)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    async def list(self) -> None:
        """List everything once more. Raises ClusterError and leaves the Store unchanged."""
        listed: list[Versioned[T]] = []
        version = 0
        async for page in self._client.pages(
            self._kind, self._namespace, labels=self._labels, partial=self._partial
        ):
            version = int(page.metadata.resource_version)
            listed += [seen for raw in page.items or () if (seen := self._projected(raw))]
        self._store.replace(listed, version)
        self.received_s = time.monotonic()
        self.listed.set()

    async def _watch(self) -> None:
        since = str(self._store.at)
        async for changes in self._client.watch(
            self._kind, self._namespace, since=since, labels=self._labels, partial=self._partial
        ):
            self.received_s = time.monotonic()
            for change in changes:
                if change.type == "BOOKMARK":
                    self._store.passed(int(metadata_of(change.object).resource_version))
                elif (seen := self._projected(change.object)) is not None:
                    if change.type == "DELETED":
                        self._store.forget(seen.key, seen.version)
                    else:
                        self._store.learn(seen)
                    self._store.passed(seen.version)

    def _projected(self, raw: msgspec.Raw) -> Versioned[T] | None:
        try:
            return self._project(raw)
        except (ValueError, msgspec.MsgspecError) as error:
            meta = metadata_of(raw)
            log.warning("%s %s is ignored: %s", self._kind.kind, meta.key, error)
            return None
