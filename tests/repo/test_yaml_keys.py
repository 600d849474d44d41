"""No YAML file sets a key twice: strict API servers, kubectl and kustomize refuse such files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml


def repeated(text: str) -> list[str]:
    """Keys that stand twice in one mapping, with the line of the mapping."""
    nodes: list[yaml.Node | None] = list(yaml.compose_all(text, yaml.SafeLoader))
    found_keys: list[str] = []
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            twice = sorted({key for key in keys if keys.count(key) > 1} - {"<<"})
            found_keys += [f"{key}:{node.start_mark.line + 1}" for key in twice]
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
    return found_keys


def is_template(text: str) -> bool:
    return "{{" in text and "}}" in text


def test_no_key_stands_twice(house: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.yaml", "*.yml"],
        cwd=house,
        capture_output=True,
        text=True,
        check=True,
    )
    texts = {name: (house / name).read_text() for name in listed.stdout.split()}
    plain = {name: text for name, text in texts.items() if not is_template(text)}
    assert "crds/medha.dev_medhareplicas.yaml" in plain
    assert {name: repeated(text) for name, text in plain.items() if repeated(text)} == {}


def test_a_repeated_key_is_found() -> None:
    assert repeated("a: {b: 1, c: [{b: 2}], b: 3}") == ["b:1"]
