"""`medha simulate`: run a scenario in virtual time and show whether the fleet kept its word."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading
import time
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from medha.cli.scaling import tell_changes
from medha.config import POLICIES
from medha.errors import SpecError
from medha.sim.report import table
from medha.sim.scenario import Scenario, SimulationResult, read_scenario, simulate

NAME = "fleet"


class SimulateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`policies`: run the scenario once under each; empty: as it is written.

    `out`: a folder for `<policy>.json` (the report), `<policy>.records.jsonl`, and with autoscaling
    `<policy>.scaling.json`, which `medha scaling` decides again.
    """

    scenario: pathlib.Path
    policies: tuple[str, ...] = ()
    load: float | None = None
    seed: int | None = None
    out: pathlib.Path | None = None


def run_simulate(options: SimulateOptions, console: Console) -> None:
    """Run and print one table per policy on `console`; raises SpecError for a broken scenario."""
    scenario = _overridden(read_scenario(options.scenario), options)
    if options.out is not None:
        _make(options.out)
    for policy in options.policies or (scenario.scheduling.policy,):
        if policy not in POLICIES:
            raise SpecError("--policy", policy, f"must be one of {', '.join(POLICIES)}", "use lars")
        scheduling = msgspec.structs.replace(scenario.scheduling, policy=policy)
        chosen = msgspec.structs.replace(scenario, scheduling=scheduling)
        started = time.monotonic()
        outcome = _watched(chosen, options.scenario.parent, console)
        took = time.monotonic() - started
        console.print(
            f"{policy}: {outcome.batches} batches in {took:.1f} s of real time", highlight=False
        )
        console.print(table(outcome.report), highlight=False, markup=False, soft_wrap=True)
        tell_changes(NAME, outcome.scaling, console)
        if options.out is not None:
            (options.out / f"{policy}.json").write_bytes(
                msgspec.json.format(msgspec.json.encode(outcome.report), indent=1)
            )
            (options.out / f"{policy}.records.jsonl").write_bytes(
                b"".join(msgspec.json.encode(record) + b"\n" for record in outcome.records)
            )
            if outcome.scaling.looks:
                (options.out / f"{policy}.scaling.json").write_bytes(
                    msgspec.json.encode({NAME: outcome.scaling})
                )


def _make(folder: pathlib.Path) -> None:
    """Make a folder; raises SpecError before anything is simulated."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(
            "--out", str(folder), f"must be a folder ({error.strerror})", "name another"
        ) from None


def _watched(scenario: Scenario, base: pathlib.Path, console: Console) -> SimulationResult:
    """Simulate with a progress bar of the requests that have arrived."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[at]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar, _ended_by_ctrl_c(console):
        task = bar.add_task(scenario.scheduling.policy, total=scenario.workload.requests, at="")
        return simulate(
            scenario, base, lambda now, count: bar.update(task, completed=count, at=f"{now:.0f} s")
        )


@contextlib.contextmanager
def _ended_by_ctrl_c(console: Console) -> Iterator[None]:
    """End the process at Ctrl-C without an exception, unless it is ignored or handled already.

    One that comes amid arithmetic of compiled code would end it as if memory were exhausted.
    """

    def end(*_: object) -> None:
        try:
            console.show_cursor()
            console.print()
        finally:
            os._exit(128 + signal.SIGINT)

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _overridden(scenario: Scenario, options: SimulateOptions) -> Scenario:
    workload = scenario.workload
    if options.load is not None:
        workload = msgspec.structs.replace(workload, load=options.load, per_second=None, speed=1.0)
    seed = scenario.seed if options.seed is None else options.seed
    return msgspec.structs.replace(scenario, workload=workload, seed=seed)
