"""The link to controllers: where they dial, and the loop that reads it.

`Link` is the seam: ZeroMQ in production (ROUTER, CURVE with an allow-list when keys are set), a
pair of queues in tests. The loop feeds every message to the exchange, ticks it, and publishes heads
soon after something changed: at once when idle, less often the longer publishing takes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from medha.adapters.sockets import Listener
from medha.config import RouterConfig
from medha.messages import Codec, ReplicaMessage, RouterMessage
from medha_router.exchange import Exchange

TICK_S = 0.25
LEAST_PAUSE_S = 0.001
BUSY_SHARE = 0.25
BURST = 64


class Link(Protocol):
    """Messages to and from controllers, each named by its peer; `rejected` did not decode."""

    rejected: int

    def send(self, peer: bytes, message: RouterMessage) -> bool:
        """Queue a message; False when the peer is gone or its queue is full."""

    async def next(self) -> tuple[bytes, ReplicaMessage]:
        """The next message."""

    def closed(self) -> tuple[bytes, ...]:
        """Peers whose connection has ended since the last call."""


def listen(config: RouterConfig) -> Listener[RouterMessage, ReplicaMessage]:
    """Bind the fleet's address; raises SetupError. Called on the loop that will use it."""
    return Listener(
        config.fleet_bind,
        sends=Codec(RouterMessage),
        receives=Codec(ReplicaMessage),
        curve=config.curve,
    )


class Pump:
    """Keeps one exchange going on the running loop; `ticked` is called with every tick."""

    def __init__(
        self, link: Link, exchange: Exchange, clock: Callable[[], float],
        ticked: Callable[[], None],
    ) -> None:  # fmt: skip
        self._link, self._exchange, self._clock, self._ticked = link, exchange, clock, ticked
        self._loop = asyncio.get_running_loop()
        self._log = logging.getLogger("medha.router")
        self._tasks: list[asyncio.Task[None]] = []
        self._due: asyncio.Handle | None = None
        self._not_before_s = 0.0

    def start(self) -> None:
        self._tasks = [
            self._loop.create_task(self._read(), name="link"),
            self._loop.create_task(self._tick(), name="tick"),
        ]

    async def stop(self) -> None:
        """End the loop; messages that wait are dropped."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._due is not None:
            self._due.cancel()

    def changed(self) -> None:
        """Heads may have changed: publish them soon, once for everything that changed."""
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
        self._guarded(self._exchange.publish)
        ended_s = self._clock()
        pause_s = max(LEAST_PAUSE_S, (ended_s - began_s) / BUSY_SHARE)
        self._not_before_s = ended_s + pause_s

    async def _read(self) -> None:
        while True:
            for _ in range(BURST):
                peer, message = await self._link.next()
                self._guarded(lambda: self._exchange.receive(peer, message))  # noqa: B023
            await asyncio.sleep(0)

    async def _tick(self) -> None:
        while True:
            for peer in self._link.closed():
                self._exchange.closed(peer)
            self._guarded(self._exchange.tick)
            self._guarded(self._ticked)
            self.changed()
            await asyncio.sleep(TICK_S)

    def _guarded(self, step: Callable[[], None]) -> None:
        """A defect in one step is logged with its trace and ends that step alone."""
        try:
            step()
        except Exception:
            self._log.exception("a step of the link failed")
