"""Chunks of several tokens on a CPU: the kernel of chunks.c, where no row has a window.

Like those of `native_singles`, all its pointers refer to arrays checked here.
"""

from __future__ import annotations

import ctypes
import itertools
import pathlib
from collections.abc import Sequence

import numpy as np
import torch

from medha.errors import EngineError
from medha_worker.attention.kernel_interface import Partial, Span
from medha_worker.attention.native_singles import (
    NUMBER,
    POINTER,
    NativeKernel,
    heads_together,
    load,
)

LIBRARY = pathlib.Path(__file__).with_name("chunks.kernel.so")
ARGUMENTS = (
    *(POINTER, NUMBER, NUMBER, NUMBER, POINTER, NUMBER),
    *(POINTER, POINTER, POINTER, POINTER, NUMBER),
)
# QUERIES of chunks.c, and its largest head size: at least a block fits into a PART.
QUERIES, WIDEST = 6, 512
# Queries times tokens above which a second thread pays off.
THREADED = 1 << 18

_NONE = np.empty(0, dtype=np.int64)


class _Plan(ctypes.Structure):
    """`struct plan` of chunks.c."""

    _fields_ = (
        *((name, POINTER) for name in ("row", "length", "held", "tail", "first", "pages")),
        *(
            (name, NUMBER)
            for name in ("heads", "kv_heads", "head_dim", "page_tokens", "narrow", "planes")
        ),
        ("scale", ctypes.c_double),
    )


class NativeChunks:
    """The compiled kernel for chunks over the pages of `kernel`, if it `serves` them."""

    def __init__(self, kernel: NativeKernel) -> None:
        self.kernel = kernel
        self.call = load(LIBRARY, "medha_chunks", *ARGUMENTS)

    @staticmethod
    def serves(head_dim: int) -> bool:
        """Return True if the kernel supports heads of that size, which singles support."""
        return head_dim <= WIDEST

    def plan(self, spans: Sequence[Span]) -> NativeChunkPlan:
        """Plan spans without windows. Raises EngineError for a span that lacks pages."""
        K = self.kernel
        for span in spans:
            tokens = span.held + span.length * span.tail
            if span.sight is not None or span.start < 0 or span.length < 1 or span.held < 0:
                raise EngineError(
                    f"a span of {span.length} rows from row {span.start} after {span.held} tokens:"
                    " expected rows without a window; plan others separately"
                )
            if -(-tokens // K.page_tokens) > len(span.pages):
                raise EngineError(
                    f"a span of {span.length} rows sees {tokens} tokens on {len(span.pages)} pages"
                    f" of {K.page_tokens}: expected the pages of all its tokens"
                )
        return NativeChunkPlan(self, spans)


class NativeChunkPlan:
    """A step's chunks, planned for every layer."""

    def __init__(self, chunks: NativeChunks, spans: Sequence[Span]) -> None:
        self.chunks, K = chunks, chunks.kernel
        self._rows_needed = max((span.start + span.length for span in spans), default=0)
        counts = [len(span.pages) for span in spans]
        # Arrays that the plan points to must live as long as the plan.
        self._arrays = (
            *(
                np.array(column, dtype=np.int64)
                for column in (
                    [span.start for span in spans],
                    [span.length for span in spans],
                    [span.held for span in spans],
                    [span.tail for span in spans],
                    np.cumsum([0, *counts])[:-1],
                )
            ),
            np.concatenate([_NONE, *(span.pages for span in spans)]),
        )
        ids = self._arrays[-1]
        self._pages = range(int(ids.min(initial=0)), int(ids.max(initial=-1)) + 1)
        self._count = len(spans)
        self._plan = _Plan(
            *(array.ctypes.data for array in self._arrays),
            K.heads,
            K.kv_heads,
            K.head_dim,
            K.page_tokens,
            K.dtype == torch.bfloat16,
            K.planes,
            K.scale,
        )
        self.parts = self._split(spans, torch.get_num_threads())

    def fill(self, q: torch.Tensor, pool: torch.Tensor, into: Partial) -> None:
        """Store the spans' states in `into`; see `kernel_interface.AttentionPlan`. Other rows are
        untouched.

        Raises EngineError if a tensor differs from the plan.
        """
        q, K = heads_together(q), self.chunks.kernel
        K.check(q, pool, into, self._rows_needed, self._pages)
        state = torch.empty(*into.lse.shape, 2)
        addresses = pool.data_ptr(), into.out.data_ptr(), into.lse.data_ptr(), state.data_ptr()
        q_at, stride, plan = q.data_ptr(), q.stride(0), ctypes.byref(self._plan)

        def part(first: int, end: int) -> None:
            self.chunks.call(plan, self._count, first, end, q_at, stride, *addresses, K.lanes)

        others = [K.threads.submit(part, *border) for border in self.parts[1:]]
        part(*self.parts[0])
        for other in others:
            other.result()

    def _split(self, spans: Sequence[Span], threads: int) -> list[tuple[int, int]]:
        """Split units of QUERIES queries into parts of about equal work."""
        K = self.chunks.kernel
        queries = np.array([span.length * (K.heads // K.kv_heads) for span in spans])
        ends = np.cumsum(K.kv_heads * -(-queries // QUERIES))
        seen = [span.held + span.tail * (span.length + 1) / 2 for span in spans]
        work = np.cumsum(K.kv_heads * queries * seen)
        parts = max(min(threads, int(work[-1]) // THREADED), 1)
        shares = work[-1] * np.arange(1, parts) / parts
        inner = np.interp(shares, [0, *work], [0, *ends]).astype(int).tolist()
        return [(a, b) for a, b in itertools.pairwise([0, *inner, int(ends[-1])]) if a < b]
