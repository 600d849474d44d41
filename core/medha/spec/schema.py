"""OpenAPI schema of a MedhaReplica's spec, generated from the structs in `values.py`.

Types, bounds and defaults are the structs', texts the docstrings of their fields, rules those of
`cel.py`. `python -m medha.adapters.crd` writes it into the CRD.
"""

from __future__ import annotations

import ast
import functools
import inspect as source
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import inspect

from medha.spec import values
from medha.spec.cel import CEL

Schema = dict[str, Any]

# Lists that the API server merges by a key of their items; it replaces the others as a whole.
KEYS = {
    "adapters": "name",
    "slo.classes": "name",
    "template.env": "name",
    "template.volumes": "name",
    "template.volumeMounts": "mountPath",
    "template.resourceClaims": "name",
}


def spec_schema() -> Schema:
    """Build the schema of `spec`."""
    schema = _typed(inspect.type_info(values.MedhaReplicaSpec), "")
    return {"type": "object", "description": "The wanted state."} | schema


def _typed(kind: inspect.Type, path: str) -> Schema:
    """Build the schema of a type, with the rules that stand at its path."""
    schema = _plain(kind, path)
    if path in CEL:
        rules = [{"reason": "FieldValueInvalid", **rule} for rule in CEL[path]]
        schema["x-kubernetes-validations"] = rules
    return schema


def _plain(kind: inspect.Type, path: str) -> Schema:
    match kind:
        case inspect.Metadata(type=inner):
            return _plain(inner, path)
        case inspect.UnionType(types=types):
            return _either([part for part in types if not isinstance(part, inspect.NoneType)], path)
        case inspect.StructType(cls=cls, fields=fields):
            return _object(cls, fields, path)
        case inspect.VarTupleType(item_type=item, max_length=most):
            return {"type": "array", "maxItems": most, **_list(item, path)}
        case inspect.DictType(value_type=inspect.AnyType()):
            return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        case inspect.DictType(value_type=value, max_length=most):
            values_of = {"additionalProperties": _plain(value, path)}
            return {"type": "object", "maxProperties": most, **values_of}
        case inspect.LiteralType(values=choices):
            plain = "integer" if isinstance(choices[0], int) else "string"
            return {"type": plain, "enum": list(choices)}
        case inspect.IntType(ge=low, le=high):
            return {"type": "integer", "minimum": low, "maximum": high}
        case inspect.StrType(min_length=low, max_length=high, pattern=pattern):
            limits = {"minLength": low, "maxLength": high, "pattern": pattern}
            return {"type": "string"} | {name: value for name, value in limits.items() if value}
    raise TypeError(f"spec.{path}: {kind} has no schema; add a case to medha/spec/schema.py")


def _either(kinds: Sequence[inspect.Type], path: str) -> Schema:
    """Join the schemas of an integer and a text; the API has no other unions."""
    schemas = [_plain(kind, path) for kind in kinds]
    if len(schemas) == 1:
        return schemas[0]
    joined: Schema = {"x-kubernetes-int-or-string": True}
    for schema in schemas:
        joined |= {name: value for name, value in schema.items() if name != "type"}
    return joined


def _list(item: inspect.Type, path: str) -> Schema:
    items = _typed(item, f"{path}[]")
    key = KEYS.get(path)
    if key is None:
        return {"x-kubernetes-list-type": "atomic", "items": items}
    if "properties" not in items:  # a part of a pod: Kubernetes defines its other fields
        items |= {"required": [key], "properties": {key: {"type": "string"}}}
    return {
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": [key],
        "items": items,
    }


def _object(cls: type, fields: Sequence[inspect.Field], path: str) -> Schema:
    texts = _texts()[cls.__name__]
    properties = {}
    for field in fields:
        name = f"{path}.{field.encode_name}".lstrip(".")
        schema = {"description": texts[field.name]} | _typed(field.type, name)
        default = _default(field)
        properties[field.encode_name] = schema | ({} if default is None else {"default": default})
    required = [field.encode_name for field in fields if field.required]
    head = {"type": "object", **({"required": required} if required else {})}
    return head | {"properties": properties}


def _default(field: inspect.Field) -> Any:
    """Return the default as JSON; a section's is {}, which its fields fill in."""
    value = field.default
    if value is msgspec.NODEFAULT:
        value = None if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    plain = {} if isinstance(value, msgspec.Struct) else msgspec.to_builtins(value)
    return list(plain) if isinstance(plain, tuple) else plain


@functools.cache
def _texts() -> dict[str, dict[str, str]]:
    """Read the docstrings of all fields: by struct and field, on one line."""
    texts: dict[str, dict[str, str]] = {}
    for struct in ast.parse(source.getsource(values)).body:
        if not isinstance(struct, ast.ClassDef):
            continue
        fields = texts[struct.name] = {}
        for field, text in zip(struct.body, struct.body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    fields[name] = " ".join(words.split())
    return texts
