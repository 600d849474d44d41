"""Short prompts overtake a long one: four policies on a real fleet on this machine, side by side.

    make demo

Writes a small checkpoint, starts the fleet of examples/tiny.yaml with `medha up`, sends a question
through the `openai` client, then plays the same arrivals under each policy: one long prompt, and
short ones that alone are a tenth of the load. Prints first-token times and waiting times, and
writes build/demo.json. All figures are measured by the client, or from /metrics and /status. Exit
status 0: LARS met the checks; 1: it did not, or something failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import yaml
from rich.console import Console
from rich.table import Table

from medha.cli.local_fleet.preflight import free_ports
from medha.cli.local_fleet.status_poll import read_status
from medha.cli.open_loop import Target, ask, connect, play, prompts_from, vocabulary
from medha.errors import EngineError
from medha.scheduling.decision_log import replay
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

SHORT_TOKENS, LONG_TOKENS = 64, 24_576
SHORT_OUTPUT, LONG_OUTPUT = 1, 4
FEWEST_SHORTS, MOST_SHORTS, SHORTS_S = 50, 120, 20.0
LONG_AT_S, LOAD, SEED = 1.0, 0.1, 7
READY_S, PLAY_S = 90.0, 120.0

POLICIES: dict[str, dict[str, Any]] = {
    "fcfs": {"policy": "FCFS", "batchBudget": {"mode": "Tokens", "tokens": 2048}},
    "threshold": {
        "policy": "FCFS",
        "batchBudget": {"mode": "Tokens", "tokens": 2048},
        "longPrefillThresholdTokens": 512,
    },
    "edf": {"policy": "EDF"},
    "lars": {"policy": "LARS"},
}


class Seen(msgspec.Struct, kw_only=True):
    """Observations of the fleet's ports and decision log during a policy's run.

    `iteration_s`: longest time from a batch's dispatch to its tokens.
    """

    kvp_groups: int = 1
    kv_bytes_moved: int = 0
    iteration_s: float = 0.0
    promises_given: int = 0
    promises_kept: int = 0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a policy's run."""

    records: tuple[RequestRecord, ...]
    seen: Seen

    @property
    def shorts(self) -> list[RequestRecord]:
        return [record for record in self.records if record.id.startswith("short")]

    @property
    def long(self) -> RequestRecord:
        return next(record for record in self.records if record.id == "long")

    @property
    def short_p99_s(self) -> float:
        return float(np.percentile([_ttft(short) for short in self.shorts], 99))

    @property
    def long_finish_s(self) -> float:
        assert self.long.finished_s is not None
        return self.long.finished_s - self.long.arrival_s


class Fleet:
    """A running `medha up`, and its ports."""

    def __init__(self, folder: pathlib.Path, port: int, ops_port: int) -> None:
        self.url, self._ops = f"http://{HOST}:{port}", f"http://{HOST}:{ops_port}"
        self._folder = folder
        config = json.loads((folder / "tiny-0.json").read_bytes())
        self._controller = f"http://{HOST}:{config['ops_port']}"
        self._client = httpx.Client(timeout=5.0, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def look(self, seen: Seen) -> None:
        """Update `seen` from /status and /metrics."""
        status = read_status(self._client, self._controller)
        if status is not None:
            running = sum(group.state == "running" for group in status.groups)
            seen.kvp_groups = max(seen.kvp_groups, running)
        try:
            own = self._client.get(f"{self._controller}/metrics").text
            front = self._client.get(f"{self._ops}/metrics").text
        except httpx.HTTPError:
            return
        seen.kv_bytes_moved = int(_sum(own, "medha_kv_transfer_bytes_total"))
        seen.promises_given = int(_sum(front, "medha_promises_total", outcome="given"))
        seen.promises_kept = int(_sum(front, "medha_promises_total", outcome="kept"))


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
    command = [
        sys.executable,
        "-m",
        "medha.cli",
        "up",
        "-f",
        str(file),
        "--port",
        str(port),
        "--ops-port",
        str(ops_port),
        "--run-dir",
        str(folder),
        "--quiet",
        "--decision-log",
    ]
    log = folder / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            with console.status(f"{name}: the fleet loads"):
                _wait_until_ready(process, log)
            running = Fleet(folder, port, ops_port)
            with contextlib.closing(running):
                yield running
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


async def isolated(target: Target, count: int = 12) -> tuple[float, float]:
    """Median (time to first token, time to the end) of short prompts sent one by one."""
    async with connect(target.url) as client:
        prompts = prompts_from(await vocabulary(client, target), SEED)
        records = []
        for index in range(count + 2):  # two to warm up
            arrival = _short(f"alone-{index}", 0.0)
            start = time.monotonic()
            records.append(await ask(client, target, arrival, prompts(arrival), start))
    whole = [record for record in records[2:] if record.finished_s is not None]
    if len(whole) < count:
        raise EngineError(f"{count - len(whole)} of {count} lone prompts were not answered")
    return (
        statistics.median(_ttft(record) for record in whole),
        statistics.median(record.finished_s or 0.0 for record in whole),
    )


def arrivals(service_s: float) -> list[Arrival]:
    """The long prompt, and the short ones as a Poisson process of a tenth of the load."""
    gap_s = service_s / LOAD
    count = min(MOST_SHORTS, max(FEWEST_SHORTS, round(SHORTS_S / gap_s)))
    gaps = np.random.default_rng(SEED).exponential(gap_s, count)
    shorts = [_short(f"short-{index}", at) for index, at in enumerate(np.cumsum(gaps).tolist())]
    long = Arrival(
        id="long", arrival_s=LONG_AT_S, prompt_tokens=LONG_TOKENS, output_tokens=LONG_OUTPUT
    )
    return sorted([long, *shorts], key=lambda arrival: arrival.arrival_s)


def _short(name: str, at: float) -> Arrival:
    return Arrival(id=name, arrival_s=at, prompt_tokens=SHORT_TOKENS, output_tokens=SHORT_OUTPUT)


def played(running: Fleet, planned: Sequence[Arrival], console: Console, name: str) -> Outcome:
    """Play the arrivals and observe the fleet's ports meanwhile."""
    target = Target(url=running.url, model="tiny")
    seen, over = Seen(), threading.Event()

    def watch() -> None:
        while not over.wait(0.25):
            running.look(seen)

    async def run() -> list[RequestRecord]:
        async with connect(target.url) as client:
            ids = await vocabulary(client, target)
        return await asyncio.wait_for(
            play(target, planned, prompts_from(ids, SEED), lambda _: None), PLAY_S
        )

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        with console.status(f"{name}: {len(planned)} requests"):
            records = asyncio.run(run())
    finally:
        over.set()
        watcher.join()
    running.look(seen)
    lost = [f"{record.id} ({record.refused})" for record in records if record.finished_s is None]
    if lost:
        raise EngineError(f"{name}: {len(lost)} requests were not answered: {', '.join(lost[:5])}")
    return Outcome(records=tuple(records), seen=seen)


def verdict(outcomes: dict[str, Outcome], isolated_s: float) -> dict[str, bool]:
    """Checks of this demo, and their results."""
    p99 = {name: outcome.short_p99_s for name, outcome in outcomes.items()}
    finish = {name: outcome.long_finish_s for name, outcome in outcomes.items()}
    lars = outcomes["lars"].seen
    return {
        "short p99 under LARS at least 10 times below FCFS": p99["lars"] * 10 <= p99["fcfs"],
        "short p99 under LARS no higher than with the threshold": p99["lars"] <= p99["threshold"],
        "short p99 under LARS at most 3 × isolated + one iteration": p99["lars"]
        <= 3 * isolated_s + lars.iteration_s,
        "long prompt at most 20 % later than under FCFS": finish["lars"] <= 1.2 * finish["fcfs"],
        "a KVP group joined": lars.kvp_groups > 1,
        "KV pages moved over NIXL": lars.kv_bytes_moved > 0,
    }


def report(outcomes: dict[str, Outcome], isolated_s: float) -> dict[str, Any]:
    """build/demo.json."""
    kept = verdict(outcomes, isolated_s)
    lars = outcomes["lars"].seen
    return {
        "short_ttft_p99_s": {name: outcome.short_p99_s for name, outcome in outcomes.items()},
        "long_finish_s": {name: outcome.long_finish_s for name, outcome in outcomes.items()},
        "short_isolated_s": isolated_s,
        "iteration_s": lars.iteration_s,
        "kvp_groups_max": max(outcome.seen.kvp_groups for outcome in outcomes.values()),
        "kv_bytes_moved": sum(outcome.seen.kv_bytes_moved for outcome in outcomes.values()),
        "promises": {"given": lars.promises_given, "kept": lars.promises_kept},
        "checks": kept,
        "ok": all(kept.values()),
    }


def show(outcomes: dict[str, Outcome], figures: dict[str, Any], console: Console) -> None:
    table = Table(title="Short prompts together with a long one", title_justify="left")
    for column in ("policy", "short TTFT p50", "p99", "FCFS / this", "long finishes", "/ FCFS"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    fcfs = outcomes["fcfs"]
    for name, outcome in outcomes.items():
        median = statistics.median(_ttft(record) for record in outcome.shorts)
        table.add_row(
            name,
            f"{median * 1000:.0f} ms",
            f"{outcome.short_p99_s * 1000:.0f} ms",
            f"{fcfs.short_p99_s / outcome.short_p99_s:.1f} ×",
            f"{outcome.long_finish_s:.1f} s",
            f"{outcome.long_finish_s / fcfs.long_finish_s:.2f} ×",
        )
    console.print(table)
    console.print(
        f"{len(fcfs.shorts)} short prompts of {SHORT_TOKENS} tokens, one of {LONG_TOKENS}; a short "
        f"one alone takes {figures['short_isolated_s'] * 1000:.0f} ms, an iteration under LARS at "
        f"most {figures['iteration_s'] * 1000:.0f} ms; {figures['kvp_groups_max']} KVP groups, "
        f"{figures['kv_bytes_moved'] / 1e6:.0f} MB of KV moved; promises: "
        f"{figures['promises']['kept']} of {figures['promises']['given']} kept\n"
    )
    console.print("Who ran when: the long prompt (━), and how many short ones waited (▁ to █)")
    end = max(
        record.finished_s or 0.0 for outcome in outcomes.values() for record in outcome.records
    )
    for name, outcome in outcomes.items():
        console.print(f"{name:>10} long  {_span(outcome.long, end)}", soft_wrap=True)
        console.print(f"{'':>10} short {_waiting(outcome.shorts, end)}", soft_wrap=True)
    console.print(f"{'':>16} 0 s{'':{WIDTH - 9}}{end:.0f} s\n", soft_wrap=True)
    for promise, held in figures["checks"].items():
        console.print(f"[{'green' if held else 'bold red'}]{'✓' if held else '✗'}[/] {promise}")


WIDTH = 60


def _span(record: RequestRecord, end: float) -> str:
    first, last = record.arrival_s, record.finished_s or end
    cells = [(index + 0.5) * end / WIDTH for index in range(WIDTH)]
    return "".join("━" if first <= at <= last else "·" for at in cells)


def _waiting(shorts: Sequence[RequestRecord], end: float) -> str:
    marks = " ▁▂▃▄▅▆▇█"
    line = ""
    for index in range(WIDTH):
        low, high = index * end / WIDTH, (index + 1) * end / WIDTH
        waiting = sum(s.arrival_s < high and (s.first_token_s or end) > low for s in shorts)
        line += marks[min(waiting, len(marks) - 1)]
    return line


def _ttft(record: RequestRecord) -> float:
    assert record.ttft_s is not None
    return record.ttft_s


def _sum(page: str, name: str, **labels: str) -> float:
    """Sum of a metric's samples with these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    samples = re.findall(rf"^{name}(\{{[^}}]*\}})? (\S+)$", page, flags=re.MULTILINE)
    return sum(float(value) for given, value in samples if all(label in given for label in wanted))


def longest_iteration_s(log: pathlib.Path) -> float:
    """Longest time from a batch's dispatch to its tokens, from a decision log."""
    begun: dict[int, float] = {}
    longest_s = 0.0
    with log.open("rb") as lines:
        next(lines)
        for line in lines:
            entry = json.loads(line)
            if entry["call"] == "next_batch" and entry["outcome"]:
                begun[entry["outcome"][0]] = entry["args"][0]
            elif entry["call"] == "complete":
                number, _, at = entry["args"]
                longest_s = max(longest_s, at - begun.pop(number))
    return longest_s


def main() -> int:
    console = Console()
    BUILD.mkdir(exist_ok=True)
    with console.status("writes the checkpoint"):
        write_checkpoint(BUILD / "tiny", MODEL)
    outcomes: dict[str, Outcome] = {}
    planned: list[Arrival] = []
    isolated_s = 0.0
    for name, scheduling in POLICIES.items():
        with fleet(name, scheduling, console) as running:
            if not planned:
                console.print(f"chat completion: {chat(running)!r}", highlight=False)
                target = Target(url=running.url, model="tiny")
                isolated_s, service_s = asyncio.run(isolated(target))
                planned = arrivals(service_s)
            outcomes[name] = played(running, planned, console, name)
            console.print(
                f"{name}: short p99 {outcomes[name].short_p99_s * 1000:.0f} ms, "
                f"long {outcomes[name].long_finish_s:.1f} s",
                highlight=False,
            )
        log = BUILD / "demo" / name / "tiny-0.decisions.jsonl"
        outcomes[name].seen.iteration_s = longest_iteration_s(log)
    with log.open("rb") as lines:
        console.print(f"the {replay(lines)} decisions of lars, run again, come out the same")
    figures = report(outcomes, isolated_s)
    (BUILD / "demo.json").write_text(json.dumps(figures, indent=2) + "\n")
    show(outcomes, figures, console)
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
