"""Rate of KV pages between two processes, against UCX's own tool.

    python -m benchmarks.kv_transfer [--links sm tcp] [--device cuda] [--json FILE]

Two processes on this machine move pages as ranks do (page movers, NIXL over UCX; the target reads),
in turn with `ucx_perftest -t ucp_get` over the same transports; medians are compared. The goal is
70 % of the tool's rate, with 64 MB of pages or more. The tool is in Debian's `ucx-utils`;
UCX_PERFTEST may name another. Exits with 1 if the goal is missed, with 2 if the tool or the device
is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import queue
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from typing import cast

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from medha.adapters.transports import LOOPBACK, Transports
from medha.batch import Move
from medha.messages import Fetched, FetchPages, Offered, Peer, RankReport
from medha_worker.kv.fetches import MoveTargets
from medha_worker.kv.page_leases import PageLease
from medha_worker.kv.page_mover import PageMover
from medha_worker.kv.pages import KvPages, PageEpochs

# Llama-3-8B: 8 KV heads of 128 in bfloat16, pages of 64 tokens: 256 KiB a layer.
KV_HEADS, HEAD_DIM, PAGE_TOKENS = 8, 128, 64
TARGET, LEASE_S, PATIENCE_S = 0.7, 120.0, 120.0
# Whether processes may use shared memory, which those on two machines do not share. Memory of one
# machine's GPUs moves without sockets over both links.
LINKS = {"tcp": False, "sm": True}
TOOL_BYTES = 64 << 20


class End:
    """An end of a link, assembled as in `rank`."""

    def __init__(self, group: int, pages: int, layers: int, device: str, checked: bool) -> None:
        from medha_worker.kv.nixl_transfer import NixlTransfer  # UCX reads its settings now

        dtype = torch.bfloat16
        self.kv = KvPages(range(layers), pages, KV_HEADS, PAGE_TOKENS, HEAD_DIM, dtype, device)
        self.kv.memory.copy_(torch.randn(self.kv.memory.shape[-1]))
        self.group, self.said = group, queue.SimpleQueue[RankReport | Exception]()
        self.copies = MoveTargets(group, PageEpochs(pages))
        transfer = NixlTransfer(f"g{group}-{os.getpid()}", self.kv, 0 if device == "cuda" else None)
        self.peer = Peer(
            group=group,
            agent=transfer.agent,
            metadata=transfer.metadata,
            bases=self.kv.bases,
            page_bytes=self.kv.page_bytes,
            pages=pages,
        )
        self.mover = PageMover(
            transfer, self.kv, self.copies, self.said.put, self.said.put, checked=checked
        )
        self.mover.start()

    def answer(self) -> RankReport:
        report = self.said.get(timeout=PATIENCE_S)
        if isinstance(report, Exception):
            raise report
        return report


def give(chosen: argparse.Namespace) -> int:
    """Run the source: print how to reach it, then lease the requested moves until its input
    ends."""
    # NIXL writes lines of its own to standard output.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    end = End(0, chosen.pages, chosen.layers, chosen.device, not chosen.unchecked)
    output.write(msgspec.json.encode(end.peer) + b"\n")
    end.mover.connect(msgspec.json.decode(sys.stdin.readline(), type=Peer))
    for line in sys.stdin:
        move = msgspec.json.decode(line, type=Move)
        end.mover.withdraw(move.id - 1)
        end.mover.offer(PageLease(move, (1,) * len(move.from_pages), float("inf")))
        output.write(msgspec.json.encode(end.answer()) + b"\n")
    end.mover.stop()
    return 0


class Taken:
    """The taker, and the source that it has started."""

    def __init__(self, chosen: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        sizes = {"pages": chosen.pages, "layers": chosen.layers, "device": chosen.device}
        command = [sys.executable, __file__, "--role", "source"]
        command += [f"--{name}={value}" for name, value in sizes.items()]
        command += ["--unchecked"] if chosen.unchecked else []
        self.source = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.callback(self._over)
        self.end = End(1, chosen.pages, chosen.layers, chosen.device, not chosen.unchecked)
        stack.callback(self.end.mover.stop)
        self.end.mover.connect(msgspec.json.decode(self._line(), type=Peer))
        self._send(self.end.peer)
        self.moves = 0

    def bytes_per_s(self) -> float:
        """Of one move of all pages, as its taker reports it."""
        self.moves += 1
        pages = tuple(range(self.end.kv.pages))
        move = Move(self.moves, 0, 0, 1, pages, pages, pages)
        self._send(move)
        offered = msgspec.json.decode(self._line(), type=Offered)
        self.end.copies.reserve(move, ())
        order = FetchPages(move, offered.epochs, offered.digests, LEASE_S)
        self.end.mover.fetch(order)
        fetched = self.end.answer()
        if not isinstance(fetched, Fetched) or not fetched.ok:
            raise RuntimeError(f"the move failed: {fetched}")
        return fetched.moved_bytes / fetched.elapsed_s

    def _send(self, message: Peer | Move) -> None:
        assert self.source.stdin is not None
        self.source.stdin.write(msgspec.json.encode(message) + b"\n")
        self.source.stdin.flush()

    def _line(self) -> bytes:
        assert self.source.stdout is not None
        return self.source.stdout.readline()

    def _over(self) -> None:
        assert self.source.stdin is not None and self.source.stdout is not None
        self.source.stdin.close()
        try:
            self.source.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.source.kill()
            self.source.wait()
        self.source.stdout.close()


def tool() -> str | None:
    return os.environ.get("UCX_PERFTEST") or shutil.which("ucx_perftest")


def link_bytes_per_s(program: str, size: int, device: str) -> float:
    """Return the tool's rate for reads of `size` bytes between two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    memory = "cuda" if device == "cuda" else "host"
    options = ["-t", "ucp_get", "-s", str(size), "-n", "12", "-w", "3", "-m", memory, "-p", port]
    server = subprocess.Popen(
        [program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 20.0
        while True:  # until the other one listens
            done = subprocess.run(
                [program, "127.0.0.1", *options, "-f"],
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )
            if done.returncode == 0 or time.monotonic() > until or server.poll() is not None:
                break
    finally:
        server.kill()
        server.wait()
    # Count, three latencies, bandwidth on average and overall in MiB/s, two rates of messages.
    rows = [line.split() for line in done.stdout.splitlines() if re.match(r"\s+\d+\s", line)]
    if done.returncode or not rows:
        raise RuntimeError(f"{program} failed: {(done.stderr or done.stdout).strip()[-400:]}")
    return float(rows[-1][-3]) * 2**20


def take(chosen: argparse.Namespace) -> int:
    """The taker: one link, in turn with the tool; a line of JSON with the rates of each round."""
    rates: dict[str, list[float]] = {"ours": [], "tool": []}
    size = chosen.pages * chosen.layers * 2 * KV_HEADS * PAGE_TOKENS * HEAD_DIM * 2
    with contextlib.ExitStack() as stack:
        taken = Taken(chosen, stack)
        taken.bytes_per_s()  # connects
        for _ in range(chosen.rounds):
            rates["ours"].append(taken.bytes_per_s())
            if program := tool():
                rates["tool"].append(
                    link_bytes_per_s(program, min(size, TOOL_BYTES), chosen.device)
                )
    print(json.dumps(rates))
    return 0


def compare(chosen: argparse.Namespace) -> int:
    """All links, each by a process of its own, as UCX reads its settings once."""
    console = Console(width=120)
    size = chosen.pages * chosen.layers * 2 * KV_HEADS * PAGE_TOKENS * HEAD_DIM * 2
    table = Table(title=f"Moves of {size / 2**20:.0f} MiB of pages, against ucx_perftest, GB/s")
    for column in ("link", "UCX_TLS", "pages moved", "ucx_perftest", "ratio", "target", ""):
        table.add_column(column, justify="left" if column in ("link", "UCX_TLS") else "right")
    result: dict[str, object] = {"bytes": size, "device": chosen.device, "links": {}}
    worst = float("inf")
    for link in chosen.links:
        transports = Transports(
            interface=LOOPBACK,
            device=chosen.device,
            shared_memory=LINKS[link],
            gpu_direct=True,
        )
        environment = {**transports.environment(), **os.environ}
        command = [sys.executable, __file__, "--role", "taker", *sys.argv[1:]]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            return done.returncode
        rates = json.loads(done.stdout.splitlines()[-1])
        ours = statistics.median(rates["ours"])
        theirs = statistics.median(rates["tool"]) if rates["tool"] else float("nan")
        worst = min(worst, ours / theirs) if rates["tool"] else worst
        verdict = "" if not rates["tool"] else "met" if ours >= TARGET * theirs else "MISSED"
        table.add_row(
            link,
            environment["UCX_TLS"],
            f"{ours / 1e9:.2f}",
            f"{theirs / 1e9:.2f}",
            f"{ours / theirs:.2f}",
            f"{TARGET:.2f}",
            verdict,
        )
        cast(dict[str, object], result["links"])[link] = {**rates, "ratio": ours / theirs}
    console.print(table)
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")
    if tool() is None:
        console.print("ucx_perftest is missing: nothing is judged; install ucx-utils")
        return 2
    return 0 if worst >= TARGET else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pages", type=int, default=32)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--unchecked", action="store_true", help="compare no digests")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--role", choices=("source", "taker"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("there is no CUDA device: nothing measured\n")
        return 2
    roles = {"source": give, "taker": take, None: compare}
    return roles[chosen.role](chosen)


if __name__ == "__main__":
    sys.exit(main())
