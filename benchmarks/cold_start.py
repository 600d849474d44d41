"""Time from the start of `medha up` to the first token, by phase, and of reading the weights alone.

    python -m benchmarks.cold_start --checkpoint FOLDER [--rounds 3] [--dtype bfloat16]

Without a FOLDER it writes a checkpoint of about 1 GB. Each round starts the fleet (CPU, one rank)
with the files out of the page cache, and with them in it, and reads the same bytes with plain reads
of 8 MiB in the same state. Phases come from the logs of the processes; medians count. The goal is
that of the rank's start, imports apart: at most 1.3 times what reading the bytes takes from
storage. Exits with 1 if it is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

import psutil
from rich.console import Console
from rich.table import Table
from tests.support.medha_up import Up, until

from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

MODEL = TinyModel(
    layers=16,
    hidden=1536,
    heads=12,
    kv_heads=4,
    head_dim=128,
    intermediate=5120,
    vocab=2048,
    max_tokens=8192,
    dtype="bfloat16",
    files=4,
)
RESOURCE = """
apiVersion: medha.dev/v1beta1
kind: MedhaReplica
metadata: {{name: tiny}}
spec:
  model:
    name: tiny
    dtype: {dtype}
    maxContextTokens: 4096
    source: {{hostPath: {{path: {folder}}}}}
  device: {{kind: Cpu}}
  slo: {{default: {{ttft: {{floor: 300s}}, tpot: 60s, whenInfeasible: Relegate}}}}
  engine: {{kvPages: 512, threadsPerRank: 1}}
"""
TARGET, START_S, READ_BYTES = 1.3, 600.0, 8 << 20
READING = "reading the bytes alone"
# Lines of a rank's log that end a phase.
ENDS = {
    "imports done": "interpreter and imports",
    "weights loaded": "weights",
    "KV pool allocated": "KV pool",
    "ready for batches": "wiring",
}
PHASES = (
    "`medha up` itself",
    "interpreter and imports",
    "configuration",
    "weights",
    "KV pool",
    "wiring",
    "warm-up, registration",
    "first token",
)


def read_s(files: Sequence[pathlib.Path]) -> float:
    """Return the seconds that plain reads of the files take."""
    buffer = bytearray(READ_BYTES)
    began = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def forget(files: Sequence[pathlib.Path]) -> None:
    """Take the files out of the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(folder: pathlib.Path, dtype: str) -> dict[str, float]:
    """Start a fleet, get a token and stop; return the seconds of each phase."""
    with tempfile.TemporaryDirectory(prefix="medha-cold-") as place:
        file = pathlib.Path(place, "replica.yaml")
        file.write_text(RESOURCE.format(folder=folder, dtype=dtype))
        began = time.time()
        up = Up(file)
        try:
            until(lambda: "tiny-0-g0-s0-t0" in up.children(), START_S)
            rank_began = psutil.Process(up.children()["tiny-0-g0-s0-t0"].pid).create_time()
            until(up.serves, START_S)
            served = time.time()
            up.ask()
            answered = time.time()
            log = (up.run_dir / "tiny-0-g0-s0-t0.log").read_text()
        finally:
            up.end(signal.SIGTERM)
    ends, loading_s = {}, 0.0
    for line in log.splitlines():
        entry = json.loads(line) if line.startswith("{") else {}
        if entry.get("message") in ENDS:
            at = datetime.datetime.fromisoformat(entry["time"]).timestamp()
            ends[ENDS[entry["message"]]] = at
            loading_s = entry.get("seconds", loading_s)
    ends["configuration"] = ends["weights"] - loading_s
    ends |= {"`medha up` itself": rank_began, "warm-up, registration": served}
    ends["first token"] = answered
    phases, before = {}, began
    for name in PHASES:
        phases[name], before = ends[name] - before, ends[name]
    return phases


def rounds(
    folder: pathlib.Path, count: int, dtype: str, console: Console
) -> dict[str, dict[str, float]]:
    """Return medians by state of the page cache and phase."""
    files = sorted(folder.glob("*.safetensors"))
    seconds: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for number in range(count):
        for state, measured in seconds.items():
            with console.status(f"round {number + 1}, {state}"):
                if state == "cold":
                    forget(files)
                alone = read_s(files)
                if state == "cold":
                    forget(files)
                measured.append({READING: alone} | start(folder, dtype))
    return {
        state: {name: statistics.median(entry[name] for entry in measured) for name in measured[0]}
        for state, measured in seconds.items()
    }


def show(medians: dict[str, dict[str, float]], size: int, console: Console) -> bool:
    table = Table(title=f"Seconds from `medha up` to the first token, {size / 1e9:.1f} GB")
    table.add_column("phase")
    for state in medians:
        table.add_column(state, justify="right")
    for name in (*PHASES, READING):
        table.add_row(name, *(f"{medians[state][name]:.2f}" for state in medians))
    totals = (f"{sum(medians[state][name] for name in PHASES):.2f}" for state in medians)
    table.add_row("from start to first token", *totals)
    ratios = {state: m["weights"] / m[READING] for state, m in medians.items()}
    table.add_row("weights / reading alone", *(f"{ratio:.2f}" for ratio in ratios.values()))
    console.print(table)
    return ratios["cold"] <= TARGET


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    given, console = parser.parse_args(), Console(width=120)
    with tempfile.TemporaryDirectory() as place:
        folder = given.checkpoint
        if folder is None:
            with console.status("writes a checkpoint"):
                folder = write_checkpoint(pathlib.Path(place), MODEL)
        folder = folder.absolute()
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        medians = rounds(folder, given.rounds, given.dtype, console)
    return 0 if show(medians, size, console) else 1


if __name__ == "__main__":
    sys.exit(main())
