"""`medha replay`: a workload played against a live router, reported like the simulator's.

A workload is a trace with arrival times (Azure's CSV, Mooncake's JSON lines), or a CSV of lengths
that arrive at a rate. Prompts are made of the model's own tokens, exact in length.
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
from medha.sim.report import Record, summarise, table
from medha.sim.workload import (
    BLOCK_TOKENS,
    Arrival,
    poisson,
    read_azure,
    read_lengths,
    read_mooncake,
    scaled,
)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says; `rate` is for workloads without arrival times."""

    target: Target
    workload: pathlib.Path
    rate: float | None = None
    count: int | None = None
    speed: float = 1.0
    scale_lengths: float = 1.0
    longest_tokens: int | None = None
    seed: int = 0
    json: pathlib.Path | None = None


def replay(options: Options, console: Console) -> list[Record]:
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
        found = {"report": report, "faults": faults(records), "records": records}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    return records


async def _play(options: Options, arrivals: Sequence[Arrival], console: Console) -> list[Record]:
    target = options.target
    async with connect(target.url) as client:
        ids = await vocabulary(client, target)
    block = max(1, round(BLOCK_TOKENS * options.scale_lengths))
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("requests", total=len(arrivals))
        return await play(
            target, arrivals, prompts_from(ids, options.seed, block), lambda _: bar.advance(task)
        )


def arrivals_of(options: Options) -> list[Arrival]:
    """The workload's requests as they will arrive; raises SpecError when it is no workload."""
    path = options.workload
    if not path.is_file():
        raise SpecError("--workload", str(path), "must be a file", "name a trace or a CSV")
    if path.suffix == ".jsonl":
        found = read_mooncake(path)
    elif _header(path).startswith("TIMESTAMP"):
        found = read_azure(path)
    else:
        found = _drawn(path, options)
    if options.count is not None:
        found = found[: options.count]
    if not found:
        raise SpecError("--workload", str(path), "must hold requests", "name another file")
    longest = options.longest_tokens or 1 << 40
    return scaled([_resized(each, options.scale_lengths, longest) for each in found], options.speed)


def _drawn(path: pathlib.Path, options: Options) -> list[Arrival]:
    if options.rate is None:
        raise SpecError("--rate", "missing", "must be given for lengths without arrival times",
                        "set requests per second")  # fmt: skip
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
