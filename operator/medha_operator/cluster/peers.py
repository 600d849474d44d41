"""Releases of the operator in other namespaces: the oldest live one serves, the others stand back.

Copies of one release share the Lease in their namespace; two releases have two. Every copy lists
all of these Leases. A namespace is served by the release whose Lease was created first, of those
that live and name that namespace. Clocks of different machines are never compared:

    live      the Lease has changed within GONE_S, or vanished within RETURNS_S, as seen here
    junior    stops at its next look, LOOK_S later, or STALE_S after its last one
    senior    that starts, or returns, waits RETURNS_S until live juniors have stopped
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

import msgspec

from medha_operator.cluster.cluster_state import ALL
from medha_operator.kube.client import LEASES, ClusterError, KubeClient
from medha_operator.kube.lease import ALL_NAMESPACES, NAME, NAMESPACES
from medha_operator.resources.objects import metadata_of

log = logging.getLogger("medha.operator.peers")

LOOK_S, STALE_S, RETURNS_S, GONE_S = 4.0, 10.0, 20.0, 60.0


class Release(msgspec.Struct, frozen=True):
    """The Lease of a release, as listed: its age ranks the release, its version shows life."""

    namespace: str
    created: str
    version: int
    serves: str = ALL_NAMESPACES
    """Namespaces separated by commas."""

    @property
    def rank(self) -> tuple[str, str]:
        """Order of the releases; the first one serves."""
        return self.created, self.namespace

    def covers(self, namespace: str) -> bool:
        return self.serves == ALL_NAMESPACES or namespace in self.serves.split(",")


class Seniority:
    """Decides which namespaces this release may serve; times are of a monotonic clock."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._changed_s: dict[str, tuple[Release, float]] = {}
        self._seen_s: dict[str, float] = {}
        self._looked_s = self._leads_since_s = float("-inf")
        self.blind = False
        """The Leases may not be listed: the release acts as if it were alone."""

    def look(self, releases: Iterable[Release], now_s: float) -> None:
        """Take in a list of all Leases."""
        for release in releases:
            known = self._changed_s.get(release.namespace)
            if known is None or known[0].version != release.version:
                self._changed_s[release.namespace] = release, now_s
            self._seen_s[release.namespace] = now_s
        self._looked_s = now_s

    def start(self, now_s: float) -> None:
        """Start to lead within the own release."""
        self._leads_since_s = now_s

    def serves(self, namespace: str, now_s: float) -> bool:
        """Return whether this release may write in a namespace now."""
        if self.blind:
            return True
        if now_s - self._looked_s > STALE_S or self.seniors(namespace, now_s):
            return False
        alone = not any(release.covers(namespace) for release in self.others(now_s))
        return alone or now_s - self._leads_since_s >= RETURNS_S

    def seniors(self, namespace: str, now_s: float) -> list[Release]:
        """Return the live releases that are older than this one and serve a namespace ("": all)."""
        return [release for release in self.older(now_s) if release.covers(namespace)]

    def older(self, now_s: float) -> list[Release]:
        """Return the live releases that are older than this one; all, if its Lease is missing."""
        own = self._changed_s.get(self._namespace)
        if own is None:
            return self.others(now_s)
        return [release for release in self.others(now_s) if release.rank < own[0].rank]

    def others(self, now_s: float) -> list[Release]:
        """Return the live releases besides this one."""
        return [
            release
            for release, changed_s in self._changed_s.values()
            if release.namespace != self._namespace
            and now_s - changed_s <= GONE_S
            and now_s - self._seen_s[release.namespace] <= RETURNS_S
        ]


class Peers:
    """Looks at the Leases of all releases; calls `changed` when the served namespaces differ.

    `scopes` are the namespaces that the settings ask for; "" stands for all.
    """

    def __init__(
        self,
        client: KubeClient,
        seniority: Seniority,
        scopes: Iterable[str],
        changed: Callable[[], None],
    ) -> None:
        self._client, self._seniority = client, seniority
        self._scopes, self._changed = tuple(scopes), changed
        self._before: object = None
        self._looked_s = float("-inf")
        self._reported: set[str] = set()
        self.idle = False
        """Older releases serve every namespace that this one is asked to serve."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            looked = await self.look()
            await asyncio.sleep(LOOK_S if looked else LOOK_S / 4)

    async def look(self) -> bool:
        """List the Leases once. False if they could not be listed: the last list stands."""
        releases = []
        try:
            async for page in self._client.pages(LEASES, fields=f"metadata.name={NAME}"):
                releases += [_release(raw) for raw in page.items or ()]
        except ClusterError as error:
            if error.status != 403:
                log.warning("leases of other releases: %s", error)
                return False
            if not self._seniority.blind:
                log.error("other releases of the operator cannot be seen: %s", error)
            self._seniority.blind = True
        else:
            self._seniority.look(releases, time.monotonic())
            self._seniority.blind = False
        now_s = time.monotonic()
        paused, self._looked_s = now_s - self._looked_s > STALE_S, now_s
        if self._compare(now_s) or paused:
            self._changed()
        return True

    def _compare(self, now_s: float) -> bool:
        """Report older releases. True if what this one serves has changed."""
        others = self._seniority.others(now_s)
        served = tuple(self._seniority.serves(scope, now_s) for scope in self._scopes)
        self.idle = all(self._seniority.seniors(scope, now_s) for scope in self._scopes)
        for release in self._seniority.older(now_s):
            overlap = ALL in self._scopes or any(map(release.covers, self._scopes))
            if overlap and release.namespace not in self._reported:
                self._reported.add(release.namespace)
                log.error(
                    "an older release of the operator, in namespace %s, serves %s: this one does "
                    "nothing there; uninstall one of them, or limit the namespaces that they serve",
                    release.namespace,
                    release.serves,
                )
        self._reported &= {release.namespace for release in others}
        now = (served, {(release.namespace, release.serves) for release in others})
        before, self._before = self._before, now
        return now != before


def _release(raw: msgspec.Raw) -> Release:
    meta = metadata_of(raw)
    serves = (meta.annotations or {}).get(NAMESPACES, ALL_NAMESPACES)
    created = meta.creation_timestamp or ""
    return Release(meta.namespace, created, int(meta.resource_version), serves)
