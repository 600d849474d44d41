"""Hours of mixed traffic on a fleet: what grows, and what is not given back.

    python -m benchmarks.soak [--minutes 120] [--clients 12] [--leave 0.3]

Starts `medha up` on this machine (CPU, float32): two replicas of two stages whose KVP groups grow
to two. Prompts have 10 to 7,000 tokens, one in four begins like an earlier one, and some have
penalties, log probabilities or a grammar. Every third client leaves, before or during its answer.

Every 20 s: resident memory, files and threads of each process. Growth is the slope of a least
squares line over the requests that ended since a quarter of the time, per 10,000 requests and
relative to the mean. At the end all clients leave, and pages, queues and running requests are
read. Exits with 1 if a program grew by more than 1 % or something was not given back.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import pathlib
import random
import signal
import sys
import tempfile
import time

import httpx
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table
from tests.support.medha_up import Up, until

from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

CONTEXT = 8192
REPLICAS = 2
RESOURCE = f"""
apiVersion: medha.dev/v1beta1
kind: MedhaReplica
metadata: {{name: tiny}}
spec:
  replicas: {REPLICAS}
  model: {{name: tiny, source: {{hostPath: {{path: model}}}}, maxContextTokens: {CONTEXT}}}
  device: {{kind: Cpu}}
  parallelism: {{tp: 1, spp: 2, kvp: {{min: 1, max: 2, tokensPerGroup: 4096}}}}
  scheduling: {{releaseCooldown: 20s}}
  slo: {{default: {{ttft: {{floor: 5s, multiplier: "10"}}, tpot: 5s, whenInfeasible: Relegate}}}}
  engine: {{kvPages: 512}}
"""
MODEL = TinyModel(layers=4, hidden=64, heads=2, kv_heads=1, intermediate=176, max_tokens=CONTEXT)
SAMPLE_S, START_S, PATIENCE_S = 20.0, 180.0, 120.0
GROWTH_LIMIT = 0.01
LENGTHS = ((0.80, 10, 200), (0.15, 300, 2000), (0.05, 4000, 7000))
"""Share of the prompts, their least and most tokens."""
VARIANTS: tuple[dict[str, object], ...] = (
    {},
    {},
    {"repetition_penalty": 1.1, "presence_penalty": 0.5},
    {"logprobs": 3},
    {"temperature": 1.0, "seed": 7},
    {"guided_regex": "[a-z]{5,40}"},
)


@dataclasses.dataclass(frozen=True)
class Reading:
    """Size, open files and threads of a program after a number of requests."""

    ended: int
    rss_bytes: int
    files: int
    threads: int


class Clients:
    """Clients that send one request after another. `ends`: how requests ended."""

    def __init__(self, url: str, leave: float, seed: int) -> None:
        self._url, self._leave, self._draw = url, leave, random.Random(seed)
        self._prompts: list[list[int]] = []
        self.ends: collections.Counter[str] = collections.Counter()
        self.errors: collections.Counter[str] = collections.Counter()

    async def run(self, count: int, until_s: float) -> None:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(timeout=PATIENCE_S, limits=limits, trust_env=False) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(count):
                tasks.create_task(self._repeat(http, until_s))

    async def _repeat(self, http: httpx.AsyncClient, until_s: float) -> None:
        while time.monotonic() < until_s:
            try:
                self.ends[await self._ask(http)] += 1
            except httpx.HTTPError as error:
                self.ends["broken"] += 1
                self.errors[repr(error)[:120]] += 1
                await asyncio.sleep(0.5)

    async def _ask(self, http: httpx.AsyncClient) -> str:
        """Send a request; returns whole, left, refused or ended early."""
        draw = self._draw
        leaves = draw.random() < self._leave
        body = {
            "model": "tiny",
            "prompt": self._prompt(),
            "max_tokens": draw.randrange(4, 80),
            "temperature": 0,
            "stream": True,
            **draw.choice(VARIANTS),
        }
        if not leaves:
            return await self._read(http, body, None)
        if draw.random() < 0.5:  # at any moment, perhaps before the first token
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(draw.uniform(0.0, 0.5)):
                    return await self._read(http, body, None)
            return "left"
        return await self._read(http, body, draw.randrange(1, 8))

    async def _read(
        self, http: httpx.AsyncClient, body: dict[str, object], most_events: int | None
    ) -> str:
        """Read an answer, or the first of its events."""
        async with http.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                self.errors[(await answer.aread()).decode()[:120]] += 1
                return "refused"
            events = 0
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return "whole"
                if '"error"' in line:
                    self.errors[line[:120]] += 1
                    return "ended early"
                events += line.startswith("data: ")
                if events == most_events:
                    return "left"
        return "ended early"

    def _prompt(self) -> list[int]:
        draw = self._draw
        _, least, most = draw.choices(LENGTHS, [share for share, _, _ in LENGTHS])[0]
        prompt = [draw.randrange(8, 500) for _ in range(draw.randint(least, most))]
        if self._prompts and draw.random() < 0.25:
            start = draw.choice(self._prompts)
            prompt = [*start, *prompt][: max(most, len(start))]
        self._prompts = [*self._prompts[-31:], prompt]
        return prompt


def read_programs(up: Up, ended: int) -> dict[tuple[str, int], Reading]:
    """Read all programs of the fleet, by name and pid."""
    readings = {}
    for name, process in {"medha up": psutil.Process(up.process.pid), **up.children()}.items():
        with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
            readings[name, process.pid] = Reading(
                ended, process.memory_info().rss, process.num_fds(), process.num_threads()
            )
    return readings


def growth(ended: list[int], values: list[int]) -> float:
    """Slope per 10,000 requests, relative to the mean."""
    if len(set(ended)) < 2 or not any(values):
        return 0.0
    slope = float(np.polyfit(ended, values, 1)[0])
    return 1e4 * slope / (sum(values) / len(values))


async def soak(up: Up, minutes: float, count: int, leave: float, seed: int) -> list[str]:
    """Run the traffic; prints the tables and returns what is wrong."""
    clients = Clients(up.url, leave, seed)
    began_s = time.monotonic()
    until_s = began_s + 60.0 * minutes
    traffic = asyncio.create_task(clients.run(count, until_s))
    history: dict[tuple[str, int], list[Reading]] = collections.defaultdict(list)
    while not traffic.done():
        await asyncio.wait([traffic], timeout=SAMPLE_S)
        if time.monotonic() - began_s > 15.0 * minutes:
            for key, reading in read_programs(up, clients.ends.total()).items():
                history[key].append(reading)
    await traffic
    console = Console(width=120)
    wrong = show_programs(console, history)
    console.print(f"{clients.ends.total()} requests: {dict(clients.ends)}")
    for error, times in clients.errors.most_common(10):
        console.print(f"{times} × {error}", markup=False)
    if clients.ends["broken"] or clients.ends["ended early"]:
        wrong.append("answers that broke off")
    return wrong + show_rest(console, up)


def show_programs(console: Console, history: dict[tuple[str, int], list[Reading]]) -> list[str]:
    """Print the programs that lived through all readings; returns those that grew."""
    table = Table("program", "MiB first", "last", "per 10,000", "files", "last", "threads", "last")
    wrong, most = [], max(map(len, history.values()))
    for (name, _), readings in sorted(history.items()):
        if len(readings) < most:
            continue  # a group that came or left
        ended = [reading.ended for reading in readings]
        grew = growth(ended, [reading.rss_bytes for reading in readings])
        first, last = readings[0], readings[-1]
        table.add_row(
            name,
            *(f"{reading.rss_bytes / 2**20:.1f}" for reading in (first, last)),
            f"{100 * grew:+.2f} %",
            *(str(value) for value in (first.files, last.files, first.threads, last.threads)),
        )
        files = growth(ended, [reading.files for reading in readings])
        threads = growth(ended, [reading.threads for reading in readings])
        if max(grew, files, threads) > GROWTH_LIMIT:
            wrong.append(f"{name} grew: memory {grew:+.2%}, files {files:+.2%}, {threads:+.2%}")
    console.print(table)
    passing = sum(len(readings) < most for readings in history.values())
    console.print(f"{passing} more processes came or left")
    return wrong


def show_rest(console: Console, up: Up) -> list[str]:
    """Print what is left once all clients are gone; returns what was not given back."""
    ends_s = time.monotonic() + PATIENCE_S
    while True:
        statuses = [up.status(f"tiny-{number}") for number in range(REPLICAS)]
        rest = [
            f"{status.replica}: {status.waiting} waiting, {status.running} running, "
            + ", ".join(
                f"group {group.group} {group.free_pages} of {group.pages} pages free"
                for group in status.groups
                if group.state == "running"
            )
            for status in statuses
            if status is not None
        ]
        idle = len(rest) == REPLICAS and all(
            status is not None
            and not status.waiting
            and not status.running
            and all(g.free_pages == g.pages for g in status.groups if g.state == "running")
            for status in statuses
        )
        if idle or time.monotonic() > ends_s:
            for line in rest:
                console.print(line)
            return [] if idle else ["pages or requests were not given back"]
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--leave", type=float, default=0.3, help="share of clients that leave")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the fleet too
    with tempfile.TemporaryDirectory(prefix="medha-soak-") as name:
        folder = pathlib.Path(name)
        write_checkpoint(folder / "model", MODEL)
        (folder / "tiny.yaml").write_text(RESOURCE)
        up = Up(folder / "tiny.yaml")
        try:
            until(up.serves, START_S)
            wrong = asyncio.run(
                soak(up, options.minutes, options.clients, options.leave, options.seed)
            )
            up.end(signal.SIGINT)
        except BaseException:
            print("\n".join(up.said.splitlines()[-40:]), file=sys.stderr)
            raise
        finally:
            up.kill()
    for line in wrong:
        print(line, file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
