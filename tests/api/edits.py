"""Random changes of a MedhaReplica, generated from the CRD's schema.

`Edits.valid` returns a merge patch of one field that fits the field's schema (rules between fields
may still refuse it) and changes the document; `Edits.invalid` one of a field that does not fit.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CRD = Path(__file__).resolve().parents[2] / "crds/medha.dev_medhareplicas.yaml"
WORDS = (
    "1",
    "2",
    "0.5",
    "1.5",
    "3",
    "10ms",
    "250ms",
    "3s",
    "90s",
    "2m",
    "1h",
    "64Mi",
    "1Gi",
    "gpu",
    "models/llama",
    "some-name",
    "topology.kubernetes.io/rack",
    "kubernetes.io/hostname",
    "https://models.example/llama",
    "localhost/other:2",
    "example.com/device",
)
SAME = ("spec.model.source",)
"""Not changed field by field: exactly one of its parts may be set."""
USUAL_MAX = 3
"""Larger numbers are rare: they seldom fit, and pods are created one by one."""
COUNTS = ("replicas", "minReplicas", "maxReplicas")
"""Never larger: that many pods would be created one by one."""

Path_ = tuple[str, ...]
Schema = dict[str, Any]


def leaves(schema: Schema, path: Path_) -> Iterator[tuple[Path_, Schema]]:
    """Yield the fields that hold a value of their own."""
    if ".".join(path) in SAME:
        return
    properties = schema.get("properties")
    if not properties:
        yield path, schema
        return
    for name, part in properties.items():
        yield from leaves(part, (*path, name))


class Edits:
    """Draws changes from one random generator."""

    def __init__(self, dice: random.Random) -> None:
        document = yaml.safe_load(CRD.read_text())
        spec = document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        self._dice = dice
        self._leaves = list(leaves(spec, ("spec",)))
        self._strict = [leaf for leaf in self._leaves if _bounded(leaf[1])]

    def valid(self, document: dict[str, Any]) -> tuple[Path_, dict[str, Any]]:
        while True:
            path, schema = self._dice.choice(self._leaves)
            value = None if self._dice.random() < 0.1 else self._value(schema, path[-1] in COUNTS)
            if value != _found(document, path):
                return path, _patch(path, value)

    def invalid(self) -> tuple[Path_, dict[str, Any]]:
        path, schema = self._dice.choice(self._strict)
        return path, _patch(path, self._wrong(schema))

    def _value(self, schema: Schema, few: bool = False) -> Any:
        dice = self._dice
        if "enum" in schema:
            return dice.choice(schema["enum"])
        match schema.get("type"):
            case "integer":
                low, high = schema.get("minimum", 0), schema.get("maximum", 1 << 20)
                usual = list(range(low, min(high, USUAL_MAX) + 1))
                return dice.choice(usual) if usual and (few or dice.random() < 0.9) else high
            case "array":
                most = min(2, schema.get("maxItems", 2))
                return [self._value(schema["items"]) for _ in range(dice.randint(0, most))]
            case "object":
                return self._object(schema)
        if schema.get("x-kubernetes-int-or-string") or schema.get("type") == "string":
            return dice.choice([word for word in WORDS if _fits(word, schema)] or ["x"])
        return {}

    def _object(self, schema: Schema) -> dict[str, Any]:
        if "properties" in schema:
            required = schema.get("required", ())
            return {
                name: self._value(part)
                for name, part in schema["properties"].items()
                if name in required or self._dice.random() < 0.3
            }
        inner = schema.get("additionalProperties")
        return {"a-key": self._value(inner)} if isinstance(inner, dict) else {}

    def _wrong(self, schema: Schema) -> Any:
        """Draw a value beyond a bound, of another type, or outside an enum."""
        ways: list[Any] = [["a list"]] if schema.get("type") != "array" else ["no list"]
        if "enum" in schema:
            ways.append("Nonsense")
        if schema.get("type") == "integer":
            ways += [schema["minimum"] - 1] if "minimum" in schema else []
            ways += [schema["maximum"] + 1] if "maximum" in schema else []
        if schema.get("type") == "string" and "maxLength" in schema:
            ways.append("x" * (schema["maxLength"] + 1))
        if "pattern" in schema:
            ways += [word for word in ("!!", "", "-1") if not re.search(schema["pattern"], word)]
        return self._dice.choice(ways)


def _bounded(schema: Schema) -> bool:
    return "enum" in schema or schema.get("type") in ("integer", "array", "string")


def _fits(word: str, schema: Schema) -> bool:
    pattern = schema.get("pattern", "")
    long = schema.get("minLength", 0) <= len(word) <= schema.get("maxLength", 1 << 20)
    return long and re.search(pattern, word) is not None


def _found(document: Any, path: Path_) -> Any:
    """The value at a path; None if there is none."""
    for name in path:
        document = document.get(name) if isinstance(document, dict) else None
    return document


def _patch(path: Path_, value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    patch: dict[str, Any] = value
    return patch
