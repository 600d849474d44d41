"""What the model asks of its peers; the model sees these two nouns and no process group.

A rank alone in its dimension gets the solo twins below: one code path serves all layouts.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch

from medha.errors import EngineError


class TensorParallel(Protocol):
    """The shards of one stage (TP)."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over shards, in place; returns `x`."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the shards' last dimensions in shard order."""
        ...


class SharedRows(msgspec.Struct, frozen=True):
    """Rows of a batch whose attention spans several groups: batch rows [start, start + length)."""

    start: int
    length: int
    groups: tuple[int, ...]


class KvpColumn(Protocol):
    """The KVP groups' ranks at this (stage, shard): partial states exchanged and merged exactly."""

    def merge(
        self, out: torch.Tensor, lse: torch.Tensor, shared: tuple[SharedRows, ...]
    ) -> torch.Tensor:
        """Replace the shared rows of `out` by the attention over all their groups' shards.

        `out` [rows, heads, head_dim]; `lse` [rows, heads], natural-log base, float32, −∞ where the
        own shard is empty. Partials travel once per call, grouped by peer, and are merged in
        ascending group order, so every participant gets bit-equal rows.
        """
        ...


class SoloTensorParallel:
    """TP of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


class SoloColumn:
    """A KVP column of one group: no row is ever shared."""

    def merge(
        self, out: torch.Tensor, lse: torch.Tensor, shared: tuple[SharedRows, ...]
    ) -> torch.Tensor:
        if shared:
            raise EngineError(f"rows {shared} span groups: this column has one; form a generation")
        return out
