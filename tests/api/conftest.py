"""A real API server with its etcd and nothing else: no kubelet, so pods stay what the API makes.

Started once per worker of the test run, on loopback, with credentials of its own. Found as
tests/conftest.py says, skipped where it is not.
"""

from __future__ import annotations

import itertools
import json
import secrets
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.api.fleet import Fleet, Operator
from tests.api.proxy import Proxy

HOUSE = Path(__file__).resolve().parents[2]
START_S = 60.0


class ApiServer(msgspec.Struct, frozen=True):
    """Where the API server is, and what lets an administrator in."""

    url: str
    token: str
    authority: Path
    kubeconfig: Path

    def client(self, account: str = "") -> httpx.Client:
        """A client for it; `account` is who to act as (`system:serviceaccount:ns:name`)."""
        headers = {"Authorization": f"Bearer {self.token}"}
        if account:
            headers["Impersonate-User"] = account
        context = ssl.create_default_context(cafile=str(self.authority))
        return httpx.Client(
            base_url=self.url, verify=context, headers=headers, timeout=30, trust_env=False
        )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def write_credentials(folder: Path, url: str) -> ApiServer:
    """An administrator's token, a signing key for service accounts, and a kubeconfig."""
    found = ApiServer(url, secrets.token_hex(16), folder / "certs/apiserver.crt", folder / "config")
    (folder / "tokens.csv").write_text(f"{found.token},admin,admin,system:masters\n")
    key = folder / "accounts.key"
    subprocess.run(
        ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key], check=True
    )
    named = {"name": "test"}
    cluster = {"server": url, "certificate-authority": str(found.authority)}
    found.kubeconfig.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [named | {"cluster": cluster}],
        "users": [named | {"user": {"token": found.token}}],
        "contexts": [named | {"context": {"cluster": "test", "user": "test"}}],
    }))  # fmt: skip
    return found


def commands(folder: Path, programs: tuple[Path, Path], port: int) -> list[list[str]]:
    etcd, apiserver = map(str, programs)
    store = f"http://127.0.0.1:{free_port()}"
    key = folder / "accounts.key"
    return [
        [etcd, f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync", "--log-level=warn",
         f"--listen-client-urls={store}", f"--advertise-client-urls={store}",
         "--listen-peer-urls=http://127.0.0.1:0"],
        [apiserver, f"--etcd-servers={store}", "--bind-address=127.0.0.1", f"--secure-port={port}",
         f"--cert-dir={folder / 'certs'}", f"--token-auth-file={folder / 'tokens.csv'}",
         "--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount",
         "--service-account-issuer=https://localhost", f"--service-account-key-file={key}",
         f"--service-account-signing-key-file={key}", "--service-cluster-ip-range=10.0.0.0/16",
         "--advertise-address=192.0.2.1", "--endpoint-reconciler-type=none"],
    ]  # fmt: skip


def ready(server: ApiServer) -> bool:
    """Whether it answers and has made its first namespace."""
    try:
        with server.client() as client:
            path = "/api/v1/namespaces/default"
            return client.get("/readyz").status_code == client.get(path).status_code == 200
    except (httpx.HTTPError, OSError):  # its certificate or its port is not there yet
        return False


@pytest.fixture(scope="session")
def api_server(
    server_programs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiServer]:
    folder = tmp_path_factory.mktemp("api-server")
    port = free_port()
    server = write_credentials(folder, f"https://127.0.0.1:{port}")
    logs = [(folder / f"{name}.log").open("wb") for name in ("etcd", "kube-apiserver")]
    running = [
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        for command, log in zip(commands(folder, server_programs, port), logs, strict=True)
    ]
    try:
        end = time.monotonic() + START_S
        while not ready(server):
            if time.monotonic() > end or any(each.poll() is not None for each in running):
                told = "\n".join(Path(log.name).read_text()[-2000:] for log in logs)
                pytest.fail(f"no API server after {START_S:.0f} s:\n{told}")
            time.sleep(0.1)
        yield server
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log in logs:
            log.close()


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
    """Starts operators that serve the test's namespace, and ends those that still run."""
    started: list[Operator] = []

    def start(name: str = "one", through: Proxy | None = None, **settings: str) -> Operator:
        kubeconfig = api_server.kubeconfig
        if through is not None:
            kubeconfig = tmp_path / "kubeconfig"
            known = json.loads(api_server.kubeconfig.read_text())
            known["clusters"][0]["cluster"] = {"server": through.url}
            kubeconfig.write_text(json.dumps(known))
        log = tmp_path / f"{name}-{len(started)}.log"
        started.append(Operator(kubeconfig, namespace, log, name, **settings))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.kill()
        sys.stdout.write(each.log.read_text()[-8000:])  # pytest shows it when the test failed


@pytest.fixture
def proxy(api_server: ApiServer) -> Iterator[Proxy]:
    """What an operator may be put behind."""
    made = Proxy(api_server.url, api_server.token, str(api_server.authority))
    with made.running():
        yield made
