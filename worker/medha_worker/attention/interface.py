"""What the model asks of attention: partial states over one group's paged KV, and nothing else.

A step's chunks become spans; a kernel plans them once per step and runs the plan once per layer.
For a span of `length` rows whose group holds `held` of the sequence's earlier tokens:

    keys    0 ................ held ............ held + length
            | pages, no mask   | the chunk itself (tail group only)
    row i   sees them all      | sees keys up to held + i: causal, aligned to the bottom right

A group that is not the tail has no own part; one that holds nothing contributes (0, −∞). Keys are
stored after their rotation, so their order does not matter: a shard may be any set of pages.

In a layer with a window a row sees only so many tokens back, itself included; there a span holds
the pages that some row may see, and tells where they stand (`Sight`). This is the one mask that
kernels know beside the causal one.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from medha_worker.attention.scales import Scales


class LogBase(enum.Enum):
    """Base of a log-sum-exp. FlashInfer's is 2; torch and FlashAttention use e."""

    E = math.e
    TWO = 2.0


@dataclasses.dataclass(slots=True)
class Partial:
    """Attention over a part of the keys, normalised over that part.

    `out` [rows, heads, head_dim] float32, or in the type that the kernel computes in, zero where
    the part is empty; `lse` [rows, heads] float32 in base `base`, −∞ where the part is empty.
    """

    out: torch.Tensor
    lse: torch.Tensor
    base: LogBase = LogBase.E

    def natural(self) -> Partial:
        """The same state with its `lse` in base e."""
        if self.base is LogBase.E:
            return self
        return Partial(self.out, self.lse * math.log(self.base.value), LogBase.E)


def unfilled(q: torch.Tensor) -> Partial:
    """Room for the states of queries `q` [rows, heads, head_dim]."""
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    return Partial(out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device))


class Sight(msgspec.Struct, frozen=True):
    """How far the rows of a span see: row i those at positions above position + i − window.

    `position`: of the first row in its sequence; `logical`: numbers of the span's pages (int64,
    ascending): page n holds positions from n × page_tokens on.
    """

    window: int
    position: int
    logical: npt.NDArray[np.int64]

    def hidden(self, page_tokens: int) -> int:
        """Tokens at the beginning of the first page that the first row does not see."""
        if not len(self.logical):
            return 0
        return max(0, self.position - self.window + 1 - int(self.logical[0]) * page_tokens)


class Span(msgspec.Struct, frozen=True):
    """The rows of one chunk, and the own group's pages of its sequence.

    `start`, `length`: batch rows [start, start + length). `held`: earlier tokens in this group.
    `pages`: page ids (int64) in ascending logical order; every page is full but perhaps the last;
    in the tail group they also hold the chunk, which is written before attention runs. `sight`:
    None where every row sees all of them.
    """

    start: int
    length: int
    held: int
    pages: npt.NDArray[np.int64]
    tail: bool
    sight: Sight | None = None


class Plan(Protocol):
    """One step's attention, planned once, run in every layer."""

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        scales: Scales | None = None,
    ) -> Partial:
        """Partial states of all rows over the own group's shard.

        `q` [rows, heads, head_dim]; `k`, `v` [rows, kv_heads, head_dim], the rows' own as the pool
        keeps them; `pool` [pages, 2, kv_heads, page_tokens, head_dim], own rows of tail spans
        written; `scales` of what `pool`, `k` and `v` hold, where that is FP8.
        """
        ...


class Attention(Protocol):
    """A kernel family: turns the spans of a step into a plan."""

    def plan(self, spans: Sequence[Span]) -> Plan: ...
