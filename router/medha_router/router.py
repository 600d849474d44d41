"""One router process, put together: everything is made here and passed to what needs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pathlib
import random
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable

import msgspec
from fastapi import FastAPI

from medha.adapters.prometheus import Metrics, OpsServer, Route, Tick
from medha.config import RouterConfig
from medha.demand import Demand
from medha.errors import SetupError, SpecError
from medha.messages import RouterDemand
from medha_router import ops
from medha_router.app import make_app
from medha_router.door import DrainingServer, server_of
from medha_router.exchange import Exchange
from medha_router.files import FileStore
from medha_router.fleet import Fleet
from medha_router.keys import ApiKeys
from medha_router.learning import Models
from medha_router.ledger import Ledger
from medha_router.link import Link, Pump, listen
from medha_router.metering import Meter
from medha_router.moving import Mover
from medha_router.service import Service
from medha_router.tokenizer import TokenizerPool

MEASURE_S = 1.0


class Router:
    """The parts of a router on the running event loop, given the link that controllers dial,
    where metrics go, and who makes tokens."""

    def __init__(
        self, config: RouterConfig, link: Link, metrics: Metrics, tokens: TokenizerPool
    ) -> None:
        self._config = config
        clock = time.monotonic  # the loop's own time stands still within a turn
        self.tick = Tick()
        self._demand = Demand()
        self._meter = Meter(metrics, self._demand)
        names = None if config.learn else frozenset(model.name for model in config.models)
        self._fleet = Fleet(names, config.replica_timeout_s)
        published = pathlib.Path(config.models_file) if config.models_file else None
        self._models = Models(config.models, config.forget_model_s, published)
        self._ledger = Ledger(self._models, self._fleet, self._meter, link.send, self._changed)
        folder = pathlib.Path(config.run_dir, "tokenizers") if config.run_dir else None
        self._exchange = Exchange(
            f"router-{secrets.token_hex(6)}", self._models, self._fleet, self._ledger,
            FileStore(folder), tokens, self._meter, link.send, clock,
        )  # fmt: skip
        dice = random.Random(secrets.randbits(256))  # asking the kernel each time costs a call
        self.service = Service(
            config, self._models, self._ledger, tokens, self._meter, self._demand,
            clock=clock, wall_s=time.time, draw_bits=dice.getrandbits,
        )  # fmt: skip
        self._keys = ApiKeys(pathlib.Path(config.api_keys)) if config.api_keys else None
        self._mover = Mover(self._models, self.service, self._ledger, clock)
        self._clock, self._measured_s = clock, float("-inf")
        self._link = link
        self._pump = Pump(link, self._exchange, clock, self._ticked)

    def app(self) -> FastAPI:
        """The public port's application."""
        return make_app(
            self.service,
            max_body_bytes=self._config.max_body_bytes,
            keepalive_s=self._config.keepalive_s,
            keys=self._keys,
        )

    def routes(self, drain: Callable[[], None]) -> dict[str, Route]:
        """The routes of the ops port."""
        return ops.routes(asyncio.get_running_loop(), self.page, self.demand, drain)

    def page(self) -> dict[str, object]:
        return ops.queue_page(self._models, self._fleet, self._clock())

    def demand(self) -> RouterDemand:
        return ops.demand_page(self._models, self._fleet, self._demand, self._clock())

    def start(self) -> None:
        self._pump.start()

    async def stop(self) -> None:
        await self._pump.stop()
        await self._mover.stop()
        await self._exchange.settled()

    def _changed(self) -> None:
        self._pump.changed()

    def _ticked(self) -> None:
        """Every tick: the loop lives, what waited too long ends; now and then gauges are set."""
        self.tick()
        self._mover.tick()
        now = self._clock()
        self._ledger.expire(now, self._config.queue_timeout_s, self._config.no_replica_timeout_s)
        if now - self._measured_s >= MEASURE_S:
            self._measured_s = now
            if self._keys is not None:
                self._keys.refresh()
            self._measure(now)
            self._models.refresh()
            self._models.forget(frozenset(each.hello.model for each in self._fleet), now)
            self._demand.forget(self._models)

    def _measure(self, now: float) -> None:
        rejected, self._link.rejected = self._link.rejected, 0
        self._meter.rejected(rejected)
        for name, model in self._models.items():
            replicas = self._fleet.of(name)
            draining = sum(replica.draining for replica in replicas)
            serving = sum(replica.open for replica in replicas)
            running = sum(len(replica.sent) for replica in replicas)
            self._meter.queue(name, model.dispatch.waiting(now), running, now)
            self._meter.replicas(name, serving=serving, draining=draining,
                                 joining=len(replicas) - serving - draining)  # fmt: skip


class Doors(msgspec.Struct, frozen=True):
    """An open router: where it is reached, and what runs it."""

    router: Router
    server: DrainingServer
    public: socket.socket
    ops_port: int
    fleet_address: str

    @property
    def url(self) -> str:
        host, port = self.public.getsockname()[:2]
        return f"http://{host}:{port}"

    async def serve(self) -> None:
        """Until told to end, and drained."""
        await self.server.serve(sockets=[self.public])


@contextlib.asynccontextmanager
async def opened(config: RouterConfig, tokens: TokenizerPool) -> AsyncIterator[Doors]:
    """A router with all its ports open, on the running loop. Raises SetupError and SpecError."""
    if not config.models and not config.learn:
        raise SpecError(
            "models", "empty", "must name a model where `learn` is false",
            "name one, or let the router learn models from its replicas",
        )  # fmt: skip
    with contextlib.ExitStack() as stack:
        public = _bound(config.host, config.port)
        stack.callback(public.close)
        link = listen(config)
        stack.callback(link.close)
        metrics = Metrics("router")
        router = Router(config, link, metrics, tokens)
        service = router.service
        server = server_of(router.app(), service.drain, lambda: service.live == 0)
        ops_server = OpsServer(
            config.host, config.ops_port, metrics, alive=router.tick.alive,
            ready=lambda: service.ready, routes=router.routes(server.finish),
        )  # fmt: skip
        stack.callback(ops_server.close)
        router.start()
        try:
            yield Doors(router, server, public, ops_server.port, link.address)
        finally:
            for task in (left := list(server.server_state.tasks)):
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await router.stop()


async def serve(config: RouterConfig) -> None:
    """Run one router until it is told to end and has drained. Raises SetupError."""
    tokens = TokenizerPool(config.tokenizer_workers)
    with contextlib.closing(tokens):
        async with opened(config, tokens) as doors:
            logging.getLogger("medha.router").info(
                "serving", extra={"fields": {"url": doors.url, "fleet": doors.fleet_address}}
            )
            await doors.serve()


def _bound(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError as error:
        raise SetupError(
            f"port {host}:{port} cannot be opened ({error.strerror}): free it or choose another"
        ) from None
