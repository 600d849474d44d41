"""The composition root of the router process: creates every part and connects them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import pathlib
import resource
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.types import ASGIApp

from medha.adapters.addresses import http_url, listening
from medha.adapters.keys import read_key
from medha.adapters.memory import (
    MemoryGate,
    collect_seldom,
    container_limit_bytes,
    resident_bytes,
)
from medha.adapters.prometheus import Metrics, OpsServer, Route, Tick, read_token
from medha.config import RouterConfig
from medha.errors import SetupError, SpecError
from medha.fleet.demand import DemandWindow
from medha.messages import RouterDemand
from medha_router import api_errors, ops
from medha_router.auth import ApiKeys
from medha_router.http_protocol import HttpLimits
from medha_router.models import ModelRegistry
from medha_router.replica_client import ReplicaClient
from medha_router.replica_link import LinkLoop, ReplicaLink, listen
from medha_router.replicas import ReplicaTable
from medha_router.request_table import RequestTable, RouterState
from medha_router.router_metrics import RouterMetrics
from medha_router.routes import make_app
from medha_router.server import DrainingServer, MemoryLimited, server_of
from medha_router.service import Service
from medha_router.structured.checker_process import GrammarChecker
from medha_router.tokenization.pool import TokenizerPool
from medha_router.tokenization.retokenize import Retokenizer
from medha_router.tokenization.tokenizer_files import FileStore
from medha_router.turns import in_turns

MEASURE_S = 1.0
MEMORY_S = 0.1
LATER_S = 0.005
"""Time from one group of later steps to the next."""
DRAWN_BYTES = 4096
COLLECT_AFTER = 50_000  # objects
BACKLOG = 2048
OTHER_FILES = 1024


class SystemBits:
    """Random bits of the operating system, drawn in bulk.

    With each draw the event loop gives way to the tokenizers' threads.
    """

    def __init__(self) -> None:
        self._held = memoryview(b"")

    def __call__(self, bits: int) -> int:
        """Return a number of at most that many bits."""
        size = -(-bits // 8)
        if len(self._held) < size:
            self._held = memoryview(secrets.token_bytes(max(size, DRAWN_BYTES)))
        drawn, self._held = self._held[:size], self._held[size:]
        return int.from_bytes(drawn) >> (8 * size - bits)


class LaterSteps:
    """Steps that nothing waits for, run in groups on the running loop, after what clients wait for.

    The first of a group finds cold caches, and the others warm ones.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._steps: list[Callable[[], None]] = []
        self._due: asyncio.Handle | None = None
        self._not_before_s = 0.0

    def __call__(self, step: Callable[[], None]) -> None:
        """Run a step once the loop's turn is over, or LATER_S after the group before it."""
        self._steps.append(step)
        if self._due is None:
            wait_s = self._not_before_s - self._loop.time()
            self._due = (
                self._loop.call_later(wait_s, self.run)
                if wait_s > 0.0
                else self._loop.call_soon(self.run)
            )

    def run(self) -> None:
        """Run all waiting steps now."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        self._not_before_s = self._loop.time() + LATER_S
        steps, self._steps = self._steps, []
        for step in steps:
            try:
                step()
            except Exception:
                logging.getLogger("medha.router").exception("a later step failed")


class Router:
    """The parts of one router, on the running event loop."""

    def __init__(
        self, config: RouterConfig, link: ReplicaLink, metrics: Metrics, tokens: TokenizerPool
    ) -> None:
        self._config = config
        clock = time.monotonic  # the loop's own time does not advance within a turn
        self.tick = Tick()
        self._demand = DemandWindow()
        self._metrics = RouterMetrics(metrics, self._demand)
        names = None if config.learn else frozenset(model.name for model in config.models)
        self._replicas = ReplicaTable(names, config.replica_timeout_s)
        published = pathlib.Path(config.models_file) if config.models_file else None
        self._models = ModelRegistry(
            config.models, config.forget_model_s, published, config.max_queue
        )
        self._later = LaterSteps()
        self._requests = RequestTable(
            self._models,
            self._replicas,
            self._metrics,
            link.send,
            self._changed,
            self._later,
        )
        folder = pathlib.Path(config.run_dir, "tokenizers") if config.run_dir else None
        state = RouterState(
            f"router-{secrets.token_hex(6)}",
            self._models,
            self._replicas,
            self._requests,
            self._metrics,
            link.send,
            clock,
            ports=config.process.fleet_ports if config.process is not None else (),
        )
        self._client = ReplicaClient(state, FileStore(folder), tokens)
        self._grammars = GrammarChecker()
        self.service = Service(
            config,
            state,
            tokens,
            self._demand,
            grammars=self._grammars,
            salt_secret=_salt_secret(config),
            wall_s=time.time,
            draw_bits=SystemBits(),
        )
        self._keys = ApiKeys(pathlib.Path(config.api_keys)) if config.api_keys else None
        self._following: asyncio.Future[None] | None = None
        self._watching: asyncio.Future[None] | None = None
        self._expiring: asyncio.Future[None] | None = None
        limit_bytes = memory_limit_bytes(config)
        self._gate = MemoryGate(limit_bytes) if limit_bytes else None
        self._retokenizer = Retokenizer(state, self.service)
        self._clock, self._measured_s = clock, float("-inf")
        self._link = link
        self._link_loop = LinkLoop(link, self._client, clock, self._ticked)

    def app(self) -> ASGIApp:
        """Make the application of the public port."""
        refused = functools.partial(self._metrics.refused_unread, api_errors.MEMORY)
        gate = self._gate

        def limited(app: ASGIApp) -> ASGIApp:
            return app if gate is None else MemoryLimited(app, gate, refused)

        return make_app(self.service, self._config, self._keys, limited)

    def routes(self, drain: Callable[[], None] | None) -> dict[str, Route]:
        """Make the routes of the ops port; without `drain`, none that changes the router."""
        return ops.routes(asyncio.get_running_loop(), self.page, self.demand, drain)

    def page(self) -> dict[str, object]:
        return ops.queue_page(self._models, self._replicas, self._clock())

    def demand(self) -> RouterDemand:
        self._later.run()
        return ops.demand_page(self._models, self._replicas, self._demand, self._clock())

    def start(self, busy: Callable[[], bool]) -> None:
        """Start to serve replicas. `busy`: whether requests of clients are under way."""
        self._link_loop.start()
        if self._gate is not None:
            self._watching = asyncio.ensure_future(_watch(self._gate, busy))
        if self._keys is not None:
            self._following = asyncio.ensure_future(self._keys.follow())

    async def stop(self) -> None:
        await self._link_loop.stop()
        self._later.run()
        for following in (self._following, self._watching, self._expiring):
            if following is not None:
                following.cancel()
                await asyncio.wait({following})
        await self._retokenizer.stop()
        await self._client.settled()
        await self._grammars.close()

    def _changed(self) -> None:
        self._link_loop.changed()

    def _ticked(self) -> None:
        """Prove liveness and expire requests; every MEASURE_S also refresh files and gauges."""
        self.tick()
        self._retokenizer.tick()
        now = self._clock()
        if self._expiring is None or self._expiring.done():
            self._expiring = asyncio.ensure_future(self._expire(now))
        if now - self._measured_s >= MEASURE_S:
            self._measured_s = now
            self._measure(now)
            self._models.refresh()
            self._models.forget(frozenset(replica.hello.model for replica in self._replicas), now)
            self._demand.forget(self._models)

    async def _expire(self, now: float) -> None:
        """Fail the requests that waited too long, in turns of the loop."""
        try:
            await in_turns(self._requests.expire(now, self._config))
        except Exception:
            logging.getLogger("medha.router").exception("requests do not expire")

    def _measure(self, now: float) -> None:
        rejected, self._link.rejected = self._link.rejected, 0
        self._metrics.rejected(rejected)
        for name, model in self._models.items():
            replicas = self._replicas.of(name)
            draining = sum(replica.draining for replica in replicas)
            serving = sum(replica.open for replica in replicas)
            running = sum(len(replica.sent) for replica in replicas)
            self._metrics.queue(name, model.dispatcher.waiting(now), running, now)
            self._metrics.replicas(
                name, serving=serving, draining=draining, joining=len(replicas) - serving - draining
            )


class RunningRouter(msgspec.Struct, frozen=True):
    """A router with open ports: its addresses and servers."""

    router: Router
    server: DrainingServer
    public: socket.socket
    ops_port: int
    fleet_address: str

    @property
    def url(self) -> str:
        host, port = self.public.getsockname()[:2]
        return http_url(host, port)

    async def serve(self) -> None:
        """Serve until a signal or a drain request, and until all requests have ended."""
        await self.server.serve(sockets=[self.public])


@contextlib.asynccontextmanager
async def opened(config: RouterConfig, tokens: TokenizerPool) -> AsyncIterator[RunningRouter]:
    """Open a router with all its ports on the running loop. Raises SetupError and SpecError."""
    if not config.models and not config.learn:
        raise SpecError(
            "models",
            "empty",
            "must name a model where `learn` is false",
            "name one, or let the router learn models from its replicas",
        )
    with contextlib.ExitStack() as stack:
        process = config.process
        public = _bound(config.host, config.port, shared=process is not None)
        stack.callback(public.close)
        link = listen(config)
        stack.callback(link.close)
        metrics = Metrics("router")
        router = Router(config, link, metrics, tokens)
        service = router.service
        server = server_of(
            router.app(),
            service.drain,
            lambda: service.live == 0,
            drain_s=config.drain_timeout_s,
            limits=HttpLimits(stall_s=config.stall_timeout_s, connections=most_connections()),
        )
        token = read_token(config.ops_token) if config.ops_token else b""
        ops_server = OpsServer(
            (config.ops_host or config.host) if process is None else process.ops_socket,
            config.ops_port,
            metrics,
            alive=router.tick.alive,
            ready=lambda: service.ready,
            routes=router.routes(server.finish if token else None),
            token=token,
        )
        stack.callback(ops_server.close)
        router.start(lambda: server.busy)
        try:
            yield RunningRouter(router, server, public, ops_server.port, link.address)
        finally:
            await server.end_requests()
            await router.stop()


async def serve(config: RouterConfig) -> None:
    """Run one router until it has drained. Raises SetupError."""
    tokens = TokenizerPool(config.tokenizer_workers)
    with contextlib.closing(tokens):
        async with opened(config, tokens) as router:
            logging.getLogger("medha.router").info(
                "serving", extra={"fields": {"url": router.url, "fleet": router.fleet_address}}
            )
            collect_seldom(COLLECT_AFTER)
            await router.serve()


def memory_limit_bytes(config: RouterConfig) -> int:
    """Return the limit for this process and its tokenizers: the setting, else the container's.

    Processes behind one port have equal parts. 0 without a limit.
    """
    limit_bytes = config.memory_limit_bytes or container_limit_bytes() or 0
    return limit_bytes // (len(config.process.fleet_ports) if config.process is not None else 1)


def most_connections() -> int:
    """Return how many connections clients may have: files are left for the ops port, controllers
    and tokenizers, or clients that send nothing could make a router fail its probes."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return files - min(OTHER_FILES, files // 4)


async def _watch(gate: MemoryGate, busy: Callable[[], bool]) -> None:
    log, measures = logging.getLogger("medha.router"), True
    while True:
        try:
            used_bytes = resident_bytes()
        except OSError as error:  # no file is left to open: the gate stays as it is
            if measures:
                log.error("memory is not measured: %s", error)
            measures = False
        else:
            measures = True
            if gate.observe(used_bytes, busy=busy()):
                fields = {"used_bytes": used_bytes, "limit_bytes": gate.limit_bytes}
                short = "memory is short: refusing new requests"
                log.warning(short if gate.refuses else "memory suffices", extra={"fields": fields})
        await asyncio.sleep(MEMORY_S)


def _salt_secret(config: RouterConfig) -> bytes:
    """Return the secret behind the names of cached pages: the same for all routers of a fleet.

    Routers of a fleet have the same CURVE key. A router without one is alone, but for the processes
    of the same parent.
    """
    if config.curve is not None:
        return hashlib.blake2b(read_key(config.curve.secret), person=b"medha-salt").digest()
    if config.process is not None:
        return pathlib.Path(config.process.salt_secret).read_bytes()
    return secrets.token_bytes(32)


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    """Open the public port; `shared` with the other processes of the router."""
    try:
        return listening(host, port, backlog=BACKLOG, shared=shared)
    except OSError as error:
        raise SetupError(
            f"port {host}:{port} cannot be opened ({error.strerror}): free it or choose another"
        ) from None
