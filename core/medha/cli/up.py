"""`medha up`: a whole fleet on this machine from the same resource that Kubernetes gets.

Reads, checks, plans, renders, starts, and then watches: it restarts what dies, starts the KVP
groups that a controller wants, and at Ctrl-C or SIGTERM drains for a moment and ends everything
that it started.
"""

from __future__ import annotations

import pathlib
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType

import msgspec
from rich.console import Console

from medha.cli import preflight
from medha.cli.checkpoint import check_checkpoint
from medha.cli.children import Child
from medha.cli.plan import FleetPlan, Place, plan_fleet, replicas_of
from medha.cli.programs import supervisor_of
from medha.cli.resource_file import read_resources
from medha.cli.run_dir import RunDir
from medha.cli.show import Loading, LogStream, placement_table
from medha.cli.supervise import Patience, Supervisor
from medha.cli.watch import Watch
from medha.errors import SetupError
from medha.messages import ReplicaStatus
from medha.spec import MedhaReplica

STEP_S = 0.05
DRAIN_S = 5.0
HOST = "127.0.0.1"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says beside the file. Port 0 takes any that is free."""

    file: pathlib.Path
    port: int = 8000
    ops_port: int = 8001
    run_dir: pathlib.Path | None = None
    policy: str | None = None
    log_level: str = "info"
    quiet: bool = False
    decision_log: bool = False
    dummy_weights: bool = False
    drain_s: float = DRAIN_S


def up(options: Options, console: Console) -> None:
    """Run the fleet until a signal says to end; raises UserError when it cannot be started."""
    resources = with_policy(read_resources(options.file), options.policy)
    checkpoints = check(resources, options)
    run_dir = RunDir.make(options.run_dir)
    try:
        plan = _plan(resources, checkpoints, run_dir, options)
        run_dir.write_configs(plan)
        logs = LogStream(console, run_dir.path, quiet=options.quiet)
        try:
            _run(plan, run_dir, logs, options, console)
        finally:
            logs.close()
    finally:
        run_dir.clean()


def check(resources: Sequence[MedhaReplica], options: Options) -> dict[str, str]:
    """Everything that can be known before a process starts; the checkpoints' folders by name."""
    preflight.check_programs()
    preflight.check_gpus(resources, preflight.gpu_count())
    weights = not options.dummy_weights
    folders = {each.name: str(check_checkpoint(each, weights=weights)) for each in resources}
    preflight.check_shared_memory()
    preflight.check_apart(options.port, options.ops_port)
    preflight.check_port(HOST, options.port, "--port")
    preflight.check_port(HOST, options.ops_port, "--ops-port")
    return folders


def with_policy(resources: Sequence[MedhaReplica], policy: str | None) -> tuple[MedhaReplica, ...]:
    """The resources under another scheduling policy, checked like the file's own."""
    if policy is None:
        return tuple(resources)
    replace = msgspec.structs.replace
    return tuple(
        replace(
            each,
            spec=replace(each.spec, scheduling=replace(each.spec.scheduling, policy=policy)),
        )
        for each in resources
    )


def _plan(
    resources: Sequence[MedhaReplica],
    checkpoints: dict[str, str],
    run_dir: RunDir,
    options: Options,
) -> FleetPlan:
    count = replicas_of(resources)
    any_port, any_ops_port, fleet_port, *ports = preflight.free_ports(HOST, count + 3)
    router_curve, controller_curve = run_dir.write_keys()
    place = Place(
        run_dir=str(run_dir.path),
        host=HOST,
        port=options.port or any_port,
        ops_port=options.ops_port or any_ops_port,
        fleet_address=f"tcp://{HOST}:{fleet_port}",
        controller_ports=tuple(ports),
        checkpoints=checkpoints,
        router_curve=router_curve,
        controller_curve=controller_curve,
        gpus=preflight.gpu_count(),
        log_level=options.log_level,
        decision_log=options.decision_log,
        dummy_weights=options.dummy_weights,
    )
    plan = plan_fleet(resources, place)
    for each in plan.replicas:
        preflight.check_socket_path(each.config.rank_bind)
    return plan


def _run(
    plan: FleetPlan, run_dir: RunDir, logs: LogStream, options: Options, console: Console
) -> None:
    supervisor = supervisor_of(plan, run_dir, lambda launch: Child(launch, logs), Patience())
    watch = Watch(
        f"http://{HOST}:{plan.router.ops_port}",
        {each.name: f"http://{HOST}:{each.config.ops_port}" for each in plan.replicas},
    )
    signals = Signals()
    with signals:
        watch.start()
        try:
            if _load(plan, supervisor, watch, signals, console):
                console.print(placement_table(plan, supervisor))
                console.print(f"Serving on http://{HOST}:{plan.router.port}/v1")
                _serve(supervisor, watch, signals)
                console.print("Ending: what runs may finish for a moment")
                _drain(supervisor, watch, signals, options.drain_s)
        finally:
            end(supervisor, signals)
            watch.close()


def _load(
    plan: FleetPlan, supervisor: Supervisor, watch: Watch, signals: Signals, console: Console
) -> bool:
    """Start everything; True when it serves, False when a signal came first."""
    with Loading(console, plan) as bars:
        while not watch.ready:
            if signals.count:
                return False
            _turn(supervisor, watch)
            statuses = watch.statuses
            check_taken_in(plan, statuses)
            bars.update(statuses)
    return True


def check_taken_in(plan: FleetPlan, statuses: Mapping[str, ReplicaStatus]) -> None:
    """A router that finds fault with a replica will find it again: a person must mend it."""
    for each in plan.replicas:
        if each.name in statuses and (why := statuses[each.name].refused):
            raise SetupError(
                f"replica {each.name} with the checkpoint {each.config.checkpoint} is not taken in "
                f"by its router: {why}"
            )


def _serve(supervisor: Supervisor, watch: Watch, signals: Signals) -> None:
    while not signals.count:
        _turn(supervisor, watch)


def _turn(supervisor: Supervisor, watch: Watch) -> None:
    now = time.monotonic()
    statuses = watch.statuses
    for replica in supervisor.replicas:
        if replica.name in statuses:
            supervisor.follow(replica, statuses[replica.name], now)
    supervisor.step(now)
    time.sleep(STEP_S)


def _drain(supervisor: Supervisor, watch: Watch, signals: Signals, drain_s: float) -> None:
    """Let what runs finish, for at most `drain_s`; a second signal cuts it short."""
    until = time.monotonic() + drain_s
    asking = threading.Thread(target=watch.drain, name="drain", daemon=True)
    asking.start()
    asked_s = time.monotonic()
    while time.monotonic() < until and signals.count < 2:
        busy = any(status.running or status.waiting for status in watch.statuses.values())
        told = time.monotonic() - asked_s > 1.0 and not asking.is_alive()
        if told and not busy:
            return
        time.sleep(STEP_S)


def end(supervisor: Supervisor, signals: Signals) -> None:
    """End every process; whoever ignores the request, or a second signal, is killed."""
    seen = signals.count
    supervisor.stop(time.monotonic())
    while not supervisor.over:
        if signals.count > max(seen, 1):
            seen = signals.count
            supervisor.stop(time.monotonic(), at_once=True)
        supervisor.step(time.monotonic())
        time.sleep(STEP_S)


class Signals:
    """Counts SIGINT, SIGTERM and SIGHUP while it is entered, instead of dying of them."""

    def __init__(self) -> None:
        self.count = 0
        self._old: dict[signal.Signals, object] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
