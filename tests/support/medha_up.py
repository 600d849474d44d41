"""`medha up` in tests: started as a user starts it, queried and killed from outside.

Its processes have the names of its log: `router`, `tiny-0-controller`, `tiny-0-g0-s1-t0`.
"""

from __future__ import annotations

import itertools
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import httpx
import msgspec
import openai
import psutil

from medha.cli.local_fleet.preflight import free_ports
from medha.cli.local_fleet.status_poll import read_status
from medha.config import WorkerConfig, read
from medha.messages import ReplicaStatus
from medha_worker.low_priority_start import STANDBY

HOST = "127.0.0.1"
MEDHA = [sys.executable, "-m", "medha.cli"]


def until(happens: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Wait for a condition; raises AssertionError if it does not come true in time."""
    end = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


class Up:
    """A `medha up -f FILE` in its file's folder, with its own ports."""

    def __init__(self, file: pathlib.Path, *options: str) -> None:
        self.port, self.ops_port = free_ports(HOST, 2)
        self.run_dir = file.parent / "run"
        self.log = file.parent / "up.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *MEDHA,
                    "up",
                    "-f",
                    str(file),
                    "--port",
                    str(self.port),
                    "--ops-port",
                    str(self.ops_port),
                    "--run-dir",
                    str(self.run_dir),
                    *options,
                ],
                stdout=output,
                stderr=output,
            )

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def serves(self) -> bool:
        """Return True once the log reports serving. Raises AssertionError if the process has
        ended."""
        assert self.process.poll() is None, self.said
        return "Serving on" in self.said

    def everything(self) -> list[psutil.Process]:
        """Return all running child processes."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def children(self) -> dict[str, psutil.Process]:
        """Return the programs by name, without intermediate processes and standbys."""
        programs = {}
        for process in self.everything():
            try:
                line = [] if process.name() == STANDBY else process.cmdline()
            except psutil.NoSuchProcess:
                continue
            if (name := _name(line)) and name not in programs:  # a program comes before its own
                programs[name] = process
        return programs

    def ask(self) -> str:
        """Return a few greedy tokens of the model `tiny`, through the official client."""
        with openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            answer = client.completions.create(
                model="tiny", prompt="the same words", max_tokens=4, temperature=0
            )
        return answer.choices[0].text

    def status(self, replica: str = "tiny-0") -> ReplicaStatus | None:
        """Return the status of a replica's controller, if it answers."""
        with httpx.Client(timeout=30.0, trust_env=False) as client:
            return read_status(client, self.controller_url(replica))

    def controller_url(self, replica: str = "tiny-0") -> str:
        config = read(WorkerConfig, self.run_dir / f"{replica}.json")
        return f"http://{HOST}:{config.ops_port}"

    def end(self, number: signal.Signals) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=120)

    def kill(self) -> None:
        """Kill the process and wait for it."""
        self.process.kill()
        self.process.wait()


def _name(line: list[str]) -> str:
    """Return the program name of a command line; empty for others."""
    given = dict(itertools.pairwise(line))
    config = pathlib.Path(given.get("--config", ""))
    match given.get("-m", ""):
        case "medha_router":
            return "router"
        case "medha_worker.controller":
            return f"{config.stem}-controller"
        case "medha_worker.low_priority_start":
            at = (given.get(flag, "") for flag in ("--group", "--stage", "--shard"))
            return "{}-g{}-s{}-t{}".format(config.stem, *at)
    return ""


class Answer(msgspec.Struct, kw_only=True):
    """The end of a completion: `whole` with `text`, with an `error` object, or `broken` off."""

    status: int = 0
    text: str = ""
    whole: bool = False
    error: dict[str, object] | None = None
    broken: str = ""

    @property
    def refused(self) -> bool:
        """True if it ended with an error object as OpenAI's clients expect it."""
        return self.error is not None and bool(self.error.get("message")) and not self.whole


def complete(url: str, prompt: list[int], tokens: int, timeout_s: float = 120.0) -> Answer:
    """Stream a greedy completion of token ids to its end."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    answer = Answer()
    try:
        with (
            httpx.Client(timeout=timeout_s, trust_env=False) as client,
            client.stream("POST", f"{url}/v1/completions", json=body) as stream,
        ):
            answer.status = stream.status_code
            if stream.status_code != 200:
                answer.error = msgspec.json.decode(stream.read()).get("error")
                return answer
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    _take(answer, line.removeprefix("data: "))
    except httpx.HTTPError as error:
        answer.broken = type(error).__name__
    return answer


def _take(answer: Answer, data: str) -> None:
    if data == "[DONE]":
        answer.whole = True
        return
    event = msgspec.json.decode(data)
    answer.error = event.get("error")
    for choice in event.get("choices", ()):
        answer.text += choice["text"]
