"""Links to routers: introductions, heartbeats, load reports, prefix-cache news, tokenizer files.

The controller dials every router of its config and says Hello until it is welcome, at most a second
apart. A router that is silent for too long, or is welcomed under another incarnation, is lost: what
ran for it is aborted by the caller. Load is reported when it changed, at most every 20 ms, and at
least each half second as our own sign of life. Cache news is numbered per link from 1 and begins
with a snapshot. Decides nothing about requests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from medha import PROTOCOL
from medha.config import STALL_S
from medha.corrections import Learned
from medha.messages import FetchFile, FilePart, Hello, KvEvents, Load, LoadReport, Rejected, Welcome
from medha_worker.controller.outbox import Outbox

HELLO_S = 0.5
MAX_HELLO_S = 1.0
REPORT_S = 0.02
BEAT_S = 0.5
FILE_PART_BYTES = 1 << 20
NAMES_PER_EVENT = 1 << 19

log = logging.getLogger("medha.controller")


class _Link:
    def __init__(self, router: str) -> None:
        self.router = router
        self.incarnation = ""
        self.heard_s = 0.0
        self.hello_s: float | None = None
        self.wait_s = 0.0
        self.report_s = 0.0
        self.reported: LoadReport | None = None
        self.events = 0
        self.refused = ""

    @property
    def welcome(self) -> bool:
        return bool(self.incarnation)


class Routers:
    """Every configured router, welcome or not."""

    def __init__(self, routers: tuple[str, ...], outbox: Outbox, timeout_s: float) -> None:
        self._outbox, self._timeout_s = outbox, timeout_s
        self._links = {router: _Link(router) for router in routers}
        self._hello: Hello | None = None
        self._files: dict[str, bytes] = {}
        # name of a cached page -> in how many groups it is held
        self._held: dict[bytes, int] = {}

    @property
    def welcome(self) -> tuple[str, ...]:
        """Routers that took us in."""
        return tuple(router for router, link in self._links.items() if link.welcome)

    @property
    def refused(self) -> str:
        """Why a router does not take us in; empty: none refuses."""
        return next((link.refused for link in self._links.values() if link.refused), "")

    def configure(self, routers: tuple[str, ...]) -> tuple[str, ...]:
        """The routers that there are now; returns those that are no more."""
        gone = tuple(router for router in self._links if router not in routers)
        for router in gone:
            del self._links[router]
        for router in routers:
            self._links.setdefault(router, _Link(router))
        return gone

    def introduce(self, hello: Hello, files: dict[str, bytes]) -> None:
        """From now on this is who we are; `files`: content hash -> bytes."""
        self._hello, self._files = hello, files
        for link in self._links.values():
            link.hello_s = None

    # --- hearing ------------------------------------------------------------------------------

    def heard(self, router: str, now: float) -> bool:
        """Notes a sign of life; whether the router has welcomed us."""
        link = self._links[router]
        link.heard_s = now
        return link.welcome

    def welcomed(self, router: str, message: Welcome, now: float) -> bool:
        """Taken in, or asked for a snapshot of the cache; True when the router is another process
        than the one we knew."""
        link = self._links[router]
        renewed = link.welcome and link.incarnation != message.router
        if not link.welcome or renewed:
            link.reported, link.wait_s = None, 0.0
        link.events = 0
        self._snapshot(link)
        link.incarnation, link.heard_s, link.refused = message.router, now, ""
        return renewed

    def rejected(self, router: str, message: Rejected) -> bool:
        """Refused; True when we were welcome before: the router is another process now, and an
        introduction is all it wants. A new reason for not taking us in is logged."""
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

    def fetch(self, router: str, message: FetchFile) -> None:
        """Send the part of a file that was asked for; an unknown hash gets an empty file."""
        data = self._files.get(message.hash, b"")
        part = data[message.offset : message.offset + FILE_PART_BYTES]
        self._outbox.to_router(router, FilePart(message.hash, message.offset, len(data), part))

    # --- time ---------------------------------------------------------------------------------

    def excuse(self, slept_s: float) -> None:
        """We did not run for `slept_s`: time that we slept through is nobody's silence."""
        if STALL_S < slept_s < float("inf"):
            for link in self._links.values():
                link.heard_s += slept_s

    def lost(self, now: float) -> list[str]:
        """Routers that fell silent; they are dialled anew."""
        silent = []
        for router, link in self._links.items():
            if link.welcome and now - link.heard_s > self._timeout_s:
                link.incarnation, link.hello_s, link.wait_s = "", None, 0.0
                self._outbox.redial(router)
                silent.append(router)
        return silent

    def say_hello(self, now: float) -> None:
        """Introduce ourselves where we are not welcome yet, with back-off up to a second."""
        if self._hello is None:
            return
        for router, link in self._links.items():
            if link.welcome or (link.hello_s is not None and now - link.hello_s < link.wait_s):
                continue
            link.hello_s = now
            link.wait_s = min(max(HELLO_S, 1.5 * link.wait_s), MAX_HELLO_S)
            self._outbox.to_router(router, self._hello)

    def due(self, now: float) -> bool:
        """Some router may be told of our load now."""
        return any(
            link.welcome and now - link.report_s >= REPORT_S for link in self._links.values()
        )

    def report(self, load: Load, draining: bool, learned: Learned, now: float) -> None:
        """Tell the load where it changed, or where the last report is half a second old."""
        report = LoadReport(load, draining, learned)
        for router, link in self._links.items():
            waited = now - link.report_s
            if not link.welcome or waited < REPORT_S:
                continue
            if waited >= BEAT_S or report != link.reported:
                link.report_s, link.reported = now, report
                self._outbox.to_router(router, report)

    # --- prefix cache -------------------------------------------------------------------------

    def cached(
        self, stored: Sequence[tuple[int, bytes]], removed: Sequence[tuple[int, bytes]]
    ) -> None:
        """Pages that groups now hold under a name, or no longer; told where that is news."""
        appeared, vanished = [], []
        for _, name in stored:
            self._held[name] = self._held.get(name, 0) + 1
            if self._held[name] == 1:
                appeared.append(name)
        for _, name in removed:
            count = self._held.get(name, 0) - 1
            if count > 0:
                self._held[name] = count
            elif self._held.pop(name, None) is not None:
                vanished.append(name)
        if not appeared and not vanished:
            return
        for link in self._links.values():
            if link.welcome:
                link.events += 1
                news = KvEvents(link.events, b"".join(appeared), b"".join(vanished))
                self._outbox.to_router(link.router, news)

    def _snapshot(self, link: _Link) -> None:
        names = list(self._held)
        for start in range(0, max(len(names), 1), NAMES_PER_EVENT):
            link.events += 1
            part = b"".join(names[start : start + NAMES_PER_EVENT])
            self._outbox.to_router(
                link.router, KvEvents(link.events, part, snapshot=link.events == 1)
            )
