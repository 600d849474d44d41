"""How spans are laid over paged kernels that do not themselves split keys between their workers.

Single rows are the entries of a decode kernel, which splits keys by itself; chunks those of others.

A small chunk after a long prefix gives such a kernel too few rows to fill a GPU. So the prefix is
cut into parts of whole pages, each an entry of the kernel's batch with the same queries, and the
states are merged; and the query heads of a KV head are folded into rows, which then read their keys
once.

    prefix    | part 0 | part 1 | … | part S − 1 |            no mask, heads folded where packed
    tail                                         | rest of a page, chunk |     causal, not folded

How many parts for which chunk is a measured table. In layers with a window, rows see a few pages
only, which are never cut; the kernels know a window whose keys stand side by side (`sees_a_run`).
Pure: integers in, integers out; `paged` hands them to the kernels, tests to plain torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from medha.profile import ChunkKernel
from medha_worker.attention.interface import Span

Ints = npt.NDArray[np.int32]


class Choice(msgspec.Struct, frozen=True):
    """For chunks of up to `rows`: into how many parts a prefix is cut, and whether heads fold."""

    rows: int
    parts: int
    packed: bool


# Measured on one H200 with 32 query heads over 8 of 128 and a prefix of a million tokens: 422, 498,
# 554 and 555 TFLOP/s, where a kernel that has all of it in one entry reaches 160 at 128 rows.
H200 = (
    Choice(32, 16, True),
    Choice(64, 8, True),
    Choice(128, 4, False),
    Choice(256, 2, False),
)
# No part is worth its merge below so many tokens.
LEAST_TOKENS = 4096
# States of one chunk in memory at most, as rows of all heads: a gigabyte of 32 of 128 in 16 bits.
MOST_STATES = 1 << 17


def choose(
    table: Sequence[Choice], rows: int, prefix_tokens: int, least_tokens: int = LEAST_TOKENS
) -> Choice:
    """The table's choice for a chunk, with no part below `least_tokens`."""
    for choice in table:
        if rows <= choice.rows:
            parts = max(1, min(choice.parts, prefix_tokens // least_tokens))
            return Choice(choice.rows, parts, choice.packed and parts > 1)
    return Choice(rows, 1, False)


def table_of(kernels: Sequence[ChunkKernel], heads: int, kv_heads: int) -> tuple[Choice, ...]:
    """What was measured for such heads, or the table above where nothing was."""
    found = tuple(
        Choice(each.rows, each.parts, each.packed)
        for each in sorted(kernels, key=lambda each: each.rows)
        if (each.heads, each.kv_heads) == (heads, kv_heads)
    )
    return found or H200


class Batch(msgspec.Struct, frozen=True):
    """Entries of one call of a paged kernel.

    Entry e has query rows [q_indptr[e], q_indptr[e + 1]) of `rows` gathered (heads × as many where
    packed), pages `pages[kv_indptr[e] : kv_indptr[e + 1]]`, the last of which holds `last_page[e]`
    tokens. `rows` int64: batch rows of the entries' queries, in order. `window`: tokens that a row
    sees, its own included; 0: all.
    """

    causal: bool
    packed: bool
    rows: npt.NDArray[np.int64]
    q_indptr: Ints
    kv_indptr: Ints
    pages: Ints
    last_page: Ints
    window: int = 0

    @property
    def run(self) -> slice | None:
        """The rows as a slice, where they stand side by side in order."""
        first, count = int(self.rows[0]), len(self.rows)
        side_by_side = np.array_equal(self.rows, np.arange(first, first + count))
        return slice(first, first + count) if side_by_side else None


class _Entry(msgspec.Struct, frozen=True):
    span: Span
    pages: npt.NDArray[np.int64]
    tokens: int


def sees_a_run(span: Span, page_tokens: int) -> bool:
    """Whether the span's rows see all its pages, or through a window what stands side by side up to
    themselves: what kernels can be told by the window's width."""
    sight = span.sight
    if sight is None:
        return True
    first = int(sight.logical[0]) if len(sight.logical) else 0
    return span.tail and sight.position - first * page_tokens == span.held


def lay(
    spans: Sequence[Span],
    page_tokens: int,
    group: int,
    table: Sequence[Choice] = H200,
    least_tokens: int = LEAST_TOKENS,
    most_tokens: int = 0,
) -> tuple[Batch, ...]:
    """The kernel calls for `spans` of several rows, at most one of each kind, in a fixed order.

    `group`: query heads of a KV head; `most_tokens`: no part of a prefix is longer (0: as long as
    it likes), unless its states would take too much memory. A row's state is the merge of those
    of all its entries; a row of a span that sees nothing is in none. Raises ValueError for a span
    that does not see a run.
    """
    kinds: dict[tuple[bool, bool], list[_Entry]] = {}
    window = window_of(spans, page_tokens)
    for span in spans:
        full = span.held // page_tokens
        choice = choose(table, span.length, full * page_tokens, least_tokens)
        if window:
            choice = Choice(span.length, 1, False)
        elif most_tokens and full * page_tokens > choice.parts * most_tokens:
            parts = min(-(-full * page_tokens // most_tokens), MOST_STATES // span.length)
            choice = Choice(span.length, max(parts, 1), choice.packed)
        if choice.parts == 1:
            full = 0 if span.tail else full  # one entry, from the first key to the last
        cuts = np.linspace(0, full, choice.parts + 1).round().astype(int)
        packed = choice.packed and group > 1
        for first, end in itertools.pairwise(cuts.tolist()):
            if end > first:
                part = _Entry(span, span.pages[first:end], (end - first) * page_tokens)
                kinds.setdefault((False, packed), []).append(part)
        rest = span.held - full * page_tokens + (span.length if span.tail else 0)
        if rest:
            pages = span.pages[full : full + -(-rest // page_tokens)]
            kinds.setdefault((span.tail, False), []).append(_Entry(span, pages, rest))
    return tuple(
        _batch(causal, packed, kinds[causal, packed], page_tokens, group, window if causal else 0)
        for causal, packed in sorted(kinds)
    )


def lay_singles(spans: Sequence[Span], page_tokens: int) -> Batch | None:
    """The call of a decode kernel for `spans` of one row each; rows that see nothing are in none.

    Raises ValueError for a span that does not see a run.
    """
    window = window_of(spans, page_tokens)
    entries = []
    for span in spans:
        tokens = span.held + span.tail
        if tokens:
            entries.append(_Entry(span, span.pages[: -(-tokens // page_tokens)], tokens))
    return _batch(False, False, entries, page_tokens, 1, window) if entries else None


def window_of(spans: Sequence[Span], page_tokens: int) -> int:
    """The one window of all spans, 0 for none; raises ValueError where one does not see a run."""
    for span in spans:
        if not sees_a_run(span, page_tokens):
            raise ValueError(f"rows from {span.start} on see pages apart: no kernel's window")
    return max((span.sight.window for span in spans if span.sight is not None), default=0)


class Merges(msgspec.Struct, frozen=True):
    """Which states of the calls, their rows counted through, belong to which batch row, int64.

    `alone`: states that are a row's only one, of batch rows `alone_rows`. `several` [n, most]:
    those of batch rows `several_rows`, filled up with the number behind the last state.
    """

    alone_rows: npt.NDArray[np.int64]
    alone: npt.NDArray[np.int64]
    several_rows: npt.NDArray[np.int64]
    several: npt.NDArray[np.int64]


def merges(batches: Sequence[Batch]) -> Merges:
    """How the states of `batches` become those of batch rows."""
    rows = np.concatenate([np.empty(0, np.int64), *(batch.rows for batch in batches)])
    order = np.argsort(rows, kind="stable")  # of a row in the order of the calls and entries
    unique, firsts, counts = np.unique(rows[order], return_index=True, return_counts=True)
    single = counts == 1
    most = int(counts.max(initial=1))
    slots = firsts[~single, None] + np.arange(most)
    taken = np.arange(most) < counts[~single, None]
    several = np.where(taken, order[np.minimum(slots, len(order) - 1)], len(rows))
    return Merges(unique[single], order[firsts[single]], unique[~single], several)


def _batch(
    causal: bool, packed: bool, entries: Sequence[_Entry], page_tokens: int, group: int,
    window: int = 0,
) -> Batch:  # fmt: skip
    lengths = [each.span.length * (group if packed else 1) for each in entries]
    starts = [np.arange(each.span.start, each.span.start + each.span.length) for each in entries]
    return Batch(
        causal=causal,
        packed=packed,
        rows=np.concatenate(starts),
        q_indptr=indptr(lengths),
        kv_indptr=indptr([len(each.pages) for each in entries]),
        pages=np.concatenate([each.pages for each in entries]).astype(np.int32),
        last_page=np.array([(each.tokens - 1) % page_tokens + 1 for each in entries], np.int32),
        window=window,
    )


def indptr(counts: Sequence[int]) -> Ints:
    """Where each begins and the last ends, laid end to end."""
    return np.cumsum([0, *counts]).astype(np.int32)
