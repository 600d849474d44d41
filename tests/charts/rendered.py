"""What tests look for among rendered objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Objects = list[dict[str, Any]]
Render = Callable[..., Objects]


def one(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    (found,) = [o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def kinds(objects: Objects) -> set[str]:
    return {each["kind"] for each in objects}


def template(objects: Objects, name: str) -> dict[str, Any]:
    found: dict[str, Any] = one(objects, "Deployment", name)["spec"]["template"]
    return found


def environment(objects: Objects) -> dict[str, str]:
    """The operator's, with what the cluster would fill in."""
    (container,) = template(objects, "medha-operator")["spec"]["containers"]
    return {
        each["name"]: each.get(
            "value", each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        )
        for each in container["env"]
    }
