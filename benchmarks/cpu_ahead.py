"""Gain of deciding a batch while another runs: real processes on the CPU.

    python -m benchmarks.cpu_ahead
    python -m benchmarks.cpu_ahead --decodes 1 16 64 --tp 2

Two replicas, one with `ahead_s` and one without, each a controller and its ranks, take turns. Each
row compares the time between two tokens, as clients see it, for a number of concurrent decodes: the
best of the rounds. A rank needs its own core, separate from its controller's; otherwise they share
one and nothing can overlap.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import pathlib
import tempfile
import time

import numpy as np
from rich.console import Console
from rich.table import Table
from tests.support.recalling_prompts import recalling
from tests.support.replica_processes import ReplicaProcesses

from medha.config import Scheduling, WorkerConfig
from medha.topology import Topology
from medha_worker.model.checkpoint_writer import DEMO, write_checkpoint

PROMPT_TOKENS, PAGE_TOKENS = 64, 64


def fleet_of(
    folder: pathlib.Path, checkpoint: pathlib.Path, ahead_s: float, tp: int
) -> ReplicaProcesses:
    folder.mkdir()
    config = WorkerConfig(
        replica=folder.name,
        model="bench",
        checkpoint=str(checkpoint),
        max_context_tokens=DEMO.max_tokens,
        topology=Topology(tp=tp),
        page_tokens=PAGE_TOKENS,
        kv_pages=1024,
        scheduling=Scheduling(ahead_s=ahead_s, prefix_cache=False),
        rank_bind="",
        rank_timeout_s=60.0,
        router_timeout_s=1e6,
        log_level="info",
    )
    fleet = ReplicaProcesses(folder, config)
    fleet.until_ready()
    return fleet


def gap_s(fleet: ReplicaProcesses, decodes: int, tokens: int, round_: int) -> float:
    """Seconds between two tokens of one client while all decode, on average."""
    names = [f"r{round_}-{decodes}-{n}" for n in range(decodes)]
    for n, name in enumerate(names):
        fleet.submit(name, recalling(PROMPT_TOKENS, DEMO.vocab, n).tolist(), tokens)
    replies = [fleet.replies[name] for name in names]

    def least() -> int:
        return min(len(reply.tokens) for reply in replies)

    while least() < 8:
        fleet.turn()
    begin, first = time.perf_counter(), least()
    while least() < tokens - 8:
        fleet.turn()
    took_s = (time.perf_counter() - begin) / (least() - first)
    fleet.until_over(supervised=False)
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decodes", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ahead-s", type=float, default=0.01)
    chosen = parser.parse_args()
    table = Table(title=f"ms per token, {len(os.sched_getaffinity(0))} cores, TP {chosen.tp}")
    for column in ("decodes", "when it ends", "one step ahead", "saved"):
        table.add_column(column)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        checkpoint = write_checkpoint(pathlib.Path(folder) / "model", DEMO)
        fleets = []
        for name, ahead_s in (("behind", 0.0), ("ahead", chosen.ahead_s)):
            fleets.append(fleet_of(pathlib.Path(folder) / name, checkpoint, ahead_s, chosen.tp))
            stack.callback(fleets[-1].close)
        for decodes in chosen.decodes:
            rounds = [
                [gap_s(fleet, decodes, chosen.tokens, n) for fleet in fleets]
                for n in range(chosen.rounds)
            ]
            behind, ahead = 1e3 * np.array(rounds).min(0)
            table.add_row(str(decodes), f"{behind:.2f}", f"{ahead:.2f}", f"{behind - ahead:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
