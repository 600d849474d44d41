"""The link to controllers, and the loop that serves it.

Controllers dial the router. `ReplicaLink` is ZeroMQ in production (ROUTER, with CURVE and an
allow-list if keys are configured) and a pair of queues in tests. The loop passes every message to
the client, ticks it, and publishes heads after a change: at once, or if the last publication left
requests waiting, after a pause in proportion to the time that it took. So does the placing of
requests that takes several turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from medha.adapters.sockets import Listener
from medha.config import RouterConfig
from medha.messages import Codec, ReplicaMessage, RouterMessage
from medha.peer_liveness import GONE_S
from medha_router.replica_client import ReplicaClient

TICK_S = GONE_S + 0.01
"""The tick after the one that noticed an ended connection decides about its replica."""
MIN_PAUSE_S = 0.001
BUSY_SHARE = 0.25

T = TypeVar("T")


class ReplicaLink(Protocol):
    """Messages to and from controllers, by peer; `rejected` counts messages that do not decode."""

    rejected: int

    def send(self, peer: bytes, message: RouterMessage) -> bool:
        """Queue a message; return False if the peer is gone or its queue is full."""

    def follow(self, receive: Callable[[bytes, ReplicaMessage], None]) -> None:
        """Call `receive` with each message, on the running loop."""

    def closed(self) -> tuple[bytes, ...]:
        """Return peers whose connection has ended since the last call."""


def listen(config: RouterConfig) -> Listener[RouterMessage, ReplicaMessage]:
    """Bind the address that controllers dial, on the running loop; raises SetupError."""
    return Listener(
        config.fleet_bind,
        sends=Codec(RouterMessage),
        receives=Codec(ReplicaMessage),
        curve=config.curve,
    )


class LinkLoop:
    """Serves the replica client on the running loop; calls `ticked` with every tick."""

    def __init__(
        self,
        link: ReplicaLink,
        client: ReplicaClient,
        clock: Callable[[], float],
        ticked: Callable[[], None],
    ) -> None:
        self._link, self._client, self._clock, self._ticked = link, client, clock, ticked
        self._loop = asyncio.get_running_loop()
        self._log = logging.getLogger("medha.router")
        self._ticking: asyncio.Task[None] | None = None
        self._due: asyncio.Handle | None = None
        self._placing: asyncio.Handle | None = None
        self._not_before_s = self._places_s = 0.0
        self._placed_s = 0.0  # time of the turns since a publication left some to place

    def start(self) -> None:
        self._ticking = self._loop.create_task(self._tick(), name="tick")
        self._link.follow(self._receive)

    async def stop(self) -> None:
        """End the loop; waiting messages are dropped."""
        ticking, self._ticking = self._ticking, None
        if ticking is not None:
            ticking.cancel()
            await asyncio.wait({ticking})
        for handle in (self._due, self._placing):
            if handle is not None:
                handle.cancel()

    def changed(self) -> None:
        """Publish heads soon, once for all changes until then."""
        if self._due is None:
            wait_s = self._not_before_s - self._clock()
            self._due = (
                self._loop.call_later(wait_s, self._publish)
                if wait_s > 0.0
                else self._loop.call_soon(self._publish)
            )

    def _publish(self) -> None:
        self._due = None
        began_s = self._clock()
        places = began_s >= self._places_s
        waiting = self._guarded(lambda: self._client.publish(places=places))
        ended_s = self._clock()
        pause_s = max(MIN_PAUSE_S, (ended_s - began_s) / BUSY_SHARE)
        self._not_before_s = ended_s + pause_s if waiting is not False else ended_s
        if self._client.placing and self._placing is None:
            self._placing = self._loop.call_soon(self._place)

    def _place(self) -> None:
        """Place what a publication left, in turns of the loop, and publish it."""
        began_s = self._clock()
        more = self._guarded(self._client.place)
        ended_s = self._clock()
        self._placed_s += ended_s - began_s
        self._placing = self._loop.call_soon(self._place) if more else None
        if not more:  # requests that fit nowhere would be tried without end
            self._places_s = ended_s + self._placed_s / BUSY_SHARE
            self._placed_s = 0.0
        self.changed()

    def _receive(self, peer: bytes, message: ReplicaMessage) -> None:
        if self._ticking is None:
            return
        try:
            self._client.receive(peer, message)
        except Exception:
            self._log.exception("a message of the link failed")

    async def _tick(self) -> None:
        while True:
            self._guarded(self._client.tick)
            for peer in self._link.closed():
                self._client.closed(peer)
            self._guarded(self._ticked)
            self.changed()
            await asyncio.sleep(TICK_S)

    def _guarded(self, step: Callable[[], T]) -> T | None:
        """Run a step; an exception is logged and ends only this step."""
        try:
            return step()
        except Exception:
            self._log.exception("a step of the link failed")
            return None
