"""A rank of a replica: python -m medha_worker.rank --config FILE --group G --stage S --shard T

    link     receives from the controller and sends beats; never computes
    main     loads weights, waits for the group's wiring, then runs commands in order
    mover    reads and serves KV pages in the background

A rank whose controller is silent or was replaced rejoins: it keeps its weights and the memory of
its pages, drops everything else, and sends Hello again.

Exit status: 0 after Leave or SIGTERM; 1 after RankFailed; 2 if a person must fix something
(checkpoint, setting, machine), with one line that names it.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import functools
import logging
import os
import pathlib
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, MutableMapping

import msgspec
import torch

from medha.adapters.logs import start_logs
from medha.adapters.memory import collect_seldom
from medha.adapters.transports import STAGING_BYTES, raise_lock_limit, rdma_ports, transports
from medha.config import WorkerConfig, read
from medha.errors import MedhaError, UserError
from medha.messages import (
    Dissolve,
    FetchPages,
    Forget,
    Form,
    Formed,
    Leave,
    Loading,
    OfferPages,
    Peer,
    RankFailed,
    RankReady,
    Step,
    Withdraw,
)
from medha.topology import Coordinate
from medha_worker import sampler
from medha_worker.device import ComputeDevice, device_of
from medha_worker.engine import RankEngine
from medha_worker.kv.page_mover import PageMover, not_fetched, refused
from medha_worker.kv.transfer import MemoryTransfer, MemoryWorld, Transfer
from medha_worker.parallel.mesh import Mesh, Wiring, serve_store
from medha_worker.rank_link import ImmediateCommand, OrderedCommand, RankLink
from medha_worker.runner import LaunchedBatch, Runner, Sample, kind_of

_LOG = logging.getLogger("medha.rank")
# Least interval between progress reports while loading.
_PROGRESS_INTERVAL_S = 0.2
# Batches that may be launched behind one that is not reported yet.
MAX_OVERLAPPED = 1
# New objects between two garbage collections.
COLLECT_AFTER = 20_000
# Between two polls of a busy device.
_POLL_S = 20e-6


class RankPlace(msgspec.Struct, frozen=True):
    """Facts of a rank's process that outlive a membership.

    `store`: address of the rendezvous store that it serves, if any; `ready_file`: created once the
    rank is ready.
    """

    config: WorkerConfig
    at: Coordinate
    sample: Sample
    device: ComputeDevice
    store: str = ""
    ready_file: pathlib.Path | None = None


class Membership:
    """A rank from its Hello until it leaves; `serve` returns the exit status, None to rejoin.

    `engine`: that of the membership before; `serve` loads it if there is none.
    """

    def __init__(self, place: RankPlace, engine: RankEngine | None = None) -> None:
        config, at, device = place.config, place.at, place.device
        self.at, self._config, self._sample, self._device = at, config, place.sample, device
        self._ready_file, self.engine = place.ready_file, engine
        self._incarnation = uuid.uuid4().hex
        self._mesh = Mesh(
            at,
            config.topology,
            incarnation=self._incarnation,
            interface=config.interface,
            timeout_s=config.collective_timeout_s,
            device=None if device.at.type == "cpu" else device,
        )
        self._wiring: concurrent.futures.Future[Wiring] = concurrent.futures.Future()
        self._status: int | None = 0
        self._mover: PageMover | None = None
        self._early: list[Peer | Forget] = []
        self._lock = threading.Lock()
        self._link = RankLink(
            config.rank_bind,
            at,
            self._incarnation,
            self._act_now,
            timeout_s=config.rank_timeout_s,
            store=place.store,
            rejoins=engine is not None,
            curve=config.rank_curve,
        )

    def serve(self) -> int | None:
        """Load, wire and run until the rank must leave."""
        self._link.start()
        try:
            engine = self.engine = self.engine or RankEngine(
                self._config, self.at, self._device, self._progress()
            )
            self._link.loaded()
            groups = self._config.topology.kvp_max
            transfer = _transfer(self.at, self._incarnation, engine, groups, self._device)
            mover = self._start_mover(engine, transfer)
            wiring = self._wired()
            if wiring is not None:
                runner = engine.runner(wiring, self._mesh, self._sample)
                collect_seldom(COLLECT_AFTER)
                self._link.post(self._ready(engine))
                _LOG.info("ready for batches")
                if self._ready_file is not None:
                    self._ready_file.touch()
                self._run(runner, mover)
            self._disconnect(mover)
        except UserError as error:
            self._fail("model", error)
            return 2
        except Exception as error:  # a library's, too: the controller must learn of it
            self._fail(kind_of(error), error)
            return 1
        finally:
            self._link.close()
        return self._status

    def _run(self, runner: Runner, mover: PageMover) -> None:
        """Run commands in order, with at most one batch launched behind an unreported one.

        If another step waits already, its receive is posted before the current one runs.
        """
        commands = self._link.commands
        following: OrderedCommand | None = None
        in_flight: collections.deque[LaunchedBatch] = collections.deque()
        while True:
            if following is None:
                self._drain(runner, in_flight)
            command = commands.get() if following is None else following
            following = None if commands.empty() else commands.get()
            if not isinstance(command, Step) or runner.needs_host_tokens(command):
                self._drain(runner, in_flight, to_the_end=True)
            match command:
                case Step():
                    if isinstance(following, Step):
                        runner.expect(command)
                        runner.expect(following)
                    in_flight.append(runner.begin(command))
                    while in_flight and (len(in_flight) > MAX_OVERLAPPED or in_flight[0].ready):
                        self._report(runner, in_flight)
                case OfferPages():
                    self._offer(runner, mover, command)
                case FetchPages():
                    self._fetch(runner, mover, command)
                case Withdraw():
                    withdrawn = runner.withdraw(command.move, time.monotonic())
                    mover.withdraw(command.move)
                    mover.cancel(command.move)
                    if withdrawn is not None:
                        self._link.post(withdrawn)
                case Leave():
                    self._note(command)
                    return

    def _note(self, leave: Leave) -> None:
        _LOG.info("%s: %s", "rejoining" if leave.rejoin else "leaving", leave.reason)
        if leave.rejoin and self._status == 0:
            self._status = None

    def _disconnect(self, mover: PageMover) -> None:
        """End all exchange with peers; if a transfer does not end, the pages are not used again."""
        self._mesh.close()
        self._wiring.add_done_callback(_abort)
        if not mover.stop() and self._status is None:
            self._status = 1

    def _drain(
        self, runner: Runner, in_flight: collections.deque[LaunchedBatch], to_the_end: bool = False
    ) -> None:
        """Report batches as they finish, until none is left or another command arrives."""
        while in_flight:
            if in_flight[0].ready or to_the_end:
                self._report(runner, in_flight)
            elif self._link.commands.empty():
                time.sleep(_POLL_S)
            else:
                return

    def _report(self, runner: Runner, in_flight: collections.deque[LaunchedBatch]) -> None:
        for report in runner.finish(in_flight.popleft()):
            self._link.post(report)

    def _offer(self, runner: Runner, mover: PageMover, order: OfferPages) -> None:
        try:
            lease = runner.offer(order, time.monotonic())
        except MedhaError as error:
            self._link.post(refused(order.move.id, error))
        else:
            mover.offer(lease)

    def _fetch(self, runner: Runner, mover: PageMover, order: FetchPages) -> None:
        try:
            runner.reserve(order)
        except MedhaError as error:
            self._link.post(not_fetched(order.move.id, error))
        else:
            mover.fetch(order)

    # --- on the link's thread -------------------------------------------------------------------

    def _act_now(self, message: ImmediateCommand) -> None:
        match message:
            case Form(generation=0):
                threading.Thread(
                    target=self._wire, args=(message,), name="wire", daemon=True
                ).start()
            case Form():
                self._mesh.form(message, lambda n, error: self._link.post(Formed(n, error[:4096])))
            case Dissolve():
                self._mesh.dissolve(message.generation)
            case Peer() | Forget():
                with self._lock:
                    if self._mover is None:
                        self._early.append(message)
                    else:
                        _introduce(self._mover, message)

    def _wire(self, form: Form) -> None:
        """Form the group's own wiring, once: a second request is another controller's."""
        if self._wiring.done():
            self._link.commands.put(Leave("another controller wires this group", rejoin=True))
            return
        try:
            self._wiring.set_result(self._mesh.wire(form))
        except (MedhaError, concurrent.futures.InvalidStateError) as error:
            self._wiring.set_exception(error)

    # --- before the first step ------------------------------------------------------------------

    def _wired(self) -> Wiring | None:
        """Wait for the wiring; None after an order to leave."""
        while True:
            try:
                return self._wiring.result(timeout=0.1)
            except concurrent.futures.TimeoutError:
                if not self._link.commands.empty():
                    command = self._link.commands.get()
                    if isinstance(command, Leave):
                        self._note(command)
                        return None

    def _start_mover(self, engine: RankEngine, transfer: Transfer) -> PageMover:
        self._transfer = transfer
        mover = PageMover(
            transfer,
            engine.kv,
            engine.copies,
            self._link.post,
            self._mover_failed,
            checked=self._config.checked_transfers,
        )
        mover.start()
        with self._lock:
            self._mover = mover
            for message in self._early:
                _introduce(mover, message)
        return mover

    def _ready(self, engine: RankEngine) -> RankReady:
        return RankReady(
            pages=engine.kv.pages,
            page_bytes=engine.kv.page_bytes,
            agent=self._transfer.agent,
            metadata=self._transfer.metadata,
            bases=engine.kv.bases,
        )

    def _progress(self) -> Callable[[int, int], None]:
        reported_s = 0.0

        def report(done_bytes: int, total_bytes: int) -> None:
            nonlocal reported_s
            now = time.monotonic()
            if now - reported_s >= _PROGRESS_INTERVAL_S or done_bytes == total_bytes:
                reported_s = now
                self._link.post(Loading(done_bytes, total_bytes))

        return report

    def _mover_failed(self, error: Exception) -> None:
        """Stop the rank (called on the mover's thread): without a mover it must be restarted."""
        self._status = 1
        self._fail("internal", error)
        self._link.commands.put(Leave("the mover failed"))

    def _fail(self, kind: str, error: Exception) -> None:
        _LOG.error("%s failed (%s): %s", self.at, kind, error)
        self._link.post(RankFailed(kind, str(error)[:4096]))


def _abort(wiring: concurrent.futures.Future[Wiring]) -> None:
    if wiring.exception() is None:
        wiring.result().abort()


def _introduce(mover: PageMover, message: Peer | Forget) -> None:
    if isinstance(message, Peer):
        mover.connect(message)
    else:
        mover.forget(message.group)


def _transfer(
    at: Coordinate, incarnation: str, engine: RankEngine, groups: int, device: ComputeDevice
) -> Transfer:
    """Return NIXL where there are groups to read from; ranks of a single group need no agent."""
    name = f"{at}-{incarnation[:12]}"
    if groups == 1:
        return MemoryTransfer(name, engine.kv, MemoryWorld())
    # UCX reads its settings from the environment when it is loaded.
    from medha_worker.kv.nixl_transfer import NixlTransfer

    return NixlTransfer(name, engine.kv, device.at.index)


def set_environment(environment: MutableMapping[str, str], config: WorkerConfig) -> None:
    """Set defaults for UCX, NIXL, NCCL, cuBLAS and torch, unless the environment has them.

    A deterministic GPU gives cuBLAS no workspace for split sums. On a CPU torch allocates huge
    pages, which the kernel clears five times as fast. Raises SpecError or SetupError for a network
    that this machine lacks.
    """
    if config.device == "cpu":
        environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if config.deterministic and config.device == "cuda":
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        environment.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")
    locked = config.kv_bytes if config.device == "cpu" else STAGING_BYTES
    chosen = transports(config.network, config.interface, config.device, rdma_ports(locked))
    for name, value in chosen.environment().items():
        environment.setdefault(name, value)
    if chosen.rdma:
        raise_lock_limit()
    _LOG.info("%s", "; ".join(chosen.sentences()))


def run(
    config: WorkerConfig,
    at: Coordinate,
    sample: Sample | None = None,
    ready_file: pathlib.Path | None = None,
) -> int:
    """Run rank `at` of `config`'s replica; return the exit status."""
    torch.set_num_threads(config.threads_per_rank)
    blocked = config.deterministic and config.device == "cuda"
    set_environment(os.environ, config)
    device = device_of(config.device, blocked)
    if sample is None:
        sample = functools.partial(sampler.draw, alone=blocked)
    store, address = None, ""
    if at.stage == at.shard == 0:
        store, address = serve_store(config.store_bind)
    place = RankPlace(config, at, sample, device, address, ready_file)
    membership = Membership(place)
    while (status := membership.serve()) is None:
        if membership.engine is not None:
            membership.engine.renew()
        membership = Membership(place, membership.engine)
    del store  # it serves as long as a reference exists
    return status


def _arguments(environment: Mapping[str, str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m medha_worker.rank", description=__doc__)
    parser.add_argument("--config", type=pathlib.Path, required=True)
    for name, variable in (
        ("group", "MEDHA_KVP_GROUP"),
        ("stage", "MEDHA_SPP_STAGE"),
        ("shard", "MEDHA_TP_SHARD"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=int(environment.get(variable, "0")), help=f"${variable}"
        )
    parser.add_argument(
        "--ready-file", type=pathlib.Path, help="created once the rank is loaded and wired"
    )
    return parser.parse_args()


def main() -> None:
    arguments = _arguments(os.environ)
    at = Coordinate(arguments.group, arguments.stage, arguments.shard)
    try:
        config = read(WorkerConfig, arguments.config)
        start_logs(f"rank {at}", config.log_level)
        _LOG.info("imports done")
        status = run(config, at, ready_file=arguments.ready_file)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        status = 2
    # Threads blocked on a lost peer must not keep the process alive.
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
