"""The CRD is what medha.spec generates, and both refuse the same documents in the same words."""

from __future__ import annotations

import ast
import copy
import inspect as source
import re
import traceback
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import yaml
from msgspec import inspect

from medha.adapters.crd import FILES, STORED, updated
from medha.errors import SpecError
from medha.spec import API_VERSION, API_VERSIONS, KIND, parse, rules
from medha.spec.cel import CEL
from medha.spec.values import NAME
from medha_operator.resources.views import PersistedStatus

HERE = Path(__file__).parent
CRD = HERE.parents[1] / "crds" / "medha.dev_medhareplicas.yaml"
TABLE = yaml.safe_load((HERE / "refused.yaml").read_text())
CASES: list[dict[str, Any]] = TABLE["cases"]
PLAIN: dict[type, str] = {
    inspect.IntType: "integer",
    inspect.StrType: "string",
    inspect.LiteralType: "string",
    inspect.VarTupleType: "array",
}


def crd() -> dict[str, Any]:
    document = yaml.safe_load(CRD.read_text())
    assert isinstance(document, dict)
    return document


def version() -> dict[str, Any]:
    newest = crd()["spec"]["versions"][0]
    assert isinstance(newest, dict)
    return newest


SCHEMA: dict[str, Any] = version()["schema"]["openAPIV3Schema"]


def flat(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema below one, by its path; items of a list are `path[]`."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from flat(inner, f"{path}.{name}")
    if "items" in schema:
        yield from flat(schema["items"], f"{path}[]")


FIELDS = dict(flat(SCHEMA["properties"]["spec"], "spec"))


@pytest.mark.parametrize("name", FILES)
def test_the_shipped_files_are_what_make_crd_writes(name: str) -> None:
    text = (HERE.parents[1] / name).read_text()
    assert text == updated(text), "run `make crd` and commit what it writes"
    assert len(FIELDS) > 80


def test_every_rule_in_cel_stands_at_a_field_that_exists() -> None:
    assert {f"spec.{path}".rstrip(".") for path in CEL} <= {*FIELDS}


def test_a_file_without_the_marks_of_the_generated_part_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks"):
        updated("spec: {}")


def test_all_versions_have_one_schema_so_that_none_needs_a_conversion() -> None:
    spec = crd()["spec"]
    assert spec["conversion"] == {"strategy": "None"}
    names = tuple(f"{spec['group']}/{version['name']}" for version in spec["versions"])
    assert names == API_VERSIONS and len(names) == 2
    bodies = [{**version, "name": "", "storage": None} for version in spec["versions"]]
    assert all(body == bodies[0] for body in bodies)
    assert [version["name"] for version in spec["versions"] if version["storage"]] == [STORED]
    assert all(version["served"] for version in spec["versions"])


def test_an_older_version_that_differs_is_written_again() -> None:
    text = CRD.read_text()
    head, mark, older = text.partition("  - name: v1alpha1\n")
    changed = head + mark + older.replace("description: Who scales", "description: Whoever scales")
    assert changed != text == updated(changed)


def test_the_names_of_the_resource_are_the_same_in_both() -> None:
    spec, metadata = crd()["spec"], SCHEMA["properties"]["metadata"]
    assert f"{spec['group']}/{version()['name']}" == API_VERSION
    assert spec["names"]["kind"] == KIND
    assert metadata["properties"]["name"] == {"type": "string", "pattern": NAME, "maxLength": 40}


@pytest.mark.parametrize("path", FIELDS)
def test_every_field_reads_like_documentation(path: str) -> None:
    field, parent = FIELDS[path], FIELDS.get(path.rpartition(".")[0], {})
    if path.endswith("[]") or "x-kubernetes-preserve-unknown-fields" in parent:
        return
    text = field["description"]
    assert text[0].isupper() or text[0] in "`0123456789"
    assert text.endswith(".") and len(text) < 400
    assert text.count("`") % 2 == 0


@pytest.mark.parametrize("path", FIELDS)
def test_every_field_is_bounded_and_none_holds_a_float_or_a_boolean(path: str) -> None:
    field, parent = FIELDS[path], FIELDS.get(path.rpartition(".")[0], {})
    if "x-kubernetes-preserve-unknown-fields" in parent:
        return
    match field.get("type", "either"):
        case "string":
            assert "enum" in field or "maxLength" in field
        case "integer":
            assert "enum" in field or {"minimum", "maximum"} <= set(field)
        case "either":
            assert {"minimum", "maximum", "maxLength", "pattern"} <= set(field)
        case "array":
            assert "maxItems" in field and "x-kubernetes-list-type" in field
        case kind:
            assert kind == "object"


def test_lists_that_are_merged_by_a_key_require_that_key() -> None:
    keys = {
        path: field["x-kubernetes-list-map-keys"]
        for path, field in flat(SCHEMA, "")
        if field.get("x-kubernetes-list-type") == "map"
    }
    assert keys == {
        ".spec.adapters": ["name"],
        ".spec.slo.classes": ["name"],
        ".spec.template.env": ["name"],
        ".spec.template.volumes": ["name"],
        ".spec.template.volumeMounts": ["mountPath"],
        ".spec.template.resourceClaims": ["name"],
        ".status.groups": ["replica"],
        ".status.restarts": ["replica", "group"],
        ".status.waits": ["replica", "group"],
        ".status.retiring": ["replica"],
        ".status.conditions": ["type"],
    }
    items = {path: field for path, field in flat(SCHEMA, "") if path.endswith("[]")}
    for path, key in keys.items():
        assert set(key) <= set(items[f"{path}[]"]["required"])


def test_the_status_holds_what_the_operator_remembers_there() -> None:
    """The API server drops fields that the CRD does not declare."""
    written = SCHEMA["properties"]["status"]["properties"]
    for record in msgspec.structs.fields(PersistedStatus):
        held = written[record.encode_name]
        struct = inspect.type_info(struct_in(record.type))
        assert isinstance(struct, inspect.StructType)
        assert {
            name: schema["type"] for name, schema in held.get("items", held)["properties"].items()
        } == {field.encode_name: PLAIN[type(field.type)] for field in struct.fields}


def struct_in(kind: Any) -> Any:
    """The struct in an annotation such as tuple[Record, ...] or Record | None."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next(struct_in(part) for part in typing.get_args(kind) if part is not type(None))


def test_scaling_and_the_columns_point_at_fields_that_exist() -> None:
    fields = dict(flat(SCHEMA, ""))
    scale = version()["subresources"]["scale"]
    assert scale == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    columns = version()["additionalPrinterColumns"]
    always = [column["name"] for column in columns if not column.get("priority")]
    assert always == ["Ready", "Replicas", "TP", "SPP", "KVP", "Attainment", "Slack", "Age"]
    for path in (*scale.values(), *(column["jsonPath"] for column in columns)):
        assert re.sub(r"\[\?.*?\]", "[]", path) in {*fields, ".metadata.creationTimestamp"}


# --- rules between fields -------------------------------------------------------------------------


def put(case: dict[str, Any]) -> dict[str, Any]:
    """The valid document with a case's fields changed."""
    document: dict[str, Any] = copy.deepcopy(TABLE["valid"])
    for path, value in case["put"].items():
        *parents, last = path.split(".")
        at = document
        for name in parents:
            at = at.setdefault(name, {})
        at[last] = value
    return document


def refused(case: dict[str, Any]) -> SpecError:
    with pytest.raises(SpecError) as caught:
        parse(put(case))
    return caught.value


class Rule(NamedTuple):
    """A rule of the CRD: where it stands, what it expects (its numbers left open), its remedy."""

    where: str
    expects: re.Pattern[str]
    remedy: str

    def broken_by(self, case: dict[str, Any]) -> bool:
        return case["rule"] == self.where and self.expects.fullmatch(case["says"]) is not None


def cel_rules() -> Iterator[Rule]:
    for path, field in flat(SCHEMA, ""):
        for rule in field.get("x-kubernetes-validations", ()):
            match = re.fullmatch(
                r"'(.*)'\s*\.format\(.*\)", rule.get("messageExpression", ""), flags=re.DOTALL
            )
            assert match or "messageExpression" not in rule
            expects, _, remedy = (match[1] if match else rule["message"]).partition("; ")
            pattern = ".+".join(re.escape(part) for part in re.split("%[ds]", expects))
            where = path.removeprefix(".") + rule.get("fieldPath", "")
            yield Rule(where, re.compile(pattern), remedy)


RULES = tuple(cel_rules())
IDS = [f"{case['rule']}:{index}" for index, case in enumerate(CASES)]


def test_the_valid_document_is_valid() -> None:
    assert parse(TABLE["valid"]).name == "tiny"


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_medha_refuses_each_broken_rule_with_the_words_of_the_table(case: dict[str, Any]) -> None:
    assert refused(case).expected == case["says"]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_crd_has_the_rule_with_the_same_words(case: dict[str, Any]) -> None:
    assert "api" in case or any(rule.broken_by(case) for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=[f"{r.where}: {r.remedy[:30]}" for r in RULES])
def test_every_rule_of_the_crd_is_broken_by_a_case_and_has_a_remedy(rule: Rule) -> None:
    assert any(rule.broken_by(case) for case in CASES)
    assert rule.expects.pattern.startswith("must") and rule.remedy != ""


def test_every_rule_of_the_spec_is_broken_by_a_case() -> None:
    tree = ast.parse(source.getsource(rules))
    raised = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    lines = {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("_check_positive", "_check_ttft")
    }
    reached: set[int] = set()
    for case in CASES:
        frames = traceback.extract_tb(refused(case).__traceback__)
        reached |= {frame.lineno or 0 for frame in frames if frame.filename == rules.__file__}
    assert sorted((raised | lines) - reached) == []
