"""Several processes behind one port: one order, one count of use, and none hurt by a lost one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.router.conftest import byte_level_tokenizer, wait_until
from tests.support.instant_replica import MODEL

from medha.adapters.prometheus import Metrics, join_expositions
from medha.cli.local_fleet.preflight import free_port_run, free_ports
from medha.config import RouterConfig, render
from medha.errors import SetupError, SpecError
from medha.messages import RouterDemand
from medha_router.processes.parent import run_processes
from medha_router.processes.process_configs import process_configs

HOST = "127.0.0.1"
PATIENT_S = 60.0
KEY, LIMITED_KEY, LIMIT = "sk-first", "sk-second", 8


class Processes:
    """A router of two processes in a folder, and a replica of `kind` that dials it."""

    def __init__(
        self,
        folder: pathlib.Path,
        kind: str = "instant_replica",
        *options: str,
        **settings: Any,
    ) -> None:
        self.port, ops_port = free_ports(HOST, 2)
        self.config = RouterConfig(
            **{
                "port": self.port,
                "ops_port": ops_port,
                "fleet_bind": f"tcp://{HOST}:{free_port_run(HOST, 2)}",
                "learn": True,
                "processes": 2,
                "run_dir": str(folder),
                **settings,
            }
        )
        (folder / "tokenizer.json").write_bytes(byte_level_tokenizer())
        (folder / "router.json").write_bytes(render(self.config))
        self._clients: list[Client] = []
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.parent = subprocess.Popen(
                [sys.executable, "-m", "medha_router", "--config", str(folder / "router.json")],
                stderr=log,
            )
            self.replica = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    f"tests.support.{kind}",
                    self.config.fleet_bind,
                    str(folder),
                    *options,
                ],
                stderr=log,
            )
        self.tree = psutil.Process(self.parent.pid)
        self.ops = httpx.Client(
            base_url=f"http://{HOST}:{ops_port}", timeout=PATIENT_S, trust_env=False
        )
        wait_until(self.open, PATIENT_S)

    def open(self) -> bool:
        """Both processes have a replica that takes requests."""
        assert self.parent.poll() is None, self.log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            page = self.ops.get("/debug/queue")
            pages = page.json() if page.status_code == 200 else {}
            return len(pages) == 2 and all(
                models.get(MODEL, {}).get("open") for models in pages.values()
            )
        return False

    def children(self) -> list[psutil.Process]:
        """The living processes, by index."""
        lines: dict[psutil.Process, str] = {}
        for process in self.tree.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if line := process.cmdline():
                    lines[process] = line[-1]
        return sorted(lines, key=lines.__getitem__)

    def connect(self, index: int, key: str = KEY) -> Client:
        """Connect to one process: until the kernel chooses it."""
        while True:
            client = Client(self.port, key)
            self._clients.append(client)
            if self.children()[index].pid == client.server:
                return client

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.ops.close()
        for process in (self.replica, self.parent):
            process.kill()  # the parent's processes end with it
            process.wait()


class Client:
    """A connection to the public port; `server` is the process that has accepted it."""

    def __init__(self, port: int, key: str) -> None:
        self._key = key
        self._link = socket.create_connection((HOST, port), timeout=PATIENT_S)
        own = self._link.getsockname()[1]
        self._answers = self._link.makefile("rb")
        self._send(b"GET /version", {})  # accepted once answered
        assert self.status() == 200
        self.server = next(
            link.pid
            for link in psutil.net_connections("tcp4")
            if [*link.raddr[1:], *link.laddr[1:]] == [own, port]
        )

    def send(self, words: str, tokens: int, **headers: object) -> None:
        """Send a chat; its answer is streamed."""
        body = msgspec.json.encode(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": words}],
                "max_tokens": tokens,
                "stream": True,
                "ignore_eos": True,
            }
        )
        headers = {"Content-Type": "application/json", "Content-Length": len(body), **headers}
        self._send(b"POST /v1/chat/completions", headers, body)

    def _send(self, line: bytes, headers: Mapping[str, object], body: bytes = b"") -> None:
        lines = {"Host": "x", "Authorization": f"Bearer {self._key}", **headers}.items()
        head = "".join(f"{name}: {value}\r\n" for name, value in lines).encode()
        self._link.sendall(b"%b HTTP/1.1\r\n%b\r\n%b" % (line, head, body))

    def status(self) -> int:
        """Return the status of the next answer, whose body is left only if it is a stream."""
        while not (line := self._answers.readline()).startswith(b"HTTP/1.1 "):
            assert line, "the connection has ended"
        status, size = int(line.split()[1]), 0
        while line := self._answers.readline().strip():
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        self._answers.read(size)
        return status

    def events(self) -> Iterator[bytes]:
        """The events of a stream up to its end, or to where it breaks off."""
        with contextlib.suppress(ConnectionError):
            for line in self._answers:
                if line.startswith(b"data: "):
                    yield line.removeprefix(b"data: ").strip()
                if line == b"data: [DONE]\n":
                    return

    def close(self) -> None:
        self._answers.close()
        self._link.close()


Start = Callable[..., Processes]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """A router with API keys, shared by tests after which it serves on."""
    folder = tmp_path_factory.mktemp("router")
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in (KEY, LIMITED_KEY)]
    limits = f"requests_per_minute={LIMIT}"
    (folder / "keys").write_text(f"first:{digests[0]}\nsecond:{digests[1]} {limits}\n")
    with contextlib.closing(Processes(folder, api_keys=str(folder / "keys"))) as router:
        yield router


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    with contextlib.ExitStack() as running:

        def start(*arguments: str, **settings: Any) -> Processes:
            processes = Processes(tmp_path, *arguments, **settings)
            running.callback(processes.close)
            return processes

        yield start


# --- whole processes ------------------------------------------------------------------------------


def test_the_ops_port_answers_for_all_processes(
    router: Processes, eventually: Callable[..., None]
) -> None:
    for index in (0, 1, 1):
        client = router.connect(index)
        client.send("hello", 8)
        assert list(client.events())[-1] == b"[DONE]"

    def finished() -> dict[str, float]:
        families = {
            family.name: family
            for family in text_string_to_metric_families(router.ops.get("/metrics").text)
        }
        return {
            sample.labels["process"]: sample.value
            for sample in families["medha_requests"].samples
            if sample.labels["outcome"] == "finished"
        }

    eventually(lambda: finished() == {"0": 1.0, "1": 2.0})
    demand = msgspec.json.decode(router.ops.get("/demand").content, type=RouterDemand)
    assert sum(sum(model.slack_counts) for model in demand.models) == 3
    assert router.ops.get("/livez").status_code == 200
    assert router.ops.post("/drain").status_code == 404  # without a token there is no such page


def test_a_limit_of_a_tenant_counts_the_requests_of_all_processes(router: Processes) -> None:
    clients = [router.connect(index, LIMITED_KEY) for index in (0, 1)]
    statuses: list[int] = []
    for _ in range(LIMIT):
        for client in clients:
            client.send("hello", 2)
            statuses.append(client.status())
            if statuses[-1] == 200:
                assert list(client.events())[-1] == b"[DONE]"
        time.sleep(0.6)  # counts are reported four times a second
    assert set(statuses) == {200, 429}
    # Some of the first are forgotten meanwhile; each process alone would let all of its own pass.
    assert LIMIT <= statuses.count(200) < 2 * LIMIT


def test_a_port_that_another_router_shares_is_refused(
    router: Processes, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "other.json"
    changes = {"ops_port": 0, "fleet_bind": f"tcp://{HOST}:{free_port_run(HOST, 2)}"}
    path.write_bytes(render(msgspec.structs.replace(router.config, **changes)))
    done = subprocess.run(
        [sys.executable, "-m", "medha_router", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
        check=False,
    )
    assert done.returncode == 2
    assert f"port {HOST}:{router.port} cannot be opened" in done.stderr


def test_a_killed_process_breaks_its_own_streams_visibly_and_comes_back(router: Processes) -> None:
    lost, kept = router.connect(0), router.connect(1)
    lost.send("hello", 3000)  # at a hundred tokens a second it does not end before the kill
    kept.send("hello", 300)
    streams = lost.events(), kept.events()
    for stream in streams:
        next(stream)
    victim = router.children()[0]
    descendants = [victim, *victim.children(recursive=True)]
    victim.kill()
    assert list(streams[0])[-1:] != [b"[DONE]"]
    tokens = list(streams[1])
    assert tokens[-1] == b"[DONE]" and not any(b'"error"' in event for event in tokens)
    assert router.ops.get("/readyz").status_code == 200
    wait_until(lambda: not any(process.is_running() for process in descendants), PATIENT_S)
    wait_until(lambda: len(router.children()) == 2 and router.open(), PATIENT_S)
    again = router.connect(0)
    again.send("hello", 8)
    assert list(again.events())[-1] == b"[DONE]"


def test_a_process_whose_loop_hangs_is_replaced(router: Processes) -> None:
    victim = router.children()[1]
    began_s = time.monotonic()
    victim.suspend()
    wait_until(lambda: not victim.is_running(), PATIENT_S)
    assert time.monotonic() - began_s > 9.0  # a slow machine is no hung process
    wait_until(lambda: len(router.children()) == 2 and router.open(), PATIENT_S)


def test_requests_of_all_processes_begin_in_one_order(start: Start) -> None:
    """The replica is busy when requests of various urgency reach both processes by turns."""
    router = start("timed_replica", "--policy", "edf")
    deadlines_s = (50, 40, 60, 30, 45, 35)
    busy = router.connect(0)
    clients = [router.connect(number % 2) for number in range(len(deadlines_s))]
    busy.send("b" * 60_000, 1)  # six seconds, in which all the others arrive
    time.sleep(0.3)
    for client, deadline_s in zip(clients, deadlines_s, strict=True):
        client.send("a" * 3000, 1, **{"x-medha-slo-ttft-ms": 1000 * deadline_s})
    began: list[int] = []

    def read(client: Client, deadline_s: int) -> None:
        events = client.events()
        next(events)
        began.append(deadline_s)
        assert list(events)[-1] == b"[DONE]"

    with concurrent.futures.ThreadPoolExecutor() as threads:
        list(threads.map(read, clients, deadlines_s))
    assert began == sorted(deadlines_s)


def test_no_process_survives_a_killed_parent(start: Start) -> None:
    router = start()
    descendants = router.tree.children(recursive=True)
    assert len(descendants) >= 4  # routers and their tokenizers
    router.parent.kill()
    router.parent.wait()
    wait_until(lambda: not any(process.is_running() for process in descendants))


def test_a_terminated_parent_drains_every_process(start: Start) -> None:
    router = start()
    clients = router.connect(0), router.connect(1)
    for client in clients:
        client.send("hello", 1000)  # ten seconds, in which the drain is seen
    streams = [client.events() for client in clients]
    for stream in streams:
        next(stream)
    router.parent.send_signal(signal.SIGTERM)
    wait_until(lambda: router.ops.get("/readyz").status_code == 503)
    assert [list(stream)[-1] for stream in streams] == [b"[DONE]", b"[DONE]"]
    assert router.parent.wait(PATIENT_S) == 0


def test_a_signal_after_a_drain_request_ends_the_streams(
    start: Start, tmp_path: pathlib.Path
) -> None:
    """As with one process: `medha up` requests a drain, and then sends a signal."""
    token = "t" * 16
    (tmp_path / "token").write_text(token)
    router = start(ops_token=str(tmp_path / "token"))
    clients = router.connect(0), router.connect(1)
    for client in clients:
        client.send("hello", 3000)
    streams = [client.events() for client in clients]
    for stream in streams:
        next(stream)
    assert (
        router.ops.post("/drain", headers={"authorization": f"Bearer {token}"}).status_code == 202
    )
    wait_until(lambda: router.ops.get("/readyz").status_code == 503)
    router.parent.send_signal(signal.SIGTERM)
    assert all(b'"code":"draining"' in list(stream)[-1] for stream in streams)
    assert router.parent.wait(PATIENT_S) == 0


# --- rules ----------------------------------------------------------------------------------------


def config(**settings: Any) -> RouterConfig:
    return RouterConfig(**{"fleet_bind": "tcp://0.0.0.0:7800", "processes": 3, **settings})


def test_each_process_has_its_own_port_for_controllers_and_all_share_the_public_one() -> None:
    configs = process_configs(config(ops_token="t"), 8000, "/run/x", "/run/x/salt")
    assert [own.fleet_bind for own in configs] == [f"tcp://0.0.0.0:{7800 + i}" for i in range(3)]
    assert {own.port for own in configs} == {8000}
    places = [own.process for own in configs if own.process is not None]
    assert [place.index for place in places] == [0, 1, 2]
    assert {place.fleet_ports for place in places} == {(7800, 7801, 7802)}
    assert {(own.processes, own.ops_token) for own in configs} == {(1, "")}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("x" * 100, "makes a socket of "),
        ("file/run", "cannot be used (Not a directory): set run_dir"),
    ],
)
def test_a_run_directory_that_cannot_be_used_is_named(
    tmp_path: pathlib.Path, name: str, why: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError) as refused:
        run_processes(config(run_dir=str(tmp_path / name)))
    assert str(refused.value).startswith(f"run directory {tmp_path / name} {why}")
    assert not list(tmp_path.glob("x*/*"))


@pytest.mark.parametrize(
    "address", ["ipc:///run/router", "tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://[::1]:65534"]
)
def test_an_address_without_room_for_all_processes_is_refused(address: str) -> None:
    with pytest.raises(SpecError, match=r"fleet_bind is .*: must .*; (choose|use) "):
        process_configs(config(fleet_bind=address), 8000, "/run/x", "/run/x/salt")


Counts = st.dictionaries(st.sampled_from(["m", 'a"b', "{}", "x y"]), st.integers(0, 9), max_size=3)


@given(st.lists(Counts, min_size=1, max_size=4))
def test_joined_metrics_are_those_of_each_process_with_its_label(
    processes: list[dict[str, int]],
) -> None:
    texts, expected = {}, set()
    for index, counts in enumerate(processes):
        metrics = Metrics("router")
        for model, count in counts.items():
            metrics.add("medha_requests_moved_total", count, model)
            expected.add((str(index), model, float(count)))
        texts[str(index)] = metrics.text()
    joined = join_expositions(texts, "process").decode()
    assert joined.count("# TYPE medha_requests_moved_total ") == 1
    joined_series = {
        (sample.labels["process"], sample.labels["model"], sample.value)
        for family in text_string_to_metric_families(joined)
        for sample in family.samples
        if sample.name == "medha_requests_moved_total"
    }
    assert joined_series == expected
