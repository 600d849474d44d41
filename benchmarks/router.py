"""Speed of a router with its tokenizers: CPU time of a request, TTFT, streamed tokens.

    python -m benchmarks.router
    python -m benchmarks.router --processes 1 2 --scenarios chat
    python -m benchmarks.router --scenarios ttft --rate 1500
    python -m benchmarks.router --peers /venv/bin/sglang-router /venv/bin/vllm-router

A replica that answers at once speaks the real protocol, with CURVE. Each process of the router has
a core of its own; replica and client share all but the first. Rates are requests per CPU second of
all the router's processes, so they hold on a busy machine; times are wall times and do not.
Requests are chats of 1 KB, each another text. Peers are routers that forward HTTP to a worker that
answers at once; they neither tokenize nor admit. The table has the medians of all rounds.

TTFT ends when the kernel receives the first byte for the client, and is less the median of the same
client at a worker without a router. On a machine with other programs, run it as
`chrt -f 1 python -m benchmarks.router`. Linux then stops the router for 50 ms once others have had
nothing of its core for a second; so requests come in shorter bursts.

Loads are shares of `--rate`, or of the rate at which 64 connections are served. A core does less
at a lower rate: code that runs after a pause finds the caches cold, so "cores in use" exceed the
share. A virtual core that sleeps may lose them all to its host (two to three times the CPU time);
a process of idle priority keeps the router's core awake.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import http.client
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import msgspec
import psutil
import uvloop
from benchmarks.router_bodies import chat, text
from rich.console import Console
from rich.table import Table
from tests.support.http_load import Reply, arrive, connect, kept_open, saturate
from tests.support.instant_replica import MODEL, train_tokenizer

from medha.adapters.sockets import write_keys
from medha.cli.local_fleet.preflight import free_port_run, free_ports
from medha.config import Curve, RouterConfig

CONNECTIONS = 64
OUTPUT_TOKENS = 8
STREAM_TOKENS = 256
IDLE_S = 3.0
BURST_S, REST_S = 0.7, 0.6
SCENARIOS = ["chat", "ttft", "stream", "long", "tokenize"]
CHAT = "/v1/chat/completions"
ROOT = pathlib.Path(__file__).parent.parent
USABLE = sorted(os.sched_getaffinity(0))
CORE, OTHER_CORES = USABLE[:1], USABLE[1:] or USABLE  # of a process; of all else
TOKENIZER = "medha_router.tokenization.encoder"
WORKER_ANSWER = msgspec.json.encode(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "The quick brown fox jumps over"},
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": 250, "completion_tokens": 8, "total_tokens": 258},
    }
)


class Texts:
    """Prompts: words of the repository's documents in random order."""

    def __init__(self) -> None:
        paths = sorted(ROOT.glob("[!.]*/**/*.md"))[:60]  # not those of packages
        self.documents = [path.read_text() for path in paths]
        self._words = " ".join(self.documents).split()
        self._random = random.Random(7)

    def seeds(self, count: int) -> list[int]:
        """Return seeds of texts that were not used before."""
        return [self._random.getrandbits(32) for _ in range(count)]

    def text(self, size: int) -> str:
        words: list[str] = []
        length = 0
        while length < size:
            words.append(self._random.choice(self._words))
            length += len(words[-1]) + 1
        return " ".join(words)[:size]

    def chat(self, size: int, *, stream: bool = False, tokens: int = OUTPUT_TOKENS) -> bytes:
        """Return the body of a chat request whose message has `size` characters."""
        return msgspec.json.encode(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": self.text(size)}],
                "max_tokens": tokens,
                "stream": stream,
                "temperature": 0.7,
            }
        )


class Target:
    """A server under test: its address and its processes."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.port, self.pid = port, process.pid
        self._process = psutil.Process(process.pid)

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of the router's processes together, and of its tokenizers."""
        spent = {"router": 0.0, "tokenizer": 0.0}
        for process in (self._process, *self._process.children(recursive=True)):
            times = process.cpu_times()
            kind = "tokenizer" if TOKENIZER in process.cmdline() else "router"
            spent[kind] += times.user + times.system
        return spent

    @property
    def rss_mb(self) -> float:
        return float(self._process.memory_info().rss) / 1e6


def _place(cpus: list[int], first: bool) -> None:
    """Move this process to some cores; under SCHED_FIFO, put it ahead of the client if `first`."""
    os.sched_setaffinity(0, cpus)
    if first:
        _advance(0)


def _advance(thread: int) -> None:
    """Put a thread ahead of the others under SCHED_FIFO."""
    if os.sched_getscheduler(0) == os.SCHED_FIFO:
        priority = os.sched_getparam(0).sched_priority + 1
        os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(priority))


def _advance_io(process: int) -> None:
    """Put the I/O threads of ZeroMQ ahead, which a fair scheduler lets in at once.

    SCHED_FIFO alone lets none in before the event loop and the tokenizers have nothing to do.
    """
    for task in pathlib.Path(f"/proc/{process}/task").iterdir():
        if (task / "comm").read_text().startswith("ZMQbg/IO"):
            _advance(int(task.name))


@contextlib.contextmanager
def running(
    command: list[str], cpus: list[int], log: pathlib.Path, *, first: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process on some cores, ahead of the client if `first`; end it with its children."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            cwd=ROOT,
            preexec_fn=functools.partial(_place, cpus, first),
        )
        try:
            yield process
        finally:
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
            process.wait()


@contextlib.contextmanager
def awake(cpus: list[int]) -> Iterator[None]:
    """Keep a core from sleeping."""
    process = subprocess.Popen(
        [sys.executable, "-c", "while True: pass"], preexec_fn=functools.partial(_idle, cpus)
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _idle(cpus: list[int]) -> None:
    """Move this process to some cores, behind all others there."""
    os.sched_setaffinity(0, cpus)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def until_open(ops_port: int, processes: int, log: pathlib.Path, within_s: float = 60.0) -> None:
    """Wait until each process has a replica that takes requests."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        with contextlib.suppress(OSError, http.client.HTTPException):
            link = http.client.HTTPConnection("127.0.0.1", ops_port, timeout=2)
            link.request("GET", "/debug/queue")
            answer = link.getresponse()
            page = answer.read()  # "open" of the model and of its replica
            if answer.status == 200 and page.count(b'"open":true') == 2 * processes:
                return
        time.sleep(0.1)
    raise SystemExit(f"no replica on port {ops_port}: {log.read_text()[-2000:]}")


def until_ready(port: int, path: str, log: pathlib.Path, within_s: float = 60.0) -> None:
    """Wait until a GET answers 200 with a body that is not empty."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        with contextlib.suppress(OSError, http.client.HTTPException):
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            link.request("GET", path)
            answer = link.getresponse()
            text = answer.read()
            if answer.status == 200 and (path != "/v1/models" or MODEL.encode() in text):
                return
        time.sleep(0.1)
    raise SystemExit(f"port {port} does not answer {path}: {log.read_text()[-2000:]}")


@contextlib.contextmanager
def medha(
    folder: pathlib.Path,
    texts: Texts,
    replica: Sequence[str] = (sys.executable, "-m", "tests.support.instant_replica"),
    processes: int = 1,
) -> Iterator[Target]:
    """Run a router with a replica."""
    (folder / "tokenizer.json").write_bytes(train_tokenizer(texts.documents))
    for secret in ("router.secret", "replica.secret"):
        (folder / secret).unlink(missing_ok=True)
    (folder / "router.public").write_text(write_keys(folder / "router.secret"))
    (folder / "replicas").write_text(write_keys(folder / "replica.secret") + "\n")
    port, ops_port = free_ports("127.0.0.1", 2)
    config = RouterConfig(
        port=port,
        ops_port=ops_port,
        fleet_bind=f"tcp://127.0.0.1:{free_port_run('127.0.0.1', processes)}",
        processes=processes,
        learn=True,
        curve=Curve(secret=str(folder / "router.secret"), allowed=str(folder / "replicas")),
    )
    (folder / "router.json").write_bytes(msgspec.json.encode(config))
    router = [sys.executable, "-m", "medha_router", "--config", str(folder / "router.json")]
    with (
        running(router, USABLE[:processes], folder / "router.log") as process,
        running(
            [*replica, config.fleet_bind, str(folder)],
            OTHER_CORES,
            folder / "replica.log",
            first=True,
        ),
    ):
        until_open(ops_port, processes, folder / "router.log")
        _advance_io(process.pid)
        for child in psutil.Process(process.pid).children():
            _advance_io(child.pid)
        yield Target(process, port)


@contextlib.contextmanager
def instant_worker() -> Iterator[int]:
    """Run an HTTP worker that answers at once, where replicas run; yields its port."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.router", "--worker", str(port)]
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "worker.log")
        with running(command, OTHER_CORES, log, first=True):
            until_ready(port, "/health", log)
            yield port


@contextlib.contextmanager
def peer(command: str, folder: pathlib.Path) -> Iterator[Target]:
    """Run another router with an instant HTTP worker."""
    port, name = free_port(), pathlib.Path(command).name
    launch = [command, *(["launch"] if name == "sglang-router" else [])]
    launch += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    launch += ["--log-level", "error", "--prometheus-port", str(free_port())]
    with (
        instant_worker() as worker,
        running(
            [*launch, "--worker-urls", f"http://127.0.0.1:{worker}"], CORE, folder / f"{name}.log"
        ) as process,
    ):
        until_ready(port, "/v1/models", folder / f"{name}.log")
        yield Target(process, port)


class Worker(asyncio.Protocol):
    """An HTTP worker that answers every request at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._data = bytearray()

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (head := self._data.find(b"\r\n\r\n")) >= 0:
            top = bytes(self._data[:head]).lower()
            at = top.find(b"content-length:")
            size = int(top[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._data) < head + 4 + size:
                return
            del self._data[: head + 4 + size]
            body = WORKER_ANSWER
            if top.startswith(b"get"):
                listed = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
                body = msgspec.json.encode(listed | {"model_path": MODEL, "status": "ready"})
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                % len(body)
                + body
            )


async def serve_worker(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Worker, "127.0.0.1", port)
    await server.serve_forever()


class Round(msgspec.Struct, kw_only=True):
    """Figures of one round, by name; the table shows their medians."""

    values: dict[str, float]


def _checked(replies: list[Reply], content: bytes) -> list[Reply]:
    bad = [reply for reply in replies if reply.status != 200 or content not in reply.body]
    if bad:
        raise SystemExit(f"{len(bad)} of {len(replies)} failed: {bad[0].status} {bad[0].body!r}")
    return replies


def percentile(values: list[float], share: float) -> float:
    """Return the value below which a share of all lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def chats(target: Target, texts: Texts, requests: int) -> dict[str, float]:
    """CPU time of whole chats in a closed loop."""
    bodies = [texts.chat(1024) for _ in range(requests)]
    connections = await connect("127.0.0.1", target.port, CONNECTIONS)
    _checked(await saturate(connections, CHAT, bodies.__getitem__, CONNECTIONS * 2), b"quick")
    before, began_s = target.cpu_s(), time.monotonic()
    _checked(await saturate(connections, CHAT, bodies.__getitem__, requests), b"quick")
    after, took_s = target.cpu_s(), time.monotonic() - began_s
    for connection in connections:
        connection.close()
    main_s, children_s = (after[key] - before[key] for key in ("router", "tokenizer"))
    return {
        "requests per CPU second": requests / (main_s + children_s),
        "ms of CPU a request, router": 1e3 * main_s / requests,
        "ms of CPU a request, tokenizer": 1e3 * children_s / requests,
        "requests per second": requests / took_s,
    }


def first_tokens(
    target: Target, texts: Texts, share: float, rate: float, seconds: float
) -> dict[str, float]:
    """TTFT that the router adds to streamed chats, which arrive at a share of the saturated rate.

    The median TTFT of a worker that answers at once, without a router, is subtracted. The first
    burst only warms up.
    """
    rate *= share
    bodies = [texts.chat(1024, stream=True) for _ in range(int(rate * BURST_S))]
    with instant_worker() as port, kept_open(("127.0.0.1", port)) as exchanges:
        direct = arrive(exchanges, CHAT, bodies, rate, 3)
    replies: list[Reply] = []
    cpu_s = took_s = 0.0
    with kept_open(("127.0.0.1", target.port)) as exchanges, awake(CORE):
        for burst in range(1 + round(seconds / BURST_S)):
            bodies = [texts.chat(1024, stream=True) for _ in bodies]
            time.sleep(REST_S)
            before, began_s = sum(target.cpu_s().values()), time.monotonic()
            burst_replies = arrive(exchanges, CHAT, bodies, rate, burst)
            if burst:
                replies += burst_replies
                took_s += time.monotonic() - began_s
                cpu_s += sum(target.cpu_s().values()) - before
    direct_ms = percentile([1e3 * reply.first_s for reply in _checked(direct, b"quick")], 0.5)
    added_ms = [1e3 * reply.first_s - direct_ms for reply in _checked(replies, b"quick")]
    load = f"at {share:.0%} load"
    return {
        f"TTFT without a router {load}, ms": direct_ms,
        f"added TTFT p50 {load}, ms": percentile(added_ms, 0.5),
        f"added TTFT p99 {load}, ms": percentile(added_ms, 0.99),
        f"cores in use {load}": cpu_s / took_s,
    }


async def streams(target: Target, texts: Texts, rounds: int) -> dict[str, float]:
    """CPU time of tokens that are streamed one by one."""
    bodies = [
        texts.chat(64, stream=True, tokens=STREAM_TOKENS) for _ in range(CONNECTIONS * rounds)
    ]
    connections = await connect("127.0.0.1", target.port, CONNECTIONS)
    before = target.cpu_s()
    replies = await saturate(connections, CHAT, bodies.__getitem__, len(bodies))
    after = target.cpu_s()
    for connection in connections:
        connection.close()
    _checked(replies, b"[DONE]")
    cpu_s = sum(after[key] - before[key] for key in after)
    return {"streamed tokens per CPU second": len(bodies) * STREAM_TOKENS / cpu_s}


async def long_body(target: Target, texts: Texts, size: int = 4 << 20) -> dict[str, float]:
    """Time of a long prompt: of each process, less what it takes when idle, and until the first
    event."""
    body = texts.chat(size, stream=True)
    idle, began_s = target.cpu_s(), time.monotonic()
    await asyncio.sleep(IDLE_S)
    idle_share = (target.cpu_s()["router"] - idle["router"]) / (time.monotonic() - began_s)
    began_s = time.monotonic()
    [connection] = await connect("127.0.0.1", target.port, 1)
    before, rss_mb = target.cpu_s(), target.rss_mb
    replies = await saturate([connection], CHAT, lambda _: body, 1)
    after, took_s = target.cpu_s(), time.monotonic() - began_s
    connection.close()
    _checked(replies, b"quick")
    main_s = after["router"] - before["router"] - idle_share * took_s
    return {
        "ms of CPU a body of 4 MB, router": 1e3 * main_s,
        "ms of CPU a body of 4 MB, tokenizer": 1e3 * (after["tokenizer"] - before["tokenizer"]),
        "TTFT of a body of 4 MB, ms": 1e3 * statistics.median(r.first_s for r in replies),
        "MB of RSS gained": target.rss_mb - rss_mb,
    }


async def tokenizing(target: Target, texts: Texts, size: int = 4 << 20) -> dict[str, float]:
    """CPU time of tokenizing long prompts: lines of the repository, each prompt another order."""
    bodies = [chat(text(size, seed), stream=True) for seed in texts.seeds(2)]
    connections = await connect("127.0.0.1", target.port, len(bodies))
    before = target.cpu_s()["tokenizer"]
    replies = await saturate(connections, CHAT, bodies.__getitem__, len(bodies))
    cpu_s = target.cpu_s()["tokenizer"] - before
    for connection in connections:
        connection.close()
    _checked(replies, b"quick")
    megabytes = sum(map(len, bodies)) / 1e6
    return {"MB tokenized a second by two lanes, each on a core": 2.0 * megabytes / cpu_s}


async def measure(
    target: Target, texts: Texts, scenarios: list[str], requests: int, rate: float | None
) -> Round:
    values: dict[str, float] = {}
    if "chat" in scenarios:
        values |= await chats(target, texts, requests)
    if "ttft" in scenarios:
        full = rate or values.get("requests per second", 500.0)
        for share in (0.25, 0.75):
            values |= first_tokens(target, texts, share, full, 5.0)
    if "stream" in scenarios:
        values |= await streams(target, texts, 2)
    if "long" in scenarios:
        values |= await long_body(target, texts)
    if "tokenize" in scenarios:
        values |= await tokenizing(target, texts)
    return Round(values=values)


async def measure_peer(target: Target, texts: Texts, requests: int) -> Round:
    values = await chats(target, texts, requests)
    return Round(values={"requests per CPU second": values["requests per CPU second"]})


def report(rounds: dict[str, list[Round]]) -> None:
    """Print the medians and the spread of each figure."""
    table = Table("figure", *rounds)
    names = dict.fromkeys(
        name for mine in rounds.values() for figures in mine for name in figures.values
    )
    for name in names:
        cells = []
        for mine in rounds.values():
            values = [figures.values[name] for figures in mine if name in figures.values]
            cells.append(
                f"{statistics.median(values):,.4g} ({min(values):,.4g} to {max(values):,.4g})"
                if values
                else ""
            )
        table.add_row(name, *cells)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", nargs="*", default=[], help="commands of other routers")
    parser.add_argument("--processes", type=int, nargs="*", default=[1], help="numbers of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--scenarios", nargs="*", default=SCENARIOS)
    parser.add_argument("--rate", type=float, help="requests per second that are a load of 100 %%")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        uvloop.run(serve_worker(given.worker))
        return
    os.sched_setaffinity(0, OTHER_CORES)
    texts = Texts()
    rounds: dict[str, list[Round]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        for processes in given.processes:
            name = "Medha" if processes == 1 else f"{processes} processes"
            with medha(path, texts, processes=processes) as target:
                for _ in range(given.rounds):
                    own = uvloop.run(
                        measure(target, texts, given.scenarios, given.requests, given.rate)
                    )
                    rounds.setdefault(name, []).append(own)
        for command in given.peers:
            name = pathlib.Path(command).name
            with peer(command, path) as target:
                for _ in range(given.rounds):
                    result = uvloop.run(measure_peer(target, texts, given.requests))
                    rounds.setdefault(name, []).append(result)
    report(rounds)


if __name__ == "__main__":
    main()
