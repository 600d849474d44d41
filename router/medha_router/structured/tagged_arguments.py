"""Arguments of a call between tags, as Qwen3-Coder writes them, as the JSON of an object.

    <parameter=city>        <parameter=days>
    Paris                   3                    ──>  {"city": "Paris", "days": 3}
    </parameter>            </parameter>
                            </function>

A value is a string where its schema allows one, else the JSON that it spells. Strings are released
as they are written. Models leave end tags out: a value ends, too, before the line of another
argument of the schema, and before the end of its function or of the output.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

PARAMETER, VALUE_ENDS, FUNCTION_ENDS = "<parameter=", "</parameter>", "</function>"
FUNCTION = "<function="
AFTER = ("</tool_call>", "<tool_call>", FUNCTION)
"""Marks that may follow the end of a function; before other text, its tag is part of a value."""
SPACE = " \t\r\n"
MAX_KEY_CHARS = 1024
MAX_JSON_CHARS = 256 << 10
"""A longer value is a string: to check one takes milliseconds."""
HELD_CHARS = 4096
"""Characters of a value that are held as one text: to add to a longer one takes longer."""
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
        self._held: list[str] = []  # what stands before `_text` in a value that is no string
        self._searched = 0  # no mark begins before
        self._last = ""  # character before `_text` in a value
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

    def end(self) -> str:
        """Return the JSON that is missing when the model ends its output in the call."""
        pieces = []
        if self._key is not None:
            text = "".join((*self._held, self._text))
            value, mark, after = text.rpartition(FUNCTION_ENDS)
            whole = value if mark and not after.strip(SPACE) else text
            pieces = [self._open_value(self._key) or "", self._end_value(self._key, whole)]
        return "".join(pieces) + self._close("")

    @property
    def rest(self) -> str:
        """Text after the call."""
        return self._text if self.done else ""

    def _tag(self) -> str | None:
        """Read up to the next value, or the end; None if more text is needed."""
        text = self._text = self._text.lstrip(SPACE)
        if PARAMETER.startswith(text[: len(PARAMETER)]) or FUNCTION_ENDS.startswith(
            text[: len(FUNCTION_ENDS)]
        ):
            if text.startswith(FUNCTION_ENDS):
                return self._close(text.removeprefix(FUNCTION_ENDS))
            key, mark, value = text.removeprefix(PARAMETER).partition(">")
            if text.startswith(PARAMETER) and mark:
                self._key, self._text, self._begun, self._searched = key, value, False, 0
                self._kinds = _kinds(self._schemas.get(key), self._definitions)
                self._last = "\n"
                return ""
            if len(key) <= MAX_KEY_CHARS:
                return None
        return self._close(text)

    def _close(self, rest: str) -> str:
        self._text, self.done = rest, True
        return "}" if self._keys else "{}"

    def _value(self, key: str) -> str | None:
        """Read a value, or the part of a string that has come; None if more text is needed."""
        if not self._begun and not self._text:
            return None
        opening = self._open_value(key)
        if opening is not None:
            return opening
        at, size = self._search(key)
        if size is None:
            return self._part(at)
        value = "".join((*self._held, self._text[:at]))
        self._held, self._text = [], self._text[at + size :]
        return self._end_value(key, value)

    def _open_value(self, key: str) -> str | None:
        """Return the beginning of a string; None if the value is none, or has begun."""
        if not self._begun:
            self._text = self._text.removeprefix("\n")
            self._begun = True
            if key not in self._keys and self._kinds <= {"string"}:
                self._string = True
                return self._name(key) + '"'
        return None

    def _end_value(self, key: str, text: str) -> str:
        """Return the rest of a value from the text before its end."""
        value, self._key = text.removesuffix("\n"), None
        if self._string:
            self._string = False
            return _inner(value) + '"'
        return "" if key in self._keys else self._name(key) + _json(value, self._kinds)

    def _search(self, key: str) -> tuple[int, int | None]:
        """Return where the value ends and the length of its end tag; None: not before there."""
        at = self._text.find("<", self._searched)
        while at >= 0:
            size = self._end_tag(at, key)
            if size is None or size >= 0:
                return at, size
            at = self._text.find("<", at + 1)
        return len(self._text), None

    def _end_tag(self, at: int, key: str) -> int | None:
        """Return the length of the end tag here, 0 for a tag that implies an end; -1: a value goes
        on, None: more text is needed."""
        text = self._text[at : at + MAX_KEY_CHARS]
        if text.startswith(VALUE_ENDS):
            return len(VALUE_ENDS)
        if text.startswith(PARAMETER):
            name, mark, _ = text.removeprefix(PARAMETER).partition(">")
            others = self._schemas.keys() - self._keys - {key} if self._line(at) else ()
            if mark:
                return 0 if name in others else -1
            return None if any(other.startswith(name) for other in others) else -1
        if text.startswith(FUNCTION_ENDS):
            after = text.removeprefix(FUNCTION_ENDS).lstrip(SPACE)
            if after.startswith(AFTER):
                return 0
            open_end = len(text) < MAX_KEY_CHARS
            return None if open_end and any(mark.startswith(after) for mark in AFTER) else -1
        marks = (
            (VALUE_ENDS, FUNCTION_ENDS, PARAMETER)
            if self._line(at)
            else (VALUE_ENDS, FUNCTION_ENDS)
        )
        return None if any(mark.startswith(text) for mark in marks) else -1

    def _line(self, at: int) -> bool:
        """True if a line begins there."""
        return (self._text[at - 1] if at else self._last) == "\n"

    def _part(self, end: int) -> str | None:
        """Release what has come of a string, or hold that of a value, but what may be its end."""
        part = self._text[:end].removesuffix("\n")
        self._text, self._searched = self._text[len(part) :], end - len(part)
        self._last = part[-1:] or self._last
        if self._string:
            return _inner(part) if part else None
        if self._held and len(self._held[-1]) < HELD_CHARS:
            self._held[-1] += part
        else:
            self._held.append(part)
        return None

    def _name(self, key: str) -> str:
        opening = ", " if self._keys else "{"
        self._keys.add(key)
        return f"{opening}{json.dumps(key, ensure_ascii=False)}: "


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest tail of `text` that begins `mark`."""
    if text.find(mark[0], -len(mark)) < 0:  # as nearly always
        return 0
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
