"""The chart grants the rights that charts/medha/README.md says the operator uses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TABLE = (Path(__file__).resolve().parents[2] / "charts/medha/README.md").read_text()
Objects = list[dict[str, Any]]
Right = tuple[str, str, str]  # group, resource, verb
OWN = "medha-system"


def documented() -> dict[str, set[Right]]:
    """The table's rights by scope: all, own, cluster."""
    rights: dict[str, set[Right]] = {"all": set(), "own": set(), "cluster": set()}
    for line in TABLE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[3] in rights:
            group = "" if cells[0] == "core" else cells[0].strip("`")
            resources, verbs = re.findall(r"`([^`]+)`", cells[1]), cells[2].split(", ")
            rights[cells[3]] |= {
                (group, resource, verb) for resource in resources for verb in verbs
            }
    return rights


def is_hook(document: dict[str, Any]) -> bool:
    return "helm.sh/hook" in document["metadata"].get("annotations", {})


def granted(objects: Objects) -> dict[str, set[Right]]:
    """Rights by the namespace in which they are bound to the operator; "*": in all."""
    roles = {
        (
            document["kind"],
            document["metadata"].get("namespace", ""),
            document["metadata"]["name"],
        ): document["rules"]
        for document in objects
        if document["kind"] in ("Role", "ClusterRole")
    }
    bound: dict[str, set[Right]] = {}
    for binding in objects:
        if not binding["kind"].endswith("RoleBinding") or is_hook(binding):
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
            bound.setdefault(place or "*", set()).update(rights)
    return bound


def test_every_row_of_the_table_is_read() -> None:
    rights = documented()
    assert ("", "nodes", "watch") in rights["cluster"]
    assert ("coordination.k8s.io", "leases", "update") in rights["own"]
    assert ("", "pods", "delete") in rights["all"] and len(rights["all"]) > 20


def test_an_operator_of_all_namespaces_has_the_documented_rights(objects: Objects) -> None:
    used = documented()
    assert granted(objects) == {"*": used["all"] | used["cluster"], OWN: used["own"]}


def test_an_operator_of_some_namespaces_has_no_rights_in_others(
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


@pytest.mark.parametrize("served", [[], ["a", "b"]])
def test_what_runs_after_an_uninstall_may_delete_budgets_where_the_operator_served(
    render: Callable[..., Objects], served: list[str]
) -> None:
    hooks = [document for document in render({"operator.namespaces": served}) if is_hook(document)]
    roles = [document for document in hooks if document["kind"] in ("Role", "ClusterRole")]
    assert [role["metadata"].get("namespace", "") for role in roles] == (served or [""])
    rules = {json.dumps(rule) for role in roles for rule in role["rules"]}
    assert [json.loads(rule) for rule in rules] == [
        {
            "apiGroups": ["policy"],
            "resources": ["poddisruptionbudgets"],
            "verbs": ["list", "delete"],
        }
    ]
    after = [hook for hook in hooks if hook["metadata"]["annotations"]["helm.sh/hook"] != "test"]
    policies = {hook["metadata"]["annotations"]["helm.sh/hook-delete-policy"] for hook in after}
    assert policies == {"before-hook-creation,hook-succeeded"}
