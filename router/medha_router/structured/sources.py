"""Grammars as clients ask for them: OpenAI's `response_format` and vLLM's fields.

Decides from the body alone which grammar a request has. The text itself is checked by `checker`, in
a process that may be killed.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from medha.errors import RequestError
from medha.grammar_limits import MAX_SOURCE_BYTES

RawJson = msgspec.Raw | msgspec.UnsetType
Kind = Literal["json_schema", "regex", "choice", "grammar"]
ANY_OBJECT = '{"type":"object"}'


class GrammarSource(msgspec.Struct, frozen=True):
    """A grammar as its client gave it, in the field `param`; `text` of a choice is a JSON list.

    `of_answer`: an output that calls tools need not follow it. `calls`: how such an output begins,
    in this model's form.
    """

    kind: Kind
    text: str
    param: str
    of_answer: bool = False
    calls: tuple[str, ...] = ()


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format.json_schema`; the schema is followed whether `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema: RawJson = msgspec.UNSET
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format` of OpenAI."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`structured_outputs` of vLLM. Fields of type bool | None other than `json_object` must be
    false."""

    json: RawJson = msgspec.UNSET
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: None = None
    structural_tag: None = None


def of_response_format(raw: RawJson) -> GrammarSource | None:
    """Read `response_format`; None for text. Raises RequestError."""
    param = "response_format"
    wanted = _read(raw, ResponseFormat | None, param)
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return GrammarSource("json_schema", ANY_OBJECT, param, of_answer=True)
    if wanted.json_schema is None:
        raise _invalid(f"{param}.json_schema", "is missing: must be given for the type json_schema")
    schema = wanted.json_schema.schema
    given = _of_schema(schema, f"{param}.json_schema.schema") or GrammarSource(
        "json_schema", ANY_OBJECT, param
    )
    return msgspec.structs.replace(given, of_answer=True)


def of_structured_outputs(raw: RawJson) -> GrammarSource | None:
    """Read `structured_outputs`; raises RequestError if it asks for two grammars."""
    param = "structured_outputs"
    wanted = _read(raw, StructuredOutputs | None, param)
    if wanted is None:
        return None
    for field in ("disable_any_whitespace", "disable_additional_properties"):
        if getattr(wanted, field):
            raise RequestError(
                f"{param}.{field} is not supported by this server; leave it out",
                code="unsupported_parameter",
                param=f"{param}.{field}",
            )
    return only(
        _of_schema(wanted.json, f"{param}.json"),
        _of_text("regex", wanted.regex, f"{param}.regex"),
        _of_choice(wanted.choice, f"{param}.choice"),
        _of_text("grammar", wanted.grammar, f"{param}.grammar"),
        GrammarSource("json_schema", ANY_OBJECT, param) if wanted.json_object else None,
    )


def of_guided(
    json: RawJson, regex: RawJson, choice: RawJson, grammar: RawJson
) -> GrammarSource | None:
    """Read vLLM's older fields `guided_*`; raises RequestError if they ask for two grammars."""
    return only(
        _of_schema(json, "guided_json"),
        _of_text("regex", _read(regex, str | None, "guided_regex"), "guided_regex"),
        _of_choice(_read(choice, list[str] | None, "guided_choice"), "guided_choice"),
        _of_text("grammar", _read(grammar, str | None, "guided_grammar"), "guided_grammar"),
    )


def only(*sources: GrammarSource | None) -> GrammarSource | None:
    """Return the one grammar that was given, or None; raises RequestError for two."""
    given = [source for source in sources if source is not None]
    if len(given) > 1:
        raise _invalid(
            given[1].param, f"was given together with {given[0].param}: an output follows one"
        )
    return given[0] if given else None


def _of_schema(raw: RawJson, param: str) -> GrammarSource | None:
    """Return a JSON schema, given as JSON or as a string of JSON."""
    if isinstance(raw, msgspec.UnsetType):
        return None
    _check_length(memoryview(raw).nbytes, param)
    data = bytes(raw).strip()
    if data == b"null":
        return None
    try:
        text = _read(raw, str, param) if data[:1] == b'"' else data.decode()
    except UnicodeDecodeError:
        raise _invalid(param, "is no JSON schema: must be UTF-8") from None
    if text.strip()[:1] != "{":
        raise _invalid(param, "is no JSON schema: must be an object")
    return GrammarSource("json_schema", text, param)


def _of_text(kind: Kind, text: str | None, param: str) -> GrammarSource | None:
    if text is None:
        return None
    if not text:
        raise _invalid(param, f"is empty: must be a {kind}")
    return GrammarSource(kind, text, param)


def _of_choice(choices: list[str] | None, param: str) -> GrammarSource | None:
    if choices is None:
        return None
    if not choices or "" in choices:
        raise _invalid(param, "must hold at least one string, none of them empty")
    return GrammarSource("choice", msgspec.json.encode(choices).decode(), param)


def _read(raw: RawJson, kind: Any, param: str) -> Any:
    """Decode the JSON of a field; None if it is absent."""
    if isinstance(raw, msgspec.UnsetType):
        return None
    _check_length(memoryview(raw).nbytes, param)
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message, _, path = str(error).partition(" - at `$")
        at = param + path.rstrip("`")
        raise _invalid(at, f"is wrong ({message[:1].lower()}{message[1:]}); correct it") from None


def _check_length(size: int, param: str) -> None:
    if size > MAX_SOURCE_BYTES:
        raise _invalid(param, f"has {size} bytes: must have at most {MAX_SOURCE_BYTES}; shorten it")


def _invalid(param: str, message: str) -> RequestError:
    return RequestError(f"{param} {message}", code="invalid_value", param=param)
