"""How spans are laid over one kernel so that a row's bits depend on no other row: `deterministic`.

FlashInfer's `fa2` picks its tiles by the mean of the query rows of a call's entries (those times
the query heads of a KV head), and walks keys in tiles from the first on, in parts of a fixed
length. So every entry gets the same number of rows, whatever brings them: a decode is the last row
of a block of which nothing else counts.

    chunk of 70 rows, blocks of 32     | 32 rows | 32 rows | 26 idle, 6 rows |
    decode                                                 | 31 idle, 1 row  |
    chunk of 3 rows, fewer keys than 32     | 31 idle, 1 row | 31 idle, 1 row | 31 idle, 1 row |

Rows are aligned to the bottom right, so idle ones stand first. The kernel leaves tiles unmasked
where that would put an entry's first row before the first key: such rows go alone, as the last row
sees every key. Keys that a row does not see add exact zeros. A window makes the kernel begin at the
first key that the entry's first row sees, so there too rows go alone, behind so many spare pages,
which are masked, that its beginning is never cut off.

Pure: integers in, integers out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from medha_worker.attention.interface import Span
from medha_worker.attention.splits import Batch, indptr, window_of

# Query rows times query heads of a KV head in an entry: what the kernel's largest tile holds. It
# takes that tile (or with wide heads always the same smaller one) where there are more than 64.
TILE = 128
# Entries of a call at most: their queries are gathered.
MOST_ENTRIES = 512


class Blocks(Batch, frozen=True, kw_only=True):
    """A call whose entries are of one size. `kept`: of `rows` those that count, int64; the others
    repeat a row of their span."""

    kept: npt.NDArray[np.int64]


class _Entry(NamedTuple):
    """Rows [first, end) of a span over the first `tokens` of its keys, `lead` of which are masked;
    `parts`: into how many the kernel cuts them."""

    span: Span
    first: int
    end: int
    tokens: int
    lead: int
    parts: int


def block_rows(group: int) -> int:
    """Query rows of an entry with `group` query heads of a KV head."""
    return max(1, TILE // group)


def lay_blocks(
    spans: Sequence[Span],
    page_tokens: int,
    rows: int,
    split_pages: int,
    most_parts: int,
    spare: int = 0,
) -> tuple[Blocks, ...]:
    """The calls for `spans`, entries of `rows` each; rows that see nothing are in none.

    Keys are cut every `split_pages` pages; a call has at most `most_parts` parts of entries that
    are cut, as many states are kept at a time. `spare`: a page of numbers for what is masked.
    Raises ValueError for a span that does not see a run.
    """
    window = window_of(spans, page_tokens)
    calls: list[Blocks] = []
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
        if span.tail and span.held + end < rows:
            end = first + 1
        lead = ahead if window and _begins_in(span, first, page_tokens) else 0
        tokens = lead + span.held + (end if span.tail else 0)
        walked = min(tokens, window + TILE) if window else tokens
        parts = -(-walked // (split_pages * page_tokens))
        yield _Entry(span, first, end, tokens, lead, parts)
        first = end


def _begins_in(span: Span, row: int, page_tokens: int) -> bool:
    """Whether a row's window begins among the span's keys, so that it masks all before them."""
    sight = span.sight
    if sight is None or not len(sight.logical):
        return False
    return sight.position + row - sight.window + 1 >= int(sight.logical[0]) * page_tokens


def _full(entries: Sequence[_Entry], most_parts: int) -> Iterator[list[_Entry]]:
    """Runs of entries with no more parts than that together, but for one that has more itself."""
    some: list[_Entry] = []
    for entry in entries:
        if some and sum(each.parts for each in some) + entry.parts > most_parts:
            yield some
            some = []
        some.append(entry)
    if some:
        yield some


def _call(
    causal: bool, entries: Sequence[_Entry], page_tokens: int, rows: int, window: int, spare: int
) -> Blocks:
    taken, pages = [], []
    for span, first, end, tokens, lead, _ in entries:
        own = np.arange(span.start + first, span.start + end)
        taken.append(np.concatenate([np.full(rows - len(own), own[0]), own]))
        before = np.full(lead // page_tokens, spare)
        pages.append(np.concatenate([before, span.pages])[: -(-tokens // page_tokens)])
    kept = [
        np.arange((number + 1) * rows - (each.end - each.first), (number + 1) * rows)
        for number, each in enumerate(entries)
    ]
    return Blocks(
        causal=causal,
        packed=False,
        rows=np.concatenate(taken),
        q_indptr=indptr([rows] * len(entries)),
        kv_indptr=indptr([len(each) for each in pages]),
        pages=np.concatenate(pages).astype(np.int32),
        last_page=np.array([(each.tokens - 1) % page_tokens + 1 for each in entries], np.int32),
        window=window if causal else 0,
        kept=np.concatenate(kept),
    )
