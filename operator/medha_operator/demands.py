"""What the routers say of demand: `GET /demand` on the ops port of each, now and then.

Routers are found by their common name, asked anew of DNS every few seconds, so that one that came
or left is noticed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time

import aiohttp
import msgspec

from medha.messages import RouterDemand
from medha_operator.routers import Routers
from medha_operator.signals import Demand

log = logging.getLogger("medha.operator.demands")

ANSWER_S, CONNECT_S, NAMES_S = 2.0, 1.0, 5.0
MAX_BYTES = 4 << 20

_DEMAND = msgspec.json.Decoder(RouterDemand)


class Demands:
    """Asks every router behind `host`; `port` is that of their ops."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
        )
        self._routers = Routers()
        self._found_s = float("-inf")

    async def close(self) -> None:
        await self._session.close()

    async def ask(self) -> None:
        """Ask all of them once."""
        await self._find()
        await asyncio.gather(*(self._ask(address) for address in self._routers.addresses))

    def of(self, model: str) -> Demand:
        """What they said of a model."""
        return self._routers.demand(model, time.monotonic())

    async def _find(self) -> None:
        """A name that is not resolved leaves those that were known."""
        now_s = time.monotonic()
        if now_s - self._found_s < NAMES_S:
            return
        self._found_s = now_s
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await asyncio.get_running_loop().getaddrinfo(
                    self._host, self._port, type=socket.SOCK_STREAM
                )
        except (OSError, TimeoutError) as error:
            log.debug("routers %s: %r", self._host, error)
            return
        self._routers.found((str(each[4][0]) for each in found), now_s)

    async def _ask(self, address: str) -> None:
        host = f"[{address}]" if ":" in address else address
        try:
            async with self._session.get(f"http://{host}:{self._port}/demand") as answer:
                if answer.status == 200 and (answer.content_length or 0) <= MAX_BYTES:
                    said = _DEMAND.decode(await answer.read())
                    self._routers.said(address, said, time.monotonic())
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            log.debug("router %s: no demand: %r", address, error)
