"""Dashboards and alerts are what the generator makes, name real metrics, and leave none out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from dashboards.__main__ import BOARDS, UNDRAWN, files
from dashboards.queries import VARIABLES, heat, level, quantile, rate

from medha.metrics import CATALOGUE, Metric

HOUSE = Path(__file__).resolve().parents[2]
Boards = dict[str, dict[str, Any]]

METRICS = {metric.name: metric for metric in CATALOGUE}
NAME = re.compile(r"\b(?:medha_|vllm:)[a-z0-9_]+")
SERIES = re.compile(r"\b((?:medha_|vllm:)[a-z0-9_]+)\{([^}]*)\}(\[[^\]]+\])?")
ENDS = ("_bucket", "_sum", "_count")
SIZE_LIMIT = 1 << 20  # of a ConfigMap


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions(boards: Boards) -> list[str]:
    drawn = [
        target["expr"]
        for board in boards.values()
        for panel in panels(board)
        for target in panel["targets"]
    ]
    return drawn + [mark["expr"] for board in boards.values() for mark in marks_of(board)]


def marks_of(board: dict[str, Any]) -> list[dict[str, Any]]:
    marks: list[dict[str, Any]] = board["annotations"]["list"]
    return marks


def metric_of(series: str) -> Metric | None:
    """The metric of the catalogue that shows this series."""
    for end in ENDS:
        metric = METRICS.get(series.removesuffix(end))
        if series.endswith(end) and metric is not None and metric.kind == "histogram":
            return metric
    metric = METRICS.get(series)
    return None if metric is None or metric.kind == "histogram" else metric


def test_what_is_committed_is_what_the_generator_makes() -> None:
    for path, text in files().items():
        assert path.read_text() == text, f"{path} is out of date: run `make dashboards`"
    for folder in (HOUSE / "dashboards", HOUSE / "charts/medha/files/dashboards"):
        assert {path.stem for path in folder.glob("*.json")} == {board.name for board in BOARDS}


def test_every_metric_is_drawn_or_listed_as_undrawn(drawn: Boards) -> None:
    shown = {
        metric_of(name) for expression in expressions(drawn) for name in NAME.findall(expression)
    }
    named = {metric.name for metric in shown if metric is not None}
    missing = {
        name
        for name in METRICS.keys() - named
        if not any(name.startswith(prefix) for prefix in UNDRAWN)
    }
    assert missing == set()
    assert not any(name.startswith(prefix) for name in named for prefix in UNDRAWN)


def test_every_series_that_is_drawn_is_of_the_catalogue_with_labels_that_it_has(
    drawn: Boards,
) -> None:
    for expression in expressions(drawn):
        for series, labels, _ in SERIES.findall(expression):
            metric = metric_of(series)
            assert metric is not None, f"{series} in {expression}"
            given = set(re.findall(r"(\w+)=~?\"", labels))
            assert given <= {*metric.labels, "namespace"}, expression
            wanted = {name for name in VARIABLES if name in metric.labels} | {"namespace"}
            assert wanted <= given, f"{series} in {expression} is not narrowed by {wanted - given}"


def test_counters_and_histograms_are_drawn_as_rates_of_the_time_shown(drawn: Boards) -> None:
    for expression in expressions(drawn):
        for series, _, window in SERIES.findall(expression):
            metric = metric_of(series)
            assert metric is not None
            if metric.kind == "gauge":
                assert not window, expression
            elif window in ("[1h]", "[6h]"):
                assert series.startswith("medha_slo_"), (
                    expression
                )  # windows of the error budget's burn
            else:
                assert window in ("[$__rate_interval]", "[$__range]"), expression
        for inner in re.findall(r"histogram_quantile\([\d.]+, (.{0,24})", expression):
            assert inner.startswith("sum by (le"), expression


def test_every_dashboard_is_one_that_grafana_takes(drawn: Boards) -> None:
    assert {board["uid"] for board in drawn.values()} == {f"medha-{name}" for name in drawn}
    for name, board in drawn.items():
        variables = [variable["name"] for variable in board["templating"]["list"]]
        assert variables == ["datasource", "namespace", "model", "class", "objective"]
        numbers = [panel["id"] for panel in board["panels"]]
        assert len(set(numbers)) == len(numbers)
        for panel in panels(board):
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["title"] and panel["description"].endswith(".")
            letters = [target["refId"] for target in panel["targets"]]
            assert letters and len(set(letters)) == len(letters) and "" not in letters
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24, (name, panel["title"])
        assert len((HOUSE / "dashboards" / f"{name}.json").read_bytes()) < SIZE_LIMIT


def test_every_dashboard_marks_rollouts_and_growth(drawn: Boards) -> None:
    for board in drawn.values():
        marks = {mark["name"]: mark["expr"] for mark in marks_of(board)}
        assert set(marks) == {"Rollouts", "Growth of KVP groups"}
        assert all(expression.endswith(" > 0") for expression in marks.values())


def test_panels_of_a_dashboard_do_not_overlap(drawn: Boards) -> None:
    for board in drawn.values():
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not taken & cells, panel["title"]
            taken |= cells


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: rate("medha_no_such_total"),
        lambda: rate("medha_kvp_generation"),
        lambda: quantile(0.5, "medha_requests_total"),
        lambda: heat("medha_slo_missed_total"),
        lambda: level("medha_kvp_groups", "tenant"),
        lambda: level("medha_kvp_groups", of="router"),
        lambda: level("medha_queue_requests", "model"),
        lambda: rate("medha_promises_total", colour="red"),
    ],
)
def test_a_query_that_the_catalogue_does_not_bear_is_an_error(wrong: Any) -> None:
    with pytest.raises(ValueError, match="medha_"):
        wrong()


def test_a_queue_of_routers_is_told_from_one_of_replicas() -> None:
    where = '{namespace=~"$namespace", model=~"$model"}'
    assert level("medha_queue_requests", "model", of="router") == (
        f"sum by (model) (medha_queue_requests{where} and on (instance, model) "
        f"medha_replicas{where})"
    )
