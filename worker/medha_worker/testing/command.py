"""`medha up` under a test's hand: started as a person starts it, asked and hurt from outside.

Its processes are known by the names that its log gives them: `router`, `tiny-0-controller`,
`tiny-0-g0-s1-t0`.
"""

from __future__ import annotations

import itertools
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import httpx
import msgspec

from medha.cli.preflight import free_ports
from medha.cli.watch import read_status
from medha.config import WorkerConfig, read
from medha.messages import ReplicaStatus

if TYPE_CHECKING:  # images hold neither psutil nor openai, so methods that need them import them
    import psutil

HOST = "127.0.0.1"
MEDHA = [sys.executable, "-m", "medha.cli"]


def until(happens: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Waits for a condition; an AssertionError when it does not come true in time."""
    end = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


class Up:
    """A `medha up -f FILE` in its file's folder, with ports of its own."""

    def __init__(self, file: pathlib.Path, *options: str) -> None:
        self.port, self.ops_port = free_ports(HOST, 2)
        self.run_dir = file.parent / "run"
        self.log = file.parent / "up.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*MEDHA, "up", "-f", str(file), "--port", str(self.port), "--ops-port",
                 str(self.ops_port), "--run-dir", str(self.run_dir), *options],
                stdout=output, stderr=output,
            )  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def serves(self) -> bool:
        """Whether it has told that it serves; an AssertionError once it is over."""
        assert self.process.poll() is None, self.said
        return "Serving on" in self.said

    def everything(self) -> list[psutil.Process]:
        """All that it started and that runs."""
        import psutil

        return psutil.Process(self.process.pid).children(recursive=True)

    def children(self) -> dict[str, psutil.Process]:
        """Its programs by name; what is between start and name is left out."""
        import psutil

        found = {}
        for process in self.everything():
            try:
                line = process.cmdline()
            except psutil.NoSuchProcess:
                continue
            if (name := _name(line)) and name not in found:  # a program comes before its own
                found[name] = process
        return found

    def ask(self) -> str:
        """A few greedy tokens of the model `tiny`, by the official client."""
        import openai

        with openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:
            answer = client.completions.create(
                model="tiny", prompt="the same words", max_tokens=4, temperature=0
            )
        return answer.choices[0].text

    def status(self, replica: str = "tiny-0") -> ReplicaStatus | None:
        """What a replica's controller says of itself, if it answers."""
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            return read_status(client, self.controller_url(replica))

    def controller_url(self, replica: str = "tiny-0") -> str:
        config = read(WorkerConfig, self.run_dir / f"{replica}.json")
        return f"http://{HOST}:{config.ops_port}"

    def end(self, number: signal.Signals) -> int:
        """Its exit status after a signal."""
        self.process.send_signal(number)
        return self.process.wait(timeout=60)

    def kill(self) -> None:
        """The end of it, however it is."""
        self.process.kill()
        self.process.wait()


def _name(line: list[str]) -> str:
    """The name of the program behind a command line; empty for what is none of ours."""
    given = dict(itertools.pairwise(line))
    config = pathlib.Path(given.get("--config", ""))
    match given.get("-m", ""):
        case "medha_router":
            return "router"
        case "medha_worker.controller":
            return f"{config.stem}-controller"
        case "medha_worker.gently":
            at = (given.get(flag, "") for flag in ("--group", "--stage", "--shard"))
            return "{}-g{}-s{}-t{}".format(config.stem, *at)
    return ""


class Answer(msgspec.Struct, kw_only=True):
    """How a completion ended: `whole` with `text`, with an `error` object, or `broken` off."""

    status: int = 0
    text: str = ""
    whole: bool = False
    error: dict[str, object] | None = None
    broken: str = ""

    @property
    def refused(self) -> bool:
        """It ended with an error that says what happened, as OpenAI's clients expect it."""
        return self.error is not None and bool(self.error.get("message")) and not self.whole


def complete(url: str, prompt: list[int], tokens: int, timeout_s: float = 120.0) -> Answer:
    """A greedy completion of token ids, streamed to its end, whatever that is."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
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
