"""Hostile and mistaken documents: refused by the server, or reported in a condition.

Each is one field of a good document, replaced. What the server lets through to the operator stands
in the condition Ready, with Stalled, within 40 s, and starts no pod.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tests.api.fleet import Fleet, Operator, until

from medha.spec import API_VERSION

Start = Callable[..., Operator]

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("crd")]

TOLD_WITHIN_S = 40.0
PATH = f"/apis/{API_VERSION}/namespaces/default/medhareplicas"
JSON = {"Content-Type": "application/json"}
GOOD: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "MedhaReplica",
    "metadata": {"name": "hostile"},
    "spec": {
        "model": {"name": "m", "source": {"hostPath": {"path": "/m"}}, "maxContextTokens": 4096},
        "device": {"kind": "Cuda"},
        "drainTimeout": "1s",
    },
}
LONG = "x" * 600

REFUSED: dict[str, list[Any]] = {
    "apiVersion": ["v1", "medha.dev/v9", None, 7],
    "kind": ["Pod", "medhareplica", None],
    "metadata": [None, "x", []],
    "metadata.name": ["a" * 41, "a" * 300, "A", "a.b", "-a", "", "ü", "a_b", 7, None, "a\n", "a/b"],
    "metadata.generateName": ["x" * 40 + "-"],
    "metadata.labels": [{"a b": "c"}, {"a": "x" * 64}, {"a": "ü"}, {"a": 7}, "x"],
    "metadata.labels.kueue.x-k8s.io/queue-name": ["not a queue!"],
    "metadata.annotations": [{"a b": "c"}, {"a": "x" * 300_000}],
    "metadata.finalizers": [["not a finalizer"]],
    "metadata.ownerReferences": [[{"name": "x"}]],
    "spec": [None, [], "x", {}, 7],
    "spec.foo": [1],
    "spec.role": ["Prefill", 7],
    "spec.replicas": [-1, 1001, 1e30, 1.5, "3", True, 2**63, [], {}],
    "spec.drainTimeout": ["0s", "1 h", "-5m", "999999h999999h999999h", "1h\n", "١s", "ever", 5],
    "spec.parallelism": [
        {"tp": 0},
        {"tp": 65},
        {"tp": "8"},
        {"tpp": 8},
        {"spp": -5},
        {"kvp": {"min": 5}},
        {"kvp": {"min": 0}},
        {"kvp": {"tokensPerGroup": 1}},
        {"kvp": {"tokensPerGroup": 1024, "max": 2}},
        [],
        "8",
    ],
    "spec.engine": [
        {"kvMemory": "999999999999Ti"},
        {"kvMemory": "lots"},
        {"kvMemory": -1},
        {"kvMemory": "1e9"},
        {"kvMemory": "1Ki"},
        {"kvPages": 1},
        {"pageTokens": 48},
        {"threadsPerRank": 10**9},
    ],
    "spec.model": [{"name": "m"}, "llama", []],
    "spec.model.name": ["", "a b", "\u202ellama", "x" * 201, 7, "a\u0000", "/a", "ü"],
    "spec.model.maxContextTokens": [0, -1, 10**18, "4096", 0.5],
    "spec.model.dtype": ["int4", 16],
    "spec.model.source": [
        {},
        {"hostPath": {}},
        {"hostPath": {"path": ""}},
        {"hostPath": {"path": "/m\u0000x"}},
        {"hostPath": {"path": "/m"}, "uri": "https://x/y"},
        {"uri": "not an address"},
        {"uri": "file:///etc/passwd"},
        {"uri": "ftp://x/y"},
        {"uri": "s3://"},
        {"uri": "https://"},
        {"uri": "https://x y/z"},
        {"pvc": {"claimName": "UPPER"}},
        {"pvc": {"claimName": "a b"}},
        {"pvc": {"claimName": "x" * 300}},
        {"image": {"reference": "not an image !!"}},
        {"image": {"reference": " lead"}},
    ],
    "spec.device": [
        {"kind": "Tpu"},
        {"kind": "Cpu", "resource": "a.io/x"},
        {"resource": "nvidia.com/gpu!"},
        {"resource": "cpu"},
        {"resource": "a/b/c"},
        {"resource": "£/gpu"},
    ],
    "spec.slo": [
        {"default": {"tpot": "0s"}},
        {"default": {"ttft": {"multiplier": "0.5"}}},
        {"default": {"ttft": {"multiplier": 1.5}}},
        {"default": {"ttft": {"multiplier": "NaN"}}},
        {"classes": [{"name": "a"}, {"name": "a"}]},
        {"classes": [{"name": "default"}]},
        {"classes": [{"name": name, "reservedPercent": 60} for name in "ab"]},
        {"classes": [{"name": f"c{number}"} for number in range(17)]},
        {"classes": [{"name": "£"}]},
        {"classes": [{}]},
        {"classes": "gold"},
    ],
    "spec.scheduling": [
        {"batchBudget": {"min": "1s"}},
        {"policy": "lars"},
        {"maxRunning": 0},
        {"relegatedPercent": 41},
        {"longTokens": -1},
        {"growthTimeout": "0s"},
        {"prefixCache": True},
    ],
    "spec.placement": [
        {"topologyLevels": [""]},
        {"topologyLevels": ["not a label!"]},
        {"topologyLevels": ["/"]},
        {"topologyLevels": ["a", "a"]},
        {"topologyLevels": ["zone"], "packLevel": "rack"},
        {"topologyLevels": "zone"},
        {"nodeSelector": {"a": "x" * 64}},
        {"nodeSelector": {f"l{number}": "" for number in range(33)}},
        {"tolerations": ["gpu"]},
    ],
    "spec.autoscaling": [
        {"minReplicas": 3},
        {"minReplicas": -1, "maxReplicas": 2},
        {"maxReplicas": 0},
        {"maxReplicas": 10**9},
        {"mode": "Magic"},
        {"targetSlackP10": "-1"},
        {"targetSlackP10": "lots"},
        {"targetSlackP10": 2.5},
        {"scaleDownStabilization": "never"},
    ],
    "spec.template.image": ["", 7, "not an image !!", " lead", LONG],
    "spec.template.schedulerName": ["no such scheduler", "No_Such", ""],
    "spec.template.priorityClassName": ["Not A Name", LONG],
    "spec.template.labels": [{"a": "x" * 64}, {"a": 7}, ["a"]],
    "spec.template.annotations": [{"a": 5}, {"a": "x" * 5000}],
    "spec.template.env": [
        [{"value": "x"}],
        [{"name": "A"}, {"name": "A"}],
        [{"name": f"A{number}"} for number in range(65)],
        ["A=b"],
        {"A": "b"},
    ],
    "spec.template.volumes": [[{"emptyDir": {}}], ["x"], [{"name": "a"}, {"name": "a"}]],
    "spec.template.volumeMounts": [[{"name": "model"}], [{"name": "a", "mountPath": "/x"}] * 2],
    "spec.template.resourceClaims": [[{"resourceClaimName": "x"}]],
    "spec.template.resources": [[], "1Gi"],
}
HUGE = {"spp": 64, "kvp": {"min": 64, "max": 64}}

TOLD: list[tuple[str, Any, str]] = [
    ("spec.model.source", {"hostPath": {"path": "models"}}, "must be absolute in a cluster"),
    ("spec.model.source", {"hostPath": {"path": "/m/../../etc"}}, "must not contain '..'"),
    ("spec.model.source", {"pvc": {"claimName": "c", "path": "../../etc"}}, "remove the .."),
    ("spec.model.source", {"image": {"reference": "r/x:1", "path": "../.."}}, "remove the .."),
    ("spec.device.resource", "requests.nvidia.com/gpu", "extended resource name"),
    ("spec.device.resource", "x" * 260 + ".io/g", "prefix part"),
    ("spec.device.resource", "a..b/c", "prefix part"),
    ("spec.placement.nodeSelector", {"a b": "c"}, "spec.nodeSelector"),
    ("spec.placement.nodeSelector", {"a": "b c"}, "spec.nodeSelector"),
    ("spec.placement.tolerations", [{"key": "a", "operator": "Is"}], "tolerations[0].operator"),
    ("spec.placement.tolerations", [{"effect": 7}], "tolerations.effect"),
    ("spec.placement.tolerations", [{"key": "a", "efect": "NoExecute"}], 'unknown field "spec.tol'),
    ("spec.placement.tolerations", [{"key": "a", "tolerationSeconds": "x"}], "tolerationSeconds"),
    ("spec.template.resources", {"limits": {"memory": "lots"}}, "limits.memory is lots"),
    ("spec.template.resources", {"limits": {"memory": {"a": 1}}}, "limits.memory is"),
    ("spec.template.resources", {"limits": {"cpu": "-1"}}, "limits.cpu is -1"),
    ("spec.template.resources", {"limits": {"cpu": "1_000"}}, "limits.cpu is 1_000"),
    ("spec.template.resources", {"limits": {"cpu": "nan"}}, "limits.cpu is nan"),
    ("spec.template.resources", {"limits": {"cpu": "inf"}}, "limits.cpu is inf"),
    ("spec.template.resources", {"limits": {"cpu": "١"}}, "limits.cpu is ١"),
    ("spec.template.resources", {"limits": {"memory": "9" * 40}}, "must be at most 1Pi"),
    ("spec.template.resources", {"limits": {"memory": "1e400"}}, "must be at most 1Pi"),
    ("spec.template.resources", {"limits": {"cpu": True}}, "limits.cpu is True"),
    ("spec.template.resources", {"limits": []}, "limits is []"),
    ("spec.template.resources", {"limits": {"": "1"}}, "must be non-empty"),
    ("spec.template.resources", {"limits": {"a b": "1"}}, "limits[a b]"),
    ("spec.template.resources", {"limits": {"example.com/x": "0.5"}}, "must be an integer"),
    ("spec.template.resources", {"limits": {"pods": "1"}}, "limits[pods]"),
    ("spec.template.resources", {"limits": {"cpu": "1"}, "requests": {"cpu": "8"}}, "cpu limit"),
    ("spec.template.resources", {"requests": {"example.com/x": "1"}}, "Limit must be set"),
    ("spec.template.resources", {"claims": [{"name": "none"}]}, "must be a name in"),
    ("spec.template.resources", {"limts": {}}, "must be requests, limits or claims"),
    ("spec.template.labels", {"medha.dev/replica": "other"}, "must not begin with medha.dev/"),
    ("spec.template.labels", {"medha.dev/role": "leader"}, "must not begin with medha.dev/"),
    ("spec.template.labels", {"medha.dev/spec-hash": "x"}, "must not begin with medha.dev/"),
    ("spec.template.labels", {"app.kubernetes.io/managed-by": "me"}, "finds its pods"),
    ("spec.template.labels", {"a b": "c"}, "metadata.labels"),
    ("spec.template.labels", {"a": "b c"}, "metadata.labels"),
    ("spec.template.labels", {"a": "£"}, "metadata.labels"),
    ("spec.template.labels", {"": "x"}, "metadata.labels"),
    ("spec.template.labels", {"x" * 70: "a"}, "metadata.labels"),
    ("spec.template.annotations", {"a b": "c"}, "metadata.annotations"),
    ("spec.template.annotations", {"": "x"}, "metadata.annotations"),
    ("spec.template.annotations", {"medha.dev/node": "x"}, "must not begin with medha.dev/"),
    ("spec.template.env", [{"name": "a=b", "value": "x"}], "env["),
    ("spec.template.env", [{"name": "", "value": "x"}], "env[0].name is missing"),
    ("spec.template.env", [{"name": "MEDHA_GENERATION", "value": "9"}], "operator's own"),
    ("spec.template.env", [{"name": "A", "value": 5}], "env.value of type string"),
    ("spec.template.env", [{"name": "A", "value": "\u0000"}], "text with a NUL"),
    ("spec.template.env", [{"name": "A", "valu": "x"}], 'unknown field "spec.containers[0].env'),
    ("spec.template.env", [{"name": "A", "value": "x", "valueFrom": {}}], "valueFrom"),
    (
        "spec.template.env",
        [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "no.such"}}}],
        "fieldPath",
    ),
    ("spec.template.volumes", [{"name": "model", "emptyDir": {}}], "operator's own"),
    ("spec.template.volumes", [{"name": "config", "emptyDir": {}}], "operator's own"),
    ("spec.template.volumes", [{"name": "A B", "emptyDir": {}}], "].name"),
    ("spec.template.volumes", [{"name": "x", "persistentVolume": {}}], "unknown field"),
    ("spec.template.volumes", [{"name": "x", "configMap": {}}], "configMap.name"),
    ("spec.template.volumes", [{"name": "x", "hostPath": {"path": "/a/../b"}}], "'..'"),
    (
        "spec.template.volumes",
        [{"name": "x", "emptyDir": {}, "hostPath": {"path": "/a"}}],
        "more than 1 volume",
    ),
    ("spec.template.volumeMounts", [{"name": "none", "mountPath": "/x"}], 'Not found: "none"'),
    ("spec.template.volumeMounts", [{"name": "model", "mountPath": "/models"}], "must be unique"),
    ("spec.template.volumeMounts", [{"mountPath": "/x"}], "].name"),
    (
        "spec.template.volumeMounts",
        [{"name": "model", "mountPath": "/x", "subPath": "../.."}],
        "subPath",
    ),
    ("spec.template.resourceClaims", [{"name": "a"}], "must specify one of"),
    ("spec.template.resourceClaims", [{"name": "A B", "resourceClaimName": "x"}], "].name"),
    ("spec.template.priorityClassName", "no-such-class", "no PriorityClass"),
]


def put(path: str, value: Any, name: str = "hostile") -> dict[str, Any]:
    """Copy the good document and change the field at a dotted path."""
    document = copy.deepcopy(GOOD)
    document["metadata"]["name"] = name
    at: Any = document
    names = path.split(".")
    if path.startswith("metadata.labels."):  # a label's name has dots
        names = ["metadata", "labels", path.removeprefix("metadata.labels.")]
    for part in names[:-1]:
        at = at.setdefault(part, {})
    at[names[-1]] = value
    if path == "metadata.generateName":
        del document["metadata"]["name"]
    return document


def refused() -> Iterator[tuple[str, Any]]:
    for path, values in REFUSED.items():
        yield from ((path, value) for value in values)
    for key in ("replicas", "autoscaling"):
        count = 3 if key == "replicas" else {"maxReplicas": 3}
        yield "spec", {**GOOD["spec"], "parallelism": HUGE, key: count}


CASES = [*refused()]


@pytest.mark.parametrize("path, value", CASES, ids=[f"{p}={v!r:.30}" for p, v in CASES])
def test_a_document_with_a_hostile_field_is_refused(
    path: str, value: Any, api: httpx.Client
) -> None:
    body = json.dumps(put(path, value))
    answer = api.post(f"{PATH}?fieldValidation=Strict&dryRun=All", content=body, headers=JSON)
    assert answer.status_code in (400, 422), answer.text
    if path.startswith("spec."):  # else the server's decoder names Go's fields, or none
        section, message = path.split(".")[1], answer.json()["message"]
        assert section in message or "spec.model.maxContextTokens" in message


BODIES: dict[str, bytes] = {
    "no JSON": b"{",
    "a list": b"[]",
    "nothing": b"",
    "text": b'"MedhaReplica"',
    "deep nesting": b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "broken UTF-8": json.dumps(GOOD).encode().replace(b"hostile", b"host\xffile"),
    "a key twice": json.dumps(GOOD).encode().replace(b'"spec":', b'"spec": {}, "spec":'),
    "four megabytes": json.dumps(put("spec.model.source.uri", "x" * (4 << 20))).encode(),
}


@pytest.mark.parametrize("body", BODIES)
def test_a_body_that_is_no_document_is_refused(body: str, api: httpx.Client) -> None:
    answer = api.post(
        f"{PATH}?fieldValidation=Strict&dryRun=All", content=BODIES[body], headers=JSON
    )
    assert answer.status_code in (400, 413, 422), answer.text


def test_an_unknown_field_vanishes_where_the_client_does_not_ask_for_strictness(
    api: httpx.Client,
) -> None:
    body = put("spec.parallelism", {"tpp": 8})
    answer = api.post(f"{PATH}?fieldValidation=Ignore&dryRun=All", json=body)
    assert answer.status_code == 201
    assert answer.json()["spec"]["parallelism"] == {"tp": 1, "spp": 1, "kvp": {"min": 1, "max": 1}}


def test_scale_refuses_more_pods_than_the_spec_may_ask_for(fleet: Fleet, api: httpx.Client) -> None:
    fleet.create("large", parallelism=HUGE, replicas=0)
    headers = {"Content-Type": "application/merge-patch+json"}
    answer = api.patch(
        fleet.path("large", "scale"), json={"spec": {"replicas": 3}}, headers=headers
    )
    assert answer.status_code == 422 and "at most 10000 pods" in answer.text


def test_what_only_the_operator_can_refuse_is_told_and_starts_no_pod(
    fleet: Fleet, start_operator: Start, api: httpx.Client
) -> None:
    operator = start_operator()
    until(operator.leads)
    waiting = {}
    for number, (path, value, sentence) in enumerate(TOLD):
        body = put(path, value, f"h{number}")
        answer = api.post(f"{fleet.path()}?fieldValidation=Strict", json=body)
        assert answer.status_code == 201, (path, value, answer.text)
        waiting[f"h{number}"] = sentence
    fleet.create("good")

    def tell() -> bool:
        for item in api.get(fleet.path()).json()["items"]:
            conditions = item.get("status", {}).get("conditions", ())
            by_type = {condition["type"]: condition for condition in conditions}
            ready, stalled = by_type.get("Ready", {}), by_type.get("Stalled", {})
            sentence = waiting.get(item["metadata"]["name"])
            if sentence is not None and stalled.get("status") == "True":
                assert (ready["status"], ready["reason"]) == ("False", "SpecRefused")
                assert sentence in ready["message"], ready["message"]
                assert stalled["message"] == ready["message"]
                del waiting[item["metadata"]["name"]]
        return not waiting

    until(tell, f"not told of {waiting}", within_s=TOLD_WITHIN_S)
    assert {name.partition("-")[0] for name in fleet.pods()} <= {"good"}
    until(operator.alive)
    tracebacks = [line for line in operator.log.read_text().splitlines() if "Traceback" in line]
    assert tracebacks == []
    for number in range(len(TOLD)):
        api.delete(fleet.path(f"h{number}")).raise_for_status()
    fleet.played(lambda: fleet.is_ready("good"))  # it was served through all of it


def test_labels_and_a_status_of_somebody_else_change_nothing(
    fleet: Fleet, start_operator: Start, api: httpx.Client
) -> None:
    start_operator()
    body = put("metadata.labels", {"medha.dev/replica": "other", "medha.dev/role": "leader"}, "a")
    body["spec"]["placement"] = {"nodeSelector": fleet.selector}
    body["status"] = {"replicas": 9, "conditions": [{"type": "Ready", "status": "True"}]}
    answer = api.post(fleet.path(), json=body)
    assert answer.status_code == 201
    assert answer.json()["status"] == {"observedGeneration": -1}
    fleet.played(lambda: fleet.is_ready("a"))
    assert {pod["metadata"]["labels"]["medha.dev/replica"] for pod in fleet.pods().values()} == {
        "a"
    }


def test_there_are_as_many_hostile_documents_as_promised() -> None:
    assert len(CASES) + len(TOLD) + len(BODIES) > 250
