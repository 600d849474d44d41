"""A namespace of its own for each fleet, and a proxy through which its operators must talk.

They act as an account that may do what docs/operator.md says, and when the curtain falls they must
come to rest and must never have said what the rules forbid. Several stages share an API server.
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
from tests.api.nursery import Nursery
from tests.api.played import Leaders
from tests.api.proxy import Proxy
from tests.api.rights import grant, take_back
from tests.api.rules import behind, broken
from tests.api.server import ApiServer

from medha_operator.client import REPLICAS

SILENT_S = 6.5
"""Three resyncs of these operators, and more than passes between two messages of a status."""
WITHIN_S = 150.0
FLOWS = '{"ingress": [{"ports": [{"port": 8091}]}], "egress": [{"ports": [{"port": 53}]}]}'
_NUMBERS = itertools.count(1)


def new_namespace(api: httpx.Client) -> str:
    name = f"test-{next(_NUMBERS)}"
    made = api.post("/api/v1/namespaces", json={"metadata": {"name": name}})
    assert made.status_code == 201, made.text
    return name


def new_proxy(server: ApiServer, account: str = "") -> Proxy:
    return Proxy(server.url, server.watched, str(server.authority), account)


class Stage:
    """Starts operators that serve the namespace, and sees them off."""

    def __init__(self, api: httpx.Client, namespace: str, proxy: Proxy, folder: Path) -> None:
        self._api, self._namespace, self._proxies = api, namespace, [proxy]
        self._folder = folder
        self._started: list[Operator] = []
        self._account = f"operator-of-{namespace}"
        self._admit()

    def start(
        self, name: str = "one", nursery: Nursery | None = None, *, via: Proxy | None = None,
        hurry: float = 1.0, **settings: str,
    ) -> Operator:  # fmt: skip
        """`via`: another proxy than the stage's; `hurry`: how many times as fast its time goes."""
        proxy = via or self._proxies[0]
        if proxy not in self._proxies:
            self._proxies.append(proxy)
        proxy.account = proxy.account or self._account
        number = len(self._started)
        kubeconfig = self._folder / f"{self._namespace}-{number}.kubeconfig"
        kubeconfig.write_text(_kubeconfig(proxy.url))
        log = self._folder / f"{self._namespace}-{name}-{number}.log"
        self._started.append(
            Operator(kubeconfig, self._namespace, log, name, nursery, hurry, **settings)
        )
        return self._started[-1]

    def end(self, *, failed: bool = False) -> None:
        """Nobody works any more. Those that still did have come to rest before."""
        living = [each for each in self._started if each.process.poll() is None]
        try:
            if living and not failed:
                self._rest(living)
        finally:
            for each in living:
                each.kill()
            for each in self._started[-3:]:
                sys.stdout.write(each.log.read_text()[-8000:])  # shown when the test failed
            take_back(self._api, self._account)
        for proxy in self._proxies:
            assert broken(proxy.calls, proxy.done) == []

    def _rest(self, living: list[Operator]) -> None:
        """With nobody in its way, one of them leads, and soon has nothing left to write."""
        for proxy in self._proxies:
            proxy.trust()
        until(lambda: any(each.leads() for each in living), "one leads", WITHIN_S)
        began_s = time.monotonic()

        def silent() -> bool:
            last_s = max(proxy.last_write_s() for proxy in self._proxies)
            return time.monotonic() - max(began_s, last_s) > SILENT_S

        until(
            silent, f"an operator writes on: {[each.call for each in proxy.done[-20:]]}", WITHIN_S
        )
        path = REPLICAS.path(self._namespace)
        assert behind(self._api.get(path).json().get("items", [])) == []

    def _admit(self) -> None:
        """What was granted is in force."""
        grant(self._api, self._namespace, self._account)
        headers = {"Impersonate-User": self._account}
        paths = ("/api/v1/nodes", REPLICAS.path(self._namespace))
        until(lambda: all(self._api.get(each, headers=headers).is_success for each in paths))


def _kubeconfig(url: str) -> str:
    named = {"name": "test"}
    return json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [named | {"cluster": {"server": url}}],
        "users": [named | {"user": {}}],
        "contexts": [named | {"context": {"cluster": "test", "user": "test"}}],
    })  # fmt: skip


class Scene(msgspec.Struct, frozen=True):
    """A stage and what a life needs: nodes, controllers that answer, operators born quickly."""

    api: httpx.Client
    fleet: Fleet
    leaders: Leaders
    proxy: Proxy
    stage: Stage
    nursery: Nursery

    def start(self, **settings: str) -> Operator:
        return self.stage.start(
            nursery=self.nursery, via=self.proxy, hurry=1.0, MEDHA_WORKER_FLOWS=FLOWS, **settings
        )


@contextlib.contextmanager
def scene(server: ApiServer, folder: Path, nodes: int = 2) -> Iterator[Scene]:
    """Everything of its own but the API server: several may play at once, each on a thread."""
    with contextlib.ExitStack() as stack:
        api = stack.enter_context(server.client())
        namespace = new_namespace(api)
        fleet = Fleet(api, namespace, nodes)
        stack.callback(fleet.close)
        leaders = stack.enter_context(contextlib.closing(Leaders()))
        fleet.address = leaders.address
        nursery = stack.enter_context(contextlib.closing(Nursery()))
        proxy = stack.enter_context(new_proxy(server).running())
        stage = Stage(api, namespace, proxy, folder)
        try:
            yield Scene(api, fleet, leaders, proxy, stage, nursery)
        except BaseException:
            stage.end(failed=True)
            raise
        stage.end()
