"""Who plays the clients of `make demo-cluster`, and who watches a replica grow meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time

import httpx

from medha.cli.open_loop import Prompts, Target, ask, connect, prompts_from, vocabulary
from medha.cli.watch import read_status
from medha.messages import ReplicaStatus
from medha.sim.report import Record
from medha.sim.workload import Arrival

LOOK_S = 0.1
PREFILLED = re.compile(r'^medha_batch_tokens_sum\{.*kind="prefill".*\} (\S+)$', re.M)
MOVED = re.compile(r"^medha_kv_transfer_bytes_total\{.*\} (\S+)$", re.M)


async def one(url: str, model: str, prompt_tokens: int, output_tokens: int, id: str) -> Record:
    """One request now; its record's clock starts with it."""
    target = Target(url=url, model=model)
    async with connect(url) as client:
        prompts = prompts_from(await vocabulary(client, target), seed=sum(id.encode()))
        arrival = Arrival(
            id=id, arrival_s=0.0, prompt_tokens=prompt_tokens, output_tokens=output_tokens
        )
        return await ask(client, target, arrival, prompts(arrival), time.monotonic())


class Growth:
    """Watches a replica from its controller's own words, while it is entered.

    `asked_tokens`, `joined_tokens`: what had been prefilled since it was entered when a second
    group was first asked for, and when two groups ran; `joined_s`: seconds between the two;
    `moved_bytes`: of KV pages that went from group to group; `generation`: the newest one seen.
    """

    def __init__(self, controller: str) -> None:
        self._url = controller
        self.asked_s: float | None = None
        self.joined_s: float | None = None
        self.asked_tokens = self.joined_tokens = 0.0
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
        if self.asked_s is None and status.wanted_groups > 1:
            self.asked_s = now
            self.asked_tokens = self._sum(PREFILLED) - self._began_tokens
        running = [group for group in status.groups if group.state == "running"]
        if self.joined_s is None and self.asked_s is not None and len(running) > 1:
            self.joined_s = now - self.asked_s
            self.joined_tokens = self._sum(PREFILLED) - self._began_tokens

    def _sum(self, samples: re.Pattern[str]) -> float:
        """Over all samples of the controller's metrics that the pattern finds."""
        try:
            text = self._client.get(f"{self._url}/metrics").text
        except httpx.HTTPError:
            return float("nan")
        return sum(float(value) for value in samples.findall(text))


class Load:
    """Requests at a steady rate, open loop, while it is entered; then those that are under way are
    waited for. Prompts are of these lengths in turn. `records` grows as they end."""

    def __init__(
        self, url: str, model: str, rate: float, *prompt_tokens: int, output_tokens: int = 16
    ) -> None:
        self._url, self._target = url, Target(url=url, model=model)
        self._rate, self._prompt_tokens, self._output_tokens = rate, prompt_tokens, output_tokens
        self.records: list[Record] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Send no more, and wait for what is under way."""
        self._over.set()
        self._thread.join()

    def ttft_p99_s(self) -> float:
        """The 99th percentile of the times to the first token."""
        times = sorted(each.ttft_s for each in self.records if each.ttft_s is not None)
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
            id=f"load-{number}", arrival_s=due_s, output_tokens=self._output_tokens,
            prompt_tokens=self._prompt_tokens[number % len(self._prompt_tokens)],
        )  # fmt: skip
        self.records.append(await ask(client, self._target, arrival, prompts(arrival), start))
