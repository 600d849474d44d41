"""A real fleet through the command line serves, survives a kill, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from tests.support.ipv6 import NEEDS_IPV6
from tests.support.medha_up import MEDHA, Up, until

from medha.adapters.addresses import listening
from medha.cli.doctor import diagnose
from medha.cli.local_fleet.console_output import loading_phase
from medha.cli.local_fleet.preflight import free_ports
from medha.messages import GroupStatus, ReplicaStatus
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

RESOURCE = """
apiVersion: medha.dev/v1beta1
kind: MedhaReplica
metadata: {name: tiny}
spec:
  model: {name: tiny, source: {hostPath: {path: model}}, maxContextTokens: 1024}
  device: {kind: Cpu}
  slo: {default: {ttft: {floor: 30s}, tpot: 5s}}
  engine: {kvPages: 64}
"""
RANK = "tiny-0-g0-s0-t0"


def medha(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MEDHA, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet")
    small = TinyModel(
        layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, intermediate=96, max_tokens=1024
    )
    write_checkpoint(folder / "model", small)
    (folder / "tiny.yaml").write_text(RESOURCE)
    return folder / "tiny.yaml"


@pytest.fixture
def up(file: Path) -> Iterator[Up]:
    running = Up(file)
    try:
        yield running
    finally:
        running.kill()


@pytest.mark.timeout(600)
def test_a_fleet_serves_survives_a_killed_rank_and_ends_without_a_trace(file: Path, up: Up) -> None:
    shared = set(os.listdir("/dev/shm"))
    until(up.serves)
    before = up.ask()
    assert "controller" in up.said and "rank" in up.said  # the table of programs
    rank = up.children()[RANK]
    rank.kill()
    until(lambda: "tiny-0-g0" in up.said and "restarting in" in up.said)
    until(lambda: up.children().get(RANK, rank).pid != rank.pid)
    assert up.ask() == before
    everything = up.everything()
    assert up.end(signal.SIGINT) == 0
    assert [process for process in everything if process.is_running()] == []
    assert {path.suffix for path in up.run_dir.iterdir() if path.is_file()} <= {
        ".json",
        ".log",
        ".public",
    }
    assert set(os.listdir("/dev/shm")) <= shared


@pytest.mark.timeout(600)
def test_ctrl_c_ends_the_stream_under_way_with_an_error_event(file: Path, up: Up) -> None:
    until(up.serves)
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1000, "stream": True, "ignore_eos": True}
    text, ready = "", f"http://127.0.0.1:{up.ops_port}/readyz"
    with (
        httpx.Client(base_url=up.url, timeout=120, trust_env=False) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        for piece in response.iter_text():
            if not text:
                up.children()[RANK].suspend()  # the stream cannot end by itself
                up.process.send_signal(signal.SIGINT)
                until(lambda: "running requests have" in up.said)
                until(lambda: httpx.get(ready, trust_env=False).status_code == 503)
                up.process.send_signal(signal.SIGINT)
            text += piece
    assert text.rstrip().rpartition("\n\n")[2].startswith("event: error\n")
    assert "[DONE]" not in text
    assert up.process.wait(120) == 0 and "Traceback" not in up.said


@pytest.mark.timeout(600)
def test_a_fleet_without_weight_files_answers_with_random_weights(
    file: Path, tmp_path: Path
) -> None:
    shutil.copytree(file.parent / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    bare = Path(shutil.copy(file, tmp_path))
    up = Up(bare, "--dummy-weights")
    try:
        until(up.serves)
        up.ask()
        assert up.end(signal.SIGTERM) == 0
    finally:
        up.kill()


@pytest.mark.timeout(600)
def test_controllers_register_with_every_process_of_the_router(file: Path) -> None:
    up = Up(file, "--router-processes", "2")
    try:
        until(up.serves)
        until(lambda: (status := up.status()) is not None and status.routers == 2)
        before = up.ask()
        victim = up.children()["router"].children()[1]
        victim.kill()
        until(lambda: not victim.is_running())
        assert up.ask() == before
        until(lambda: (status := up.status()) is not None and status.routers == 2)
        everything = up.everything()
        assert up.end(signal.SIGTERM) == 0
        assert [process for process in everything if process.is_running()] == []
    finally:
        up.kill()


@pytest.mark.timeout(600)
def test_a_fleet_whose_starter_is_killed_ends_too(file: Path, up: Up) -> None:
    until(lambda: len(up.children()) == 3)
    everything = up.everything()
    up.kill()
    until(lambda: not any(process.is_running() for process in everything))


@pytest.mark.timeout(600)
def test_a_signal_during_loading_ends_the_fleet_cleanly(file: Path, up: Up) -> None:
    until(lambda: len(up.children()) == 3)
    everything = up.everything()
    assert up.end(signal.SIGTERM) == 0
    assert [process for process in everything if process.is_running()] == []


@pytest.mark.timeout(600)
def test_a_template_that_does_not_parse_ends_the_fleet_with_status_two(
    file: Path, tmp_path: Path
) -> None:
    shutil.copytree(file.parent / "model", tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text("{% for message in messages %}\n{{ message.content }\n{% endfor %}")
    (tmp_path / "tiny.yaml").write_text(RESOURCE)
    up = Up(tmp_path / "tiny.yaml", "--quiet")
    try:
        assert up.process.wait(timeout=120) == 2
        last = up.said.splitlines()[-1]
        assert last.startswith(
            f"medha: replica tiny-0 with the checkpoint {template.parent} is refused by its router"
        )
        assert "the tokenizer of tiny does not load: chat_template.jinja is not a Jinja " in last
        assert "line 2: unexpected '}'" in last and last.endswith("or fetch the file again")
    finally:
        up.kill()


@pytest.mark.parametrize(
    "change, sentence",
    [
        (("tiny.yaml", "none.yaml"), "medha: -f is "),
        (("kind: Cpu", "kind: Cuda"), "medha: spec.device.kind is Cuda: must be Cpu on a machine"),
        (("path: model", "path: gone"), "medha: spec.model.source.hostPath.path is "),
        (("maxContextTokens: 1024", "maxContextTokens: 4096"), "must be at most the model's"),
        (("kvPages: 64", "kvpages: 64"), "spec.engine.kvpages is not a field"),
    ],
)
def test_a_user_error_is_one_line_and_status_two(
    file: Path, change: tuple[str, str], sentence: str
) -> None:
    wrong = file.with_name("wrong.yaml")
    wrong.write_text(RESOURCE.replace(*change))
    chosen = file.with_name("none.yaml") if change[1] == "none.yaml" else wrong
    result = medha("up", "-f", str(chosen))
    assert result.returncode == 2
    assert sentence in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=NEEDS_IPV6)])
def test_a_taken_port_is_reported_before_any_program_starts(file: Path, host: str) -> None:
    with closing(listening(host, 0, backlog=1)) as server:
        port = str(server.getsockname()[1])
        result = medha("up", "-f", str(file), "--host", host, "--port", port)
    assert result.returncode == 2
    assert f"port {port} of {host} is in use" in result.stderr


def test_an_unknown_policy_names_the_known_ones(file: Path) -> None:
    result = medha("up", "-f", str(file), "--policy", "lifo")
    assert result.returncode == 2 and "must be one of LARS, " in result.stderr


def test_the_doctor_passes_a_good_machine_and_names_a_bad_resource(file: Path) -> None:
    port, ops_port = free_ports("127.0.0.1", 2)
    console = Console(record=True, width=200, file=open(os.devnull, "w"))  # noqa: SIM115
    try:
        assert diagnose(file, port, ops_port, console)
        assert not diagnose(file.with_name("none.yaml"), port, ops_port, console)
    finally:
        console.file.close()
    text = console.export_text()
    assert "ok encrypted link: delivers" in text
    assert "KVP groups: NIXL over the fastest of shared memory; TCP on lo" in text
    assert "no RDMA: all ranks are on this machine" in text
    assert "no resource none.yaml: -f is " in text


def test_progress_follows_the_loading_of_the_least_groups() -> None:
    def status(loaded: float, ready: bool = False) -> ReplicaStatus:
        groups = (
            GroupStatus(group=0, state="starting", loaded=loaded),
            GroupStatus(group=1, state="absent", loaded=1.0),
        )
        return ReplicaStatus(
            replica="r", ready=ready, draining=False, generation=0, wanted_groups=1, groups=groups
        )

    assert loading_phase(status(0.0), 1) == (0.0, "starting")
    assert loading_phase(status(0.5), 1) == (0.45, "loading weights, 50%")
    assert loading_phase(status(1.0), 1)[0] == 0.95
    assert loading_phase(status(1.0, ready=True), 1) == (1.0, "ready")
