"""The chart's objects for Prometheus and Grafana: monitors, annotations, dashboards, alerts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests.charts.rendered import Render, environment, kinds, select, template

from medha.spec import parse
from medha.topology import Coordinate
from medha_operator.resources.manifests import PodAssignment, network_policies, pod_manifest
from medha_operator.settings import from_environment

HOUSE = Path(__file__).resolve().parents[2]

PROMETHEUS = ("monitoring.coreos.com/v1",)
MONITORS = {"PodMonitor", "ServiceMonitor", "PrometheusRule"}


def test_monitors_are_rendered_if_the_cluster_has_their_kinds(render: Render) -> None:
    known, unknown = render(apis=PROMETHEUS), render()
    assert kinds(known) - kinds(unknown) == MONITORS
    assert not kinds(unknown) & MONITORS
    assert not MONITORS & kinds(render({"monitoring.enabled": False}, apis=PROMETHEUS))
    quiet = render({"monitoring.rules.enabled": False}, apis=PROMETHEUS)
    assert kinds(quiet) & MONITORS == MONITORS - {"PrometheusRule"}


@pytest.mark.parametrize("name, port", [("medha-operator", "8081"), ("medha-router", "8001")])
def test_pods_carry_scrape_annotations_without_monitors(
    name: str, port: str, render: Render
) -> None:
    plain = template(render(), name)["metadata"]["annotations"]
    assert plain["prometheus.io/scrape"] == "true" and plain["prometheus.io/port"] == port
    for other in (render(apis=PROMETHEUS), render({"monitoring.enabled": False})):
        assert "prometheus.io/scrape" not in template(other, name)["metadata"]["annotations"]


def test_monitors_carry_the_labels_that_prometheus_selects(render: Render) -> None:
    rendered = render({"monitoring.labels": {"release": "prometheus"}}, apis=PROMETHEUS)
    monitors = [document for document in rendered if document["kind"] in MONITORS]
    assert len(monitors) == 4
    assert all(document["metadata"]["labels"]["release"] == "prometheus" for document in monitors)


def test_the_operators_own_labels_win_over_those_of_its_scrape(render: Render) -> None:
    (endpoint,) = select(render(apis=PROMETHEUS), "PodMonitor", "medha-operator")["spec"][
        "podMetricsEndpoints"
    ]
    assert endpoint["honorLabels"] is True  # `namespace` is a MedhaReplica's, not the operator's


def test_workers_carry_annotations_without_monitors(render: Render) -> None:
    for objects, expected in (
        (render(), True),
        (render(apis=PROMETHEUS), False),
        (render({"monitoring.enabled": False}), False),
    ):
        assert from_environment(environment(objects)).scrape is expected


def test_the_chart_holds_dashboards_and_alerts_byte_for_byte() -> None:
    own = {path.name: path.read_bytes() for path in (HOUSE / "dashboards").glob("*.json")}
    files = HOUSE / "charts/medha/files"
    assert {path.name: path.read_bytes() for path in (files / "dashboards").iterdir()} == own
    assert (files / "alerts.yaml").read_bytes() == (HOUSE / "dashboards/alerts.yaml").read_bytes()
    assert {path.name for path in files.iterdir()} == {"dashboards", "alerts.yaml"}


def test_every_dashboard_is_a_map_that_grafanas_sidecar_finds(render: Render) -> None:
    dashboards = {
        document["metadata"]["name"]: document
        for document in render()
        if document["metadata"].get("labels", {}).get("grafana_dashboard") == "1"
    }
    boards = {path.stem: path.read_text() for path in (HOUSE / "dashboards").glob("*.json")}
    assert set(dashboards) == {f"medha-dashboard-{name}" for name in boards}
    for name, text in boards.items():
        data = dashboards[f"medha-dashboard-{name}"]["data"]
        assert json.loads(data[f"medha-{name}.json"]) == json.loads(text)
    for off in ({"monitoring.enabled": False}, {"monitoring.dashboards.enabled": False}):
        assert not any("dashboard" in document["metadata"]["name"] for document in render(off))


def test_dashboards_carry_the_configured_labels_and_annotations(render: Render) -> None:
    values = {"labels": {"mine": "yes"}, "annotations": {"grafana_folder": "Medha"}}
    config_map = select(
        render({"monitoring.dashboards": values}), "ConfigMap", "medha-dashboard-slo"
    )
    assert config_map["metadata"]["labels"]["mine"] == "yes"
    assert config_map["metadata"]["annotations"] == {"grafana_folder": "Medha"}


def test_the_rule_holds_the_alerts_of_the_plain_file(render: Render) -> None:
    plain = yaml.safe_load((HOUSE / "dashboards/alerts.yaml").read_text())
    assert select(render(apis=PROMETHEUS), "PrometheusRule", "medha")["spec"] == plain


def test_alerts_use_the_configured_objective_and_runbook(render: Render) -> None:
    values = {"monitoring.rules": {"objective": 0.95, "runbook": "https://wiki.example/medha"}}
    spec = select(render(values, apis=PROMETHEUS), "PrometheusRule", "medha")["spec"]
    rules = [rule for group in spec["groups"] for rule in group["rules"]]
    (objective,) = [r["expr"] for r in rules if r.get("record") == "medha:slo_objective:ratio"]
    assert objective == "vector(0.95)"
    links = {r["annotations"]["runbook_url"] for r in rules if "alert" in r}
    assert "https://wiki.example/medha#medhasloburnfast" in links
    assert all(link.startswith("https://wiki.example/medha#") for link in links)


def test_monitors_of_worker_pods_name_their_ports_and_labels(render: Render) -> None:
    tiny = yaml.safe_load((HOUSE / "examples/kubernetes/tiny.yaml").read_text())
    start = PodAssignment(ordinal=0, at=Coordinate(0, 0, 0), spec_hash="1")
    settings = from_environment(environment(render()))
    leader = pod_manifest(parse(tiny), start, settings)
    ports = {
        port["name"]: port["containerPort"] for port in leader["spec"]["containers"][0]["ports"]
    }
    rendered = render(apis=PROMETHEUS)
    monitor = select(rendered, "PodMonitor", "medha-workers")["spec"]
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= set(ports)
    assert set(monitor["podTargetLabels"]) <= set(leader["metadata"]["labels"])
    (policy,) = network_policies(parse(tiny), [0], settings)
    labels = policy["spec"]["podSelector"]["matchLabels"]
    assert labels.items() <= leader["metadata"]["labels"].items()
    opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())}
    assert opened == {ports["ops"], ports["controller"]}
