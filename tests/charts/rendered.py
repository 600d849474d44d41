"""Helpers to find objects among those a chart renders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Objects = list[dict[str, Any]]
Render = Callable[..., Objects]


def select(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    (document,) = [o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return document


def kinds(objects: Objects) -> set[str]:
    return {document["kind"] for document in objects}


def template(objects: Objects, name: str) -> dict[str, Any]:
    pod: dict[str, Any] = select(objects, "Deployment", name)["spec"]["template"]
    return pod


def environment(objects: Objects) -> dict[str, str]:
    """The operator's environment, with the fields that a cluster would fill in."""
    (container,) = template(objects, "medha-operator")["spec"]["containers"]
    return {
        variable["name"]: variable.get(
            "value", variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        )
        for variable in container["env"]
    }
