"""A MedhaReplica is parsed, defaulted and checked; each error is one sentence."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from medha.errors import SpecError, UserErrors
from medha.request import Slo, SloClass
from medha.spec import (
    API_VERSIONS,
    MedhaReplicaSpec,
    parse,
    parse_all,
    seconds,
    to_bytes,
    to_number,
)
from medha.topology import Topology

FULL = """
apiVersion: medha.dev/v1beta1
kind: MedhaReplica
metadata: {name: llama-70b, labels: {team: serving}}
spec:
  replicas: 2
  role: Unified
  model:
    name: llama-3-70b
    source: {pvc: {claimName: models, path: llama-3-70b}}
    maxContextTokens: 2000000
    dtype: bfloat16
    kvCacheDtype: auto
  adapters: [{name: legal, source: {pvc: {claimName: models, path: legal}}}]
  device: {kind: Cuda, resource: nvidia.com/gpu}
  parallelism:
    tp: 8
    spp: 4
    kvp: {min: 1, max: 4, tokensPerGroup: 1048576}
  slo:
    default: {ttft: {floor: 500ms, multiplier: "1.5"}, tpot: 30ms}
    classes:
    - {name: interactive, weight: 4, reservedPercent: 30, ttft: {floor: 300ms, multiplier: "1.5"}, tpot: 20ms}
    - {name: batch, weight: 1, ttft: {floor: 60s, multiplier: "5"}, tpot: 100ms, whenInfeasible: Relegate}
  scheduling: {policy: LARS, batchBudget: {mode: Slack, min: 10ms, max: 100ms, fixed: 50ms, tokens: 2048}, maxYieldPercent: 40,
    normaliser: Work, relegatedPercent: 10, maxBucketLossPercent: 40, promises: Commit, longPrefillThresholdTokens: 512, longTokens: 8192, maxRunning: 256,
    prefixCache: Enabled, rebalance: Enabled, growthTimeout: 2m, releaseCooldown: 30s}
  engine: {pageTokens: 64, kvMemory: 1Gi, kvPages: 1000, threadsPerRank: 1, arithmetic: Fast, packedWeights: Disabled, checkedTransfers: Enabled, standbyRanks: Enabled}
  network: {transport: Rdma, devices: ["mlx5_0:1"], gpuDirect: Enabled, resources: {rdma/hca: 1}, attachments: [fabric/rail-0], ipcLock: Enabled}
  placement:
    topologyLevels: [topology.kubernetes.io/zone, topology.kubernetes.io/rack, nvidia.com/gpu.clique, kubernetes.io/hostname]
    packLevel: topology.kubernetes.io/rack
    nodeSelector: {pool: gpu}
    tolerations: [{key: gpu, operator: Exists}]
  autoscaling: {mode: Builtin, minReplicas: 1, maxReplicas: 8, targetSlackP10: "0.2", scaleDownStabilization: 10m}
  template: {image: "medha-worker:1", env: [{name: UCX_TLS, value: all}], resources: {limits: {memory: 1Gi}}, labels: {a: b},
    volumes: [], volumeMounts: [], schedulerName: volcano, priorityClassName: high, annotations: {c: d}}
  drainTimeout: 1h
"""  # noqa: E501
SMALL = {
    "apiVersion": "medha.dev/v1beta1",
    "kind": "MedhaReplica",
    "metadata": {"name": "tiny"},
    "spec": {
        "model": {"name": "tiny", "source": {"hostPath": {"path": "m"}}, "maxContextTokens": 4096}
    },
}


def full() -> dict[str, Any]:
    document = yaml.safe_load(FULL)
    assert isinstance(document, dict)
    return document


def put(document: Any, path: str, value: object) -> Any:
    """`document` with the field at a dotted path changed; a copy."""
    changed = copy.deepcopy(document)
    at = changed
    *parents, last = path.split(".")
    for name in parents:
        at = at[int(name)] if name.isdigit() else at.setdefault(name, {})
    at[int(last) if last.isdigit() else last] = value
    return changed


def refusal(document: object) -> str:
    with pytest.raises(SpecError) as caught:
        parse(document)
    return str(caught.value)


def leaves(kind: inspect.Type, path: str) -> Iterator[tuple[str, inspect.Type]]:
    """Every field below `kind` that holds a plain value, by its path in FULL."""
    match kind:
        case inspect.Metadata():
            inner = kind.type
            plain = isinstance(inner, inspect.StrType | inspect.IntType | inspect.LiteralType)
            yield from [(path, kind)] if plain else leaves(inner, path)
        case inspect.StructType(fields=fields):
            for field in fields:
                yield from leaves(field.type, f"{path}.{field.encode_name}")
        case inspect.UnionType(types=kinds):
            present = [kind for kind in kinds if not isinstance(kind, inspect.NoneType)]
            yield from [(path, kind)] if len(present) > 1 else leaves(present[0], path)
        case inspect.VarTupleType(item_type=item):
            yield from leaves(item, f"{path}.0")
        case inspect.DictType() | inspect.AnyType():
            return
        case _:
            yield path, kind


LEAVES = [
    (path, kind)
    for path, kind in leaves(inspect.type_info(MedhaReplicaSpec), "spec")
    if not re.match(r"spec\.(model|adapters\.0)\.source\.(image|uri|host)", path)
]
TP = "spec.parallelism.tp"
WRONG: list[object] = [[], {"no": "such"}, True, 2.5, "£ no\nsuch", ""]


def beyond(kind: inspect.Type) -> list[object]:
    """Values just outside the bounds of a field, and of a type that is not its own."""
    bare = kind.type if isinstance(kind, inspect.Metadata) else kind
    match bare:
        case inspect.IntType(ge=low, le=high):
            return [*WRONG, (low or 0) - 1, *([high + 1] if high is not None else [])]
        case inspect.StrType(max_length=longest):
            return [*WRONG[:4], "x" * (longest + 1) if longest else 7, 7]
    return [*WRONG, 10**18]


CASES = [(path, value) for path, kind in LEAVES for value in beyond(kind)]


@pytest.mark.parametrize("path, value", CASES, ids=[f"{p}={v!r:.20}" for p, v in CASES])
def test_each_field_wrong_in_turn_is_one_line_with_field_value_expectation_remedy(
    path: str, value: object
) -> None:
    line = refusal(put(full(), path, value))
    field = path.replace(".0.", "[0].").removesuffix(".0") + ("[0]" if path.endswith(".0") else "")
    shown = value if isinstance(value, str) and value.isprintable() and value else repr(value)
    assert "\n" not in line and len(line) < 700
    assert line.startswith(f"{field} is ")
    head, _, rest = line.partition(": must be ")
    assert head.endswith(f" is {shown}"[:60]) or f" is {str(shown)[:70]}" in head
    expected, _, remedy = rest.rpartition("; ")
    assert expected != "" and remedy.split()[0] in {"use", "write", "put", "set", "remove", "leave"}


def test_the_whole_schema_is_covered_by_the_wrong_values() -> None:
    paths = {path for path, _ in LEAVES}
    assert {
        "spec.parallelism.kvp.max",
        "spec.slo.classes.0.ttft.floor",
        "spec.drainTimeout",
    } < paths
    assert len(paths) > 55


@pytest.mark.parametrize("version", API_VERSIONS)
def test_a_document_means_the_same_in_every_version(version: str) -> None:
    replica = parse(put(full(), "apiVersion", version))
    assert replica == msgspec.structs.replace(parse(full()), api_version=version)


def test_every_field_of_the_documented_example_is_understood() -> None:
    replica = parse(full())
    spec = replica.spec
    assert (replica.name, spec.replicas, spec.model.name) == ("llama-70b", 2, "llama-3-70b")
    assert spec.topology == Topology(tp=8, spp=4, kvp_min=1, kvp_max=4, tokens_per_group=1048576)
    assert spec.classes == (
        SloClass(),
        SloClass(
            name="interactive",
            weight=4,
            reserved=0.3,
            slo=Slo(ttft_floor_s=0.3, ttft_multiplier=1.5, tpot_s=0.02),
        ),
        SloClass(
            name="batch",
            slo=Slo(ttft_floor_s=60, ttft_multiplier=5, tpot_s=0.1),
            when_infeasible="relegate",
        ),
    )
    assert spec.device.resource_name == "nvidia.com/gpu"


def test_what_is_left_out_takes_its_default() -> None:
    spec = parse(SMALL).spec
    assert (spec.replicas, spec.parallelism.tp, spec.scheduling.policy) == (1, 1, "LARS")
    assert spec.classes == (SloClass(),)
    assert spec.engine.kv_bytes == 1 << 30
    assert spec.autoscaling is None and spec.drain_timeout == "1h"


def test_a_null_field_counts_as_absent() -> None:
    assert parse(put(SMALL, "spec.parallelism", None)) == parse(SMALL)
    assert "spec.model.name is missing" in refusal(put(SMALL, "spec.model.name", None))


def test_a_class_takes_from_the_default_what_it_leaves_out() -> None:
    document = put(
        SMALL,
        "spec.slo",
        {
            "default": {"ttft": {"floor": "2s"}, "tpot": "1s", "whenInfeasible": "Relegate"},
            "classes": [{"name": "a"}, {"name": "b", "tpot": "50ms"}],
        },
    )
    default, a, b = parse(document).spec.classes
    assert msgspec.structs.replace(a, name="default") == default
    assert (b.slo.tpot_s, b.slo.ttft_floor_s, b.when_infeasible) == (0.05, 2.0, "relegate")


SENTENCES = [
    (TP, 0, "spec.parallelism.tp is 0: must be a whole number from 1 to 64; use 1"),
    (
        "spec.scheduling.relegatedPercent",
        50,
        "spec.scheduling.relegatedPercent is 50: must be a whole number from 0 to 40; use 40",
    ),
    (
        TP,
        "8",
        "spec.parallelism.tp is 8: must be a whole number from 1 to 64; use 8 without quotes",
    ),
    (
        "spec.parallelism.tpp",
        8,
        "spec.parallelism.tpp is not a field: spec.parallelism has kvp, spp, tp; did you mean tp?",
    ),
    ("spec.model.maxContextToken", 8, "did you mean maxContextTokens?"),
    ("spec.zebra", 1, "; remove it"),
    (
        "spec.scheduling.policy",
        "lars",
        "spec.scheduling.policy is lars: must be one of EDF, FCFS, LARS, LARSPaper, "
        "LARSPaperNoSharing, LRS, SRPF; use LARS",
    ),
    ("spec.scheduling.policy", "larspaper", "; use LARSPaper"),
    ("spec.role", "Prefill", "spec.role is Prefill: must be Unified; use Unified"),
    (
        "spec.slo.default.ttft.multiplier",
        1.5,
        "multiplier is 1.5: must be a number in quotes, as '1.5'; put it in quotes: \"1.5\"",
    ),
    ("spec.slo.default.ttft.multiplier", "0.5", "multiplier is 0.5: must be at least 1"),
    ("spec.slo.default.tpot", "20 ms", "tpot is 20 ms: must be a duration such as 500ms or 1h"),
    ("spec.slo.default.tpot", "0s", "spec.slo.default.tpot is 0s: must be longer than nothing"),
    (
        "spec.parallelism.kvp",
        {"min": 2},
        "spec.parallelism.kvp.max is 1: must be at least kvp.min, which is 2; use 2 or more",
    ),
    ("spec.parallelism.kvp.tokensPerGroup", 63, "must hold at least one page of 64 tokens; use 64"),
    (
        "spec.parallelism.kvp",
        {"tokensPerGroup": 1024},
        "spec.model.maxContextTokens is 4096: must "
        "be at most kvp.max × tokensPerGroup, which is 1024; use 1024 or raise one of the two",
    ),
    ("spec.engine.kvMemory", "4Ki", "spec.engine.kvMemory is 4Ki: must be at least 1Mi"),
    ("spec.engine.pageTokens", 48, "pageTokens is 48: must be one of 16, 32, 64, 128, 256"),
    ("spec.model.source", {}, "spec.model.source is empty: must have exactly one of hostPath"),
    (
        "spec.model.source.uri",
        "https://m",
        "spec.model.source is hostPath and uri: must have exactly",
    ),
    (
        "spec.device",
        {"kind": "Cpu", "resource": "a.io/x"},
        "spec.device.resource is a.io/x: must be absent",
    ),
    (
        "spec.device.resource",
        "not a resource!",
        "spec.device.resource is not a resource!: must be an extended resource with its domain",
    ),
    ("spec.device.resource", "gpu", "spec.device.resource is gpu: must be an extended resource"),
    (
        "spec.scheduling.batchBudget",
        {"min": "1s"},
        "batchBudget.min is 1s: must be at most max, which is 100ms; use 100ms or less",
    ),
    (
        "spec.placement.packLevel",
        "rack",
        "spec.placement.packLevel is rack: must be one of spec.placement.topologyLevels",
    ),
    ("spec.autoscaling", {"minReplicas": 3}, "spec.autoscaling.maxReplicas is 1: must be at least"),
    (
        "spec.slo.classes",
        [{"name": "a"}, {"name": "a"}],
        "spec.slo.classes[1].name is a: must differ from a, default",
    ),
    (
        "spec.slo.classes",
        [{"name": name, "reservedPercent": 60} for name in "ab"],
        "spec.slo.classes is reserving 120 percent in all: must reserve at most 100 percent",
    ),
    ("spec.slo.classes", "gold", "spec.slo.classes is gold: must be a list; write its items with"),
    ("spec.model", None, "spec.model is missing: must be a mapping of dtype, "),
    ("metadata.name", "Tiny_1", "metadata.name is Tiny_1: must be lower-case letters"),
    (
        "apiVersion",
        "v1",
        "apiVersion is v1: must be medha.dev/v1beta1 or medha.dev/v1alpha1; use medha.dev/v1beta1",
    ),
    ("kind", "Medha", "kind is Medha: must be MedhaReplica; use MedhaReplica"),
    (
        "Spec",
        {},
        "Spec is not a field: the document has apiVersion, kind, metadata, spec; did you "
        "mean spec?",
    ),
]


@pytest.mark.parametrize(
    "path, value, sentence", SENTENCES, ids=[case[2][:40] for case in SENTENCES]
)
def test_the_sentence_says_what_to_do(path: str, value: object, sentence: str) -> None:
    line = refusal(put(SMALL, path, value))
    assert sentence in line and "\n" not in line


@pytest.mark.parametrize("document", [None, [], "text", 7, {}, {"spec": {}}])
def test_something_that_is_no_resource_is_refused_in_one_line(document: object) -> None:
    assert "\n" not in refusal(document)


def test_text_that_no_file_name_can_hold_is_refused() -> None:
    line = refusal(put(SMALL, "spec.model.source", {"hostPath": {"path": "/models/\ud800"}}))
    assert "spec.model.source.hostPath.path is '/models/\\ud800': must be" in line


def test_a_file_of_several_resources_gives_them_all_in_order() -> None:
    documents = [SMALL, None, put(SMALL, "metadata.name", "other")]
    assert [replica.name for replica in parse_all(documents)] == ["tiny", "other"]


def test_errors_in_a_file_of_several_resources_name_theirs() -> None:
    other = put(put(SMALL, "metadata.name", "other"), "spec.scheduling", {"policy": "LARSX"})
    with pytest.raises(UserErrors) as caught:
        parse_all([SMALL, None, other, put(SMALL, "metadata.name", "not a name")])
    first, second = str(caught.value).splitlines()
    assert first.startswith("other: spec.scheduling.policy is LARSX: ")
    assert second.startswith("document 4: metadata.name is not a name: ")
    with pytest.raises(UserErrors) as caught:
        parse_all([other, SMALL, other])
    assert [line[:24] for line in str(caught.value).splitlines()] == [
        "other: spec.scheduling.p",
        "metadata.name is other: ",
        "other: spec.scheduling.p",
    ]


def test_two_resources_of_one_name_are_refused() -> None:
    with pytest.raises(SpecError, match=r"metadata\.name is tiny: must differ"):
        parse_all([SMALL, SMALL])


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(SpecError, match="the file is empty"):
        parse_all([None])


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(value=JSONISH, path=st.sampled_from(["spec", "spec.model", *(path for path, _ in LEAVES)]))
def test_no_document_brings_more_than_a_sentence(value: object, path: str) -> None:
    try:
        result = parse(put(full(), path, value)).name
    except SpecError as error:
        result = str(error)
    assert result.isprintable()


@pytest.mark.parametrize(
    "text, value", [("500ms", 0.5), ("1h30m", 5400), ("10m", 600), ("1.5s", 1.5), ("2h", 7200)]
)
def test_durations_are_read_in_seconds(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value)


def test_sizes_and_numbers_are_read() -> None:
    assert [to_bytes(size) for size in ("1Ki", "3Mi", "2Gi", 77)] == [1024, 3 << 20, 2 << 30, 77]
    assert [to_number(number) for number in ("1.5", 2)] == [1.5, 2.0]
