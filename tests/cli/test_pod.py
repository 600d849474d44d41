"""Pods as real processes, each at its own address, connected over TCP with keys."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest

from medha.adapters.sockets import write_keys
from medha.cli.local_fleet.pod_identity import PodIdentity, interface_with, read_pod_identity
from medha.cli.local_fleet.preflight import free_ports
from medha.config import Curve, RouterConfig, RouterModel, WorkerConfig, render
from medha.errors import SetupError, SpecError
from medha.request import SloClass
from medha.topology import Coordinate, Topology
from medha_worker.low_priority_start import STANDBY
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

LIMIT_S = 240.0
# Loopback addresses of this process alone, so that pods' fixed ports are free.
NET = f"127.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250 + 1}"
ENVIRONMENT = {
    "MEDHA_REPLICA": "tiny-0",
    "MEDHA_KVP_GROUP": "1",
    "MEDHA_SPP_STAGE": "0",
    "MEDHA_TP": "1",
    "MEDHA_LEADER_ADDRESS": "tiny-0-g0-s0.tiny-workers.default.svc",
    "MEDHA_POD_IP": "10.1.2.3",
}


TOPOLOGY = Topology(spp=2, kvp_max=2, tokens_per_group=2048)


def config_of(topology: Topology = TOPOLOGY) -> WorkerConfig:
    return WorkerConfig(
        replica="tiny-0",
        model="tiny",
        checkpoint="/models",
        max_context_tokens=1024,
        topology=topology,
        rank_bind="tcp://*:7900",
        classes=(SloClass(),),
    )


def place_from(**changes: str) -> PodIdentity:
    return read_pod_identity({**ENVIRONMENT, **changes}, config_of(), interface_of=lambda _: "eth0")


def test_a_pod_knows_its_place_and_dials_its_leader() -> None:
    place = place_from()
    assert not place.leads and place.ranks(config_of()) == (Coordinate(1, 0, 0),)
    config = place.worker_config(config_of(), "/tmp/here")
    assert config.rank_bind == "tcp://tiny-0-g0-s0.tiny-workers.default.svc:7900"
    assert place.controller_url == "http://tiny-0-g0-s0.tiny-workers.default.svc:8091"
    assert config.interface == "eth0" and config.run_dir == "/tmp/here"


def test_a_pod_writes_its_decisions_to_the_path_of_its_environment() -> None:
    config = place_from(MEDHA_DECISION_LOG="/tmp/all.jsonl").worker_config(config_of(), "/tmp/here")
    assert config.decision_log == "/tmp/all.jsonl"
    assert place_from().worker_config(config_of(), "/tmp/here").decision_log == ""


def test_the_leader_binds_its_own_address_and_no_other() -> None:
    place = place_from(MEDHA_KVP_GROUP="0", MEDHA_LEADER_ADDRESS="")
    config = place.worker_config(config_of(), "/tmp/here")
    assert place.leads and place.controller_url == "http://10.1.2.3:8091"
    assert config.rank_bind == "tcp://10.1.2.3:7900" and config.store_bind == "10.1.2.3:7901"
    assert config.ops_host == "10.1.2.3"


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("MEDHA_KVP_GROUP", "two", "MEDHA_KVP_GROUP is two: must be an integer from 0 to 1, as"),
        ("MEDHA_SPP_STAGE", "2", "MEDHA_SPP_STAGE is 2: must be an integer from 0 to 1, as"),
        ("MEDHA_TP", "8", "MEDHA_TP is 8: must be 1, as the config has it; set it in"),
        ("MEDHA_REPLICA", "other-0", "MEDHA_REPLICA is other-0: must be tiny-0, the replica"),
        ("MEDHA_LEADER_ADDRESS", "", "MEDHA_LEADER_ADDRESS is '': must be the address of the"),
        ("MEDHA_POD_IP", "fe80::1", "MEDHA_POD_IP is fe80::1: must be an IPv4 address of this pod"),
        ("MEDHA_GRACE_S", "-1", "MEDHA_GRACE_S is -1: must be seconds, 0 or more"),
    ],
)
def test_a_wrong_environment_is_reported_in_one_sentence(
    variable: str, value: str, sentence: str
) -> None:
    with pytest.raises(SpecError) as caught:
        place_from(**{variable: value})
    assert str(caught.value).startswith(sentence)


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_with("127.0.0.1") == "lo"
    with pytest.raises(SetupError, match=r"no interface of this machine holds 192\.0\.2\.1"):
        interface_with("192.0.2.1")


def test_a_pod_that_cannot_start_prints_the_reason_and_ends_with_two(tmp_path: Path) -> None:
    file, last_words = tmp_path / "worker.json", tmp_path / "termination-log"
    file.write_bytes(render(config_of()))
    last_words.touch()  # as the kubelet does
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "medha.cli",
            "pod",
            "--config",
            str(file),
            "--last-words",
            str(last_words),
        ],
        env={**os.environ, **ENVIRONMENT, "MEDHA_SPP_STAGE": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    sentence = "MEDHA_SPP_STAGE is '': must be an integer from 0 to 1"
    assert done.stderr.splitlines()[-1].startswith(f"medha: {sentence}")
    assert last_words.read_text().startswith(sentence)


# --- a replica of two pods, and a router ----------------------------------------------------------


class Pods:
    """A replica of two stages in two pods, and the router that it dials."""

    def __init__(self, folder: Path) -> None:
        keys = {name: str(folder / name) for name in ("router", "controller", "rank")}
        for path in keys.values():
            Path(f"{path}.public").write_text(write_keys(Path(f"{path}.secret")) + "\n")
        port, ops, fleet = free_ports("127.0.0.1", 3)
        self.url, self._folder = f"http://127.0.0.1:{port}", folder
        router = RouterConfig(
            port=port,
            ops_port=ops,
            fleet_bind=f"tcp://127.0.0.1:{fleet}",
            models=(RouterModel(name="tiny", max_context_tokens=1024),),
            curve=Curve(secret=f"{keys['router']}.secret", allowed=f"{keys['controller']}.public"),
        )
        self.config = msgspec.structs.replace(
            config_of(Topology(spp=2)),
            checkpoint=str(write_checkpoint(folder / "model", TinyModel(layers=2, hidden=64))),
            routers=(router.fleet_bind,),
            page_tokens=16,
            kv_pages=256,
            curve=Curve(
                secret=f"{keys['controller']}.secret", server_public=f"{keys['router']}.public"
            ),
            rank_curve=Curve(
                secret=f"{keys['rank']}.secret",
                allowed=f"{keys['rank']}.public",
                server_public=f"{keys['controller']}.public",
            ),
            rank_timeout_s=10.0,
            run_dir=str(folder),
        )
        self._log = (folder / "log").open("wb")
        (folder / "router.json").write_bytes(render(router))
        (folder / "worker.json").write_bytes(render(self.config))
        self.router = self._start("medha_router", "--config", str(folder / "router.json"))
        self.pods = [self._pod(stage) for stage in range(2)]

    def _start(self, *argv: str, **environ: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", *argv],
            env={**os.environ, **environ},
            stdout=self._log,
            stderr=self._log,
        )

    def _pod(self, stage: int) -> subprocess.Popen[bytes]:
        environ = {
            **ENVIRONMENT,
            "MEDHA_KVP_GROUP": "0",
            "MEDHA_SPP_STAGE": str(stage),
            "MEDHA_POD_IP": f"{NET}.{stage + 1}",
            "MEDHA_LEADER_ADDRESS": f"{NET}.1",
            "MEDHA_INTERFACE": "lo",
            "MEDHA_GRACE_S": "60",
        }
        config = str(self._folder / "worker.json")
        return self._start("medha.cli", "pod", "--config", config, **environ)

    @property
    def text(self) -> str:
        return (self._folder / "log").read_text()

    def page(self, stage: int, path: str) -> httpx.Response | None:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://{NET}.{stage + 1}:8090{path}", timeout=30.0, trust_env=False)
        return None

    def ready(self, stage: int) -> bool:
        page = self.page(stage, "/readyz")
        return page is not None and page.status_code == 200

    def until(self, happens: Callable[[], object]) -> None:
        ends_s = time.monotonic() + LIMIT_S
        while not happens():
            assert time.monotonic() < ends_s, f"did not happen in time:\n{self.text[-8000:]}"
            time.sleep(0.05)

    def stream(self, tokens: int) -> Iterator[str]:
        """Lines of a streamed completion."""
        body = {
            "model": "tiny",
            "prompt": [5, 9, 200],
            "max_tokens": tokens,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
        with httpx.stream(
            "POST", f"{self.url}/v1/completions", json=body, timeout=LIMIT_S, trust_env=False
        ) as answer:
            assert answer.status_code == 200, answer.read()
            yield from answer.iter_lines()

    def answer(self, tokens: int) -> str:
        """Text of a streamed completion."""
        events = [line.removeprefix("data: ") for line in self.stream(tokens) if "choices" in line]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)

    def ranks(self, stage: int) -> list[psutil.Process]:
        return self._children(stage, "medha_worker.low_priority_start")

    def controller(self) -> psutil.Process | None:
        return next(iter(self._children(0, "medha_worker.controller")), None)

    def _children(self, stage: int, module: str) -> list[psutil.Process]:
        children = []
        for process in psutil.Process(self.pods[stage].pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # the process may end just now
                if process.name() != STANDBY and module in process.cmdline():
                    children.append(process)
        return children

    def close(self) -> None:
        for process in (*self.pods, self.router):
            process.kill()
            process.wait(60)
        self._log.close()


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    with contextlib.closing(Pods(tmp_path)) as running:
        yield running


@pytest.mark.timeout(900)
def test_two_pods_restart_a_dead_rank_and_finish_their_requests_at_sigterm(pods: Pods) -> None:
    pods.until(lambda: pods.ready(0) and pods.ready(1))
    assert list(pods.stream(8))[-2] == "data: [DONE]"
    for stage in range(2):
        alive, metrics = pods.page(stage, "/livez"), pods.page(stage, "/metrics")
        assert alive is not None and alive.status_code == 200
        assert metrics is not None
        assert 'medha_pod_restarts_total{program="ranks"} 0.0' in metrics.text

    # A rank dies: both pods restart the group, each by itself.
    before = {rank.pid for stage in range(2) for rank in pods.ranks(stage)}
    pods.ranks(1)[0].kill()
    pods.until(lambda: not before & {rank.pid for stage in range(2) for rank in pods.ranks(stage)})
    pods.until(lambda: pods.ready(0) and pods.ready(1))
    assert list(pods.stream(8))[-2] == "data: [DONE]"

    # Both get SIGTERM in the middle of an answer: they finish it first.
    received: list[str] = []
    started = threading.Event()

    def read_stream() -> None:
        for line in pods.stream(300):
            received.append(line)
            if len(received) > 4:
                started.set()

    client = threading.Thread(target=read_stream)
    client.start()
    assert started.wait(LIMIT_S)
    for process in pods.pods:
        process.send_signal(signal.SIGTERM)
    client.join(LIMIT_S)
    assert received[-2] == "data: [DONE]", pods.text[-8000:]
    assert [process.wait(LIMIT_S) for process in pods.pods] == [0, 0], pods.text[-8000:]
    assert list(Path(pods.config.run_dir).glob("medha-pod-*")) == []


@pytest.mark.timeout(900)
def test_ranks_of_all_pods_outlive_a_killed_and_a_hanging_controller(pods: Pods) -> None:
    pods.until(lambda: pods.ready(0) and pods.ready(1))
    expected = pods.answer(8)
    ranks = [pods.ranks(stage) for stage in range(2)]
    victims: set[psutil.Process | None] = {None}
    for number in (signal.SIGKILL, signal.SIGSTOP):
        victim = pods.controller()
        assert victim is not None
        victims.add(victim)
        victim.send_signal(number)
        pods.until(lambda: pods.controller() not in victims and pods.ready(0))
        assert pods.answer(8) == expected
        assert [pods.ranks(stage) for stage in range(2)] == ranks


@pytest.mark.timeout(300)
def test_a_pod_that_is_given_up_ends_with_a_status_of_its_own(pods: Pods) -> None:
    pods.until(lambda: pods.ranks(0))
    (Path(pods.config.checkpoint) / "model.safetensors").write_bytes(b"not a tensor")
    for stage in range(2):
        for rank in pods.ranks(stage):
            rank.kill()
    assert pods.pods[1].wait(LIMIT_S) == 2
    assert "medha: tiny-0-g0-s1-t0: " in pods.text
