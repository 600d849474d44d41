"""Recovery of a fleet whose processes are killed or suspended under streams.

    python -m benchmarks.recovery [--faults 20] [--replicas 1 2] [--kinds rank-kill rank-stop ...]

Starts `medha up` on this machine (CPU, float32, two pipeline stages), keeps streams running, and
sends SIGKILL or SIGSTOP to one process after another, each time once all replicas serve. A stream
is `equal` if its text is the one without faults; `refused` with an error event, `broken` without.
Its gap is the longest time without an event; counted are the streams that a fault could touch.
`back` is the time until all replicas serve again.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

import httpx
import msgspec
import psutil
from benchmarks.router import percentile
from rich.console import Console
from rich.table import Table
from tests.support.medha_up import Up, until

from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

RESOURCE = """
apiVersion: medha.dev/v1beta1
kind: MedhaReplica
metadata: {{name: tiny}}
spec:
  replicas: {replicas}
  model: {{name: tiny, source: {{hostPath: {{path: model}}}}, maxContextTokens: 8192}}
  device: {{kind: Cpu}}
  parallelism: {{tp: 1, spp: {stages}}}
  slo: {{default: {{ttft: {{floor: 5s, multiplier: "10"}}, tpot: 5s, whenInfeasible: Relegate}}}}
  engine: {{kvPages: 512}}
"""
MODEL = TinyModel(
    layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=352, max_tokens=8192
)
KINDS = ("rank-kill", "rank-stop", "controller-kill", "controller-stop", "router-kill")
PROMPTS, STREAMS = 12, 4
START_S, PATIENCE_S = 180.0, 300.0
SETTLED_S = 3.0
"""By then a controller has noticed that a rank is gone."""


class Stream(msgspec.Struct, kw_only=True):
    """The course of one stream. `end`: whole, refused or broken; `why`: an error's text."""

    prompt: int
    began_s: float
    ended_s: float = 0.0
    text: str = ""
    end: str = "broken"
    why: str = ""
    gap_s: float = 0.0


class Fault(msgspec.Struct, kw_only=True):
    """A fault at `at_s` after which all replicas served again at `back_s`."""

    kind: str
    at_s: float
    back_s: float


class Clients:
    """Threads that keep streams running from `start` to `stop`."""

    def __init__(self, url: str, seed: int) -> None:
        draw = random.Random(seed)
        self._url = url
        self._prompts = [
            [draw.randrange(8, 500) for _ in range(draw.choice((50, 200, 800, 2400)))]
            for _ in range(PROMPTS)
        ]
        self._outputs = [draw.choice((60, 120, 240)) for _ in range(PROMPTS)]
        self._expected: dict[int, str] = {}
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self.streams: list[Stream] = []

    def learn(self) -> None:
        """Record each text without faults."""
        for prompt in range(PROMPTS):
            stream = self._ask(prompt)
            assert stream.end == "whole", stream
            self._expected[prompt] = stream.text

    def equal(self, stream: Stream) -> bool:
        return stream.end == "whole" and stream.text == self._expected[stream.prompt]

    def start(self) -> None:
        for number in range(STREAMS):
            thread = threading.Thread(target=self._run, args=(number,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a stream hangs"

    def _run(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._stopping.is_set():
            stream = self._ask(draw.randrange(PROMPTS))
            self.streams.append(stream)
            if stream.end != "whole":
                time.sleep(0.5)

    def _ask(self, prompt: int) -> Stream:
        stream = Stream(prompt=prompt, began_s=time.monotonic())
        body = {
            "model": "tiny",
            "prompt": self._prompts[prompt],
            "max_tokens": self._outputs[prompt],
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        last_s = stream.began_s
        try:
            with (
                httpx.Client(timeout=PATIENCE_S, trust_env=False) as client,
                client.stream("POST", f"{self._url}/v1/completions", json=body) as answer,
            ):
                if answer.status_code != 200:
                    stream.end, stream.why = "refused", answer.read().decode()
                for line in answer.iter_lines() if answer.status_code == 200 else ():
                    if not line.startswith("data: "):
                        continue  # a comment that keeps the connection is no progress
                    now = time.monotonic()
                    stream.gap_s, last_s = max(stream.gap_s, now - last_s), now
                    self._take(stream, line.removeprefix("data: "))
        except httpx.HTTPError as error:
            stream.why = repr(error)
        stream.ended_s = time.monotonic()
        return stream

    def _take(self, stream: Stream, data: str) -> None:
        if data == "[DONE]":
            stream.end = "whole"
            return
        event = msgspec.json.decode(data)
        if "error" in event:
            stream.end, stream.why = "refused", data
        for choice in event.get("choices", ()):
            stream.text += choice["text"]


def victims(up: Up, kind: str) -> list[psutil.Process]:
    """List the processes that a fault of this kind may hit."""
    part = kind.partition("-")[0]
    children = up.children()
    if part == "rank":
        return [process for name, process in children.items() if "-t0" in name]
    return [process for name, process in children.items() if name.endswith(part)]


def serving(up: Up, replicas: int) -> bool:
    statuses = [up.status(f"tiny-{number}") for number in range(replicas)]
    return all(
        status is not None and status.ready and status.routers and not status.restart_groups
        for status in statuses
    )


def harm(up: Up, kind: str, replicas: int, draw: random.Random) -> Fault:
    """Harm a process and wait until another one has its place and all replicas serve."""
    before = victims(up, kind)
    victim = draw.choice(before)
    at_s = time.monotonic()
    victim.send_signal(signal.SIGKILL if kind.endswith("kill") else signal.SIGSTOP)

    def back() -> bool:
        present = victims(up, kind)
        return victim not in present and len(present) == len(before) and serving(up, replicas)

    back_s, last_s = at_s, at_s + PATIENCE_S
    while time.monotonic() - back_s < SETTLED_S:
        assert time.monotonic() < last_s, "the fleet does not recover"
        time.sleep(0.05)
        if not back():
            back_s = time.monotonic()
    return Fault(kind=kind, at_s=at_s, back_s=back_s)


def campaign(
    replicas: int, stages: int, kinds: Sequence[str], count: int, seed: int
) -> tuple[list[Fault], Clients]:
    """Run one fleet through `count` faults of each kind, in a random order."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="medha-recovery-") as name:
        folder = pathlib.Path(name)
        write_checkpoint(folder / "model", MODEL)
        resource = RESOURCE.format(replicas=replicas, stages=stages)
        (folder / "tiny.yaml").write_text(resource)
        up = Up(folder / "tiny.yaml")
        clients = Clients(up.url, seed)
        faults = []
        try:
            until(up.serves, START_S)
            clients.learn()
            clients.start()
            order = [kind for kind in kinds for _ in range(count)]
            draw.shuffle(order)
            for kind in order:
                time.sleep(draw.uniform(0.0, 3.0))
                faults.append(harm(up, kind, replicas, draw))
                took_s = faults[-1].back_s - faults[-1].at_s
                print(f"{replicas} replicas: {kind}: {took_s:.1f} s", file=sys.stderr)
            time.sleep(2.0)
            clients.stop()
            up.end(signal.SIGINT)
        except BaseException:
            print("\n".join(up.said.splitlines()[-40:]), file=sys.stderr)
            raise
        finally:
            up.kill()
    return faults, clients


def add_rows(table: Table, replicas: int, faults: Sequence[Fault], clients: Clients) -> None:
    for kind in dict.fromkeys(fault.kind for fault in faults):
        rows = [fault for fault in faults if fault.kind == kind]
        touched = [
            stream
            for fault in rows
            for stream in clients.streams
            if stream.began_s < fault.back_s and stream.ended_s > fault.at_s
        ]
        ends = [stream.end for stream in touched]
        equal = sum(clients.equal(stream) for stream in touched)
        gaps = sorted(stream.gap_s for stream in touched)
        back = sorted(fault.back_s - fault.at_s for fault in rows)
        table.add_row(
            str(replicas),
            kind,
            str(len(rows)),
            str(len(touched)),
            str(equal),
            str(ends.count("whole") - equal),
            str(ends.count("refused")),
            str(ends.count("broken")),
            *(f"{percentile(gaps, share):.1f}" for share in (0.5, 0.99)),
            *(f"{percentile(back, share):.1f}" for share in (0.5, 0.99)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=20, help="faults of each kind and fleet")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    heads = ("replicas", "fault", "faults", "streams", "equal", "other", "refused", "broken")
    table = Table(*heads, "gap p50 s", "p99", "back p50 s", "p99")
    whys: set[str] = set()
    for replicas in options.replicas:
        faults, clients = campaign(
            replicas, options.stages, options.kinds, options.faults, options.seed
        )
        add_rows(table, replicas, faults, clients)
        whys |= {stream.why[:160] for stream in clients.streams if stream.why}
    console = Console(width=140)
    console.print(table)
    for why in sorted(whys):
        console.print(why, markup=False)


if __name__ == "__main__":
    main()
