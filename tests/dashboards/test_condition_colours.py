"""The panel of conditions: what is good is green, whatever its value, and a fault is red."""

from __future__ import annotations

import re
from typing import Any

import pytest

from medha_operator.testing import Cluster, node, resource

Boards = dict[str, dict[str, Any]]


def colour(board: dict[str, Any], condition: str, value: str) -> str:
    """Return the colour in which Grafana shows a condition with this value."""
    (panel,) = [panel for panel in board["panels"] if panel["title"] == "Conditions"]
    mappings = panel["fieldConfig"]["defaults"]["mappings"]
    for override in panel["fieldConfig"]["overrides"]:
        if re.search(override["matcher"]["options"].strip("/"), f"team/llama {condition}"):
            (mappings,) = [changed["value"] for changed in override["properties"]]
    shown: str = mappings[0]["options"]["1" if value == "True" else "0"]["color"]
    return shown


def colours(board: dict[str, Any], cluster: Cluster) -> dict[str, str]:
    """Return the colour of each condition of a cluster's resource."""
    return {
        condition["type"]: colour(board, condition["type"], condition["status"])
        for condition in cluster.status["conditions"]
    }


def test_everything_about_a_healthy_replica_is_green(drawn: Boards) -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.settle()
    shown = colours(drawn["operator"], cluster)
    assert len(shown) > 8 and set(shown.values()) == {"green"}


def test_a_replica_without_room_is_red_where_that_is_told(drawn: Boards) -> None:
    nowhere = resource(placement={"nodeSelector": {"pool": "absent"}})
    cluster = Cluster(nowhere, [node("a")])
    cluster.settle()
    shown = colours(drawn["operator"], cluster)
    assert shown["PlacementUnsatisfiable"] == shown["Ready"] == shown["Placed"] == "red"


@pytest.mark.parametrize(
    ("condition", "value", "expected"),
    [
        ("Draining", "True", "yellow"),
        ("KvpGrowing", "True", "yellow"),
        ("Reconciling", "True", "yellow"),
        ("RestartBudgetExhausted", "True", "red"),
        ("Stalled", "True", "red"),
        ("NamesAccepted", "False", "red"),
        ("ScalingActive", "False", "red"),
        ("Ready", "Unknown", "red"),
    ],
)
def test_faults_are_red_and_work_that_ends_by_itself_is_yellow(
    drawn: Boards, condition: str, value: str, expected: str
) -> None:
    assert colour(drawn["operator"], condition, value) == expected
