"""Links to routers: Hello, heartbeats, load reports, prefix-cache events, tokenizer files.

The controller dials every router of its config and sends Hello, at most a second apart, until the
router answers Welcome. A router that is silent for too long, or whose Welcome names another
incarnation, is lost, and the caller aborts its requests. Load is reported when it changes, at most
every 20 ms, and at least each half second as a sign of life. Cache events are numbered per link
from 1 and start with a snapshot. Decides nothing about requests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from medha import PROTOCOL
from medha.config import STALL_S
from medha.messages import (
    FetchFile,
    FilePart,
    Hello,
    KvEvents,
    LoadReport,
    Rejected,
    TenantCounts,
    Welcome,
)
from medha_worker.controller.outbox import Outbox

HELLO_S = 0.5
MAX_HELLO_S = 1.0
REPORT_S = 0.02
BEAT_S = 0.5
REDIAL_S = 30.0
"""Patience with a router that answers no Hello."""
FILE_PART_BYTES = 1 << 20
NAMES_PER_EVENT = 1 << 10
"""Names that a router takes in within a few milliseconds."""

log = logging.getLogger("medha.controller")


class _RouterLink:
    """Router; `incarnation` is empty until it is welcome."""

    def __init__(self, router: str) -> None:
        self.router = router
        self.incarnation = ""
        self.last_seen_s = 0.0
        self.dialed_s: float | None = None
        self.hello_s: float | None = None
        self.wait_s = 0.0
        self.report_s = 0.0
        self.reported: LoadReport | None = None
        self.events = 0
        self.refused = ""

    @property
    def welcome(self) -> bool:
        return bool(self.incarnation)


class RouterLinks:
    """Every configured router, with or without a Welcome."""

    def __init__(self, routers: tuple[str, ...], outbox: Outbox, timeout_s: float) -> None:
        self._outbox, self._timeout_s = outbox, timeout_s
        self._links = {router: _RouterLink(router) for router in routers}
        self._hello: Hello | None = None
        self._files: dict[str, bytes] = {}
        self._holders: dict[bytes, int] = {}  # name of a cached page -> groups that hold it

    @property
    def welcome(self) -> tuple[str, ...]:
        """Routers that accepted this replica."""
        return tuple(router for router, link in self._links.items() if link.welcome)

    @property
    def refused(self) -> str:
        """Reason of a router that refuses this replica; empty if none does."""
        return next((link.refused for link in self._links.values() if link.refused), "")

    def set_endpoints(self, routers: tuple[str, ...]) -> tuple[str, ...]:
        """Replace the list of routers; returns those that disappeared."""
        gone = tuple(router for router in self._links if router not in routers)
        for router in gone:
            del self._links[router]
        for router in routers:
            self._links.setdefault(router, _RouterLink(router))
        return gone

    # --- introduction -------------------------------------------------------------------------

    def announce(self, hello: Hello, files: dict[str, bytes]) -> None:
        """Introduce this replica by `hello` from now on; `files`: content hash -> bytes."""
        self._hello, self._files = hello, files
        for link in self._links.values():
            link.hello_s = None

    def send_hellos(self, now: float) -> None:
        """Send Hello to routers without a Welcome, with a back-off of up to a second."""
        if self._hello is None:
            return
        for router, link in self._links.items():
            if link.welcome or (link.hello_s is not None and now - link.hello_s < link.wait_s):
                continue
            link.hello_s = now
            link.wait_s = min(max(HELLO_S, 1.5 * link.wait_s), MAX_HELLO_S)
            self._outbox.to_router(router, self._hello)

    def send_file_part(self, router: str, message: FetchFile) -> None:
        """Send the requested part of a file; an unknown hash gets an empty file."""
        data = self._files.get(message.hash, b"")
        part = data[message.offset : message.offset + FILE_PART_BYTES]
        self._outbox.to_router(router, FilePart(message.hash, message.offset, len(data), part))

    def welcomed(self, router: str, message: Welcome, now: float) -> bool:
        """Record a Welcome and send a snapshot of the cache; True if the router was restarted."""
        link = self._links[router]
        restarted = link.welcome and link.incarnation != message.router
        if not link.welcome or restarted:
            link.reported, link.wait_s = None, 0.0
        link.events = 0
        self._send_snapshot(link)
        link.incarnation, link.last_seen_s, link.refused = message.router, now, ""
        return restarted

    def rejected(self, router: str, message: Rejected) -> bool:
        """Record a refusal; True if the router had accepted this replica before.

        Such a router was restarted and only needs a Hello. A new reason is logged.
        """
        link = self._links[router]
        if link.welcome:
            link.incarnation, link.hello_s = "", None
            return True
        if not message.stranger and link.refused != message.reason:
            link.refused = message.reason
            log.error(
                "router %s refuses this replica (protocol %d): %s", router, PROTOCOL, message.reason
            )
        return False

    def pass_on(self, router: str, message: TenantCounts) -> None:
        """Send what one router counts to the others."""
        for other in self.welcome:
            if other != router and router in self.welcome:
                self._outbox.to_router(other, message)

    # --- signs of life ------------------------------------------------------------------------

    def accept(self, router: str, now: float) -> bool:
        """Note a sign of life; False if the router has not sent Welcome yet."""
        link = self._links[router]
        link.last_seen_s = now
        return link.welcome

    def excuse_pause(self, pause_s: float) -> None:
        """Do not count a time in which this process did not run as the routers' silence."""
        if STALL_S < pause_s < float("inf"):
            for link in self._links.values():
                link.last_seen_s += pause_s

    def drop_silent(self, now: float) -> list[str]:
        """Redial and return the routers that have been silent for too long."""
        silent = []
        for router, link in self._links.items():
            if link.welcome and now - link.last_seen_s > self._timeout_s:
                link.incarnation, link.hello_s, link.wait_s = "", None, 0.0
                self._outbox.redial(router)
                silent.append(router)
        return silent

    def redial_unanswered(self, now: float) -> None:
        """Redial routers that answer no Hello: a key that changed meanwhile is read again."""
        for router, link in self._links.items():
            if link.dialed_s is None:
                link.dialed_s = now
            if not link.welcome and now - max(link.dialed_s, link.last_seen_s) > REDIAL_S:
                link.dialed_s = now
                self._outbox.redial(router)

    # --- load and prefix cache ----------------------------------------------------------------

    def report_due(self, now: float) -> bool:
        """True if some router may get a load report now."""
        return any(
            link.welcome and now - link.report_s >= REPORT_S for link in self._links.values()
        )

    def send_report(self, report: LoadReport, now: float) -> None:
        """Send the load to routers for which it changed, or whose last report is too old."""
        for router, link in self._links.items():
            waited_s = now - link.report_s
            if not link.welcome or waited_s < REPORT_S:
                continue
            if waited_s >= BEAT_S or report != link.reported:
                link.report_s, link.reported = now, report
                self._outbox.to_router(router, report)

    def send_cache_events(
        self, stored: Sequence[tuple[int, bytes]], removed: Sequence[tuple[int, bytes]]
    ) -> None:
        """Send the names of pages that the first group stored or the last one removed."""
        appeared, vanished = [], []
        for _, name in stored:
            self._holders[name] = self._holders.get(name, 0) + 1
            if self._holders[name] == 1:
                appeared.append(name)
        for _, name in removed:
            count = self._holders.get(name, 0) - 1
            if count > 0:
                self._holders[name] = count
            elif self._holders.pop(name, None) is not None:
                vanished.append(name)
        for link in self._links.values():
            if link.welcome:
                self._send_events(link, appeared, vanished)

    def _send_snapshot(self, link: _RouterLink) -> None:
        self._send_events(link, list(self._holders), (), snapshot=True)

    def _send_events(
        self,
        link: _RouterLink,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
        snapshot: bool = False,
    ) -> None:
        """Send names in parts; a snapshot has one at least."""
        most = max(len(stored), len(removed), snapshot)
        for start in range(0, most, NAMES_PER_EVENT):
            link.events += 1
            part = slice(start, start + NAMES_PER_EVENT)
            names = b"".join(stored[part]), b"".join(removed[part])
            events = KvEvents(link.events, *names, snapshot=snapshot and not start)
            self._outbox.to_router(link.router, events)
