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


class TaggedArguments:
    """Reads the arguments of one call. `schema`: that of its arguments, of any form."""

    def __init__(self, schema: object) -> None:
        properties = schema.get("properties") if isinstance(schema, dict) else None
        self._schemas = properties if isinstance(properties, dict) else {}
        self._text = ""
        self._searched = 0  # no mark ends before
        self._keys: set[str] = set()
        self._key: str | None = None
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
        text = self._text.lstrip(SPACE)
        if PARAMETER.startswith(text[: len(PARAMETER)]) or ENDS.startswith(text[: len(ENDS)]):
            if text.startswith(ENDS):
                return self._close(text.removeprefix(ENDS))
            key, mark, value = text.removeprefix(PARAMETER).partition(">")
            if text.startswith(PARAMETER) and mark:
                self._key, self._text, self._begun, self._searched = key, value, False, 0
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
        if not repeated and not self._string and _is_text(self._schemas.get(key)):
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
        return self._name(key) + _json(value, self._schemas.get(key))

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


def _kinds(schema: object) -> set[str]:
    """Return the JSON types that a schema names; empty if it does not say."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type")
    named = set(kinds) if isinstance(kinds, list) else {kinds} if isinstance(kinds, str) else set()
    for choice in ("anyOf", "oneOf"):
        for inner in schema.get(choice, ()) if isinstance(schema.get(choice), list) else ():
            named |= _kinds(inner)
    return named


def _is_text(schema: object) -> bool:
    """True if a value is a string as it stands: its type is string alone, or unknown."""
    return _kinds(schema) <= {"string"}


def _json(value: str, schema: object) -> str:
    """Return the JSON that a value spells, else a string."""
    kinds, text = _kinds(schema), value.strip(SPACE)
    if text in ("True", "False", "None"):
        text = {"True": "true", "False": "false", "None": "null"}[text]
    try:
        decoded: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    if "string" in kinds and not (decoded is None and "null" in kinds):
        return json.dumps(value, ensure_ascii=False)
    return text


def _inner(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
