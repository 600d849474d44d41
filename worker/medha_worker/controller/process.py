"""The controller's process: sockets, files, time and the ops port around the sans-I/O Controller.

    ranks ── ZeroMQ ──> Listener ┐                      ┌─> Listener ──> ranks
    routers ── ZeroMQ ─> Dialers ┴─> Controller.on_tick ┴─> Dialers ──> routers
    ops port: GET /status, /healthz, /readyz, /metrics, POST /drain (its own threads; snapshots)

One thread owns sockets and controller. One tick follows each burst of messages; without messages it
ticks every few milliseconds while requests wait, else twenty times a second.
"""

from __future__ import annotations

import hashlib
import logging
import pathlib
import threading
import time
import uuid
from collections.abc import Callable

import msgspec

from medha.adapters.prometheus import Metrics, OpsServer, Reply, Tick, json_reply, read_token
from medha.adapters.sockets import Dialer, Listener, wait
from medha.checkpoints.checkpoint_files import check_tokenizer, digest_of
from medha.checkpoints.decoder_config import read_config, read_generation_defaults
from medha.checkpoints.fit import adapted_shape, kv_bytes, packed_bytes, param_bytes, read_adapters
from medha.checkpoints.lora import Lora, digest_of_adapter, read_template
from medha.config import WorkerConfig
from medha.errors import SpecError
from medha.messages import (
    Codec,
    RankCommand,
    RankReport,
    ReplicaMessage,
    ReplicaStatus,
    RouterMessage,
    RouterPorts,
)
from medha.model import ModelShape
from medha.predictor import Predictor
from medha.profile import Profile, decode, encode, read
from medha.scheduling.decision_log import RecordingScheduler
from medha.scheduling.interface import SchedulerInterface
from medha.scheduling.scheduler import Scheduler
from medha.topology import Coordinate
from medha_worker.controller.controller import Controller
from medha_worker.controller.outbox import Outgoing, Redial, ToRanks, ToRouter
from medha_worker.controller.resolver import RouterResolver, is_literal
from medha_worker.controller.startup import Identity, MakeScheduler

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
ADAPTER_TEMPLATES = "adapter_templates.json"
BURST = 256
BUSY_TICK_S, IDLE_TICK_S = 0.005, 0.05
STATUS_S = 0.1
FAREWELL_S = 0.1  # closing a socket discards unsent messages: wait until the last are sent

log = logging.getLogger("medha.controller")

RouterLink = Dialer[ReplicaMessage, RouterMessage]
RankLinks = Listener[RankCommand, RankReport]


def identity_of(config: WorkerConfig) -> Identity:
    """Read checkpoint and profile for Hello; raises CheckpointError or SpecError.

    Without a given profile, that of an earlier controller of this run is used.
    """
    folder = pathlib.Path(config.checkpoint)
    model = read_config(folder)
    check_tokenizer(folder)
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    shape = model.shape(
        param_bytes(config),
        kv_bytes(config),
        config.max_context_tokens,
        packed_bytes(model, config),
    )
    adapters = read_adapters(model, config)
    if templates := _templates_of(adapters, read_template(folder)):
        files[ADAPTER_TEMPLATES] = msgspec.json.encode(templates)
    return Identity(
        incarnation=uuid.uuid4().hex,
        shape=adapted_shape(shape, model, adapters.values()),
        files=files,
        hashes={
            name: hashlib.blake2b(data, digest_size=16).hexdigest() for name, data in files.items()
        },
        checkpoint="dummy" if config.dummy_weights else digest_of(folder),
        adapters={
            name: digest_of_adapter(pathlib.Path(lora.folder)) for name, lora in adapters.items()
        },
        stop_tokens=model.stop_tokens,
        defaults=read_generation_defaults(folder),
        profile=read_profile(config.profile) or _kept_profile(config),
    )


def _templates_of(adapters: dict[str, Lora], own: str) -> dict[str, str]:
    """Return the chat templates of adapters by name, without those that are the model's own."""
    templates = {name: lora.template for name, lora in adapters.items()}
    return {name: text for name, text in templates.items() if text not in ("", own)}


def read_profile(path: str) -> Profile | None:
    """Read the profile of a file; None without a path. Raises SpecError."""
    return read(pathlib.Path(path)) if path else None


def _kept_profile(config: WorkerConfig) -> Profile | None:
    """Read the profile that an earlier controller of this run measured, if any."""
    kept = _place_of_profile(config)
    if kept is None or not kept.exists():
        return None
    try:
        return decode(kept.read_bytes(), str(kept))
    except (OSError, SpecError) as error:  # it may have been killed while it wrote
        log.warning("the kept profile is measured again: %s", error)
        return None


def keep_profile(config: WorkerConfig, profile: Profile) -> None:
    """Keep a measured profile for later controllers of this run."""
    place = _place_of_profile(config)
    if place is None or config.profile or place.exists():
        return
    try:
        written = place.with_suffix(".new")
        written.write_bytes(encode(profile))
        written.replace(place)
    except OSError as error:
        log.warning("the profile is not kept for a restart: %s", error)


def _place_of_profile(config: WorkerConfig) -> pathlib.Path | None:
    folder = config.run_dir
    return pathlib.Path(folder, f"{config.replica}.profile.json") if folder else None


def scheduler_maker(
    config: WorkerConfig, shape: ModelShape, decisions: Callable[[bytes], object] | None
) -> MakeScheduler:
    """Return the function that creates the scheduler; `decisions` takes its log's lines."""

    def make(profile: Profile, pages: int) -> tuple[SchedulerInterface, Predictor]:
        settings = config.scheduling
        keep_profile(config, profile)
        predictor = Predictor(profile, shape, config.topology, settings.max_batch_s)
        scheduler = Scheduler(
            config.topology,
            shape,
            predictor,
            settings,
            pages,
            config.page_tokens,
            config.max_context_tokens,
            config.classes,
        )
        if decisions is None:
            return scheduler, predictor
        return RecordingScheduler(scheduler, decisions), predictor

    return make


class ModelMetrics:
    """Metrics of one model: puts its name before the other labels."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics, self._model = metrics, model

    def add(self, name: str, amount: float, *labels: str) -> None:
        self._metrics.add(name, amount, self._model, *labels)

    def set(self, name: str, value: float, *labels: str) -> None:
        self._metrics.set(name, value, self._model, *labels)

    def observe(self, name: str, value: float, *labels: str) -> None:
        self._metrics.observe(name, value, self._model, *labels)


class ControllerProcess:
    """Sockets and ops port of one controller; `run` blocks until `leave`."""

    def __init__(self, config: WorkerConfig, controller: Controller, metrics: Metrics) -> None:
        self._config, self._controller, self._metrics = config, controller, metrics
        self._reports: Codec[RankReport] = Codec(RankReport)
        self._ranks: RankLinks = Listener(
            config.rank_bind,
            sends=Codec(RankCommand),
            receives=self._reports,
            curve=config.listening_curve(),
        )
        self._resolver = RouterResolver(config.routers)
        fixed = [router for router in config.routers if is_literal(router)]
        self._routers = {router: self._dial(router) for router in fixed}
        self._tick = Tick()
        self._status: ReplicaStatus | None = None
        self._status_s = float("-inf")
        self._stopping = threading.Event()
        self._draining = threading.Event()
        self._leaving = threading.Event()
        self._ops = OpsServer(
            config.ops_host,
            config.ops_port,
            metrics,
            alive=self._tick.alive,
            ready=lambda: self._status is not None and self._status.ready,
            routes={"GET /status": self._show_status, "POST /drain": self._drain},
            token=read_token(config.ops_token) if config.ops_token else b"",
        )

    @property
    def ops_port(self) -> int:
        return self._ops.port

    def _dial(self, router: str) -> RouterLink:
        identity = f"{self._config.replica}-{self._controller.identity.incarnation[:12]}"
        return Dialer(
            router,
            identity.encode(),
            sends=Codec(ReplicaMessage),
            receives=Codec(RouterMessage),
            curve=self._config.curve,
        )

    # --- ops port (its own threads) -----------------------------------------------------------

    def _show_status(self) -> Reply:
        return json_reply(self._status) if self._status else Reply(b"starting\n", 503)

    def _drain(self) -> Reply:
        self._draining.set()
        self._ranks.wake()
        return Reply(b"draining\n", 202)

    def leave(self) -> None:
        """End `run` once running requests finish; the second call ends it at once. Signal-safe."""
        if self._leaving.is_set():
            self._stopping.set()
        self._leaving.set()
        self._draining.set()
        self._ranks.wake()

    # --- the loop -----------------------------------------------------------------------------

    def run(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Serve until `leave`."""
        self._resolver.start()
        try:
            while not self._stopping.is_set():
                wait([self._ranks, *self._routers.values()], self._patience_s())
                now = clock()
                self._update_routers(self._resolver.take(), now)
                if self._draining.is_set():
                    self._controller.drain()
                self._receive(now)
                for item in self._controller.on_tick(now):
                    self._send(item)
                if now - self._status_s >= STATUS_S:
                    self._status, self._status_s = self._controller.status(now), now
                    self._count_rejected()
                self._tick()
                if self._leaving.is_set() and self._controller.drained:
                    break
            for item in self._controller.on_stop(clock()):
                self._send(item)
            time.sleep(FAREWELL_S)
        finally:
            self.close()

    def _update_routers(self, routers: tuple[str, ...] | None, now: float) -> None:
        """Dial the routers of a newly resolved list, and close links to those that disappeared."""
        if routers is None or set(routers) == set(self._routers):
            return
        self._controller.set_routers(routers, now)
        for router in set(self._routers) - set(routers):
            self._routers.pop(router).close()
        for router in set(routers) - set(self._routers):
            self._routers[router] = self._dial(router)

    def close(self) -> None:
        self._resolver.close()
        for link in self._routers.values():
            link.close()
        self._ranks.close()
        self._ops.close()

    def _count_rejected(self) -> None:
        links: list[tuple[str, RankLinks | RouterLink]] = [("rank", self._ranks)]
        links += [("router", link) for link in self._routers.values()]
        for peer, link in links:
            self._metrics.add("medha_messages_rejected_total", link.rejected, peer)
            link.rejected = 0

    def _patience_s(self) -> float:
        return BUSY_TICK_S if self._controller.busy else IDLE_TICK_S

    def _receive(self, now: float) -> None:
        """Pass received messages to the controller, ranks first, a bounded number of each."""
        for _ in range(BURST):
            report = self._ranks.receive()
            if report is None:
                break
            at = coordinate_of(report[0])
            if at is not None:
                self._controller.on_rank(at, report[1], now)
        for peer in self._ranks.closed():
            if (at := coordinate_of(peer)) is not None:
                self._controller.on_disconnect(at, now)
        for router, link in self._routers.items():
            for _ in range(BURST):
                message = link.receive()
                if message is None:
                    break
                if isinstance(message, RouterPorts):
                    self._resolver.learn(router, message.ports)
                else:
                    self._controller.on_router(router, message, now)

    def _send(self, item: Outgoing) -> None:
        match item:
            case ToRanks(ranks, message):
                self._ranks.send_all([str(at).encode() for at in ranks], message)
            case ToRouter(router, answer) if router in self._routers:
                self._routers[router].send(answer)
            case Redial(router):
                self._routers[router].close()
                self._routers[router] = self._dial(router)


def coordinate_of(peer: bytes) -> Coordinate | None:
    """Rank of a socket identity such as `g0-s1-t0`; None if it names no rank."""
    parts = peer.decode("ascii", "replace").split("-")
    tags = [part[:1] for part in parts]
    numbers = [part[1:] for part in parts]
    if tags != ["g", "s", "t"] or not all(n.isdecimal() and len(n) < 6 for n in numbers):
        return None
    return Coordinate(*map(int, numbers))
