"""Exchanges between ranks are measured in real processes, by the code that serves."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import timedelta

import msgspec
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from medha.calibration import EXCHANGES, ExchangeKind, TimedExchange
from medha.measurement_plan import exchange_sizes
from medha_worker.device import CPU
from medha_worker.parallel.communicator import join
from medha_worker.parallel.link_profiler import LEAST_ROUNDS, LinkBench, measure


def profiled(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    argv = [sys.executable, "-m", "medha_worker.parallel.link_profiler", *arguments]
    return subprocess.run(argv, capture_output=True, timeout=240, check=False)


def test_ranks_of_a_cpu_exchange_every_size() -> None:
    done = profiled("--device", "cpu", "--ranks", "3", "--seconds", "0.1")
    assert done.returncode == 0, done.stderr
    lines = [msgspec.json.decode(line, type=TimedExchange) for line in done.stdout.splitlines()]
    sizes = list(exchange_sizes(4 << 20))
    assert [(own.kind, own.size_bytes, own.unseen) for own in lines] == [
        (kind, *size) for kind in EXCHANGES for size in sizes
    ]
    assert {own.ranks for own in lines} == {3}
    assert all(0.0 < own.seconds < 60.0 for own in lines)


def test_a_single_rank_has_nothing_to_measure() -> None:
    done = profiled("--device", "cpu", "--ranks", "1")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_here_is_named() -> None:
    done = profiled("--device", "cuda")
    assert done.returncode == 2 and b"device is cuda: torch finds no GPU" in done.stderr


def test_rank_0_ends_the_rounds_of_all() -> None:
    """Ranks with other clocks make the same number of rounds."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    reports: dict[int, list[TimedExchange]] = {0: [], 1: []}
    counts: dict[int, int] = {}

    def member(rank: int) -> None:
        communicator = join(
            store, "links", rank, 2, incarnation=str(rank), interface="lo", timeout_s=20.0
        )
        calls = 0

        class Counted(LinkBench):
            def seconds(self, kind: ExchangeKind, size_bytes: int) -> float:
                nonlocal calls
                calls += 1
                return super().seconds(kind, size_bytes)

        bench = Counted(communicator, CPU)
        measure(bench, 8192, 0.3 if rank == 0 else 0.0, reports[rank].append)
        counts[rank] = calls

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts[0] == counts[1] > LEAST_ROUNDS * 2 * 3
    assert len(reports[0]) == 2 * 3 and reports[1] == []
