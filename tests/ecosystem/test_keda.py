"""The operator with KEDA: KEDA's HPA follows the number that the operator exports."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from demos.testbed import Testbed
from tests.api.fleet import Operator, until
from tests.api.stand_ins import Router
from tests.api.test_autoscaling import SOON, replicas, under_load
from tests.ecosystem.addons import BUILD_S, Addon, built, install_crds
from tests.ecosystem.conftest import Played
from tests.scraped.watcher import Prometheus, Target

from medha.cli.local_fleet.preflight import free_ports

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(BUILD_S)

METRICS, SERVICE = "v1beta1.external.metrics.k8s.io", "keda-metrics-apiserver"
NAMES = ("keda-operator.keda.svc", f"{SERVICE}.keda.svc", "localhost")
FOLLOWS_S = 150.0
"""KEDA and its HPA poll every 15 s each."""


def certificates(folder: Path) -> bytes:
    """Make the certificate that KEDA's programs share; returns it."""
    names = ",".join(f"DNS:{name}" for name in NAMES)
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    files = ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    subject = ["-subj", "/CN=keda", "-addext", f"subjectAltName={names}"]
    subprocess.run([*words.split(), *files, *subject], check=True, capture_output=True)
    certificate = (folder / "tls.crt").read_bytes()
    (folder / "ca.crt").write_bytes(certificate)
    return certificate


def registration(address: str, port: int, authority: bytes) -> list[dict[str, Any]]:
    """The objects by which the API server reaches KEDA's metrics outside the cluster."""
    ports = [{"name": "https", "port": 443, "targetPort": port, "protocol": "TCP"}]
    place = {"name": SERVICE, "namespace": "keda"}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": place, "spec": {"ports": ports}},
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**place, "labels": {"kubernetes.io/service-name": SERVICE}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
            "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": METRICS},
            "spec": {
                "service": place,
                "group": "external.metrics.k8s.io",
                "version": "v1beta1",
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "caBundle": base64.b64encode(authority).decode(),
            },
        },
    ]


@pytest.fixture(scope="module")
def keda(
    bed: Testbed, outside: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Addon, Addon]]:
    """KEDA's operator and its server of external metrics."""
    programs = {name: str(built(f"keda-{name}")) for name in ("operator", "adapter")}
    install_crds(bed, "keda-operator")
    bed.kubectl("create", "namespace", "keda")
    folder = tmp_path_factory.mktemp("keda")
    authority = certificates(folder)
    grpc, metrics, probe, secure, more = free_ports("0.0.0.0", 5)
    environ = {"KEDA_CLUSTER_OBJECT_NAMESPACE": "keda", "WATCH_NAMESPACE": ""}
    operator = [programs["operator"], f"--cert-dir={folder}"]
    operator += [f"--metrics-service-bind-address=:{grpc}", f"--metrics-bind-address=:{metrics}"]
    operator += [f"--health-probe-bind-address=:{probe}"]
    config = bed.environ["KUBECONFIG"]
    adapter = [programs["adapter"], f"--secure-port={secure}", f"--port={more}"]
    adapter += [f"--{kind}-kubeconfig={config}" for kind in ("authentication", "authorization")]
    adapter += [f"--lister-kubeconfig={config}", f"--metrics-service-address=localhost:{grpc}"]
    adapter += [f"--tls-cert-file={folder}/tls.crt", f"--tls-private-key-file={folder}/tls.key"]
    adapter += [f"--client-ca-file={folder}/ca.crt", f"--cert-dir={folder}"]
    with (
        contextlib.closing(Addon(bed, folder / "operator.log", operator, **environ)) as first,
        contextlib.closing(Addon(bed, folder / "adapter.log", adapter, **environ)) as second,
    ):
        for manifest in registration(outside, secure, authority):
            bed.kubectl("apply", "-f", "-", text=json.dumps(manifest))
        try:
            bed.kubectl("wait", "--for=condition=Available", "--timeout=90s", "apiservice", METRICS)
            yield first, second
        finally:
            bed.kubectl("delete", "apiservice", METRICS)  # else no namespace can be deleted


@pytest.fixture
def node(fleet: Played, kwok: Addon) -> Iterator[str]:
    """A node with eight devices, whose kubelet KWOK plays."""
    name, size = f"{fleet.namespace}-node", {"cpu": "64", "memory": "64Gi", "pods": "110"}
    size |= {"nvidia.com/gpu": "8"}
    annotations = {"kwok.x-k8s.io/node": "fake"}
    metadata = {"name": name, "labels": fleet.selector, "annotations": annotations}
    amounts = {"allocatable": size, "capacity": size}
    body = {"metadata": metadata, "status": amounts}
    fleet.api.post("/api/v1/nodes", json=body).raise_for_status()
    yield name
    fleet.api.delete(f"/api/v1/nodes/{name}")


Watched = Callable[[Mapping[str, Any]], Operator]


@pytest.fixture
def watched(
    fleet: Played,
    node: str,
    keda: tuple[Addon, Addon],
    start_operator: Start,
    router: Router,
    prometheus: Path,
    tmp_path: Path,
) -> Iterator[Watched]:
    """Start an operator and a Prometheus that scrapes it, and create a MedhaReplica that KEDA
    scales."""
    with contextlib.ExitStack() as stack:

        def start(autoscaling: Mapping[str, Any]) -> Operator:
            for addon in keda:
                addon.check()
            (port,) = free_ports("127.0.0.1", 1)
            target = Target("operator", f"127.0.0.1:{port}", fleet.namespace, honours=True)
            scraper = stack.enter_context(
                contextlib.closing(Prometheus(prometheus, tmp_path, [target]))
            )
            settings = {"MEDHA_OPS_PORT": str(port), "MEDHA_PROMETHEUS": scraper.url}
            operator = start_operator(**router.settings, **settings)
            fleet.create("llama", autoscaling={**autoscaling, "mode": "External"})
            fleet.played(lambda: fleet.is_ready("llama"), "Ready on KWOK's node")
            return operator

        yield start
        fleet.api.delete(fleet.path("llama"))


def test_keda_adds_a_replica_for_slack_below_its_target_and_removes_it_when_idle(
    watched: Watched, fleet: Played, router: Router, api: httpx.Client
) -> None:
    operator = watched(SOON)
    with under_load(lambda: router.offer("llama", -1.0, 0.9)):
        fleet.played(lambda: replicas(fleet) == 2, "KEDA's HPA adds one", FOLLOWS_S)
        fleet.played(lambda: fleet.is_ready("llama"))
    router.calm()
    fleet.played(lambda: operator.metric("medha_desired_replicas") == 1.0)
    fleet.played(lambda: replicas(fleet) == 1, "KEDA's HPA removes one", FOLLOWS_S)
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == 2)
    (scaler,) = fleet.list("horizontalpodautoscalers", "apis/autoscaling/v2")
    assert scaler["spec"]["scaleTargetRef"]["kind"] == "MedhaReplica"
    assert fleet.condition("llama", "ScalingActive")["reason"] == "Exported"


def test_keda_releases_the_devices_of_an_idle_model_and_a_request_brings_it_back(
    watched: Watched, fleet: Played, router: Router
) -> None:
    watched({**SOON, "minReplicas": 0})
    fleet.played(lambda: replicas(fleet) == 0 and not fleet.pods(), "no replica", FOLLOWS_S)
    with router.held("llama"):
        fleet.played(lambda: replicas(fleet) == 1, "KEDA adds one", FOLLOWS_S)
        fleet.played(lambda: fleet.is_ready("llama"))
    until(lambda: fleet.condition("llama", "ScalingActive")["reason"] == "Exported")
