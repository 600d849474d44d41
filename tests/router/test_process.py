"""The router process: start, imports, end."""

from __future__ import annotations

import contextlib
import json
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.router.conftest import PATIENT_S, wait_until
from tests.support.ipv6 import NEEDS_IPV6

from medha.adapters.addresses import http_url
from medha.cli.local_fleet.preflight import free_ports
from medha.config import RouterConfig, RouterModel, render
from medha_router.http_protocol import HttpLimits


def config_file(folder: pathlib.Path, **settings: Any) -> pathlib.Path:
    config = RouterConfig(
        fleet_bind="tcp://127.0.0.1:0",
        models=(RouterModel(name="tiny", max_context_tokens=64),),
        **{"port": 0, "ops_port": 0, **settings},
    )
    path = folder / "router.json"
    path.write_bytes(render(config))
    return path


@NEEDS_IPV6
@pytest.mark.parametrize(("host", "clients"), [("::1", "::1"), ("::", "127.0.0.1")])
def test_a_router_serves_both_versions_of_ip(running_with: Any, host: str, clients: str) -> None:
    router = running_with(host=host, ops_host="127.0.0.1").router
    assert router.url.startswith(f"http://[{host}]:")
    port = router.public.getsockname()[1]
    assert httpx.get(f"{http_url(clients, port)}/v1/models").status_code == 200


def test_a_terminated_router_drains_and_exits_with_zero(tmp_path: pathlib.Path) -> None:
    path = config_file(tmp_path, no_replica_timeout_s=1.0)
    process = subprocess.Popen(
        [sys.executable, "-m", "medha_router", "--config", str(path)], stderr=subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        line = json.loads(process.stderr.readline())
        assert line["message"] == "serving" and line["process"] == "router"
        url = line["url"]
        assert httpx.get(f"{url}/v1/models").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENT_S) == 0
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def limited(folder: pathlib.Path, limits: str) -> Iterator[tuple[str, str]]:
    """A router under limits of open files, as `ulimit` takes them: its URLs for clients and ops."""
    (ops_port,) = free_ports("127.0.0.1", 1)
    path = config_file(folder, ops_port=ops_port)
    command = f"ulimit {limits}; exec {sys.executable} -m medha_router --config {path}"
    process = subprocess.Popen(["sh", "-c", command], stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        yield json.loads(process.stderr.readline())["url"], f"http://127.0.0.1:{ops_port}"
    finally:
        process.kill()
        process.communicate()


def served_at(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/v1/models").status_code == 200
    return False


def test_a_router_has_more_connections_than_files_a_shell_allows_at_first(
    tmp_path: pathlib.Path,
) -> None:
    with limited(tmp_path, "-S -n 100") as (url, _), contextlib.ExitStack() as idle:
        for _ in range(150):
            idle.enter_context(socket.create_connection((httpx.URL(url).host, httpx.URL(url).port)))
        assert httpx.get(f"{url}/v1/models", timeout=PATIENT_S).status_code == 200


def test_clients_cannot_take_the_files_with_which_a_router_answers_its_probes(
    tmp_path: pathlib.Path,
) -> None:
    with limited(tmp_path, "-n 200") as (url, ops), contextlib.ExitStack() as idle:
        address = httpx.URL(url).host, httpx.URL(url).port
        clients = [idle.enter_context(socket.create_connection(address)) for _ in range(300)]
        wait_s = HttpLimits().head_s / 2  # until then, no connection without a request is closed
        assert httpx.get(f"{ops}/healthz", timeout=wait_s).status_code == 200
        for client in clients:
            client.close()
        wait_until(lambda: served_at(url))


@pytest.mark.parametrize("content", [b"{}", b"junk", None])
def test_an_unreadable_config_is_reported_in_one_line(
    tmp_path: pathlib.Path, content: bytes | None
) -> None:
    path = tmp_path / "router.json"
    if content is not None:
        path.write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-m", "medha_router", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("medha_router: --config is ") and done.stderr.count("\n") == 1


def test_a_port_in_use_is_named(tmp_path: pathlib.Path, served: object) -> None:
    port = served.router.public.getsockname()[1]  # type: ignore[attr-defined]
    path = tmp_path / "router.json"
    config = RouterConfig(
        port=port,
        ops_port=0,
        fleet_bind="tcp://127.0.0.1:0",
        models=(RouterModel(name="tiny", max_context_tokens=64),),
    )
    path.write_bytes(render(config))
    done = subprocess.run(
        [sys.executable, "-m", "medha_router", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
    )
    assert done.returncode == 2 and str(port) in done.stderr


def test_a_router_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import medha_router.app, medha_router.processes.parent, sys;"
        "import medha_router.tokenization.encoder;"
        "print([name for name in ('torch', 'transformers', 'nixl', 'safetensors')"
        " if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENT_S, check=True
    )
    assert done.stdout.strip() == "[]"
