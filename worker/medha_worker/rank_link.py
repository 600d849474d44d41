"""The rank's link to the controller: one thread that receives, sends beats, and never computes.

    controller ── Step, OfferPages, FetchPages, Withdraw, Leave ──> `commands`, in order
               ── Form, Dissolve, Peer, Forget ──> handled at once, while a batch is computed
    rank       ── RankHello at every new connection, RankBeat every 0.5 s, reports ──> controller

Steps are numbered from 1 without gaps. If one is missing, the rank reports the gap once and drops
later steps until the missing one arrives; the controller answers Resend and sends them again.

The rank leaves on Leave, on SIGTERM or SIGINT, and if the controller is silent: for a minute before
it formed the group, for `timeout_s` after that. `commands` then gets a Leave; after silence it says
`rejoin`, since the next controller may need this rank, and its weights, which it loads to the end
first. A rank that stays blocked otherwise, for example by a lost peer, is killed after `grace_s`.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable

import msgspec

from medha.adapters.sockets import Dialer, wait
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

BEAT_S = 0.5
UNFORMED_S = 60.0
FAREWELL_S = 0.1  # a closing socket drops queued messages: let the last ones out
_LOG = logging.getLogger("medha.link")

OrderedCommand = Step | OfferPages | FetchPages | Withdraw | Leave
ImmediateCommand = Form | Dissolve | Peer | Forget


class StepOrder:
    """Order of a group's steps on one rank: runs, drops or reports a gap for each that arrives."""

    def __init__(self) -> None:
        self.expected = 1
        self._asked = False

    def take(self, step: Step) -> Step | Gap | None:
        """Return the step if it is due, a Gap to report, or None for a step to drop."""
        if step.step == self.expected:
            self.expected += 1
            self._asked = False
            return step
        if step.step < self.expected or self._asked:
            return None
        self._asked = True
        return Gap(self.expected)

    def resent(self) -> None:
        """Note that steps are resent from the missing one on: a further gap is reported again."""
        self._asked = False


class RankLink:
    """The link of one rank. `act_now` is called on the link's thread and must not block.

    The compute thread reads `commands`; any thread may `post`. `exit` ends the process (an
    argument, so that tests can replace it). `store`: address of the rendezvous store that this rank
    serves. A rank that `rejoins` waits for a controller forever. Another one loads its weights
    until `loaded` is called; an order to rejoin waits for that.
    """

    def __init__(
        self,
        address: str,
        at: Coordinate,
        incarnation: str,
        act_now: Callable[[ImmediateCommand], None],
        *,
        timeout_s: float,
        store: str = "",
        rejoins: bool = False,
        curve: Curve | None = None,
        grace_s: float = 2.0,
        exit: Callable[[int], object] = os._exit,
    ) -> None:
        self._hello = RankHello(
            group=at.group,
            stage=at.stage,
            shard=at.shard,
            incarnation=incarnation,
            pid=os.getpid(),
            store=store,
        )
        self._act_now, self._timeout_s, self._grace_s = act_now, timeout_s, grace_s
        self._unformed_s = math.inf if rejoins else UNFORMED_S
        self._loaded = rejoins
        self._exit = exit
        self.commands: queue.SimpleQueue[OrderedCommand] = queue.SimpleQueue()
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
        """Block SIGTERM and SIGINT in this thread (the link waits for them) and start receiving."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._thread.start()

    def loaded(self) -> None:
        """Note that the rank's thread reads `commands` from now on, so that it can obey in time."""
        self._loaded = True

    def post(self, report: RankReport) -> None:
        """Queue a report to the controller; callable from any thread."""
        if not self._dialer.post(report):
            _LOG.error("report lost: %s; too many are queued for the controller", report)

    def close(self) -> None:
        """Send queued reports and end the thread."""
        self._closing.set()
        self._dialer.wake()
        self._thread.join(timeout=1.0)
        self._dialer.close()

    def _run(self) -> None:
        handshakes, beat = -1, 0.0
        silent_at = time.monotonic() + self._unformed_s
        while not self._closing.is_set():
            now = time.monotonic()
            if handshakes != (seen := self._dialer.handshakes):
                handshakes = seen
                self._dialer.send(self._hello)
            if now - beat >= BEAT_S:
                beat = now
                self._dialer.send(RankBeat())
            wait([self._dialer], BEAT_S / 2)  # a new connection ends it too: Hello goes first
            message = self._dialer.receive()
            slept_s = time.monotonic() - now
            if slept_s > STALL_S:
                silent_at += slept_s  # a stall of this machine is not the controller's silence
            while message is not None:
                self._take(message)
                silent_at = time.monotonic() + self._patience_s
                message = self._dialer.receive()
            self._watch(time.monotonic(), silent_at)
        self._dialer.receive()  # sends the last posted reports
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
                self._leave(message)
            case OfferPages() | FetchPages() | Withdraw():
                self.commands.put(message)
            case _:
                if isinstance(message, Form):
                    self._hello = msgspec.structs.replace(
                        self._hello, controller=message.controller
                    )
                self._act_now(message)

    @property
    def _patience_s(self) -> float:
        """Silence of the controller that is allowed now."""
        return self._timeout_s if self._hello.controller else self._unformed_s

    def _watch(self, now: float, silent_at: float) -> None:
        """Leave on a signal or on silence; kill the process if it does not end by itself.

        A signal during a rejoin is left to the next link, unless the rank still loads.
        """
        if self._leaves_at == math.inf and self._loaded:
            self._leaves_at = now + self._grace_s
        if (
            self._leaves_at in (None, math.inf)
            and (taken := signal.sigtimedwait(_SIGNALS, 0)) is not None
        ):
            self._leave(Leave(f"{signal.Signals(taken.si_signo).name} received"))
        if now > silent_at:
            text = f"the controller is silent; {self._patience_s:g} s are allowed"
            self._leave(Leave(text, rejoin=bool(self._hello.controller)))
        if self._leaves_at is not None and now > self._leaves_at:
            _LOG.error(
                "still blocked %.0f s after the order to leave: ending the process", self._grace_s
            )
            self._exit(1)

    def _leave(self, order: Leave) -> None:
        waits = order.rejoin and not self._loaded
        if self._leaves_at is None or (self._leaves_at == math.inf and not order.rejoin):
            self._leaves_at = math.inf if waits else time.monotonic() + self._grace_s
            self.commands.put(order)


_SIGNALS = (signal.SIGTERM, signal.SIGINT)
