"""A real API server refuses invalid specs, fills in defaults, scales and explains."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml

from medha.spec import API_VERSION, MedhaReplicaSpec, parse

pytestmark = pytest.mark.usefixtures("crd")

HOUSE = Path(__file__).resolve().parents[2]
TABLE = yaml.safe_load((HOUSE / "tests/spec/refused.yaml").read_text())
CRD = yaml.safe_load((HOUSE / "crds/medha.dev_medhareplicas.yaml").read_text())
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]

# Lists are empty by default, so they have no line in the resource below.
FULL: dict[str, Any] = {
    "adapters": [{"name": "legal", "source": {"hostPath": {"path": "/a"}}}],
    "slo.classes": [{"name": "a", "ttft": {}, "tpot": "1s", "whenInfeasible": "Refuse"}],
    "autoscaling": {"maxReplicas": 4},
    "model.source.hostPath": {"path": "/m"},
}


def put(path: str, value: Any, document: Any = TABLE["valid"]) -> dict[str, Any]:
    """Copy `document` and change the field at a dotted path."""
    changed: dict[str, Any] = copy.deepcopy(document)
    at: Any = changed
    *parents, last = path.split(".")
    for name in parents:
        at = at[int(name)] if name.isdigit() else at.setdefault(name, {})
    at[last] = value
    return changed


def post(api: httpx.Client, document: dict[str, Any], *, dry: bool = True) -> httpx.Response:
    path = f"/apis/{API_VERSION}/namespaces/default/medhareplicas?fieldValidation=Strict"
    return api.post(path + ("&dryRun=All" if dry else ""), json=document)


def leaves(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every field with a plain value, by a path that `put` accepts."""
    if "properties" in schema:
        for name, part in schema["properties"].items():
            yield from leaves(part, f"{path}.{name}" if path else name)
    elif schema.get("type") == "array" and "properties" in schema["items"]:
        if not schema["items"].get("x-kubernetes-preserve-unknown-fields"):
            yield from leaves(schema["items"], f"{path}.0")
    elif schema.get("type") in ("string", "integer", None):
        yield path, schema


LEAVES = dict(leaves(SCHEMA, ""))


def wrong(schema: dict[str, Any]) -> Iterator[Any]:
    """Values of a wrong type, and just outside the bounds."""
    yield from ([], {"no": "such"}, True, 2.5)
    if schema.get("type") != "integer":
        yield "x" * (schema.get("maxLength", 63) + 1)
    if "minimum" in schema:
        yield from (schema["minimum"] - 1, schema["maximum"] + 1)
    if schema.get("minLength"):
        yield ""
    if "pattern" in schema:
        yield "£ wrong\0"
    if "enum" in schema:
        yield "nonsense" if schema["type"] == "string" else 3


@pytest.mark.parametrize("path", LEAVES)
def test_each_invalid_field_is_refused_by_its_name(path: str, api: httpx.Client) -> None:
    base = TABLE["valid"]
    for start, value in FULL.items():
        if path.startswith(start):
            base = put(f"spec.{start}", value)
    assert post(api, base).status_code == 201
    for value in wrong(LEAVES[path]):
        reply = post(api, put(f"spec.{path}", value, base))
        message = reply.json()["message"]
        name = "spec." + path.replace(".0.", "[0].")
        assert reply.status_code in (400, 422), (value, message)
        assert name in message, (value, message)


def test_every_field_of_the_schema_was_tried() -> None:
    assert len(LEAVES) > 60
    assert {"parallelism.kvp.max", "slo.classes.0.ttft.floor", "drainTimeout"} < set(LEAVES)


@pytest.mark.parametrize(
    "case", TABLE["cases"], ids=[f"{c['rule']}:{n}" for n, c in enumerate(TABLE["cases"])]
)
def test_a_broken_rule_between_fields_is_refused_in_medhas_words(
    case: dict[str, Any], api: httpx.Client
) -> None:
    document = TABLE["valid"]
    for path, value in case["put"].items():
        document = put(path, value, document)
    reply = post(api, document)
    assert reply.status_code == 422
    causes = reply.json()["details"]["causes"]
    messages = [f"{cause.get('field', '')} {cause['message']}" for cause in causes]
    field = case.get("field", case["rule"]).replace("[]", "[0]")
    assert any(
        field in message and case.get("api", case["says"]) in message for message in messages
    ), messages
    assert not any("rule evaluation" in message for message in messages)


def test_an_unknown_field_is_refused_by_its_name(api: httpx.Client) -> None:
    reply = post(api, put("spec.parallelism.tpp", 8))
    assert reply.status_code == 400
    assert 'unknown field "spec.parallelism.tpp"' in reply.json()["message"]


@pytest.mark.parametrize("name", ["a" * 41, "a.b", "Tiny", "-tiny"])
def test_a_name_that_is_invalid_for_pods_is_refused(name: str, api: httpx.Client) -> None:
    reply = post(api, put("metadata.name", name))
    assert reply.status_code == 422
    assert "metadata.name" in reply.json()["message"]


def test_defaults_are_those_of_medha(api: httpx.Client) -> None:
    reply = post(api, TABLE["valid"])
    assert reply.status_code == 201, reply.text
    stored = reply.json()
    assert parse(stored).spec == parse(TABLE["valid"]).spec
    filled = msgspec.to_builtins(parse(stored).spec)
    assert without_none(filled) == stored["spec"]
    assert set(stored["spec"]) > {"slo", "engine", "drainTimeout"}


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list | tuple) else value


def test_a_strict_server_accepts_the_kind_itself(api: httpx.Client) -> None:
    """A document that sets a key twice is refused."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    name = CRD["metadata"]["name"]
    headers = {"Content-Type": "application/apply-patch+yaml"}
    answer = api.patch(
        f"{path}/{name}?fieldManager=test&force=true&fieldValidation=Strict&dryRun=All",
        content=(HOUSE / "crds/medha.dev_medhareplicas.yaml").read_bytes(),
        headers=headers,
    )
    assert answer.status_code == 200, answer.text


def test_every_example_is_accepted(api: httpx.Client) -> None:
    files = sorted((HOUSE / "examples").rglob("*.yaml"))
    documents = [document for file in files for document in yaml.safe_load_all(file.read_text())]
    ours = [document for document in documents if document["apiVersion"] == API_VERSION]
    assert len(ours) >= 3
    for document in ours:
        assert post(api, document).status_code == 201, document


def test_scale_reads_and_writes_the_replicas_and_shows_the_selector(
    api: httpx.Client, run_kubectl: Any
) -> None:
    reply = post(api, put("metadata.name", "scaled"), dry=False)
    assert reply.status_code == 201
    path = f"/apis/{API_VERSION}/namespaces/default/medhareplicas/scaled"
    status = reply.json() | {"status": {"replicas": 1, "selector": "medha.dev/role=leader"}}
    assert api.put(f"{path}/status", json=status).status_code == 200
    scale = api.get(f"{path}/scale").json()
    assert scale["spec"] == {"replicas": 1}
    assert scale["status"] == {"replicas": 1, "selector": "medha.dev/role=leader"}
    scaled = run_kubectl("scale", "mr", "scaled", "--replicas=3")
    assert scaled.returncode == 0, scaled.stderr
    assert api.get(path).json()["spec"]["replicas"] == 3
    refused = run_kubectl("scale", "mr", "scaled", "--replicas=1001")
    assert "less than or equal to 1000" in refused.stderr
    assert api.delete(path).status_code == 200


def test_people_see_the_columns_and_read_the_fields(api: httpx.Client, run_kubectl: Any) -> None:
    reply = post(api, put("metadata.name", "shown"), dry=False)
    path = f"/apis/{API_VERSION}/namespaces/default/medhareplicas/shown"
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Serving",
        "message": "all serve",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = {
        "replicas": 2,
        "kvpGroups": 3,
        "conditions": [ready],
        "slo": {"attainmentPercent": 99, "slackP10": "0.31"},
    }
    assert api.put(f"{path}/status", json=reply.json() | {"status": status}).status_code == 200
    header, row = run_kubectl("get", "medha", "shown").stdout.splitlines()
    names = ["NAME", "READY", "REPLICAS", "TP", "SPP", "KVP", "ATTAINMENT", "SLACK", "AGE"]
    assert header.split() == names
    assert row.split()[:-1] == ["shown", "True", "2", "1", "1", "3", "99", "0.31"]
    explained = run_kubectl("explain", "mr.spec.parallelism").stdout
    assert "Tensor parallelism: devices per pod, which share each layer" in " ".join(
        explained.split()
    )
    assert api.delete(path).status_code == 200


def test_a_status_sent_with_the_spec_is_dropped(api: httpx.Client) -> None:
    reply = post(api, put("status.replicas", 7))
    assert reply.status_code == 201
    assert json.loads(reply.text)["status"] == {"observedGeneration": -1}


def test_the_default_spec_of_medha_needs_only_a_model() -> None:
    fields = msgspec.structs.fields(MedhaReplicaSpec)
    needed = [field.encode_name for field in fields if field.required]
    assert needed == SCHEMA["required"] == ["model"]
