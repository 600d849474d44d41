"""Parse a document into a checked MedhaReplica; report the first broken rule in one sentence.

    spec.parallelism.tp is 0: must be a whole number from 1 to 64; use 1

Types, bounds and defaults come from the declarations of the fields; `rules` checks rules between
fields. A null field counts as absent, as in Kubernetes.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from medha.errors import SpecError, UserError, UserErrors
from medha.spec.rules import check_rules
from medha.spec.values import API_VERSIONS, KIND, NAME, MedhaReplica, MedhaReplicaSpec


def parse(document: object) -> MedhaReplica:
    """The resource that a document holds; raises SpecError for the first rule it breaks."""
    whole = _mapping(document, "the document", "a mapping with apiVersion, kind, metadata, spec")
    for field, values in (("apiVersion", API_VERSIONS), ("kind", (KIND,))):
        if whole.get(field) not in values:
            given = whole.get(field, "missing")
            raise SpecError(field, given, f"must be {' or '.join(values)}", f"use {values[0]}")
    for field in whole:
        if field not in ("apiVersion", "kind", "metadata", "spec", "status"):
            raise _unknown("", str(field), ("apiVersion", "kind", "metadata", "spec"))
    metadata = _mapping(whole.get("metadata"), "metadata", "a mapping with the resource's name")
    name = metadata.get("name", "missing")
    if not isinstance(name, str) or not re.fullmatch(NAME, name) or len(name) > 40:
        raise SpecError(
            "metadata.name",
            name,
            "must be lower-case letters, digits and dashes, at most 40",
            "use a name such as llama-70b",
        )
    spec = _check(_clean(whole.get("spec")), _spec_type(), "spec")
    try:
        typed = msgspec.convert(spec, MedhaReplicaSpec)
    except msgspec.ValidationError as error:  # a bound that `_check` does not know
        raise SpecError(
            "spec",
            "refused",
            f"must hold what it declares ({error})",
            "compare it with the documentation",
        ) from None
    check_rules(typed)
    generation, labels = metadata.get("generation", 0), metadata.get("labels")
    return MedhaReplica(
        name=name,
        namespace=str(metadata.get("namespace", "default")),
        uid=str(metadata.get("uid", "")),
        generation=generation if isinstance(generation, int) else 0,
        labels={
            str(label): str(value)
            for label, value in (labels.items() if isinstance(labels, Mapping) else ())
        },
        api_version=whole["apiVersion"],
        spec=typed,
    )


def parse_all(documents: Iterable[object]) -> tuple[MedhaReplica, ...]:
    """Every resource of a file; empty documents are skipped, names must differ.

    Raises SpecError; of several documents, UserErrors that name theirs.
    """
    given = [pair for pair in enumerate(documents, 1) if pair[1] is not None]
    replicas: list[MedhaReplica] = []
    errors: list[UserError] = []
    names: set[str] = set()
    for number, document in given:
        title = _title(document, number)
        if title in names:
            errors.append(
                SpecError(
                    "metadata.name",
                    title,
                    "must differ from the other documents'",
                    "give each resource a name of its own",
                )
            )
        names.add(title)
        try:
            replicas.append(parse(document))
        except SpecError as error:
            if len(given) == 1:
                raise
            errors.append(UserError(f"{title}: {error}"))
    if errors:
        raise UserErrors(errors) if len(errors) > 1 else errors[0]
    if not replicas:
        raise SpecError("the file", "empty", f"must hold a {KIND}", "write one")
    return tuple(replicas)


def _title(document: object, number: int) -> str:
    """Return a document's name, if it has a valid one, else its place in the file."""
    metadata = document.get("metadata") if isinstance(document, Mapping) else None
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if isinstance(name, str) and re.fullmatch(NAME, name):
        return name
    return f"document {number}"


@functools.cache
def _spec_type() -> inspect.Type:
    return inspect.type_info(MedhaReplicaSpec)


def _clean(value: Any) -> Any:
    """Remove nulls."""
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


def _check(value: Any, kind: inspect.Type, path: str) -> Any:
    """Return `value` if it matches `kind`; else raise SpecError for `path`."""
    match _bare(kind):
        case inspect.StructType() as struct:
            return _check_struct(value, struct, path)
        case (inspect.ListType() | inspect.VarTupleType()) as sequence:
            return _check_list(value, sequence, path)
        case inspect.DictType() as mapping:
            items = _mapping(value, path, "a mapping")
            _check_count(len(items), mapping.max_length, path)
            return {
                _check(key, mapping.key_type, f"a key of {path}"): _check(
                    item, mapping.value_type, f"{path}.{_shown(key)}"
                )
                for key, item in items.items()
            }
        case inspect.AnyType():
            return value
        case _:
            _check_leaf(value, kind, path)
            return value


def _check_struct(value: Any, kind: inspect.StructType, path: str) -> dict[str, Any]:
    fields = {field.encode_name: field for field in kind.fields}
    given = _mapping(value, path, f"a mapping of {', '.join(sorted(fields))}")
    for key in given:
        if key not in fields:
            raise _unknown(path, str(key), tuple(fields))
    for name, field in fields.items():
        if field.required and name not in given:
            raise SpecError(
                f"{path}.{name}",
                "missing",
                f"must be {_expected(field.type)}",
                f"set it{_example(field.type)}",
            )
    return {
        name: _check(item, _present(fields[name].type), f"{path}.{name}")
        for name, item in given.items()
    }


def _check_list(value: Any, kind: inspect.ListType | inspect.VarTupleType, path: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise SpecError(path, value, "must be a list", "write its items with dashes")
    _check_count(len(value), kind.max_length, path)
    return [_check(item, kind.item_type, f"{path}[{index}]") for index, item in enumerate(value)]


def _check_count(count: int, most: int | None, path: str) -> None:
    if most is not None and count > most:
        raise SpecError(
            path, f"{count} items long", f"must have at most {most}", f"remove {count - most}"
        )


def _check_leaf(value: Any, kind: inspect.Type, path: str) -> None:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if not any(_fits(value, choice) for choice in kinds):
        raise SpecError(path, value, f"must be {_expected(kind)}", _remedy(value, kinds))


def _fits(value: Any, kind: inspect.Type) -> bool:
    match _bare(kind):
        case inspect.LiteralType(values=values):
            return any(value == option and type(value) is type(option) for option in values)
        case inspect.IntType(ge=low, le=high):
            return type(value) is int and (low or 0) <= value <= (high or value)
        case inspect.StrType(min_length=shortest, max_length=longest, pattern=pattern):
            return (
                isinstance(value, str)
                and (shortest or 0) <= len(value) <= (longest or len(value))
                and (pattern is None or re.search(pattern, value) is not None)
                and "\n" not in value
                and not re.search("[\\ud800-\\udfff]", value)  # halves of pairs
            )
    return False


def _expected(kind: inspect.Type) -> str:
    """Describe the values that a field accepts."""
    if isinstance(kind, inspect.Metadata) and (kind.extra_json_schema or {}).get("description"):
        return str((kind.extra_json_schema or {})["description"])
    match _bare(kind):
        case inspect.LiteralType(values=values):
            return str(values[0]) if len(values) == 1 else f"one of {', '.join(map(str, values))}"
        case inspect.IntType(ge=low, le=high):
            return f"a whole number from {low or 0} to {high}"
        case inspect.UnionType(types=kinds):
            present = [kind for kind in kinds if not isinstance(kind, inspect.NoneType)]
            return _expected(
                present[-1] if isinstance(_bare(present[0]), inspect.IntType) else present[0]
            )
        case inspect.StructType(fields=fields):
            return f"a mapping of {', '.join(sorted(field.encode_name for field in fields))}"
    return "text"


def _remedy(value: Any, kinds: tuple[inspect.Type, ...]) -> str:
    """Suggest the nearest valid value."""
    bare = [_bare(kind) for kind in kinds]
    for kind in bare:
        if isinstance(kind, inspect.LiteralType):
            names = {str(option).lower(): option for option in kind.values}
            near = difflib.get_close_matches(str(value).lower(), names, n=1, cutoff=0.5)
            near = near or (list(names) if len(names) == 1 else [])
            return f"use {names[near[0]] if near else 'one of them'}"
    whole = next((kind for kind in bare if isinstance(kind, inspect.IntType)), None)
    text = next((kind for kind in kinds if isinstance(_bare(kind), inspect.StrType)), None)
    if text is not None:
        quoted = f'"{value}"'
        if isinstance(value, int | float) and _fits(str(value), text):
            return f"put it in quotes: {quoted}"
        return f"write it so{_example(text)}"
    if whole is not None:
        number = int(float(value)) if _is_number(value) else whole.ge or 0
        plain = " without quotes" if _is_number(value) and isinstance(value, str) else ""
        return f"use {min(max(number, whole.ge or 0), whole.le or number)}{plain}"
    return "leave it out"


def _is_number(value: Any) -> bool:
    return (
        not isinstance(value, bool)
        and re.fullmatch(r"-?[0-9]{1,18}(\.0*)?", str(value)) is not None
    )


def _example(kind: inspect.Type) -> str:
    extra = (kind.extra_json_schema or {}) if isinstance(kind, inspect.Metadata) else {}
    examples = extra.get("examples")
    return f", e.g. {examples[0]}" if examples else ""


def _bare(kind: inspect.Type) -> inspect.Type:
    return _bare(kind.type) if isinstance(kind, inspect.Metadata) else kind


def _present(kind: inspect.Type) -> inspect.Type:
    """Type of an optional field without None."""
    if isinstance(kind, inspect.UnionType):
        left = tuple(choice for choice in kind.types if not isinstance(choice, inspect.NoneType))
        return left[0] if len(left) == 1 else inspect.UnionType(left)
    return kind


def _mapping(value: Any, path: str, expected: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        shown = "missing" if value is None else value
        raise SpecError(path, shown, f"must be {expected}", "write it as `field: value` lines")
    return value


def _shown(key: object) -> str:
    """Show a key as part of a path, on one line."""
    text = str(key)
    return text if text.isprintable() and text and len(text) <= 80 else ascii(text[:80])


def _unknown(path: str, key: str, known: tuple[str, ...]) -> SpecError:
    where = f"{path}.{_shown(key)}" if path else _shown(key)
    lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(key.lower(), lower, n=1, cutoff=0.6)
    remedy = f"did you mean {lower[near[0]]}?" if near else "remove it"
    return SpecError(
        where, "not a field", f"{path or 'the document'} has {', '.join(sorted(known))}", remedy
    )
