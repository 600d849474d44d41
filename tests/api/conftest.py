"""A real API server with its etcd and nothing else: no kubelet, so pods stay what the API makes.

Started once per worker of the test run, on loopback, with credentials of its own. Found as
tests/conftest.py says, skipped where it is not.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.fleet import Fleet, Operator, until
from tests.api.played import Leaders, Router
from tests.api.proxy import Proxy
from tests.api.rights import forbidden
from tests.api.server import ApiServer, Server
from tests.api.stage import Scene, Stage, new_namespace, new_proxy, scene

HOUSE = Path(__file__).resolve().parents[2]
KEDA = Path(__file__).with_name("keda.sh_scaledobjects.yaml")


@pytest.fixture(scope="session")
def api_server(
    server_programs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiServer]:
    server = Server(tmp_path_factory.mktemp("api-server"), server_programs)
    try:
        server.start()
        yield server.where
        assert forbidden(server.where.audit) == set(), "an operator asked for more than its rights"
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


@pytest.fixture
def namespace(api: httpx.Client) -> str:
    """A namespace of the test's own."""
    return new_namespace(api)


@pytest.fixture
def fleet(api: httpx.Client, namespace: str, crd: None) -> Iterator[Fleet]:
    """A namespace with two nodes, whose kubelets the test plays."""
    made = Fleet(api, namespace)
    yield made
    made.close()


@pytest.fixture
def start_operator(
    api: httpx.Client, crd: None, namespace: str, tmp_path: Path, proxy: Proxy,
    request: pytest.FixtureRequest,
) -> Iterator[Callable[..., Operator]]:  # fmt: skip
    """Starts operators that serve the test's namespace, and ends those that still run. They all
    talk through the proxy, which knows what they may not say."""
    stage = Stage(api, namespace, proxy, tmp_path)
    failures = request.session.testsfailed
    yield stage.start
    stage.end(failed=request.session.testsfailed > failures)


@pytest.fixture
def scenes(
    api_server: ApiServer, crd: None, tmp_path: Path
) -> Callable[..., contextlib.AbstractContextManager[Scene]]:
    """Makes stages for whole lives, as many as there are threads that want one."""
    return functools.partial(scene, api_server, tmp_path)


@pytest.fixture
def proxies(api_server: ApiServer) -> Iterator[Callable[[], Proxy]]:
    """More of them, where it matters which operator says what. Ask for it before start_operator."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(new_proxy(api_server).running())


@pytest.fixture
def proxy(api_server: ApiServer) -> Iterator[Proxy]:
    """What an operator is put behind."""
    with new_proxy(api_server).running() as made:
        yield made


@pytest.fixture
def router() -> Iterator[Router]:
    with contextlib.closing(Router()) as made:
        yield made


@pytest.fixture
def served(fleet: Fleet) -> Iterator[Fleet]:
    """A fleet whose leaders answer."""
    with contextlib.closing(Leaders()) as leaders:
        fleet.address = leaders.address
        yield fleet


@pytest.fixture
def keda(api: httpx.Client, run_kubectl: Kubectl) -> Iterator[str]:
    """The API server knows KEDA's own definition of a ScaledObject."""
    applied = run_kubectl("apply", "--server-side", "-f", str(KEDA))
    assert applied.returncode == 0, applied.stderr
    run_kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(KEDA))
    path = "/apis/keda.sh/v1alpha1"
    until(lambda: api.get(f"{path}/scaledobjects").is_success, "it is served")  # a moment later
    yield path
    run_kubectl("delete", "--wait", "--timeout=60s", "-f", str(KEDA))
