"""The rights that the chart grants are those that docs/operator.md says the operator uses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TABLE = (Path(__file__).resolve().parents[2] / "docs/operator.md").read_text()
Objects = list[dict[str, Any]]
Right = tuple[str, str, str]  # group, resource, verb
OWN = "medha-system"


def documented() -> dict[str, set[Right]]:
    """The table's rights by where they hold: all, own, cluster."""
    found: dict[str, set[Right]] = {"all": set(), "own": set(), "cluster": set()}
    for line in TABLE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[3] in found:
            group = "" if cells[0] == "core" else cells[0].strip("`")
            resources, verbs = re.findall(r"`([^`]+)`", cells[1]), cells[2].split(", ")
            found[cells[3]] |= {(group, each, verb) for each in resources for verb in verbs}
    return found


def granted(objects: Objects) -> dict[str, set[Right]]:
    """Rights by the namespace in which they are bound to the operator; "*": in all."""
    roles = {
        (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]): each[
            "rules"
        ]
        for each in objects
        if each["kind"] in ("Role", "ClusterRole")
    }
    found: dict[str, set[Right]] = {}
    for binding in objects:
        if not binding["kind"].endswith("RoleBinding"):
            continue
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == ("medha-operator", OWN)
        place = binding["metadata"].get("namespace", "")
        reference = binding["roleRef"]
        for rule in roles[reference["kind"], place, reference["name"]]:
            rights = {
                (group, resource, verb)
                for group in rule["apiGroups"]
                for resource in rule["resources"]
                for verb in rule["verbs"]
            }
            found.setdefault(place or "*", set()).update(rights)
    return found


def test_the_table_is_read_whole() -> None:
    rights = documented()
    assert ("", "nodes", "watch") in rights["cluster"]
    assert ("coordination.k8s.io", "leases", "update") in rights["own"]
    assert ("", "pods", "delete") in rights["all"] and len(rights["all"]) > 20


def test_an_operator_of_all_namespaces_may_do_there_what_it_does(objects: Objects) -> None:
    used = documented()
    assert granted(objects) == {"*": used["all"] | used["cluster"], OWN: used["own"]}


def test_an_operator_of_some_namespaces_may_do_nothing_in_others(
    render: Callable[..., Objects],
) -> None:
    used = documented()
    keys = {right for right in used["all"] if right[1] == "secrets"}
    rights = granted(render({"operator.namespaces": ["a", "b"]}))
    assert rights == {
        "*": used["cluster"],
        "a": used["all"],
        "b": used["all"],
        OWN: used["own"] | keys,
    }
    rights = granted(render({"operator.namespaces": [OWN]}))
    assert rights == {"*": used["cluster"], OWN: used["all"] | used["own"]}


@pytest.mark.parametrize("namespaces", [[], ["a"]])
def test_secrets_are_read_by_name_and_never_listed(
    namespaces: list[str], render: Callable[..., Objects]
) -> None:
    for role in render({"operator.namespaces": namespaces}):
        for rule in role.get("rules", ()):
            if "secrets" in rule["resources"]:
                named = bool(rule.get("resourceNames"))
                assert set(rule["verbs"]) <= ({"get", "patch"} if named else {"create"})


def test_no_right_is_a_wildcard(objects: Objects) -> None:
    for role in objects:
        for rule in role.get("rules", ()):
            assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])
