"""Goodput of a router and a replica from half to ten times their capacity.

    python -m benchmarks.overload

Clients arrive at random and retry as OpenAI's do by default: twice, after 408, 409, 429 and 5xx,
0.5 s × 2ⁿ with jitter later, or after Retry-After, unless `x-should-retry` is false. The replica
runs the real scheduler on the wall clock, on a machine slow enough to be overrun. A request is good
if its last attempt has its first token within the class's deadline, as its client sees it. Shares
are of the best goodput; refusals are measured from sending to the end of the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
import pathlib
import random
import sys
import tempfile
import time

import msgspec
import uvloop
from benchmarks.router import CHAT, OTHER_CORES, OUTPUT_TOKENS, Target, Texts, medha, percentile
from rich.console import Console
from rich.table import Table
from tests.support.http_load import Connection, Reply, connect, request_of
from tests.support.timed_replica import BATCH_S, TOKEN_S, TTFT_S

LOADS = (0.5, 1.0, 2.0, 5.0, 10.0)
PROMPT_TOKENS = 290  # of a chat of 1 KB, about
MAX_RETRIES = 2
CONNECTIONS = 1024
TOLERANCE = 1.05  # the deadline counts from the arrival at the router


class Outcome(msgspec.Struct, frozen=True):
    """A client's request: its last reply, and the seconds that each refusal took."""

    arrived_s: float
    last: Reply
    refused_s: tuple[float, ...]

    @property
    def good(self) -> bool:
        return self.last.status == 200 and self.last.first_s <= TOLERANCE * TTFT_S


def retry_s(reply: Reply, retries: int, jitter: float) -> float | None:
    """Return the pause before a further attempt, as openai-python has it; None if there is none."""
    advice = reply.header(b"x-should-retry")
    retried = reply.status in (408, 409, 429) or reply.status >= 500
    if retries >= MAX_RETRIES or advice == b"false" or not (retried or advice == b"true"):
        return None
    after = reply.header(b"retry-after")
    if after and 0.0 < float(after) <= 60.0:
        return float(after)
    return float(min(0.5 * 2.0**retries, 8.0) * (1.0 - 0.25 * jitter))


class Clients:
    """Clients that share connections to one server."""

    def __init__(self, connections: list[Connection], texts: Texts, seed: int) -> None:
        self._free = collections.deque(connections)
        self._texts, self._random = texts, random.Random(seed)

    async def play(self, rate: float, seconds: float) -> list[Outcome]:
        """Let clients arrive at Poisson times, and wait until all have ended."""
        bodies = [self._texts.chat(1024, stream=True) for _ in range(64)]
        due_s = time.monotonic()
        until_s = due_s + seconds
        tasks: list[asyncio.Task[Outcome]] = []
        while (due_s := due_s + self._random.expovariate(rate)) < until_s:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            body = self._random.choice(bodies)
            tasks.append(asyncio.create_task(self._ask(request_of(CHAT, body))))
        return await asyncio.gather(*tasks)

    async def _ask(self, request: bytes) -> Outcome:
        arrived_s, refused_s = time.monotonic(), list[float]()
        while True:
            connection = self._free.popleft()  # more connections than requests at once
            reply = await connection.send(request)
            self._free.append(connection)
            if reply.status == 200:
                return Outcome(arrived_s, reply, tuple(refused_s))
            pause_s = retry_s(reply, len(refused_s), self._random.random())
            refused_s.append(reply.total_s)
            if pause_s is None:
                return Outcome(arrived_s, reply, tuple(refused_s))
            await asyncio.sleep(pause_s)


class Row(msgspec.Struct, frozen=True):
    """Figures of one load."""

    load: float
    offered: float
    goodput: float
    attempts: float
    codes: dict[int, int]
    first_p99_ms: float
    refused_p50_ms: float
    refused_p99_ms: float
    cpu_share: float


async def measure(target: Target, texts: Texts, load: float, rate: float, seconds: float) -> Row:
    connections = await connect("127.0.0.1", target.port, CONNECTIONS)
    before, began_s = sum(target.cpu_s().values()), time.monotonic()
    outcomes = await Clients(connections, texts, 11).play(load * rate, seconds)
    took_s = time.monotonic() - began_s
    cpu_s = sum(target.cpu_s().values()) - before
    for connection in connections:
        connection.close()
    good = sum(outcome.good for outcome in outcomes)
    refused_ms = [1e3 * s for outcome in outcomes for s in outcome.refused_s] or [0.0]
    served = [1e3 * outcome.last.first_s for outcome in outcomes if outcome.last.status == 200]
    attempts = len(outcomes) + sum(
        len(outcome.refused_s) - (outcome.last.status != 200) for outcome in outcomes
    )
    return Row(
        load,
        len(outcomes) / seconds,
        good / seconds,
        attempts / len(outcomes),
        dict(collections.Counter(outcome.last.status for outcome in outcomes)),
        percentile(served, 0.99),
        percentile(refused_ms, 0.5),
        percentile(refused_ms, 0.99),
        cpu_s / took_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--loads", type=float, nargs="*", default=LOADS)
    given = parser.parse_args()
    os.sched_setaffinity(0, OTHER_CORES)
    texts = Texts()
    rate = 1.0 / ((PROMPT_TOKENS + OUTPUT_TOKENS) * TOKEN_S + BATCH_S)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        replica = [sys.executable, "-m", "tests.support.timed_replica"]
        target = stack.enter_context(medha(pathlib.Path(folder), texts, replica))
        uvloop.run(measure(target, texts, 0.5, rate, 2.0))  # starts the tokenizer
        rows = [
            uvloop.run(measure(target, texts, load, rate, given.seconds)) for load in given.loads
        ]
    best = max(row.goodput for row in rows)
    table = Table(
        "load",
        "offered/s",
        "good/s",
        "share",
        "attempts",
        "statuses",
        "TTFT p99",
        "refusal p50",
        "p99, ms",
        "router CPU",
    )
    for row in rows:
        table.add_row(
            f"{row.load:g}",
            f"{row.offered:.1f}",
            f"{row.goodput:.1f}",
            f"{row.goodput / best:.0%}",
            f"{row.attempts:.2f}",
            str(row.codes),
            f"{row.first_p99_ms:.0f}",
            f"{row.refused_p50_ms:.1f}",
            f"{row.refused_p99_ms:.1f}",
            f"{row.cpu_share:.0%}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
