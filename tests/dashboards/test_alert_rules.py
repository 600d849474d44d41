"""Alerts fire when they should, stay quiet otherwise, and link to the runbook."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from medha.metrics import CATALOGUE

HOUSE = Path(__file__).resolve().parents[2]
Rules = list[dict[str, Any]]
SERIES = {metric.name: metric for metric in CATALOGUE}


@pytest.fixture(scope="session")
def alerts(rules: Rules) -> Rules:
    return [rule for rule in rules if "alert" in rule]


@pytest.fixture(scope="session")
def cases() -> list[dict[str, Any]]:
    """Cases of the promtool tests."""
    tests = yaml.safe_load((HOUSE / "tests/dashboards/alerts.yaml").read_text())["tests"]
    return [case for test in tests for case in test["alert_rule_test"]]


def run(promtool: Path, *words: str) -> None:
    done = subprocess.run(
        [promtool, *words], cwd=HOUSE, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_reads_every_rule(promtool: Path) -> None:
    run(promtool, "check", "rules", "dashboards/alerts.yaml")


def test_alerts_fire_on_the_series_that_they_are_for_and_on_no_others(promtool: Path) -> None:
    run(promtool, "test", "rules", "tests/dashboards/alerts.yaml")


def test_every_alert_is_seen_firing_and_seen_quiet(
    alerts: Rules, cases: list[dict[str, Any]]
) -> None:
    names = {alert["alert"] for alert in alerts}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == names


def test_every_alert_has_its_section_in_the_runbook_and_no_section_is_left_over(
    alerts: Rules,
) -> None:
    runbook = (HOUSE / "docs/runbook.md").read_text()
    sections = set(re.findall(r"^## (Medha\w+)$", runbook, flags=re.MULTILINE))
    assert sections == {alert["alert"] for alert in alerts}
    for alert in alerts:
        anchor = alert["alert"].lower()
        assert alert["annotations"]["runbook_url"] == f"docs/runbook.md#{anchor}"
        body = runbook.split(f"## {alert['alert']}\n")[1].split("\n## ")[0]
        for part in ("**Means.**", "**Look.**", "**Do.**"):
            assert part in body, f"{alert['alert']} has no {part}"


def test_alerts_rest_on_metrics_of_the_catalogue(rules: Rules) -> None:
    recorded = {rule["record"] for rule in rules if "record" in rule}
    used: set[str] = set()
    for rule in rules:
        text = re.sub(r'"[^"]*"', '""', rule["expr"])
        for name in re.findall(r"\b(medha[_:][\w:]+)", text):
            stem = re.sub(r"_(bucket|count|sum)$", "", name)
            assert name in recorded or stem in SERIES, f"{name} in {rule['expr']}"
            used.add(name)
    assert recorded <= used


def test_every_alert_says_how_grave_it_is_and_what_it_means(alerts: Rules) -> None:
    for alert in alerts:
        assert alert["labels"]["severity"] in {"critical", "warning"}
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
        assert alert["annotations"]["description"].endswith(".")
