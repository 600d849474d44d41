"""Projections around latent attention (see `checkpoints.latent_attention` for the formulas).

The rows that attention takes are a query of every head of this shard, absorbed through W_UK, and
after them what pages keep of the token: its latent and its rotated key, the same on every shard.
"""

from __future__ import annotations

import dataclasses

import torch

from medha_worker.model.layers import Arithmetic, Projection
from medha_worker.model.widened_linear import products_of_each


@dataclasses.dataclass(frozen=True, slots=True)
class LatentProjections:
    """A shard's weights between a layer's first product and its attention, and after that.

    The first product gives queries, or their latents if there is `query_up` [q_rank, heads ·
    (nope + rope)] with its `query_norm`, and then the token's latent and key. `key_up` [heads,
    nope, rank] is W_UK, `value_up` [heads, rank, value] is W_UV; `latent_norm` [rank].
    """

    rope_dim: int
    latent_norm: torch.Tensor
    key_up: torch.Tensor
    value_up: torch.Tensor
    query_norm: torch.Tensor | None = None
    query_up: Projection | None = None

    def rows(
        self, projected: torch.Tensor, turns: torch.Tensor, arithmetic: Arithmetic
    ) -> torch.Tensor:
        """Return [rows, heads + 1, rank + rope] from the first product; `arithmetic` is that of
        latents' norms."""
        heads, nope, rank = self.key_up.shape
        count, queries = len(projected), projected.shape[1] - rank - self.rope_dim
        query, latent = projected[:, :queries], projected[:, queries : queries + rank]
        if self.query_up is not None and self.query_norm is not None:
            query = self.query_up(arithmetic.norm(query.contiguous(), self.query_norm))
        query = query.reshape(count, heads, -1)
        turned = projected.new_empty(count, heads + 1, self.rope_dim)
        turned[:, :heads] = query[..., nope:]
        turned[:, heads] = projected[:, queries + rank :]
        arithmetic.rotate(turned, heads, turns)
        rows = projected.new_empty(count, heads + 1, rank + self.rope_dim)
        absorbed = rows[:, :heads, :rank].transpose(0, 1)
        products_of_each(query[..., :nope].transpose(0, 1), self.key_up, absorbed)
        rows[:, heads, :rank] = arithmetic.norm(latent.contiguous(), self.latent_norm)
        rows[..., rank:] = turned
        return rows

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Return heads' outputs [rows, heads · value] from their sums of latents [rows, heads ·
        rank]."""
        heads, rank, value = self.value_up.shape
        sums = attended.view(-1, heads, rank).transpose(0, 1)
        out = attended.new_empty(len(attended), heads, value)
        products_of_each(sums, self.value_up, out.transpose(0, 1))
        return out.flatten(1)
