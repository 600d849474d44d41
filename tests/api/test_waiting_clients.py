"""Clients that wait for a MedhaReplica, by kstatus's rules and Argo CD's, on a real API server."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from tests.api.fleet import Fleet, Operator, until
from tests.support.resource_health import argo_health, kstatus

Start = Callable[..., Operator]
Kubectl = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.timeout(1800)


def verdict(fleet: Fleet) -> tuple[str, str]:
    """The conclusions of kstatus and of Argo CD."""
    body = fleet.api.get(fleet.path("llama")).json()
    return kstatus(body)[0], argo_health(body)[0]


def becomes(fleet: Fleet, *wanted: str) -> bool:
    """Play the kubelets until the conclusion is the wanted one."""
    fleet.played(lambda: verdict(fleet) == wanted, f"{wanted}")
    return True


def test_a_client_waits_until_the_spec_is_reached_and_is_told_when_it_cannot_be(
    fleet: Fleet, start_operator: Start
) -> None:
    fleet.create("llama")
    assert verdict(fleet) == ("InProgress", "Progressing")  # no operator runs
    assert fleet.status("llama") == {"observedGeneration": -1}
    start_operator()
    assert becomes(fleet, "Current", "Healthy")
    assert fleet.condition("llama")["status"] == "True"

    # A change: in progress from the very write on, current once all replicas have it.
    fleet.change("llama", {"template": {"image": "localhost/other:1"}})
    assert verdict(fleet) == ("InProgress", "Progressing")
    assert becomes(fleet, "Current", "Healthy")
    images = {pod["spec"]["containers"][0]["image"] for pod in fleet.pods().values()}
    assert images == {"localhost/other:1"}

    # A spec that only the operator can refuse.
    fleet.change("llama", {"template": {"resources": {"requests": {"cpu": "plenty"}}}})
    until(lambda: verdict(fleet) == ("Failed", "Degraded"))
    body = fleet.api.get(fleet.path("llama")).json()
    assert "plenty" in kstatus(body)[1]
    fleet.change("llama", {"template": {"resources": {"requests": None}}})
    assert becomes(fleet, "Current", "Healthy")

    # No node matches: an autoscaler may still add one.
    fleet.change("llama", {"replicas": 2, "parallelism": {"tp": 64}})
    placed = "PlacementUnsatisfiable"
    fleet.played(lambda: fleet.condition("llama", placed).get("status") == "True")
    assert verdict(fleet) == ("InProgress", "Progressing")


def test_kubectl_waits_for_the_end_of_reconciling(
    fleet: Fleet, start_operator: Start, run_kubectl: Kubectl
) -> None:
    start_operator()
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"))
    waited = run_kubectl(
        "wait",
        f"--namespace={fleet.namespace}",
        "mr/llama",
        "--for=condition=Reconciling=False",
        "--timeout=60s",
    )
    assert waited.returncode == 0, waited.stderr
