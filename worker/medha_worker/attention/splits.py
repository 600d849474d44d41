"""How spans are laid over paged kernels that do not themselves split keys between their workers.

A small chunk after a long prefix gives such a kernel too few rows to fill a GPU. So the prefix is
cut into parts of whole pages, each an entry of the kernel's batch with the same queries, and the
states are merged; and the query heads of a KV head are folded into rows, which then read their keys
once.

    prefix    | part 0 | part 1 | … | part S − 1 |            no mask, heads folded where packed
    tail                                         | rest of a page, chunk |     causal, not folded

How many parts for which chunk is a measured table. Pure: integers in, integers out; `paged` hands
them to the kernels, tests to plain torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

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


def choose(
    table: Sequence[Choice], rows: int, prefix_tokens: int, least_tokens: int = LEAST_TOKENS
) -> Choice:
    """The table's choice for a chunk, with no part below `least_tokens`."""
    for choice in table:
        if rows <= choice.rows:
            parts = max(1, min(choice.parts, prefix_tokens // least_tokens))
            return Choice(choice.rows, parts, choice.packed and parts > 1)
    return Choice(rows, 1, False)


class Batch(msgspec.Struct, frozen=True):
    """Entries of one call of a paged kernel.

    Entry e has query rows [q_indptr[e], q_indptr[e + 1]) of `rows` gathered (heads × as many where
    packed), pages `pages[kv_indptr[e] : kv_indptr[e + 1]]`, the last of which holds `last_page[e]`
    tokens. `rows` int64: batch rows of the entries' queries, in order.
    """

    causal: bool
    packed: bool
    rows: npt.NDArray[np.int64]
    q_indptr: Ints
    kv_indptr: Ints
    pages: Ints
    last_page: Ints


class _Entry(msgspec.Struct, frozen=True):
    span: Span
    pages: npt.NDArray[np.int64]
    tokens: int


def lay(
    spans: Sequence[Span],
    page_tokens: int,
    group: int,
    table: Sequence[Choice] = H200,
    least_tokens: int = LEAST_TOKENS,
) -> tuple[Batch, ...]:
    """The kernel calls for `spans` of several rows, at most one of each kind, in a fixed order.

    `group`: query heads of a KV head. A row's state is the merge of those of all its entries; a row
    of a span that sees nothing is in none. Raises ValueError for a span with a window.
    """
    kinds: dict[tuple[bool, bool], list[_Entry]] = {}
    for span in spans:
        if span.sight is not None:
            raise ValueError(f"rows from {span.start} on have a window: they are not laid in parts")
        full = span.held // page_tokens
        choice = choose(table, span.length, full * page_tokens, least_tokens)
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
        _batch(causal, packed, kinds[causal, packed], page_tokens, group)
        for causal, packed in sorted(kinds)
    )


def _batch(
    causal: bool, packed: bool, entries: Sequence[_Entry], page_tokens: int, group: int
) -> Batch:
    lengths = [each.span.length * (group if packed else 1) for each in entries]
    starts = [np.arange(each.span.start, each.span.start + each.span.length) for each in entries]
    return Batch(
        causal=causal,
        packed=packed,
        rows=np.concatenate(starts),
        q_indptr=_indptr(lengths),
        kv_indptr=_indptr([len(each.pages) for each in entries]),
        pages=np.concatenate([each.pages for each in entries]).astype(np.int32),
        last_page=np.array([(each.tokens - 1) % page_tokens + 1 for each in entries], np.int32),
    )


def _indptr(counts: Sequence[int]) -> Ints:
    return np.cumsum([0, *counts]).astype(np.int32)
