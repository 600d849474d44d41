"""KV-cache parallelism: partial attention of shared rows, exchanged and merged once per layer.

Rows whose sequence spans groups g0 < g1 < … get from each group the state (o, lse) over the shard
that it holds; every participant receives all of them and merges in ascending group order, so all
hold the same bits (Medha, KV-cache parallelism). What travels between two groups in a layer is one
message each way with the rows that both share. Batches run in number order on every rank, so
exchanges pair up and overlapping sets of groups cannot wait for each other in a circle.

A failed exchange does not end the batch, whose other rows are sound: the column is aborted, so
that every member learns of it, and the shared rows are marked broken. Broken rows are finite but
wrong; the pipe's note row and the shards' vote carry the mark to whoever would sample them.
"""

from __future__ import annotations

import dataclasses

import torch

from medha.errors import EngineError
from medha_worker.attention.interface import Partial
from medha_worker.attention.merge import merge
from medha_worker.parallel.communicator import PeerLost
from medha_worker.parallel.interface import SharedRows
from medha_worker.parallel.mesh import Column


class GroupColumn:
    """One batch's view of a KVP column; implements `interface.KvpColumn`.

    `failure` is the error that broke the shared rows, None while all went well. `column` None: the
    batch came to a rank that lacks its generation.
    """

    def __init__(self, group: int, column: Column | None, failure: PeerLost | None = None) -> None:
        self._group, self._column = group, column
        self.failure = failure
        self._plan: _Plan | None = None

    def merge(
        self, out: torch.Tensor, lse: torch.Tensor, shared: tuple[SharedRows, ...]
    ) -> torch.Tensor:
        """Replace the shared rows of `out`; see `interface.KvpColumn`. Never raises PeerLost."""
        if not shared or self.failure is not None:
            return out
        try:
            return self._merge(out, lse, shared)
        except PeerLost as error:
            self.fail(error)
            return out

    def fail(self, error: PeerLost) -> None:
        """Mark the shared rows broken and leave the generation, so that all members fail now."""
        self.failure = error
        if self._column is not None:
            self._column.abort()

    def _merge(
        self, out: torch.Tensor, lse: torch.Tensor, shared: tuple[SharedRows, ...]
    ) -> torch.Tensor:
        column = self._column
        if column is None or column.communicator is None:
            raise PeerLost(f"rows {shared} span groups: this column has one; form a generation")
        if self._plan is None or self._plan.shared is not shared:
            self._plan = _planned(self._group, column.members, shared, out.device)
        plan = self._plan
        # [shared rows, heads, head_dim + 1]: a row's state in one piece
        own = torch.cat((out[plan.batch].float(), lse[plan.batch].unsqueeze(-1)), dim=-1)
        sends = {column.members.index(g): own[index] for g, index in plan.rows.items()}
        receives = {peer: torch.empty_like(sent) for peer, sent in sends.items()}
        column.communicator.exchange(sends, receives)
        for part in plan.parts:
            states = [
                own[part.own] if group == self._group
                else receives[column.members.index(group)][part.received[group]]
                for group in part.groups
            ]  # fmt: skip
            whole = merge([_state(packed) for packed in states])
            out[plan.batch[part.own]] = whole.out.to(out.dtype)
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Rows that one set of groups shares: where they stand in `_Plan.batch` and in what a peer
    sends."""

    groups: tuple[int, ...]
    own: torch.Tensor
    received: dict[int, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """Which rows go to which group and how the answers are merged; the same for all layers.

    `batch` are the shared rows of the batch, in order; all other indices point into it.
    """

    shared: tuple[SharedRows, ...]
    batch: torch.Tensor
    rows: dict[int, torch.Tensor]
    parts: tuple[_Part, ...]


def _planned(
    group: int, members: tuple[int, ...], shared: tuple[SharedRows, ...], at: torch.device
) -> _Plan:
    """Raises EngineError for rows of strangers."""
    batch: list[int] = []
    rows: dict[int, list[int]] = {}
    own: dict[tuple[int, ...], list[int]] = {}
    received: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for entry in shared:
        if group not in entry.groups or not set(entry.groups) <= set(members):
            raise EngineError(
                f"rows of groups {entry.groups} came to group {group} of members {members}: "
                "all must be members, and this one among them"
            )
        span = range(len(batch), len(batch) + entry.length)
        batch.extend(range(entry.start, entry.start + entry.length))
        groups = tuple(sorted(entry.groups))
        own.setdefault(groups, []).extend(span)
        for peer in groups:
            if peer != group:
                place = rows.setdefault(peer, [])
                into = received.setdefault(groups, {}).setdefault(peer, [])
                into.extend(range(len(place), len(place) + entry.length))
                place.extend(span)
    parts = tuple(
        _Part(
            groups,
            torch.tensor(index, device=at),
            {peer: torch.tensor(place, device=at) for peer, place in received[groups].items()},
        )
        for groups, index in own.items()
    )
    return _Plan(
        shared,
        torch.tensor(batch, device=at),
        {peer: torch.tensor(index, device=at) for peer, index in rows.items()},
        parts,
    )


def _state(packed: torch.Tensor) -> Partial:
    """Contiguous, so that every member merges with the same instructions."""
    return Partial(packed[..., :-1].contiguous(), packed[..., -1].contiguous())
