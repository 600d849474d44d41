"""Two long prompts among 36 short ones, on `medha up` and on vLLM's CPU server: who waits.

    python -m benchmarks.cpu_serving_peers --vllm VENV/bin/python
    python -m benchmarks.cpu_serving_peers --vllm VENV/bin/python --alone-s 4 --rounds 3

The workload of `make demo` (see demos/comparison.py), in the same seconds for all servers: its unit
`alone_s` is the time of the loose prompt alone on the first fleet, or what --alone-s gives. Medha
runs the fleet of examples/tiny.yaml, two ranks of a thread each; vLLM gets the same checkpoint in
float32, as many threads, Intel's OpenMP, eager mode and no prefix cache, once with its defaults and
once with --long-prefill-token-threshold. Servers take turns, one at a time, and each first computes
the loose prompt alone. Clients are open-loop; times are theirs, by the wall clock: median of the
rounds. Exits with 1 if short prompts of Medha wait longer at p99 than the others'. Environment of
vLLM: see cpu_peers.py.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import httpx
from benchmarks.cpu_peers import vllm_environment
from demos.comparison import LONGS, LOOSE_TOKENS, POLICIES, Outcome, arrivals, figures
from demos.local import BUILD, HOST, MODEL, Play, alone, fleet
from rich.console import Console
from rich.table import Table

from medha.cli.local_fleet.preflight import free_ports
from medha.errors import EngineError
from medha_worker.model.checkpoint_writer import write_checkpoint

THREADS, CONTEXT_TOKENS, THRESHOLD_TOKENS = 2, 24_576, 512
READY_S = 400.0
KV_BYTES = 1 << 30


Server = Callable[[], contextlib.AbstractContextManager[str]]
"""Starts a server and gives its URL."""


class Servers:
    """The servers to compare, by name; vLLM's log goes to `folder`."""

    def __init__(self, interpreter: pathlib.Path, folder: pathlib.Path, console: Console) -> None:
        self._interpreter, self._folder, self._console = interpreter, folder, console

    def all(self) -> dict[str, Server]:
        return {
            "medha": self.medha,
            "vllm": lambda: self.vllm(),
            f"vllm, threshold {THRESHOLD_TOKENS}": lambda: self.vllm(
                "--long-prefill-token-threshold", str(THRESHOLD_TOKENS)
            ),
        }

    @contextlib.contextmanager
    def medha(self) -> Iterator[str]:
        """Run the demo's fleet with its policy LARS."""
        with fleet("peers", POLICIES["lars"], self._console) as running:
            yield running.url

    @contextlib.contextmanager
    def vllm(self, *options: str) -> Iterator[str]:
        """Run `vllm serve`, and end it with its engine afterwards."""
        (port,) = free_ports(HOST, 1)
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:THREADS]))
        log = self._folder / "vllm.log"
        command = [
            *(str(self._interpreter), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(BUILD / "tiny"), "--served-model-name", "tiny"),
            *("--host", HOST, "--port", str(port), "--dtype", "float32", "--enforce-eager"),
            *("--no-enable-prefix-caching", "--max-model-len", str(CONTEXT_TOKENS)),
            *("--kv-cache-memory-bytes", str(KV_BYTES), *options),
        ]
        environment = vllm_environment(self._interpreter) | {
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "OMP_NUM_THREADS": str(THREADS),
            "VLLM_NO_USAGE_STATS": "1",
        }
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            try:
                self._wait(process, f"http://{HOST}:{port}", log)
                yield f"http://{HOST}:{port}"
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _wait(self, process: subprocess.Popen[bytes], url: str, log: pathlib.Path) -> None:
        until = time.monotonic() + READY_S
        with self._console.status("vllm loads"), httpx.Client(trust_env=False) as client:
            while process.poll() is None and time.monotonic() < until:
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{url}/health").status_code == 200:
                        return
                time.sleep(0.5)
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise EngineError(f"vLLM did not get ready within {READY_S:.0f} s:\n{tail}")


def played(url: str, alone_s: float | None) -> tuple[float, Outcome]:
    """Play the arrivals after a warm-up; return the loose prompt's time alone and the outcome.

    `alone_s`: unit of the arrivals; None: the time alone.
    """
    alone(url, "warm", LOOSE_TOKENS)
    own_s = alone(url, "alone", LOOSE_TOKENS)
    unit_s = alone_s or own_s
    records = Play(url, unit_s).send(arrivals(unit_s))
    return own_s, Outcome(alone_s=unit_s, records=tuple(records))


class Result(NamedTuple):
    """Seconds of a server, and its short prompts in time: medians over the rounds."""

    alone_s: float
    short_p50_s: float
    short_p99_s: float
    longs_s: tuple[float, ...]
    longs_end_s: float
    late: float

    @classmethod
    def of(cls, rounds: Sequence[tuple[float, Outcome]]) -> Result:
        measured = [(alone_s, outcome, figures(outcome)) for alone_s, outcome in rounds]
        return cls(
            statistics.median(alone_s for alone_s, *_ in measured),
            statistics.median(row["short_ttft_p50_s"] for *_, row in measured),
            statistics.median(row["short_ttft_p99_s"] for *_, row in measured),
            tuple(statistics.median(row["ttft_s"][name] for *_, row in measured) for name in LONGS),
            statistics.median(row["longs_end_s"] for *_, row in measured),
            statistics.median(row["short_late"] for *_, row in measured),
        )


def show(results: Mapping[str, Result], console: Console) -> None:
    table = Table(title="Times in seconds, number of short prompts late", title_justify="left")
    table.add_column("server", no_wrap=True)
    for column in ("alone", "short p50", "p99", "late", *LONGS, "longs end"):
        table.add_column(column, justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.alone_s:.1f}",
            f"{result.short_p50_s:.2f}",
            f"{result.short_p99_s:.2f}",
            f"{result.late:.0f}",
            *(f"{seconds:.1f}" for seconds in result.longs_s),
            f"{result.longs_end_s:.1f}",
        )
    console.print(table)


def main() -> int:
    given = arguments()
    console = Console(width=120)
    write_checkpoint(BUILD / "tiny", MODEL)
    alone_s = given.alone_s
    with tempfile.TemporaryDirectory() as name:
        servers = Servers(given.vllm, pathlib.Path(name), console).all()
        rounds: dict[str, list[tuple[float, Outcome]]] = {name: [] for name in servers}
        for _ in range(given.rounds):
            for name, server in servers.items():
                with server() as url:
                    rounds[name].append(played(url, alone_s))
                alone_s = rounds[name][-1][1].alone_s
                console.print(name, Result.of(rounds[name][-1:]), highlight=False)
    results = {name: Result.of(outcomes) for name, outcomes in rounds.items()}
    show(results, console)
    ours, *theirs = results.values()
    sooner = all(ours.short_p99_s < other.short_p99_s for other in theirs)
    slower = ours.longs_end_s / min(other.longs_end_s for other in theirs)
    console.print(
        f"short p99 {'met' if sooner else 'MISSED'}, long prompts take {slower:.2f} times"
    )
    return 0 if sooner else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--vllm", type=pathlib.Path, required=True, help="interpreter of vLLM's environment"
    )
    parser.add_argument("--alone-s", type=float, help="unit of the arrivals, in seconds")
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds; medians count")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
