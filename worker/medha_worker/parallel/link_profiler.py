"""Measure exchanges between ranks of this machine: sums over all, and messages from one to another.

    python -m medha_worker.parallel.link_profiler --device cpu --ranks 2       for `medha calibrate`

Each rank is a process, with a GPU of its own or over gloo on the loopback interface, and exchanges
tensors as when serving. Rank 0 writes lines of `TimedExchange` to stdout: the shortest of several
rounds, as disturbances only add time. With a single rank there is nothing to measure.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
import torch

from medha.calibration import EXCHANGES, ExchangeKind, TimedExchange
from medha.errors import MedhaError, UserError
from medha.measurement_plan import exchange_sizes
from medha_worker.device import ComputeDevice, device_of
from medha_worker.parallel.communicator import Communicator, ShardGroup, join
from medha_worker.parallel.mesh import dial_store, serve_store

LEAST_ROUNDS, MOST_REPEATS = 3, 16
LARGEST_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
TIMEOUT_S = 60.0


class LinkBench:
    """A rank that exchanges tensors with all others, or with one."""

    def __init__(self, communicator: Communicator, device: ComputeDevice) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self._communicator, self._device = communicator, device
        self._shards = ShardGroup(communicator, ordered=False)

    def seconds(self, kind: ExchangeKind, size_bytes: int) -> float:
        """Return the seconds of an exchange as this rank sees it; all ranks must call it."""
        tensor = torch.zeros(size_bytes // 4, device=self._device.at)
        exchange = self._sum if kind == "all-reduce" else self._send
        repeats = 1  # each time that a process waits for a core counts by itself
        if self._device.at.type != "cpu":
            repeats = max(2, min(MOST_REPEATS, (1 << 20) // size_bytes))
        exchange(tensor)  # all ranks are here, and warm
        self._device.fetch().wait()
        began = time.perf_counter()
        for _ in range(repeats):
            exchange(tensor)
        self._device.fetch().wait()
        took_s = (time.perf_counter() - began) / repeats
        return took_s if kind == "all-reduce" else took_s / 2

    def agreed(self, go_on: bool) -> bool:
        """Return `go_on` of rank 0, on all ranks."""
        own = torch.tensor([float(go_on)], device=self._device.at)
        return bool(self._communicator.gather(own)[0].item())

    def _sum(self, tensor: torch.Tensor) -> None:
        self._shards.all_reduce(tensor)

    def _send(self, tensor: torch.Tensor) -> None:
        """Send from rank 0 to rank 1, and back."""
        if self.rank > 1:
            return
        there = self._communicator.exchange
        if self.rank == 0:
            there({1: tensor}, {})
            there({}, {1: tensor})
        else:
            there({}, {0: tensor})
            there({0: tensor}, {})


def measure(
    bench: LinkBench, largest_bytes: int, seconds: float, report: Callable[[TimedExchange], None]
) -> None:
    """Time exchanges of all sizes in rounds for about `seconds`; rank 0 reports the shortest times.

    A pause of the machine spoils one round only.
    """
    sizes = list(exchange_sizes(largest_bytes))
    shortest_s = {(kind, size): math.inf for kind in EXCHANGES for size, _ in sizes}
    began, rounds = time.perf_counter(), 0
    while rounds < LEAST_ROUNDS or bench.agreed(time.perf_counter() - began < seconds):
        for (kind, size), known_s in shortest_s.items():
            shortest_s[kind, size] = min(known_s, bench.seconds(kind, size))
        rounds += 1
    for kind in EXCHANGES:
        for size, unseen in sizes:
            if bench.rank == 0:
                report(TimedExchange(kind, bench.size, size, shortest_s[kind, size], unseen))


def ranks_here(device: str) -> int:
    """Return how many ranks can exchange here: one for each GPU, or two on a CPU's cores."""
    return torch.cuda.device_count() if device == "cuda" else min(2, os.cpu_count() or 1)


def run_rank(given: argparse.Namespace) -> None:
    """Be one of the ranks."""
    torch.set_num_threads(1)
    device = device_of(given.device)
    communicator = join(
        dial_store(given.store, TIMEOUT_S),
        "calibrate",
        given.rank,
        given.ranks,
        incarnation=str(given.rank),
        interface="lo",
        timeout_s=TIMEOUT_S,
        device=device if device.at.type == "cuda" else None,
    )
    measure(LinkBench(communicator, device), LARGEST_BYTES[given.device], given.seconds, _write)


def run_all(device: str, ranks: int, seconds: float) -> int:
    """Run all ranks as processes; return the first status that is not 0."""
    store, address = serve_store("127.0.0.1:0")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(ranks)))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            argv = [sys.executable, "-m", "medha_worker.parallel.link_profiler"]
            argv += ["--device", device, "--ranks", str(ranks), "--rank", str(rank)]
            argv += ["--seconds", str(seconds)]
            own = {"CUDA_VISIBLE_DEVICES": visible.split(",")[rank]} if device == "cuda" else {}
            processes.append(
                subprocess.Popen([*argv, "--store", address], env={**os.environ, **own})
            )
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            time.sleep(0.05)
        return next((status for p in processes if (status := p.poll())), 0)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        del store


def _write(report: TimedExchange) -> None:
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    sys.stdout.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", required=True)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store", default="")
    return parser.parse_args()


def main() -> None:
    given = _arguments()
    try:
        device_of(given.device)
        ranks = given.ranks or ranks_here(given.device)
        if given.rank is not None:
            run_rank(given)
        elif ranks > 1:
            sys.exit(run_all(given.device, ranks, given.seconds))
    except MedhaError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2 if isinstance(error, UserError) else 1)


if __name__ == "__main__":
    main()
