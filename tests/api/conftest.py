"""A real API server with its etcd and nothing else: without kubelets, pods stay as the API has
them.

Started once per worker of the test run, on loopback, with credentials of its own; skipped if the
programs are missing (see tests/conftest.py).
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
from tests.api.operator_forks import ForkServer
from tests.api.proxy import Proxy
from tests.api.rights import missing_rights
from tests.api.server import ApiServer, running_server
from tests.api.stage import Scene, Stage, new_namespace, new_proxy, scene
from tests.api.stand_ins import Leaders, Router
from tests.conftest import programs

HOUSE = Path(__file__).resolve().parents[2]
KEDA = Path(__file__).with_name("keda.sh_scaledobjects.yaml")
CAMPAIGNS = ("test_crash_points", "test_fault_walks", "test_edit_fuzz", "test_long_outages")


def pytest_sessionstart() -> None:
    """Unpack the programs before the workers start, which would all unpack them."""
    programs()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the campaigns, which take longest, before all others."""
    items.sort(key=lambda item: item.path.stem not in CAMPAIGNS)


@pytest.fixture(scope="session")
def api_server(
    server_programs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiServer]:
    with running_server(tmp_path_factory.mktemp("api-server"), server_programs) as server:
        yield server.where
        assert missing_rights(server.where.audit) == set(), "an operator exceeded its rights"


@pytest.fixture(scope="session")
def api(api_server: ApiServer) -> Iterator[httpx.Client]:
    """The API as administrator."""
    with api_server.client() as client:
        yield client


Kubectl = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def run_kubectl(api_server: ApiServer, kubectl: Path, tmp_path_factory: Any) -> Kubectl:
    """Run `kubectl` as administrator with these arguments and this standard input."""
    cache = tmp_path_factory.mktemp("kubectl")

    def run(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        line = [str(kubectl), f"--kubeconfig={api_server.kubeconfig}", f"--cache-dir={cache}"]
        return subprocess.run(
            [*line, *words], input=text, capture_output=True, text=True, timeout=100
        )

    return run


@pytest.fixture(scope="session")
def crd(run_kubectl: Kubectl) -> None:
    """Install the CRD."""
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
    fleet = Fleet(api, namespace)
    yield fleet
    fleet.close()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Process that starts operators."""
    with contextlib.closing(ForkServer()) as fork_server:
        yield fork_server


@pytest.fixture
def start_operator(
    api: httpx.Client,
    crd: None,
    namespace: str,
    tmp_path: Path,
    proxy: Proxy,
    fork_server: ForkServer,
    request: pytest.FixtureRequest,
) -> Iterator[Callable[..., Operator]]:
    """Start operators in the test's namespace; all use the proxy, which checks the rules."""
    stage = Stage(api, namespace, proxy, tmp_path, fork_server)
    failures = request.session.testsfailed
    yield stage.start
    stage.end(failed=request.session.testsfailed > failures)


@pytest.fixture
def scenes(
    api_server: ApiServer, crd: None, tmp_path: Path, fork_server: ForkServer
) -> Callable[..., contextlib.AbstractContextManager[Scene]]:
    """Make stages for whole lives, as many as threads want one."""
    return functools.partial(scene, api_server, tmp_path, fork_server)


@pytest.fixture
def proxies(api_server: ApiServer) -> Iterator[Callable[[], Proxy]]:
    """Make more proxies, to distinguish operators. Request it before start_operator."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(new_proxy(api_server).running())


@pytest.fixture
def proxy(api_server: ApiServer) -> Iterator[Proxy]:
    """The proxy that operators use by default."""
    with new_proxy(api_server).running() as proxy:
        yield proxy


@pytest.fixture
def router() -> Iterator[Router]:
    with contextlib.closing(Router()) as router:
        yield router


@pytest.fixture
def served(fleet: Fleet) -> Iterator[Fleet]:
    """A fleet whose controllers answer."""
    with contextlib.closing(Leaders()) as leaders:
        fleet.address = leaders.address
        yield fleet


@pytest.fixture
def keda(api: httpx.Client, run_kubectl: Kubectl) -> Iterator[str]:
    """Install KEDA's own CRD of ScaledObject."""
    applied = run_kubectl("apply", "--server-side", "-f", str(KEDA))
    assert applied.returncode == 0, applied.stderr
    run_kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(KEDA))
    path = "/apis/keda.sh/v1alpha1"
    until(lambda: api.get(f"{path}/scaledobjects").is_success, "it is served")  # a moment later
    yield path
    run_kubectl("delete", "--wait", "--timeout=60s", "-f", str(KEDA))
