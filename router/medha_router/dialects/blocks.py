"""Output of a chat as a row of blocks: thinking, texts and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from medha_router.dialects.openai_answer import call_id
from medha_router.generation import ClientRequest
from medha_router.structured.tool_calls import TextPart
from medha_router.tokenization.detokenizer import Delta, TokenLogprob


class OutputBlock:
    """A text, a thinking, or the arguments of a call if `name` is set."""

    def __init__(self, index: int, *, thinking: bool = False) -> None:
        self.index, self.thinking = index, thinking
        self.call_id = ""
        self.name: str | None = None
        self.parts: list[str] = []
        self.logprobs: list[TokenLogprob] = []

    @property
    def text(self) -> str:
        return "".join(self.parts)


class Change(msgspec.Struct, frozen=True):
    """A block that begins, gets `text` and the log probabilities of its tokens, or ends."""

    kind: Literal["begin", "text", "end"]
    block: OutputBlock
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()


class BlockBuilder:
    """Builds the blocks of a request with one output. `finish` is None until the output ends."""

    def __init__(self, request: ClientRequest) -> None:
        self._id, self._parser = request.id, request.parser(0)
        self._logprobs: list[TokenLogprob] = []  # of tokens without text so far
        self._open: tuple[tuple[int | None, bool], OutputBlock] | None = None
        self.blocks: list[OutputBlock] = []
        self.finish: str | None = None

    @property
    def calls(self) -> bool:
        """True once the output has a call."""
        return any(block.name is not None for block in self.blocks)

    def push(self, delta: Delta) -> list[Change]:
        """Add new output and return what changed."""
        changes: list[Change] = []
        self._logprobs += delta.logprobs
        for part in self._parts(delta):
            block = self._block_of(part, changes)
            if part.text:
                block.parts.append(part.text)
                block.logprobs += self._logprobs
                changes.append(Change("text", block, part.text, self._logprobs))
                self._logprobs = []
        if delta.finish is not None:
            self.finish = delta.finish
            self._end(changes)
        return changes

    def _parts(self, delta: Delta) -> list[TextPart]:
        parts = self._parser.push(delta.text)
        return parts if delta.finish is None else parts + self._parser.end(delta.finish)

    def _block_of(self, part: TextPart, changes: list[Change]) -> OutputBlock:
        """Return the block of a part; it begins with the part if it is not the open one."""
        kind = (part.call, part.thinking)
        if self._open is not None and self._open[0] == kind:
            return self._open[1]
        self._end(changes)
        block = OutputBlock(len(self.blocks), thinking=part.thinking)
        if part.call is not None:
            block.call_id, block.name = call_id(self._id, 0, part.call), part.name or ""
        self.blocks.append(block)
        self._open = (kind, block)
        changes.append(Change("begin", block))
        return block

    def _end(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(Change("end", self._open[1]))
            self._open = None
