"""`medha up`: start a whole fleet on this machine from the resource that Kubernetes would get.

Reads and checks the resources, plans the fleet, writes the configs and starts the processes. Then
restarts processes that exit and starts the KVP groups that controllers want. On Ctrl-C or SIGTERM,
drains for a moment and stops everything.
"""

from __future__ import annotations

import ipaddress
import pathlib
import threading
import time
from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console

from medha import profile
from medha.adapters.addresses import http_url
from medha.adapters.prometheus import read_token
from medha.cli.local_fleet import preflight
from medha.cli.local_fleet.checkpoint_check import check_resources
from medha.cli.local_fleet.child_process import ChildProcess
from medha.cli.local_fleet.console_output import LoadingBars, LogStream, placement_table
from medha.cli.local_fleet.faults import Faults
from medha.cli.local_fleet.fleet_plan import FleetPlan, HostSettings, plan_fleet, replica_count
from medha.cli.local_fleet.launches import fleet_supervisor
from medha.cli.local_fleet.run_dir import RunDir, check_unused
from medha.cli.local_fleet.status_poll import ROUTER, FleetPoll
from medha.cli.local_fleet.stopping import StopSignals, stop_all
from medha.cli.local_fleet.supervisor import Supervisor
from medha.cli.resource_file import read_resources
from medha.cli.router_settings import read_router_settings
from medha.errors import SetupError
from medha.messages import ReplicaStatus
from medha.spec import MedhaReplica

STEP_S = 0.05
DRAIN_S = 5.0
HOST = "127.0.0.1"


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `medha up`. Port 0: any free port."""

    file: pathlib.Path
    host: str = HOST
    port: int = 8000
    ops_port: int = 8001
    router_processes: int = 1
    run_dir: pathlib.Path | None = None
    policy: str | None = None
    log_level: str = "info"
    quiet: bool = False
    decision_log: bool = False
    dummy_weights: bool = False
    profile: pathlib.Path | None = None
    router_config: pathlib.Path | None = None
    drain_s: float = DRAIN_S


def up(options: UpOptions, console: Console) -> None:
    """Run the fleet until a signal; raises UserError if it cannot start."""
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


def check(resources: Sequence[MedhaReplica], options: UpOptions) -> dict[str, str]:
    """Run all checks that need no process; returns each resource's checkpoint folder.

    Raises UserErrors if several checks fail.
    """
    folders, faults = dict[str, str](), Faults()
    with faults.collect():
        preflight.check_programs()
    with faults.collect():
        weights = not options.dummy_weights
        folders = check_resources(resources, preflight.gpu_count(), weights=weights)
    with faults.collect():
        preflight.check_shared_memory()
    with faults.collect():
        preflight.check_apart(options.port, options.ops_port)
    with faults.collect():
        preflight.check_host(options.host)
        preflight.check_port(options.host, options.port, "--port")
    with faults.collect():
        preflight.check_port(HOST, options.ops_port, "--ops-port")
    with faults.collect():
        if options.run_dir is not None:
            check_unused(options.run_dir)
    with faults.collect():
        if options.profile is not None:
            profile.read(options.profile, "--profile")
    with faults.collect():
        if options.router_config is not None:
            read_router_settings(options.router_config)
    faults.raise_all()
    return folders


def with_policy(resources: Sequence[MedhaReplica], policy: str | None) -> tuple[MedhaReplica, ...]:
    """The resources with another scheduling policy, if one is given."""
    if policy is None:
        return tuple(resources)
    replace = msgspec.structs.replace
    return tuple(
        replace(
            resource,
            spec=replace(
                resource.spec, scheduling=replace(resource.spec.scheduling, policy=policy)
            ),
        )
        for resource in resources
    )


def _plan(
    resources: Sequence[MedhaReplica],
    checkpoints: dict[str, str],
    run_dir: RunDir,
    options: UpOptions,
) -> FleetPlan:
    count = replica_count(resources)
    any_port, any_ops_port, *ports = preflight.free_ports(HOST, count + 2)
    fleet_port = preflight.free_port_run(HOST, options.router_processes)
    router_curve, controller_curve = run_dir.write_keys()
    host = HostSettings(
        run_dir=str(run_dir.path),
        address=HOST,
        public_address=options.host,
        port=options.port or any_port,
        ops_port=options.ops_port or any_ops_port,
        fleet_address=f"tcp://{HOST}:{fleet_port}",
        router_processes=options.router_processes,
        controller_ports=tuple(ports),
        checkpoints=checkpoints,
        router_curve=router_curve,
        controller_curve=controller_curve,
        ops_token=run_dir.write_token(),
        gpus=preflight.gpu_count(),
        log_level=options.log_level,
        decision_log=options.decision_log,
        dummy_weights=options.dummy_weights,
        profile=str(options.profile.absolute()) if options.profile is not None else "",
        router_settings=(
            read_router_settings(options.router_config) if options.router_config is not None else {}
        ),
    )
    plan = plan_fleet(resources, host)
    for replica in plan.replicas:
        preflight.check_socket_path(replica.config.rank_bind)
    return plan


def _run(
    plan: FleetPlan, run_dir: RunDir, logs: LogStream, options: UpOptions, console: Console
) -> None:
    supervisor = fleet_supervisor(plan, run_dir, lambda launch: ChildProcess(launch, logs))
    poll = FleetPoll(
        f"http://{HOST}:{plan.router.ops_port}",
        {replica.name: f"http://{HOST}:{replica.config.ops_port}" for replica in plan.replicas},
        read_token(plan.router.ops_token),
    )
    signals = StopSignals()
    with signals:
        poll.start()
        try:
            if _load(plan, supervisor, poll, signals, console):
                supervisor.served = True
                console.print(placement_table(plan, supervisor))
                console.print(
                    f"Configs and logs in {run_dir.path}, metrics on "
                    f"http://{HOST}:{plan.router.ops_port}/metrics",
                    soft_wrap=True,
                )
                if not (plan.router.api_keys or ipaddress.ip_address(options.host).is_loopback):
                    console.print(
                        f"Warning: clients of {options.host} need no API key; name a file of "
                        "api_keys in --router-config",
                        soft_wrap=True,
                    )
                console.print(f"Serving on {http_url(options.host, plan.router.port)}/v1")
                _serve(supervisor, poll, signals)
                console.print(f"Stopping: running requests have {options.drain_s:g} s")
                _drain(supervisor, poll, signals, options.drain_s)
        finally:
            stop_all(supervisor, signals)
            poll.close()


def _load(
    plan: FleetPlan, supervisor: Supervisor, poll: FleetPoll, signals: StopSignals, console: Console
) -> bool:
    """Start everything; True once the fleet is ready, False if a signal came first."""
    with LoadingBars(console, plan) as bars:
        while not poll.ready:
            if signals.count:
                return False
            _step(supervisor, poll)
            statuses = poll.statuses
            check_registered(plan, statuses)
            bars.update(statuses)
    return True


def check_registered(plan: FleetPlan, statuses: Mapping[str, ReplicaStatus]) -> None:
    """Raises SetupError if the router refused a replica: a retry would be refused again."""
    for replica in plan.replicas:
        if replica.name in statuses and (why := statuses[replica.name].refused):
            raise SetupError(
                f"replica {replica.name} with the checkpoint {replica.config.checkpoint} is "
                f"refused by its router: {why}"
            )


def _serve(supervisor: Supervisor, poll: FleetPoll, signals: StopSignals) -> None:
    while not signals.count:
        _step(supervisor, poll)


def _step(supervisor: Supervisor, poll: FleetPoll) -> None:
    now = time.monotonic()
    statuses = poll.statuses
    for replica in supervisor.replicas:
        if replica.name in statuses:
            supervisor.follow(replica, statuses[replica.name], now)
    watched = [(ROUTER, unit) for unit in supervisor.singles]
    watched += [(replica.name, replica.controller) for replica in supervisor.replicas]
    for name, unit in watched:
        if (answered_s := poll.hangs_since_s(name)) is not None:
            supervisor.hangs(unit, answered_s, now)
    supervisor.step(now)
    time.sleep(STEP_S)


def _drain(supervisor: Supervisor, poll: FleetPoll, signals: StopSignals, drain_s: float) -> None:
    """Let running requests finish, for at most `drain_s` or until a second signal."""
    until = time.monotonic() + drain_s
    drain_requests = threading.Thread(target=poll.drain, name="drain", daemon=True)
    drain_requests.start()
    requested_s = time.monotonic()
    while time.monotonic() < until and signals.count < 2:
        busy = any(status.running or status.waiting for status in poll.statuses.values())
        drained = time.monotonic() - requested_s > 1.0 and not drain_requests.is_alive()
        if drained and not busy:
            return
        time.sleep(STEP_S)
