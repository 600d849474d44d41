"""Time of predictions and of the router's decisions: `python -m benchmarks.predictor`.

Goals: a what-if inside the batch builder ≤ 5 µs, the prefill table to ten million tokens ≤ 2 s, ten
thousand queued requests re-ordered in ≤ 2 ms, and as many that arrive at once taken in and placed
in ≤ 5 s.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from medha.fleet.dispatcher import Dispatcher
from medha.fleet.request_queue import QueuedRequest, RequestQueue
from medha.messages import Load
from medha.predictor import Predictor
from medha.profile import A100
from medha.request import Request, SloClass
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


class Arrived:
    """A request as the dispatcher reads it."""

    version, hashes, output_tokens, moves = "", b"", 0, 0

    def __init__(self, request: Request) -> None:
        self.request = request


class IdleReplica:
    """A replica as the dispatcher reads it."""

    version, draining, open = "", False, True
    max_context_tokens, min_batch_s, max_batch_s, max_running = 1 << 20, 0.01, 0.1, 256

    def __init__(self, name: str, predictor: Predictor) -> None:
        self.name, self.predictor = name, predictor
        self.load = Load(free_pages=(60_000,), total_pages=(60_000,))


def burst_s(count: int, predictor: Predictor) -> float:
    """Processor seconds of a router until `count` requests that arrive at once are placed.

    It publishes heads to its four replicas, and gets a load from each, after every 100.
    """
    rng = np.random.default_rng(0)
    dispatcher = Dispatcher[Arrived]((SloClass(when_infeasible="relegate"),))
    replicas = [IdleReplica(f"r{index}", predictor) for index in range(4)]
    began_s = time.process_time()
    for index, tokens in enumerate(np.clip(rng.lognormal(7.44, 1.3, count), 2, 8032).tolist()):
        if index % 100 == 0:
            for replica in replicas:
                dispatcher.update_replica(replica, 0.0)
            dispatcher.relegate_late(0.0)
            dispatcher.place_waiting(0.0)
            for heads in dispatcher.heads(0.0).values():
                dispatcher.published(heads, 0.0)
        work_s = dispatcher.idle_work_s(int(tokens), b"", "", 0.03)
        request = Request(
            id=str(index),
            arrival_s=0.0,
            prompt_tokens=int(tokens),
            max_output_tokens=400,
            ttft_deadline_s=max(0.5, 1.5 * work_s),
            work_s=work_s,
        )
        dispatcher.admit(Arrived(request), SloClass(when_infeasible="relegate"), 0.0)
    return time.process_time() - began_s


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
    print(f"10,000 at once     {burst_s(10_000, of):8.2f} s")


if __name__ == "__main__":
    main()
