"""Every value is described and checked; a wrong value is refused by its name."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "charts/medha"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def comments(text: str) -> dict[str, str]:
    """The comment above each key, by the key's path."""
    descriptions: dict[str, str] = {}
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        key = re.match(r"( *)([A-Za-z]+):", line)
        if line.strip().startswith("#"):
            comment.append(line.strip().removeprefix("#").strip())
        elif key:
            path = [*path[: len(key[1]) // 2], key[2]]
            descriptions[".".join(path)] = " ".join(comment)
            comment = []
        else:
            comment = []
    return descriptions


def described(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every value of the schema, by its path."""
    for name, part in schema["properties"].items():
        where = f"{path}.{name}".lstrip(".")
        if "properties" in part and name != "resources":
            yield from described(part, where)
        else:
            yield where, part


def at(path: str) -> Any:
    value = VALUES
    for name in path.split("."):
        value = value[name]
    return value


COMMENTS = comments((CHART / "values.yaml").read_text())
DESCRIBED = {path: schema for path, schema in described(SCHEMA) if path != "global"}


@pytest.mark.parametrize("path", DESCRIBED)
def test_a_value_is_described_in_the_same_words_in_both_files(path: str) -> None:
    assert DESCRIBED[path]["description"] == COMMENTS[path] != ""
    at(path)


def test_the_schema_has_every_value_and_no_other() -> None:
    def leaves(values: dict[str, Any], path: str) -> Iterator[str]:
        for name, value in values.items():
            where = f"{path}.{name}".lstrip(".")
            if where in DESCRIBED or not isinstance(value, dict):
                yield where
            else:
                yield from leaves(value, where)

    assert sorted(leaves(VALUES, "")) == sorted(DESCRIBED)
    assert len(DESCRIBED) > 55


def test_every_value_is_used_by_a_template() -> None:
    text = "".join(path.read_text() for path in (CHART / "templates").rglob("*.*"))
    unused = [path for path in DESCRIBED if not re.search(rf"\.{path.split('.')[-1]}\b", text)]
    assert unused == []


WRONG = [
    ("operator.replicas", 3, "/operator/replicas"),
    ("operator.replicas", "1", "/operator/replicas"),
    ("operator.namespaces", ["a", "a"], "/operator/namespaces"),
    ("operator.namespaces", ["A"], "/operator/namespaces/0"),
    ("operator.leaseSeconds", 1, "/operator/leaseSeconds"),
    ("operator.logLevel", "loud", "/operator/logLevel"),
    ("operator.resources", {"limit": {}}, "/operator/resources"),
    ("router.service.type", "clusterip", "/router/service/type"),
    ("router.service.port", 0, "/router/service/port"),
    ("router.config.maxQueue", 0, "/router/config/maxQueue"),
    ("router.config.maxQueues", 7, "/router/config"),
    ("router.terminationGraceSeconds", -1, "/router/terminationGraceSeconds"),
    ("image.pullPolicy", "Sometimes", "/image/pullPolicy"),
    ("image.tag", "", "/image/tag"),
    ("image.registry", "https://r.example", "/image/registry"),
    ("networkPolicy.apiServerPorts", [], "/networkPolicy/apiServerPorts"),
    ("monitoring.interval", "15", "/monitoring/interval"),
    ("zebra", 1, "zebra"),
]


@pytest.mark.parametrize("path, value, named", WRONG, ids=[f"{p}={v!r}" for p, v, _ in WRONG])
def test_a_wrong_value_is_refused_by_its_name(
    path: str, value: object, named: str, run_helm: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    setting = f"--set-json={path}={json.dumps(value)}"
    done = run_helm("template", "medha", "--kube-version=1.36.0", setting)
    assert done.returncode != 0
    assert named in done.stderr
