"""Starts rank processes fast: one process imports torch once, every rank is a fork of it.

    python -m medha_worker.testing.nursery      reads orders from stdin, answers on stdout

An order is a JSON line (`Birth`); the answer is the child's pid. Children die with the nursery, the
nursery ends with its stdin. A child runs `medha_worker.rank.run` as it is; only its sampler is
wrapped when the logits are to be recorded. For tests and benchmarks.
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
from medha_worker.device import Device
from medha_worker.runner import Sample
from medha_worker.sampler import Draw, Drawn

_PR_SET_PDEATHSIG = 1


class Birth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank to start. `logits`: file to which the rows it samples are appended (float32).

    `change`: `file.py:function`, called in the child before it runs, to make it wrong on purpose.
    """

    config: str
    group: int
    stage: int
    shard: int
    logits: str = ""
    log: str = ""
    change: str = ""


def recording(path: pathlib.Path) -> Sample:
    """The sampler, which appends the logits that it sees to `path`."""
    file = path.open("ab", buffering=0)

    def sample(logits: torch.Tensor, draws: Sequence[Draw], device: Device) -> Drawn:
        file.write(logits.cpu().numpy().tobytes())
        return sampler.draw(logits, draws, device)

    return sample


def _live(birth: Birth) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if birth.log:
        log = os.open(birth.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
    config = read(WorkerConfig, pathlib.Path(birth.config))
    at = Coordinate(birth.group, birth.stage, birth.shard)
    start_logs(f"rank {at}", config.log_level)
    if birth.change:
        _change(birth.change)
    sample = recording(pathlib.Path(birth.logits)) if birth.logits else sampler.draw
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
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead leave no zombies
    for line in sys.stdin:
        birth = msgspec.json.decode(line, type=Birth)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(0)
                status = _live(birth)
            finally:
                os._exit(status)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
