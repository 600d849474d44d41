"""Processor time of a scheduler's whole step: submit, next_batch, complete and load.

    python -m benchmarks.scheduler             1,000 waiting prefills and 256 decodes
    python -m benchmarks.scheduler --grid      the corners up to 10,000 x 2,048, too (3 minutes)

Targets: p50 of the step <= 300 us at 1,000 x 256 and <= 1 ms at 10,000 x 2,048; one prediction
<= 5 us. Eight H100-class GPUs serve an 8B model; prompts are log-normal around 1,000 tokens, one in
twenty has 100,000 to 500,000. A router has decided for each whether its deadline is promised, from
the replica's last report; that is not counted. Every batch is acknowledged and completed. Finished
requests are replaced, so that the population stays constant: `submit` is the time for all that a
step replaces, `load` that of one report. Policies take turns in one loop, so that whatever else the
machine does slows all of them alike. Times are of the thread's processor, microseconds.
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
from medha.predictor import Predictor
from medha.profile import H100
from medha.request import Request
from medha.scheduling.scheduler import Scheduler
from medha.sim.scenario import LLAMA_3_8B
from medha.testing import SingleReplicaRouter
from medha.topology import Topology

PARTS = ("submit", "next_batch", "complete", "load")
# Most microseconds of a step, by (waiting, decodes), and of a prediction.
STEP_P50_US = {(1_000, 256): 300.0, (10_000, 2_048): 1_000.0}
PREDICTION_US = 5.0
GRID = (
    *((waiting, decodes) for waiting in (100, 1_000, 10_000) for decodes in (64, 512, 2_048)),
    (1_000, 256),
)
# Requests that arrive together while the population grows.
TOGETHER = 64


class Population:
    """A scheduler held at a number of waiting prefills and running decodes."""

    def __init__(self, waiting: int, decodes: int, policy: str, seed: int = 0) -> None:
        layout = Topology(tp=8)
        self.predictor = Predictor(H100, LLAMA_3_8B, layout)
        settings = Scheduling(policy=policy, max_running=4 * (waiting + decodes))
        self.scheduler = Scheduler(
            layout,
            LLAMA_3_8B,
            self.predictor,
            settings,
            2_000_000,
            64,
            LLAMA_3_8B.max_context_tokens,
        )
        self.scheduler.group_joined(0, 1, 0.0)
        self.router = SingleReplicaRouter(self.scheduler)
        self.router.update(self.scheduler.load(0.0), 0.0)
        self.waiting, self.decodes = waiting, decodes
        self.dice = random.Random(seed)
        self.now, self.count, self.queued = 0.0, 0, 0
        self.decoding: set[int] = set()
        while len(self.decoding) < decodes:
            for _ in range(min(TOGETHER, decodes - len(self.decoding))):
                self._submit(self._request(short=True))
            while self.queued:
                self._run()
        while self.queued < waiting:
            self._submit(self._request())
            self.router.update(self.scheduler.load(0.0), 0.0)

    def step(self) -> tuple[int, tuple[float, ...]]:
        """Run a batch and replace what finished; return their number and seconds by PARTS."""
        formed_s, completed_s = self._run()
        requests = [self._request() for _ in range(self.waiting - self.queued)]
        began = time.thread_time()
        for request in requests:
            self._submit(request)
        submitted = time.thread_time()
        load = self.scheduler.load(self.now)
        loaded = time.thread_time()
        self.router.update(load, self.now)
        return len(requests), (submitted - began, formed_s, completed_s, loaded - submitted)

    def _request(self, short: bool = False) -> Request:
        long = not short and self.dice.random() < 0.05
        tokens = (
            self.dice.randint(100_000, 500_000)
            if long
            else min(16_000, max(16, int(self.dice.lognormvariate(6.9, 1.0))))
        )
        work_s = self.predictor.prefill_s(tokens)
        self.count += 1
        arriving = Request(
            id=f"r{self.count}",
            arrival_s=self.now,
            prompt_tokens=tokens,
            tpot_s=0.1,
            max_output_tokens=4_096,
            ttft_deadline_s=max(0.5, 1.5 * work_s) + self.dice.uniform(0.0, 60.0),
            work_s=work_s,
        )
        return self.router.decide_by_last(arriving, self.now)

    def _submit(self, request: Request) -> None:
        self.queued += 1
        self.scheduler.submit(request, self.now)

    def _run(self) -> tuple[float, float]:
        """Run a batch; return the seconds to form it, and to acknowledge and complete it."""
        began = time.thread_time()
        batch = self.scheduler.next_batch(self.now, frozenset({0}))
        formed_s = time.thread_time() - began
        if batch is None:
            raise RuntimeError("nothing to run, although prompts wait")
        self.now += batch.predicted_s
        result = self._outcome(batch)
        began = time.thread_time()
        self.scheduler.stage_done(batch.number, 0, self.now)
        self.scheduler.complete(batch.number, result, self.now)
        return formed_s, time.thread_time() - began

    def _outcome(self, batch: Batch) -> BatchResult:
        """Return the tokens of a batch; a prompt ends with its first if enough others decode."""
        sampled = []
        for chunk in batch.chunks:
            if not chunk.yields:
                continue
            surplus = False
            if not chunk.decode:
                self.queued -= 1
                surplus = len(self.decoding) >= self.decodes
                if not surplus:
                    self.decoding.add(chunk.seq)
            sampled.append(Sampled(chunk.seq, surplus))
        return BatchResult(tuple(sampled))


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def prediction_s(population: Population, count: int = 20_000) -> float:
    """Return the processor seconds of one prediction: a chunk with the decodes and some prompts."""
    dice, loads = random.Random(1), []
    for _ in range(64):
        load = population.predictor.load()
        load.add_decodes(population.decodes, 1500 * population.decodes)
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


def verdict(value: float, most: float) -> str:
    return f"   target {most:.0f}: {'ok' if value <= most else 'MISSED'}"


def measure(waiting: int, decodes: int, policies: list[str], rounds: int) -> None:
    """Print a row per policy; the first one has the target."""
    populations = [Population(waiting, decodes, policy) for policy in policies]
    for population in populations:
        for _ in range(20):
            population.step()
    gc.collect()
    gc.freeze()
    steps: list[list[tuple[int, tuple[float, ...]]]] = [[] for _ in policies]
    for _ in range(rounds):
        for population, row in zip(populations, steps, strict=True):
            row.append(population.step())
    gc.unfreeze()
    for policy, row in zip(policies, steps, strict=True):
        parts = [[1e6 * second for second in seconds] for _, seconds in row]
        columns = [*map(list, zip(*parts, strict=True)), [sum(seconds) for seconds in parts]]
        cells = "".join(f"{quantile(us, 0.5):8.0f} {quantile(us, 0.99):7.0f}" for us in columns)
        replaced = sum(count for count, _ in row) / rounds
        line = f"{waiting:7} {decodes:7} {policy:10} {replaced:7.1f}{cells}"
        most_us = STEP_P50_US.get((waiting, decodes)) if policy == policies[0] else None
        if most_us is not None:
            line += verdict(quantile(columns[-1], 0.5), most_us)
        print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--waiting", type=int, default=1_000)
    parser.add_argument("--decodes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument("--policies", default="lars,lars-paper", help="the first has the targets")
    parser.add_argument("--grid", action="store_true", help="all sizes")
    options = parser.parse_args()
    print(f"mypyc: {compiled.stale() or 'compiled'}")
    prediction_us = 1e6 * prediction_s(Population(0, 256, "fcfs"))
    print(f"prediction: {prediction_us:.1f} us{verdict(prediction_us, PREDICTION_US)}")
    names = "".join(f"{name:>16}" for name in (*PARTS, "step"))
    print(f"{'p50 and p99 in us':25} submits{names}")
    sizes = GRID if options.grid else ((options.waiting, options.decodes),)
    for waiting, decodes in sizes:
        measure(waiting, decodes, options.policies.split(","), options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
