"""Terminal output of `medha up`: prefixed log lines, loading bars, the placement table."""

from __future__ import annotations

import pathlib
import threading
import zlib
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from medha.cli.local_fleet.child_process import read_line
from medha.cli.local_fleet.fleet_plan import FleetPlan
from medha.cli.local_fleet.supervisor import Supervisor
from medha.messages import ReplicaStatus

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta")
LEVELS = {"warning": "yellow", "error": "bold red", "debug": "dim"}


class LogStream:
    """Print lines of many processes, prefixed by the process name, and write a log file of each.

    Called from several threads. `quiet`: print warnings and errors only.
    """

    def __init__(self, console: Console, folder: pathlib.Path, *, quiet: bool) -> None:
        self._console, self._folder, self._quiet = console, folder, quiet
        self._lock = threading.Lock()
        self._files: dict[str, TextIO] = {}

    def __call__(self, process: str, line: str) -> None:
        with self._lock:
            file = self._files.get(process)
            if file is None:
                file = self._files[process] = (self._folder / f"{process}.log").open("a")
            file.write(line + "\n")
            file.flush()
        entry = read_line(line)
        if self._quiet and entry.level in ("debug", "info"):
            return
        text = Text()
        text.append(f"{process:>20} ", style=COLOURS[zlib.crc32(process.encode()) % len(COLOURS)])
        text.append(entry.message, style=LEVELS.get(entry.level, ""))
        if isinstance(entry.error, str) and entry.error:
            text.append(f"\n{entry.error}", style="red")
        self._console.print(text, soft_wrap=True, highlight=False)

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()


class LoadingBars:
    """A bar per replica while its weights load and it warms up."""

    def __init__(self, console: Console, plan: FleetPlan) -> None:
        self._progress = Progress(
            TextColumn("{task.fields[replica]:>20}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._least = {replica.name: replica.config.topology.kvp_min for replica in plan.replicas}
        self._bars: dict[str, TaskID] = {
            name: self._progress.add_task("starting", total=1.0, replica=name)
            for name in self._least
        }

    def __enter__(self) -> LoadingBars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, statuses: Mapping[str, ReplicaStatus]) -> None:
        for name, status in statuses.items():
            done, phase = loading_phase(status, self._least[name])
            self._progress.update(self._bars[name], completed=done, description=phase)


def loading_phase(status: ReplicaStatus, least: int) -> tuple[float, str]:
    """Progress of a replica (0 to 1), and its current phase."""
    if status.ready:
        return 1.0, "ready"
    groups = status.groups[:least]
    loaded = sum(group.loaded for group in groups) / max(1, len(groups))
    if loaded <= 0.0:
        return 0.0, "starting"
    if loaded < 1.0:
        return 0.9 * loaded, f"loading weights, {loaded:.0%}"
    return 0.95, "joining columns and measuring batches"


def placement_table(plan: FleetPlan, supervisor: Supervisor) -> Table:
    """Table of all processes: role, PID and device."""
    table = Table(title="What runs where", title_justify="left")
    for column in ("replica", "KVP group", "stage", "shard", "process", "pid", "device"):
        table.add_column(column, justify="right" if column in ("pid", "stage", "shard") else "left")
    for unit in supervisor.singles:
        for child in unit.children:
            table.add_row("", "", "", "", unit.name, str(child.pid), "")
    for replica, units in zip(plan.replicas, supervisor.replicas, strict=True):
        for child in units.controller.children:
            table.add_row(replica.name, "", "", "", "controller", str(child.pid), "")
        for ranks, unit in zip(replica.groups, units.groups, strict=True):
            for rank, child in zip(ranks, unit.children, strict=False):
                device = "cpu" if rank.gpu is None else f"cuda:{rank.gpu}"
                at = rank.at
                table.add_row(
                    replica.name,
                    str(at.group),
                    str(at.stage),
                    str(at.shard),
                    "rank",
                    str(child.pid),
                    device,
                )
    return table
