"""What the operator knows of the cluster: listed, then watched, and never going back in time.

    Store      objects of one kind by key; versions decide, so that lists, watches and the answers
               to our own writes may come in any order and even twice
    Informer   feeds a Store: list, watch, list again when the watch is too old or when told to

A lost event is mended by the next list, an outage by trying on, with growing pauses and jitter.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import msgspec

from medha_operator.client import Client, ClusterError, Kind
from medha_operator.projections import Key, Seen, bare

T = TypeVar("T")
Raw = bytes | msgspec.Raw

log = logging.getLogger("medha.operator.informers")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
SHORT_WATCH_S = 1.0


class Store(Generic[T]):
    """The latest of each object; `changed(key, old, new)` hears of every difference.

    `at` is the version that the watch and the lists have come to: a watch goes on from there. Not
    everything up to it need have been told, as any event may be lost; so what is not held is known
    to be gone only where its deletion was told, or a list lacked it. Such deletions are remembered
    over two lists: longer than any news is late.
    """

    def __init__(self, changed: Callable[[Key, T | None, T | None], None]) -> None:
        self._changed = changed
        self._seen: dict[Key, Seen[T]] = {}
        self._gone: dict[Key, int] = {}
        self._listed = 0
        self.at = 0

    def __iter__(self) -> Iterator[Seen[T]]:
        return iter(self._seen.values())

    def __len__(self) -> int:
        return len(self._seen)

    def get(self, key: Key) -> Seen[T] | None:
        return self._seen.get(key)

    def learn(self, seen: Seen[T]) -> None:
        """An object as an event, or the answer to a write, shows it; older news is no news."""
        held = self._seen.get(seen.key)
        known = self._gone.get(seen.key, 0) if held is None else held.version
        if seen.version <= known:
            return
        self._seen[seen.key] = seen
        old = None if held is None else held.value
        if old != seen.value:
            self._changed(seen.key, old, seen.value)

    def forget(self, key: Key, version: int) -> None:
        """An object was deleted at `version`; a newer one of the same name stays."""
        held = self._seen.get(key)
        if held is None or held.version <= version:
            self._gone[key] = max(version, self._gone.get(key, 0))
            self._seen.pop(key, None)
            if held is not None:
                self._changed(key, held.value, None)

    def forget_uid(self, key: Key, uid: str) -> None:
        """That very object is gone, as the answer to our own call says."""
        held = self._seen.get(key)
        if held is not None and held.uid == uid:
            self.forget(key, held.version)

    def passed(self, version: int) -> None:
        """The watch has come to `version`."""
        self.at = max(self.at, version)

    def replace(self, listed: Iterable[Seen[T]], version: int) -> None:
        """Everything there was at `version`: what is held, older and not listed is gone. A list
        from before `at` brings nothing that was not known by then."""
        found = {seen.key: seen for seen in listed}
        for key in [key for key in self._seen if key not in found]:
            self.forget(key, version)
        for seen in found.values():
            if version >= self.at or seen.version > self.at or seen.key in self._seen:
                self.learn(seen)
        self._gone = {key: at for key, at in self._gone.items() if at > self._listed}
        self._listed = max(self._listed, version)
        self.passed(version)


class Informer(Generic[T]):
    """Keeps a Store equal to one kind of one namespace ("" for all of the cluster)."""

    def __init__(
        self,
        client: Client,
        kind: Kind,
        namespace: str,
        store: Store[T],
        project: Callable[[Raw], Seen[T]],
        *,
        labels: str = "",
        partial: bool = False,
    ) -> None:
        self._client, self._kind, self._namespace = client, kind, namespace
        self._store, self._project = store, project
        self._labels, self._partial = labels, partial
        self.name = f"{kind.plural} of {namespace}" if namespace else kind.plural
        self.heard_s = 0.0
        """When the API server last told us something true (monotonic clock)."""
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
                        await asyncio.sleep(SHORT_WATCH_S)  # the server ends it as it begins
            except ClusterError as error:
                if error.status != 410:
                    log.warning("%s: %s", self.name, error)
            except Exception:
                log.exception("%s: unexpected; listing again", self.name)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    async def list(self) -> None:
        """Learn everything anew; raises ClusterError and leaves the Store as it was."""
        found: list[Seen[T]] = []
        version = 0
        async for page in self._client.pages(
            self._kind, self._namespace, labels=self._labels, partial=self._partial
        ):
            version = int(page.metadata.resource_version)
            found += [seen for raw in page.items or () if (seen := self._projected(raw))]
        self._store.replace(found, version)
        self.heard_s = time.monotonic()
        self.listed.set()

    async def _watch(self) -> None:
        since = str(self._store.at)
        async for changes in self._client.watch(
            self._kind, self._namespace, since=since, labels=self._labels, partial=self._partial
        ):
            self.heard_s = time.monotonic()
            for change in changes:
                if change.type == "BOOKMARK":
                    self._store.passed(int(bare(change.object).resource_version))
                elif (seen := self._projected(change.object)) is not None:
                    if change.type == "DELETED":
                        self._store.forget(seen.key, seen.version)
                    else:
                        self._store.learn(seen)
                    self._store.passed(seen.version)

    def _projected(self, raw: msgspec.Raw) -> Seen[T] | None:
        try:
            return self._project(raw)
        except (ValueError, msgspec.MsgspecError) as error:
            meta = bare(raw)
            log.warning("%s %s is not as we write it: %s", self._kind.kind, meta.key, error)
            return None
