"""The rank's side of the controller link: one thread that listens, beats, and never computes.

    controller ── Step, OfferPages, FetchPages, Withdraw, Leave ──> `commands`, in order
               ── Form, Dissolve, Peer, Forget ──> at once, beside whatever is being computed
    rank       ── RankHello at every new connection, RankBeat every 0.5 s, reports ──> controller

The rank ends when it is told to leave, when it gets SIGTERM or SIGINT, or when the controller says
nothing for `timeout_s` (or never spoke within a minute): then `commands` gets a Leave, and a rank
that is blocked (in a peer that never answers) is ended hard after `grace_s`. Decides nothing about
steps but their order.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable

from medha.adapters.sockets import Dialer
from medha.config import STALL_S, Curve
from medha.messages import (
    Codec,
    ControllerBeat,
    Dissolve,
    FetchPages,
    Forget,
    Form,
    Gap,
    Leave,
    OfferPages,
    Peer,
    RankBeat,
    RankCommand,
    RankHello,
    RankReport,
    Resend,
    Step,
    Withdraw,
)
from medha.topology import Coordinate
from medha_worker.order import StepOrder

BEAT_S = 0.5
FIRST_WORD_S = 60.0
FAREWELL_S = 0.1  # a socket that closes drops what it holds: let the last words out
_LOG = logging.getLogger("medha.link")

Ordered = Step | OfferPages | FetchPages | Withdraw | Leave
AtOnce = Form | Dissolve | Peer | Forget


class Link:
    """One rank's link. `at_once` is called on the link's thread and must not block.

    `commands` is read by the compute thread; `post` sends from any thread. `exit` ends the process
    (injected, so that a test can watch it).
    """

    def __init__(
        self,
        address: str,
        at: Coordinate,
        incarnation: str,
        at_once: Callable[[AtOnce], None],
        *,
        timeout_s: float,
        curve: Curve | None = None,
        grace_s: float = 2.0,
        exit: Callable[[int], object] = os._exit,
    ) -> None:
        self._hello = RankHello(
            group=at.group, stage=at.stage, shard=at.shard, incarnation=incarnation, pid=os.getpid()
        )
        self._at_once, self._timeout_s, self._grace_s = at_once, timeout_s, grace_s
        self._exit = exit
        self.commands: queue.SimpleQueue[Ordered] = queue.SimpleQueue()
        self._order = StepOrder()
        self._dialer: Dialer[RankReport, RankCommand] = Dialer(
            address,
            str(at).encode(),
            sends=Codec(RankReport),
            receives=Codec(RankCommand),
            curve=curve,
        )
        self._closing = threading.Event()
        self._leaves_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        """Block SIGTERM and SIGINT here (the link waits for them) and begin to listen."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._thread.start()

    def post(self, report: RankReport) -> None:
        """Report to the controller; from any thread."""
        if not self._dialer.post(report):
            _LOG.error("a report was lost: %s; too many wait for the controller", report)

    def close(self) -> None:
        """Send what was posted and end the thread."""
        self._closing.set()
        self._dialer.wake()
        self._thread.join(timeout=1.0)
        self._dialer.close()

    def _run(self) -> None:
        handshakes, beat = -1, 0.0
        silent_at = time.monotonic() + FIRST_WORD_S
        while not self._closing.is_set():
            now = time.monotonic()
            if handshakes != (seen := self._dialer.handshakes):
                handshakes = seen
                self._dialer.send(self._hello)
            if now - beat >= BEAT_S:
                beat = now
                self._dialer.send(RankBeat())
            message = self._dialer.receive(BEAT_S / 2)
            slept_s = time.monotonic() - now
            if slept_s > STALL_S:
                silent_at += slept_s  # time that we slept through is not the controller's silence
            while message is not None:
                silent_at = time.monotonic() + self._timeout_s
                self._take(message)
                message = self._dialer.receive()
            self._watch(time.monotonic(), silent_at)
        self._dialer.receive()  # sends what was posted last
        time.sleep(FAREWELL_S)

    def _take(self, message: RankCommand) -> None:
        match message:
            case ControllerBeat():
                return
            case Step():
                taken = self._order.take(message)
                if isinstance(taken, Gap):
                    self._dialer.send(taken)
                elif taken is not None:
                    self.commands.put(taken)
            case Resend():
                self._order.resent()
            case Leave():
                self._leave(message.reason)
            case OfferPages() | FetchPages() | Withdraw():
                self.commands.put(message)
            case _:
                self._at_once(message)

    def _watch(self, now: float, silent_at: float) -> None:
        """Signals, silence, and a rank that does not end by itself."""
        taken = signal.sigtimedwait(_SIGNALS, 0)
        if taken is not None:
            self._leave(f"{signal.Signals(taken.si_signo).name} came")
        if now > silent_at:
            self._leave(f"the controller is silent; {self._timeout_s:g} s are allowed")
        if self._leaves_at is not None and now > self._leaves_at:
            _LOG.error("blocked for %.0f s after it was told to leave: ended", self._grace_s)
            self._exit(1)

    def _leave(self, reason: str) -> None:
        if self._leaves_at is None:
            self._leaves_at = time.monotonic() + self._grace_s
            self.commands.put(Leave(reason))


_SIGNALS = (signal.SIGTERM, signal.SIGINT)
