"""Interface between the model and attention kernels: partial states over one group's paged KV.

Chunks of a step become spans; a kernel plans them once per step and runs the plan in every layer.
For a span of `length` rows whose group holds `held` earlier tokens of the sequence:

    keys    0 ................ held ............ held + length
            | pages, no mask   | the chunk itself (tail group only)
    row i   sees them all      | sees keys up to held + i: causal, aligned to the bottom right

Only the tail group has the chunk's own keys; a group that holds nothing contributes (0, −∞). Keys
are stored rotated, so their order does not matter: a shard may be any set of pages. In a layer with
a window, a row sees that many tokens back, itself included; its span holds only pages in sight and
their positions (`Sight`). Kernels know no other mask than these two.

With latent attention, pages have one plane, of keys whose first entries are the values too.
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

from medha_worker.attention.fp8_scales import Scales


class LogBase(enum.Enum):
    """Base of a log-sum-exp: FlashInfer uses 2; torch and FlashAttention use e."""

    E = math.e
    TWO = 2.0


@dataclasses.dataclass(slots=True)
class Partial:
    """Attention over a part of the keys, normalised over that part.

    `out` [rows, heads, head_dim, or a latent's rank] float32, or the kernel's compute type, zero if
    the part is empty; `lse` [rows, heads] float32 in base `base`, −∞ if the part is empty.
    """

    out: torch.Tensor
    lse: torch.Tensor
    base: LogBase = LogBase.E

    def natural(self) -> Partial:
        """Return the same state with its `lse` in base e."""
        if self.base is LogBase.E:
            return self
        return Partial(self.out, self.lse * math.log(self.base.value), LogBase.E)

    def cut(self, width: int) -> Partial:
        """Return the state of the first `width` entries of the values."""
        if width == self.out.shape[-1]:
            return self
        return Partial(self.out[..., :width], self.lse, self.base)


class Sight(msgspec.Struct, frozen=True):
    """Window of a span: row i sees positions above position + i − window.

    `position`: of the first row in its sequence. `logical`: logical numbers of the span's pages
    (int64, ascending); page n holds positions from n × page_tokens on.
    """

    window: int
    position: int
    logical: npt.NDArray[np.int64]

    def hidden(self, page_tokens: int) -> int:
        """Return the tokens of the first page that lie before the first row's window."""
        if not len(self.logical):
            return 0
        return max(0, self.position - self.window + 1 - int(self.logical[0]) * page_tokens)


class Span(msgspec.Struct, frozen=True):
    """Rows of a chunk, and the own group's pages of its sequence.

    `start`, `length`: batch rows [start, start + length). `held`: earlier tokens in this group.
    `pages`: page ids (int64) in ascending logical order, all full but perhaps the last; in the tail
    group they include the chunk, which is written before attention runs. `sight`: the window; None
    if every row sees all pages.
    """

    start: int
    length: int
    held: int
    pages: npt.NDArray[np.int64]
    tail: bool
    sight: Sight | None = None


class AttentionPlan(Protocol):
    """A step's attention, planned once and run in every layer."""

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        scales: Scales | None = None,
    ) -> Partial:
        """Return partial states of all rows over the own group's shard, valid until the next run.

        `q` [rows, heads, head_dim]; `k`, `v` [rows, kv_heads, head_dim] are the rows' own, in the
        pool's type; `pool` [pages, planes, kv_heads, page_tokens, head_dim], with rows of tail
        spans written; with one plane, `k` and `v` are the same; `scales` of `pool`, `k` and `v`,
        if they are FP8.
        """
        ...


class Attention(Protocol):
    """A kernel family, which plans the spans of a step."""

    def plan(self, spans: Sequence[Span]) -> AttentionPlan: ...
