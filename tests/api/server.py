"""An API server and its etcd as processes that a test starts and stops.

Port, credentials and stored objects last as long as the folder.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec

from medha.cli.local_fleet.child_process import killed_with_parent
from medha.cli.local_fleet.preflight import free_ports

START_S, ATTEMPTS = 120.0, 3


AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "users": ["proxy"]}, {"level": "None"}],
}
"""Log the requests of proxies, as which account, and whether they were allowed."""


class ApiServer(msgspec.Struct, frozen=True):
    """Address and credentials of the API server.

    `watched` is an administrator's token whose requests are written to the log `audit`.
    """

    url: str
    token: str
    watched: str
    authority: Path
    kubeconfig: Path
    audit: Path

    def client(self, account: str = "") -> httpx.Client:
        """Make a client; `account` is the user to impersonate (`system:serviceaccount:ns:name`)."""
        headers = {"Authorization": f"Bearer {self.token}"}
        if account:
            headers["Impersonate-User"] = account
        context = ssl.create_default_context(cafile=str(self.authority))
        return httpx.Client(
            base_url=self.url, verify=context, headers=headers, timeout=30, trust_env=False
        )


def write_credentials(folder: Path, url: str) -> ApiServer:
    """Write the administrators' tokens, a key for service accounts, a kubeconfig and an audit
    policy."""
    server = ApiServer(
        url,
        secrets.token_hex(16),
        secrets.token_hex(16),
        folder / "certs/apiserver.crt",
        folder / "config",
        folder / "audit.log",
    )
    (folder / "tokens.csv").write_text(
        f"{server.token},admin,admin,system:masters\n{server.watched},proxy,proxy,system:masters\n"
    )
    (folder / "audit.json").write_text(json.dumps(AUDIT))
    key = folder / "accounts.key"
    subprocess.run(
        ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key], check=True
    )
    named = {"name": "test"}
    cluster = {"server": url, "certificate-authority": str(server.authority)}
    server.kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "clusters": [named | {"cluster": cluster}],
                "users": [named | {"user": {"token": server.token}}],
                "contexts": [named | {"context": {"cluster": "test", "user": "test"}}],
            }
        )
    )
    return server


def commands(folder: Path, programs: tuple[Path, Path], port: int) -> list[list[str]]:
    """Command lines of etcd and kube-apiserver."""
    etcd, apiserver = map(str, programs)
    store = f"http://127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    key = folder / "accounts.key"
    return [
        [
            etcd,
            f"--data-dir={folder / 'etcd'}",
            "--unsafe-no-fsync",
            "--log-level=warn",
            f"--listen-client-urls={store}",
            f"--advertise-client-urls={store}",
            "--listen-peer-urls=http://127.0.0.1:0",
        ],
        [
            apiserver,
            f"--etcd-servers={store}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={folder / 'certs'}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
            "--service-account-issuer=https://localhost",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.0.0.0/16",
            "--advertise-address=192.0.2.1",
            "--endpoint-reconciler-type=none",
            f"--audit-policy-file={folder / 'audit.json'}",
            f"--audit-log-path={folder / 'audit.log'}",
            "--audit-log-maxsize=100",
            "--audit-log-maxbackup=3",
        ],
    ]


def ready(server: ApiServer) -> bool:
    """Return true if the server answers and has created its first namespace."""
    try:
        with server.client() as client:
            path = "/api/v1/namespaces/default"
            return client.get("/readyz").status_code == client.get(path).status_code == 200
    except (httpx.HTTPError, OSError):  # its certificate or its port is not there yet
        return False


class Server:
    """etcd and kube-apiserver as child processes; `where` is the latter's address."""

    def __init__(self, folder: Path, programs: tuple[Path, Path]) -> None:
        (port,) = free_ports("127.0.0.1", 1)
        self.where = write_credentials(folder, f"https://127.0.0.1:{port}")
        self._folder, self._commands = folder, commands(folder, programs, port)
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start what does not run; returns once the API server answers."""
        while len(self._running) < len(self._commands):
            with self._log(len(self._running)).open("ab") as log:
                command = self._commands[len(self._running)]
                self._running.append(
                    subprocess.Popen(killed_with_parent(*command), stdout=log, stderr=log)
                )
        end = time.monotonic() + START_S
        while not ready(self.where):
            if time.monotonic() > end or any(
                process.poll() is not None for process in self._running
            ):
                logs = "\n".join(self._log(number).read_text()[-2000:] for number in (0, 1))
                raise AssertionError(f"no API server after {START_S:.0f} s:\n{logs}")
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill both; the stored objects stay."""
        process = self._running.pop()
        process.kill()
        process.wait(20)

    def end(self) -> None:
        """End both; the API server is killed, as with open watches it takes long to end."""
        for process in self._running[1:]:
            process.kill()
        for process in self._running[:1]:
            process.terminate()
        for process in self._running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()

    def _log(self, place: int) -> Path:
        return self._folder / f"{('etcd', 'kube-apiserver')[place]}.log"


@contextlib.contextmanager
def running_server(folder: Path, programs: tuple[Path, Path]) -> Iterator[Server]:
    """Start a server whose data is in `folder`, and end it at the end."""
    server = _started(folder, programs)
    try:
        yield server
    finally:
        server.end()


def _started(folder: Path, programs: tuple[Path, Path]) -> Server:
    """Start a server; with other ports if another process took one before it was bound."""
    for left in reversed(range(ATTEMPTS)):
        server = Server(folder, programs)
        try:
            server.start()
            return server
        except BaseException as error:
            server.end()
            if not left or "address already in use" not in str(error):
                raise
    raise AssertionError(f"no free ports in {ATTEMPTS} attempts")
