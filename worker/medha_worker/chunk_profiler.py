"""Measure how best to split a prefix for small chunks on this GPU.

For each row count, every split of a long prefix is timed as the engine would run it, including
gathers and merges. The fastest wins; among those about as fast, the one with the fewest parts,
whose states need the least memory. The profile carries the result to the table in
`attention.kv_splits`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from medha.profile import ChunkKernel
from medha_worker.attention.kernel_interface import Attention, Span
from medha_worker.attention.kv_splits import PrefixSplit

ROWS = (16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280)
PARTS = (1, 2, 3, 4, 8, 16, 32)
# A split with more parts must be faster by this fraction.
WORTH = 0.02

Timer = Callable[[Callable[[], object]], float]
Backend = Callable[[Sequence[PrefixSplit]], Attention]


def device_times_s(call: Callable[[], object], repeats: int) -> list[float]:
    """Return device times of `repeats` calls, after one untimed call."""
    call()
    times_s: list[float] = []
    for _ in range(repeats):
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        began.record()
        call()
        ended.record()
        ended.synchronize()
        times_s.append(float(began.elapsed_time(ended)) / 1e3)
    return times_s


def least_s(call: Callable[[], object]) -> float:
    """Return the shortest of five calls: disturbances only add time."""
    return min(device_times_s(call, 5))


def chunk_kernels(
    backend: Backend,
    pool: torch.Tensor,
    heads: int,
    dtype: torch.dtype,
    timer: Timer = least_s,
    rows: Sequence[int] = ROWS,
    parts: Sequence[int] = PARTS,
) -> tuple[ChunkKernel, ...]:
    """Return the best split for each row count, after a prefix that fills `pool`.

    `pool` is [pages, 2, kv_heads, page_tokens, head_dim]. `backend` makes an attention with a
    table.
    """
    pages, _, kv_heads, T, head_dim = pool.shape
    ids = np.random.default_rng(0).permutation(pages).astype(np.int64)
    splits = []
    for count in rows:
        held = (pages - -(-count // T)) * T
        if held < T * max(parts):
            break
        q = torch.ones(count, heads, head_dim, dtype=dtype, device=pool.device)
        k = torch.zeros(count, kv_heads, head_dim, dtype=pool.dtype, device=pool.device)
        span = Span(0, count, held, ids, True)
        seconds: dict[PrefixSplit, float] = {}
        for cut, packed in itertools.product(parts, (False, True)):
            if packed and (cut == 1 or heads == kv_heads):
                continue
            choice = PrefixSplit(count, cut, packed)
            plan = backend((choice,)).plan([span])
            seconds[choice] = timer(lambda plan=plan, q=q, k=k: plan.run(q, k, k, pool))  # type: ignore[misc]
        splits.append(best(seconds))
    return tuple(
        ChunkKernel(
            heads=heads, kv_heads=kv_heads, rows=split.rows, parts=split.parts, packed=split.packed
        )
        for split in splits
    )


def best(seconds: dict[PrefixSplit, float]) -> PrefixSplit:
    """Return the split with the fewest parts among those within `WORTH` of the fastest."""
    limit = min(seconds.values()) * (1 + WORTH)
    near = [choice for choice, took_s in seconds.items() if took_s <= limit]
    return min(near, key=lambda choice: (choice.parts, choice.packed, seconds[choice]))
