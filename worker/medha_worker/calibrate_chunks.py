"""Finds into how many parts a prefix is best cut for small chunks on this GPU, by trying.

For each number of rows every cut of a long prefix is timed as the engine would run it, gathers and
merges included; the fastest wins, and of those about as fast the one with the fewest parts, whose
states need the least memory. What wins becomes `attention.splits`' table by way of the profile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from medha.profile import ChunkKernel
from medha_worker.attention.interface import Attention, Span
from medha_worker.attention.splits import Choice

ROWS = (16, 32, 64, 128, 256, 512)
PARTS = (1, 2, 4, 8, 16, 32)
# A cut with more parts has to be faster by so much.
WORTH = 0.02

Timer = Callable[[Callable[[], object]], float]
Backend = Callable[[Sequence[Choice]], Attention]


def device_times_s(call: Callable[[], object], repeats: int) -> list[float]:
    """What the device takes for a call, by its own clock; the first one is not counted."""
    call()
    found: list[float] = []
    for _ in range(repeats):
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        began.record()
        call()
        ended.record()
        ended.synchronize()
        found.append(float(began.elapsed_time(ended)) / 1e3)
    return found


def least_s(call: Callable[[], object]) -> float:
    """The shortest of some calls: what disturbs a machine only adds."""
    return min(device_times_s(call, 5))


def chunk_kernels(
    backend: Backend, pool: torch.Tensor, heads: int, dtype: torch.dtype, timer: Timer = least_s,
    rows: Sequence[int] = ROWS, parts: Sequence[int] = PARTS,
) -> tuple[ChunkKernel, ...]:  # fmt: skip
    """The best cut for each number of `rows` after a prefix that fills `pool` [pages, 2, kv_heads,
    page_tokens, head_dim]. `backend` makes an attention with a table."""
    pages, _, kv_heads, T, head_dim = pool.shape
    ids = np.random.default_rng(0).permutation(pages).astype(np.int64)
    found = []
    for count in rows:
        held = (pages - -(-count // T)) * T
        if held < T * max(parts):
            break
        q = torch.ones(count, heads, head_dim, dtype=dtype, device=pool.device)
        k = torch.zeros(count, kv_heads, head_dim, dtype=pool.dtype, device=pool.device)
        span = Span(0, count, held, ids, True)
        seconds: dict[Choice, float] = {}
        for cut, packed in itertools.product(parts, (False, True)):
            if packed and (cut == 1 or heads == kv_heads):
                continue
            choice = Choice(count, cut, packed)
            plan = backend((choice,)).plan([span])
            seconds[choice] = timer(lambda plan=plan, q=q, k=k: plan.run(q, k, k, pool))  # type: ignore[misc]
        found.append(best(seconds))
    return tuple(
        ChunkKernel(heads=heads, kv_heads=kv_heads, rows=each.rows, parts=each.parts,
                    packed=each.packed) for each in found
    )  # fmt: skip


def best(seconds: dict[Choice, float]) -> Choice:
    """The fastest, or what has fewer parts and takes next to no longer."""
    limit = min(seconds.values()) * (1 + WORTH)
    near = [choice for choice, took_s in seconds.items() if took_s <= limit]
    return min(near, key=lambda choice: (choice.parts, choice.packed, seconds[choice]))
