"""Every value is described and checked; a wrong value is refused by its name."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "charts/medha"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def comments(text: str) -> dict[str, str]:
    """The comment above each key, by the key's path."""
    descriptions: dict[str, str] = {}
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        key = re.match(r"( *)([A-Za-z]+):", line)
        if line.strip().startswith("#"):
            comment.append(line.strip().removeprefix("#").strip())
        elif key:
            path = [*path[: len(key[1]) // 2], key[2]]
            descriptions[".".join(path)] = " ".join(comment)
            comment = []
        else:
            comment = []
    return descriptions


def described(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every value of the schema, by its path."""
    for name, part in schema["properties"].items():
        where = f"{path}.{name}".lstrip(".")
        if "properties" in part and name != "resources":
            yield from described(part, where)
        else:
            yield where, part


def at(path: str) -> Any:
    value = VALUES
    for name in path.split("."):
        value = value[name]
    return value


COMMENTS = comments((CHART / "values.yaml").read_text())
DESCRIBED = {path: schema for path, schema in described(SCHEMA) if path != "global"}


@pytest.mark.parametrize("path", DESCRIBED)
def test_a_value_is_described_in_the_same_words_in_both_files(path: str) -> None:
    assert DESCRIBED[path]["description"] == COMMENTS[path] != ""
    at(path)


def test_the_schema_has_every_value_and_no_other() -> None:
    def leaves(values: dict[str, Any], path: str) -> Iterator[str]:
        for name, value in values.items():
            where = f"{path}.{name}".lstrip(".")
            if where in DESCRIBED or not isinstance(value, dict):
                yield where
            else:
                yield from leaves(value, where)

    assert sorted(leaves(VALUES, "")) == sorted(DESCRIBED)
    assert len(DESCRIBED) > 55


def test_every_value_is_used_by_a_template() -> None:
    text = "".join(path.read_text() for path in (CHART / "templates").rglob("*.*"))
    unused = [path for path in DESCRIBED if not re.search(rf"\.{path.split('.')[-1]}\b", text)]
    assert unused == []


WRONG = [
    ("operator.replicas", 3, "/operator/replicas"),
    ("operator.replicas", "1", "/operator/replicas"),
    ("operator.namespaces", ["a", "a"], "/operator/namespaces"),
    ("operator.namespaces", ["A"], "/operator/namespaces/0"),
    ("operator.leaseSeconds", 1, "/operator/leaseSeconds"),
    ("operator.logLevel", "loud", "/operator/logLevel"),
    ("operator.resources", {"limit": {}}, "/operator/resources"),
    ("router.service.type", "clusterip", "/router/service/type"),
    ("router.service.port", 0, "/router/service/port"),
    ("router.config.maxQueue", 0, "/router/config/maxQueue"),
    ("router.config.memoryLimitBytes", -1, "/router/config/memoryLimitBytes"),
    ("router.config.maxQueues", 7, "/router/config"),
    ("router.terminationGraceSeconds", -1, "/router/terminationGraceSeconds"),
    ("image.pullPolicy", "Sometimes", "/image/pullPolicy"),
    ("image.tag", "", "/image/digests"),
    ("image.tag", "a tag", "/image/tag"),
    ("image.digests", {"router": "sha256:12"}, "/image/digests/router"),
    ("image.digests", {"test": f"sha256:{'a' * 64}"}, "/image/digests"),
    ("image.registry", "https://r.example", "/image/registry"),
    ("networkPolicy.apiServerPorts", [], "/networkPolicy/apiServerPorts"),
    ("monitoring.interval", "15", "/monitoring/interval"),
    ("zebra", 1, "zebra"),
    ("image.pullSecrets", [""], "/image/pullSecrets/0"),
    ("image.pullSecrets", ["Key"], "/image/pullSecrets/0"),
    ("image.pullSecrets", ["a", "a"], "/image/pullSecrets"),
    ("operator.image", "registry/operator:", "/operator/image"),
    ("operator.image", "registry/operator@sha256:12", "/operator/image"),
    ("worker.image", "registry/Worker:1", "/worker/image"),
    ("router.image", "-image", "/router/image"),
    ("operator.resources", {"limits": {"memory": "lots"}}, "/operator/resources/limits/memory"),
    ("operator.resources", {"requests": {"cpu": "-1"}}, "/operator/resources/requests/cpu"),
    ("operator.resources", {"requests": {"cpu": -1}}, "/operator/resources/requests/cpu"),
    ("operator.resources", {"requests": {"cpu": True}}, "/operator/resources/requests/cpu"),
    ("operator.resources", {"limits": {"a gpu": 1}}, "/operator/resources/limits"),
    ("router.resources", {"limits": {"memory": "4 Gi"}}, "/router/resources/limits/memory"),
    ("router.resources", {"limits": {"memory": "4GB"}}, "/router/resources/limits/memory"),
    ("router.resources", {"claims": []}, "/router/resources"),
    ("operator.podLabels", {"app.kubernetes.io/name": "x"}, "/operator/podLabels"),
    ("router.podLabels", {"app.kubernetes.io/instance": "x"}, "/router/podLabels"),
    ("router.podLabels", {"medha.dev/replica": "llama"}, "/router/podLabels"),
    ("router.podLabels", {"helm.sh/chart": "x"}, "/router/podLabels"),
    ("router.podLabels", {"tier": "front door"}, "/router/podLabels/tier"),
    ("router.podLabels", {"tier": 1}, "/router/podLabels/tier"),
    ("router.podLabels", {"tier": "x" * 64}, "/router/podLabels/tier"),
    ("router.podLabels", {"a/b/c": "x"}, "/router/podLabels"),
    ("router.podAnnotations", {"checksum/config": "x"}, "/router/podAnnotations"),
    ("router.podAnnotations", {"tier": 1}, "/router/podAnnotations/tier"),
    ("operator.podAnnotations", {"not a name": "x"}, "/operator/podAnnotations"),
    ("operator.serviceAccountAnnotations", {"/x": ""}, "/operator/serviceAccountAnnotations"),
    ("operator.nodeSelector", {"disk": "much space"}, "/operator/nodeSelector/disk"),
    ("operator.nodeSelector", {"": "x"}, "/operator/nodeSelector"),
    ("operator.priorityClassName", "High Priority", "/operator/priorityClassName"),
    ("operator.tolerations", [{"key": "a", "operator": "Is"}], "/operator/tolerations/0/operator"),
    ("operator.tolerations", [{"effect": "NoSchedule"}], "/operator/tolerations/0"),
    ("operator.tolerations", [{"key": "a", "efect": "NoExecute"}], "/operator/tolerations/0"),
    ("operator.tolerations", [{"key": "a", "effect": "Never"}], "/operator/tolerations/0/effect"),
    (
        "router.tolerations",
        [{"key": "a", "operator": "Exists", "value": "b"}],
        "/router/tolerations/0/value",
    ),
    (
        "router.tolerations",
        [{"key": "a", "effect": "NoSchedule", "tolerationSeconds": 5}],
        "/router/tolerations/0/effect",
    ),
    ("router.affinity", {"nodeAfinity": {}}, "/router/affinity"),
    (
        "router.affinity",
        {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{}]}},
        "requiredDuringSchedulingIgnoredDuringExecution/0",
    ),
    (
        "router.affinity",
        {
            "podAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 101, "podAffinityTerm": {"topologyKey": "zone"}}
                ]
            }
        },
        "/weight",
    ),
    (
        "operator.affinity",
        {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "In"}]}]
                }
            }
        },
        "matchExpressions/0",
    ),
    ("router.service.nodePort", 30080, "/router/service/nodePort"),  # of type ClusterIP
    ("router.service.annotations", ["a"], "/router/service/annotations"),
    ("router.apiKeys.existingSecret", "my-keys", "/router/apiKeys/enabled"),
    ("router.apiKeys.existingSecret", "my_keys", "/router/apiKeys/existingSecret"),
    ("router.podDisruptionBudget.maxUnavailable", "50%", "/maxUnavailable"),
    ("router.ingress.host", "https://llm.example.com", "/router/ingress/host"),
    ("router.ingress.host", "llm.example.com/v1", "/router/ingress/host"),
    ("router.ingress.className", "nginx ingress", "/router/ingress/className"),
    ("router.ingress.tlsSecret", "Cert", "/router/ingress/tlsSecret"),
    ("router.httpRoute.enabled", True, "/router/httpRoute/parentRefs"),
    ("router.httpRoute.parentRefs", [{"nam": "public"}], "/router/httpRoute/parentRefs/0"),
    ("router.httpRoute.parentRefs", [{}], "/router/httpRoute/parentRefs/0"),
    ("router.httpRoute.hostnames", ["a b"], "/router/httpRoute/hostnames/0"),
    ("router.config.classHeaders", {"X-Tier": {"a": "b"}}, "/router/config/classHeaders"),
    ("router.config.classHeaders", {"x-tier": "gold"}, "/router/config/classHeaders/x-tier"),
    ("router.config.allowedOrigins", ["https://x.com/"], "/router/config/allowedOrigins/0"),
    ("networkPolicy.clients", [{}], "/networkPolicy/clients/0"),
    ("networkPolicy.clients", [{"podSelecter": {}}], "/networkPolicy/clients/0"),
    ("networkPolicy.monitoring", [{"podSelector": {"app": "prometheus"}}], "/monitoring/0"),
    ("networkPolicy.apiServer", [{"ipBlock": {"cidr": "10.0.0.1"}}], "ipBlock/cidr"),
    (
        "networkPolicy.apiServer",
        [{"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}],
        "/networkPolicy/apiServer/0",
    ),
    ("networkPolicy.modelEgress", [{"from": []}], "/networkPolicy/modelEgress/0"),
    ("networkPolicy.modelEgress", [{"ports": [443]}], "/networkPolicy/modelEgress/0/ports/0"),
    ("networkPolicy.modelEgress", [{"ports": [{"port": 0}]}], "/ports/0/port"),
    ("networkPolicy.modelEgress", [{"ports": [{"endPort": 9}]}], "/ports/0"),
    ("networkPolicy.apiServerPorts", ["https"], "/networkPolicy/apiServerPorts/0"),
    ("monitoring.interval", "0s", "/monitoring/interval"),
    ("monitoring.interval", "15s3m", "/monitoring/interval"),
    ("monitoring.labels", {"release": ["a"]}, "/monitoring/labels/release"),
    ("monitoring.dashboards.labels", {"grafana_dashboard": 1}, "/grafana_dashboard"),
    ("monitoring.rules.objective", 99, "/monitoring/rules/objective"),
    ("router.replicas", None, "replicas"),
    ("router.service", None, "service"),
    ("networkPolicy.apiServerPorts", None, "apiServerPorts"),
]


@pytest.mark.parametrize("path, value, named", WRONG, ids=[f"{p}={v!r}" for p, v, _ in WRONG])
def test_a_wrong_value_is_refused_by_its_name(
    path: str, value: object, named: str, run_helm: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    setting = f"--set-json={path}={json.dumps(value)}"
    done = run_helm("template", "medha", "--kube-version=1.36.0", setting)
    assert done.returncode != 0
    assert "don't meet the specifications of the schema" in done.stderr
    assert named in done.stderr


TERM = {"topologyKey": "topology.kubernetes.io/zone", "labelSelector": {"matchLabels": {"a": "b"}}}
IN = {"key": "disk", "operator": "In", "values": ["ssd"]}
RIGHT: dict[str, object] = {
    "image.pullSecrets": ["registry.key"],
    "operator.image": "registry.example:5000/medha/operator:1.2@sha256:" + "a" * 64,
    "worker.image": "localhost/medha-worker",
    "operator.resources": {
        "requests": {"cpu": 0.5, "memory": "1e8", "example.com/nic": 1},
        "limits": {"example.com/nic": 1},
    },
    "router.resources": {"limits": {"cpu": "1500m", "memory": "4.5Gi", "hugepages-2Mi": "1Gi"}},
    "router.podLabels": {"team": "serving", "example.com/tier": ""},
    "router.podAnnotations": {"example.com/note": "any words, 1"},
    "router.tolerations": [
        {"operator": "Exists"},
        {"key": "gpu", "value": "a", "effect": "NoSchedule"},
        {"key": "b", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5},
    ],
    "router.affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [IN]}]
            },
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 1, "preference": {"matchExpressions": [IN]}}
            ],
        },
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]},
    },
    "router.service": {"type": "NodePort", "nodePort": 30080},
    "router.apiKeys": {"enabled": True, "existingSecret": "my-keys"},
    "networkPolicy.clients": [
        {"namespaceSelector": {"matchExpressions": [IN]}, "podSelector": {}},
        {"ipBlock": {"cidr": "2001:db8::/32", "except": ["2001:db8:1::/48"]}},
    ],
    "networkPolicy.modelEgress": [
        {"ports": [{"port": 443, "endPort": 444}, {"port": "https", "protocol": "TCP"}]},
        {},
    ],
    "monitoring.interval": "1m30s",
    "operator.resources.limits": None,
    "monitoring.dashboards.labels": None,
}
"""Also tried on an API server, in tests/api/test_chart.py."""


@pytest.mark.parametrize("path", RIGHT)
def test_a_right_value_is_accepted(
    path: str, run_helm: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    setting = f"--set-json={path}={json.dumps(RIGHT[path])}"
    done = run_helm("template", "medha", "--kube-version=1.36.0", setting)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", COMMENTS)
def test_a_value_that_is_removed_is_refused_by_its_name_or_has_none(
    path: str, run_helm: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run_helm("template", "medha", "--kube-version=1.36.0", f"--set-json={path}=null")
    if done.returncode == 0:
        assert [*yaml.safe_load_all(done.stdout)]
    else:
        assert "don't meet the specifications of the schema" in done.stderr
        assert path.rpartition(".")[2] in done.stderr


def test_the_chart_of_the_kind_has_no_values(
    run_helm: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_helm("template", "medha-crds", "--kube-version=1.36.0", "--set=keep=false")
    assert done.returncode != 0 and "keep" in done.stderr
