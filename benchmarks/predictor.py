"""Time of predictions and of the router's decisions: `python -m benchmarks.predictor`.

Goals: a what-if inside the batch builder ≤ 5 µs, the prefill table to ten million tokens ≤ 2 s, ten
thousand queued requests re-ordered in ≤ 2 ms.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from medha.fleet.request_queue import QueuedRequest, RequestQueue
from medha.predictor import Predictor
from medha.profile import A100
from medha.sim.scenario import LLAMA_3_8B
from medha.topology import Topology


def microseconds(action: Callable[[], object], repeats: int) -> float:
    """Median over five rounds of the mean time of one call."""
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            action()
        rounds.append(1e6 * (time.perf_counter() - start) / repeats)
    return statistics.median(rounds)


def main() -> None:
    of = Predictor(A100, LLAMA_3_8B, Topology(tp=8, spp=2))
    load = of.load()
    for _ in range(64):
        load.add_decode(2000)
    ask = microseconds(lambda: load.seconds_with(512, 100_000), 20_000)
    print(f"what-if            {ask:8.2f} µs")
    chunk = microseconds(lambda: of.largest_chunk(load, 100_000, 900_000, 0.1), 2000)
    print(f"largest chunk      {chunk:8.2f} µs")
    start = time.perf_counter()
    of.prefill_s(10_000_000)
    print(f"table to 10 M      {1e3 * (time.perf_counter() - start):8.2f} ms")
    print(f"prefill_s          {microseconds(lambda: of.prefill_s(777_777), 10_000):8.2f} µs")

    rng, queue = random.Random(0), RequestQueue()
    for index in range(10_000):
        queue.add(
            QueuedRequest(
                id=str(index),
                arrival_s=rng.uniform(0, 9),
                due_s=rng.uniform(0, 100),
                work_s=rng.uniform(0.01, 50),
                promised=rng.random() < 0.8,
                replica=f"r{index % 4}",
            )
        )
    print(f"order of 10,000    {microseconds(lambda: queue.order(1.0), 10) / 1e3:8.2f} ms")
    print(f"heads of 4         {microseconds(lambda: queue.heads(1.0), 10) / 1e3:8.2f} ms")


if __name__ == "__main__":
    main()
