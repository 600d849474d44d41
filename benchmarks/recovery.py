"""Recovery of a fleet whose processes are killed or suspended under streams.

    python -m benchmarks.recovery [--faults 20] [--replicas 1 2] [--kinds rank-kill rank-stop ...]
    python -m benchmarks.recovery --campaign FILE

Starts `medha up` on this machine (CPU, float32, two pipeline stages), keeps streams running, and
sends SIGKILL or SIGSTOP to one process after another, each time once all replicas serve. A stream
is `equal` if its text is the one without faults; `refused` with an error event, `broken` without.
Its gap is the longest time without an event; counted are the streams that a fault could touch.
`back` is the time until all replicas serve again.

The campaign: 50 SIGKILLs and 20 SIGSTOPs of workers and 50 SIGKILLs of the router, with two
replicas, about half an hour on quiet cores. FILE keeps each result, so that the same command goes
on where an earlier one was stopped; streams that ran at that moment are not counted.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping

import httpx
import msgspec
import psutil
from benchmarks.router import percentile
from rich.console import Console
from rich.table import Table
from tests.support.medha_up import HOST, Up, until

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
CAMPAIGN = {
    "rank-kill": 25,
    "controller-kill": 25,
    "rank-stop": 10,
    "controller-stop": 10,
    "router-kill": 50,
}
PROMPTS, STREAMS = 12, 4
START_S, PATIENCE_S = 180.0, 300.0
SETTLED_S = 3.0
"""By then a controller has noticed that a rank is gone."""


class Stream(msgspec.Struct, kw_only=True, tag=True):
    """The course of one stream. `end`: whole, refused or broken; `why`: an error's text.

    `equal`: whole, with the text that it has without faults. `run`: number of the fleet.
    """

    run: int
    prompt: int
    began_s: float
    ended_s: float = 0.0
    text: str = ""
    end: str = "broken"
    why: str = ""
    gap_s: float = 0.0
    equal: bool = False


class Fault(msgspec.Struct, kw_only=True, tag=True):
    """A fault at `at_s` after which all replicas served again at `back_s`."""

    run: int
    kind: str
    at_s: float
    back_s: float


class Record:
    """Results of one number of replicas, of all runs so far; with a file, each is kept in it."""

    def __init__(self, file: pathlib.Path | None = None) -> None:
        self._file, self._lock = file, threading.Lock()
        kept = file.read_bytes().splitlines() if file is not None and file.exists() else []
        self._entries = [msgspec.json.decode(line, type=Stream | Fault) for line in kept]
        self.run = max((entry.run for entry in self._entries), default=-1) + 1

    def add(self, entry: Stream | Fault) -> None:
        with self._lock:
            self._entries.append(entry)
            if self._file is not None:
                with self._file.open("ab") as output:
                    output.write(msgspec.json.encode(entry) + b"\n")

    @property
    def faults(self) -> list[Fault]:
        return [entry for entry in self._entries if isinstance(entry, Fault)]

    @property
    def streams(self) -> list[Stream]:
        return [entry for entry in self._entries if isinstance(entry, Stream)]

    def missing(self, counts: Mapping[str, int]) -> list[str]:
        """List the kinds of faults that are not recorded yet, each as often as it is missing."""
        done = collections.Counter(fault.kind for fault in self.faults)
        return [kind for kind, count in counts.items() for _ in range(count - done[kind])]


class Clients:
    """Threads that keep streams running from `start` to `stop`."""

    def __init__(self, url: str, seed: int, record: Record) -> None:
        draw = random.Random(seed)
        self._url, self._record = url, record
        self._prompts = [
            [draw.randrange(8, 500) for _ in range(draw.choice((50, 200, 800, 2400)))]
            for _ in range(PROMPTS)
        ]
        self._outputs = [draw.choice((60, 120, 240)) for _ in range(PROMPTS)]
        self._expected: dict[int, str] = {}
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def learn(self) -> None:
        """Record each text without faults."""
        for prompt in range(PROMPTS):
            stream = self._ask(prompt)
            assert stream.end == "whole", stream
            self._expected[prompt] = stream.text

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
            whole = stream.end == "whole"
            stream.equal = whole and stream.text == self._expected[stream.prompt]
            self._record.add(stream)
            if stream.end != "whole":
                time.sleep(0.5)

    def _ask(self, prompt: int) -> Stream:
        stream = Stream(run=self._record.run, prompt=prompt, began_s=time.monotonic())
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
    """Return whether all replicas serve and are open to the router that runs now."""
    statuses = [up.status(f"tiny-{number}") for number in range(replicas)]
    if any(
        status is None or not status.ready or not status.routers or status.restart_groups
        for status in statuses
    ):
        return False
    try:
        page = httpx.get(f"http://{HOST}:{up.ops_port}/debug/queue", trust_env=False).content
    except httpx.HTTPError:
        return False
    return page.count(b'"open":true') == 1 + replicas  # of the model, and of each replica


def harm(up: Up, kind: str, replicas: int, draw: random.Random, record: Record) -> Fault:
    """Harm a process and wait until another one has its place and all replicas serve.

    Records the fault, even if the fleet does not recover, which raises AssertionError.
    """
    before = victims(up, kind)
    victim = draw.choice(before)
    at_s = time.monotonic()
    victim.send_signal(signal.SIGKILL if kind.endswith("kill") else signal.SIGSTOP)

    def back() -> bool:
        present = victims(up, kind)
        return victim not in present and len(present) == len(before) and serving(up, replicas)

    back_s, last_s = at_s, at_s + PATIENCE_S
    while time.monotonic() - back_s < SETTLED_S and time.monotonic() < last_s:
        time.sleep(0.05)
        if not back():
            back_s = time.monotonic()
    fault = Fault(run=record.run, kind=kind, at_s=at_s, back_s=back_s)
    record.add(fault)
    assert back_s < last_s - SETTLED_S, "the fleet does not recover"
    return fault


def play(replicas: int, stages: int, kinds: list[str], seed: int, record: Record) -> None:
    """Run one fleet through faults of these kinds, in a random order."""
    draw = random.Random(seed + record.run)
    with tempfile.TemporaryDirectory(prefix="medha-recovery-") as name:
        folder = pathlib.Path(name)
        write_checkpoint(folder / "model", MODEL)
        resource = RESOURCE.format(replicas=replicas, stages=stages)
        (folder / "tiny.yaml").write_text(resource)
        up = Up(folder / "tiny.yaml")
        clients = Clients(up.url, seed, record)
        try:
            until(up.serves, START_S)
            clients.learn()
            clients.start()
            draw.shuffle(kinds)
            for number, kind in enumerate(kinds, 1):
                time.sleep(draw.uniform(0.0, 3.0))
                fault = harm(up, kind, replicas, draw, record)
                took = f"{kind}: {fault.back_s - fault.at_s:.1f} s"
                print(f"{replicas} replicas: {number} of {len(kinds)}: {took}", file=sys.stderr)
            time.sleep(2.0)
            clients.stop()
            up.end(signal.SIGINT)
        except BaseException:
            print("\n".join(up.said.splitlines()[-40:]), file=sys.stderr)
            raise
        finally:
            up.kill()


def touched_by(fault: Fault, record: Record) -> list[Stream]:
    """List the streams that a fault could touch; one that ended early is the last fault's only."""
    later_s = [other.at_s for other in record.faults if other.run == fault.run]
    next_s = min((at_s for at_s in later_s if at_s > fault.at_s), default=float("inf"))
    return [
        stream
        for stream in record.streams
        if stream.run == fault.run
        and stream.began_s < fault.back_s
        and fault.at_s < stream.ended_s
        and (stream.end == "whole" or stream.ended_s < next_s)
    ]


def add_rows(table: Table, replicas: int, record: Record) -> None:
    for kind in dict.fromkeys(fault.kind for fault in record.faults):
        rows = [fault for fault in record.faults if fault.kind == kind]
        touched = [stream for fault in rows for stream in touched_by(fault, record)]
        ends = [stream.end for stream in touched]
        equal = sum(stream.equal for stream in touched)
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
    parser.add_argument("--campaign", type=pathlib.Path, help="file that keeps its results")
    parser.add_argument("--faults", type=int, help="of each kind and fleet (20)")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts, fleets = dict.fromkeys(options.kinds, options.faults or 20), options.replicas
    if options.campaign is not None:
        fleets = [2]
        counts = CAMPAIGN if options.faults is None else counts
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the fleet too
    heads = ("replicas", "fault", "faults", "streams", "equal", "other", "refused", "broken")
    table = Table(*heads, "gap p50 s", "p99", "back p50 s", "p99")
    whys: set[str] = set()
    for replicas in fleets:
        record = Record(options.campaign)
        if kinds := record.missing(counts):
            play(replicas, options.stages, kinds, options.seed, record)
        add_rows(table, replicas, record)
        whys |= {stream.why[:160] for stream in record.streams if stream.why}
    console = Console(width=140)
    console.print(table)
    for why in sorted(whys):
        console.print(why, markup=False)


if __name__ == "__main__":
    main()
