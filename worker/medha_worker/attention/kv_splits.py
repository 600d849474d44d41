"""Layout of spans for paged kernels, with split prefixes for small chunks.

`fa2` splits keys by itself, and serves single rows and `small` chunks. `fa3`, twice as fast for
many rows, does not. A chunk after a long prefix has too few rows to fill a GPU with it, or fills it
one and a half times. So its prefix is split into parts of whole pages, each an entry of the
kernel's batch with the same queries, and the states are merged. Query heads of a KV head may be
folded into the rows of such parts.

    prefix    | part 0 | part 1 | … | part S − 1 |            no mask, heads folded where packed
    tail                                         | rest of a page, chunk |     causal, not folded

`split_costs` chooses the parts, whether heads are packed, and whether keys are `gathered`: copied
from their pages to side by side. In layers with a window, rows see only a few pages, which are
never split; kernels support windows over contiguous keys (`sees_a_run`). Pure: integers in,
integers out; `paged` passes them to kernels, tests to plain torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from medha_worker.attention.kernel_interface import Span
from medha_worker.attention.split_costs import MOST_STATES, SMALL, WHOLE, PrefixSplit, whole

Ints = npt.NDArray[np.int32]


# Keys gathered at a time: half a gigabyte for 8 heads of 128 in 16 bits.
GATHERED_TOKENS = 1 << 17
# (rows, tokens of the full pages before them) -> how they are laid out.
Choose = Callable[[int, int], PrefixSplit]


class KernelBatch(msgspec.Struct, frozen=True):
    """Entries of one call of a paged kernel.

    Entry e has query rows [q_indptr[e], q_indptr[e + 1]) of the gathered `rows` (times the folded
    heads if `packed`) and pages `pages[kv_indptr[e] : kv_indptr[e + 1]]`, with `last_page[e]`
    tokens in the last. `rows` int64: batch rows of the entries' queries, in order. `window`: tokens
    that a row sees, its own included; 0: all. `small`: for fa2 (see `PrefixSplit`).
    `gathered`: the entries' pages, full but for the last, are copied to side by side first.
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
    choose: Choose = whole,
    most_tokens: int = 0,
    gathered_tokens: int = GATHERED_TOKENS,
) -> tuple[KernelBatch, ...]:
    """Return the kernel calls for `spans` of several rows: at most one of each kind in a fixed
    order, then those over gathered keys.

    `group`: query heads per KV head. `most_tokens`: limit of a part's length (0: none); `fa2` takes
    chunks whose states would then take too much memory, and those longer than twice that.
    `gathered_tokens`: limit of keys that are
    gathered at a time (0: none are). A row's state is the merge over all its entries; a row that
    sees no key is in none. Raises ValueError for a span whose visible keys are not contiguous.
    """
    kinds: dict[tuple[bool, bool, bool], list[_Entry]] = {}
    gathered: list[KernelBatch] = []
    window = window_of(spans, page_tokens)
    for span in spans:
        tokens = span.held + (span.length if span.tail else 0)
        full = span.held // page_tokens
        split = WHOLE if window else choose(span.length, full * page_tokens)
        parts, packed = split.parts, split.packed and group > 1
        if most_tokens and not window:
            if full * page_tokens > max(parts, 1) * most_tokens:
                parts = -(-full * page_tokens // most_tokens)
            own = tokens - full * page_tokens if parts else tokens
            if parts * span.length > MOST_STATES or own > 2 * most_tokens:
                split = SMALL
        gathers = split.gathered and gathered_tokens > 0
        fits = not gathers or tokens <= gathered_tokens
        if split.small or (span.tail and not parts and fits):
            full = 0  # one entry, from the first key to the last
        rest, prefix = tokens - full * page_tokens, full * page_tokens
        calls = max(1, -(-prefix // gathered_tokens)) if gathers else 1
        in_call = -(-max(parts, 1) // calls)
        entries = _cut(span, full, in_call * calls, page_tokens)
        pieces = [
            (False, packed, entries[at : at + in_call]) for at in range(0, len(entries), in_call)
        ]
        if rest:
            pages = span.pages[full : full + -(-rest // page_tokens)]
            pieces.append((span.tail, False, [_Entry(span, pages, rest)]))
        for causal, folded, some in pieces:
            if gathers:
                call = _batch(causal, folded, False, some, page_tokens, group)
                gathered.append(msgspec.structs.replace(call, gathered=True))
            else:
                kinds.setdefault((causal, folded, split.small), []).extend(some)
    paged = [
        _batch(*kind, kinds[kind], page_tokens, group, window if kind[0] else 0)
        for kind in sorted(kinds)
    ]
    return (*paged, *gathered)


def _cut(span: Span, full: int, parts: int, page_tokens: int) -> list[_Entry]:
    """Return the first `full` pages of a span in `parts`; none is empty."""
    cuts = np.linspace(0, full, parts + 1).round().astype(int)
    return [
        _Entry(span, span.pages[first:end], (end - first) * page_tokens)
        for first, end in itertools.pairwise(cuts.tolist())
        if end > first
    ]


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


class Merge(msgspec.Struct, frozen=True):
    """States of the calls, numbered through, that become those of batch rows `rows` [n].

    `states` [n, most], padded with the number after the last state. Both int64.
    """

    rows: npt.NDArray[np.int64]
    states: npt.NDArray[np.int64]


def merges(batches: Sequence[KernelBatch]) -> tuple[Merge, ...]:
    """Return how states of `batches` combine into those of batch rows: rows with one state first.

    Rows that need less than twice as many states as others are padded to the same number. A chunk
    after a long FP8 prefix has hundreds for a row, other chunks a few.
    """
    rows = np.concatenate([np.empty(0, np.int64), *(batch.rows for batch in batches)])
    order = np.argsort(rows, kind="stable")  # a row's states in the order of calls and entries
    unique, firsts, counts = np.unique(rows[order], return_index=True, return_counts=True)
    _, doublings = np.frexp(counts)
    merged = []
    for doubling in np.unique(doublings).tolist():
        own = doublings == doubling
        slots = np.arange(counts[own].max())
        states = order[np.minimum(firsts[own, None] + slots, len(order) - 1)]
        taken = slots < counts[own, None]
        merged.append(Merge(unique[own], np.where(taken, states, len(rows))))
    return tuple(merged)


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


def contiguous(rows: npt.NDArray[np.int64]) -> slice | None:
    """Return ascending numbers without a gap as a slice, others as None."""
    if not len(rows):
        return slice(0, 0)
    first, count = int(rows[0]), len(rows)
    side_by_side = np.array_equal(rows, np.arange(first, first + count))
    return slice(first, first + count) if side_by_side else None


def indptr(counts: npt.ArrayLike) -> Ints:
    """Return the offsets of consecutive segments with these sizes."""
    sizes = np.asarray(counts)
    offsets = np.zeros(len(sizes) + 1, dtype=np.int32)
    offsets[1:] = sizes.cumsum()
    return offsets
