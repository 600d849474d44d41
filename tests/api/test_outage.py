"""The API server itself dies and comes back: under load, and after a minute's silence.

An API server of the tests' own, since it is killed; the proxy before it stays. Pods that were well
before must not be touched: not one write to them, so that what they serve goes on.
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
from tests.api.rights import documented, forbidden
from tests.api.server import Server
from tests.api.stage import Stage, new_proxy

HOUSE = Path(__file__).resolve().parents[2]
AWAY_S = 60.0
BUSY = ("busy-0", "busy-1", "busy-2")

pytestmark = pytest.mark.timeout(900)


class World:
    """A server, a namespace in it, an operator of that namespace, and what its probe was told."""

    def __init__(self, server: Server, fleet: Fleet, operator: Operator) -> None:
        self.server, self.fleet, self.operator = server, fleet, operator
        self.dead: list[str] = []

    @contextlib.contextmanager
    def probed(self) -> Iterator[None]:
        """Meanwhile the liveness probe is asked every moment."""
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
        """UID and version of each pod of a resource, those that are about to go included."""
        return {
            each["metadata"]["name"]: (each["metadata"]["uid"], each["metadata"]["resourceVersion"])
            for each in self.fleet.list("pods")
            if each["metadata"]["labels"].get("medha.dev/replica") == name
        }


@pytest.fixture
def world(
    server_programs: tuple[Path, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[World]:
    server = Server(tmp_path, server_programs)
    with contextlib.ExitStack() as stack:
        stack.callback(server.end)
        server.start()
        api = stack.enter_context(server.where.client())
        learn_the_kind(api)
        api.post("/api/v1/namespaces", json={"metadata": {"name": "test"}}).raise_for_status()
        fleet = Fleet(api, "test")
        proxy = stack.enter_context(new_proxy(server.where).running())
        stage = Stage(api, "test", proxy, tmp_path)
        failures = request.session.testsfailed
        yield World(server, fleet, stage.start())
        stage.end(failed=request.session.testsfailed > failures)
        # A server that has just started forbids for a moment what is granted.
        granted = set().union(*(row.rights for row in documented()))
        assert forbidden(server.where.audit) - granted == set()


def learn_the_kind(api: httpx.Client) -> None:
    """The API server knows MedhaReplica."""
    (path,) = (HOUSE / "crds").glob("*.yaml")
    made = api.post(
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", content=path.read_bytes(),
        headers={"Content-Type": "application/yaml"},
    )  # fmt: skip
    assert made.status_code == 201, made.text
    kind = "/apis/medha.dev/v1alpha1/namespaces/default/medhareplicas"
    until(lambda: api.get(kind).status_code == 200)


def scale(world: World, ended: threading.Event) -> None:
    """Somebody scales the busy ones up and down all the time; what fails is not tried again."""
    with world.server.where.client() as api:
        for name, replicas in itertools.cycle(itertools.product(BUSY, (2, 1, 3))):
            if ended.wait(0.1):
                return
            with contextlib.suppress(httpx.HTTPError):
                api.patch(
                    world.fleet.path(name), json={"spec": {"replicas": replicas}}, timeout=5.0,
                    headers={"Content-Type": "application/merge-patch+json"},
                )  # fmt: skip


def test_an_api_server_that_dies_under_load_costs_no_change_and_doubles_no_pod(
    world: World,
) -> None:
    fleet = world.fleet
    for name in ("calm", *BUSY):
        fleet.create(name, replicas=1)
    fleet.played(lambda: all(fleet.is_ready(name) for name in ("calm", *BUSY)))
    calm = world.pods("calm")
    ended = threading.Event()
    client = threading.Thread(target=scale, args=(world, ended))
    with world.probed():
        client.start()
        try:
            for _ in range(3):
                end = time.monotonic() + 3.0
                while time.monotonic() < end:
                    fleet.play()
                world.server.kill()
                world.server.start()
        finally:
            ended.set()
            client.join(60)
        for name in BUSY:
            fleet.change(name, {"replicas": 2})
        fleet.played(lambda: all(fleet.is_ready(name) for name in ("calm", *BUSY)))
        fleet.played(lambda: all(len(world.pods(name)) == 4 for name in BUSY))
    assert world.pods("calm") == calm
    assert world.dead == []
    for name in BUSY:
        labels = [
            tuple(each["metadata"]["labels"][f"medha.dev/{part}"]
                  for part in ("ordinal", "kvp-group", "spp-stage"))
            for each in fleet.list("pods")
            if each["metadata"]["labels"]["medha.dev/replica"] == name
        ]  # fmt: skip
        assert len(set(labels)) == len(labels) == 4


def test_a_minute_without_an_api_server_touches_nothing_and_is_made_good_afterwards(
    world: World,
) -> None:
    fleet, operator = world.fleet, world.operator
    fleet.create("calm", replicas=2)
    fleet.create("grows", replicas=1)
    fleet.played(lambda: fleet.is_ready("calm") and fleet.is_ready("grows"))
    before = {name: world.pods(name) for name in ("calm", "grows")}
    fleet.change("grows", {"replicas": 2})  # nobody may have acted on it yet
    with world.probed():
        world.server.kill()
        time.sleep(AWAY_S)  # its length is what is tested
        assert operator.process.poll() is None
        world.server.start()
        fleet.create("late")
        fleet.played(lambda: all(fleet.is_ready(name) for name in ("calm", "grows", "late")))
        until(operator.leads)
    assert world.dead == []
    assert world.pods("calm") == before["calm"]
    grown = world.pods("grows")
    assert len(grown) == 4 and before["grows"].items() <= grown.items()
