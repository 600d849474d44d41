"""Layout of spans in fixed-size entries, so that a row's bits depend on no other row:
`deterministic`.

FlashInfer's `fa2` chooses tiles by the mean number of query rows per entry (times query heads per
KV head), and walks keys in tiles from the first, in parts of fixed length. So every entry gets the
same number of rows: a decode is the last row of a block whose other rows are padding.

    chunk of 70 rows after 64 keys     | 32 rows | 32 rows | 26 idle, 6 rows |
    decode after 133 keys                                  | 31 idle, 1 row  |
    chunk of 3 rows, fewer keys than 32     | 31 idle, 1 row | 31 idle, 1 row | 31 idle, 1 row |

Rows are aligned to the bottom right, so idle rows come first. If an entry's first row would lie
before the first key, the kernel leaves tiles unmasked; such rows get an entry each, whose last row
sees every key. A tile of keys that a row does not see adds exact zeros but rounds the sum again, so
the rows of an entry end in the same tile. With a window, the kernel starts at the first key that
the entry's first row sees, so rows get an entry each there too, after masked spare pages.

Pure: integers in, integers out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from medha_worker.attention.kernel_interface import Span
from medha_worker.attention.kv_splits import KernelBatch, indptr, window_of

# Query rows times query heads per KV head in an entry: the kernel's largest tile. It uses that tile
# (or, with wide heads, always the same smaller one) above 64.
TILE = 128
# Divides the kernel's tiles of keys: 64 or, with wide heads, 32.
KEY_TILE = 32
# Limit of entries per call, since their queries are gathered.
MOST_ENTRIES = 512


class BlockBatch(KernelBatch, frozen=True, kw_only=True):
    """A kernel call whose entries have one size.

    `kept`: indices of `rows` that count, int64; the others repeat a row of their span.
    """

    kept: npt.NDArray[np.int64]


class _Entry(NamedTuple):
    """Rows [first, end) of a span over the first `tokens` of its keys, `lead` of them masked.

    The kernel splits the keys into `parts`.
    """

    span: Span
    first: int
    end: int
    tokens: int
    lead: int
    parts: int


def block_rows(group: int) -> int:
    """Return the query rows of an entry with `group` query heads per KV head."""
    return max(1, TILE // group)


def lay_blocks(
    spans: Sequence[Span],
    page_tokens: int,
    rows: int,
    split_pages: int,
    most_parts: int,
    spare: int = 0,
) -> tuple[BlockBatch, ...]:
    """Return the calls for `spans`, in entries of `rows`; rows that see no key are in none.

    Keys are split every `split_pages` pages. A call has at most `most_parts` parts of split
    entries, since all their states are kept at once. `spare`: page id used for masked keys. Raises
    ValueError for a span whose visible keys are not contiguous.
    """
    window = window_of(spans, page_tokens)
    calls: list[BlockBatch] = []
    kinds: dict[tuple[bool, bool], list[_Entry]] = {}
    for span in spans:
        for entry in _entries(span, page_tokens, rows, split_pages, window):
            kinds.setdefault((span.tail, entry.parts > 1), []).append(entry)
    for (causal, cut), entries in sorted(kinds.items()):
        most = most_parts if cut else MOST_ENTRIES
        runs = _full(entries, most)
        calls.extend(_call(causal, some, page_tokens, rows, window, spare) for some in runs)
    return tuple(calls)


def _entries(
    span: Span, page_tokens: int, rows: int, split_pages: int, window: int
) -> Iterator[_Entry]:
    ahead = -(-(rows - 1) // page_tokens) * page_tokens
    first = 0
    while first < span.length and (span.held or span.tail):
        end = min(first + (1 if window else rows), span.length)
        if span.tail:
            end = min(end, first + KEY_TILE - (span.held + first) % KEY_TILE)
            if span.held + end < rows:
                end = first + 1
        lead = ahead if window and _begins_in(span, first, page_tokens) else 0
        tokens = lead + span.held + (end if span.tail else 0)
        walked = min(tokens, window + TILE) if window else tokens
        parts = -(-walked // (split_pages * page_tokens))
        yield _Entry(span, first, end, tokens, lead, parts)
        first = end


def _begins_in(span: Span, row: int, page_tokens: int) -> bool:
    """Return True if a row's window begins among the span's keys, so that earlier keys are
    masked."""
    sight = span.sight
    if sight is None or not len(sight.logical):
        return False
    return sight.position + row - sight.window + 1 >= int(sight.logical[0]) * page_tokens


def _full(entries: Sequence[_Entry], most_parts: int) -> Iterator[list[_Entry]]:
    """Group entries so that each group has at most `most_parts` parts, or a single entry."""
    some: list[_Entry] = []
    for entry in entries:
        if some and sum(e.parts for e in some) + entry.parts > most_parts:
            yield some
            some = []
        some.append(entry)
    if some:
        yield some


def _call(
    causal: bool, entries: Sequence[_Entry], page_tokens: int, rows: int, window: int, spare: int
) -> BlockBatch:
    taken, pages = [], []
    for span, first, end, tokens, lead, _ in entries:
        own = np.arange(span.start + first, span.start + end)
        taken.append(np.concatenate([np.full(rows - len(own), own[0]), own]))
        before = np.full(lead // page_tokens, spare)
        pages.append(np.concatenate([before, span.pages])[: -(-tokens // page_tokens)])
    kept = [
        np.arange((number + 1) * rows - (entry.end - entry.first), (number + 1) * rows)
        for number, entry in enumerate(entries)
    ]
    return BlockBatch(
        causal=causal,
        packed=False,
        rows=np.concatenate(taken),
        q_indptr=indptr([rows] * len(entries)),
        kv_indptr=indptr([len(entry_pages) for entry_pages in pages]),
        pages=np.concatenate(pages).astype(np.int32),
        last_page=np.array([(entry.tokens - 1) % page_tokens + 1 for entry in entries], np.int32),
        window=window if causal else 0,
        kept=np.concatenate(kept),
    )
