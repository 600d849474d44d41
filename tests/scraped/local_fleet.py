"""A small real fleet, and the events that its metrics count.

`medha up` runs a replica that may grow to two KVP groups; a second replica runs in a pod (`medha
pod`), dials the same router, and loses its rank. Requests: short and long, of a class that is
refused and of one that waits, many at once, repeated, and abandoned by their client.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import msgspec
import psutil
from tests.support.medha_up import Up, until

from medha.adapters.sockets import write_keys
from medha.cli.open_loop import Target, connect, play, prompts_from, vocabulary
from medha.config import CONTROLLER_OPS_PORT, POD_OPS_PORT, Curve, WorkerConfig, read, render
from medha.sim.report import RequestRecord
from medha.sim.workload import Arrival
from medha.topology import Topology
from medha_worker.low_priority_start import STANDBY
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

RESOURCE = """
apiVersion: medha.dev/v1beta1
kind: MedhaReplica
metadata: {name: tiny}
spec:
  model: {name: tiny, source: {hostPath: {path: model}}, maxContextTokens: 8192}
  device: {kind: Cpu}
  parallelism: {spp: 1, kvp: {min: 1, max: 2, tokensPerGroup: 4096}}
  slo:
    default: {ttft: {floor: 5s, multiplier: "20"}, tpot: 1s, whenInfeasible: Relegate}
    classes:
    - {name: patient, ttft: {floor: 1ms, multiplier: "1"}, whenInfeasible: Relegate}
    - {name: eager, ttft: {floor: 1ms, multiplier: "1"}, whenInfeasible: Refuse}
  scheduling: {batchBudget: {mode: Slack, min: 20ms, max: 200ms}}
  engine: {pageTokens: 64, kvPages: 96, threadsPerRank: 1}
"""
# Attention that costs enough for moving pages to pay, and little else.
SMALL = TinyModel(
    layers=4, hidden=128, heads=8, kv_heads=1, head_dim=64, intermediate=256, max_tokens=8192
)
LONG_TOKENS, LONG_EVERY_S, SHORTS_PER_S, BURST = 7900, 25, 3.0, 50
# Loopback addresses of this process alone, so that a pod's fixed ports are free.
NET = f"127.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250 + 1}"


class LocalFleet:
    """Both replicas and their router; `close` leaves none of their processes behind."""

    def __init__(self, folder: Path) -> None:
        write_checkpoint(folder / "model", SMALL)
        (folder / "tiny.yaml").write_text(RESOURCE)
        self._folder = folder
        self._pod: subprocess.Popen[bytes] | None = None
        self.up = Up(folder / "tiny.yaml")

    def start(self) -> None:
        until(self.up.serves, 120.0)
        self._pod = self._start_pod()
        until(lambda: self._serving() == 2, 120.0)

    @property
    def router(self) -> str:
        return f"127.0.0.1:{self.up.ops_port}"

    @property
    def controllers(self) -> tuple[str, str]:
        own = self.up.controller_url().removeprefix("http://")
        return own, f"{NET}.1:{CONTROLLER_OPS_PORT}"

    @property
    def pod(self) -> str:
        return f"{NET}.1:{POD_OPS_PORT}"

    def lose_a_rank(self) -> None:
        """The rank of the pod is killed; the pod starts another."""
        assert self._pod is not None
        for process in psutil.Process(self._pod.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                rank = "medha_worker.low_priority_start" in process.cmdline()
                if rank and process.name() != STANDBY:
                    process.kill()
                    return
        raise AssertionError("the pod has no rank")

    def whole(self) -> bool:
        """Both replicas serve again."""
        return self._serving() == 2 and self._get(f"http://{self.pod}/readyz").status_code == 200

    def close(self) -> None:
        for process in (self.up.process, self._pod):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in (self.up.process, self._pod):
            if process is not None:
                _end(process)

    def _start_pod(self) -> subprocess.Popen[bytes]:
        """A replica of the same resource in a pod of its own, at an address of its own."""
        rank = self._folder / "rank"
        Path(f"{rank}.public").write_text(write_keys(Path(f"{rank}.secret")) + "\n")
        shared = read(WorkerConfig, self.up.run_dir / "tiny-0.json")
        assert shared.curve is not None
        controller = shared.curve.secret.removesuffix(".secret")
        config = msgspec.structs.replace(
            shared,
            replica="tiny-1",
            topology=Topology(),
            rank_bind="tcp://*:7900",
            run_dir=str(self._folder),
            rank_curve=Curve(
                secret=f"{rank}.secret",
                allowed=f"{rank}.public",
                server_public=f"{controller}.public",
            ),
        )
        (self._folder / "worker.json").write_bytes(render(config))
        environ = {
            "MEDHA_REPLICA": "tiny-1",
            "MEDHA_KVP_GROUP": "0",
            "MEDHA_SPP_STAGE": "0",
            "MEDHA_TP": "1",
            "MEDHA_POD_IP": f"{NET}.1",
            "MEDHA_LEADER_ADDRESS": f"{NET}.1",
            "MEDHA_INTERFACE": "lo",
            "MEDHA_GRACE_S": "10",
        }
        with (self._folder / "pod.log").open("wb") as log:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "medha.cli",
                    "pod",
                    "--config",
                    str(self._folder / "worker.json"),
                ],
                env={**os.environ, **environ},
                stdout=log,
                stderr=log,
            )

    def _serving(self) -> int:
        page = self._get(f"http://{self.router}/metrics").text
        (line,) = [
            row
            for row in page.splitlines()
            if row.startswith("medha_replicas{") and 'state="serving"' in row
        ]
        return int(float(line.rpartition(" ")[2]))

    def _get(self, url: str) -> httpx.Response:
        return httpx.get(url, timeout=10.0, trust_env=False)

    # --- requests -------------------------------------------------------------------------------

    def play(self, seconds: float, seed: int) -> list[RequestRecord]:
        """Short requests all the time, long ones now and then, and a few that cannot be served."""
        return asyncio.run(self._play(_arrivals(seconds, seed), seed))

    async def _play(self, arrivals: list[Arrival], seed: int) -> list[RequestRecord]:
        target = Target(url=self.up.url, model="tiny")
        async with connect(target.url) as client:
            prompts = prompts_from(await vocabulary(client, target), seed)
        return await play(target, arrivals, prompts, lambda _: None)

    def leave(self) -> None:
        """A client that goes while its answer comes."""
        body = {
            "model": "tiny",
            "prompt": list(range(20, 60)),
            "max_tokens": 2000,
            "stream": True,
            "ignore_eos": True,
        }
        with httpx.stream(
            "POST", f"{self.up.url}/v1/completions", json=body, timeout=60.0, trust_env=False
        ) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number == 5:
                    return


def _arrivals(seconds: float, seed: int) -> list[Arrival]:
    """Every third short one shares its first blocks; two of ten want what cannot be had."""
    shorts = [
        Arrival(
            id=f"short-{seed}-{number}",
            arrival_s=number / SHORTS_PER_S,
            prompt_tokens=1100 if number % 3 == 0 else 80 + 40 * (number % 7),
            output_tokens=8,
            blocks=(1, 2) if number % 3 == 0 else (),
            slo_class={8: "patient", 9: "eager"}.get(number % 10, "default"),
        )
        for number in range(int(seconds * SHORTS_PER_S))
    ]
    longs = [
        Arrival(
            id=f"long-{seed}-{at}", arrival_s=float(at), prompt_tokens=LONG_TOKENS, output_tokens=16
        )
        for at in range(1, int(seconds), LONG_EVERY_S)
    ]
    # More at once than replicas take in: some wait in the router while it samples its queue.
    burst = [
        Arrival(id=f"burst-{seed}-{number}", arrival_s=2.0, prompt_tokens=2000, output_tokens=2)
        for number in range(BURST)
    ]
    return sorted([*shorts, *longs, *burst], key=lambda arrival: arrival.arrival_s)


def _end(process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 40.0
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    if process.poll() is None:
        process.kill()
    process.wait()
