"""Tools that a chat may call: what its client offers, and the grammar of a demanded call.

`auto` leaves it to the model, in the form of its family (see `tool_calls`). `required` and a named
tool are grammars: an array of calls, or the arguments alone.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from medha.errors import RequestError
from medha.grammar_limits import MAX_SCHEMA_DEPTH
from medha_router.structured.sources import GrammarSource, RawJson

MAX_TOOLS = 512
MAX_TOOLS_BYTES = 256 << 10
MAX_CALLS = 32

# Keywords of JSON schemas: values are schemas by name, and values are no schemas.
MAPS_OF_SCHEMAS = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)
DATA = frozenset({"const", "default", "enum", "examples"})

TOOL_NAME = r"^[a-zA-Z0-9_.-]{1,256}$(?!\n)"
"""Names of tools of plugins are longer than OpenAI's 64. In Python, $ also stands before a line
break at the end."""
ToolName = Annotated[str, msgspec.Meta(pattern=TOOL_NAME)]
Choice = Literal["auto", "none", "required", "named"]


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A tool's name and the JSON schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `tools`."""

    type: Literal["function"] | None = None
    function: Function


class _Named(msgspec.Struct, frozen=True):
    name: str


class NamedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice` that names a tool."""

    type: Literal["function"] = "function"
    function: _Named


class Tools(msgspec.Struct, frozen=True, kw_only=True):
    """Tools of a request. `raw`: JSON for the chat template; `named`: the tool that must be called.

    `parallel`: several calls are allowed. With the choice `none`, the prompt has the tools and the
    output is text, as in vLLM.
    """

    raw: bytes
    names: frozenset[str]
    choice: Choice = "auto"
    named: str = ""
    parallel: bool = True
    grammar: GrammarSource | None = None

    def schemas(self) -> dict[str, dict[str, Any]]:
        """Return the JSON schema of each tool's arguments."""
        offered = msgspec.json.decode(self.raw, type=list[Tool])
        return {tool.function.name: tool.function.parameters or {} for tool in offered}


def read_tools(tools: RawJson, choice: RawJson, parallel: bool | None) -> Tools | None:
    """Read `tools` and `tool_choice`; None without tools. Raises RequestError."""
    if isinstance(tools, msgspec.UnsetType) and isinstance(choice, msgspec.UnsetType):
        return None
    offered = _read(
        tools, Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] | None, "tools"
    )
    wanted = _read(choice, Literal["none", "auto", "required"] | NamedChoice | None, "tool_choice")
    if not offered:
        if wanted not in (None, "none", "auto"):
            raise _invalid("tool_choice", "demands a call: must come with tools")
        return None
    for at, tool in enumerate(offered):
        check_depth(tool.function.parameters, f"tools[{at}].function.parameters")
    functions = {tool.function.name: tool.function for tool in offered}
    if len(functions) < len(offered):
        raise _invalid("tools", "has two tools of one name: names must differ")
    raw = bytes(tools)  # type: ignore[arg-type]
    if any(tool.type is None for tool in offered):
        raw = _typed(raw)
    given = Tools(raw=raw, names=frozenset(functions), parallel=parallel is not False)
    if wanted == "none":
        return msgspec.structs.replace(given, choice="none")
    if isinstance(wanted, NamedChoice):
        function = functions.get(wanted.function.name)
        if function is None:
            raise _invalid(
                "tool_choice.function.name",
                f"is {wanted.function.name[:64]!r}: must be one of {', '.join(functions)}",
            )
        grammar = _grammar(_parameters(function), "tool_choice")
        return msgspec.structs.replace(
            given, choice="named", named=function.name, grammar=grammar, parallel=False
        )
    if wanted == "required":
        calls: dict[str, Any] = {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_CALLS if given.parallel else 1,
            "items": {"anyOf": [_call(at, tool.function) for at, tool in enumerate(offered)]},
        }
        _check_ids(calls)
        return msgspec.structs.replace(
            given, choice="required", grammar=_grammar(calls, "tool_choice")
        )
    return given


def _typed(raw: bytes) -> bytes:
    """Return the tools with their type, which templates may read and clients may leave out."""
    tools = msgspec.json.decode(raw, type=list[dict[str, Any]])
    return msgspec.json.encode([tool | {"type": "function"} for tool in tools])


def check_depth(schema: dict[str, Any] | None, param: str) -> None:
    """Raise RequestError if a schema is nested deeper than a grammar may be."""
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        if not level:
            return
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if any(isinstance(inner, dict | list) for inner in level):
        raise _invalid(
            param,
            f"nests objects and arrays more than {MAX_SCHEMA_DEPTH} deep: make it flatter, for "
            "instance with $defs",
        )


def _call(number: int, function: Function) -> dict[str, Any]:
    return {
        "$id": f"tool{number}:///",
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            "parameters": _resource(_parameters(function), f"tool{number}:///parameters"),
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _resource(schema: dict[str, Any], base: str) -> dict[str, Any]:
    """Return a schema that may stand in another: its references resolve as if it stood alone."""
    own = schema.get("$id")
    if isinstance(own, str) and own[:1] not in ("", "#"):
        base = own
    resource = {**schema, "$id": base, "id": base}  # draft 4 reads `id`
    siblings = schema.get("allOf", [])
    if "$ref" in schema and isinstance(siblings, list):  # up to draft 7, it hides the `$id`
        resource["allOf"] = [*siblings, {"$ref": resource.pop("$ref")}]
    return resource


def _check_ids(schema: dict[str, Any]) -> None:
    """Raise RequestError if two schemas inside a schema have one absolute `$id`."""
    named: dict[str, dict[str, Any]] = {}
    pending: list[Any] = [schema]
    while pending:
        inner = pending.pop()
        if isinstance(inner, list):
            pending += inner
        elif isinstance(inner, dict):
            name = inner.get("$id")
            if isinstance(name, str) and ":" in name:
                first = named.setdefault(name, inner)
                if first is not inner and msgspec.json.encode(first) != msgspec.json.encode(inner):
                    raise _invalid(
                        "tools", f"has two schemas with the $id {name[:64]!r}: ids must differ"
                    )
            for key, value in inner.items():
                if key in MAPS_OF_SCHEMAS and isinstance(value, dict):
                    pending += value.values()
                elif key not in DATA:
                    pending.append(value)


def _parameters(function: Function) -> dict[str, Any]:
    return function.parameters or {"type": "object", "additionalProperties": False}


def _grammar(schema: dict[str, Any], param: str) -> GrammarSource:
    return GrammarSource("json_schema", msgspec.json.encode(schema).decode(), param)


def _read(raw: RawJson, kind: Any, param: str) -> Any:
    if isinstance(raw, msgspec.UnsetType):
        return None
    size = memoryview(raw).nbytes
    if size > MAX_TOOLS_BYTES:
        raise _invalid(param, f"has {size} bytes: must have at most {MAX_TOOLS_BYTES}; shorten it")
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message, _, path = str(error).partition(" - at `$")
        at = param + path.rstrip("`")
        raise _invalid(at, f"is wrong ({message[:1].lower()}{message[1:]}); correct it") from None


def _invalid(param: str, message: str) -> RequestError:
    return RequestError(f"{param} {message}", code="invalid_value", param=param)
