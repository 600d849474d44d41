"""Turn a step and the rank's sequence state into model inputs: rows, rotary factors, pages, slots.

Built once per step and rank, and used by every layer; all ranks of a group build the same. Rows
stand in the order of the group's chunks. New pages of a step enter the sequences' page tables here,
before anything runs. numpy lays rows out on the host; token, position and slot of each row are
uploaded at once, and the rest is computed on the device.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from medha.batch import Chunk
from medha.errors import EngineError, ProtocolError
from medha.messages.ranks import Step
from medha_worker.attention.kernel_interface import Attention, AttentionPlan, Sight, Span
from medha_worker.device import CPU, ComputeDevice
from medha_worker.kv.pages import KvPages, SlotMapping
from medha_worker.model.low_rank import Rows
from medha_worker.model.rope import Rotary
from medha_worker.parallel.collectives import SharedRows
from medha_worker.penalties import TokenCounts
from medha_worker.sequences import PageTable, Sequences, SequenceState

Ids = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class StepInputs:
    """Model inputs of a step on one rank.

    `tokens`, `positions` (in the sequence) and `device_slots` (of the sequence) are int64 [rows];
    `turns` are the rows' rotary factors, complex64 [rows, 1, head_dim / 2]. `attention` maps a
    window to the plan for layers with that window. `slot_mapping` gives the pages and offsets where
    keys and values of the `written` rows go (int64; None: all rows). Attention of `shared` rows
    spans groups. `yielding` lists the rows to sample here: (batch row, sequence, position of the
    new token); `yield_rows` holds their batch rows. `scored` lists the chunks whose prompt has log
    probabilities: (first batch row, sequence, first position, rows). `whole`, if set, runs the
    batch in one launch and has its own attention plan. `adapters`: rows by adapter; such a batch
    has no `whole`, and no graphs.
    """

    number: int
    rows: int
    tokens: torch.Tensor
    positions: torch.Tensor
    device_slots: torch.Tensor
    turns: torch.Tensor
    attention: dict[int, AttentionPlan]
    slot_mapping: SlotMapping
    written: torch.Tensor | None
    shared: tuple[SharedRows, ...]
    yielding: tuple[tuple[int, SequenceState, int], ...]
    yield_rows: torch.Tensor
    scored: tuple[tuple[int, SequenceState, int, int], ...] = ()
    whole: WholeBatch | None = None
    adapters: tuple[tuple[str, Rows], ...] = ()


class WholeBatch(Protocol):
    """A recorded batch that runs in one launch (see `graphs`)."""

    def run(self, rows: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """Return hidden states of all rows, or logits in the last stage."""
        ...


# Returns the recorded batch for chunks and their spans by window, planned; None if none fits.
Choose = Callable[[Sequence[Chunk], Mapping[int, Sequence[Span]]], WholeBatch | None]


class InputBuilder:
    """Builds the inputs of a rank's steps, in step order.

    `embeds`: this rank is in the first stage, so every row needs a token id below `vocab`.
    `windows`: those of its layers (0: full attention). `always`: give a windowed layer its window
    even if the whole context is in sight, so that a row's kernel does not depend on its batch.
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
        device: ComputeDevice = CPU,
        choose: Choose = lambda chunks, spans: None,
        always: bool = False,
    ) -> None:
        self.sequences, self.attention, self.rotary, self.kv = sequences, attention, rotary, kv
        self.device, self.device_slots, self.choose = device, sequences.device_slots, choose
        self.vocab, self.embeds, self.windows, self.always = vocab, embeds, windows, always

    @torch.inference_mode()
    def build(self, step: Step) -> StepInputs:
        """Apply `step` to the sequences and lay out its rows.

        Raises ProtocolError if the step contradicts itself or the page tables, EngineError if it
        names a sequence or token that this rank does not hold.
        """
        group = self.sequences.group
        self.sequences.apply(step)
        chunks = step.batch.of_group(group)
        states = [self.sequences[chunk.seq] for chunk in chunks]
        starts = list(itertools.accumulate((chunk.length for chunk in chunks), initial=0))
        tokens = self._tokens(step, chunks, states, starts)
        spans = self._lay(chunks, states, starts)
        by_window = {
            window: [
                seen(span, chunk, state.pages, window, self.kv.page_tokens, self.always)
                for span, chunk, state in zip(spans, chunks, states, strict=True)
            ]
            if window
            else spans
            for window in self.windows
        }
        adapters = self._adapters(chunks, states, starts)
        whole = None if adapters else self.choose(chunks, by_window)
        planned = {
            window: self.attention.plan(window_spans)
            for window, window_spans in by_window.items()
            if whole is None
        }
        yielding = tuple(
            [
                (end - 1, state, chunk.end)
                for chunk, state, end in zip(chunks, states, starts[1:], strict=True)
                if chunk.yields and chunk.tail == group
            ]
        )
        written = _written(chunks, starts, group)
        rows = self._rows(tokens, chunks, states, starts, yielding, written)
        return StepInputs(
            number=step.batch.number,
            rows=starts[-1],
            tokens=rows.tokens,
            positions=rows.positions,
            device_slots=rows.device_slots,
            turns=self.rotary.turns(
                rows.positions,
                ((c.length, s.rope_tokens) for c, s in zip(chunks, states, strict=True)),
            ),
            attention=planned,
            slot_mapping=(self.device_slots.pages(rows.places), rows.offsets),
            written=None if written is None else rows.written,
            shared=tuple(
                SharedRows(at, chunk.length, chunk.groups)
                for chunk, at in zip(chunks, starts, strict=False)
                if len(chunk.groups) > 1
            ),
            yielding=yielding,
            yield_rows=rows.yields,
            scored=tuple(
                (at, state, chunk.start + 1, min(chunk.end, len(state.prompt) - 1) - chunk.start)
                for chunk, state, at in zip(chunks, states, starts, strict=False)
                if state.prompt is not None
                and chunk.tail == group
                and chunk.start + 1 < len(state.prompt)
            ),
            whole=whole,
            adapters=adapters,
        )

    @torch.inference_mode()
    def drew(self, inputs: StepInputs, tokens: torch.Tensor, kept: Sequence[int]) -> None:
        """Store on the device the tokens that the yielding rows drew.

        `kept` are the indices in `yielding` of the rows that are not broken.
        """
        rows, counted = inputs.yield_rows, []
        for place in kept:
            _, state, position = inputs.yielding[place]
            state.drawn = True
            if state.counts is not None:
                counted.append((place, state.counts, position))
        if counted:
            self._count(counted, tokens)
        if len(kept) < len(inputs.yielding):
            (places,) = self.device.upload(np.array(kept, dtype=np.int64))
            rows, tokens = rows[places], tokens[places]
        self.device_slots.set_last(inputs.device_slots.index_select(0, rows), tokens)

    def _count(self, counted: list[tuple[int, TokenCounts, int]], tokens: torch.Tensor) -> None:
        """Count drawn tokens on the device: (place in `tokens`, counts, position in the
        sequence)."""
        (places,) = self.device.upload(np.array([place for place, _, _ in counted], dtype=np.int64))
        slots = [counts.slot for _, counts, _ in counted]
        factors = [counts.factor for _, counts, _ in counted]
        counted[0][1].table.count(slots, factors, tokens[places])
        for _, counts, position in counted:
            counts.known = position + 1

    def _adapters(
        self, chunks: tuple[Chunk, ...], states: list[SequenceState], starts: list[int]
    ) -> tuple[tuple[str, Rows], ...]:
        """Return the rows of each adapter: a slice if they follow each other, else numbers."""
        by_name: dict[str, list[tuple[int, int]]] = {}
        for chunk, state, at in zip(chunks, states, starts, strict=False):
            if state.adapter:
                by_name.setdefault(state.adapter, []).append((at, at + chunk.length))
        return tuple((name, self._joined(spans)) for name, spans in by_name.items())

    def _joined(self, spans: list[tuple[int, int]]) -> Rows:
        """Return the rows of ascending spans."""
        if all(span[1] == following[0] for span, following in itertools.pairwise(spans)):
            return slice(spans[0][0], spans[-1][1])
        return self.device.upload(np.concatenate([np.arange(*span) for span in spans]))[0]

    def _rows(
        self,
        tokens: Ids,
        chunks: tuple[Chunk, ...],
        states: list[SequenceState],
        starts: list[int],
        yielding: tuple[tuple[int, SequenceState, int], ...],
        written: Ids | None,
    ) -> _Rows:
        """Upload the rows, with each −1 replaced by the token that its sequence drew last.

        They are one array of the same type: each array more to upload takes microseconds.
        """
        self.device_slots.flush()
        T, begins = self.kv.page_tokens, np.array(starts)
        lengths, first = begins[1:] - begins[:-1], np.array([chunk.start for chunk in chunks])
        positions = np.arange(starts[-1]) + np.repeat(first - begins[:-1], lengths)
        slots = np.repeat(np.array([state.slot for state in states]), lengths)
        kept = slice(None) if written is None else written
        parts = (
            tokens,
            positions,
            slots,
            self.device_slots.places(slots[kept], positions[kept] // T),
            positions[kept] % T,
            np.array([row for row, _, _ in yielding], dtype=np.int64),
            np.empty(0, dtype=np.int64) if written is None else written,
        )
        (uploaded,) = self.device.upload(np.concatenate(parts))
        rows = _Rows(*torch.split(uploaded, [len(part) for part in parts]))
        if tokens.min() >= 0:
            return rows
        drawn = self.device_slots.last.index_select(0, rows.device_slots)
        known = drawn if tokens.max() < 0 else torch.where(rows.tokens < 0, drawn, rows.tokens)
        return rows._replace(tokens=known)

    def _tokens(
        self,
        step: Step,
        chunks: tuple[Chunk, ...],
        states: list[SequenceState],
        starts: list[int],
    ) -> Ids:
        """Return the rows' token ids, −1 where only the device has them.

        Sequences with penalties or a grammar take them in.
        """
        tokens = np.frombuffer(step.tokens, dtype=np.int32).astype(np.int64)
        if not chunks or len(tokens) != starts[-1]:
            raise ProtocolError(
                f"step {step.step} brings {len(tokens)} tokens for {starts[-1]} rows of"
                f" {len(chunks)} chunks of group {self.sequences.group}; expected one per row"
            )
        drawn = [
            at
            for chunk, state, at in zip(chunks, states, starts, strict=False)
            if state.drawn and chunk.length == 1
        ]
        unknown = tokens < 0
        unknown[drawn] = False
        wrong = unknown | (tokens >= self.vocab)
        if self.embeds and wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            seq = next(c.seq for c, at in zip(chunks, starts[1:], strict=True) if row < at)
            raise EngineError(
                f"step {step.step}: row {row} (sequence {seq}) has token {tokens[row]}: must be in"
                f" [0, {self.vocab}), or −1 for one that this rank sampled last"
            )
        for chunk, state, at in zip(chunks, states, starts, strict=False):
            if state.counts is None and state.history is None:
                continue
            rows = tokens[at : at + chunk.length]
            if rows[0] >= 0 and rows.max() < self.vocab:
                state.see(chunk.start, rows.astype(np.int32))
        return tokens

    def _lay(
        self, chunks: tuple[Chunk, ...], states: list[SequenceState], starts: list[int]
    ) -> list[Span]:
        """Return the spans of all chunks, after entering their new pages."""
        spans = []
        group, T = self.sequences.group, self.kv.page_tokens
        for chunk, state, at in zip(chunks, states, starts, strict=False):
            tail = chunk.tail == group
            held = self._enter(chunk, state, T) if tail else _held(chunk, state, T)
            spans.append(Span(at, chunk.length, held, state.pages.ids, tail))
        return spans

    def _enter(self, chunk: Chunk, state: SequenceState, page_tokens: int) -> int:
        """Add the chunk's new pages and return the tokens before it in this group, the tail.

        Afterwards logical pages start // T … (end − 1) // T must be held.
        """
        start = chunk.start
        first, last = start // page_tokens, (start + chunk.length - 1) // page_tokens
        if chunk.pages:
            self.sequences.append(state, last + 1 - len(chunk.pages), chunk.pages)
        if not state.pages.ends_with(first, last):
            raise ProtocolError(
                f"sequence {chunk.seq}: tokens [{chunk.start}, {chunk.end}) need logical pages"
                f" {first}…{last} in group {chunk.tail}, which holds {len(state.pages)} pages up to"
                f" {state.pages.last_logical}; the step must bring the missing ones"
            )
        before = len(state.pages.ids) - (last - first + 1)
        return before * page_tokens + start % page_tokens


class _Rows(NamedTuple):
    """Uploaded arrays of a step, all int64: three per row, two per written row (its page's place in
    the device's table and the offset in the page), the yielding and the written rows."""

    tokens: torch.Tensor
    positions: torch.Tensor
    device_slots: torch.Tensor
    places: torch.Tensor
    offsets: torch.Tensor
    yields: torch.Tensor
    written: torch.Tensor


def seen(
    span: Span, chunk: Chunk, pages: PageTable, window: int, page_tokens: int, always: bool = False
) -> Span:
    """Return the span of a chunk as a layer with `window` reads it (0: full attention).

    Pages out of sight are dropped; the window is set if some page is out of sight, or `always`.
    """
    if not window or (chunk.end <= window and not always):
        return span
    logical, ids = pages.since(max(0, chunk.start - window + 1) // page_tokens)
    unseen = len(span.pages) - len(ids)  # all full, as they precede the chunk's pages
    held = span.held - unseen * page_tokens
    sight = Sight(window, chunk.start, logical)
    return Span(span.start, span.length, held, ids, span.tail, sight)


def _held(chunk: Chunk, state: SequenceState, page_tokens: int) -> int:
    """Return the tokens before the chunk in this group, which is not the tail: full pages."""
    return state.pages.before(-(-chunk.start // page_tokens)) * page_tokens


def _written(chunks: tuple[Chunk, ...], starts: list[int], group: int) -> Ids | None:
    """Return the rows whose keys and values this group stores; None for all."""
    if all(chunk.tail == group for chunk in chunks):
        return None
    kept = [
        np.arange(at, at + chunk.length)
        for chunk, at in zip(chunks, starts, strict=False)
        if chunk.tail == group
    ]
    return np.concatenate([np.empty(0, dtype=np.int64), *kept])
