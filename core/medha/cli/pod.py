"""`medha pod`: one pod of a replica. Its ranks, and in the leader pod the controller as well.

Starts them, restarts what dies, later each time, and gives up when that does not help. The ops port
tells the kubelet how it is; everything that concerns more than this pod is decided elsewhere: by
the controller (who takes part) and by the operator (which pods there are).

    /livez    this program turns
    /readyz   the ranks are loaded and wired; in the leader pod also: the base groups run, and a
              router took the replica in

SIGTERM: the leader pod takes nothing new and finishes what runs; the others serve on as long as
their leader drains; when that is done, or the grace is over, all ends. Exit status 0 after SIGTERM,
1 when a program was given up, 2 when a person must mend something.
"""

from __future__ import annotations

import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping

import msgspec

from medha.adapters.logs import start_logs
from medha.adapters.prometheus import Metrics, OpsServer, Tick
from medha.cli.children import Child, Launch
from medha.cli.leader import Leader
from medha.cli.plan import RankPlan
from medha.cli.pod_place import Place, read_place
from medha.cli.programs import controller_launch, rank_launch
from medha.cli.supervise import Patience, State, Supervisor, Unit
from medha.cli.up import Signals, end
from medha.config import POD_OPS_PORT, WorkerConfig, read, render
from medha.errors import EngineError, MedhaError

STEP_S = 0.05
LAST_WORDS = 4000
NOTICE_S = 3.0
"""All pods of a replica are told to end at about the same time: so long the others wait to hear
that their leader drains."""
DRAINED_S = 1.0
"""So long after the word to drain, what routers had sent before it has arrived."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`config` is the replica's WorkerConfig; `environ` says which pod this is; in `last_words`
    the kubelet looks for why a container ended."""

    config: pathlib.Path
    environ: Mapping[str, str]
    last_words: pathlib.Path
    ops_port: int = POD_OPS_PORT
    patience: Patience = Patience()


def pod(options: Options) -> None:
    """Be that pod until SIGTERM. Raises UserError or EngineError when it cannot go on."""
    try:
        _pod(options)
    except MedhaError as error:
        if options.last_words.exists():
            options.last_words.write_text(str(error)[:LAST_WORDS])
        raise


def _pod(options: Options) -> None:
    with Signals() as signals:
        shared = read(WorkerConfig, options.config)
        start_logs(f"{shared.replica}-pod", shared.log_level)
        place = read_place(options.environ, shared)
        folder = pathlib.Path(tempfile.mkdtemp(prefix="medha-pod-", dir=shared.run_dir or None))
        try:
            programs = Programs(place, place.of_this_pod(shared, str(folder)), options.environ)
            Pod(programs, options).run(signals)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class Programs:
    """What runs in this pod, and how it is started; writes the config that they decode."""

    def __init__(self, place: Place, config: WorkerConfig, environ: Mapping[str, str]) -> None:
        self.place, self.config = place, config
        self._folder = pathlib.Path(config.run_dir)
        self._file = self._folder / "worker.json"
        self._file.write_bytes(render(config))
        self._transports = {} if "UCX_TLS" in environ or config.device != "cpu" else PLAIN

    def controller(self) -> Launch:
        return controller_launch(self.config.replica, self._file)

    def ranks(self, generation: int) -> Iterable[Launch]:
        """One rank per shard; those of earlier generations are ready no more."""
        for stale in self._folder.glob("ready-*"):
            stale.unlink()
        for at in self.place.ranks(self.config):
            gpu = at.shard if self.config.device == "cuda" else None
            launch = rank_launch(
                self.config, RankPlan(at=at, gpu=gpu), self._file, generation,
                ready_file=self._folder / f"ready-{at.shard}",
            )  # fmt: skip
            yield msgspec.structs.replace(launch, env={**self._transports, **launch.env})

    @property
    def loaded(self) -> bool:
        """Every rank has said that it is ready."""
        return len(list(self._folder.glob("ready-*"))) == self.config.topology.tp


PLAIN = {"UCX_TLS": "tcp,self"}
"""Ranks that exchange pages are in different pods: no memory is shared between them."""


class Pod:
    """The programs of one pod under supervision, its ops port, and its view of the controller."""

    def __init__(self, programs: Programs, options: Options) -> None:
        self._programs, self._place, config = programs, programs.place, programs.config
        place = self._place
        name = f"{config.replica}-g{place.group}-s{place.stage}"
        controller = (
            Unit(f"{config.replica}-controller", lambda _: [programs.controller()])
            if place.leads
            else None
        )
        self._ranks = Unit(
            name, programs.ranks, vital=place.group < config.topology.kvp_min, follows=controller
        )
        self._units = (self._ranks,) if controller is None else (controller, self._ranks)
        self._supervisor = Supervisor(
            self._units, (), lambda launch: Child(launch, say), options.patience
        )
        self._metrics, self._tick = Metrics("pod"), Tick()
        self._begun = dict.fromkeys(self._units, 0)
        for unit in self._units:
            self._metrics.add("medha_pod_restarts_total", 0, self._kind(unit))
        self._ready = False
        self._ops = OpsServer(
            place.address, options.ops_port, self._metrics, alive=self._tick.alive,
            ready=lambda: self._ready,
        )  # fmt: skip
        self._leader = Leader(place.controller_url)
        if place.leads:
            self._leader.ask()

    def run(self, signals: Signals) -> None:
        """Serve until a signal, let what runs finish, and end everything that was started."""
        try:
            while not signals.count:
                self._turn()
                self._return()
            self._drain(signals)
        finally:
            end(self._supervisor, signals)
            self._leader.close()
            self._ops.close()

    def _turn(self) -> None:
        self._supervisor.step(time.monotonic())
        for unit in self._units:
            if unit.generation > self._begun[unit]:
                if self._begun[unit]:
                    self._metrics.add("medha_pod_restarts_total", 1, self._kind(unit))
                self._begun[unit] = unit.generation
            if unit.state is State.GIVEN_UP:
                raise EngineError(f"{unit.name} is given up: see what its programs said last")
        self._ready = self._is_ready()
        self._tick()
        time.sleep(STEP_S)

    def _kind(self, unit: Unit) -> str:
        return "ranks" if unit is self._ranks else "controller"

    def _is_ready(self) -> bool:
        if self._ranks.state is not State.RUNNING or not self._programs.loaded:
            return False
        if not self._place.leads:
            return True
        status, least = self._leader.status, self._programs.config.topology.kvp_min
        return (
            status is not None
            and status.ready
            and status.routers > 0
            and all(group.state == "running" for group in status.groups[:least])
        )

    def _return(self) -> None:
        """A group beyond the base whose ranks were told to leave stays out, until it is wanted
        again: because its controller lost it, or because the replica grows once more."""
        if self._ranks.wanted:
            return
        self._leader.ask()
        status, group = self._leader.status, self._place.group
        if status and (group < status.wanted_groups or group in status.restart_groups):
            self._ranks.wanted = True
            self._leader.rest()

    def _drain(self, signals: Signals) -> None:
        """Until nothing runs here, the grace is over, or a second signal cuts it short."""
        began_s = time.monotonic()
        if self._place.leads:
            self._leader.drain()
        else:
            self._leader.ask()
        while signals.count < 2 and time.monotonic() - began_s < self._place.grace_s:
            served_s = time.monotonic() - began_s
            if self._idle(served_s) if self._place.leads else self._unneeded(served_s):
                return
            self._turn()

    def _idle(self, served_s: float) -> bool:
        """The leader: everything is finished, or there is no controller that would."""
        status = self._leader.status
        if not self._leader.told_to_drain or status is None:
            return served_s > NOTICE_S
        return served_s > DRAINED_S and not status.running and not status.waiting

    def _unneeded(self, served_s: float) -> bool:
        """The others: the ranks have left, or the leader does not drain."""
        if self._ranks.state is not State.RUNNING or not self._programs.loaded:
            return True
        status = self._leader.status
        return served_s > NOTICE_S and (status is None or not status.draining)


def say(process: str, line: str) -> None:
    """Pass a program's line on; log lines name their process themselves."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
