"""The charts on a real API server: accepted, admitted as restricted, upgraded and uninstalled."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.api.fleet import NOW, Fleet, Operator, until
from tests.api.server import ApiServer
from tests.api.stage import kubeconfig_of, new_proxy
from tests.charts.changed_values import CHANGED, FIRST
from tests.charts.test_chart_values import DESCRIBED, RIGHT

from medha.spec import parse
from medha.topology import Coordinate
from medha_operator.kube.client import KINDS
from medha_operator.resources.manifests import PodAssignment, objects, pod_manifest
from medha_operator.settings import Settings, from_environment

HOUSE = Path(__file__).resolve().parents[2]
Objects = list[dict[str, Any]]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

# Kinds of other projects that the chart may render: those whose CRDs are in this folder, and, by
# group and plural name, those known by name only.
DEFINED = tuple(sorted(Path(__file__).parent.glob("monitoring.coreos.com_*.yaml")))
MONITORS = {"PodMonitor", "ServiceMonitor", "PrometheusRule"}
OTHERS = {("gateway.networking.k8s.io", "httproutes"): "HTTPRoute"}
APIS = ("monitoring.coreos.com/v1", "gateway.networking.k8s.io/v1")
EVERYTHING = {
    "router.ingress": {"enabled": True, "host": "llm.example.com", "tlsSecret": "cert"},
    "router.httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
    "operator.replicas": 2,
    "networkPolicy.clients": [{"namespaceSelector": {}}],
    "networkPolicy.modelEgress": [{"ports": [{"port": 443}]}],
    "monitoring.labels": {"release": "prometheus"},
}


def settings(values: dict[str, Any]) -> list[str]:
    return [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]


@pytest.fixture(scope="session")
def run_helm(helm: Path, api_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run `helm` as administrator of the API server, in the charts' folder."""
    home = tmp_path_factory.mktemp("helm")
    places = {f"HELM_{part}_HOME": str(home / part) for part in ("CACHE", "CONFIG", "DATA")}
    places["HOME"] = str(home)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(helm), f"--kubeconfig={api_server.kubeconfig}", *words],
            cwd=HOUSE / "charts",
            env=places,
            capture_output=True,
            text=True,
            timeout=100,
        )

    return run


@pytest.fixture(scope="session")
def rendered(run_helm: Run) -> Callable[..., str]:
    def render(
        namespace: str, values: dict[str, Any] | None = None, *, apis: Sequence[str] = ()
    ) -> str:
        done = run_helm(
            "template",
            "medha",
            "medha",
            f"--namespace={namespace}",
            "--kube-version=1.36.0",
            *(f"--api-versions={api}" for api in apis),
            *settings(values or {}),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return render


@pytest.fixture(scope="session")
def other_kinds(run_kubectl: Run) -> None:
    """Install the CRDs of other projects' kinds, most with their fields."""
    loose = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    documents = [
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {
                "name": f"{plural}.{group}",
                "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
            },
            "spec": {
                "group": group,
                "scope": "Namespaced",
                "names": {"kind": kind, "plural": plural},
                "versions": [
                    {
                        "name": "v1",
                        "served": True,
                        "storage": True,
                        "schema": {"openAPIV3Schema": loose},
                    }
                ],
            },
        }
        for (group, plural), kind in OTHERS.items()
    ]
    text = yaml.safe_dump_all([*documents, *(yaml.safe_load(d.read_text()) for d in DEFINED)])
    applied = run_kubectl("apply", "-f", "-", text=text)
    assert applied.returncode == 0, applied.stderr
    run_kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", "-", text=text)


def apply_dry(run_kubectl: Run, namespace: str, text: str) -> None:
    """Check with a dry run that the API server accepts all of it."""
    done = run_kubectl(
        "apply",
        "--dry-run=server",
        "--validate=strict",
        f"--namespace={namespace}",
        "-f",
        "-",
        text=text,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert done.stdout.count("(server dry run)") == len([*yaml.safe_load_all(text)])


def test_the_api_server_accepts_the_chart_without_other_apis(
    rendered: Callable[..., str], run_kubectl: Run, namespace: str
) -> None:
    apply_dry(run_kubectl, namespace, rendered(namespace))


@pytest.mark.usefixtures("other_kinds")
def test_the_api_server_accepts_the_chart_with_every_option_and_other_apis(
    rendered: Callable[..., str], run_kubectl: Run, namespace: str
) -> None:
    text = rendered(namespace, EVERYTHING, apis=APIS)
    kinds = {document["kind"] for document in yaml.safe_load_all(text)}
    assert set(OTHERS.values()) | MONITORS | {"Ingress", "NetworkPolicy"} <= kinds
    apply_dry(run_kubectl, namespace, text)


@pytest.mark.parametrize("inner", [False, True], ids=["sections", "parts of them"])
def test_the_api_server_accepts_each_value_that_the_schema_accepts(
    rendered: Callable[..., str], run_kubectl: Run, namespace: str, inner: bool
) -> None:
    """Values that are a part of another one are set without that."""
    values = {
        path: value
        for path, value in RIGHT.items()
        if any(path.startswith(f"{other}.") for other in RIGHT) == inner
    }
    assert values
    apply_dry(run_kubectl, namespace, rendered(namespace, values))


@pytest.mark.usefixtures("other_kinds")
@pytest.mark.parametrize(
    "right, wrong",
    [
        ("podMetricsEndpoints:", "podMetricEndpoints:"),
        ("interval: 15s", "interval: 15 seconds"),
        ("podTargetLabels: [", "podTargetLabels: [[], "),
        ("endpoints:", "endPoints:"),
        ("expr:", "expression:"),
    ],
)
def test_a_monitor_or_a_rule_with_a_wrong_field_is_refused(
    rendered: Callable[..., str], run_kubectl: Run, namespace: str, right: str, wrong: str
) -> None:
    text = rendered(namespace, apis=APIS)
    assert right in text
    with pytest.raises(AssertionError, match=r"unknown field|Invalid value"):
        apply_dry(run_kubectl, namespace, text.replace(right, wrong))


def test_the_api_server_accepts_the_chart_of_the_crds(run_helm: Run, run_kubectl: Run) -> None:
    text = run_helm("template", "crds", "medha-crds", "--kube-version=1.36.0").stdout
    done = run_kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-", text=text
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["plain", "everything"])
def test_the_api_server_accepts_the_objects_that_the_charts_operator_makes(
    rendered: Callable[..., str], api: httpx.Client, namespace: str, values: dict[str, Any]
) -> None:
    (operator,) = [
        document
        for document in yaml.safe_load_all(rendered(namespace, values))
        if (document["kind"], document["metadata"]["name"]) == ("Deployment", "medha-operator")
    ]
    environment = {
        variable["name"]: str(variable.get("value", namespace))
        for variable in operator["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    tiny = yaml.safe_load((HOUSE / "examples/kubernetes/tiny.yaml").read_text())
    tiny["metadata"] |= {"namespace": namespace, "uid": "1"}
    manifests = objects(parse(tiny), [0, 1], from_environment(environment))
    assert [manifest["kind"] for manifest in manifests].count("NetworkPolicy") == 2
    for manifest in manifests:
        path = KINDS[manifest["kind"]].path(namespace)
        reply = api.post(f"{path}?dryRun=All&fieldValidation=Strict", json=manifest)
        assert reply.status_code == 201, reply.text
        assert "warning" not in reply.headers


# --- Pod Security "restricted" --------------------------------------------------------------------


@pytest.fixture
def restricted(api: httpx.Client, namespace: str) -> str:
    """A namespace that admits restricted pods only, and gives the reason if it refuses one."""
    labels = {
        "pod-security.kubernetes.io/enforce": "restricted",
        "pod-security.kubernetes.io/warn": "restricted",
    }
    done = api.patch(
        f"/api/v1/namespaces/{namespace}",
        json={"metadata": {"labels": labels}},
        headers={"Content-Type": "application/merge-patch+json"},
    )
    assert done.status_code == 200
    return namespace


def admit(api: httpx.Client, namespace: str, pod: dict[str, Any]) -> httpx.Response:
    pod["metadata"]["namespace"] = namespace
    return api.post(f"/api/v1/namespaces/{namespace}/pods?dryRun=All", json=pod)


def test_every_pod_of_the_chart_is_restricted(
    rendered: Callable[..., str], api: httpx.Client, restricted: str
) -> None:
    seen = []
    for document in yaml.safe_load_all(rendered(restricted)):
        if document["kind"] not in ("Deployment", "Job", "Pod"):
            continue
        template = document if document["kind"] == "Pod" else document["spec"]["template"]
        name = document["metadata"]["name"]
        pod = {"metadata": template["metadata"] | {"name": name}, "spec": template["spec"]}
        reply = admit(api, restricted, pod)
        assert reply.status_code == 201, reply.text
        assert "warning" not in reply.headers
        seen.append(name)
    assert sorted(seen) == ["medha-operator", "medha-router", "medha-test", "medha-uninstall"]


SOURCES: dict[str, Any] = {
    "pvc": {"claimName": "models", "path": "llama"},
    "image": {"reference": "r.example/model@sha256:" + "a" * 64},
    "uri": "https://models.example.com/llama",
}
DEVICES = {"Cpu": {"kind": "Cpu"}, "Cuda": {"kind": "Cuda"}}


def worker_pod(namespace: str, source: dict[str, Any], device: str) -> dict[str, Any]:
    resource = parse(
        {
            "apiVersion": "medha.dev/v1beta1",
            "kind": "MedhaReplica",
            "metadata": {"name": "llama", "namespace": namespace, "uid": "1"},
            "spec": {
                "model": {"name": "llama", "source": source, "maxContextTokens": 4096},
                "device": DEVICES[device],
                "parallelism": {"tp": 2},
            },
        }
    )
    start = PodAssignment(ordinal=0, at=Coordinate(0, 0, 0), spec_hash="1", gated=True)
    settings = Settings(namespace="medha-system", worker_image="localhost/medha-worker:dev")
    return json.loads(json.dumps(pod_manifest(resource, start, settings)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", SOURCES)
def test_every_pod_of_the_operator_is_restricted(
    kind: str, device: str, api: httpx.Client, restricted: str
) -> None:
    reply = admit(api, restricted, worker_pod(restricted, {kind: SOURCES[kind]}, device))
    assert reply.status_code == 201, reply.text
    assert "warning" not in reply.headers


def test_a_pod_that_is_not_restricted_is_refused(api: httpx.Client, restricted: str) -> None:
    pod = worker_pod(restricted, {"hostPath": {"path": "/models"}}, "Cpu")
    reply = admit(api, restricted, pod)
    assert reply.status_code == 403
    assert "hostPath" in reply.json()["message"]


# --- a release's life -----------------------------------------------------------------------------


def everything(run_kubectl: Run, namespace: str) -> set[str]:
    """Every object of a namespace, and every cluster-wide one with the namespace in its name.

    Events stay out, in both API groups: the API server writes some of its own accord, for example
    when it repairs the allocation of a Service's address.
    """
    named = run_kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name").stdout
    kinds = [kind for kind in named.split() if kind not in ("events", "events.events.k8s.io")]
    listed = run_kubectl("get", ",".join(kinds), f"--namespace={namespace}", "-o", "name")
    wide = run_kubectl("get", "clusterroles,clusterrolebindings", "-o", "name").stdout.split()
    return {*listed.stdout.split(), *(name for name in wide if f"/{namespace}-" in name)}


def uninstall(
    run_helm: Run, api: httpx.Client, api_server: ApiServer, namespace: str, folder: Path
) -> None:
    """Uninstall the release, and play the kubelet and the Job controller meanwhile: the program of
    the Job runs with its environment, as its account."""
    job = f"/apis/batch/v1/namespaces/{namespace}/jobs/medha-uninstall"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        gone = pool.submit(run_helm, "uninstall", "medha", f"--namespace={namespace}")
        pod = until(lambda: api.get(job).json().get("spec", {})).get("template")["spec"]
        account = f"system:serviceaccount:{namespace}:{pod['serviceAccountName']}"
        (container,) = pod["containers"]
        with new_proxy(api_server, account).running() as proxy:
            kubeconfig = folder / "kubeconfig"
            kubeconfig.write_text(kubeconfig_of(proxy.url))
            environment = {entry["name"]: entry.get("value", "") for entry in container["env"]}
            done = subprocess.run(
                [sys.executable, *container["command"][1:]],
                env={"KUBECONFIG": str(kubeconfig), **environment},
                capture_output=True,
                text=True,
                timeout=60,
            )
        assert done.returncode == 0, done.stderr
        conditions = [
            {"type": kind, "status": "True", "lastTransitionTime": NOW}
            for kind in ("SuccessCriteriaMet", "Complete")
        ]
        status = {"startTime": NOW, "completionTime": NOW, "succeeded": 1}
        answer = api.patch(
            f"{job}/status",
            json={"status": {**status, "conditions": conditions}},
            headers={"Content-Type": "application/merge-patch+json"},
        )
        assert answer.status_code == 200, answer.text
        ended = gone.result(100)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.usefixtures("crd")
@pytest.mark.parametrize("served", ["all", "own"])
def test_budgets_of_replicas_that_run_on_go_with_the_release_and_others_stay(
    run_helm: Run,
    api: httpx.Client,
    api_server: ApiServer,
    fleet: Fleet,
    start_operator: Callable[..., Operator],
    tmp_path: Path,
    served: str,
) -> None:
    namespace = fleet.namespace
    values = {"operator.namespaces": [namespace]} if served == "own" else {}
    words = ("medha", "medha", f"--namespace={namespace}", *settings(values))
    assert run_helm("install", *words).returncode == 0
    operator = start_operator()
    fleet.create("llama", replicas=2)
    fleet.played(lambda: fleet.is_ready("llama"))
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    until(lambda: api.get(f"{budgets}/llama-1").is_success)
    models = f"/api/v1/namespaces/{namespace}/configmaps/medha-models"
    owners = until(lambda: api.get(models).json().get("metadata"))["ownerReferences"]
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/medha-operator"
    uid = api.get(lease).json()["metadata"]["uid"]
    assert [(owner["kind"], owner["uid"]) for owner in owners] == [("Lease", uid)]
    foreign = {"maxUnavailable": 0, "selector": {"matchLabels": {"app": "web"}}}
    labels = {"app.kubernetes.io/managed-by": "medha-operator"}
    body = {"metadata": {"name": "web", "labels": labels}, "spec": foreign}
    assert api.post(budgets, json=body).status_code == 201
    operator.kill()  # as its Deployment goes
    pods = set(fleet.pods())
    uninstall(run_helm, api, api_server, namespace, tmp_path)
    assert [item["metadata"]["name"] for item in api.get(budgets).json()["items"]] == ["web"]
    assert set(fleet.pods()) == pods


def test_every_value_changes_an_object(rendered: Callable[..., str]) -> None:
    assert {f"{part}.{name}" for part in CHANGED for name in CHANGED[part]} == {*DESCRIBED}
    values, former = FIRST, rendered("own", FIRST, apis=APIS)
    for part, changes in CHANGED.items():
        for name, value in changes.items():
            values = {**values, f"{part}.{name}": value}
            text = rendered("own", values, apis=APIS)
            assert text != former, f"{part}.{name} changes nothing"
            former = text


@pytest.mark.usefixtures("crd", "other_kinds")
def test_every_value_can_be_upgraded_and_nothing_but_the_kind_is_left_afterwards(
    run_helm: Run,
    run_kubectl: Run,
    api: httpx.Client,
    api_server: ApiServer,
    restricted: str,
    tmp_path: Path,
) -> None:
    """The namespace admits restricted pods only. Sections are changed, then switched off."""
    before, values = everything(run_kubectl, restricted), FIRST
    changed = {f"{part}.{name}": value for part in CHANGED for name, value in CHANGED[part].items()}
    off = {path: value for path, value in changed.items() if value is False}
    for step in ({}, {path: changed[path] for path in changed.keys() - off.keys()}, off):
        values = {**values, **step}
        words = ("--install", f"--namespace={restricted}", *settings(values))
        done = run_helm("upgrade", "medha", "medha", *words)
        assert done.returncode == 0, done.stderr
        assert "PodSecurity" not in done.stderr
    uninstall(run_helm, api, api_server, restricted, tmp_path)
    assert everything(run_kubectl, restricted) == before


@pytest.mark.usefixtures("crd")
def test_a_release_is_installed_upgraded_and_uninstalled(
    run_helm: Run,
    run_kubectl: Run,
    api: httpx.Client,
    api_server: ApiServer,
    namespace: str,
    tmp_path: Path,
) -> None:
    before = everything(run_kubectl, namespace)
    place = f"--namespace={namespace}"
    installed = run_helm("install", "medha", "medha", place)
    assert installed.returncode == 0, installed.stderr
    assert "kubectl apply -f examples/kubernetes/tiny.yaml" in installed.stdout
    assert f"kubectl --namespace {namespace} port-forward service/medha-router" in installed.stdout
    assert "is missing" not in installed.stdout

    # The operator's part: it fills in the keys and takes the Lease.
    secret = f"/api/v1/namespaces/{namespace}/secrets/medha-keys"
    merge = {"Content-Type": "application/merge-patch+json"}
    keys = {"router.secret": "YQ==", "controller.public": "Yg=="}
    assert api.patch(secret, json={"data": keys}, headers=merge).status_code == 200
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/medha-operator"
    held = api.get(lease).json()
    held["spec"] = {"holderIdentity": "medha-operator-1", "leaseDurationSeconds": 12}
    held["metadata"] = {
        key: held["metadata"][key] for key in ("name", "namespace", "resourceVersion")
    }
    assert api.put(lease, json=held).status_code == 200

    upgraded = run_helm("upgrade", "medha", "medha", place, *settings({"router.replicas": 3}))
    assert upgraded.returncode == 0, upgraded.stderr
    assert api.get(secret).json()["data"] == keys
    assert api.get(lease).json()["spec"]["holderIdentity"] == "medha-operator-1"
    router = f"/apis/apps/v1/namespaces/{namespace}/deployments/medha-router"
    assert api.get(router).json()["spec"]["replicas"] == 3
    assert len(everything(run_kubectl, namespace)) > len(before) + 15

    # The keys of the API are made once, and additions to them stay.
    wanted = settings({"router.apiKeys.enabled": True})
    upgraded = run_helm("upgrade", "medha", "medha", place, *wanted)
    assert upgraded.returncode == 0, upgraded.stderr
    assert "get secret medha-router-api-keys -o jsonpath='{.data.key}'" in upgraded.stdout
    assert 'curl -H "Authorization: Bearer $KEY" localhost' in upgraded.stdout
    secret = f"/api/v1/namespaces/{namespace}/secrets/medha-router-api-keys"
    keys = api.get(secret).json()["data"]
    more = {**keys, "keys": base64.b64encode(b"# mine").decode()}
    assert api.patch(secret, json={"data": more}, headers=merge).status_code == 200
    assert run_helm("upgrade", "medha", "medha", place, *wanted).returncode == 0
    assert api.get(secret).json()["data"] == more

    uninstall(run_helm, api, api_server, namespace, tmp_path)
    assert everything(run_kubectl, namespace) == before
