"""Output of a chat, split as it arrives into thinking, content and calls of tools.

    <think>…</think> content, and calls in the form of the model's family

Qwen3, DeepSeek-R1 and others think so. A template may end the prompt with the first mark: then the
output begins in the thinking, and is nothing else if the second mark never comes. Thinking stands
at the beginning only, and calls in it do not count, unless the output ends with them. Line breaks
around the marks are left out, as templates write them. The result does not depend on how the text
is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from medha_router.structured.tagged_arguments import SPACE, overlap
from medha_router.structured.tool_calls import TextPart, ToolCallParser

BEGINS, ENDS = "<think>", "</think>"
MAX_SPACE_CHARS = 4096
MAX_CALLS_CHARS = 16 << 10
"""Characters of the end of a thinking that may be calls."""
TAIL_TOKENS = 16
"""Tokens at the end of a prompt that may spell the first mark, and line breaks after it."""
Thinking = Literal["none", "possible", "begun", "continued"]
"""Thinking of an output: never, if it begins with the mark, from its beginning, or the rest of the
thinking in a message that it continues."""


def thinking_after(prompt: Iterable[bytes]) -> Thinking:
    """Return whether an output begins in its thinking, from a prompt's pieces, the last first."""
    begins, end = BEGINS.encode(), b""
    for piece in prompt:
        end = (piece + end).rstrip()
        if len(end) >= len(begins):
            break
    return "begun" if end.endswith(begins) else "possible"


class ThinkingCount:
    """Counts the tokens of an output that are its thinking, with the marks, as they arrive.

    `tokens` is their number so far. They are read token by token, so the count is exact where text
    comes in longer pieces.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._begun = thinking in ("begun", "continued")
        self._undecided = thinking != "none"  # whether it begins with the mark
        self._read = self._space = 0
        self._printed = b""
        self.tokens = 0
        self._done = thinking == "none"

    def read(self, tokens: Sequence[int], bytes_of: Callable[[int], bytes]) -> None:
        """Count new tokens; `tokens` are all of the output, and `bytes_of` is what one prints."""
        begins, ends = BEGINS.encode(), ENDS.encode()
        for token in tokens[self._read :] if not self._done else ():
            self._read += 1
            self._printed += bytes_of(token)
            if self._undecided:
                first = self._printed.lstrip(SPACE.encode())
                self._space += len(self._printed) - len(first)
                self._printed = first
                near = self._space < MAX_SPACE_CHARS
                self._undecided = near and begins.startswith(first) and first != begins
                marked = near and first.startswith(begins)
                if not (self._undecided or self._begun or marked):
                    self._done = True
                    return
                if self._undecided and not self._begun:
                    continue
            self.tokens = self._read
            self._done = ends in self._printed
            if self._done:
                return
            if not self._undecided:
                self._printed = self._printed[1 - len(ends) :]


def ends_in_thinking(message: str) -> bool:
    """Return whether a message of the assistant ends in the thinking with which it begins."""
    return message.lstrip(SPACE).startswith(BEGINS) and ENDS not in message


class OutputParser:
    """Splits the text of one output. `calls` finds calls of tools in what is no thinking, which is
    left out unless `shown`."""

    def __init__(
        self, thinking: Thinking, calls: ToolCallParser | None = None, *, shown: bool = True
    ) -> None:
        self._calls, self._begun, self._shown = calls, thinking == "begun", shown
        self._state: Literal["start", "thinking", "content"] = "start"
        if thinking in ("none", "continued"):
            self._state = "content" if thinking == "none" else "thinking"
        self._text = ""
        self._thoughts = ""  # their end
        self._skips = False  # line breaks that come next
        self._breaks = 0  # line breaks that stand before `_text`, unless the thinking ends there

    @property
    def plain(self) -> bool:
        """True if all further text is content as it is."""
        return self._state == "content" and self._calls is None and not self._skips

    @property
    def called(self) -> bool:
        """True if the model has decided to call a tool."""
        return self._calls is not None and self._calls.chosen and self._calls.calls > 0

    def push(self, text: str) -> list[TextPart]:
        """Add text and return what is decided now."""
        self._text += text
        if self._state == "start":
            self._start()
        parts = self._thinking() if self._state == "thinking" else []
        return parts + self._content() if self._state == "content" else parts

    def end(self, finish: str) -> list[TextPart]:
        """Return what is left when the output ends, for its reason `finish`."""
        thinking = self._state == "thinking" or (self._state == "start" and self._begun)
        parts: list[TextPart] = []
        if not thinking:
            self._state = "content"
            parts = self._content()
        elif text := self._text.strip("\n"):
            parts = self._thought("\n" * self._breaks + text)
        if thinking and finish == "stop" and self._calls is not None:
            return parts + self._calls.end_with(self._thoughts)
        return parts + (self._calls.end(finish) if self._calls is not None else [])

    def _start(self) -> None:
        """Decide if the output begins with thinking; the mark may stand in prompt and output."""
        stripped = self._text.lstrip(SPACE)
        near = len(self._text) - len(stripped) < MAX_SPACE_CHARS
        if near and stripped.startswith(BEGINS):
            self._state, self._skips, self._text = "thinking", True, stripped.removeprefix(BEGINS)
        elif not (near and BEGINS.startswith(stripped)):
            self._state, self._skips = "thinking" if self._begun else "content", self._begun

    def _thinking(self) -> list[TextPart]:
        if self._skips:
            self._text = self._text.lstrip("\n")
            self._skips = not self._text
        thought, mark, rest = self._text.partition(ENDS)
        if mark:
            self._state, self._skips = "content", True
        else:
            thought = thought[: len(thought) - overlap(thought, ENDS)]
            rest = self._text[len(thought) :]
        self._text = rest
        text = thought.rstrip("\n")
        breaks, self._breaks = self._breaks, len(thought) - len(text)
        if text:
            return self._thought("\n" * breaks + text)
        self._breaks += breaks
        return []

    def _thought(self, text: str) -> list[TextPart]:
        if self._calls is not None:
            self._thoughts = (self._thoughts + text)[-MAX_CALLS_CHARS:]
        return [TextPart(text, thinking=True)] if text and self._shown else []

    def _content(self) -> list[TextPart]:
        text, self._text = self._text, ""
        if self._skips:
            text = text.lstrip("\n")
            self._skips = not text
        if self._calls is not None:
            return self._calls.push(text)
        return [TextPart(text)] if text else []
