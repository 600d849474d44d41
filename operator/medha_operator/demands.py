"""What the routers say of demand: `GET /demand` on the ops port of each, now and then.

Routers are found by their common name, asked anew of DNS every few seconds, so that one that came
or left is noticed. Of a router that does not answer the last word stays, with its time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time

import aiohttp
import msgspec

from medha.messages import RouterDemand
from medha_operator.signals import STALE_S, Demand

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
        self._addresses: tuple[str, ...] = ()
        self._found_s = float("-inf")
        self._heard: dict[str, tuple[float, RouterDemand]] = {}

    async def close(self) -> None:
        await self._session.close()

    async def ask(self) -> None:
        """Ask all of them once."""
        await self._find()
        await asyncio.gather(*(self._ask(address) for address in self._addresses))

    def of(self, model: str) -> Demand:
        """What they said of a model."""
        now_s = time.monotonic()
        said = [self._heard[each] for each in self._addresses if each in self._heard]
        fresh = len(said) == len(self._addresses) > 0
        return Demand(
            window_s=max((each.window_s for _, each in said), default=1.0),
            fresh=fresh and all(now_s - at_s <= STALE_S for at_s, _ in said),
            models=tuple(
                each
                for at_s, one in said
                if now_s - at_s <= STALE_S
                for each in one.models
                if each.model == model
            ),
        )

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
        self._addresses = tuple(sorted({str(each[4][0]) for each in found}))
        for gone in self._heard.keys() - set(self._addresses):
            del self._heard[gone]

    async def _ask(self, address: str) -> None:
        host = f"[{address}]" if ":" in address else address
        try:
            async with self._session.get(f"http://{host}:{self._port}/demand") as answer:
                if answer.status == 200 and (answer.content_length or 0) <= MAX_BYTES:
                    said = _DEMAND.decode(await answer.read())
                    self._heard[address] = (time.monotonic(), said)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            log.debug("router %s: no demand: %r", address, error)
