"""`medha replay`: play a workload against a live router; same report as the simulator.

A workload is a trace with arrival times (Azure's CSV, Mooncake's JSON lines), or a CSV of lengths
that arrive at a rate. Prompts consist of the model's own tokens and have exact lengths.
"""

from __future__ import annotations

import asyncio
import pathlib
import time
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from medha.cli.open_loop import Target, connect, faults, play, prompts_from, vocabulary
from medha.errors import SpecError
from medha.sim.report import RequestRecord, summarise, table
from medha.sim.workload import (
    BLOCK_TOKENS,
    Arrival,
    poisson,
    read_azure,
    read_lengths,
    read_mooncake,
    scaled,
)


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `medha replay`; `rate` is for workloads without arrival times."""

    target: Target
    workload: pathlib.Path
    rate: float | None = None
    count: int | None = None
    speed: float = 1.0
    scale_lengths: float = 1.0
    longest_tokens: int | None = None
    seed: int = 0
    json: pathlib.Path | None = None


def replay(options: ReplayOptions, console: Console) -> list[RequestRecord]:
    """Play and print the report; raises UserError before the first request is sent."""
    arrivals = arrivals_of(options)
    started = time.monotonic()
    records = asyncio.run(_play(options, arrivals, console))
    seconds = time.monotonic() - started
    report = summarise(records, seconds)
    console.print(table(report), highlight=False, markup=False, soft_wrap=True)
    for fault, count in sorted(faults(records).items()):
        console.print(f"{count} requests ended with {fault}", highlight=False)
    if options.json is not None:
        contents = {"report": report, "faults": faults(records), "records": records}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(contents), indent=1))
    return records


async def _play(
    options: ReplayOptions, arrivals: Sequence[Arrival], console: Console
) -> list[RequestRecord]:
    target = options.target
    async with connect(target.url) as client:
        ids = await vocabulary(client, target)
    block = max(1, round(BLOCK_TOKENS * options.scale_lengths))
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("requests", total=len(arrivals))
        return await play(
            target, arrivals, prompts_from(ids, options.seed, block), lambda _: bar.advance(task)
        )


def arrivals_of(options: ReplayOptions) -> list[Arrival]:
    """Arrivals of the workload; raises SpecError if the file is not a workload."""
    path = options.workload
    if not path.is_file():
        raise SpecError("--workload", str(path), "must be a file", "name a trace or a CSV")
    if path.suffix == ".jsonl":
        arrivals = read_mooncake(path)
    elif _header(path).startswith("TIMESTAMP"):
        arrivals = read_azure(path)
    else:
        arrivals = _drawn(path, options)
    if options.count is not None:
        arrivals = arrivals[: options.count]
    if not arrivals:
        raise SpecError("--workload", str(path), "must hold requests", "name another file")
    longest = options.longest_tokens or 1 << 40
    return scaled(
        [_resized(arrival, options.scale_lengths, longest) for arrival in arrivals], options.speed
    )


def _drawn(path: pathlib.Path, options: ReplayOptions) -> list[Arrival]:
    if options.rate is None:
        raise SpecError(
            "--rate",
            "missing",
            "must be given for lengths without arrival times",
            "set requests per second",
        )
    lengths = read_lengths(path)
    return poisson(lengths, options.rate, options.count or len(lengths), options.seed)


def _resized(arrival: Arrival, factor: float, longest: int) -> Arrival:
    return msgspec.structs.replace(
        arrival,
        prompt_tokens=min(longest, max(1, round(arrival.prompt_tokens * factor))),
        output_tokens=max(1, round(arrival.output_tokens * factor)),
    )


def _header(path: pathlib.Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as lines:
        return lines.readline()
