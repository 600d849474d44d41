"""Large bodies: how long the router's loop stands still, memory, and the speed of tokenizing.

    python -m benchmarks.router_bodies [--case NAME ...]

The router runs in this process with its tokenizer processes; an instant replica and the client
have processes of their own. `loop` is the longest callback of the event loop in CPU time of its
thread, which a busy machine does not change; `gap` is the longest time between two ticks of the
loop, which it does. `router` and `lanes` are CPU time; `RSS` is the peak of the router's process
over that before, and that of the tokenizer process that grew most. The replica's cache fills the
router's index of pages, and keeps what was served: a prompt that comes again is cached.
"""

from __future__ import annotations

import argparse
import asyncio
import asyncio.events
import contextlib
import http.client
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import psutil
from rich.console import Console
from rich.table import Table
from tests.support.instant_replica import MODEL, train_tokenizer

from medha.adapters.sockets import write_keys
from medha.config import Curve, RouterConfig
from medha_router.app import RunningRouter, opened
from medha_router.tokenization.pool import TokenizerPool

ROOT = pathlib.Path(__file__).parent.parent
LARGE_BYTES = 57_000_000
TICK_S = 0.001
CACHED_PAGES = 1 << 20
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the last request: status, seconds, and the beginning of its body."""

    status: int
    seconds: float
    body: str
    size: int = 0


def text(size: int, seed: int = 7) -> str:
    """Return lines of the repository's code and documents in random order."""
    paths = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("core/**/*.py"), *ROOT.glob("router/**/*.py")]
    lines = "\n".join(path.read_text() for path in sorted(paths)).splitlines(keepends=True)
    generator = random.Random(seed)
    parts: list[str] = []
    while size > 0:
        parts.append(generator.choice(lines))
        size -= len(parts[-1])
    return "".join(parts)


def chat(*contents: str, **fields: object) -> bytes:
    roles = ("user", "assistant")
    messages = [
        {"role": roles[index % 2], "content": content} for index, content in enumerate(contents)
    ]
    return msgspec.json.encode({"model": MODEL, "messages": messages, "max_tokens": 4, **fields})


def with_field(name: str) -> bytes:
    """Return a chat with 57 MB of empty lists in a field."""
    lists = b"[" + b"[]," * (LARGE_BYTES // 3) + b"[]]"
    return chat("hi")[:-1] + b',"' + name.encode() + b'":' + lists + b"}"


def send(port: int, path: str, body: bytes) -> Result:
    """Send a request and wait for its answer."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    started_s = time.monotonic()
    link.request("POST", path, body, {"content-type": "application/json"})
    answer = link.getresponse()
    data = answer.read()
    return Result(
        status=answer.status,
        seconds=time.monotonic() - started_s,
        body=data[:300].decode(errors="replace"),
        size=len(data),
    )


def leave(port: int, path: str, body: bytes, after_s: float) -> None:
    """Send a request and close the connection `after_s` later."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    link.request("POST", path, body, {"content-type": "application/json"})
    time.sleep(after_s)
    link.close()


def prompt(value: object) -> bytes:
    return msgspec.json.encode({"model": MODEL, "prompt": value})


def history() -> str:
    return text(4 << 20, seed=11)


def after_two_left(port: int) -> Result:
    """Send 100 kB after the clients of two prompts of 6 MB left."""
    for seed in (1, 2):
        leave(port, CHAT, chat(text(6_000_000, seed=seed)), 0.5)
    return send(port, CHAT, chat(text(100_000, seed=3)))


CASES: dict[str, Callable[[int], Result]] = {
    "1 kB chat": lambda port: send(port, CHAT, chat(text(1000))),
    "57 MB of [] in `user`": lambda port: send(port, CHAT, with_field("user")),
    "57 MB of [] in `tools`": lambda port: send(port, CHAT, with_field("tools")),
    "57 MB of [] in `messages`": lambda port: send(
        port, CHAT, chat().replace(b"[]", b"[" + b"[]," * (LARGE_BYTES // 3) + b"[]]")
    ),
    "57 MB of text in `messages`": lambda port: send(port, CHAT, chat(text(LARGE_BYTES))),
    "4 MB chat": lambda port: send(port, CHAT, chat(history())),
    "4 MB chat, again": lambda port: send(port, CHAT, chat(history())),
    "4 MB chat, next turn": lambda port: send(port, CHAT, chat(history(), "yes", "go on")),
    "4 MB /tokenize": lambda port: send(port, "/tokenize", prompt(text(4 << 20, seed=5))),
    "1 M ids /detokenize": lambda port: send(
        port,
        "/detokenize",
        msgspec.json.encode({"model": MODEL, "tokens": [i % 8000 for i in range(1 << 20)]}),
    ),
    "1 M ids, completion": lambda port: send(
        port, COMPLETIONS, prompt([i % 8000 for i in range(1 << 20)])
    ),
    "30 MB chat": lambda port: send(port, CHAT, chat(text(30_000_000, seed=9))),
    "100 kB after two of 6 MB left": after_two_left,
}


class Stalls:
    """The longest callback of the loop, and the longest time between two ticks, since `reset`."""

    def __init__(self) -> None:
        self.callback_s = self.gap_s = 0.0
        run = asyncio.events.Handle._run

        def measured(handle: asyncio.events.Handle) -> None:
            started_s = time.thread_time()
            run(handle)
            self.callback_s = max(self.callback_s, time.thread_time() - started_s)

        asyncio.events.Handle._run = measured  # type: ignore[assignment,method-assign]

    def reset(self) -> None:
        self.callback_s = self.gap_s = 0.0

    async def tick(self) -> None:
        """Measure gaps until cancelled."""
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.gap_s = max(self.gap_s, now - last_s - TICK_S)
            last_s = now


def reset_peak(process: psutil.Process) -> int:
    """Reset the peak RSS of a process; return its RSS in bytes."""
    pathlib.Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    return int(process.memory_info().rss)


def peak(process: psutil.Process) -> int:
    """Return the peak RSS of a process in bytes since `reset_peak`."""
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def lanes() -> list[psutil.Process]:
    """Return the tokenizer processes."""
    children = psutil.Process().children()
    return [child for child in children if "medha_router.tokenization" in " ".join(child.cmdline())]


def cpu_s(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(entry.user + entry.system for entry in times)


async def measure(name: str, router: RunningRouter, stalls: Stalls) -> tuple[Result, list[str]]:
    """Run one case; return the last answer and the row of the table."""
    port = router.public.getsockname()[1]
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.router_bodies", "--client", str(port), "--case", name),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert client.stdin is not None and client.stdout is not None
    await client.stdout.readline()
    own, tokenizers = psutil.Process(), lanes()
    before = [reset_peak(process) for process in (own, *tokenizers)]
    cpu, lane_cpu = cpu_s([own]), cpu_s(tokenizers)
    stalls.reset()
    client.stdin.close()
    output = await client.stdout.read()
    await client.wait()
    callback_s, gap_s = stalls.callback_s, stalls.gap_s
    cpu, lane_cpu = cpu_s([own]) - cpu, cpu_s(lanes()) - lane_cpu
    grown = (
        [peak(process) - at for process, at in zip((own, *tokenizers), before, strict=True)]
        if len(lanes()) == len(tokenizers)
        else [peak(own) - before[0], 0]
    )
    result = msgspec.json.decode(output, type=Result)
    return result, [
        name,
        str(result.status),
        f"{result.seconds:.2f} s",
        f"{callback_s * 1e3:.1f} ms",
        f"{gap_s * 1e3:.0f} ms",
        f"{cpu:.2f} s",
        f"{lane_cpu:.2f} s",
        f"{grown[0] / 1e6:.0f} MB",
        f"{max(grown[1:], default=0) / 1e6:.0f} MB",
    ]


@contextlib.contextmanager
def replica(address: str, folder: pathlib.Path) -> Iterator[None]:
    """Run an instant replica."""
    module = "tests.support.instant_replica"
    command = [sys.executable, "-m", module, address, str(folder), "--cached", str(CACHED_PAGES)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def serving(folder: pathlib.Path, workers: int) -> AsyncIterator[RunningRouter]:
    """Run a router with an instant replica that serves."""
    (folder / "tokenizer.json").write_bytes(train_tokenizer([text(2_000_000)]))
    (folder / "router.public").write_text(write_keys(folder / "router.secret"))
    (folder / "replicas").write_text(write_keys(folder / "replica.secret") + "\n")
    config = RouterConfig(
        port=0,
        ops_port=0,
        fleet_bind="tcp://127.0.0.1:0",
        learn=True,
        curve=Curve(secret=str(folder / "router.secret"), allowed=str(folder / "replicas")),
    )
    tokens = TokenizerPool(workers)
    async with opened(config, tokens) as router:
        task = asyncio.create_task(router.serve())
        with contextlib.closing(tokens), replica(router.fleet_address, folder):
            models = router.router.service.models
            while not (MODEL in models and models[MODEL].ready):
                await asyncio.sleep(0.05)
            yield router
            router.server.should_exit = router.server.force_exit = True
            await task


async def run(cases: list[str], workers: int) -> None:
    columns = ["case", "status", "answer", "loop", "gap", "router", "lanes", "RSS", "RSS, lane"]
    table = Table(*columns, title="large bodies")
    stalls = Stalls()
    with tempfile.TemporaryDirectory() as name:
        async with serving(pathlib.Path(name), workers) as router:
            ticking = asyncio.create_task(stalls.tick())
            for case in cases:
                result, row = await measure(case, router, stalls)
                table.add_row(*row)
                Console(stderr=True, width=200).print(row, result.size, result.body[:160])
            ticking.cancel()
    Console(width=140).print(table)


def be_client(port: int, case: str) -> None:
    """Wait for the signal to start, run the case and print its result."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    sys.stdout.write(msgspec.json.encode(CASES[case](port)).decode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client is not None:
        be_client(given.client, given.case[0])
    else:
        asyncio.run(run(given.case or list(CASES), given.workers))


if __name__ == "__main__":
    main()
