"""Cases for paged attention with float32 answers, for tests and benchmarks on a device.

Pages lie in random order in a pool whose unused slots are NaN, so a kernel that reads too far gives
NaN. Answers come from plain torch (`attention.reference`) and the same stored numbers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from medha.batch import Chunk
from medha_worker.attention.flashinfer_plan import Geometry
from medha_worker.attention.fp8_scales import FP8, Scales
from medha_worker.attention.kernel_interface import Partial, Span
from medha_worker.attention.reference import ReferenceAttention
from medha_worker.inputs import seen
from medha_worker.sequences import PageTable


class Work(msgspec.Struct, frozen=True):
    """A chunk: `length` rows after `held` earlier tokens of this group.

    The held tokens fill their pages unless the chunk's own keys are here (`tail`).
    """

    held: int
    length: int
    tail: bool = True


class Case(msgspec.Struct, frozen=True):
    """Chunks of a batch, in a layer with a window of `window` tokens (0: none)."""

    name: str
    works: tuple[Work, ...]
    window: int = 0

    @property
    def rows(self) -> int:
        return sum(work.length for work in self.works)


# Every path of the CUDA backend, and their mixtures.
CASES = (
    Case("one decode", (Work(5000, 1),)),
    Case("decodes of all lengths", tuple(Work(n, 1) for n in (0, 1, 63, 64, 127, 1000, 70_000))),
    Case("decodes apart from each other", (Work(700, 1), Work(100, 5), Work(64, 1), Work(3, 2))),
    Case("a fresh chunk", (Work(0, 300),)),
    Case("a chunk in one entry", (Work(4100, 700),)),
    Case("heads folded, 16 parts", (Work(200_003, 17),)),
    Case("heads folded, 8 parts", (Work(150_000, 64),)),
    Case("4 parts", (Work(100_001, 128),)),
    Case("2 parts", (Work(90_000, 256),)),
    Case("gathered keys, in parts too", (Work(5003, 1600), Work(9, 1), Work(150_000, 1536))),
    Case(
        "shards of a shared prompt",
        (
            Work(64 * 300, 40, False),
            Work(0, 3, False),
            Work(64 * 9, 1, False),
            Work(64 * 2, 600, False),
        ),
    ),
    Case(
        "everything at once",
        (
            Work(9000, 1),
            Work(120_000, 33),
            Work(70, 1),
            Work(0, 65),
            Work(64 * 900, 20, False),
            Work(40_000, 200),
            Work(5, 1),
        ),
    ),
    Case("a window", (Work(9000, 500), Work(9000, 1), Work(20, 30), Work(100, 1)), 1024),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Laid:
    """A case on a device: inputs of attention's `plan` and `run`. The last page is the spare,
    all zero."""

    spans: list[Span]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pool: torch.Tensor
    scales: Scales | None

    def expected(self, geometry: Geometry) -> Partial:
        """Return the states in float32, base e."""
        G = geometry
        plain = ReferenceAttention(G.heads, G.kv_heads, G.head_dim, G.page_tokens, tile_pages=32)
        plan = plain.plan(self.spans)
        return plan.run(self.q.float(), self.k, self.v, self.pool, self.scales)


def lay(case: Case, geometry: Geometry, device: torch.device, seed: int = 0) -> Laid:
    """Return `case` with random numbers; values have a mean, so that lossy sums show."""
    G, T = geometry, geometry.page_tokens
    dice = torch.Generator(device).manual_seed(seed)
    tokens = [work.held + (work.length if work.tail else 0) for work in case.works]
    counts = [-(-count // T) for count in tokens]
    order = np.random.default_rng(seed).permutation(sum(counts) + 3)
    shape = (len(order) + 1, 2, G.kv_heads, T, G.head_dim)
    scales = None
    if G.kv_dtype == FP8:
        powers = torch.arange(G.kv_heads, device=device).remainder(3).float() - 5
        scales = Scales(powers.exp2(), (powers + 1).exp2(), (powers - 1).exp2())
    drawn = torch.randn(shape, generator=dice, device=device, dtype=G.dtype)
    drawn[:, 1] += 0.5
    pool = drawn if scales is None else _narrow(drawn, scales)
    as_bytes = pool.view(torch.uint8) if scales is not None else pool
    nothing = 0x7F if scales is not None else float("nan")
    q = torch.randn(case.rows, G.heads, G.head_dim, generator=dice, device=device, dtype=G.dtype)
    k, v = torch.zeros(2, case.rows, G.kv_heads, G.head_dim, device=device).to(G.kv_dtype)
    owned = torch.zeros(len(order) + 1, T, dtype=torch.bool)
    spans, row, first = [], 0, 0
    for work, count, total in zip(case.works, counts, tokens, strict=True):
        ids, first = order[first : first + count].astype(np.int64), first + count
        places = np.arange(total)
        owned[torch.from_numpy(ids[places // T]), torch.from_numpy(places % T)] = True
        if work.tail:
            own = places[work.held :]
            at = (torch.from_numpy(ids[own // T]).to(device), torch.from_numpy(own % T).to(device))
            rows = as_bytes.permute(0, 3, 1, 2, 4)[at]  # [n, 2, kv_heads, head_dim]
            for kept, mine in zip((k, v), rows.unbind(1), strict=True):
                target = kept.view(torch.uint8) if scales is not None else kept
                target[row : row + work.length] = mine
        span = Span(row, work.length, work.held, ids, work.tail)
        chunk = Chunk(0, work.held, work.length, (0,), 0)
        table = PageTable(enumerate(ids.tolist()))
        spans.append(seen(span, chunk, table, case.window, T))
        row += work.length
    as_bytes.permute(0, 3, 1, 2, 4)[~owned.to(device)] = nothing
    as_bytes[-1] = 0
    return Laid(spans, q, k, v, pool, scales)


def _narrow(drawn: torch.Tensor, scales: Scales) -> torch.Tensor:
    """Convert [pages, 2, kv_heads, page_tokens, head_dim] to FP8 numbers."""
    pages, _, heads, tokens, dim = drawn.shape
    rows = drawn.permute(0, 3, 1, 2, 4).reshape(-1, 2 * heads, dim)
    kept = scales.store(rows).view(torch.uint8).view(pages, tokens, 2, heads, dim)
    return kept.permute(0, 2, 3, 1, 4).contiguous().view(FP8)


class Off(NamedTuple):
    """Error of states: that of a row and head of `out` relative to its size (largest, and root mean
    square), and the largest of `lse`, in base e."""

    worst: float
    typical: float
    lse: float

    def within(self, limit: Off) -> bool:
        return all(mine <= most for mine, most in zip(self, limit, strict=True))


# What bfloat16 allows, and what queries and weights in FP8 do, with three bits of mantissa: a row
# of few keys may be well off, as sums over keys level it out.
EXACT, NARROW = Off(1e-2, 4e-3, 5e-3), Off(0.3, 0.04, 0.35)


def limit(case: Case, geometry: Geometry) -> Off:
    """Return the tolerated error for the states of a case."""
    return NARROW if geometry.narrow_queries(case.window) else EXACT


def difference(actual: Partial, expected: Partial) -> Off:
    """Return the error; NaN, which is within no limit, if a row without keys is not empty."""
    natural, empty = actual.natural(), expected.lse.isneginf()
    if not torch.equal(natural.lse.isneginf(), empty) or bool(actual.out[empty].any()):
        return Off(math.nan, math.nan, math.nan)
    if bool(empty.all()):
        return Off(0.0, 0.0, 0.0)
    out, exact = actual.out.float()[~empty], expected.out[~empty]
    off = (out - exact).norm(dim=-1) / exact.norm(dim=-1)
    lse = (natural.lse - expected.lse)[~empty].abs().max()
    return Off(float(off.max()), float(off.square().mean().sqrt()), float(lse))


def poison(device: torch.device, of_bytes: int = 1 << 30) -> None:
    """Fill the allocator's next blocks with NaN, so that no stale result passes."""
    torch.full((of_bytes // 4,), float("nan"), device=device)
