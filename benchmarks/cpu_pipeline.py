"""Gain of stream pipeline parallelism: a long prompt through one stage, and through two.

    python -m benchmarks.cpu_pipeline

Real rank processes on the CPU backend, one thread each, float32, a model of 100 million parameters.
One rank and two stages take turns, so a busy machine slows both, and their best rounds count. Needs
two free cores. Exits with 1 if the target is missed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import pathlib
import sys
import tempfile
import time

from rich.console import Console
from tests.support.driver import Driver
from tests.support.rank_rig import ForkServer, Rig
from tests.support.recalling_prompts import recalling

from medha.config import WorkerConfig
from medha.topology import Topology
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

MODEL = TinyModel(
    layers=16,
    hidden=768,
    heads=12,
    kv_heads=4,
    head_dim=64,
    intermediate=2048,
    vocab=4096,
    max_tokens=8192,
)
PAGE_TOKENS, TARGET = 64, 1.5


def rig_of(checkpoint: pathlib.Path, spp: int, tokens: int, fork_server: ForkServer) -> Rig:
    folder = checkpoint.parent / f"spp{spp}"
    folder.mkdir()
    config = WorkerConfig(
        replica="bench",
        model="bench",
        checkpoint=str(checkpoint),
        max_context_tokens=MODEL.max_tokens,
        topology=Topology(spp=spp),
        kv_pages=2 * (tokens // PAGE_TOKENS + 1),
        page_tokens=PAGE_TOKENS,
        rank_bind="ipc://set-by-the-rig",
        rank_timeout_s=120.0,
        log_level="warning",
    )
    return Rig(config, folder, fork_server, vocab=MODEL.vocab, record=False, patience_s=300.0)


def prefill_s(driver: Driver, seq: int, tokens: int, chunk: int) -> float:
    """Seconds until the first token of a fresh prompt."""
    driver.start(seq, recalling(tokens, MODEL.vocab, seed=seq), groups=(0,))
    begin = time.perf_counter()
    driver.prefill(seq, (chunk,))
    elapsed = time.perf_counter() - begin
    driver.end(seq)
    return elapsed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=128)
    chosen = parser.parse_args()
    console = Console(width=120)
    if len(os.sched_getaffinity(0)) < 2:
        console.print("one core: a pipeline of two stages cannot be faster here; not measured")
        return 0
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        checkpoint = write_checkpoint(pathlib.Path(folder) / "model", MODEL)
        fork_server = ForkServer()
        stack.callback(fork_server.close)
        drivers = {}
        for spp in (1, 2):
            rig = rig_of(checkpoint, spp, chosen.tokens, fork_server)
            stack.callback(rig.close)
            rig.start([0])
            drivers[spp] = Driver(rig, PAGE_TOKENS, 2 * (chosen.tokens // PAGE_TOKENS + 1))
            prefill_s(drivers[spp], 1_000, chosen.chunk, chosen.chunk)  # warm-up
        times: dict[int, list[float]] = {1: [], 2: []}
        for seq in range(chosen.rounds):
            for spp, driver in drivers.items():
                times[spp].append(prefill_s(driver, seq, chosen.tokens, chosen.chunk))
    one_s, two_s = min(times[1]), min(times[2])
    verdict = "met" if one_s / two_s >= TARGET else "MISSED"
    console.print(
        f"prefill of {chosen.tokens} tokens in chunks of {chosen.chunk}: one rank {one_s:.2f} s, "
        f"two stages {two_s:.2f} s, {one_s / two_s:.2f} × (target ≥ {TARGET} ×): {verdict}"
    )
    return 0 if one_s / two_s >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
