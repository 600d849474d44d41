"""KV-cache parallelism: partial attention of shared rows, exchanged and merged once per layer.

Rows of a sequence that spans groups g0 < g1 < … need from each group the state (o, lse) over its
shard. Every participant receives all states and merges them in ascending group order, so all hold
the same bits (Medha, KV-cache parallelism). Two groups exchange one message each way per layer.
Batches run in number order on every rank, so overlapping sets of groups cannot deadlock.

A failed exchange does not end the batch, whose other rows are sound. The column is aborted, so that
every member notices, and the shared rows are marked broken: finite but wrong. The pipeline's note
row and the shards' vote carry the mark to the rank that would sample them.
"""

from __future__ import annotations

import dataclasses

import torch

from medha.errors import EngineError
from medha_worker.attention.kernel_interface import Partial
from medha_worker.attention.merge import merge
from medha_worker.parallel.collectives import PeerLost, SharedRows
from medha_worker.parallel.mesh import Column


class GroupColumn:
    """A batch's view of a KVP column; implements `collectives.KvpColumn`.

    `failure` is the error that broke the shared rows, if any. `column` is None if this rank lacks
    the batch's generation.
    """

    def __init__(self, group: int, column: Column | None, failure: PeerLost | None = None) -> None:
        self._group, self._column = group, column
        self.failure = failure
        self._plan: _Plan | None = None

    def merge(
        self, out: torch.Tensor, lse: torch.Tensor, shared: tuple[SharedRows, ...]
    ) -> torch.Tensor:
        """Replace the shared rows of `out`; see `collectives.KvpColumn`. Never raises PeerLost."""
        if not shared or self.failure is not None:
            return out
        try:
            return self._merge(out, lse, shared)
        except PeerLost as error:
            self.fail(error)
            return out

    def fail(self, error: PeerLost) -> None:
        """Mark the shared rows broken and abort the generation, so that all members fail now."""
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
                own[part.own]
                if group == self._group
                else receives[column.members.index(group)][part.received[group]]
                for group in part.groups
            ]
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
    """Rows to send to each group and how to merge the answers; the same for all layers.

    `batch` holds the shared rows of the batch, in order; all other indices point into it.
    """

    shared: tuple[SharedRows, ...]
    batch: torch.Tensor
    rows: dict[int, torch.Tensor]
    parts: tuple[_Part, ...]


def _planned(
    group: int, members: tuple[int, ...], shared: tuple[SharedRows, ...], at: torch.device
) -> _Plan:
    """Plan the exchange of `shared` rows. Raises EngineError for rows of groups that are not
    members."""
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
    """Unpack a state into contiguous tensors, so that every member merges with the same
    instructions."""
    return Partial(packed[..., :-1].contiguous(), packed[..., -1].contiguous())
