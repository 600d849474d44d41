"""Time of a scheduling decision with 1,000 waiting prefills and 256 running decodes.

    python -m benchmarks.scheduler          prints p50, p99 and the targets

Targets: `next_batch` p50 ≤ 150 µs, p99 ≤ 500 µs; one prediction ≤ 5 µs.
Eight H100-class GPUs serve an 8B model; prompts are log-normal around 1,000 tokens,
one in twenty has 100,000 to 500,000. Every batch is acknowledged and completed, and
finished requests are replaced, so that the population stays constant. Processor time of the thread
counts; on an idle machine it equals the wall time, which is printed too.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time

from medha import compiled
from medha.batch import Batch, BatchResult, Sampled
from medha.config import Scheduling
from medha.model import ModelShape
from medha.predictor import Predictor
from medha.profile import H100
from medha.request import Request
from medha.scheduling.scheduler import Scheduler
from medha.topology import Topology

MODEL = ModelShape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab=128256,
    max_context_tokens=1 << 20,
)
TARGETS_US = {"next_batch p50": 150.0, "next_batch p99": 500.0, "prediction": 5.0}


class Population:
    """A scheduler held at a number of waiting prefills and running decodes."""

    def __init__(self, waiting: int, decodes: int, policy: str, seed: int = 0) -> None:
        layout = Topology(tp=8)
        self.predictor = Predictor(H100, MODEL, layout)
        settings = Scheduling(policy=policy, max_running=4 * (waiting + decodes))
        self.plan = Scheduler(layout, MODEL, self.predictor, settings, 2_000_000, 64, 1 << 20)
        self.plan.group_joined(0, 1, 0.0)
        self.waiting, self.decodes = waiting, decodes
        self.dice = random.Random(seed)
        self.now, self.count, self.queued = 0.0, 0, 0
        self.left: dict[int, int] = {}
        while len(self.left) < decodes:
            self.submit(short=True)
            self.turn(refill=False)
        while self.queued < waiting:
            self.submit()

    def submit(self, short: bool = False) -> None:
        long = not short and self.dice.random() < 0.05
        tokens = (
            self.dice.randint(100_000, 500_000)
            if long
            else min(16_000, max(16, int(self.dice.lognormvariate(6.9, 1.0))))
        )
        work_s = self.predictor.prefill_s(tokens)
        self.count += 1
        self.queued += 1
        within_s = max(0.5, 1.5 * work_s) + self.dice.uniform(0.0, 60.0)
        self.plan.submit(
            Request(
                id=f"r{self.count}",
                arrival_s=self.now,
                prompt_tokens=tokens,
                tpot_s=0.1,
                max_output_tokens=4_096,
                ttft_deadline_s=within_s,
                work_s=work_s,
            ),
            self.now,
        )

    def turn(self, refill: bool = True) -> tuple[float, float, float]:
        """Run a batch; return (wall, processor) seconds to form and wall seconds to complete it."""
        began, spent = time.perf_counter(), time.thread_time()
        batch = self.plan.next_batch(self.now, frozenset({0}))
        spent, formed = time.thread_time() - spent, time.perf_counter()
        if batch is None:
            raise RuntimeError("nothing to run, although prompts wait")
        self.now += batch.predicted_s
        result = self._outcome(batch)
        acked = time.perf_counter()
        self.plan.stage_done(batch.number, 0, self.now)
        self.plan.complete(batch.number, result, self.now)
        done = time.perf_counter()
        while refill and self.queued < self.waiting:
            self.submit()
        return formed - began, spent, done - acked

    def _outcome(self, batch: Batch) -> BatchResult:
        sampled = []
        for chunk in batch.chunks:
            if not chunk.yields:
                continue
            if not chunk.decode:
                self.queued -= 1
                self.left[chunk.seq] = 1
            surplus = not chunk.decode and len(self.left) > self.decodes
            if surplus:
                del self.left[chunk.seq]
            sampled.append(Sampled(chunk.seq, surplus))
        return BatchResult(tuple(sampled))


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def prediction_s(people: Population, count: int = 20_000) -> float:
    """Return the processor seconds of one prediction: a chunk with the decodes and some prompts."""
    dice, loads = random.Random(1), []
    for _ in range(64):
        load = people.predictor.load()
        load.add_decodes(people.decodes, 1500 * people.decodes)
        for _ in range(dice.randint(0, 8)):
            load.add_chunk(dice.randint(16, 2_000), dice.choice([0, 4_096]), yields=True)
        loads.append(load)
    chunks = [
        (loads[n % 64], 32 * dice.randint(1, 64), dice.choice([0, 1_000, 300_000]))
        for n in range(count)
    ]
    began = time.thread_time()
    for load, length, keys in chunks:
        load.seconds_with(length, keys)
    return (time.thread_time() - began) / count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--decodes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--policy", default="lars")
    options = parser.parse_args()
    people = Population(options.waiting, options.decodes, options.policy)
    for _ in range(100):
        people.turn()
    gc.collect()
    gc.freeze()
    times = [people.turn() for _ in range(options.rounds)]
    wall, formed, closed = ([1e6 * value for value in row] for row in zip(*times, strict=True))
    measured = {
        "next_batch p50": quantile(formed, 0.5),
        "next_batch p99": quantile(formed, 0.99),
        "prediction": 1e6 * prediction_s(people),
    }
    print(f"{options.waiting} waiting prefills, {options.decodes} decodes, policy {options.policy}")
    print(f"  {'machine code':16} {compiled.stale() or 'in use'}")
    for name, value in measured.items():
        target = TARGETS_US[name]
        print(
            f"  {name:16} {value:8.1f} µs   target {target:5.0f} µs   "
            f"{'ok' if value <= target else 'MISSED'}"
        )
    print(f"  {'wall p50':16} {quantile(wall, 0.5):8.1f} µs   p99 {quantile(wall, 0.99):.1f} µs")
    print(f"  {'complete p50':16} {quantile(closed, 0.5):8.1f} µs   (acknowledge and complete)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
