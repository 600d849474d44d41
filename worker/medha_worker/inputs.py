"""Turn a step and the rank's sequence state into what the model reads: rows, angles, pages, slots.

Built once per step and rank, used by every layer; every rank of a group builds the same. Rows
stand in the order of the group's chunks. Pages that the step brings are entered into the
sequences' tables here, before anything runs.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from medha.batch import Chunk
from medha.errors import EngineError, ProtocolError
from medha.messages.ranks import Step
from medha_worker.attention.interface import Attention, Plan, Sight, Span
from medha_worker.kv.pages import KvPages, Slots
from medha_worker.model.rope import Rotary
from medha_worker.parallel.interface import SharedRows
from medha_worker.sequences import PageTable, Sequences, SequenceState

Ids = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class StepInputs:
    """One step for one rank.

    `tokens` int64 [rows]; `turns` complex64 [rows, 1, head_dim / 2] the rows' rotary angles;
    `attention` the planned spans, by the window of the layers that they are for; `slots` where the
    written rows' keys and values go; `written` int64 rows that are, None when all are; `shared` the
    rows whose attention spans groups.
    `yielding` are the rows to sample here: (batch row, sequence, position of the token to be
    drawn), `yield_rows` the rows alone.
    """

    number: int
    rows: int
    tokens: torch.Tensor
    turns: torch.Tensor
    attention: dict[int, Plan]
    slots: Slots
    written: torch.Tensor | None
    shared: tuple[SharedRows, ...]
    yielding: tuple[tuple[int, SequenceState, int], ...]
    yield_rows: torch.Tensor


class InputBuilder:
    """Builds the inputs of one rank's steps, in step order.

    `embeds`: this rank is in the first stage, so every row needs its token; `vocab` bounds them.
    `windows`: those of its layers (0: a layer that sees all).
    """

    def __init__(
        self,
        sequences: Sequences,
        attention: Attention,
        rotary: Rotary,
        kv: KvPages,
        vocab: int,
        embeds: bool,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        self.sequences, self.attention, self.rotary, self.kv = sequences, attention, rotary, kv
        self.vocab, self.embeds, self.windows = vocab, embeds, windows

    def build(self, step: Step) -> StepInputs:
        """Apply `step` to the sequences and lay out its rows.

        Raises ProtocolError when the step contradicts itself or the tables, EngineError when it
        needs a sequence or token that this rank does not know.
        """
        group = self.sequences.group
        self.sequences.apply(step)
        chunks = step.batch.of_group(group)
        states = [self.sequences[chunk.seq] for chunk in chunks]
        starts = np.cumsum([0, *(chunk.length for chunk in chunks)]).tolist()
        tokens = self._tokens(step, chunks, states, starts)
        positions = _positions(chunks, starts)
        written = _written(chunks, starts, group)
        spans, pages = self._lay(chunks, states, starts)
        kept = positions if written is None else positions[written]
        tails = [(c, s, at) for c, s, at in zip(chunks, states, starts, strict=False)
                 if c.tail == group]  # fmt: skip
        cos, sin = self.rotary.angles(
            torch.from_numpy(positions),
            [(c.length, s.rope_tokens) for c, s in zip(chunks, states, strict=True)],
        )
        yielding = tuple(
            (at + chunk.length - 1, state, chunk.end) for chunk, state, at in tails if chunk.yields
        )
        return StepInputs(
            number=step.batch.number,
            rows=starts[-1],
            tokens=torch.from_numpy(tokens),
            turns=torch.complex(cos, sin),
            attention={
                window: self.attention.plan(
                    [
                        seen(span, chunk, state.pages, window, self.kv.page_tokens)
                        for span, chunk, state in zip(spans, chunks, states, strict=True)
                    ]
                )
                for window in self.windows
            },
            slots=(torch.from_numpy(pages), torch.from_numpy(kept % self.kv.page_tokens)),
            written=None if written is None else torch.from_numpy(written),
            shared=tuple(
                SharedRows(at, chunk.length, chunk.groups)
                for chunk, at in zip(chunks, starts, strict=False)
                if chunk.shared
            ),
            yielding=yielding,
            yield_rows=torch.tensor([row for row, _, _ in yielding], dtype=torch.int64),
        )

    def _tokens(
        self,
        step: Step,
        chunks: tuple[Chunk, ...],
        states: list[SequenceState],
        starts: list[int],
    ) -> Ids:
        """The rows' ids with −1 replaced by the sequence's last; histories see them pass."""
        tokens = np.frombuffer(step.tokens, dtype=np.int32).astype(np.int64)
        if not chunks or len(tokens) != starts[-1]:
            raise ProtocolError(
                f"step {step.step} brings {len(tokens)} tokens for {starts[-1]} rows of"
                f" {len(chunks)} chunks of group {self.sequences.group}; expected one per row"
            )
        for chunk, state, at in zip(chunks, states, starts, strict=False):
            if tokens[at] < 0 and chunk.length == 1:
                tokens[at] = -1 if state.last_token is None else state.last_token
            if state.history is not None and tokens[at] >= 0:
                rows = tokens[at : at + chunk.length].astype(np.int32)
                state.history.see(chunk.start, rows)
        if self.embeds and not 0 <= tokens.min() <= tokens.max() < self.vocab:
            row = int(np.flatnonzero((tokens < 0) | (tokens >= self.vocab))[0])
            seq = next(c.seq for c, at in zip(chunks, starts[1:], strict=True) if row < at)
            raise EngineError(
                f"step {step.step}: row {row} (sequence {seq}) has token {tokens[row]}: must be in"
                f" [0, {self.vocab}), or −1 for one that this rank sampled last"
            )
        return tokens

    def _lay(
        self, chunks: tuple[Chunk, ...], states: list[SequenceState], starts: list[int]
    ) -> tuple[list[Span], Ids]:
        """Spans of all chunks, and the page of each row whose tail is here."""
        spans = []
        pages = [np.empty(0, dtype=np.int64)]
        T = self.kv.page_tokens
        for chunk, state, at in zip(chunks, states, starts, strict=False):
            tail = chunk.tail == self.sequences.group
            if tail:
                entered = _enter(chunk, state, T)
                if chunk.length > 1:
                    filled = chunk.start % T
                    entered = np.repeat(entered, T)[filled : filled + chunk.length]
                pages.append(entered)
            held = _held(chunk, state, T, tail)
            spans.append(Span(at, chunk.length, held, state.pages.ids, tail))
        return spans, np.concatenate(pages)


def seen(span: Span, chunk: Chunk, pages: PageTable, window: int, page_tokens: int) -> Span:
    """The span of a chunk as a layer with `window` has it (0: none): the pages in sight alone."""
    if not window or chunk.end <= window:
        return span
    logical, ids = pages.since(max(0, chunk.start - window + 1) // page_tokens)
    unseen = len(span.pages) - len(ids)  # full ones, as they are before the chunk's
    held = span.held - unseen * page_tokens
    sight = Sight(window, chunk.start, logical)
    return Span(span.start, span.length, held, ids, span.tail, sight)


def _positions(chunks: tuple[Chunk, ...], starts: list[int]) -> Ids:
    """Of each row in its sequence."""
    lengths = [chunk.length for chunk in chunks]
    shift = np.array([chunk.start for chunk in chunks]) - starts[:-1]
    return np.arange(starts[-1]) + np.repeat(shift, lengths)


def _enter(chunk: Chunk, state: SequenceState, page_tokens: int) -> Ids:
    """Add the chunk's new pages; returns the ids of logical pages start // T … (end − 1) // T."""
    if chunk.pages:
        state.pages.append(-(-chunk.start // page_tokens), chunk.pages)
    first, last = chunk.start // page_tokens, (chunk.end - 1) // page_tokens
    count = last - first + 1
    if state.pages.last_logical != last or len(state.pages) - state.pages.before(first) != count:
        raise ProtocolError(
            f"sequence {chunk.seq}: tokens [{chunk.start}, {chunk.end}) need logical pages"
            f" {first}…{last} in group {chunk.tail}, which holds {len(state.pages)} pages up to"
            f" {state.pages.last_logical}; the step must bring the missing ones"
        )
    return state.pages.ids[-count:]


def _held(chunk: Chunk, state: SequenceState, page_tokens: int, tail: bool) -> int:
    """Tokens before the chunk in this group: full pages, but for the tail's last partial one."""
    count = state.pages.before(-(-chunk.start // page_tokens))
    filled = chunk.start % page_tokens
    return count * page_tokens - (page_tokens - filled if tail and filled else 0)


def _written(chunks: tuple[Chunk, ...], starts: list[int], group: int) -> Ids | None:
    """Rows whose keys and values are kept here; None when all are."""
    if all(chunk.tail == group for chunk in chunks):
        return None
    kept = [
        np.arange(at, at + chunk.length)
        for chunk, at in zip(chunks, starts, strict=False)
        if chunk.tail == group
    ]
    return np.concatenate([np.empty(0, dtype=np.int64), *kept])
