"""A namespace of its own for each fleet, and a proxy that all its operators must use.

The operators act as an account with the rights of charts/medha/README.md. At the end they must
come to rest, and no call may have broken a rule. Several stages share an API server.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
from tests.api.fleet import Fleet, Operator, until
from tests.api.operator_forks import ForkServer
from tests.api.proxy import Proxy
from tests.api.rights import grant, revoke
from tests.api.rules import behind, broken
from tests.api.server import ApiServer
from tests.api.stand_ins import Leaders

from medha_operator.kube.client import REPLICAS

SILENT_S = 6.5
"""Three resyncs of these operators, and longer than the pause between two messages of a status."""
WITHIN_S = 300.0
FLOWS = '{"ingress": [{"ports": [{"port": 8091}]}], "egress": [{"ports": [{"port": 53}]}]}'
_NUMBERS = itertools.count(1)


def new_namespace(api: httpx.Client) -> str:
    name = f"test-{next(_NUMBERS)}"
    reply = api.post("/api/v1/namespaces", json={"metadata": {"name": name}})
    assert reply.status_code == 201, reply.text
    return name


def new_proxy(server: ApiServer, account: str = "") -> Proxy:
    return Proxy(server.url, server.watched, str(server.authority), account)


class Stage:
    """Starts operators that serve the namespace, and ends them."""

    def __init__(
        self,
        api: httpx.Client,
        namespace: str,
        proxy: Proxy,
        folder: Path,
        fork_server: ForkServer | None = None,
    ) -> None:
        self._api, self._namespace, self._proxies = api, namespace, [proxy]
        self._folder, self._fork_server = folder, fork_server
        self._started: list[Operator] = []
        self._account = f"operator-of-{namespace}"
        self._admit()

    def start(
        self,
        name: str = "one",
        *,
        via: Proxy | None = None,
        speed: float = 1.0,
        **settings: str,
    ) -> Operator:
        """Start an operator. `via`: a proxy other than the stage's; `speed`: factor of its clocks,
        which are those of a program of its own."""
        proxy = via or self._proxies[0]
        if proxy not in self._proxies:
            self._proxies.append(proxy)
        proxy.account = proxy.account or self._account
        number = len(self._started)
        kubeconfig = self._folder / f"{self._namespace}-{number}.kubeconfig"
        kubeconfig.write_text(kubeconfig_of(proxy.url))
        log = self._folder / f"{self._namespace}-{name}-{number}.log"
        fork_server = self._fork_server if speed == 1.0 else None
        self._started.append(
            Operator(kubeconfig, self._namespace, log, name, fork_server, speed, **settings)
        )
        return self._started[-1]

    def end(self, *, failed: bool = False) -> None:
        """End every operator; those still running must have come to rest."""
        living = [operator for operator in self._started if operator.process.poll() is None]
        try:
            if living and not failed:
                self._rest(living)
        finally:
            for operator in living:
                operator.kill()
            for operator in self._started[-3:]:
                sys.stdout.write(operator.log.read_text()[-8000:])  # shown if the test failed
            revoke(self._api, self._account)
        for proxy in self._proxies:
            assert broken(proxy.calls, proxy.done) == []

    def _rest(self, living: list[Operator]) -> None:
        """Wait, without tampering, until one operator leads and nothing is left to write."""
        for proxy in self._proxies:
            proxy.trust()
        until(lambda: any(operator.leads() for operator in living), "one leads", WITHIN_S)
        began_s = time.monotonic()

        def silent() -> bool:
            last_s = max(proxy.last_write_s() for proxy in self._proxies)
            return time.monotonic() - max(began_s, last_s) > SILENT_S

        until(
            silent, f"an operator writes on: {[reply.call for reply in proxy.done[-20:]]}", WITHIN_S
        )
        path = REPLICAS.path(self._namespace)
        assert behind(self._api.get(path).json().get("items", [])) == []

    def _admit(self) -> None:
        """Grant the rights and wait until they are in force."""
        grant(self._api, self._namespace, self._account)
        headers = {"Impersonate-User": self._account}
        paths = ("/api/v1/nodes", REPLICAS.path(self._namespace))
        until(lambda: all(self._api.get(path, headers=headers).is_success for path in paths))


def kubeconfig_of(url: str) -> str:
    """Write a kubeconfig for a proxy, which needs no credentials."""
    named = {"name": "test"}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [named | {"cluster": {"server": url}}],
            "users": [named | {"user": {}}],
            "contexts": [named | {"context": {"cluster": "test", "user": "test"}}],
        }
    )


class Scene(msgspec.Struct, frozen=True):
    """A stage with what a life needs: nodes, answering controllers, fast operator starts."""

    api: httpx.Client
    fleet: Fleet
    leaders: Leaders
    proxy: Proxy
    stage: Stage

    def start(self, **settings: str) -> Operator:
        return self.stage.start(via=self.proxy, speed=1.0, MEDHA_WORKER_FLOWS=FLOWS, **settings)


@contextlib.contextmanager
def scene(
    server: ApiServer, folder: Path, fork_server: ForkServer, nodes: int = 2
) -> Iterator[Scene]:
    """Make a scene with everything of its own but the API server; several run at once, in
    threads."""
    with contextlib.ExitStack() as stack:
        api = stack.enter_context(server.client())
        namespace = new_namespace(api)
        fleet = Fleet(api, namespace, nodes)
        stack.callback(fleet.close)
        leaders = stack.enter_context(contextlib.closing(Leaders()))
        fleet.address = leaders.address
        proxy = stack.enter_context(new_proxy(server).running())
        stage = Stage(api, namespace, proxy, folder, fork_server)
        try:
            yield Scene(api, fleet, leaders, proxy, stage)
        except BaseException:
            stage.end(failed=True)
            raise
        stage.end()
