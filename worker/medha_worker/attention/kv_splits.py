"""Layout of spans for paged kernels, with split prefixes for small chunks.

`fa2` splits keys by itself, and serves single rows and `small` chunks. `fa3`, twice as fast for
many rows, does not. A chunk after a long prefix has too few rows to fill a GPU with it, or fills it
one and a half times. So its prefix is split into parts of whole pages, each an entry of the
kernel's batch with the same queries, and the states are merged. Query heads of a KV head are folded
into the rows of small chunks, which then read their keys once.

    prefix    | part 0 | part 1 | … | part S − 1 |            no mask, heads folded where packed
    tail                                         | rest of a page, chunk |     causal, not folded

A measured table gives the number of parts. The keys of still larger chunks are `gathered`: copied
from their pages to side by side, which costs less than it saves. In layers with a window, rows see
only a few pages, which are never split; kernels support windows over contiguous keys
(`sees_a_run`). Pure: integers in, integers out; `paged` passes them to kernels, tests to plain
torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from medha.profile import ChunkKernel
from medha_worker.attention.kernel_interface import Span

Ints = npt.NDArray[np.int32]


class PrefixSplit(msgspec.Struct, frozen=True):
    """Rule for chunks of up to `rows`: the prefix's number of parts, and whether heads are
    folded."""

    rows: int
    parts: int
    packed: bool


# Measured on one H200 with 32 query heads over 8 of 128 and a prefix of a million tokens: 422, 498,
# 554 and 555 TFLOP/s, where a kernel that has all of it in one entry reaches 160 at 128 rows. Above
# 256 rows, what fills 132 multiprocessors best with blocks of 128 rows of a head.
H200 = (
    PrefixSplit(32, 16, True),
    PrefixSplit(64, 8, True),
    PrefixSplit(128, 4, False),
    PrefixSplit(256, 2, False),
    PrefixSplit(384, 4, False),
    PrefixSplit(512, 1, False),
    PrefixSplit(640, 4, False),
    PrefixSplit(768, 2, False),
    PrefixSplit(896, 4, False),
    PrefixSplit(1024, 1, False),
    PrefixSplit(1280, 2, False),
)
# A part has at least this many tokens, and a prefix of fewer than WORTH_CUTTING stays whole.
LEAST_TOKENS = 2048
WORTH_CUTTING = 4
# Chunks of few rows run on fa2 unless rows² · keys exceed SMALL_WORK. Measured on one H200: 23 µs
# for 69 (16 rows after 8 K), 45 for 76 (64 after 8 K), 117 for 118 (64 after 32 K), 408 for 309 (64
# after 128 K), 145 for 194 (16 after 128 K).
SMALL_ROWS, SMALL_TOKENS, SMALL_WORK = 64, 1024, 1 << 27
# Rows from which on a chunk sees gathered keys, and keys gathered at a time (half a gigabyte for 8
# heads of 128 in 16 bits). Measured on one H200, keys side by side against pages: 2,048 rows after
# 6 K 515 to 435 TFLOP/s, after 30 K 650 to 528, after 126 K 678 to 543. Pages are copied at 3.5
# TB/s: 0.3 ms for 128 K, where 2,048 rows take 6.4 ms instead of 8. Smaller chunks need parts.
GATHERED_ROWS, GATHERED_TOKENS = 1281, 1 << 17
# Limit of a chunk's states, in rows of all heads: a gigabyte for 32 heads of 128 in 16 bits.
MOST_STATES = 1 << 17


def choose(
    table: Sequence[PrefixSplit], rows: int, prefix_tokens: int, least_tokens: int = LEAST_TOKENS
) -> PrefixSplit:
    """Return the table's rule for a chunk, with no part below `least_tokens`."""
    for choice in table:
        if rows <= choice.rows:
            most = prefix_tokens // least_tokens
            parts = min(choice.parts, most) if most >= WORTH_CUTTING else 1
            return PrefixSplit(choice.rows, parts, choice.packed and parts > 1)
    return PrefixSplit(rows, 1, False)


def small(rows: int, tokens: int, most_work: int = SMALL_WORK) -> bool:
    """Return True if fa2 is faster than fa3 for `rows` that see `tokens`."""
    return rows <= SMALL_ROWS and tokens >= SMALL_TOKENS and rows * rows * tokens <= most_work


def table_of(kernels: Sequence[ChunkKernel], heads: int, kv_heads: int) -> tuple[PrefixSplit, ...]:
    """Return the measured rules for these head counts, or `H200` if none were measured."""
    splits = tuple(
        PrefixSplit(kernel.rows, kernel.parts, kernel.packed)
        for kernel in sorted(kernels, key=lambda kernel: kernel.rows)
        if (kernel.heads, kernel.kv_heads) == (heads, kv_heads)
    )
    return splits or H200


class KernelBatch(msgspec.Struct, frozen=True):
    """Entries of one call of a paged kernel.

    Entry e has query rows [q_indptr[e], q_indptr[e + 1]) of the gathered `rows` (times the folded
    heads if `packed`) and pages `pages[kv_indptr[e] : kv_indptr[e + 1]]`, with `last_page[e]`
    tokens in the last. `rows` int64: batch rows of the entries' queries, in order. `window`: tokens
    that a row sees, its own included; 0: all. `small`: for fa2 (see the function of that name).
    `gathered`: the only entry's pages are copied to side by side first.
    """

    causal: bool
    packed: bool
    rows: npt.NDArray[np.int64]
    q_indptr: Ints
    kv_indptr: Ints
    pages: Ints
    last_page: Ints
    window: int = 0
    small: bool = False
    gathered: bool = False

    @property
    def run(self) -> slice | None:
        """The rows as a slice if they are contiguous, else None."""
        first, count = int(self.rows[0]), len(self.rows)
        side_by_side = np.array_equal(self.rows, np.arange(first, first + count))
        return slice(first, first + count) if side_by_side else None


class _Entry(msgspec.Struct, frozen=True):
    span: Span
    pages: npt.NDArray[np.int64]
    tokens: int


def sees_a_run(span: Span, page_tokens: int) -> bool:
    """Return True if the span's visible keys are contiguous up to its rows.

    Only such spans can be described to kernels by the window's width.
    """
    sight = span.sight
    if sight is None:
        return True
    first = int(sight.logical[0]) if len(sight.logical) else 0
    return span.tail and sight.position - first * page_tokens == span.held


def lay(
    spans: Sequence[Span],
    page_tokens: int,
    group: int,
    table: Sequence[PrefixSplit] = H200,
    least_tokens: int = LEAST_TOKENS,
    most_tokens: int = 0,
    small_work: int = 0,
    gathered_tokens: int = 0,
) -> tuple[KernelBatch, ...]:
    """Return the kernel calls for `spans` of several rows: at most one of each kind in a fixed
    order, then those over gathered keys.

    `group`: query heads per KV head. `most_tokens`: limit of a part's length (0: none), unless its
    states would take too much memory. `small_work`: limit of small chunks (0: there are none).
    `gathered_tokens`: limit of keys that are gathered at a time (0: none are). A row's state is the
    merge over all its entries; a row that sees no key is in none. Raises ValueError for a span
    whose visible keys are not contiguous.
    """
    kinds: dict[tuple[bool, bool, bool], list[_Entry]] = {}
    gathered: list[tuple[bool, _Entry]] = []
    window = window_of(spans, page_tokens)
    for span in spans:
        tokens = span.held + (span.length if span.tail else 0)
        if gathered_tokens and not window and tokens and span.length >= GATHERED_ROWS:
            gathered += _gathered(span, tokens, page_tokens, gathered_tokens)
            continue
        if not window and small(span.length, tokens, small_work):
            entry = _Entry(span, span.pages[: -(-tokens // page_tokens)], tokens)
            kinds.setdefault((span.tail, False, True), []).append(entry)
            continue
        full = span.held // page_tokens
        choice = choose(table, span.length, full * page_tokens, least_tokens)
        if window:
            choice = PrefixSplit(span.length, 1, False)
        elif most_tokens and full * page_tokens > choice.parts * most_tokens:
            parts = min(-(-full * page_tokens // most_tokens), MOST_STATES // span.length)
            choice = PrefixSplit(span.length, max(parts, 1), choice.packed)
        if choice.parts == 1:
            full = 0 if span.tail else full  # one entry, from the first key to the last
        cuts = np.linspace(0, full, choice.parts + 1).round().astype(int)
        packed = choice.packed and group > 1
        for first, end in itertools.pairwise(cuts.tolist()):
            if end > first:
                part = _Entry(span, span.pages[first:end], (end - first) * page_tokens)
                kinds.setdefault((False, packed, False), []).append(part)
        rest = tokens - full * page_tokens
        if rest:
            pages = span.pages[full : full + -(-rest // page_tokens)]
            kinds.setdefault((span.tail, False, False), []).append(_Entry(span, pages, rest))
    calls = [
        _batch(*kind, kinds[kind], page_tokens, group, window if kind[0] else 0)
        for kind in sorted(kinds)
    ]
    for causal, entry in gathered:
        call = _batch(causal, False, False, [entry], page_tokens, group)
        calls.append(msgspec.structs.replace(call, gathered=True))
    return tuple(calls)


def _gathered(
    span: Span, tokens: int, page_tokens: int, most_tokens: int
) -> list[tuple[bool, _Entry]]:
    """Return whether each entry of a span over gathered keys is causal, and the entry.

    All keys, if `most_tokens` hold them; else the full pages before the chunk in equal parts, and
    what follows them.
    """
    if tokens <= most_tokens:
        return [(span.tail, _Entry(span, span.pages[: -(-tokens // page_tokens)], tokens))]
    full = span.held // page_tokens
    parts = -(-full * page_tokens // most_tokens)
    cuts = np.linspace(0, full, parts + 1).round().astype(int)
    entries = [
        (False, _Entry(span, span.pages[first:end], (end - first) * page_tokens))
        for first, end in itertools.pairwise(cuts.tolist())
    ]
    rest = tokens - full * page_tokens
    if rest:
        pages = span.pages[full : full + -(-rest // page_tokens)]
        entries.append((span.tail, _Entry(span, pages, rest)))
    return entries


def lay_singles(spans: Sequence[Span], page_tokens: int) -> KernelBatch | None:
    """Return the decode kernel's call for `spans` of one row each; rows that see no key are left
    out.

    Raises ValueError for a span whose visible keys are not contiguous.
    """
    window = window_of(spans, page_tokens)
    spans = [span for span in spans if span.tail or span.held]
    if not spans:
        return None
    tokens = np.array([span.held + span.tail for span in spans])
    counts = -(-tokens // page_tokens)
    # Most spans have no page beyond their keys, and a slice costs more than the comparison.
    pages = [
        span.pages if len(span.pages) == count else span.pages[:count]
        for span, count in zip(spans, counts.tolist(), strict=True)
    ]
    return KernelBatch(
        causal=False,
        packed=False,
        rows=np.array([span.start for span in spans]),
        q_indptr=np.arange(len(spans) + 1, dtype=np.int32),
        kv_indptr=indptr(counts),
        pages=np.concatenate(pages).astype(np.int32),
        last_page=((tokens - 1) % page_tokens + 1).astype(np.int32),
        window=window,
    )


def window_of(spans: Sequence[Span], page_tokens: int) -> int:
    """Return the window of all spans, 0 for none. Raises ValueError if visible keys are not
    contiguous."""
    windows = [0]
    for span in spans:
        if span.sight is None:
            continue
        if not sees_a_run(span, page_tokens):
            raise ValueError(
                f"rows from {span.start} on see separate pages: no kernel supports such a window"
            )
        windows.append(span.sight.window)
    return max(windows)


class Merges(msgspec.Struct, frozen=True):
    """Assignment of the calls' states, numbered through, to batch rows, int64.

    `alone`: states that are the only one of batch rows `alone_rows`. `several` [n, most]: the
    states of batch rows `several_rows`, padded with the number after the last state.
    """

    alone_rows: npt.NDArray[np.int64]
    alone: npt.NDArray[np.int64]
    several_rows: npt.NDArray[np.int64]
    several: npt.NDArray[np.int64]


def merges(batches: Sequence[KernelBatch]) -> Merges:
    """Return how states of `batches` combine into those of batch rows."""
    rows = np.concatenate([np.empty(0, np.int64), *(batch.rows for batch in batches)])
    order = np.argsort(rows, kind="stable")  # a row's states in the order of calls and entries
    unique, firsts, counts = np.unique(rows[order], return_index=True, return_counts=True)
    single = counts == 1
    most = int(counts.max(initial=1))
    slots = firsts[~single, None] + np.arange(most)
    taken = np.arange(most) < counts[~single, None]
    several = np.where(taken, order[np.minimum(slots, len(order) - 1)], len(rows))
    return Merges(unique[single], order[firsts[single]], unique[~single], several)


def _batch(
    causal: bool,
    packed: bool,
    small: bool,
    entries: Sequence[_Entry],
    page_tokens: int,
    group: int,
    window: int = 0,
) -> KernelBatch:
    lengths = [entry.span.length * (group if packed else 1) for entry in entries]
    spans = [entry.span for entry in entries]
    starts = [np.arange(span.start, span.start + span.length) for span in spans]
    return KernelBatch(
        causal=causal,
        packed=packed,
        rows=np.concatenate(starts),
        q_indptr=indptr(lengths),
        kv_indptr=indptr([len(entry.pages) for entry in entries]),
        pages=np.concatenate([entry.pages for entry in entries]).astype(np.int32),
        last_page=np.array([(entry.tokens - 1) % page_tokens + 1 for entry in entries], np.int32),
        window=window,
        small=small,
    )


def indptr(counts: npt.ArrayLike) -> Ints:
    """Return the offsets of consecutive segments with these sizes."""
    sizes = np.asarray(counts)
    offsets = np.zeros(len(sizes) + 1, dtype=np.int32)
    offsets[1:] = sizes.cumsum()
    return offsets
