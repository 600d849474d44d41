"""`medha pod`: run one pod of a replica: its ranks, and in the leader pod the controller.

Restarts processes with back-off and gives up when the restart budget is exhausted. The controller
decides which ranks take part; the operator decides which pods exist. Probes of the ops port:

    /livez    the main loop runs
    /readyz   the ranks are loaded and connected; in the leader pod also: the base groups run, and
              a router registered the replica

SIGTERM: the leader pod drains; other pods serve until the leader has drained; then, or after the
grace period, all processes stop. Exit status 0 after SIGTERM, 1 if a unit was given up, 2 if the
user must fix something.
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
from medha.cli.local_fleet.child_process import ChildProcess, Launch
from medha.cli.local_fleet.fleet_plan import RankPlan
from medha.cli.local_fleet.launches import controller_launch, rank_launch
from medha.cli.local_fleet.pod_identity import PodIdentity, read_pod_identity
from medha.cli.local_fleet.status_poll import ControllerPoll
from medha.cli.local_fleet.stopping import StopSignals, stop_all
from medha.cli.local_fleet.supervisor import Supervisor, SupervisorSettings, Unit, UnitState
from medha.config import POD_OPS_PORT, WorkerConfig, read, render
from medha.errors import EngineError, MedhaError

STEP_S = 0.05
LAST_WORDS_CHARACTERS = 4000
LEADER_DRAIN_WAIT_S = 3.0
"""Time in which other pods wait for their leader to report draining; all get SIGTERM together."""
IN_FLIGHT_S = 1.0
"""Time after the drain request in which requests that routers sent before it still arrive."""


class PodOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `medha pod`. `config`: the replica's WorkerConfig; `environ`: identifies the pod;
    `last_words`: file in which the kubelet finds the reason of an exit."""

    config: pathlib.Path
    environ: Mapping[str, str]
    last_words: pathlib.Path
    ops_port: int = POD_OPS_PORT
    supervision: SupervisorSettings = SupervisorSettings()


def pod(options: PodOptions) -> None:
    """Run the pod until SIGTERM. Raises UserError or EngineError if it cannot continue."""
    try:
        _pod(options)
    except MedhaError as error:
        if options.last_words.exists():
            options.last_words.write_text(str(error)[:LAST_WORDS_CHARACTERS])
        raise


def _pod(options: PodOptions) -> None:
    with StopSignals() as signals:
        shared = read(WorkerConfig, options.config)
        start_logs(f"{shared.replica}-pod", shared.log_level)
        identity = read_pod_identity(options.environ, shared)
        folder = pathlib.Path(tempfile.mkdtemp(prefix="medha-pod-", dir=shared.run_dir or None))
        try:
            config = identity.worker_config(shared, str(folder))
            processes = PodProcesses(identity, config)
            PodSupervisor(processes, options).run(signals)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class PodProcesses:
    """Launches of this pod's processes; writes the config that they decode."""

    def __init__(self, identity: PodIdentity, config: WorkerConfig) -> None:
        self.identity, self.config = identity, config
        self._folder = pathlib.Path(config.run_dir)
        self._file = self._folder / "worker.json"
        self._file.write_bytes(render(config))

    def controller(self) -> Launch:
        return controller_launch(self.config.replica, self._file)

    def ranks(self, generation: int) -> Iterable[Launch]:
        """Launches of the ranks, one per shard."""
        for at in self.identity.ranks(self.config):
            gpu = at.shard if self.config.device == "cuda" else None
            yield rank_launch(
                self.config,
                RankPlan(at=at, gpu=gpu),
                self._file,
                generation,
                ready_file=self._folder / f"ready-{generation}-{at.shard}",
            )

    def loaded(self, generation: int) -> bool:
        """Return whether every rank of a generation has created its ready file."""
        return len(list(self._folder.glob(f"ready-{generation}-*"))) == self.config.topology.tp


class PodSupervisor:
    """Main loop of a pod: supervised processes, ops port and poll of the controller."""

    def __init__(self, processes: PodProcesses, options: PodOptions) -> None:
        self._processes, self._identity = processes, processes.identity
        config, identity = processes.config, self._identity
        name = f"{config.replica}-g{identity.group}-s{identity.stage}"
        self._leader = (
            Unit(f"{config.replica}-controller", lambda _: [processes.controller()])
            if identity.leads
            else None
        )
        self._ranks = Unit(name, processes.ranks, vital=identity.group < config.topology.kvp_min)
        self._units = (self._ranks,) if self._leader is None else (self._leader, self._ranks)
        self._supervisor = Supervisor(
            self._units, (), lambda launch: ChildProcess(launch, forward_line), options.supervision
        )
        self._metrics, self._tick = Metrics("pod"), Tick()
        self._seen_generation = dict.fromkeys(self._units, 0)
        for unit in self._units:
            self._metrics.add("medha_pod_restarts_total", 0, self._kind(unit))
        self._ready = False
        self._ops = OpsServer(
            identity.address,
            options.ops_port,
            self._metrics,
            alive=self._tick.alive,
            ready=lambda: self._ready,
        )
        self._controller = ControllerPoll(identity.controller_url)
        if identity.leads:
            self._controller.start()

    def run(self, signals: StopSignals) -> None:
        """Serve until a signal, drain, and stop all processes."""
        try:
            while not signals.count:
                self._step()
                self._rejoin()
            self._drain(signals)
        finally:
            stop_all(self._supervisor, signals)
            self._controller.close()
            self._ops.close()

    def _step(self) -> None:
        self._supervisor.step(time.monotonic())
        if self._leader is not None:
            self._watch(self._leader, time.monotonic())
        for unit in self._units:
            if unit.generation > self._seen_generation[unit]:
                if self._seen_generation[unit]:
                    self._metrics.add("medha_pod_restarts_total", 1, self._kind(unit))
                self._seen_generation[unit] = unit.generation
            if unit.state is UnitState.GIVEN_UP:
                raise EngineError(
                    f"{unit.name} is given up: see the last log lines of its processes"
                )
        self._ready = self._is_ready()
        self._tick()
        time.sleep(STEP_S)

    def _watch(self, leader: Unit, now: float) -> None:
        """Restart a controller that hangs, and ranks that do not join a restarted one."""
        status, at = self._controller.status, self._identity
        if (answered_s := self._controller.hangs_since_s) is not None:
            self._supervisor.hangs(leader, answered_s, now)
        if status is not None:
            present = status.groups[at.group].ranks
            own = sum(str(rank) in present for rank in at.ranks(self._processes.config))
            self._supervisor.expect_back(self._ranks, leader, own, now)

    def _kind(self, unit: Unit) -> str:
        return "ranks" if unit is self._ranks else "controller"

    @property
    def _loaded(self) -> bool:
        """The ranks run and are loaded."""
        running = self._ranks.state is UnitState.RUNNING
        return running and self._processes.loaded(self._ranks.generation)

    def _is_ready(self) -> bool:
        if not self._loaded:
            return False
        if not self._identity.leads:
            return True
        status, least = self._controller.status, self._processes.config.topology.kvp_min
        return (
            status is not None
            and status.ready
            and status.routers > 0
            and all(group.state == "running" for group in status.groups[:least])
        )

    def _rejoin(self) -> None:
        """Restart the ranks of a released extra group once the controller wants the group again,
        either to replace a lost group or to grow."""
        if self._ranks.wanted:
            return
        self._controller.start()
        status, group = self._controller.status, self._identity.group
        if status and (group < status.wanted_groups or group in status.restart_groups):
            self._ranks.wanted = True
            self._controller.pause()

    def _drain(self, signals: StopSignals) -> None:
        """Step until the pod is idle, the grace period is over, or a second signal arrives."""
        began_s = time.monotonic()
        if self._identity.leads:
            self._controller.drain()
        else:
            self._controller.start()
        while signals.count < 2 and time.monotonic() - began_s < self._identity.grace_s:
            served_s = time.monotonic() - began_s
            if self._idle(served_s) if self._identity.leads else self._unneeded(served_s):
                return
            self._step()

    def _idle(self, served_s: float) -> bool:
        """Leader pod: all requests are finished, or no controller runs."""
        status = self._controller.status
        if not self._controller.drain_accepted or status is None:
            return served_s > LEADER_DRAIN_WAIT_S
        return served_s > IN_FLIGHT_S and not status.running and not status.waiting

    def _unneeded(self, served_s: float) -> bool:
        """Other pods: the ranks have left, or the leader is not draining."""
        if not self._loaded:
            return True
        status = self._controller.status
        return served_s > LEADER_DRAIN_WAIT_S and (status is None or not status.draining)


def forward_line(process: str, line: str) -> None:
    """Write a process's line to stdout; log lines carry the process name already."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
