"""`medha calibrate`: measure a machine in a separate process, fit a profile, and validate it.

The process with the device follows the plan of `medha.measurement_plan` and reports on stdout. This
process shows the progress, fits a profile, and compares predicted with measured times of mixed
batches that the fit did not use. Then several ranks exchange tensors, if this machine has several
GPUs or cores, and the profile's collectives are fitted to that. The profile is one JSON file, with
its measured range.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from medha.calibration import (
    EXCHANGES,
    Entries,
    Link,
    Operator,
    Sample,
    TimedExchange,
    fit,
    fit_link,
    misses,
    with_links,
)
from medha.errors import EngineError, SetupError, SpecError
from medha.measurement_plan import Begun, Measured, MeasurementMessage, Rounds
from medha.model import ModelShape, pairs
from medha.profile import Profile, encode, guess_for
from medha.topology import Topology

SHOWN = 12  # of the unseen batches, spread over their errors


class CalibrateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `medha calibrate`."""

    checkpoint: pathlib.Path
    out: pathlib.Path
    name: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    rows: int = 512
    keys: int = 4096
    page_tokens: int = 64
    seconds: float = 60.0
    tolerance: float = 0.08
    ranks: int = 0


class Figures(msgspec.Struct, kw_only=True):
    """Shortest time of each item: disturbances of the machine only add time."""

    begun: Begun
    shortest_s: dict[int, float] = {}

    def take(self, index: int, seconds: float) -> None:
        self.shortest_s[index] = min(seconds, self.shortest_s.get(index, seconds))

    @property
    def operators(self) -> list[tuple[Operator, float]]:
        return [
            (operator, self.shortest_s[i]) for i, operator in enumerate(self.begun.plan.operators)
        ]

    @property
    def batches(self) -> list[Sample]:
        return self._samples(self.begun.plan.batches, len(self.begun.plan.operators))

    @property
    def unseen(self) -> list[Sample]:
        plan = self.begun.plan
        return self._samples(plan.unseen, len(plan.operators) + len(plan.batches))

    def _samples(self, batches: Sequence[Entries], first: int) -> list[Sample]:
        return [Sample(batch, self.shortest_s[first + i]) for i, batch in enumerate(batches)]


def calibrate(options: CalibrateOptions, progress: Console, console: Console) -> bool:
    """Measure, fit, write and report; returns True if the error is within the tolerance."""
    check(options)
    figures = _measured(options, progress)
    links = _links(options)
    shape, guess = figures.begun.shape, guess_for(options.device)
    name = options.name or re.sub(r"[^a-z0-9]+", "-", figures.begun.machine.lower()).strip("-")
    fitted = fit(figures.batches, shape, Topology(), guess, name, figures.operators)
    judged = misses(fitted, figures.unseen, shape, Topology())
    errors = np.abs([miss for _, miss in judged])
    profile = msgspec.structs.replace(
        with_links(fitted, links),
        error=float(np.sqrt(np.mean(errors**2))),
    )
    try:
        options.out.write_bytes(encode(profile) + b"\n")
    except OSError as error:
        raise SpecError(
            "--out", str(options.out), f"must be writable ({error.strerror})", "name another file"
        ) from None
    _show(options, figures, profile, judged, console)
    _show_links(links, console)
    return float(np.quantile(errors, 0.95)) <= options.tolerance


def check(options: CalibrateOptions) -> None:
    """Check the options before minutes of measuring."""
    if not (options.checkpoint / "config.json").is_file():
        raise SpecError(
            "CHECKPOINT",
            str(options.checkpoint),
            "must be a folder with a config.json",
            "name the folder of the model to measure with",
        )
    if not options.out.absolute().parent.is_dir() or options.out.is_dir():
        raise SpecError(
            "--out",
            str(options.out),
            "must be a file in a folder that exists",
            "make the folder or name another",
        )


def _measured(options: CalibrateOptions, console: Console) -> Figures:
    """Run the measuring process; raises its error."""
    argv = [sys.executable, "-m", "medha_worker.profiler"]
    for field in (
        "checkpoint",
        "device",
        "dtype",
        "threads",
        "rows",
        "keys",
        "page_tokens",
        "seconds",
    ):
        argv += [f"--{field.replace('_', '-')}", str(getattr(options, field))]
    decoder, figures = msgspec.json.Decoder(MeasurementMessage), None
    percent = TextColumn("{task.percentage:3.0f} %")
    columns = (TextColumn("{task.description}"), BarColumn(), percent, TimeElapsedColumn())
    with (
        tempfile.TemporaryFile() as errors_file,
        Progress(*columns, console=console, transient=True) as bar,
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors_file) as process,
    ):
        task = bar.add_task("preparing", total=None)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                match decoder.decode(line):
                    case Begun() as begun:
                        figures = Figures(begun=begun)
                        bar.update(task, description="measuring", total=begun.plan.items)
                    case Rounds(count):
                        assert figures is not None
                        bar.update(task, total=count * figures.begun.plan.items)
                    case Measured(index, seconds):
                        assert figures is not None
                        figures.take(index, seconds)
                        bar.advance(task)
        except BaseException:
            process.kill()
            raise
        status = process.wait()
        errors_file.seek(0)
        words = errors_file.read().decode(errors="replace").strip()
    _check_status(status, words)
    if figures is None:
        raise EngineError("the measuring process ended without output")
    return figures


def _check_status(status: int, words: str) -> None:
    """Raise the error of a measuring process that failed."""
    if status == 2:
        raise SetupError(words.splitlines()[-1] if words else "the measuring process failed")
    if status:
        last = words.splitlines()[-1] if words else "no output"
        raise EngineError(f"the measuring process ended with status {status}: {last}")


def _links(options: CalibrateOptions) -> list[Link]:
    """Measure exchanges of `ranks` processes, and fit their laws; none for a single rank."""
    argv = [sys.executable, "-m", "medha_worker.parallel.link_profiler"]
    argv += ["--device", options.device, "--ranks", str(options.ranks)]
    argv += ["--seconds", str(options.seconds / 6)]
    done = subprocess.run(argv, capture_output=True, check=False)
    _check_status(done.returncode, done.stderr.decode(errors="replace").strip())
    exchanges = [msgspec.json.decode(line, type=TimedExchange) for line in done.stdout.splitlines()]
    by_kind = ([own for own in exchanges if own.kind == kind] for kind in EXCHANGES)
    return [fit_link(own) for own in by_kind if own]


def _show(
    options: CalibrateOptions,
    figures: Figures,
    profile: Profile,
    judged: Sequence[tuple[Sample, float]],
    console: Console,
) -> None:
    begun = figures.begun
    console.print(
        f"{begun.machine}, {options.dtype}, {options.threads} thread(s): profile {profile.name}",
        highlight=False,
    )
    for line in _rates(figures):
        console.print(line, highlight=False)
    table = Table(title="Mixed batches that the fit has not seen")
    for column in ("batch", "measured ms", "predicted ms", "error"):
        table.add_column(column, justify="left" if column == "batch" else "right")
    ordered = sorted(judged, key=lambda item: abs(item[1]))
    for place in np.unique(np.linspace(0, len(ordered) - 1, SHOWN).round().astype(int)):
        sample, miss = ordered[place]
        took_ms = 1e3 * sample.seconds
        table.add_row(
            _description(sample),
            f"{took_ms:.2f}",
            f"{took_ms * (1 + miss):.2f}",
            f"{100 * miss:+.1f} %",
        )
    console.print(table)
    p50, p95, worst = np.quantile(np.abs([miss for _, miss in judged]), (0.5, 0.95, 1.0))
    verdict = "within" if p95 <= options.tolerance else "NOT within"
    errors = f"p50 {100 * p50:.1f} %, p95 {100 * p95:.1f} %, worst {100 * worst:.1f} %"
    reach = f"{profile.valid_rows} rows and {profile.valid_keys} keys"
    console.print(
        f"error of {len(judged)} unseen batches: {errors}; {verdict} --tolerance"
        f" {100 * options.tolerance:g} %\nvalid up to {reach}; written to {options.out}",
        highlight=False,
        soft_wrap=True,
    )


def _show_links(links: Sequence[Link], console: Console) -> None:
    if not links:
        console.print("one rank here: exchanges between ranks stay those of the shipped profile")
    for link in links:
        p50, worst = np.quantile(np.abs(link.errors), (0.5, 1.0))
        console.print(
            f"{link.kind} of {link.ranks} ranks on this machine: {1e6 * link.latency_s:.1f} µs +"
            f" bytes / {link.bytes_per_s / 1e9:.2f} GB/s; error of {len(link.errors)} unseen sizes:"
            f" p50 {100 * p50:.0f} %, worst {100 * worst:.0f} %",
            highlight=False,
            soft_wrap=True,
        )


def _rates(figures: Figures) -> list[str]:
    """Best measured rate of each kind of operator."""
    shape, best = figures.begun.shape, dict[str, float]()
    for operator, seconds in figures.operators:
        kind, amount = _work(operator, shape)
        best[kind] = max(best.get(kind, 0.0), amount / seconds)
    units = {
        "matrix products": "GFLOP/s",
        "attention of chunks": "GFLOP/s",
        "attention of decodes": "GB/s",
    }
    lines = [
        f"  {kind:<22}{best[kind] / 1e9:12,.1f} {unit}"
        for kind, unit in units.items()
        if kind in best
    ]
    return [*lines, f"  {'copy in memory':<22}{figures.begun.copy_bytes_per_s / 1e9:12,.1f} GB/s"]


def _work(operator: Operator, shape: ModelShape) -> tuple[str, float]:
    """Kind of work of an operator, and its amount: FLOP, or bytes."""
    match operator.kind:
        case "linear":
            return "matrix products", shape.linear_flops(operator.rows)
        case "attention":
            seen = pairs(operator.rows, operator.keys)
            return "attention of chunks", seen * shape.heads * shape.pair_flops / operator.tp
        case "decode":
            key_bytes = (operator.keys + 1) * shape.kv_bytes_per_token_layer
            return "attention of decodes", operator.rows * key_bytes / operator.tp
    return "the rest", 0.0


def _description(sample: Sample) -> str:
    """Describe a batch: chunks as length after keys, decodes as count over total keys."""
    chunks = [f"{length} after {keys:,}" for length, keys, decode in sample.entries if not decode]
    decodes = [keys for _, keys, decode in sample.entries if decode]
    if decodes:
        chunks.append(f"{len(decodes)} decodes over {sum(decodes):,}")
    return " + ".join(chunks)
