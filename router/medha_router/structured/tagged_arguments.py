"""Arguments of a call between tags, as Qwen3-Coder writes them, as the JSON of an object.

    <parameter=city>        <parameter=days>
    Paris                   3                    ──>  {"city": "Paris", "days": 3}
    </parameter>            </parameter>
                            </function>

A value is a string where its schema allows one, else the JSON that it spells. Strings are released
as they are written.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

PARAMETER, VALUE_ENDS, ENDS = "<parameter=", "</parameter>", "</function>"
SPACE = " \t\r\n"
MAX_KEY_CHARS = 1024
MAX_JSON_CHARS = 256 << 10
"""A longer value is a string: to check one takes milliseconds."""
MAX_SCHEMAS = 64
"""Schemas that are read for the types of one argument."""
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (float,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
IMPLIED = {"properties": "object", "items": "array"}
"""Fields of schemas that may have no type."""


class TaggedArguments:
    """Reads the arguments of one call. `schema`: that of its arguments, of any form."""

    def __init__(self, schema: object) -> None:
        properties = schema.get("properties") if isinstance(schema, dict) else None
        self._schemas = properties if isinstance(properties, dict) else {}
        self._definitions: dict[str, Any] = {}
        for field in ("definitions", "$defs"):
            given = schema.get(field) if isinstance(schema, dict) else None
            self._definitions |= given if isinstance(given, dict) else {}
        self._text = ""
        self._searched = 0  # no mark ends before
        self._keys: set[str] = set()
        self._key: str | None = None
        self._kinds: frozenset[str] = frozenset()
        self._begun = False  # the value's first character has come
        self._string = False  # a string is open
        self.done = False

    def push(self, text: str) -> str:
        """Add text; return the JSON that is decided now. Once `done`, `rest` is what follows."""
        self._text += text
        pieces = []
        while not self.done:
            piece = self._tag() if self._key is None else self._value(self._key)
            if piece is None:
                break
            pieces.append(piece)
        return "".join(pieces)

    @property
    def rest(self) -> str:
        """Text after the call."""
        return self._text if self.done else ""

    def _tag(self) -> str | None:
        """Read up to the next value, or the end; None if more text is needed."""
        text = self._text = self._text.lstrip(SPACE)
        if PARAMETER.startswith(text[: len(PARAMETER)]) or ENDS.startswith(text[: len(ENDS)]):
            if text.startswith(ENDS):
                return self._close(text.removeprefix(ENDS))
            key, mark, value = text.removeprefix(PARAMETER).partition(">")
            if text.startswith(PARAMETER) and mark:
                self._key, self._text, self._begun, self._searched = key, value, False, 0
                self._kinds = _kinds(self._schemas.get(key), self._definitions)
                return ""
            if len(key) <= MAX_KEY_CHARS:
                return None
        return self._close(text)

    def _close(self, rest: str) -> str:
        self._text, self.done = rest, True
        return "}" if self._keys else "{}"

    def _value(self, key: str) -> str | None:
        """Read a value, or the part of a string that has come; None if more text is needed."""
        if not self._begun:
            if not self._text:
                return None
            self._text = self._text.removeprefix("\n")
            self._begun = True
        repeated = key in self._keys and not self._string
        if not repeated and not self._string and self._kinds <= {"string"}:
            self._string = True
            return self._name(key) + '"'
        at = self._text.find(VALUE_ENDS, self._searched)
        if at < 0:
            return self._part()
        value, self._text = self._text[:at].removesuffix("\n"), self._text[at + len(VALUE_ENDS) :]
        self._key = None
        if repeated:
            return ""
        if self._string:
            self._string = False
            return _inner(value) + '"'
        return self._name(key) + _json(value, self._kinds)

    def _part(self) -> str | None:
        """Release what has come of a string, but what may be its end."""
        kept = max(overlap(self._text, VALUE_ENDS), overlap(self._text, "\n" + VALUE_ENDS))
        if not self._string:
            self._searched = max(0, len(self._text) - kept)
            return None
        part, self._text = (
            self._text[: len(self._text) - kept],
            self._text[len(self._text) - kept :],
        )
        return _inner(part) if part else None

    def _name(self, key: str) -> str:
        opening = ", " if self._keys else "{"
        self._keys.add(key)
        return f"{opening}{json.dumps(key, ensure_ascii=False)}: "


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest tail of `text` that begins `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


def _kinds(schema: object, definitions: dict[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty if it does not say."""
    kinds: set[str] = set()
    pending = [schema]
    for _ in range(MAX_SCHEMAS):
        if not pending:
            break
        inner = pending.pop()
        if not isinstance(inner, dict):
            continue
        named = inner.get("type")
        kinds |= {kind for kind in (*_list(named), named) if isinstance(kind, str)}
        for value in (inner.get("const"), *_list(inner.get("enum"))):
            kinds |= {name for name, types in TYPES.items() if type(value) in types}
        kinds |= {kind for field, kind in IMPLIED.items() if field in inner}
        for choice in ("anyOf", "oneOf", "allOf"):
            pending += _list(inner.get(choice))
        reference = inner.get("$ref")
        if isinstance(reference, str):
            pending.append(definitions.get(reference.rpartition("/")[2]))
    return frozenset(kinds)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _json(value: str, kinds: frozenset[str]) -> str:
    """Return the JSON that a value spells, else a string."""
    text = value.strip(SPACE)
    text = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    spelt = len(text) <= MAX_JSON_CHARS and ("string" not in kinds or text == "null")
    if spelt and (text != "null" or "null" in kinds or "string" not in kinds):
        try:
            msgspec.json.decode(text, type=msgspec.Raw)
            return text
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            pass
    return json.dumps(value, ensure_ascii=False)


def _inner(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
