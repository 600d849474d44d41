"""Calls of tools in the text of a model, as it arrives.

    hermes    text <tool_call>{"name": …, "arguments": {…}}</tool_call> …     Qwen, Hermes
    qwen3_coder   text <tool_call><function=…><parameter=…>…</parameter></function></tool_call>
                  text <function=…><parameter=…>…</parameter></function>
    llama3    <|python_tag|>{"name": …, "parameters": {…}}; {…}               Llama 3
    mistral   text [TOOL_CALLS][{"name": …, "arguments": {…}}, …]             Mistral
              text [TOOL_CALLS]name[CALL_ID]id[ARGS]{…}                       Mistral, newer
    deepseek  text <｜tool▁calls▁begin｜>, then for each call                  DeepSeek-V3.1
              <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>, or
              … function<｜tool▁sep｜>name ```json {…}```…                     DeepSeek-V3, R1
    array     [{"name": …, "parameters": {…}}, …]                             tool_choice required
    named     {…}                                                             tool_choice by name

A call begins once its name is complete and is that of a tool of the request; its arguments follow
as they are written. If a key stands twice, the first counts. Text that does not become a call is
content. White space after a call is content once other text follows. The result does not depend on
how the text is cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from medha_router.structured.tagged_arguments import (
    FUNCTION,
    FUNCTION_ENDS,
    PARAMETER,
    SPACE,
    TaggedArguments,
    overlap,
)
from medha_router.structured.tools import Tools

Format = Literal["hermes", "qwen3_coder", "llama3", "mistral", "deepseek", "array", "named"]
CALL, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
BEGINS = {
    "hermes": ("<tool_call>",),
    "qwen3_coder": ("<tool_call>", FUNCTION),
    "mistral": ("[TOOL_CALLS]",),
    "llama3": ("<|python_tag|>",),
    "deepseek": ("<｜tool▁calls▁begin｜>", CALL),
}
ENDS = {
    "hermes": ("</tool_call>",),
    "qwen3_coder": ("</tool_call>",),
    "deepseek": ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
}
MARKS = tuple(
    dict.fromkeys(
        mark for marks in (*BEGINS.values(), *ENDS.values()) for mark in marks if mark != FUNCTION
    )
)
MARKS += ("[ARGS]", "[CALL_ID]", SEPARATOR)
"""Tokens that stand around calls; some tokenizers hold them for special and print nothing."""
ARGUMENTS, CALL_ID = "[ARGS]", "[CALL_ID]"
SKIPPED = {"hermes": "}", "llama3": ";", "mistral": ",]", "deepseek": "`", "array": "[,]"}
"""Characters allowed after the object of a call; models of Hermes' form close one too many."""
MAX_HEAD_CHARS = 4096
MAX_SEEN_CHARS = MAX_HEAD_CHARS << 4
"""Characters of an object before its name."""
SPECIAL, SPECIAL_IN_STRING = re.compile(r'["{}\[\]:,<]'), re.compile(r'["\\]')
"""Characters of an object that may change what the next ones are."""
NESTED = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|["{}\[\]<]', re.DOTALL)
"""Strings, which are whole, and characters that count within nested values."""
MAX_LATE_CALLS = 32
"""Calls at the end of a thinking that are read: together they take about a millisecond."""
NEAR_CHARS = 64
"""Characters in which another mark may stand before a mark."""


def format_of(template: str) -> Format | None:
    """Return the form of calls that a chat template teaches; None if it is none of these."""
    if "<tool_call>" in template:
        return "qwen3_coder" if FUNCTION in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if CALL in template:
        return "deepseek"
    if "ipython" in template and "tools" in template:
        return "llama3"
    return None


def begins_of(form: Format | None, names: Iterable[str]) -> tuple[str, ...]:
    """Return the marks with which calls begin, and for Llama 3 the JSON schema of one without."""
    marks = BEGINS.get(form or "", ())
    if form != "llama3":
        return marks
    of_call = {"type": {"const": "function"}, "name": {"enum": sorted(names)}}
    schema = {
        "type": "object",
        "properties": of_call | {"parameters": {"type": "object"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    return (*marks, json.dumps(schema))


class TextPart(msgspec.Struct, frozen=True):
    """New text: of the content if `call` is None, else of the arguments of call number `call`.

    The first piece of a call has its `name`. `thinking`: the text comes before the content.
    """

    text: str
    call: int | None = None
    name: str | None = None
    thinking: bool = False


class ToolCallParser:
    """Splits the text of one output into content and calls; `calls` counts them.

    `chosen`: it is the model that decides whether to call.
    """

    def __init__(self, form: Format, tools: Tools) -> None:
        self._form, self._tools, self._names = form, tools, tools.names
        self.calls, self.chosen = 0, form != "named"
        self._text = ""
        self._prefix = ""  # content after all, if no call follows
        self._space: list[str] = []  # after a call
        self._state = {"named": "arguments", "array": "between"}.get(form, "content")
        if form == "llama3":
            self._state = "start"
        self._object: _CallObject | None = None
        self._tagged: TaggedArguments | None = None
        self._schemas: dict[str, dict[str, Any]] = {}
        self._pieces: list[TextPart] = []
        if form == "named":
            self._open(tools.named)

    def push(self, text: str) -> list[TextPart]:
        """Add text and return what is decided now."""
        self._text += text
        while self._text and self._step():
            pass
        return self._taken()

    def end(self, finish: str) -> list[TextPart]:
        """Return what is left when the output ends; `length`: a call that was cut stays open."""
        if self._tagged is not None and finish == "stop":
            self._pieces.append(TextPart(self._tagged.end(), self.calls - 1))
        seen = self._object.seen if self._object is not None and not self._object.named else ""
        self._content(self._prefix + seen)
        if self._state in ("content", "head", "start"):
            self._content(self._text)
        self._text = ""
        return self._taken()

    def end_with(self, text: str) -> list[TextPart]:
        """Return the calls, at most MAX_LATE_CALLS, with which a text ends that is no content."""
        begins, calls = BEGINS.get(self._form, ()), list[list[TextPart]]()
        at = end = len(text)
        while len(calls) < MAX_LATE_CALLS:
            at = max((text.rfind(begin, 0, at) for begin in begins), default=-1)
            if at < 0:
                break
            before = text[max(0, at - NEAR_CHARS) : at].rstrip(SPACE)
            if any(before.endswith(begin) and not text.startswith(begin, at) for begin in begins):
                continue  # two marks begin one call
            parser = ToolCallParser(self._form, self._tools)
            parser._schemas = self._schemas
            parts = parser.push(text[at:end]) + parser.end("stop")
            self._schemas = parser._schemas
            if any(part.call is None and part.text.strip() for part in parts):
                break
            calls.append(parts)
            end = at
        pieces: list[TextPart] = []
        for parts in reversed(calls):
            pieces += (
                msgspec.structs.replace(part, call=self.calls + part.call)
                for part in parts
                if part.call is not None
            )
            self.calls += len({part.call for part in parts} - {None})
        return pieces if self._tools.parallel else [piece for piece in pieces if not piece.call]

    def _taken(self) -> list[TextPart]:
        """Take the pieces; without parallel calls, the first call counts, as in vLLM."""
        pieces, self._pieces = self._pieces, []
        return pieces if self._tools.parallel else [piece for piece in pieces if not piece.call]

    def _step(self) -> bool:
        """Take one step; False if more text is needed."""
        return {
            "start": self._start,
            "content": self._in_content,
            "head": self._head,
            "between": self._between,
            "object": self._in_object,
            "tagged": self._in_tagged,
            "arguments": self._all_arguments,
            "rest": self._rest,
        }[self._state]()

    # --- states: each consumes text from the front --------------------------------------------

    def _start(self) -> bool:
        """Decide if an output of Llama 3 is a call: it then begins with one."""
        stripped = self._text.lstrip(SPACE)
        (begin,) = BEGINS["llama3"]
        if len(self._text) - len(stripped) >= MAX_HEAD_CHARS:
            self._state = "rest"
        elif stripped.startswith((begin, "{")):
            rest = stripped.removeprefix(begin)
            self._prefix = self._text[: len(self._text) - len(rest)]
            self._text, self._state = rest, "between"
        elif begin.startswith(stripped):
            return False
        else:
            self._state = "rest"
        return True

    def _in_content(self) -> bool:
        """Release content up to a mark that begins calls."""
        begins = BEGINS[self._form]
        places = [(at, begin) for begin in begins if (at := self._text.find(begin)) >= 0]
        at, begin = min(places, default=(-1, ""))
        if at < 0:
            kept = max(overlap(self._text, begin) for begin in begins)
            self._content(self._text[: len(self._text) - kept])
            self._text = self._text[len(self._text) - kept :]
            return False
        self._content(self._text[:at])
        self._text = self._text[at + len(begin) :]
        self._prefix, self._state = begin, "head"
        return True

    def _head(self) -> bool:
        """Decide what follows the mark: an object, an array, or the name of a tool."""
        stripped = self._text.lstrip(SPACE)
        if len(self._text) - len(stripped) >= MAX_HEAD_CHARS:
            return self._no_call()
        if not stripped:
            return False
        if self._form == "qwen3_coder":
            return self._tagged_head(
                FUNCTION + self._text if self._prefix == FUNCTION else stripped
            )
        openings = {"hermes": "{", "mistral": "{["}.get(self._form, "")
        if stripped[0] in openings:
            rest = stripped.removeprefix("[")
            self._prefix += self._text[: len(self._text) - len(rest)]
            self._text, self._state = rest, "between"
            return True
        if self._form == "hermes":
            return self._no_call()
        name, brace, _ = stripped.partition("{")
        if not brace and len(name) < MAX_HEAD_CHARS:
            return False
        if self._form == "deepseek":
            kind, _, after = name.removeprefix(CALL).partition(SEPARATOR)
            name = after.strip(SPACE).removesuffix("```json").strip(SPACE) or kind
        else:
            name = name.strip(SPACE).removesuffix(ARGUMENTS).partition(CALL_ID)[0]
        if brace and name.strip(SPACE) in self._names:
            self._text = stripped[stripped.index("{") :]
            self._object = _CallObject(self._open(name.strip(SPACE)))
            self._state = "object"
            return True
        return self._no_call()

    def _no_call(self) -> bool:
        """Take the mark that began no call for content."""
        self._content(self._prefix)
        self._prefix, self._state = "", "content"
        return True

    def _tagged_head(self, stripped: str) -> bool:
        """Decide if a function's tag follows the mark; without a mark, its arguments or end too."""
        name, bracket, rest = stripped.removeprefix(FUNCTION).partition(">")
        named = stripped.startswith(FUNCTION) and name in self._names
        if not bracket and FUNCTION.startswith(stripped[: len(FUNCTION)]):
            if len(name) < MAX_HEAD_CHARS:
                return False
        elif bracket and named:
            after, tags = rest.lstrip(SPACE), (PARAMETER, FUNCTION_ENDS)
            if self._prefix == FUNCTION:
                near = len(rest) - len(after) < MAX_HEAD_CHARS
                if near and any(tag.startswith(after) for tag in tags if tag != after):
                    return False
                if not (near and after.startswith(tags)):
                    return self._no_call()
            self._prefix, self._text, self._state = "", rest, "tagged"
            self._schemas = self._schemas or self._tools.schemas()
            self._tagged = TaggedArguments(self._schemas[name])
            self._open(name)
            return True
        return self._no_call()

    def _in_tagged(self) -> bool:
        """Release the arguments between tags as they are written."""
        scanned = self._tagged
        if scanned is None:
            raise AssertionError("no call has begun")
        if arguments := scanned.push(self._text):
            self._pieces.append(TextPart(arguments, self.calls - 1))
        self._text = scanned.rest
        if scanned.done:
            self._tagged, self._state = None, "between"
        return scanned.done

    def _between(self) -> bool:
        """Skip what stands between two calls; begin the next."""
        skipped = SKIPPED.get(self._form, "")
        rest = self._text.lstrip(SPACE + skipped)
        if self._prefix:
            self._prefix += self._text[: len(self._text) - len(rest)]
        self._text = rest
        near = len(self._prefix) < MAX_HEAD_CHARS
        if near and not rest:
            return False
        if near and rest[0] == "{" and self._form not in ("qwen3_coder", "deepseek"):
            self._object, self._state = _CallObject(None), "object"
            return True
        if self._prefix:
            self._content(self._prefix)
            self._prefix, self._state = "", "content" if self._form in BEGINS else "rest"
            self._state = "rest" if self._form == "llama3" else self._state
            return True
        ends = ENDS.get(self._form, ())
        if any(mark.startswith(self._text) and mark != self._text for mark in ends):
            return False
        for mark in ends:
            if self._text.startswith(mark):
                self._text = self._text.removeprefix(mark)
                self._state = "content" if mark == ends[-1] else "between"
                return True
        self._state = "rest" if self._form in ("llama3", "array") else "content"
        return True

    def _in_object(self) -> bool:
        """Scan the object of a call; release its arguments as they are written."""
        scanned = self._object
        if scanned is None:
            raise AssertionError("no call has begun")
        used = scanned.scan(self._text)
        self._text = self._text[used:]
        if scanned.number is None and scanned.name is not None and scanned.name in self._names:
            scanned.number = self._open(scanned.name)
        if scanned.number is None:
            if scanned.decided:
                self._content(self._prefix + scanned.seen)
                self._object, self._prefix = None, ""
                self._state = "rest" if self._form in ("llama3", "array") else "content"
            return True
        if arguments := scanned.take_arguments():
            self._pieces.append(TextPart(arguments, scanned.number))
        if scanned.done:
            if not scanned.any_arguments:
                self._pieces.append(TextPart("{}", scanned.number))
            self._object, self._state = None, "between"
        return True

    def _all_arguments(self) -> bool:
        self._pieces.append(TextPart(self._text, 0))
        self._text = ""
        return False

    def _rest(self) -> bool:
        self._content(self._text)
        self._text = ""
        return False

    # --- pieces -------------------------------------------------------------------------------

    def _open(self, name: str) -> int:
        self._space, self._prefix = [], ""
        number = self.calls
        self.calls += 1
        self._pieces.append(TextPart("", number, name))
        return number

    def _content(self, text: str) -> None:
        if not text:
            return
        if self.calls:  # white space between calls is held until other text follows
            kept = text.rstrip(SPACE)
            if not kept:
                self._space.append(text)
                return
            space, self._space = self._space, [text[len(kept) :]]
            text = "".join(space) + kept
        self._pieces.append(TextPart(text))


class _CallObject:
    """The JSON object of a call, scanned as it arrives.

    If it begins with a `number`, all of it are the arguments. `seen` is the text so far while the
    call has no name.
    """

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.name: str | None = None
        self.done = self.any_arguments = False
        self._broken = self._complete = False
        self.seen = ""
        self._whole = number is not None
        self._arguments = ""
        self._depth = 0
        self._string = self._escaped = False
        self._key = ""
        self._token = ""
        self._value = False

    @property
    def named(self) -> bool:
        return self.number is not None

    @property
    def decided(self) -> bool:
        """Settled: the object has a name, or can have none."""
        return self.name is not None or self._broken or self.done

    def take_arguments(self) -> str:
        """Return the arguments that were scanned since the last call."""
        arguments, self._arguments = self._arguments, ""
        return arguments

    def scan(self, text: str) -> int:
        """Scan `text` up to the object's name or end; returns the number of characters used.

        A mark ends a call whose model left a brace out.
        """
        index = 0
        while index < len(text):
            end = self._end_of_plain(text, index)
            if end > index:
                self._plain(text[index:end])
            elif text[end] == "<" and self.named and not self._string:
                self.done = True
                return end
            else:
                end += 1
                self._letter(text[index])
            if self.number is None:
                self.seen += text[index:end]
                self._broken = self._broken or len(self.seen) > MAX_SEEN_CHARS
            if self.done or (self.number is None and self.decided):
                return end
            index = end
        return len(text)

    def _end_of_plain(self, text: str, start: int) -> int:
        """Return where characters end that are only passed on; one that is escaped is one.

        So are all within an array or an object of the arguments.
        """
        if self._escaped:
            return start + 1
        least = 1 if self._whole else 2
        if self._depth >= least and not self._string:
            end = self._end_of_nested(text, start, least)
        else:
            special = (SPECIAL_IN_STRING if self._string else SPECIAL).search(text, start)
            end = special.start() if special is not None else len(text)
        if self.number is None:
            end = min(end, start + MAX_SEEN_CHARS - len(self.seen) + 1)
        return end

    def _end_of_nested(self, text: str, start: int, least: int) -> int:
        """Return where text is no longer nested `least` deep, or an open string begins."""
        for match in NESTED.finditer(text, start):
            letter = match[0]
            if letter in "{[":
                self._depth += 1
            elif letter in "}]":
                if self._depth == least:
                    return match.start()
                self._depth -= 1
            elif letter == '"' or (letter == "<" and self.named):
                return match.start()
        return len(text)

    def _plain(self, text: str) -> None:
        """Scan characters that change no state, but that of an escape."""
        if self._whole:
            self._arguments += text
            self.any_arguments = True
        elif self._value:
            if self._key == "name":
                self._spell(text)
            self._add(text)
        if self._string:
            self._escaped = False
            if self._depth == 1 and not self._value:
                self._spell(text)

    def _spell(self, text: str) -> None:
        """Add text of a key or a name, but to one so long that it counts for neither."""
        if len(self._token) <= MAX_SEEN_CHARS:
            self._token += text

    def _add(self, text: str) -> None:
        """Add text of a value, which may be that of the arguments."""
        if self._key not in ("arguments", "parameters") or self._complete:
            return
        if text := text if self.any_arguments else text.lstrip(SPACE):
            self._arguments += text
            self.any_arguments = True

    def _letter(self, letter: str) -> None:
        top = self._depth == 1 and not self._string
        closes = top and letter == "}"
        if self._whole:
            self._arguments += letter
            self.any_arguments = True
        elif self._value and not closes and not (top and letter == ","):
            if self._key == "name":
                self._spell(letter)
            self._add(letter)
        if self._string:
            self._in_string(letter)
        elif letter == '"':
            self._string = True
            if self._depth == 1 and not self._value:
                self._token = ""
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._close_value()
            self._depth -= 1
            self.done = self._depth == 0
            self._complete = self._complete or (self._depth == 1 and self.any_arguments)
        elif top and letter == ":":
            self._value, self._token = True, ""
        elif top and letter == ",":
            self._close_value()

    def _in_string(self, letter: str) -> None:
        if self._escaped:
            self._escaped = False
        elif letter == "\\":
            self._escaped = True
        elif letter == '"':
            self._string = False
            if self._depth == 1 and not self._value:
                self._key = self._token
            elif self._depth == 1 and self._key == "name" and self.number is None:
                self._read_name()
            return
        if self._depth == 1 and not self._value:
            self._spell(letter)

    def _read_name(self) -> None:
        try:
            self.name = msgspec.json.decode(self._token.strip(SPACE), type=str)
        except msgspec.DecodeError:
            self._broken = True

    def _close_value(self) -> None:
        if self._depth == 1:
            self._value, self._token = False, ""
            self._complete = self.any_arguments
