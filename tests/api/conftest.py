"""A real API server with its etcd and nothing else: no kubelet, so pods stay what the API makes.

Started once per worker of the test run, on loopback, with credentials of its own. Found as
tests/conftest.py says, skipped where it is not.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.fleet import Fleet, Operator
from tests.api.nursery import Nursery
from tests.api.proxy import Proxy
from tests.api.rules import broken
from tests.api.server import ApiServer, Server

HOUSE = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def api_server(
    server_programs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiServer]:
    server = Server(tmp_path_factory.mktemp("api-server"), server_programs)
    try:
        server.start()
        yield server.where
    finally:
        server.end()


@pytest.fixture(scope="session")
def api(api_server: ApiServer) -> Iterator[httpx.Client]:
    """The API as administrator."""
    with api_server.client() as client:
        yield client


Kubectl = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def run_kubectl(api_server: ApiServer, kubectl: Path, tmp_path_factory: Any) -> Kubectl:
    """`kubectl` as administrator: words of the command, text for its standard input."""
    cache = tmp_path_factory.mktemp("kubectl")

    def run(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        line = [str(kubectl), f"--kubeconfig={api_server.kubeconfig}", f"--cache-dir={cache}"]
        return subprocess.run(
            [*line, *words], input=text, capture_output=True, text=True, timeout=100
        )

    return run


@pytest.fixture(scope="session")
def crd(run_kubectl: Kubectl) -> None:
    """The API server knows MedhaReplica."""
    applied = run_kubectl("apply", "--server-side", "-f", str(HOUSE / "crds"))
    assert applied.returncode == 0, applied.stderr
    run_kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(HOUSE / "crds"))


_NUMBERS = itertools.count(1)


@pytest.fixture
def namespace(api: httpx.Client) -> str:
    """A namespace of the test's own."""
    name = f"test-{next(_NUMBERS)}"
    made = api.post("/api/v1/namespaces", json={"metadata": {"name": name}})
    assert made.status_code == 201, made.text
    return name


@pytest.fixture
def fleet(api: httpx.Client, namespace: str, crd: None) -> Iterator[Fleet]:
    """A namespace with two nodes, whose kubelets the test plays."""
    made = Fleet(api, namespace)
    yield made
    made.close()


@pytest.fixture
def start_operator(
    api_server: ApiServer, namespace: str, tmp_path: Path, proxy: Proxy
) -> Iterator[Callable[..., Operator]]:
    """Starts operators that serve the test's namespace, and ends those that still run. They all
    talk through the proxy, which knows what they may not say."""
    started: list[Operator] = []
    kubeconfig = tmp_path / "kubeconfig"
    known = json.loads(api_server.kubeconfig.read_text())
    known["clusters"][0]["cluster"] = {"server": proxy.url}
    kubeconfig.write_text(json.dumps(known))

    def start(name: str = "one", nursery: Nursery | None = None, **settings: str) -> Operator:
        log = tmp_path / f"{name}-{len(started)}.log"
        started.append(Operator(kubeconfig, namespace, log, name, nursery, **settings))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.kill()
    for each in started[-3:]:
        sys.stdout.write(each.log.read_text()[-8000:])  # pytest shows it when the test failed
    assert broken(proxy.calls, proxy.done) == []


@pytest.fixture
def proxy(api_server: ApiServer) -> Iterator[Proxy]:
    """What an operator may be put behind."""
    made = Proxy(api_server.url, api_server.token, str(api_server.authority))
    with made.running():
        yield made
