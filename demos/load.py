"""Client load of `make demo-cluster`, and a monitor of a growing replica."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time

import httpx

from medha.cli.local_fleet.status_poll import read_status
from medha.cli.open_loop import Prompts, Target, ask, connect, prompts_from, vocabulary
from medha.messages import ReplicaStatus
from medha.sim.report import RequestRecord
from medha.sim.workload import Arrival

LOOK_S = 0.1
PREFILLED = re.compile(r'^medha_batch_tokens_sum\{.*kind="prefill".*\} (\S+)$', re.M)
MOVED = re.compile(r"^medha_kv_transfer_bytes_total\{.*\} (\S+)$", re.M)


async def one(
    url: str, model: str, prompt_tokens: int, output_tokens: int, id: str
) -> RequestRecord:
    """Send a single request now and return its record; times start at 0."""
    target = Target(url=url, model=model)
    async with connect(url) as client:
        prompts = prompts_from(await vocabulary(client, target), seed=sum(id.encode()))
        arrival = Arrival(
            id=id, arrival_s=0.0, prompt_tokens=prompt_tokens, output_tokens=output_tokens
        )
        return await ask(client, target, arrival, prompts(arrival), time.monotonic())


class Growth:
    """Monitor of a replica's growth, by its controller's status and metrics, within a `with` block.

    `requested_tokens`, `joined_tokens`: tokens prefilled when the second group was first requested,
    and when two groups ran; `joined_s`: seconds between the two; `moved_bytes`: KV bytes moved
    between groups; `generation`: the newest generation.
    """

    def __init__(self, controller: str) -> None:
        self._url = controller
        self.requested_s: float | None = None
        self.joined_s: float | None = None
        self.requested_tokens = self.joined_tokens = 0.0
        self.generation = 0
        self.last: ReplicaStatus | None = None
        self.moved_bytes = 0.0
        self._began_tokens = self._began_bytes = 0.0
        self._over = threading.Event()
        self._client = httpx.Client(timeout=5.0, trust_env=False)
        self._thread = threading.Thread(target=self._run, name="growth")

    def __enter__(self) -> Growth:
        self._began_tokens, self._began_bytes = self._sum(PREFILLED), self._sum(MOVED)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.moved_bytes = self._sum(MOVED) - self._began_bytes
        self._client.close()

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            status = read_status(self._client, self._url)
            if status is not None:
                self._saw(status, time.monotonic())

    def _saw(self, status: ReplicaStatus, now: float) -> None:
        self.last = status
        self.generation = max(self.generation, status.generation)
        if self.requested_s is None and status.wanted_groups > 1:
            self.requested_s = now
            self.requested_tokens = self._sum(PREFILLED) - self._began_tokens
        running = [group for group in status.groups if group.state == "running"]
        if self.joined_s is None and self.requested_s is not None and len(running) > 1:
            self.joined_s = now - self.requested_s
            self.joined_tokens = self._sum(PREFILLED) - self._began_tokens

    def _sum(self, samples: re.Pattern[str]) -> float:
        """Sum of the controller's samples that match the pattern."""
        try:
            text = self._client.get(f"{self._url}/metrics").text
        except httpx.HTTPError:
            return float("nan")
        return sum(float(value) for value in samples.findall(text))


class Load:
    """Open-loop load at a steady rate within a `with` block; waits for its requests at the end.

    Prompts have the given lengths in turn. `records` grows as requests end.
    """

    def __init__(
        self, url: str, model: str, rate: float, *prompt_tokens: int, output_tokens: int = 16
    ) -> None:
        self._url, self._target = url, Target(url=url, model=model)
        self._rate, self._prompt_tokens, self._output_tokens = rate, prompt_tokens, output_tokens
        self.records: list[RequestRecord] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Send no more requests and wait for those in flight."""
        self._over.set()
        self._thread.join()

    def ttft_p99_s(self) -> float:
        """The 99th percentile of the times to the first token."""
        times = sorted(record.ttft_s for record in self.records if record.ttft_s is not None)
        return times[min(len(times) - 1, int(0.99 * len(times)))] if times else float("inf")

    async def _run(self) -> None:
        async with connect(self._url) as client:
            prompts = prompts_from(await vocabulary(client, self._target), seed=1)
            start = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                for number in itertools.count():
                    due_s = number / self._rate
                    await asyncio.sleep(max(0.0, start + due_s - time.monotonic()))
                    if self._over.is_set():
                        return
                    tasks.create_task(self._one(client, prompts, number, due_s, start))

    async def _one(
        self, client: httpx.AsyncClient, prompts: Prompts, number: int, due_s: float, start: float
    ) -> None:
        arrival = Arrival(
            id=f"load-{number}",
            arrival_s=due_s,
            output_tokens=self._output_tokens,
            prompt_tokens=self._prompt_tokens[number % len(self._prompt_tokens)],
        )
        self.records.append(await ask(client, self._target, arrival, prompts(arrival), start))
