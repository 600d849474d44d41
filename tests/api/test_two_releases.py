"""Two releases of the operator that serve one namespace: the older one works, the other reports.

Each release has a namespace of its own with its Lease; the second one has the rights of the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tests.api.fleet import Fleet, Operator, until
from tests.api.operator_forks import ForkServer
from tests.api.proxy import Done, Proxy
from tests.api.rights import ROOT
from tests.api.stage import Stage, new_namespace

Start = Callable[..., Operator]
Proxies = Callable[[], Proxy]

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def start_second(
    api: httpx.Client,
    fleet: Fleet,
    proxies: Proxies,
    start_operator: Start,
    tmp_path: Path,
    fork_server: ForkServer,
) -> Iterator[Callable[..., tuple[Operator, Proxy]]]:
    """Start a release in another namespace that serves the fleet's."""
    proxy, home = proxies(), new_namespace(api)
    stage = Stage(api, home, proxy, tmp_path, fork_server)
    group = "rbac.authorization.k8s.io"
    binding = {
        "metadata": {"name": home},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": f"operator-of-{fleet.namespace}"},
        "subjects": [{"apiGroup": group, "kind": "User", "name": f"operator-of-{home}"}],
    }
    place = f"{ROOT}/namespaces/{fleet.namespace}/rolebindings"
    api.post(place, json=binding).raise_for_status()
    headers = {"Impersonate-User": f"operator-of-{home}"}
    until(lambda: api.get(fleet.path(), headers=headers).is_success)
    yield lambda: (stage.start("second", MEDHA_NAMESPACES=fleet.namespace), proxy)
    stage.end(failed=True)


def writes(proxy: Proxy, fleet: Fleet) -> list[Done]:
    """The writes of a release to the namespace that both serve, without those to a Lease."""
    place = f"/namespaces/{fleet.namespace}/"
    return [reply for reply in proxy.done if reply.call.own and place in reply.call.path]


def test_the_second_release_reports_the_first_does_nothing_and_follows_it(
    fleet: Fleet,
    proxy: Proxy,
    start_operator: Start,
    start_second: Callable[..., tuple[Operator, Proxy]],
) -> None:
    first = start_operator()
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"))
    time.sleep(1.1)  # Leases are as old as whole seconds
    second, theirs = start_second()
    until(lambda: second.port)
    until(lambda: f"in namespace {fleet.namespace}, serves" in second.log.read_text())
    fleet.change("llama", {"replicas": 2})
    fleet.played(lambda: fleet.is_ready("llama"))
    pods = fleet.pods()
    time.sleep(5.0)
    assert writes(theirs, fleet) == [] and not second.ready()
    until(second.alive)
    assert first.ready()

    first.end()
    fleet.change("llama", {"replicas": 3})
    fleet.played(lambda: fleet.is_ready("llama"))
    until(second.ready)
    kept = {name: pod["metadata"]["uid"] for name, pod in pods.items()}
    assert kept.items() <= {n: p["metadata"]["uid"] for n, p in fleet.pods().items()}.items()

    began_s = time.monotonic()
    start_operator("again")
    fleet.change("llama", {"replicas": 1})
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == 2)
    fleet.change("llama", {"replicas": 2})
    until(lambda: not second.ready())
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == 4)
    ours_s = [reply.at_s for reply in writes(proxy, fleet) if reply.at_s > began_s]
    assert max(reply.at_s for reply in writes(theirs, fleet)) < min(ours_s)
    until(second.alive)
