"""Starts one replica's controller: `python -m medha_worker.controller --config FILE`.

The composition root: every part of the controller is created here. Exit status 2 means that a
person must fix the config, the checkpoint or the machine; the message explains how.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import pathlib
import signal
import sys
import time

from medha import compiled
from medha.adapters.logs import start_logs
from medha.adapters.prometheus import Metrics
from medha.config import WorkerConfig, read
from medha.errors import SpecError, UserError
from medha_worker.controller.controller import Controller
from medha_worker.controller.process import (
    ControllerProcess,
    ModelMetrics,
    identity_of,
    scheduler_maker,
)

log = logging.getLogger("medha.controller")


def serve(config: WorkerConfig) -> None:
    """Run the controller of `config` until SIGTERM or SIGINT."""
    identity = identity_of(config)
    metrics = Metrics("controller")
    with contextlib.ExitStack() as open_files:
        decisions = None
        if config.decision_log:
            decisions = open_files.enter_context(new_log(pathlib.Path(config.decision_log))).write
        controller = Controller(
            config,
            identity,
            make_scheduler=scheduler_maker(config, identity.shape, decisions),
            metrics=ModelMetrics(metrics, config.model),
            clock=time.perf_counter,
        )
        process = ControllerProcess(config, controller, metrics)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: process.leave())
        fields = {"ops_port": process.ops_port, "ranks": config.rank_bind}
        if (why := compiled.stale()) is not None:
            log.warning("the scheduler runs without machine code, slower: %s", why)
        log.info("controller of %s serves", config.replica, extra={"fields": fields})
        process.run()


def new_log(path: pathlib.Path) -> io.FileIO:
    """Open a decision log; an older log at the same path is kept as NAME.before.

    The log is unbuffered, at a microsecond per line, so that a kill does not cut it short.
    """
    try:
        if path.exists():
            path.replace(path.with_name(path.name + ".before"))
        return path.open("wb", buffering=0)
    except OSError as error:
        raise SpecError(
            "decision_log",
            str(path),
            f"must be a file that can be written ({error.strerror})",
            "name one in a folder that exists, such as /tmp/decisions.jsonl",
        ) from None


def main() -> int:
    parser = argparse.ArgumentParser(prog="medha_worker.controller", description=__doc__)
    parser.add_argument("--config", required=True, type=pathlib.Path, help="a WorkerConfig as JSON")
    arguments = parser.parse_args()
    try:
        config = read(WorkerConfig, arguments.config)
        start_logs(f"{config.replica}-controller", config.log_level)
        serve(config)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
