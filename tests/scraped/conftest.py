"""A fleet under load, scraped by a Prometheus, for all tests of this folder.

If the programs of a Kubernetes API server are installed, a real operator runs and is scraped too;
otherwise only its tests are skipped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.api.fleet import Fleet, Operator, until
from tests.api.rights import missing_rights
from tests.api.server import ApiServer, running_server
from tests.api.stage import Stage, new_proxy
from tests.conftest import program
from tests.scraped.gpus import Exporter
from tests.scraped.local_fleet import LocalFleet
from tests.scraped.watcher import Prometheus, Target, wait_for

HOUSE = Path(__file__).resolve().parents[2]
FIRST_S, SECOND_S = 40.0, 15.0


class Scraped(msgspec.Struct, frozen=True):
    """Scraped data from `start` to `end`; `missing`: reason without an operator."""

    prometheus: Prometheus
    start: float
    end: float
    missing: str


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer | str]:
    """A real API server with the CRD, or the reason why there is none."""
    try:
        programs = program("etcd"), program("kube-apiserver")
    except pytest.skip.Exception as skipped:
        yield str(skipped)
        return
    with running_server(tmp_path_factory.mktemp("api-server"), programs) as server:
        yield server.where
        assert missing_rights(server.where.audit) == set(), "the operator exceeded its rights"


@pytest.fixture(scope="session")
def operator(
    api_server: ApiServer | str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operator | str]:
    """An operator with one Ready replica and one without a node, or the reason why not."""
    if isinstance(api_server, str):
        yield api_server
        return
    with api_server.client() as api, contextlib.ExitStack() as stack:
        for path in (HOUSE / "crds").iterdir():
            created = api.post(
                "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
                content=path.read_bytes(),
                headers={"Content-Type": "application/yaml"},
            )
            assert created.status_code == 201, created.text
        api.post("/api/v1/namespaces", json={"metadata": {"name": "team"}}).raise_for_status()
        fleet = Fleet(api, "team")
        stack.callback(fleet.close)
        until(lambda: api.get(fleet.path()).status_code == 200)
        proxy = stack.enter_context(new_proxy(api_server).running())
        stage = Stage(api, "team", proxy, tmp_path_factory.mktemp("operator"))
        started = stage.start()
        stack.callback(stage.end, failed=True)  # it need not be at rest
        until(started.leads)
        scaled = {"mode": "External", "minReplicas": 1, "maxReplicas": 2}
        fleet.create("llama", autoscaling=scaled)
        fleet.create("homeless", placement={"nodeSelector": {"no": "such-node"}})
        fleet.played(lambda: fleet.is_ready("llama"))
        until(lambda: fleet.condition("homeless").get("status") == "False")
        until(lambda: started.shown("medha_desired_replicas"))
        yield started


@pytest.fixture(scope="session")
def scraped(
    prometheus: Path, operator: Operator | str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scraped]:
    with contextlib.ExitStack() as stack:
        fleet = LocalFleet(tmp_path_factory.mktemp("fleet"))
        stack.callback(fleet.close)
        fleet.start()
        targets = [
            Target("router", fleet.router, "medha-system"),
            *(Target("controller", controller, "team") for controller in fleet.controllers),
            Target("pod", fleet.pod, "team"),
        ]
        # The exporter's own labels stand in one monitor, and not in the other, as people have it.
        for node, honours in (("node-a", True), ("node-b", False)):
            exporter = stack.enter_context(contextlib.closing(Exporter(node)))
            targets.append(Target("gpu", exporter.address, "gpus", honours))
        missing = operator if isinstance(operator, str) else ""
        if isinstance(operator, Operator):
            targets.append(Target("operator", f"127.0.0.1:{operator.port}", "medha-system", True))
        watcher = Prometheus(prometheus, tmp_path_factory.mktemp("prometheus"), targets)
        stack.callback(watcher.close)
        wait_for(watcher, [target.address for target in targets])
        start = time.time()
        records = fleet.play(FIRST_S, 1)
        fleet.leave()
        fleet.lose_a_rank()
        records += fleet.play(SECOND_S, 2)
        until(fleet.whole)
        wait_for(watcher, [target.address for target in targets])
        time.sleep(3.0)  # three scrapes of how it ended
        served = [record for record in records if record.finished_s is not None]
        assert len(served) > len(records) // 2, [record.refused for record in records]
        yield Scraped(watcher, start, time.time(), missing)
