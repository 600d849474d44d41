"""A real Prometheus that scraped a real fleet answers every panel and alert, none with nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.api.fleet import Operator
from tests.scraped.conftest import Scraped

from medha.metrics import CATALOGUE, Metric
from medha.spec import API_VERSION, KIND, parse
from medha_operator.resources.scaled_object import scaled_object

pytestmark = pytest.mark.timeout(1500)

HOUSE = Path(__file__).resolve().parents[2]
BOARDS = {path.stem: json.loads(path.read_text()) for path in (HOUSE / "dashboards").glob("*.json")}
OF_OPERATOR = [metric.name for metric in CATALOGUE if metric.exporters == ("operator",)]
COMPARISON = re.compile(r"(>=|<=|==|!=|>|<)(?!=)")


def panels(board: dict[str, Any]) -> list[tuple[str, str]]:
    """(title, expression) of everything that is drawn."""
    return [
        (panel["title"], target["expr"])
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]


@pytest.mark.parametrize("name", BOARDS)
def test_every_expression_of_a_dashboard_brings_numbers(name: str, scraped: Scraped) -> None:
    if name == "operator" and scraped.missing:
        pytest.skip(scraped.missing)
    empty = []
    for title, expr in panels(BOARDS[name]):
        results = scraped.prometheus.range(expr, scraped.start, scraped.end)
        if not any(series.points for series in results):
            empty.append(f"{title}: {expr}")
    assert empty == []


def test_annotations_of_dashboards_mark_what_the_operator_did(scraped: Scraped) -> None:
    if scraped.missing:
        pytest.skip(scraped.missing)
    for mark in BOARDS["slo"]["annotations"]["list"]:
        expr = COMPARISON.sub(r"\1 bool", mark["expr"])
        results = scraped.prometheus.range(expr, scraped.start, scraped.end)
        assert any(series.points for series in results), mark["name"]


@pytest.mark.parametrize("name", BOARDS)
def test_every_variable_of_a_dashboard_offers_what_is_there(name: str, scraped: Scraped) -> None:
    offered = {
        variable["name"]: scraped.prometheus.values(variable["query"], scraped.start, scraped.end)
        for variable in BOARDS[name]["templating"]["list"]
        if variable["type"] == "query"
    }
    places = {"team", "medha-system"}
    assert offered == {
        "namespace": sorted(places),
        "model": ["tiny"],
        "class": ["default", "eager", "patient"],
    }


def test_gpus_of_a_chosen_namespace_are_shown_however_they_are_scraped(scraped: Scraped) -> None:
    gpus = [(title, expr) for title, expr in panels(BOARDS["fleet"]) if "DCGM_" in expr]
    assert len(gpus) == 3
    for title, expr in gpus:
        results = scraped.prometheus.range(expr, scraped.start, scraped.end, namespace="team")
        shown = {
            (result.labels["Hostname"], result.labels["gpu"]) for result in results if result.points
        }
        assert shown == {("node-a", "0"), ("node-b", "0")}, title


def test_what_keda_asks_brings_the_number_that_the_operator_exports(
    scraped: Scraped, operator: Operator | str
) -> None:
    if isinstance(operator, str):
        pytest.skip(scraped.missing)
    document = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "llama", "namespace": "team", "uid": "1"},
        "spec": {
            "model": {
                "name": "llama",
                "source": {"hostPath": {"path": "/m"}},
                "maxContextTokens": 4096,
            },
            "autoscaling": {"mode": "External", "minReplicas": 1, "maxReplicas": 2},
        },
    }
    resource = parse(document)
    assert resource.spec.autoscaling is not None
    scaled = scaled_object(resource, resource.spec.autoscaling, "http://prometheus:9090")
    (trigger,) = scaled["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    (exported,) = operator.shown("medha_desired_replicas").values()
    assert scraped.prometheus.value(query) == exported == 1.0
    assert scraped.prometheus.value(query.replace("llama", "other")) is None


def test_every_expression_of_the_alerts_brings_numbers(scraped: Scraped) -> None:
    rules = scraped.prometheus.rules()
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    empty = []
    for rule in rules:
        # `a > b` brings nothing while it is well; `a > bool b` brings 0 or 1 where there is data.
        expr = COMPARISON.sub(r"\1 bool", rule["query"])
        results = scraped.prometheus.range(expr, scraped.start, scraped.end)
        of_operator = any(name in expr for name in OF_OPERATOR)
        if not any(series.points for series in results) and not (scraped.missing and of_operator):
            empty.append(f"{rule['name']}: {expr}")
    assert len(rules) > 15 and empty == []


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda m: m.name)
def test_a_metric_of_the_catalogue_comes_from_each_of_its_processes(
    metric: Metric, scraped: Scraped
) -> None:
    exporters = set(metric.exporters)
    if scraped.missing:
        exporters -= {"operator"}
    series = metric.name + ("_count" if metric.kind == "histogram" else "")
    assert scraped.prometheus.jobs_of(series, scraped.start, scraped.end) == exporters


def test_what_the_fleet_did_is_what_prometheus_saw(scraped: Scraped) -> None:
    def last(expr: str) -> float:
        results = scraped.prometheus.range(expr, scraped.end - 5.0, scraped.end)
        return sum(series.points[-1][1] for series in results if series.points)

    assert last("sum(medha_requests_total{outcome='finished'})") > 100
    assert last("sum(medha_requests_total{outcome='refused'})") > 0
    assert last("sum(medha_requests_total{outcome='cancelled'})") == 1
    assert last("sum(medha_kv_transfer_bytes_total)") > 0
    assert last("sum(medha_prefix_cache_hits_total)") > 0
    assert last("sum(medha_rank_restarts_total)") == 1
    assert last("sum(medha_pod_restarts_total)") == 1
    results = scraped.prometheus.range(
        "sum(medha_kvp_groups{state='running'})", scraped.start, scraped.end
    )
    assert max(value for series in results for _, value in series.points) == 3  # it has grown
