"""Five policies on a real fleet on this machine, side by side: who waits for two long prompts.

    make demo

Writes a small checkpoint, and for each policy starts the fleet of examples/tiny.yaml with `medha
up`, sends a long prompt alone, and plays the same arrivals (see comparison). The first fleet also
answers a question through the `openai` client, the last one a prompt that outgrows a KVP group.
Prints a table, a picture and checks, and writes build/demo.json. All figures are measured by the
client, or come from /status, /metrics and the decision log. Exit status 0: the checks hold; 1: one
does not, or something failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import openai
import yaml
from demos.comparison import (
    LONGS,
    LOOSE,
    LOOSE_TOKENS,
    POLICIES,
    SEED,
    TIGHT,
    TIGHT_TOKENS,
    TPOT_S,
    Outcome,
    Span,
    arrivals,
    checks,
    deadline_s,
    figures,
)
from demos.load import Growth
from demos.timeline import LEGEND, axis, picture
from rich.console import Console
from rich.table import Table

from medha.batch import Batch
from medha.cli.local_fleet.preflight import free_ports
from medha.cli.open_loop import Target, ask, connect, prompts_from, vocabulary
from medha.errors import EngineError
from medha.request import Request
from medha.scheduling.decision_log import LogEntry, replay
from medha.scheduling.interface import Admitted
from medha.sim.report import RequestRecord
from medha.sim.workload import Arrival
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
HOST = "127.0.0.1"
MODEL = TinyModel(
    layers=4,
    hidden=512,
    heads=8,
    kv_heads=2,
    head_dim=64,
    intermediate=2048,
    vocab=2048,
    max_tokens=32_768,
)
READY_S, PLAY_S = 90.0, 300.0
GROWN_TOKENS = 18_432  # more than tokensPerGroup


class Fleet:
    """A running `medha up`: the URLs of its router and of its controller's ops port."""

    def __init__(self, folder: pathlib.Path, port: int) -> None:
        config = json.loads((folder / "tiny-0.json").read_bytes())
        self.url = f"http://{HOST}:{port}"
        self.controller = f"http://{HOST}:{config['ops_port']}"


@contextlib.contextmanager
def fleet(name: str, scheduling: dict[str, Any], console: Console) -> Iterator[Fleet]:
    """Run the fleet of tiny.yaml with these scheduling settings; stop it at the end."""
    folder = BUILD / "demo" / name
    folder.mkdir(parents=True, exist_ok=True)
    document = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    document["spec"]["scheduling"] = {**document["spec"]["scheduling"], **scheduling}
    document["spec"]["model"]["source"]["hostPath"]["path"] = str(BUILD / "tiny")
    file = folder / "replica.yaml"
    file.write_text(yaml.safe_dump(document))
    port, ops_port = free_ports(HOST, 2)
    command = [sys.executable, "-m", "medha.cli", "up", "-f", str(file), "--run-dir", str(folder)]
    command += ["--port", str(port), "--ops-port", str(ops_port), "--quiet", "--decision-log"]
    log = folder / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            with console.status(f"{name}: the fleet loads"):
                _wait_until_ready(process, log)
            yield Fleet(folder, port)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], log: pathlib.Path) -> None:
    until = time.monotonic() + READY_S
    while "Serving on" not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > until:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise EngineError(f"the fleet did not get ready within {READY_S:.0f} s:\n{tail}")
        time.sleep(0.1)


def chat(running: Fleet) -> str:
    """Send a question through the official client."""
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Where do short prompts wait?"}],
            max_tokens=8,
        )
    usage = answer.usage
    if usage is None or usage.completion_tokens < 1 or answer.choices[0].finish_reason is None:
        raise EngineError(f"the chat completion is not whole: {answer}")
    return answer.choices[0].message.content or ""


class Play:
    """Requests sent to a server, each at its time; `start_s` is time zero on the monotonic clock.

    `alone_s`: scale of the deadlines; None: those of the class.
    """

    def __init__(self, url: str, alone_s: float | None = None) -> None:
        self._target = Target(url=url, model="tiny", tpot_s=TPOT_S, unpromised_ttft_s=60.0)
        self._alone_s = alone_s
        self.start_s = 0.0

    def send(self, planned: Sequence[Arrival]) -> list[RequestRecord]:
        """Send all and wait for the answers; raises EngineError if one is missing."""
        records = asyncio.run(asyncio.wait_for(self._send(planned), PLAY_S))
        lost = [f"{record.id} ({record.refused})" for record in records if not record.finished_s]
        if lost:
            raise EngineError(f"{len(lost)} requests were not answered: {', '.join(lost[:5])}")
        return records

    async def _send(self, planned: Sequence[Arrival]) -> list[RequestRecord]:
        async with connect(self._target.url) as client:
            prompts = prompts_from(await vocabulary(client, self._target), SEED)
            self.start_s = time.monotonic()

            async def due(arrival: Arrival) -> RequestRecord:
                target = self._target
                if self._alone_s is not None:
                    due_s = deadline_s(arrival.id, self._alone_s)
                    target = msgspec.structs.replace(target, ttft_s=due_s)
                await asyncio.sleep(self.start_s + arrival.arrival_s - time.monotonic())
                return await ask(client, target, arrival, prompts(arrival), self.start_s)

            return await asyncio.gather(*map(due, planned))


def alone(url: str, name: str, tokens: int) -> float:
    """Time to the first token of a prompt that has the server at `url` for itself."""
    arrival = Arrival(id=name, arrival_s=0.0, prompt_tokens=tokens, output_tokens=8)
    first_s = Play(url).send([arrival])[0].first_token_s
    assert first_s is not None
    return first_s


def computed(log: Iterable[bytes], start_s: float) -> dict[str, list[Span]]:
    """Start and end of the batches with a part of TIGHT or LOOSE, in seconds since `start_s`.

    Lengths identify the requests; those before `start_s` do not count.
    """
    named = {TIGHT_TOKENS: TIGHT, LOOSE_TOKENS: LOOSE}
    sequences: dict[int, str] = {}
    begun: dict[int, tuple[float, set[str]]] = {}
    spans: dict[str, list[Span]] = {TIGHT: [], LOOSE: []}
    for row in itertools.islice(log, 1, None):
        entry = msgspec.json.decode(row, type=LogEntry)
        if entry.call == "submit":
            request, _, _ = msgspec.json.decode(entry.args, type=tuple[Request, float, list[bytes]])
            if request.prompt_tokens in named and request.arrival_s >= start_s:
                admitted = msgspec.json.decode(entry.outcome, type=Admitted)
                sequences[admitted.seq] = named[request.prompt_tokens]
        elif entry.call == "next_batch":
            batch = msgspec.json.decode(entry.outcome, type=Batch | None)
            if batch is not None:
                now, _ = msgspec.json.decode(entry.args, type=tuple[float, list[int]])
                prefills = {chunk.seq for chunk in batch.chunks if not chunk.decode}
                begun[batch.number] = now, {sequences[s] for s in prefills & sequences.keys()}
        elif entry.call == "complete":
            number, _, now = msgspec.json.decode(entry.args, type=tuple[int, msgspec.Raw, float])
            began_s, names = begun.pop(number)
            for name in names:
                spans[name].append((began_s - start_s, now - start_s))
    return spans


def show(outcomes: Mapping[str, Outcome], console: Console) -> None:
    """Print a table and a picture of all policies."""
    table = Table(title="Times in seconds, number of short prompts late", title_justify="left")
    table.add_column("policy", no_wrap=True)
    for column in ("alone", *LONGS, "short p50", "p99", "late", "gap", "longs end"):
        table.add_column(column, justify="right")
    for name, outcome in outcomes.items():
        measured = figures(outcome)
        table.add_row(
            name,
            f"{outcome.alone_s:.1f}",
            *(f"{seconds:.1f}" for seconds in measured["ttft_s"].values()),
            f"{measured['short_ttft_p50_s']:.2f}",
            f"{measured['short_ttft_p99_s']:.2f}",
            str(outcome.late),
            f"{measured['short_gap_s']:.1f}",
            f"{outcome.longs_end_s:.1f}",
        )
    console.print(table)
    end = max(outcome.longs_end for outcome in outcomes.values())
    for name, outcome in outcomes.items():
        for line in picture(name, outcome, end):
            console.print(line, soft_wrap=True, highlight=False)
    console.print(axis(end), soft_wrap=True, highlight=False)
    console.print(f"{LEGEND}\n", highlight=False)


class Demo:
    """The runs of all policies."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.outcomes: dict[str, Outcome] = {}
        self.grown_s = self.moved_bytes = 0.0
        self.joined = False

    def run(self, name: str) -> None:
        """Start a fleet with this policy and play the arrivals."""
        with fleet(name, POLICIES[name], self._console) as running:
            with self._console.status(f"{name}: a long prompt alone"):
                alone_s = alone(running.url, "alone", LOOSE_TOKENS)
            planned, play = arrivals(alone_s), Play(running.url, alone_s)
            with self._console.status(f"{name}: {len(planned)} requests"):
                records = play.send(planned)
            if name == "lars":
                self._console.print(f"chat completion: {chat(running)!r}", highlight=False)
                self._grow(running)
        with _log(name).open("rb") as lines:
            spans = computed(lines, play.start_s)
        outcome = Outcome(alone_s=alone_s, records=tuple(records), computed=spans)
        self.outcomes[name] = outcome
        self._console.print(
            f"{name}: a long prompt alone {alone_s:.1f} s, both long ones "
            f"{outcome.longs_end_s:.1f} s, {outcome.late} short ones late",
            highlight=False,
        )

    def _grow(self, running: Fleet) -> None:
        with (
            self._console.status("lars: a prompt outgrows a KVP group"),
            Growth(running.controller) as growth,
        ):
            self.grown_s = alone(running.url, "grown", GROWN_TOKENS)
        self.joined, self.moved_bytes = growth.joined_s is not None, growth.moved_bytes


def main() -> int:
    console = Console()
    BUILD.mkdir(exist_ok=True)
    with console.status("writes the checkpoint"):
        write_checkpoint(BUILD / "tiny", MODEL)
    demo = Demo(console)
    for name in POLICIES:
        demo.run(name)
    with _log("lars").open("rb") as lines:
        console.print(f"the {replay(lines)} decisions of lars, run again, come out the same")
    show(demo.outcomes, console)
    verdicts = checks(demo.outcomes)
    verdicts["a KVP group joined, and KV pages moved over NIXL"] = (
        demo.joined and demo.moved_bytes > 0
    )
    report = {
        "policies": {name: figures(outcome) for name, outcome in demo.outcomes.items()},
        "grown": {"ttft_s": demo.grown_s, "kv_bytes_moved": demo.moved_bytes},
        "checks": verdicts,
        "ok": all(verdicts.values()),
    }
    (BUILD / "demo.json").write_text(json.dumps(report, indent=2) + "\n")
    for claim, held in verdicts.items():
        console.print(f"[{'green' if held else 'bold red'}]{'✓' if held else '✗'}[/] {claim}")
    return 0 if report["ok"] else 1


def _log(name: str) -> pathlib.Path:
    return BUILD / "demo" / name / "tiny-0.decisions.jsonl"


if __name__ == "__main__":
    sys.exit(main())
