"""Interfaces between the model and its peer ranks: TP shards and the KVP column.

The model sees no process group. A rank that is alone in a dimension gets the solo class below, so
one code path serves all layouts.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch

from medha.errors import EngineError


class PeerLost(EngineError):
    """A peer rank is gone or silent, or its communicator was aborted."""


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
    """Batch rows [start, start + length), whose attention spans several groups."""

    start: int
    length: int
    groups: tuple[int, ...]


class KvpColumn(Protocol):
    """The KVP groups' ranks at this (stage, shard): exchange partial states and merge them
    exactly."""

    def merge(
        self, out: torch.Tensor, lse: torch.Tensor, shared: tuple[SharedRows, ...]
    ) -> torch.Tensor:
        """Replace the shared rows of `out` by attention over all their groups' shards.

        `out` [rows, heads, head_dim]; `lse` [rows, heads], natural-log base, float32, −∞ where the
        own shard is empty. Partial states are sent once per call, grouped by peer, and merged in
        ascending group order, so all participants get bit-equal rows.
        """
        ...


class SoloTensorParallel:
    """TP of one shard."""

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
