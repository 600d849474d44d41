"""The API server itself dies and comes back: under load, and after a minute's silence.

The test has an API server of its own, since it is killed; the proxy before it stays. Pods that were
healthy before must not be touched, not by a single write, so that they keep serving.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.api.fleet import Fleet, Operator, until
from tests.api.operator_forks import ForkServer
from tests.api.rights import documented, missing_rights
from tests.api.server import Server, running_server
from tests.api.stage import Stage, new_proxy

HOUSE = Path(__file__).resolve().parents[2]
AWAY_S = 60.0
RESYNC_S = 10
"""Liveness allows a call that hangs as long as this; the default is three times as long."""
BUSY = ("busy-0", "busy-1", "busy-2")

pytestmark = pytest.mark.timeout(1800)


class Outage:
    """A server, a namespace in it, its operator, and the results of its liveness probe."""

    def __init__(self, server: Server, fleet: Fleet, operator: Operator) -> None:
        self.server, self.fleet, self.operator = server, fleet, operator
        self.dead: list[str] = []

    @contextlib.contextmanager
    def probed(self) -> Iterator[None]:
        """Call the liveness probe repeatedly in the background."""
        ended = threading.Event()

        def ask() -> None:
            while not ended.wait(0.3):
                try:
                    self.dead += [] if self.operator.alive() else ["unhealthy"]
                except httpx.HTTPError as error:
                    self.dead.append(repr(error))

        probe = threading.Thread(target=ask)
        probe.start()
        try:
            yield
        finally:
            ended.set()
            probe.join(60)

    def pods(self, name: str) -> dict[str, tuple[str, str]]:
        """UID and version of each pod of a resource, those being deleted included."""
        return {
            pod["metadata"]["name"]: (pod["metadata"]["uid"], pod["metadata"]["resourceVersion"])
            for pod in self.fleet.list("pods")
            if pod["metadata"]["labels"].get("medha.dev/replica") == name
        }


@pytest.fixture
def outage(
    server_programs: tuple[Path, Path],
    tmp_path: Path,
    fork_server: ForkServer,
    request: pytest.FixtureRequest,
) -> Iterator[Outage]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running_server(tmp_path, server_programs))
        api = stack.enter_context(server.where.client())
        install_crd(api)
        api.post("/api/v1/namespaces", json={"metadata": {"name": "test"}}).raise_for_status()
        fleet = Fleet(api, "test")
        proxy = stack.enter_context(new_proxy(server.where).running())
        stage = Stage(api, "test", proxy, tmp_path, fork_server)
        failures = request.session.testsfailed
        yield Outage(server, fleet, stage.start(MEDHA_RESYNC_S=str(RESYNC_S)))
        stage.end(failed=request.session.testsfailed > failures)
        # A server that has just started refuses for a moment what is granted.
        granted = set().union(*(row.rights for row in documented()))
        assert missing_rights(server.where.audit) - granted == set()


def install_crd(api: httpx.Client) -> None:
    """Install the CRD."""
    (path,) = (HOUSE / "crds").glob("*.yaml")
    reply = api.post(
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
        content=path.read_bytes(),
        headers={"Content-Type": "application/yaml"},
    )
    assert reply.status_code == 201, reply.text
    kind = "/apis/medha.dev/v1alpha1/namespaces/default/medhareplicas"
    until(lambda: api.get(kind).status_code == 200)


def scale(outage: Outage, ended: threading.Event) -> None:
    """Scale the busy resources up and down all the time; failures are not retried."""
    with outage.server.where.client() as api:
        for name, replicas in itertools.cycle(itertools.product(BUSY, (2, 1, 3))):
            if ended.wait(0.1):
                return
            with contextlib.suppress(httpx.HTTPError):
                api.patch(
                    outage.fleet.path(name),
                    json={"spec": {"replicas": replicas}},
                    timeout=5.0,
                    headers={"Content-Type": "application/merge-patch+json"},
                )


def test_an_api_server_that_dies_under_load_loses_no_change_and_doubles_no_pod(
    outage: Outage,
) -> None:
    fleet = outage.fleet
    for name in ("calm", *BUSY):
        fleet.create(name, replicas=1)
    fleet.played(lambda: all(fleet.is_ready(name) for name in ("calm", *BUSY)))
    calm = outage.pods("calm")
    ended = threading.Event()
    client = threading.Thread(target=scale, args=(outage, ended))
    with outage.probed():
        client.start()
        try:
            for _ in range(3):
                end = time.monotonic() + 3.0
                while time.monotonic() < end:
                    fleet.play()
                outage.server.kill()
                outage.server.start()
        finally:
            ended.set()
            client.join(60)
        for name in BUSY:
            fleet.change(name, {"replicas": 2})
        fleet.played(lambda: all(fleet.is_ready(name) for name in ("calm", *BUSY)))
        fleet.played(lambda: all(len(outage.pods(name)) == 4 for name in BUSY))
    assert outage.pods("calm") == calm
    assert outage.dead == []
    for name in BUSY:
        labels = [
            tuple(
                pod["metadata"]["labels"][f"medha.dev/{part}"]
                for part in ("ordinal", "kvp-group", "spp-stage")
            )
            for pod in fleet.list("pods")
            if pod["metadata"]["labels"]["medha.dev/replica"] == name
        ]
        assert len(set(labels)) == len(labels) == 4


def test_a_minute_without_an_api_server_touches_nothing_and_is_caught_up_with(
    outage: Outage,
) -> None:
    fleet, operator = outage.fleet, outage.operator
    fleet.create("calm", replicas=2)
    fleet.create("grows", replicas=1)
    fleet.played(lambda: fleet.is_ready("calm") and fleet.is_ready("grows"))
    before = {name: outage.pods(name) for name in ("calm", "grows")}
    fleet.change("grows", {"replicas": 2})  # the operator may not have acted on it yet
    with outage.probed():
        outage.server.kill()
        time.sleep(AWAY_S)  # the length of the outage is the subject
        assert operator.process.poll() is None
        outage.server.start()
        fleet.create("late")
        fleet.played(lambda: all(fleet.is_ready(name) for name in ("calm", "grows", "late")))
        until(operator.leads)
    assert outage.dead == []
    assert outage.pods("calm") == before["calm"]
    grown = outage.pods("grows")
    assert len(grown) == 4 and before["grows"].items() <= grown.items()
