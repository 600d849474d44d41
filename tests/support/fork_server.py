"""A process that imports torch once and forks rank processes, so that tests start them fast.

    python -m tests.support.fork_server      reads `RankStart`s from stdin, writes pids to stdout

Each order is a JSON line. Children die with the fork server, and the server ends with its stdin.
A child runs `medha_worker.rank.run` unchanged; only its sampler is wrapped, to record logits.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pathlib
import signal
import sys
from collections.abc import Sequence

import msgspec
import torch

from medha.adapters.logs import start_logs
from medha.config import WorkerConfig, read
from medha.topology import Coordinate
from medha_worker import rank, sampler
from medha_worker.device import ComputeDevice
from medha_worker.runner import Sample
from medha_worker.sampler import SampledRow, SampledTokens

_PR_SET_PDEATHSIG = 1


class RankStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank to start.

    `logits` names the file to which sampled rows are appended (float32). `change` is
    `file.py:function`: the child calls it before it runs, to introduce a fault.
    """

    config: str
    group: int
    stage: int
    shard: int
    logits: str = ""
    log: str = ""
    change: str = ""


def recording(path: pathlib.Path) -> Sample:
    """A sampler that also appends its logits to `path`."""
    file = path.open("ab", buffering=0)

    def sample(
        logits: torch.Tensor, draws: Sequence[SampledRow], device: ComputeDevice
    ) -> SampledTokens:
        file.write(logits.cpu().numpy().tobytes())
        return sampler.draw(logits, draws, device)

    return sample


def _run_rank(order: RankStart) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if order.log:
        log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
    config = read(WorkerConfig, pathlib.Path(order.config))
    at = Coordinate(order.group, order.stage, order.shard)
    start_logs(f"rank {at}", config.log_level)
    if order.change:
        _change(order.change)
    sample = recording(pathlib.Path(order.logits)) if order.logits else sampler.draw
    return rank.run(config, at, sample)


def _change(place: str) -> None:
    path, _, function = place.rpartition(":")
    spec = importlib.util.spec_from_file_location("change", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, function)()


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children leave no zombies
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=RankStart)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(0)
                status = _run_rank(order)
            finally:
                os._exit(status)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
