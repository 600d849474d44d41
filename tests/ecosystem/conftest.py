"""A real cluster with other people's controllers: `make test-ecosystem`.

The API server, the scheduler and the controllers are real, and so are the programs of `addons.py`.
KWOK plays the kubelets of the nodes that Karpenter makes, and `Leaders` the controllers in the
pods, at the loopback addresses that KWOK gives them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from demos.testbed import NoCluster, Testbed, from_tool
from tests.api.fleet import Fleet, Operator
from tests.api.stage import new_namespace
from tests.api.stand_ins import Leaders, Router
from tests.conftest import cluster_tool
from tests.ecosystem.addons import Addon, built

HOUSE = Path(__file__).resolve().parents[2]


def pytest_configure() -> None:
    """Clean up on SIGTERM as on Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def bed() -> Iterator[Testbed]:
    """A cluster with one real node, which has no GPU, and Medha's kind."""
    tool = cluster_tool()
    if tool is None:
        pytest.skip("no cluster tool is here: set MEDHA_CLUSTER_TOOL")
    if os.geteuid() != 0:
        pytest.skip(f"{tool} needs root")
    with contextlib.ExitStack() as stack:
        try:
            bed = stack.enter_context(from_tool("ecosystem", nodes=1))
        except NoCluster as lacking:
            pytest.skip(str(lacking))
        bed.kubectl("apply", "--server-side", "-f", str(HOUSE / "crds"))
        crds = ("-f", str(HOUSE / "crds"))
        bed.kubectl("wait", "--for=condition=Established", "--timeout=60s", *crds)
        yield bed


@pytest.fixture(scope="session")
def api(bed: Testbed) -> Iterator[httpx.Client]:
    """The API as administrator."""
    with (
        bed.proxied() as url,
        httpx.Client(base_url=url, timeout=30, trust_env=False) as client,
    ):
        yield client


@pytest.fixture(scope="session")
def outside(bed: Testbed) -> str:
    """Address at which the cluster reaches programs that run outside it."""
    config = bed.kubectl(
        "config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}"
    )
    server = urlsplit(config)
    assert server.hostname and server.port
    with socket.create_connection((server.hostname, server.port), 10) as connection:
        return str(connection.getsockname()[0])


class Played(Fleet):
    """A fleet on nodes that Karpenter makes. `play` starts the controllers of new leader pods."""

    def __init__(self, api: httpx.Client, namespace: str, leaders: Leaders) -> None:
        super().__init__(api, namespace, nodes=0)
        self.scheduled = True
        self.leaders = leaders
        self._uids: dict[str, str] = {}
        self.gone: list[tuple[str, bool]] = []
        """Leader pods that were deleted, and whether they were idle and draining by then."""

    def play(self) -> None:
        pods = {name: pod for name, pod in self.pods().items() if name.endswith("-g0-s0")}
        for name, uid in list(self._uids.items()):
            if name not in pods or pods[name]["metadata"]["uid"] != uid:
                idle = name in self.leaders.draining and not self.leaders.load.get(name)
                self.gone.append((name, idle))
                self.leaders.draining.discard(name)
                del self._uids[name]
        for name, pod in pods.items():
            address = pod["status"].get("podIP")
            if address and name not in self._uids:
                self._uids[name] = pod["metadata"]["uid"]
                self.leaders.listen(name, address)

    def made(self) -> dict[str, dict[str, str]]:
        """The labels of this fleet's nodes."""
        labels = f"test={self.namespace}"
        nodes = self.api.get("/api/v1/nodes", params={"labelSelector": labels}).json()["items"]
        return {node["metadata"]["name"]: node["metadata"]["labels"] for node in nodes}

    def bound(self) -> dict[str, str]:
        """The node of each bound pod."""
        return {
            name: pod["spec"]["nodeName"]
            for name, pod in sorted(self.pods().items())
            if "nodeName" in pod["spec"]
        }


@pytest.fixture
def fleet(api: httpx.Client) -> Iterator[Played]:
    with contextlib.closing(Leaders()) as leaders:
        yield Played(api, new_namespace(api), leaders)


@pytest.fixture
def start_operator(
    bed: Testbed, fleet: Played, tmp_path: Path
) -> Iterator[Callable[..., Operator]]:
    """Start an operator in the test's namespace."""
    kubeconfig = Path(bed.environ["KUBECONFIG"])
    with contextlib.ExitStack() as stack:

        def start(**settings: str) -> Operator:
            log = tmp_path / "operator.log"
            operator = Operator(kubeconfig, fleet.namespace, log, "one", None, 1.0, **settings)
            stack.callback(lambda: sys.stdout.write(log.read_text()[-8000:]))
            stack.callback(operator.kill)
            return operator

        yield start


@pytest.fixture
def router() -> Iterator[Router]:
    with contextlib.closing(Router()) as router:
        yield router


@pytest.fixture(scope="session")
def kwok(bed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addon]:
    """KWOK, for the kubelets of nodes with its annotation."""
    command = [str(built("kwok")), f"--kubeconfig={bed.environ['KUBECONFIG']}"]
    command += ["--manage-all-nodes=false", "--cidr=127.220.0.1/16"]
    command += ["--node-lease-duration-seconds=10"]  # renewed often: this machine may be busy
    command += ["--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake"]
    log = tmp_path_factory.mktemp("kwok") / "log"
    with contextlib.closing(Addon(bed, log, command)) as addon:
        yield addon
