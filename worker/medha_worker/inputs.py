"""Turn a step and the rank's sequence state into what the model reads: rows, angles, pages, slots.

Built once per step and rank, used by every layer; every rank of a group builds the same. Rows
stand in the order of the group's chunks. Pages that the step brings are entered into the
sequences' tables here, before anything runs. The host lays rows out with numpy; token, position and
seat of each row cross to the device at once, and what follows from them is computed there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from medha.batch import Chunk
from medha.errors import EngineError, ProtocolError
from medha.messages.ranks import Step
from medha_worker.attention.interface import Attention, Plan, Sight, Span
from medha_worker.device import CPU, Device
from medha_worker.kv.pages import KvPages, Slots
from medha_worker.model.rope import Rotary
from medha_worker.parallel.interface import SharedRows
from medha_worker.sequences import PageTable, Sequences, SequenceState

Ids = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class StepInputs:
    """One step for one rank.

    `tokens` int64 [rows]; `positions` of each in its sequence, whose `seats` these are, alike;
    `turns` complex64 [rows, 1, head_dim / 2] the rows' rotary angles;
    `attention` the planned spans, by the window of the layers that they are for; `slots` where the
    written rows' keys and values go; `written` int64 rows that are, None when all are; `shared` the
    rows whose attention spans groups.
    `yielding` are the rows to sample here: (batch row, sequence, position of the token to be
    drawn), `yield_rows` the rows alone. `whole`: what runs the batch in one launch, with the
    attention planned there; else None.
    """

    number: int
    rows: int
    tokens: torch.Tensor
    positions: torch.Tensor
    seats: torch.Tensor
    turns: torch.Tensor
    attention: dict[int, Plan]
    slots: Slots
    written: torch.Tensor | None
    shared: tuple[SharedRows, ...]
    yielding: tuple[tuple[int, SequenceState, int], ...]
    yield_rows: torch.Tensor
    whole: WholeBatch | None = None


class WholeBatch(Protocol):
    """What runs a batch in one launch (see `graphs`)."""

    def run(self, rows: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """Hidden states, or in the last stage logits, of all rows."""
        ...


# Whether a batch with these spans, by window, is run whole; if so its attention is planned there.
Choose = Callable[[Sequence[Chunk], Mapping[int, Sequence[Span]]], WholeBatch | None]


class InputBuilder:
    """Builds the inputs of one rank's steps, in step order.

    `embeds`: this rank is in the first stage, so every row needs its token; `vocab` bounds them.
    `windows`: those of its layers (0: a layer that sees all). `always`: whether layers with a
    window have it where all is in sight too, so that a row's kernel does not depend on its batch.
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
        device: Device = CPU,
        choose: Choose = lambda chunks, spans: None,
        always: bool = False,
    ) -> None:
        self.sequences, self.attention, self.rotary, self.kv = sequences, attention, rotary, kv
        self.device, self.seats, self.choose = device, sequences.seats, choose
        self.vocab, self.embeds, self.windows, self.always = vocab, embeds, windows, always

    @torch.inference_mode()
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
        spans = self._lay(chunks, states, starts)
        by_window = {
            window: [
                seen(span, chunk, state.pages, window, self.kv.page_tokens, self.always)
                for span, chunk, state in zip(spans, chunks, states, strict=True)
            ]
            for window in self.windows
        }
        whole = self.choose(chunks, by_window)
        planned = {
            window: self.attention.plan(those)
            for window, those in by_window.items()
            if whole is None
        }
        yielding = tuple(
            (at + chunk.length - 1, state, chunk.end)
            for chunk, state, at in zip(chunks, states, starts, strict=False)
            if chunk.yields and chunk.tail == group
        )
        written = _written(chunks, starts, group)
        rows = self._rows(tokens, chunks, states, starts, yielding, written)
        slots = rows.positions, rows.seats
        if written is not None:
            slots = rows.positions[rows.written], rows.seats[rows.written]
        return StepInputs(
            number=step.batch.number,
            rows=starts[-1],
            tokens=rows.tokens,
            positions=rows.positions,
            seats=rows.seats,
            turns=self.rotary.turns(
                rows.positions,
                [(c.length, s.rope_tokens) for c, s in zip(chunks, states, strict=True)],
            ),
            attention=planned,
            slots=self.slots(*slots),
            written=None if written is None else rows.written,
            shared=tuple(
                SharedRows(at, chunk.length, chunk.groups)
                for chunk, at in zip(chunks, starts, strict=False)
                if chunk.shared
            ),
            yielding=yielding,
            yield_rows=rows.yields,
            whole=whole,
        )

    def slots(self, positions: torch.Tensor, seats: torch.Tensor) -> Slots:
        """Where the keys and values of rows go, read from the tables on the device."""
        T = self.kv.page_tokens
        return self.seats.pages(seats, positions // T), positions % T

    @torch.inference_mode()
    def drew(self, inputs: StepInputs, tokens: torch.Tensor, kept: Sequence[int]) -> None:
        """Keep on the device what the yielding rows drew; `kept` are those, of their places in
        `yielding`, that count."""
        rows = inputs.yield_rows
        if len(kept) < len(inputs.yielding):
            (places,) = self.device.upload(np.array(kept, dtype=np.int64))
            rows, tokens = rows[places], tokens[places]
        self.seats.drew(inputs.seats[rows], tokens)
        for place in kept:
            inputs.yielding[place][1].drawn = True

    def _rows(
        self,
        tokens: Ids,
        chunks: tuple[Chunk, ...],
        states: list[SequenceState],
        starts: list[int],
        yielding: tuple[tuple[int, SequenceState, int], ...],
        written: Ids | None,
    ) -> _Rows:
        """The rows on the device, each −1 replaced by the token that its sequence drew last."""
        self.seats.flush()
        seats = np.array([state.seat for state in states], dtype=np.int64)
        rows = _Rows(
            *self.device.upload(
                tokens,
                _positions(chunks, starts),
                np.repeat(seats, [chunk.length for chunk in chunks]),
                np.array([row for row, _, _ in yielding], dtype=np.int64),
                np.empty(0, dtype=np.int64) if written is None else written,
            )
        )
        if tokens.min() >= 0:
            return rows
        known = torch.where(rows.tokens < 0, self.seats.last[rows.seats], rows.tokens)
        return rows._replace(tokens=known)

    def _tokens(
        self,
        step: Step,
        chunks: tuple[Chunk, ...],
        states: list[SequenceState],
        starts: list[int],
    ) -> Ids:
        """The rows' ids; −1 where the device knows better; histories see the others pass."""
        tokens = np.frombuffer(step.tokens, dtype=np.int32).astype(np.int64)
        if not chunks or len(tokens) != starts[-1]:
            raise ProtocolError(
                f"step {step.step} brings {len(tokens)} tokens for {starts[-1]} rows of"
                f" {len(chunks)} chunks of group {self.sequences.group}; expected one per row"
            )
        unknown = tokens < 0
        for chunk, state, at in zip(chunks, states, starts, strict=False):
            if unknown[at] and chunk.length == 1 and state.drawn:
                unknown[at] = False
            elif state.history is not None and tokens[at] >= 0:
                rows = tokens[at : at + chunk.length].astype(np.int32)
                state.history.see(chunk.start, rows)
        wrong = unknown | (tokens >= self.vocab)
        if self.embeds and wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            seq = next(c.seq for c, at in zip(chunks, starts[1:], strict=True) if row < at)
            raise EngineError(
                f"step {step.step}: row {row} (sequence {seq}) has token {tokens[row]}: must be in"
                f" [0, {self.vocab}), or −1 for one that this rank sampled last"
            )
        return tokens

    def _lay(
        self, chunks: tuple[Chunk, ...], states: list[SequenceState], starts: list[int]
    ) -> list[Span]:
        """Spans of all chunks, whose new pages are entered."""
        spans = []
        T = self.kv.page_tokens
        for chunk, state, at in zip(chunks, states, starts, strict=False):
            tail = chunk.tail == self.sequences.group
            if tail:
                self._enter(chunk, state, T)
            held = _held(chunk, state, T, tail)
            spans.append(Span(at, chunk.length, held, state.pages.ids, tail))
        return spans

    def _enter(self, chunk: Chunk, state: SequenceState, page_tokens: int) -> None:
        """Add the chunk's new pages; logical pages start // T … (end − 1) // T must be held."""
        if chunk.pages:
            self.sequences.append(state, -(-chunk.start // page_tokens), chunk.pages)
        first, last = chunk.start // page_tokens, (chunk.end - 1) // page_tokens
        held = len(state.pages) - state.pages.before(first)
        if state.pages.last_logical != last or held != last - first + 1:
            raise ProtocolError(
                f"sequence {chunk.seq}: tokens [{chunk.start}, {chunk.end}) need logical pages"
                f" {first}…{last} in group {chunk.tail}, which holds {len(state.pages)} pages up to"
                f" {state.pages.last_logical}; the step must bring the missing ones"
            )


class _Rows(NamedTuple):
    """What crosses to the device with a step, all int64: of each row, then which rows yield and
    which are written (none where all are)."""

    tokens: torch.Tensor
    positions: torch.Tensor
    seats: torch.Tensor
    yields: torch.Tensor
    written: torch.Tensor


def seen(
    span: Span, chunk: Chunk, pages: PageTable, window: int, page_tokens: int, always: bool = False
) -> Span:
    """The span of a chunk as a layer with `window` has it (0: none): the pages in sight alone, and
    the window where something is out of sight, or `always`."""
    if not window or (chunk.end <= window and not always):
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
